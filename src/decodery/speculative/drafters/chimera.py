"""Chimera: a layer over the target's final states and the last three tokens, which drafts on from states of its own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer

from ..heads.context import ContextLayer, context_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import Guess, TrainedHead
from ..heads.parts import Held, LayerShape
from ..heads.unrolled import teacher_attention


@dataclass(slots=True)
class _Memory:
    """What the head has read.

    Attributes:
        held: Keys and values of the target's states and, as tentative rows, of the predicted states.
        last: [1, hidden], the target's last state.
        end: Its position.
        read: [at most 2] tokens.
        grams: [1 + m, 3], the last three tokens at the text's end and at the nodes.
    """

    held: Held
    last: torch.Tensor
    read: torch.Tensor
    grams: torch.Tensor
    end: int = -1

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        # Nodes do not follow a fork, but what was made up after the text does.
        held, grams = deepcopy(self.held, memo), self.grams[:1]
        held.rows = len(grams)
        return _Memory(held, self.last, self.read, grams, self.end)


class ChimeraHead(DraftHead):
    """The decoder layer: its input combines the last three tokens, its context is the target's states.

    What leaves the layer stands for the target's state there: it is what later places see of that token, and beside the
    target's last state it is what is spoken from. Left of the first token, the first token stands.
    """

    kind = "chimera"

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self._layer = ContextLayer(self.parts, "layer.", LayerShape(**trained.settings["layer"]))

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (-1,)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        hidden = model.config.hidden_size
        shape, tensors = context_layer(model, silent=True)
        tensors["trigram.weight"] = torch.zeros(3 * hidden, 3 * hidden, dtype=torch.float32, device="cpu")
        tensors["trigram.bias"] = torch.zeros(3 * hidden, dtype=torch.float32, device="cpu")
        # To begin with a trigram is its last token.
        tensors["encoded.weight"] = torch.cat(
            (
                torch.zeros(hidden, 2 * hidden, dtype=torch.float32, device="cpu"),
                torch.eye(hidden, dtype=torch.float32, device="cpu"),
            ),
            dim=1,
        )
        for number in range(cls.taught):
            tensors[f"head.{number}.weight"] = (
                torch.cat(
                    (
                        torch.eye(hidden, dtype=torch.float32, device="cpu"),
                        torch.eye(hidden, dtype=torch.float32, device="cpu"),
                    ),
                    dim=1,
                )
                / 2
            )
        return tensors, {"heads": cls.taught, "layer": asdict(shape)}

    @property
    def looks_ahead(self) -> bool:
        return self._layer.shape.sliding is None

    def begin(self) -> _Memory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        none = torch.empty(0, dtype=torch.int64, device=like.device)
        return _Memory(self._layer.begin(like), like, none, none.view(0, 3))

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        final = self.model.final_norm(states[-1])
        _, keys, values = self._layer.heads(self._layer.entered(final), torch.from_numpy(positions))
        memory.held.write(keys, values, text=True)
        known = torch.cat((memory.read, tokens))
        known = torch.cat((known[:1].repeat(max(0, 3 - len(known))), known))
        memory.last, memory.end, memory.read = final[-1:], int(positions[-1]), known[-2:]
        memory.grams = known[None, -3:]
        made = self._make_up(memory, memory.grams, np.array([memory.end + 1]), np.ones((1, 1), dtype=bool))
        return self.project(self._spoken(memory.last, made, 0))[0]

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        n = len(tokens)
        # Every node sees what was made up after the text.
        if isinstance(mask, torch.Tensor):
            mask = torch.cat((mask.new_ones(n, 1), mask), dim=1)
        else:
            mask = np.concatenate((np.ones((n, 1), dtype=bool), mask), axis=1)
        memory.held.rows = mask.shape[1] - n
        known = memory.grams[: memory.held.rows]
        grams = torch.cat((known[to_device(above + 1, tokens.device)][:, 1:], tokens[:, None]), dim=1)
        memory.grams = torch.cat((known, grams))
        made = self._make_up(memory, grams, memory.end + 1 + depths, mask)
        return self.project(self._spoken(memory.last.expand_as(made), made, int(depths[0])))

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        b, n, hidden = states[-1].shape
        final = self.model.final_norm(states[-1].flatten(0, 1))
        places = torch.arange(tokens.shape[1], device="cpu")[:, None] + torch.tensor(
            [-2, -1, 0], dtype=torch.int64, device="cpu"
        )
        encoded = self._encoded(tokens[:, places.clamp(min=0)].flatten(0, 1)).view(b, -1, hidden)

        def heads(rows: torch.Tensor, first: int) -> list[torch.Tensor]:
            found = self._layer.heads(self._layer.entered(rows), torch.arange(first, first + n, device="cpu").repeat(b))
            return [each.view(b, n, *each.shape[1:]) for each in found]

        seen = [heads(final, 0)]
        guesses = []
        for step in range(steps):
            own = encoded[:, step : step + n].flatten(0, 1)
            queries, *rest = heads(own, step + 1)
            _, keys, values = zip(*seen, (queries, *rest), strict=True)
            context = teacher_attention(self._layer, queries, list(keys), list(values))
            made = self._layer.left(own + self.parts.linear("layer.output")(context.flatten(0, 1)))
            guesses.append(Guess(self._spoken(final, made, step).view(b, n, -1), made.view(b, n, -1)))
            # As published, a step does not answer for what later ones make of its state.
            seen.append(heads(made.detach(), step + 1))
        return guesses

    def regret(self, guesses: list[Guess], states: dict[Tap, torch.Tensor], known: torch.Tensor) -> torch.Tensor:
        """How far the first states made up are from the target's, by how large those are: a squared ratio."""
        final = self.model.final_norm(states[-1].flatten(0, 1)).view_as(states[-1])
        both = known[:, :-1] & known[:, 1:]
        wanted, made = final[:, 1:][both], guesses[0].features[:, :-1][both]
        return (made - wanted).square().sum() / wanted.square().sum().clamp(min=1e-9)

    def _make_up(
        self, memory: _Memory, grams: torch.Tensor, positions: np.ndarray, mask: np.ndarray | torch.Tensor
    ) -> torch.Tensor:
        """The states [n, hidden] that stand for the target's after trigrams [n, 3], for later rows to see."""
        encoded = self._encoded(grams)
        made = self._layer.attention(self._layer.entered(encoded), positions, memory.held, mask)
        made = self._layer.left(encoded + made)
        # A row is seen as its trigram by itself alone.
        _, keys, values = self._layer.heads(self._layer.entered(made), torch.from_numpy(positions))
        memory.held.rows -= len(made)
        memory.held.write(keys, values, text=False)
        return made

    def _encoded(self, grams: torch.Tensor) -> torch.Tensor:
        """Trigrams [..., 3] -> [n, hidden]."""
        embedded = self.embed(grams.flatten())
        return self.parts.linear("encoded")(self.parts.block("trigram", embedded.view(-1, 3 * embedded.shape[1])))

    def _spoken(self, final: torch.Tensor, made: torch.Tensor, number: int) -> torch.Tensor:
        return self.parts.linear(f"head.{number}")(torch.cat((final, made), dim=-1))


@register(
    "chimera",
    paper="Chimera: A Lossless Decoding Method for Accelerating LLM Inference by Fusing All Tokens (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind chimera",),
)
@dataclass(frozen=True)
class Chimera(HeadDrafter):
    """Drafts by one decoder layer over the last three tokens and the target's final states.

    What the layer makes of a guessed token stands for the target's state of it when the next one is guessed. Each place
    has a projection of its own before the target's vocabulary projection. Scope: the request; memory: keys and values
    of one layer.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head` or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = ChimeraHead
