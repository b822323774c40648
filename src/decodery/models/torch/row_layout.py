"""What attention of a pass goes by, in one buffer: where rows lie, and what each of them sees.

A row sees the content of its text from one slot on, and of the pass's rows those whose bit is set: its ancestors in a
draft tree, the rows before it in a prompt. A window changes the first slot and clears bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.nn.functional import pad

from decodery.core.abstract import Contract

from ..batch import Segment
from ..cache.page_pool import SLOTS
from .attention import near

BITS = 32
"""Tentative rows that a word says of whether they are seen."""
TILE = 5
"""Integers of a tile."""


@dataclass(frozen=True)
class TextRows(Contract):
    """The rows of texts in a pass, whose caches have lost nothing.

    Attributes:
        counts: [texts] how many rows each has.
        held: [texts] slots of content before them.
        prefixes: [texts] how many of these belong to no token.
        retained: [texts] tentative rows of earlier passes that stay before them.
        positions: [rows].
    """

    counts: np.ndarray
    held: np.ndarray
    prefixes: np.ndarray
    retained: np.ndarray
    positions: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """[texts] the first row of each."""
        ends: np.ndarray = np.cumsum(self.counts)
        return ends - self.counts

    @property
    def owners(self) -> np.ndarray:
        """[rows] the text of each."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @abstractmethod
    def see(self, bits: np.ndarray, windows: list[int | None]) -> None:
        """Write which tentative rows of its text each row sees.

        Args:
            bits: [kinds, rows, words] int32, in which each row sees the first one.
            windows: [kinds].
        """

    def known_there(self) -> Sequence[torch.Tensor | None]:
        """Of each text, which tentative rows each of its rows sees [n, m] where its device alone knows that."""
        return ()

    def see_there(self, bits: torch.Tensor) -> None:
        """`see` of what the device alone knows, for bits [kinds, rows, words] that lie there."""
        there = self.known_there()
        known = [(first, seen) for first, seen in zip(self.firsts.tolist(), there, strict=False) if seen is not None]
        if known and len(known) == len(there) and len({seen.shape for _, seen in known}) == 1:
            known = [(0, torch.cat([seen for _, seen in known]))]
        for first, seen in known:
            bits[:, first : first + len(seen)] = packed_there(seen, bits.shape[2])


@dataclass(frozen=True)
class SegmentRows(TextRows):
    """Rows as segments have them, whatever each sees.

    Attributes:
        segments: The texts.
    """

    segments: Sequence[Segment]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Self:
        """The rows of segments with caches."""
        counts, retained = np.array([(len(segment), segment.retained) for segment in segments]).T
        caches = [segment.cache for segment in segments if segment.cache is not None]
        held, prefixes = np.array([(cache.length, cache.prefix) for cache in caches]).T
        positions = np.concatenate([segment.positions for segment in segments])
        return cls(counts, held, prefixes, retained, positions, segments)

    def see(self, bits: np.ndarray, windows: list[int | None]) -> None:
        firsts = self.firsts
        # One row sees itself.
        for number in np.flatnonzero(self.counts + self.retained > 1).tolist():
            segment, first = self.segments[number], int(self.held[number])
            if segment.visible is not None:
                continue
            assert segment.cache is not None
            own = slice(firsts[number], firsts[number] + len(segment))
            stand = segment.cache.positions[0, first : first + segment.retained + len(segment)]
            seen = segment.seen()
            for kind, window in enumerate(windows):
                visible = seen if window is None else seen & near(stand, segment.positions, window)
                bits[kind, own] = packed(visible, bits.shape[2])

    def known_there(self) -> Sequence[torch.Tensor | None]:
        return [segment.visible for segment in self.segments]


@dataclass(frozen=True)
class DraftRows(TextRows):
    """Rows that are trees of drafts, all of which lie within every window.

    Attributes:
        above: [rows] the row that each follows; a root follows itself.
        doublings: Such that no node is deeper than 2 to this power; negative where all are roots.
    """

    above: np.ndarray
    doublings: int

    def fit(self, windows: list[int | None]) -> bool:
        """Whether no window ends within a tree."""
        limits = [window for window in windows if window is not None]
        roots = self.positions[self.firsts][self.owners] if limits else self.positions
        return all((first_seen(self.positions, window) <= roots).all() for window in limits)

    def see(self, bits: np.ndarray, windows: list[int | None]) -> None:
        if self.doublings < 0:
            return
        n, jumps = len(self.positions), self.above
        local = np.arange(n) - self.firsts[self.owners]
        own = np.zeros((n, bits.shape[2]), dtype=np.uint32)
        own[np.arange(n), local // BITS] = np.uint32(1) << (local % BITS).astype(np.uint32)
        # After k rounds a row knows its 2^k nearest ancestors, itself among them.
        for _ in range(self.doublings + 1):
            own, jumps = own | own[jumps], jumps[jumps]
        bits[:, :n] = own.view(np.int32)


@dataclass(frozen=True)
class Layout:
    """Sizes of what a pass says of its rows, one field after another in one buffer of int32.

    Attributes:
        rows: Rows of the pass, fillers included.
        words: Of 32 bits each, for the tentative rows of a text.
        kinds: Windows that layers differ in.
        tiles: Groups of rows of one text that a kernel takes together.
        tile_rows: Rows of such a group at most.
    """

    rows: int
    words: int
    kinds: int
    tiles: int
    tile_rows: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of places, lengths and slots [rows], begins, bits and tiles, see `fill`."""
        rows, kinds = self.rows, self.kinds
        return [(rows,), (rows,), (rows,), (kinds, rows), (kinds, rows, self.words), (self.tiles, TILE)]

    @property
    def size(self) -> int:
        """Integers of all fields."""
        return int(sum(np.prod(shape) for shape in self.shapes))

    def fields(self, buffer: Any) -> list[Any]:
        """Views of a buffer, an array or a tensor, as the fields."""
        found, first = [], 0
        for shape in self.shapes:
            last = first + int(np.prod(shape))
            found.append(buffer[first:last].reshape(shape))
            first = last
        return found

    def fill(self, buffer: np.ndarray, rows: TextRows, places: np.ndarray, windows: list[int | None]) -> None:
        """Write the fields of a pass whose caches have made room.

        Args:
            buffer: [size] int32.
            rows: Of the texts.
            places: [texts] where the device finds their page tables.
            windows: [kinds], see `ModelConfig.window`.
        """
        of_rows, lengths, slots, begins, bits, tiles = self.fields(buffer)
        buffer.fill(0)
        slots[:] = np.arange(self.rows) % SLOTS
        bits[:, :, 0] = 1
        counts, held, firsts, owners = rows.counts, rows.held, rows.firsts, rows.owners
        n, starts = len(owners), held + rows.retained
        of_rows[:n], lengths[:n] = places[owners], held[owners]
        slots[:n] = (starts - firsts)[owners] + np.arange(n)
        for kind, window in enumerate(windows):
            if window is not None:
                first = first_seen(rows.positions, window) + rows.prefixes[owners]
                begins[kind, :n] = np.clip(first, 0, held[owners])
        parts = -(-counts // self.tile_rows)
        of = np.repeat(np.arange(len(parts)), parts)
        offsets = (np.arange(len(of)) - (np.cumsum(parts) - parts)[of]) * self.tile_rows
        high, ends = np.minimum(self.tile_rows, counts[of] - offsets), (starts + counts)[of]
        tiles[: len(of)] = np.stack((places[of], firsts[of] + offsets, high, held[of], ends), axis=1)
        rows.see(bits, windows)


def first_seen(positions: np.ndarray, window: int) -> np.ndarray:
    """The first position that rows at these positions see."""
    return positions // -window * -window if window < 0 else positions - window + 1


def packed(seen: np.ndarray, words: int) -> np.ndarray:
    """[n, words] int32 of [n, m] bool, the first of each row in the lowest bit."""
    padded = np.zeros((len(seen), words * BITS), dtype=bool)
    padded[:, : seen.shape[1]] = seen
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


def packed_there(seen: torch.Tensor, words: int) -> torch.Tensor:
    """`packed` of what lies on a device."""
    wide = pad(seen, (0, words * BITS - seen.shape[1])).view(len(seen), words, BITS).long()
    return (wide << torch.arange(BITS, device=seen.device)).sum(dim=2).int()
