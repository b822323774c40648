"""Hydra: Medusa's heads, which also see the tokens guessed on the way to their place."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import pad, silu

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied

from ..heads.context import ContextLayer, context_layer
from ..heads.copied import layer_shape
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import Guess, TrainedHead
from ..heads.parts import Held, LayerShape


@dataclass(slots=True)
class _Memory:
    """first: [1, inputs], what the heads read after the text; rows: [m, inputs], after the nodes. Zeros fill up.

    held: keys and values of the prefix layer, where there is one.
    """

    first: torch.Tensor
    rows: torch.Tensor
    held: Held | None

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        return _Memory(self.first, self.rows[:0], deepcopy(self.held, memo))


class HydraHead(DraftHead):
    """Head k reads the target's last state, the last token and the k tokens guessed before its own.

    The setting `prefix` puts one more decoder layer over the target's states in place of the last state alone
    (Hydra++). Untrained, all but the state counts for nothing, and every head says what the target itself says next.
    """

    kind = "hydra"

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        layer, self._blocks = trained.settings.get("layer"), trained.settings["blocks"]
        self._normed: bool = trained.settings.get("reads_normed", False)
        self.fits(len(trained.tensors["head.0.0.weight"]))
        self._prefix = None if layer is None else self._layer(layer)

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (-1,)

    @classmethod
    def untrained(
        cls, model: Transformer, seed: int, *, prefix: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        hidden, tensors = model.config.hidden_size, dict[str, torch.Tensor]()
        settings: dict[str, Any] = {"heads": cls.taught, "blocks": 2}
        for number in range(cls.taught):
            width = (number + 2) * hidden
            tensors[f"head.{number}.through.weight"] = torch.eye(hidden, width, dtype=torch.float32, device="cpu")
            for block in range(settings["blocks"]):
                tensors[f"head.{number}.{block}.weight"] = torch.zeros(
                    hidden, hidden if block else width, dtype=torch.float32, device="cpu"
                )
                tensors[f"head.{number}.{block}.bias"] = torch.zeros(hidden, dtype=torch.float32, device="cpu")
        if prefix:
            shape, layer = context_layer(model, silent=True)
            tensors |= layer | {"norm.weight": copied(model.weights.norm)}
            settings["layer"] = asdict(shape)
        return tensors, settings

    def begin(self) -> _Memory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        none = like.new_empty(0, (self.reach + 1) * like.shape[1])
        return _Memory(none, none, None if self._prefix is None else self._prefix.begin(like))

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        if self._prefix is None or memory.held is None:
            base = self.model.final_norm(states[-1][-1:])
        else:
            base = self._behind(self._prefix.read(memory.held, self._entering(states[-1]), positions))
        memory.first = self._with(pad(base, (0, memory.first.shape[1] - base.shape[1])), tokens[-1:], 0)
        memory.rows = memory.rows[:0]
        return self.project(self._spoken(memory.first, 0), 0)[0]

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        known, number = memory.rows[: mask.shape[1] - len(tokens)], int(depths[0])
        inputs = self._with(torch.cat((memory.first, known))[to_device(above + 1, tokens.device)], tokens, number)
        memory.rows = torch.cat((known, inputs))
        return self.project(self._spoken(inputs, number), number)

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        b, n, _ = states[-1].shape
        if self._prefix is None:
            base = self.model.final_norm(states[-1].flatten(0, 1))
        else:
            base = self._behind(self._prefix.unroll(self._entering(states[-1])))
        inputs, guesses = base, []
        for step in range(steps):
            inputs = torch.cat((inputs, self.embed(tokens[:, step : step + n].flatten())), dim=-1)
            guesses.append(Guess(self._spoken(inputs, step).view(b, n, -1), base.view(b, n, -1)))
        return guesses

    def _with(self, inputs: torch.Tensor, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Inputs [n, inputs], written to: with the tokens that head `number` is the first to see."""
        embedded = self.embed(tokens)
        width = embedded.shape[1]
        inputs[:, (number + 1) * width : (number + 2) * width] = embedded
        return inputs

    def _spoken(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        """What head `number` makes of inputs [n, at least its own] -> [n, hidden]."""
        name = f"head.{number}"
        inputs = inputs[:, : (number + 2) * self.model.config.hidden_size]
        spoken = self.parts.linear(f"{name}.through")(inputs) + silu(self.parts.linear(f"{name}.0")(inputs))
        for block in range(1, self._blocks):
            spoken = self.parts.block(f"{name}.{block}", spoken)
        return spoken

    def _layer(self, settings: dict[str, Any] | str) -> ContextLayer:
        """The prefix. Published ones leave it to the target, whose layers theirs is shaped like."""
        shape = LayerShape(**settings) if isinstance(settings, dict) else layer_shape(self.model.config, 0)
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        if self.parts["layer.qkv.weight"].shape != (rows, shape.hidden):
            raise SettingsError(
                f"this head for {self.kind} is for layers of another shape: use the model it was made for"
            )
        return ContextLayer(self.parts, "layer.", shape)

    def _entering(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.final_norm(states) if self._normed else states

    def _behind(self, stream: torch.Tensor) -> torch.Tensor:
        assert self._prefix is not None
        return self.parts.norm("norm", stream, self._prefix.shape.eps)


@register(
    "hydra",
    paper="Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind hydra",),
)
@dataclass(frozen=True)
class Hydra(HeadDrafter):
    """Drafts by heads over the target's last hidden state that also read the tokens guessed before.

    Trained with `--kind hydra:prefix=true` it is Hydra++, whose heads read one more layer over all of the text. All
    heads share the target's vocabulary projection where they bring none. The prefix layer that is trained here reads
    the stream before the last norm, unlike published ones, so that it can begin by changing nothing. Scope: the
    request; memory: the heads' inputs, with a prefix its keys and values.

    Attributes:
        head: A file or folder made by `decodery train head`, a folder or Hub id in the layout of its authors, or a
            `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = HydraHead
