"""Clover: a recurrent head, whose state takes in every guessed token before it guesses the next one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cosine_similarity, rms_norm

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied, floating

from ..heads.context import ContextLayer, context_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import Guess, TrainedHead
from ..heads.parts import Held, LayerShape


@dataclass(slots=True)
class _Memory:
    """held: keys and values of the augmenting layer. first: [1, hidden], the state after the text.

    rows: [m, hidden], the states after the nodes.
    """

    held: Held
    first: torch.Tensor
    rows: torch.Tensor

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        return _Memory(deepcopy(self.held, memo), self.first, self.rows[:0])


class CloverHead(DraftHead):
    """A recurrent state that starts from one layer over the target's states and reads a token per step.

    A token adds its values, as far as the state's queries point where its keys do. State and token vectors, which are
    rows of the vocabulary projection, have root mean square 1 to begin with: they differ by orders of magnitude.
    """

    kind = "clover"

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self._augmenting = ContextLayer(self.parts, "layer.", LayerShape(**trained.settings["layer"]))
        self._gates: int = trained.settings["gates"]

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (-1,)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        hidden, random = model.config.hidden_size, torch.Generator().manual_seed(seed)
        shape, tensors = context_layer(model, silent=False)
        for name, begun in (
            ("query", torch.eye(hidden, dtype=torch.float32, device="cpu")),
            ("key", torch.eye(hidden, dtype=torch.float32, device="cpu")),
            ("value", 0.0),
        ):
            tensors[f"{name}.weight"] = begun + 0.01 * torch.rand(
                hidden, hidden, generator=random, dtype=torch.float32, device="cpu"
            )
        for number in range(cls.taught):
            tensors[f"head.{number}.weight"] = torch.zeros(hidden, hidden, dtype=torch.float32, device="cpu")
            tensors[f"head.{number}.bias"] = torch.zeros(hidden, dtype=torch.float32, device="cpu")
        tensors["state_norm.weight"] = torch.ones(hidden, dtype=torch.float32, device="cpu")
        tensors["norm.weight"] = copied(model.weights.norm)
        gates = gcd(model.config.num_heads, hidden)
        return tensors, {"heads": cls.taught, "gates": gates, "layer": asdict(shape)}

    def begin(self) -> _Memory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return _Memory(self._augmenting.begin(like), like, like[:0])

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        begun = _unit(self._augmenting.read(memory.held, states[-1], positions))
        memory.first, memory.rows = self._after(begun, tokens[-1:]), memory.rows[:0]
        return self.project(self._spoken(memory.first, 0))[0]

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        known = memory.rows[: mask.shape[1] - len(tokens)]
        found = self._after(torch.cat((memory.first, known))[to_device(above + 1, tokens.device)], tokens)
        memory.rows = torch.cat((known, found))
        return self.project(self._spoken(found, int(depths[0])))

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        b, n, _ = states[-1].shape
        state, guesses = _unit(self._augmenting.unroll(states[-1])), []
        for step in range(steps):
            state = self._after(state, tokens[:, step : step + n].flatten())
            guesses.append(Guess(self._spoken(state, step).view(b, n, -1), state.view(b, n, -1)))
        return guesses

    def _after(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States [n, hidden] that have taken in the tokens [n]."""
        vectors = _unit(floating(self.model.projection(tokens)).weight.to(self.dtype))
        asked = self.parts.norm("state_norm", state, self._augmenting.shape.eps)
        queries, keys, values = (
            self.parts.linear(name)(rows).view(len(rows), self._gates, -1)
            for name, rows in (("query", asked), ("key", vectors), ("value", vectors))
        )
        gate = cosine_similarity(queries, keys, dim=-1)[..., None]
        return state + (gate * values).flatten(1)

    def _spoken(self, state: torch.Tensor, number: int) -> torch.Tensor:
        return self.parts.norm("norm", self.parts.block(f"head.{number}", state), self._augmenting.shape.eps)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rms_norm(rows, rows.shape[-1:], eps=1e-12)


@register(
    "clover",
    paper="Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind clover",),
)
@dataclass(frozen=True)
class Clover(HeadDrafter):
    """Drafts by a recurrent state over the target's last hidden states that reads each guessed token.

    One more layer over the text begins the state; then a guess costs two small products and no attention. All places
    share the target's vocabulary projection. For the few nodes a text gets in large batches the published tree is
    `tree_policy=clover`. Scope: the request; memory: keys and values of one layer.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head` or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = CloverHead
