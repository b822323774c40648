"""Heads that go on from features of their own: one decoder layer whose output stands for the target's next state."""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from decodery.models.hooks import Tap
from decodery.models.protocol import Reader

from ..drafters.advice import WIDTH
from .head import DraftHead, Guess, Heard, Seen, TrainedHead
from .native import Guessed, NativeHead, places_of
from .parts import DecoderLayer, Held, LayerShape, teacher_attention


@dataclass(slots=True)
class _Memory:
    """held: the layer's keys and values. last: [hidden], the feature after the text's last item; end: its position.

    rows: [m, hidden], the features after the nodes.
    """

    held: Held
    last: torch.Tensor
    rows: torch.Tensor
    end: int = -1

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        # Tentative rows do not follow a fork, and features are never written to.
        held = deepcopy(self.held, memo)
        held.rows = 0
        return _Memory(held, self.last, self.rows[:0], self.end)


class RecurrentHead(DraftHead):
    """An item is a feature and the token that follows it.

    What leaves the layer is the feature of the next item. Features of the text are made of the target's states, those
    below it are the head's own. Positions are those of the features, one less than their tokens'.
    """

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self.layer = DecoderLayer(self.parts, "layer.", LayerShape(**trained.settings["layer"]))
        self.fits(self.layer.shape.hidden)

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

    def begin(self) -> _Memory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return _Memory(self.layer.begin(like), like[0], like[:0])

    def hear(self, memory: _Memory, seen: list[Seen]) -> Heard:
        if self.native is None or not all(_lies_as_read(each.hidden[tap]) for each in seen for tap in self.taps):
            return super().hear(memory, seen)
        rows = [zip(*(places_of(each.hidden[tap], each.rows) for tap in self.taps), strict=True) for each in seen]
        given = [place for each in rows for places in each for place in places]
        tokens = [token for each in seen for token in each.tokens]
        positions = [each.start + place for each in seen for place in range(len(each.tokens))]
        found = self._read(self.native, memory, given, tokens, positions)
        return Heard(found.logits[0], (found.ids, found.chances))

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        if self.native is not None:
            rows = [states[tap].contiguous() for tap in self.taps]
            given = [place for row in range(len(tokens)) for each in rows for place in places_of(each, (row,))]
            return self._read(self.native, memory, given, tokens.tolist(), positions.tolist()).logits[0]
        features, spoken = self._run(memory, self.enter(states), tokens, positions, None, states)
        memory.last, memory.rows, memory.end = features[-1], features[:0], int(positions[-1])
        return self.project(spoken[-1:])[0]

    def _read(
        self, native: NativeHead, memory: _Memory, given: list[int], tokens: list[int], positions: list[int]
    ) -> Guessed:
        found = native(memory.held, given, tokens, positions, None, entering=True, spoken=1, k=WIDTH)
        memory.last, memory.rows, memory.end = found.features[0], found.features[:0], positions[-1]
        return found

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        memory.held.rows = mask.shape[1] - len(tokens)
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
        features = self.given(features.view(b, n, -1), tokens).flatten(0, 1)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        guesses = []
        for step in range(steps):
            embedded = self.embed(tokens[:, step : step + n].flatten())
            stream, attended = self.inputs(features, embedded)
            if not step:
                stream, attended = self.beside(
                    stream, attended, {tap: rows.flatten(0, 1) for tap, rows in states.items()}
                )
            positions = torch.arange(step, step + n, device="cpu").repeat(b)
            queries, own, seen = (each.view(b, n, *each.shape[1:]) for each in self.layer.heads(attended, positions))
            keys.append(own)
            values.append(seen)
            context = teacher_attention(self.layer, queries, keys, values)
            stream = stream + self.parts.linear("layer.output")(context.flatten(0, 1))
            features, spoken = self.leave(self.layer.left(stream))
            guesses.append(Guess(spoken.view(b, n, -1), features.view(b, n, -1)))
        return guesses

    def _run(
        self,
        memory: _Memory,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: np.ndarray,
        mask: np.ndarray | None,
        states: dict[Tap, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, attended = self.inputs(features, self.embed(tokens))
        if states is not None:
            stream, attended = self.beside(stream, attended, states)
        stream = stream + self.layer.attention(attended, positions, memory.held, mask)
        return self.leave(self.layer.left(stream))

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.parts.norm(name, rows, self.layer.shape.eps)


def _lies_as_read(states: torch.Tensor) -> bool:
    """Whether the kernels can read states [n, hidden] where they lie."""
    return states.device.type == "cpu" and states.dtype == torch.float32 and states.stride(1) == 1
