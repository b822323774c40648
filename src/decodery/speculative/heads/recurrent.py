"""Heads that go on from features of their own: one decoder layer whose output stands for the target's next state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch

from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.one_pass import to_device

from ..drafters.advice import WIDTH
from .context import ContextLayer
from .grown import Nodes
from .head import EMBEDDED, Guess, Heard, Seen, TextItems, TrainedHead
from .latents import LatentLayer
from .layered import Attention, HeadRows, LayeredHead, lengths_kept
from .native import NativeHead, NativeRows, places_of
from .parts import DecoderLayer, Held, LayerShape
from .unrolled import teacher_attention


@dataclass(slots=True)
class RecurrentMemory:
    """What a recurrent head has read of a text.

    Attributes:
        held: Keys and values of the first layer.
        last: [hidden], the feature after the text's last item.
        rows: [m, hidden], the features after the nodes.
        end: The position of the last item.
        further: Keys and values of the layers after the first.
        below: [depths, outputs], the logits of depths that a head predicts at once, None elsewhere.
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
        for held in self.layers:
            held.rows = rows

    @property
    def layers(self) -> list[Held]:
        """Keys and values of all layers."""
        return [self.held, *self.further]


class RecurrentHead(LayeredHead):
    """An item is a feature and the token that follows it.

    What leaves the layer is the feature of the next item. Features of the text are made of the target's states, those
    below it are the head's own. Positions are those of the features, one less than their tokens'.
    """

    joint = True

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        shape, experts = LayerShape(**trained.settings["layer"]), trained.settings.get("experts")
        latent = trained.settings.get("latent")
        self.layer = (
            DecoderLayer(self.parts, "layer.", shape, experts)
            if latent is None
            else LatentLayer(self.parts, "layer.", shape, experts, latent)
        )
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

    @property
    def stack(self) -> list[DecoderLayer]:
        return [self.layer, *self.further]

    def through(
        self, features: torch.Tensor, tokens: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.leave(self._layered(*self.inputs(features, self.embed(tokens)), attention))

    @property
    def looks_ahead(self) -> bool:
        return all(layer.shape.sliding is None for layer in self.stack)

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

    def hear_all(self, texts: Ordered[tuple[RecurrentMemory, list[Seen]]]) -> list[Heard]:
        states = [each.hidden[tap] for _, seen in texts for each in seen for tap in self.taps]
        if self.native is None or not all(map(_lies_as_read, states)):
            return super().hear_all(texts)
        rows = []
        for memory, seen in texts:
            places = [zip(*(places_of(each.hidden[tap], each.rows) for tap in self.taps), strict=True) for each in seen]
            given = [place for each in places for row in each for place in row]
            tokens = [token for each in seen for token in each.tokens]
            positions = [each.start + place for each in seen for place in range(len(each.tokens))]
            rows.append(NativeRows(memory.held, given, tokens, positions))
        return self._read(self.native, [memory for memory, _ in texts], rows)

    def read(
        self, memory: RecurrentMemory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        return self.read_all([(memory, states, tokens, positions)])[0]

    def read_all(self, texts: Ordered[TextItems]) -> torch.Tensor:
        if len({frozenset(states) for _, states, _, _ in texts}) > 1:
            # Some hold embeddings, others do not.
            return torch.cat([self.read_all([each]) for each in texts])
        memories = [memory for memory, _, _, _ in texts]
        if self.native is not None:
            kept, given_rows = [], []
            for memory, states, tokens, positions in texts:
                kept.append([states[tap].contiguous() for tap in self.taps])
                given = [place for row in range(len(tokens)) for each in kept[-1] for place in places_of(each, (row,))]
                given_rows.append(NativeRows(memory.held, given, tokens.tolist(), positions.tolist()))
            return torch.stack([each.logits for each in self._read(self.native, memories, given_rows)])
        joined = {tap: torch.cat([states[tap] for _, states, _, _ in texts]) for tap in texts[0][1]}
        tokens = torch.cat([tokens for _, _, tokens, _ in texts])
        rows = [HeadRows(memory.layers, positions) for memory, _, _, positions in texts]
        ends = np.cumsum([len(positions) for _, _, _, positions in texts]) - 1
        with lengths_kept([each.held for each in rows]):
            features, logits = self._passed(rows, self.enter(joined), tokens, ends, joined)
        for (memory, _, _, positions), end in zip(texts, ends.tolist(), strict=True):
            memory.last, memory.rows, memory.end = features[end], features[:0], int(positions[-1])
        return logits

    def _read(self, native: NativeHead, memories: Ordered[RecurrentMemory], rows: Ordered[NativeRows]) -> list[Heard]:
        found = native(rows, entering=True, k=WIDTH)
        heard = []
        for number, (memory, own) in enumerate(zip(memories, rows, strict=True)):
            memory.last, memory.rows, memory.end = found.features[number], found.features[:0], own.positions[-1]
            first, end = number * WIDTH, (number + 1) * WIDTH
            heard.append(Heard(found.logits[number], (found.ids[first:end], found.chances[first:end])))
        return heard

    def grow(
        self, memory: RecurrentMemory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        return self.grow_all([Nodes(memory, tokens, above, depths, mask)])[0]

    def grow_all(self, nodes: Ordered[Nodes]) -> list[torch.Tensor]:
        for each in nodes:
            each.memory.cut(each.mask.shape[1] - len(each.tokens))
        known = [each.memory.rows[: each.memory.held.rows] for each in nodes]
        places = [each.memory.end + each.depths for each in nodes]
        if self.native is not None:
            rows = []
            for each, own, positions in zip(nodes, known, places, strict=True):
                lies = [*places_of(own, range(len(own))), *places_of(each.memory.last[None], (0,))]
                given = [lies[row] for row in each.above.tolist()]
                mask = cast(np.ndarray, each.mask)
                rows.append(NativeRows(each.memory.held, given, each.tokens.tolist(), positions.tolist(), mask))
            found = self.native(rows, entering=False)
            features, logits = found.features, found.logits
        else:
            # Of each text the feature after its last item, and those after its nodes.
            firsts = np.cumsum([0, *(1 + len(own) for own in known)])
            parts = [part for each, own in zip(nodes, known, strict=True) for part in (each.memory.last[None], own)]
            before = torch.cat(parts)[_joined([each.above for each in nodes], firsts[:-1] + 1, parts[0].device)]
            texts = [HeadRows(each.memory.layers, at, each.mask) for each, at in zip(nodes, places, strict=True)]
            tokens = torch.cat([each.tokens for each in nodes])
            features, logits = self._passed(texts, before, tokens, np.arange(len(tokens)))
        sizes = [len(each.tokens) for each in nodes]
        for each, own, fresh in zip(nodes, known, features.split(sizes), strict=True):
            each.memory.rows = torch.cat((own, fresh))
        return list(logits.split(sizes))

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        b, n = tokens.shape[0], tokens.shape[1] - steps + 1
        features = self.enter({tap: rows.flatten(0, 1) for tap, rows in states.items()})
        features = self.given(features.view(b, n, -1), tokens)
        past: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.stack]
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
            for layer, known in zip(self.stack, past, strict=True):
                read = layer.entered(stream) if isinstance(layer, ContextLayer) else attended
                queries, own, seen = (each.view(b, n, *each.shape[1:]) for each in layer.heads(read, positions))
                known.append((own, seen))
                keys, values = (list(each) for each in zip(*known, strict=True))
                context = teacher_attention(layer, queries, keys, values)
                stream = layer.left(stream + layer.output(read, context.flatten(0, 1)))
            features, spoken = self.leave(stream)
            features = features.view(b, n, -1)
            guesses.append(Guess(spoken.view(b, n, -1), features))
        return guesses

    def _passed(
        self,
        texts: Ordered[HeadRows],
        features: torch.Tensor,
        tokens: torch.Tensor,
        wanted: np.ndarray,
        states: dict[Tap, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The features after all rows [n, hidden], and the logits [m, outputs] of some.

        Args:
            texts: Their rows.
            features: [n, hidden] that they read.
            tokens: [n] likewise.
            wanted: [m] the rows whose logits are.
            states: {tap: [n, width]} where rows are text.
        """
        if (fixed := self.passes) is not None and EMBEDDED not in (states or {}):
            found = fixed.run(self, texts, features, tokens, wanted)
            if found is not None:
                return found
        stream, attended = self.inputs(features, self.embed(tokens))
        if states is not None:
            stream, attended = self.beside(stream, attended, states)
        positions, layers = np.concatenate([each.positions for each in texts]), self.stack

        def attention(number: int, read: torch.Tensor) -> torch.Tensor:
            rows = [(each.held[number], each.mask, len(each.positions)) for each in texts]
            return layers[number].attention_of(read, positions, rows)

        features, spoken = self.leave(self._layered(stream, attended, attention))
        if len(wanted) < len(tokens):
            spoken = spoken[to_device(wanted, spoken.device)]
        return features, self.project(spoken)

    def _layered(self, stream: torch.Tensor, attended: torch.Tensor, attention: Attention) -> torch.Tensor:
        """`inputs` of rows [n, hidden] -> the stream after all layers."""
        for number, layer in enumerate(self.stack):
            stream = layer.left(stream + attention(number, layer.read_of(stream, attended)))
        return stream

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.parts.norm(name, rows, self.layer.shape.eps)


def _joined(rows: Ordered[np.ndarray | torch.Tensor], firsts: np.ndarray, device: torch.device) -> torch.Tensor:
    """Rows [n] of several texts, each counted from a first one, on the device."""
    before = np.repeat(firsts, [len(each) for each in rows])
    here = [each for each in rows if isinstance(each, np.ndarray)]
    if len(here) == len(rows):
        return to_device(np.concatenate(here) + before, device)
    return torch.cat([to_device(each, device) for each in rows]) + to_device(before, device)


def _lies_as_read(states: torch.Tensor) -> bool:
    """Whether the kernels can read states [n, hidden] where they lie."""
    return states.device.type == "cpu" and states.dtype == torch.float32 and states.stride(1) == 1
