"""The arrays that texts are kept in from step to step, whatever computes the steps."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Collection
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.native.kernels import address
from decodery.core.native.structs import ArrayStepStruct

from .batch import Segment
from .cache.open_rows import OpenRows
from .tokenizers.vocabularies import Padding

_FEW = 16
"""Rows that there is room for at least: drafts of one text come and go."""
_OF_TEXTS: dict[str, type[np.generic]] = {
    "last": np.int64, "next": np.int64, "ends": np.int64, "seeds": np.uint64, "drawn": np.int64,
    "processors": np.uint64, "processor_counts": np.int32, "greedy": np.uint8, "accepted": np.int32,
    "chosen": np.int64, "sizes": np.int32, "kept": np.int32, "choice_counts": np.int32,
}  # fmt: skip
_OF_ROWS: dict[str, type[np.generic]] = {
    "tokens": np.int64, "parents": np.int32, "positions": np.int64, "depths": np.int32, "paths": np.int32,
    "emitted": np.int64,
}  # fmt: skip
_OF_SAMPLING = (
    "tokens", "parents", "seeds", "processors", "processor_counts", "greedy", "paths", "accepted", "chosen",
)  # fmt: skip
_OF_STEP = ("last", "next", "ends", "positions", "depths", "sizes", "emitted", "kept", "choice_counts")


class StepArrays(Contract):
    """Texts in arrays, and their steps.

    Args:
        vocab_size: Of the model.
        padding: Ids that no text is to choose.

    Attributes:
        texts, rows: How many texts there are, and rows of their trees.
        last: [texts] the last token of each text.
        next: [texts] the position it stands at.
        ends: [texts] the last such position from which there is room for another step.
        seeds, drawn: [texts] what hashes the noise of the next token: the text's seed and output position.
        processors, processor_counts, greedy: [texts] how tokens are chosen, see `Sampling` in csrc/abi.h.
        sizes: [texts] the nodes of each text's tree, its root included; 1 for its last token alone.
        drafts: [2 (tokens, parents), texts, stride] those of trees with more; roots need not be written.
        first: [texts + 1] the first row of each text in the last step.
        tokens, parents: [rows] the nodes of the trees.
        accepted, chosen, paths: What became of a step, see `Sampling`.
        emitted, kept, choices, choice_counts: What each text goes on by, see `ArrayStep`.
        logits: [rows, vocab] of the last step, the model's own.
        hidden: By depth, [rows, hidden] of the last step: the residual stream after so many layers, see `tap`.
        ranks: How many of the largest logits of each row drafters read on the host, and no others.
        awaits_masks: Whether texts wait for masks, see `Sampling` in csrc/abi.h; then `go_on` ends the step.
        ranked: Ids and values [rows, ranks] of these in the last step; None where all logits lie on the host.
    """

    last: np.ndarray
    next: np.ndarray
    ends: np.ndarray
    seeds: np.ndarray
    drawn: np.ndarray
    processors: np.ndarray
    processor_counts: np.ndarray
    greedy: np.ndarray
    accepted: np.ndarray
    chosen: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    choice_counts: np.ndarray
    emitted: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    positions: np.ndarray
    depths: np.ndarray
    paths: np.ndarray

    logits: torch.Tensor

    def __init__(self, vocab_size: int, padding: Padding | None) -> None:
        self.texts = self.rows = 0
        self._room = self._row_room = 0
        self.drafts = np.zeros((2, 1, 1), dtype=np.int64)
        self._struct = ArrayStepStruct()
        self._at = ctypes.addressof(self._struct)
        self.first = np.zeros(1, dtype=np.int32)
        self.hidden: dict[int, torch.Tensor] = {}
        self._padding, self.ranks = padding, 0
        self.ranked: tuple[np.ndarray, np.ndarray] | None = None
        self.awaits_masks = False
        self._struct.sampling.vocab = vocab_size

    def grow(self, texts: int, rows: int, squares: int) -> None:
        """Have room for so many texts, rows of their trees, and pairs of rows of one tree."""
        if texts > self._room:
            self._room = max(texts, 2 * self._room)
            for name, dtype in _OF_TEXTS.items():
                setattr(self, name, _longer(getattr(self, name, None), self._room, dtype))
            # A list of these is made in half the time that numpy takes.
            self._chosen = (ctypes.c_int64 * self._room).from_address(address(self.chosen, np.int64, None))
            self.first = _longer(self.first, self._room + 1, np.int32)
        if rows > self._row_room:
            self._row_room = max(rows, 2 * self._row_room, _FEW)
            for name, dtype in _OF_ROWS.items():
                setattr(self, name, _longer(getattr(self, name, None), self._row_room, dtype))
            self.choices = np.zeros((self._row_room, 2), dtype=np.int32)
            self._widen_rows()
        self.widen(self.drafts.shape[2])
        self._point()

    def widen(self, nodes: int) -> None:
        """Have room for trees of so many nodes, roots included; what was drafted is gone."""
        if nodes > self.drafts.shape[2] or self._room > self.drafts.shape[1]:
            self.drafts = np.zeros((2, self._room, max(nodes, self.drafts.shape[2])), dtype=np.int64)
        self._struct.drafts = address(self.drafts, np.int64, 2, None, None)
        _, self._struct.room, self._struct.stride = self.drafts.shape

    def _point(self) -> None:
        """Write into the struct where everything lies."""
        step, sampling = self._struct, self._struct.sampling
        places = {
            name: address(getattr(self, name), dtype, None) for name, dtype in (*_OF_TEXTS.items(), *_OF_ROWS.items())
        }
        for name in _OF_STEP:
            setattr(step, name, places[name])
        for name in _OF_SAMPLING:
            setattr(sampling, name, places[name])
        sampling.positions = places["drawn"]
        sampling.first = address(self.first, np.int32, None)
        step.choices = address(self.choices, np.int32, None, 2)

    def _widen_rows(self) -> None:
        """Have room for as many rows in what is kept beside these arrays."""

    def turn_to(self, positions: int) -> None:
        """Know the angles of so many positions."""

    def tap(self, depths: Collection[int]) -> None:
        """Keep the residual stream of rows after so many layers, from the next step on.

        Args:
            depths: Which; steps that keep none are given none.
        """
        assert not depths

    def assign(self, text: int, processors: Any) -> None:
        """Let a text choose its tokens by these processors.

        Args:
            text: The text's number.
            processors: Of the kind that these steps apply.
        """
        self.processors[text], self.processor_counts[text] = processors.address, processors.count

    @abstractmethod
    def describe(self, text: int, rows: OpenRows) -> None:
        """Note where the cache of a text lies."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of the caches: each text is described anew before the next step."""

    def hold(self, texts: int, places: Ordered[int] = ()) -> None:
        """Have so many texts, each with one row: its last token.

        Args:
            texts: How many.
            places: [texts] the number that each of them has had so far, -1 where it is new and is to be written; by
                default all are new.
        """
        self.grow(texts, texts, texts)
        self.texts = texts
        places = places or [-1] * texts
        if places != list(range(texts)):
            for name in _OF_TEXTS:
                array = getattr(self, name)
                array[:texts] = array[places]
            self._move(places)
        self.sizes[:texts] = 1
        self.count()

    @abstractmethod
    def _move(self, places: Ordered[int]) -> None:
        """What is kept of texts beside the arrays stands at other numbers now, see `hold`."""

    def draft(self, text: int, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Let one text have a tree: its tokens and parents [nodes], the root's first."""
        nodes = len(tokens)
        self.sizes[text], self.drafts[0, text, :nodes], self.drafts[1, text, :nodes] = nodes, tokens, parents

    def count(self, drafted: int = 0) -> None:
        """Have room for all rows of the step.

        Args:
            drafted: How many rows all texts have beyond one each.
        """
        self.rows = self.texts + drafted
        if drafted:
            # No trees of so many nodes have more pairs than one of them all.
            self.grow(self.texts, self.rows, self.texts + (drafted + 1) ** 2)
        passed, sampling = self._struct.passed, self._struct.sampling
        passed.rows, passed.segment_count, sampling.texts = self.rows, self.texts, self.texts

    @abstractmethod
    def run(self) -> None:
        """One step of all texts: what their rows read, the pass, the choice of tokens, and the rows that stay.

        Raises:
            OutOfMemory: And then nothing has changed.
        """

    @property
    def experts(self) -> np.ndarray | None:
        """[texts] of all layers together, how many experts the rows of each text had read in the last step.

        None where layers have no experts.
        """
        return None

    @abstractmethod
    def segments(self) -> list[Segment]:
        """The rows of all texts, for a pass that they share with others: to be its last segments.

        `choose` ends the step.
        """

    @abstractmethod
    def choose(self, logits: torch.Tensor) -> None:
        """Choose tokens by the logits [rows, vocab] of a pass over `segments`, and keep the rows that stay.

        Raises:
            OutOfMemory: And then nothing has changed.
        """

    def go_on(self) -> None:
        """Go on with the texts that wait for masks, once these are known.

        Raises:
            OutOfMemory: And then nothing has changed.
        """
        assert not self.awaits_masks

    @abstractmethod
    def keep(self, text: int) -> None:
        """Keep the rows of one text, whose `accepted`, `paths` and `chosen` Python has written."""

    @property
    def has_room(self) -> bool:
        """Whether there is room for another step of every text, as the last step left them."""
        return not self._struct.full

    def stand(self) -> None:
        """Count where texts stand after `next` was written."""
        self._struct.reach = int(self.next[: self.texts].sum())

    def without_room(self) -> list[int]:
        """The numbers of the texts without room for another step, which the caller gives some."""
        self._struct.full = 0
        return np.flatnonzero(self.next[: self.texts] > self.ends[: self.texts]).tolist()

    def chosen_tokens(self) -> list[int]:
        """What `chosen` holds."""
        return self._chosen[: self.texts]

    @property
    def reach(self) -> int:
        """The sum of the positions at which the texts' last tokens stand, after the last step."""
        reach: int = self._struct.reach
        return reach

    @property
    def plain(self) -> bool:
        """Whether the last step gave one token to each text, without any drafts."""
        return bool(self._struct.plain)

    @property
    def address(self) -> int:
        """Where the `ArrayStep` of csrc/abi.h stands, as long as this object lives."""
        return self._at


def _longer(array: np.ndarray | None, size: int, dtype: type[np.generic]) -> np.ndarray:
    """An array of `size` numbers that begins with those of another."""
    longer = np.zeros(size, dtype=dtype)
    if array is not None:
        longer[: len(array)] = array
    return longer
