"""What native kernels leave out of a cache after every row, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.native.kernels import address
from decodery.core.native.structs import PolicyStruct


@dataclass(frozen=True, eq=False)
class Merge:
    """How slots that go are merged into similar ones: see `Policy` in csrc/abi.h.

    Attributes:
        known: [layers, kv_heads] float64, the least similarity after content, not a number where there is none.
        limits: [retained + rows, evicting layers, kv_heads] float64, the same after each row.
        targets: [retained + rows, evicting layers, kv_heads, n] int32, slots that a row has changed, -1 for none.
        rows: [retained + rows, evicting layers, kv_heads, n, 2 (keys, values), bytes] uint8, what these become, as it
            is stored.
        beta: Share of the newest row in the least similarity.
        threshold: Whether it counts.
        weighted: Whether slots count by the exponential of their similarity, or the mean of them is taken.
    """

    known: np.ndarray
    limits: np.ndarray
    targets: np.ndarray
    rows: np.ndarray
    beta: float
    threshold: bool
    weighted: bool

    def describe(self, struct: PolicyStruct) -> None:
        """Write it for kernels."""
        shape = self.targets.shape
        struct.known_limits = address(self.known, np.float64, None, shape[2])
        struct.limits = address(self.limits, np.float64, *shape[:3])
        struct.targets, struct.merge_room = address(self.targets, np.int32, *shape), shape[3]
        struct.merged = address(self.rows, np.uint8, *shape, 2, None)
        struct.beta, struct.threshold, struct.weighted = self.beta, self.threshold, self.weighted


@dataclass(frozen=True, eq=False)
class Eviction:
    """What slots are worth, and how many of them each row leaves: see `Policy` in csrc/abi.h.

    Attributes:
        places: [layers] int32, which of the layers that evict each is, -1 for none of them.
        held: [layers, kv_heads, slots] float64, what slots of content are worth.
        added: [retained + rows, evicting layers, kv_heads, slots] float32, what each row adds to that, -1 where a head
            does not hold a slot after it; where `newest` what slots are worth, of one head for all.
        room: [retained + rows, kv_heads, slots] float64, what slots are worth after each row, one layer at a time.
        parents: [retained + rows] int32, which of these each goes on from, -1 for content.
        keeps: [layers, rows] int32, how many slots stay after a row.
        first: So many of the first slots go after all others.
        last: [layers, rows] int32, the same of the last slots.
        newest: Whether slots are worth what the last row pays in all heads, not the sum of what rows pay in their own.
        merge: What becomes of slots that go, None where they are lost.
    """

    places: np.ndarray
    held: np.ndarray
    added: np.ndarray
    room: np.ndarray
    parents: np.ndarray
    keeps: np.ndarray
    first: int
    last: np.ndarray
    newest: bool
    merge: Merge | None = None

    def describe(self, struct: PolicyStruct) -> None:
        """Write it for kernels."""
        layers, kv_heads, slots = self.held.shape
        struct.held, struct.held_slots = address(self.held, np.float64, layers, kv_heads, slots), slots
        states, evicting, _, slots = self.added.shape
        struct.added = address(self.added, np.float32, states, evicting, 1 if self.newest else kv_heads, slots)
        struct.worths = address(self.room, np.float64, states, kv_heads, slots)
        struct.evicting, struct.worth_slots, rows = evicting, slots, self.keeps.shape[1]
        struct.places = address(self.places, np.int32, layers)
        struct.parents = address(self.parents, np.int32, states)
        struct.keeps, struct.lasts = (address(each, np.int32, layers, rows) for each in (self.keeps, self.last))
        struct.firsts, struct.newest = self.first, self.newest
        if self.merge is not None:
            self.merge.describe(struct)
