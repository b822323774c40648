"""Heads that go on from features of their own: one decoder layer whose output stands for the target's next state."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from decodery.models.hooks import Tap
from decodery.models.protocol import Reader

from ..drafters.advice import WIDTH
from .context import ContextLayer
from .head import DraftHead, Guess, Heard, Seen, TrainedHead
from .native import Guessed, NativeHead, places_of
from .parts import DecoderLayer, Held, LayerShape, teacher_attention


@dataclass(slots=True)
class RecurrentMemory:
    """What a recurrent head has read of a text.

    Attributes:
        held: Keys and values of the first layer.
        last: [hidden], the feature after the text's last item.
        rows: [m, hidden], the features after the nodes.
        end: The position of the last item.
        further: Keys and values of the layers after the first.
        below: [depths, hidden], what `project` takes of depths that a head predicts at once, None elsewhere.
    """

    held: Held
    last: torch.Tensor
    rows: torch.Tensor
    end: int = -1
    further: list[Held] = field(default_factory=list)
    below: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> RecurrentMemory:
        # Tentative rows do not follow a fork, and features are never written to.
        held, *further = deepcopy([self.held, *self.further], memo)
        clone = RecurrentMemory(held, self.last, self.rows[:0], self.end, further, self.below)
        clone.cut(0)
        return clone

    def cut(self, rows: int) -> None:
        """Forget all tentative rows but the first."""
        for held in (self.held, *self.further):
            held.rows = rows


class RecurrentHead(DraftHead):
    """An item is a feature and the token that follows it.

    What leaves the layer is the feature of the next item. Features of the text are made of the target's states, those
    below it are the head's own. Positions are those of the features, one less than their tokens'.
    """

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self.layer = DecoderLayer(self.parts, "layer.", LayerShape(**trained.settings["layer"]))
        self.further = [
            ContextLayer(self.parts, f"layer_{number}.", LayerShape(**shape))
            for number, shape in enumerate(trained.settings.get("further", ()), start=1)
        ]
        self.fits(self.entering)

    @property
    def entering(self) -> int:
        """How wide the target's states are that it reads."""
        return self.layer.shape.hidden

    @abstractmethod
    def enter(self, states: dict[Tap, torch.Tensor]) -> torch.Tensor:
        """The target's states {tap: [n, width]} -> features [n, hidden]."""

    @abstractmethod
    def inputs(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and embeddings of the tokens [n, hidden] -> the residual stream, and what attention reads."""

    def beside(
        self, stream: torch.Tensor, attended: torch.Tensor, states: dict[Tap, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`inputs` of a text's own items, which may be no tokens.

        Args:
            states: {tap: [n, width]}.
        """
        return stream, attended

    @abstractmethod
    def leave(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream after the layer [n, hidden] -> the next features, and what `project` takes."""

    @cached_property
    def native(self) -> NativeHead | None:
        """What runs all of it in one call, None where nothing does."""
        return None

    def unrolled(self, along: float) -> int:
        # A step costs as much as the one before it and is no use before that one is: the first half of a training is
        # about the first alone, the others join it one by one.
        return 1 + round((self.taught - 1) * max(0.0, 2 * along - 1))

    def given(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What `unroll` begins with in place of the target's features [b, n, hidden]."""
        return features

    def chained(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a later step reads in place of its own features [b, n, hidden] and embeddings [b * n, hidden]."""
        return features, embedded

    def begin(self) -> RecurrentMemory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return RecurrentMemory(
            self.layer.begin(like), like[0], like[:0], further=[each.begin(like) for each in self.further]
        )

    def hear(self, memory: RecurrentMemory, seen: list[Seen]) -> Heard:
        if self.native is None or not all(_lies_as_read(each.hidden[tap]) for each in seen for tap in self.taps):
            return super().hear(memory, seen)
        rows = [zip(*(places_of(each.hidden[tap], each.rows) for tap in self.taps), strict=True) for each in seen]
        given = [place for each in rows for places in each for place in places]
        tokens = [token for each in seen for token in each.tokens]
        positions = [each.start + place for each in seen for place in range(len(each.tokens))]
        found = self._read(self.native, memory, given, tokens, positions)
        return Heard(found.logits[0], (found.ids, found.chances))

    def read(
        self, memory: RecurrentMemory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        if self.native is not None:
            rows = [states[tap].contiguous() for tap in self.taps]
            given = [place for row in range(len(tokens)) for each in rows for place in places_of(each, (row,))]
            return self._read(self.native, memory, given, tokens.tolist(), positions.tolist()).logits[0]
        features, spoken = self._run(memory, self.enter(states), tokens, positions, None, states)
        memory.last, memory.rows, memory.end = features[-1], features[:0], int(positions[-1])
        return self.project(spoken[-1:])[0]

    def _read(
        self, native: NativeHead, memory: RecurrentMemory, given: list[int], tokens: list[int], positions: list[int]
    ) -> Guessed:
        found = native(memory.held, given, tokens, positions, None, entering=True, spoken=1, k=WIDTH)
        memory.last, memory.rows, memory.end = found.features[0], found.features[:0], positions[-1]
        return found

    def grow(
        self, memory: RecurrentMemory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        memory.cut(mask.shape[1] - len(tokens))
        known, positions = memory.rows[: memory.held.rows], memory.end + depths
        if self.native is not None:
            places = [*places_of(known, range(len(known))), *places_of(memory.last[None], (0,))]
            given, n = [places[row] for row in above.tolist()], len(tokens)
            found = self.native(memory.held, given, tokens.tolist(), positions.tolist(), mask, entering=False, spoken=n)
            features, logits = found.features, found.logits
        else:
            before = torch.cat((memory.last[None], known))[torch.from_numpy(above + 1)]
            features, spoken = self._run(memory, before, tokens, positions, mask)
            logits = self.project(spoken)
        memory.rows = torch.cat((known, features))
        return logits

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        b, n = tokens.shape[0], tokens.shape[1] - steps + 1
        features = self.enter({tap: rows.flatten(0, 1) for tap, rows in states.items()})
        features = self.given(features.view(b, n, -1), tokens)
        past: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in (self.layer, *self.further)]
        guesses = []
        for step in range(steps):
            embedded = self.embed(tokens[:, step : step + n].flatten())
            if step:
                features, embedded = self.chained(features, embedded)
            stream, attended = self.inputs(features.flatten(0, 1), embedded)
            if not step:
                stream, attended = self.beside(
                    stream, attended, {tap: rows.flatten(0, 1) for tap, rows in states.items()}
                )
            positions = torch.arange(step, step + n, device="cpu").repeat(b)
            for layer, known in zip((self.layer, *self.further), past, strict=True):
                read = layer.entered(stream) if isinstance(layer, ContextLayer) else attended
                queries, own, seen = (each.view(b, n, *each.shape[1:]) for each in layer.heads(read, positions))
                known.append((own, seen))
                keys, values = (list(each) for each in zip(*known, strict=True))
                context = teacher_attention(layer, queries, keys, values)
                stream = layer.left(stream + self.parts.linear(f"{layer.prefix}output")(context.flatten(0, 1)))
            features, spoken = self.leave(stream)
            features = features.view(b, n, -1)
            guesses.append(Guess(spoken.view(b, n, -1), features))
        return guesses

    def _run(
        self,
        memory: RecurrentMemory,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: np.ndarray,
        mask: np.ndarray | None,
        states: dict[Tap, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, attended = self.inputs(features, self.embed(tokens))
        if states is not None:
            stream, attended = self.beside(stream, attended, states)
        return self.leave(self.attended(memory, stream, attended, positions, mask))

    def attended(
        self,
        memory: RecurrentMemory,
        stream: torch.Tensor,
        attended: torch.Tensor,
        positions: np.ndarray,
        mask: np.ndarray | None,
    ) -> torch.Tensor:
        """`inputs` of rows [n, hidden] -> the stream after all layers.

        Args:
            mask: [n, tentative rows + n], of a tree; None: the rows are text, in order.
        """
        stream = self.layer.left(stream + self.layer.attention(attended, positions, memory.held, mask))
        for layer, held in zip(self.further, memory.further, strict=True):
            stream = layer.left(stream + layer.attention(layer.entered(stream), positions, held, mask))
        return stream

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.parts.norm(name, rows, self.layer.shape.eps)


def _lies_as_read(states: torch.Tensor) -> bool:
    """Whether the kernels can read states [n, hidden] where they lie."""
    return states.device.type == "cpu" and states.dtype == torch.float32 and states.stride(1) == 1
