"""Whole steps of many texts on a device: one pass, tokens chosen there, and one copy of them back."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from decodery.core import noise
from decodery.models.batch import Batch, Segment
from decodery.models.cache.kept_together import keep_together
from decodery.models.cache.open_rows import OpenRows
from decodery.models.cuda.static_pass import Choosing
from decodery.models.step_arrays import StepArrays
from decodery.models.tokenizers.vocabularies import Padding
from decodery.models.torch.row_layout import DraftRows
from decodery.models.torch.transformer import Transformer
from decodery.models.torch_state import in_plain_state
from decodery.sampling.batched import BatchedProcessors, BatchedSampling, Choice, Chosen

from .device_trees import Trees


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
        self._prefixes: np.ndarray | None = None
        self._closed: torch.Tensor | None = None
        if padding is not None:
            closed = np.concatenate((padding.others, np.arange(padding.first, model.vocab_size)))
            self._closed = torch.from_numpy(closed).to(model.device)
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
        self._caches[text], self._prefixes = rows, None

    def forget(self) -> None:
        self._caches, self._prefixes = [None] * self._room, None

    def _move(self, places: Ordered[int]) -> None:
        self._sampling, caches, processors = None, self._caches, self._processors
        self.forget()
        self._processors = [None] * self._room
        for text, place in enumerate(places):
            if place >= 0:
                self._caches[text], self._processors[text] = caches[place], processors[place]

    @in_plain_state
    def run(self) -> None:
        self._lay_out()
        sampling, trees, static = self._sampled_by(), self._trees, self._model.static
        if static is not None and (choice := sampling.alone) is not None:
            choice, rows = replace(choice, ranks=self._ranks), self._rows()
            choosing = Choosing(choice, self._keys(), sampling.settings(trees.owners), trees.nodes, self._closed)
            pages = [known.pages for known in self._caches[: self.texts] if known is not None]
            found = static.choose(self._model, pages, rows, self.tokens[: self.rows], choosing)
            if found is not None:
                self.logits, answer = found
                self._settle(answer, replace(choice, doublings=trees.doublings))
                return
        self.choose(self._model.forward(Batch(self._segments())).logits)

    def _lay_out(self) -> None:
        self.first[0] = 0
        np.cumsum(self.sizes[: self.texts], out=self.first[1 : self.texts + 1])
        self._trees = Trees.of(self, self.texts)

    def _rows(self) -> DraftRows:
        n, trees = self.texts, self._trees
        if self._prefixes is None:
            self._prefixes = np.array([0 if known is None else known.cache.prefix for known in self._caches[:n]])
        held, counts = self.next[:n] + self._prefixes, self.sizes[:n].astype(np.int64)
        retained, positions = np.zeros(n, dtype=np.int64), self.positions[: self.rows]
        return DraftRows(counts, held, self._prefixes, retained, positions, trees.above, trees.doublings)

    def segments(self) -> list[Segment]:
        self._lay_out()
        return self._segments()

    def _segments(self) -> list[Segment]:
        return [self._segment(text) for text in range(self.texts)]

    def _segment(self, text: int) -> Segment:
        rows, known = slice(self.first[text], self.first[text + 1]), self._caches[text]
        assert known is not None
        mask = None if self._trees.chains[text] else _ancestors(self.parents[rows])
        return Segment(self.positions[rows], self.tokens[rows], mask=mask, cache=known.cache)

    @in_plain_state
    def choose(self, logits: torch.Tensor) -> None:
        if self._closed is not None:
            logits.index_fill_(1, self._closed, -torch.inf)
        self.logits, trees = logits, self._trees
        like = Choice(False, (), (), trees.doublings, self._ranks)
        self._settle(self._sampled_by().choose(logits, trees.owners, self._keys(), trees.nodes, like), like)

    def _sampled_by(self) -> BatchedSampling:
        if self._sampling is None:
            self._sampling = BatchedSampling([cast(BatchedProcessors, each) for each in self._processors[: self.texts]])
        return self._sampling

    @property
    def _ranks(self) -> int:
        return min(self.ranks, self._model.vocab_size)

    def _keys(self) -> np.ndarray:
        """[rows] of the noise of the token after each."""
        owners = self._trees.owners
        return noise.keys(self.seeds[owners], self.drawn[owners] + self.depths[: self.rows])

    def _settle(self, answer: torch.Tensor, choice: Choice) -> None:
        """Let every text go on by what was chosen, and its cache keep the rows on the way."""
        # The one place where a step waits for the device.
        chosen = Chosen.of(answer.cpu().numpy(), choice, self.rows)
        self.waits += 1
        n, first = self.texts, self.first[: self.texts + 1]
        self.ranked = chosen.ids, chosen.values
        rows = np.flatnonzero(chosen.reached)
        last = rows[np.searchsorted(rows, first[1:]) - 1]
        self.accepted[:n], self.chosen[:n] = self.depths[last], chosen.picks[last]
        step = self._struct
        step.full, step.plain = 0, self.rows == n
        failed = self.chosen[:n] < 0
        if failed.any():
            # Their largest logit is no number: Python says what is wrong.
            rows = rows[~failed[self._trees.owners[rows]]]
            self.accepted[:n][failed], self.kept[:n][failed], step.plain = -1, 0, 0
        self._keep(np.flatnonzero(~failed), rows)
        step.reach = int(self.next[:n].sum())

    def keep(self, text: int) -> None:
        first, count = int(self.first[text]), int(self.accepted[text])
        self._keep(np.array([text]), first + np.array([0, *self.paths[first : first + count]]))

    def _keep(self, texts: np.ndarray, rows: np.ndarray) -> None:
        """Let texts whose `accepted` and `chosen` are written go on by these rows [n], ascending, roots included."""
        if not len(texts):
            return
        counts, first = self.accepted[texts], self.first[texts]
        of, depths = np.repeat(np.arange(len(texts)), counts + 1), self.depths[rows]
        places, local, drafted = first[of] + depths, rows - first[of], depths > 0
        self.paths[places[drafted] - 1] = local[drafted]
        self.emitted[places[drafted] - 1] = self.tokens[rows[drafted]]
        self.emitted[first + counts], self.kept[texts] = self.chosen[texts], counts + 1
        self.choice_counts[texts] = 0
        if self.rows > self.texts:
            trees, more = self._trees, np.flatnonzero(depths < counts[of])
            children, came = trees.children[rows], np.full(len(rows), -1)
            came[more] = trees.ranks[rows[more + 1]]
            parted = children > 0
            self.choices[places[parted]] = np.stack((came, children), axis=1)[parted]
            self.choice_counts[texts] = np.bincount(of[parted], minlength=len(texts))
        caches = [known.cache for text in texts.tolist() if (known := self._caches[text]) is not None]
        keep_together(caches, counts + 1, local)
        self.next[texts] += counts + 1
        self.drawn[texts] += counts + 1
        self.last[texts] = self.chosen[texts]
        if (self.next[texts] > self.ends[texts]).any():
            self._struct.full = 1


def _ancestors(parents: np.ndarray) -> np.ndarray:
    """[n, n] bool, which nodes lie on the way to each, itself included."""
    seen, above = np.eye(len(parents), dtype=bool), np.maximum(parents, 0)
    while True:
        seen |= seen[above]
        if not above.any():
            return seen
        above = above[above]
