"""A corpus of tokens with a suffix array: where any run of tokens occurs, found in a few comparisons."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from decodery.core.errors import CorruptFile, VocabularyMismatch
from decodery.models.config import TOKENS
from decodery.models.loaders.fields import Fields, Kind, Listed, Text, Whole, read_json
from decodery.models.trained.artifact import remembered

DEPTH = 64
"""Suffixes are sorted by so many tokens: more than any match and its continuation together."""
FORMAT = "decodery-datastore-1"
_HEADER: dict[str, Kind] = {
    "format": Text(64),
    "shards": Listed(Whole(0, 2**32 - 1), 1 << 16),
    "separator": Whole(0, 2**32 - 1),
    "vocab_size": TOKENS,
}


class SuffixArray:
    """Texts with the sorted order of their suffixes.

    Args:
        tokens: [n] big-endian uint32, so that bytes compare like tokens.
        order: [n] uint32, where suffixes start.
    """

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        self.tokens = tokens
        self.order = order
        self._bytes = np.ascontiguousarray(tokens).data.cast("B")
        self._order = np.ascontiguousarray(order, dtype=np.uint32).data

    @classmethod
    def build(cls, tokens: np.ndarray) -> SuffixArray:
        """Sort the suffixes of `tokens` [n] by their first `DEPTH` tokens, by position among equals."""
        return cls(np.asarray(tokens, dtype=">u4"), sort_suffixes(tokens))

    def find(self, run: Sequence[int]) -> tuple[int, int]:
        """The range of `order` whose suffixes begin with `run`."""
        wanted = np.asarray(run, dtype=">u4").tobytes()
        width, data = len(wanted), self._bytes

        def beginning(start: int) -> bytes:
            return data[4 * start : 4 * start + width].tobytes()

        low = bisect_left(self._order, wanted, key=beginning)
        return low, bisect_right(self._order, wanted, low, key=beginning)


class Datastore:
    """Suffix arrays over documents, one per shard.

    Memory: what is opened from a folder stays on disk and is paged in as it is searched.

    Args:
        separator: The token between documents; no continuation crosses it.
    """

    def __init__(self, shards: Sequence[SuffixArray], separator: int, vocab_size: int) -> None:
        self.shards = list(shards)
        self.separator = separator
        self.vocab_size = vocab_size

    def __deepcopy__(self, memo: dict[int, object]) -> Datastore:
        # Nothing is ever written to it.
        return self

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]], separator: int, vocab_size: int) -> Datastore:
        """One shard in memory."""
        tokens = [token for document in documents for token in (*document, separator)]
        return cls([SuffixArray.build(np.asarray(tokens, dtype=np.int64))], separator, vocab_size)

    @staticmethod
    def open(folder: str) -> Datastore:
        """A folder made by `decodery train datastore`.

        Raises:
            CorruptFile: If it is none.
        """
        header = Path(folder).expanduser() / "datastore.json"
        if not header.is_file():
            raise CorruptFile(
                f"there is no datastore in {folder}: make one with decodery train datastore -m MODEL FILES --out "
                f"{folder}"
            )
        return _open(header.parent)

    def fits(self, vocab_size: int) -> None:
        """Raise VocabularyMismatch where the tokens are those of a model with another vocabulary."""
        if self.vocab_size != vocab_size:
            raise VocabularyMismatch(
                f"the datastore was made for {self.vocab_size} tokens and the model has {vocab_size}: "
                "build it with this model's tokenizer"
            )

    def count(self, run: Sequence[int]) -> int:
        """How often `run` occurs."""
        return sum(end - start for start, end in (shard.find(run) for shard in self.shards))

    def longest(self, suffix: Sequence[int], least: int = 1) -> int:
        """Length of the longest end of `suffix` that occurs, 0 where that is below `least`."""
        # A run occurs only if its own end does, so the lengths that occur are all those up to the longest.
        low, high = least - 1, len(suffix)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(suffix[len(suffix) - middle :]):
                low = middle
            else:
                high = middle - 1
        return low if low >= least else 0

    def continuations(self, run: Sequence[int], most: int, length: int) -> np.ndarray:
        """[hits, length] int64: what follows `run`, in lexicographic order; -1 after the end of a document.

        Of more than `most` occurrences so many are taken, evenly spread over the order.
        """
        ranges = [(shard, *shard.find(run)) for shard in self.shards]
        total = sum(end - start for _, start, end in ranges)
        # In integers: a step of floats may give the end of a range, where another run stands.
        taken = np.arange(min(total, most), dtype=np.int64) * total // max(min(total, most), 1)
        windows, before = [], 0
        for shard, start, end in ranges:
            low, high = np.searchsorted(taken, (before, before + end - start))
            if high > low:
                windows.append(self._windows(shard, taken[low:high] - before + start, len(run), length))
            before += end - start
        if not windows:
            return np.empty((0, length), dtype=np.int64)
        if len(windows) == 1:
            return windows[0]
        every = np.concatenate(windows)
        return every[np.lexsort(every.T[::-1])]

    def documents(self) -> list[np.ndarray]:
        """All documents, as [n] int64."""
        parts: list[np.ndarray] = []
        for shard in self.shards:
            tokens = np.asarray(shard.tokens, dtype=np.int64)
            self._check(tokens)
            ends = np.flatnonzero(tokens == self.separator)
            parts += [part[part != self.separator] for part in np.split(tokens, ends)]
        return [part for part in parts if len(part)]

    def _check(self, tokens: np.ndarray) -> None:
        """Raise CorruptFile where one of `tokens` is none; a datastore is too large to look through all of it."""
        if ((tokens >= self.vocab_size) & (tokens != self.separator)).any():
            raise CorruptFile(
                f"the datastore holds tokens beyond the {self.vocab_size} it was made for: it is damaged, make it again"
            )

    def _windows(self, shard: SuffixArray, places: np.ndarray, skip: int, length: int) -> np.ndarray:
        at = shard.order[places].astype(np.int64)[:, None] + np.arange(skip, skip + length)
        tokens = shard.tokens.take(at, mode="clip").astype(np.int64)
        self._check(tokens)
        ended = np.logical_or.accumulate((at >= len(shard.tokens)) | (tokens == self.separator), axis=1)
        return np.where(ended, -1, tokens)


def sort_suffixes(tokens: np.ndarray) -> np.ndarray:
    """[n] uint32: where the suffixes of `tokens` [n] start, in the order of their first `DEPTH` tokens.

    Prefix doubling (Suffix Arrays: A New Method for On-Line String Searches, 1993), one sort per doubling. Takes about
    50 bytes per token meanwhile.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    n, known = len(rank), 1
    while known < DEPTH and n:
        key = rank * (n + 1)
        key[: max(n - known, 0)] += rank[known:] + 1
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank[order] = np.cumsum(np.r_[False, ordered[1:] != ordered[:-1]])
        known *= 2
        if rank[order[-1]] == n - 1:
            break
    return np.argsort(rank, kind="stable").astype(np.uint32)


@remembered
def _open(folder: Path) -> Datastore:
    header = folder / "datastore.json"
    facts = Fields(read_json(header), str(header), _HEADER)
    if facts.need("format") != FORMAT:
        raise CorruptFile(f"{header} is of another format than {FORMAT}: build the datastore again")
    shards = [_shard(folder, number, size) for number, size in enumerate(facts.need("shards"))]
    return Datastore(shards, facts.need("separator"), facts.need("vocab_size"))


def _shard(folder: Path, number: int, size: int) -> SuffixArray:
    found = []
    for part, kind in (("tokens", ">u4"), ("order", "<u4")):
        path = folder / f"{number:05d}.{part}.npy"
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header is read as Python source, which fails in many ways
            raise CorruptFile(f"{path} is missing or damaged: build the datastore again") from error
        if values.shape != (size,) or values.dtype != kind:
            raise CorruptFile(f"{path} differs from the header of its datastore: build it again")
        found.append(values)
    return SuffixArray(*found)
