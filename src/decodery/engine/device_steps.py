"""Whole steps of many texts on a device: one pass, tokens chosen there, and one copy of them back."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import cast

import numpy as np
import torch

from decodery.core import noise
from decodery.models.batch import Batch, Segment
from decodery.models.cache.open_rows import OpenRows
from decodery.models.step_arrays import StepArrays
from decodery.models.tokenizers.vocabularies import Padding
from decodery.models.torch.transformer import Transformer
from decodery.models.torch_state import in_plain_state
from decodery.sampling.batched import BatchedProcessors, BatchedSampling


class DeviceSteps(StepArrays):
    """Texts in arrays, and their steps on the device of their model.

    Args:
        model: The model.
        padding: Ids that no text is to choose.

    Attributes:
        waits: How often tokens were waited for: once in each step.
    """

    def __init__(self, model: Transformer, padding: Padding | None) -> None:
        super().__init__(model.vocab_size, padding)
        self._model, self.waits = model, 0
        self._caches: list[OpenRows | None] = []
        self._processors: list[BatchedProcessors | None] = []
        self._sampling: BatchedSampling | None = None
        self._others: torch.Tensor | None = None
        if padding is not None and len(padding.others):
            self._others = torch.from_numpy(padding.others).to(model.device)
        self.grow(1, 1, 1)

    @staticmethod
    def serves(model: object) -> bool:
        """Whether a model's steps can be taken so: where all texts of a pass are computed together."""
        if not isinstance(model, Transformer) or not model.pages_together:
            return False
        config = model.config
        return config.causal and not (config.keeps_order or config.experts or config.reused_layers)

    def grow(self, texts: int, rows: int, squares: int) -> None:
        if texts > self._room or rows > self._row_room:
            super().grow(texts, rows, squares)
            self._caches += [None] * (self._room - len(self._caches))
            self._processors += [None] * (self._room - len(self._processors))

    def assign(self, text: int, processors: object) -> None:
        self._processors[text] = cast(BatchedProcessors, processors)
        self._sampling = None

    def describe(self, text: int, rows: OpenRows) -> None:
        self._caches[text] = rows

    def forget(self) -> None:
        self._caches = [None] * self._room

    def _move(self, places: Ordered[int]) -> None:
        self._sampling, caches, processors = None, self._caches, self._processors
        self.forget()
        self._processors = [None] * self._room
        for text, place in enumerate(places):
            if place >= 0:
                self._caches[text], self._processors[text] = caches[place], processors[place]

    @in_plain_state
    def run(self) -> None:
        self.choose(self._model.forward(Batch(self.segments())).logits)

    def segments(self) -> list[Segment]:
        n, sizes = self.texts, self.sizes[: self.texts]
        self.first[0] = 0
        np.cumsum(sizes, out=self.first[1 : n + 1])
        roots = self.first[:n]
        self.tokens[roots], self.parents[roots], self.depths[roots] = self.last[:n], -1, 0
        chains = np.ones(n, dtype=bool)
        for text in np.flatnonzero(sizes > 1).tolist():
            first, size = int(self.first[text]), int(sizes[text])
            self.tokens[first + 1 : first + size] = self.drafts[0, text, 1:size]
            parents = self.parents[first : first + size]
            parents[1:] = self.drafts[1, text, 1:size]
            chains[text] = (parents == np.arange(-1, size - 1)).all()
            depths = self.depths[first : first + size]
            for node in range(1, size):
                depths[node] = depths[parents[node]] + 1
        owners = np.repeat(np.arange(n), sizes)
        self.positions[: self.rows] = self.next[owners] + self.depths[: self.rows]
        return [self._segment(text, bool(chains[text])) for text in range(n)]

    def _segment(self, text: int, chain: bool) -> Segment:
        rows, known = slice(self.first[text], self.first[text + 1]), self._caches[text]
        assert known is not None
        mask = None if chain else _ancestors(self.parents[rows])
        return Segment(self.positions[rows], self.tokens[rows], mask=mask, cache=known.cache)

    @in_plain_state
    def choose(self, logits: torch.Tensor) -> None:
        self.logits, n = self._without_padding(logits), self.texts
        if self._sampling is None:
            self._sampling = BatchedSampling([cast(BatchedProcessors, each) for each in self._processors[:n]])
        owners = np.repeat(np.arange(n), self.sizes[:n])
        keys = noise.keys(self.seeds[owners], self.drawn[owners] + self.depths[: self.rows])
        # The one place where a step waits for the device.
        picks = self._sampling.choose(self.logits, owners, keys).cpu().numpy()
        self.waits += 1
        step = self._struct
        step.full, step.plain = 0, self.rows == n
        for text in range(n):
            self._walk(text, picks[self.first[text] : self.first[text + 1]])
        step.reach = int(self.next[:n].sum())

    def _without_padding(self, logits: torch.Tensor) -> torch.Tensor:
        if self._padding is not None:
            logits[:, self._padding.first :] = -torch.inf
            if self._others is not None:
                logits.index_fill_(1, self._others, -torch.inf)
        return logits

    def _walk(self, text: int, picks: np.ndarray) -> None:
        """Follow the children that carry the tokens chosen one after another, and keep their rows."""
        first, size = int(self.first[text]), len(picks)
        tokens, parents = self.tokens[first : first + size], self.parents[first : first + size]
        node, path = 0, list[int]()
        while (token := int(picks[node])) >= 0:
            below = np.flatnonzero((parents == node) & (tokens == token)).tolist() if size > 1 else []
            if not below:
                self.accepted[text], self.chosen[text] = len(path), token
                self.paths[first : first + len(path)] = path
                self.keep(text)
                return
            node = below[0]
            path.append(node)
        # Its largest logit is no number: Python says what is wrong.
        self.accepted[text], self.kept[text], self._struct.plain = -1, 0, 0

    def keep(self, text: int) -> None:
        first, count = int(self.first[text]), int(self.accepted[text])
        path, known = self.paths[first : first + count].tolist(), self._caches[text]
        assert known is not None
        self.emitted[first : first + count] = self.tokens[first : first + self.sizes[text]][path]
        self.emitted[first + count], self.kept[text], self.choice_counts[text] = self.chosen[text], count + 1, 0
        if self.sizes[text] > 1:
            parents = self.parents[first : first + self.sizes[text]]
            for node, child in zip([0, *path], [*path, -1], strict=True):
                if len(children := np.flatnonzero(parents == node)):
                    rank = int((children == child).argmax()) if child > 0 else -1
                    self.choices[first + self.choice_counts[text]] = rank, len(children)
                    self.choice_counts[text] += 1
        known.settle([0, *path])
        self.next[text] += count + 1
        self.drawn[text] += count + 1
        self.last[text] = self.chosen[text]
        if self.next[text] > self.ends[text]:
            self._struct.full = 1


def _ancestors(parents: np.ndarray) -> np.ndarray:
    """[n, n] bool, which nodes lie on the way to each, itself included."""
    seen = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        seen[node] |= seen[parents[node]]
    return seen
