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
        limits: [retained + rows, layers, kv_heads] float64, the same after each row.
        targets: [retained + rows, layers, kv_heads, n] int32, slots that a row has changed, -1 for none.
        rows: [retained + rows, layers, kv_heads, n, 2 (keys, values), bytes] uint8, what these become, as it is stored.
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
        struct.known_limits = address(self.known, np.float64, *shape[1:3])
        struct.limits = address(self.limits, np.float64, *shape[:3])
        struct.targets, struct.merge_room = address(self.targets, np.int32, *shape), shape[3]
        struct.merged = address(self.rows, np.uint8, *shape, 2, None)
        struct.beta, struct.threshold, struct.weighted = self.beta, self.threshold, self.weighted


@dataclass(frozen=True, eq=False)
class Eviction:
    """What slots are worth, and how many of them each row leaves: see `Policy` in csrc/abi.h.

    Attributes:
        layers: [layers] bool, those that it acts in.
        held: [layers, kv_heads, slots] float64, what slots of content are worth.
        worths: [retained + rows, layers, kv_heads, slots] float64 after each row, -1 where a head does not hold a slot.
        parents: [retained + rows] int32, which of these each goes on from, -1 for content.
        keeps: [layers, rows] int32, how many slots stay after a row.
        first: So many of the first slots go after all others.
        last: [layers, rows] int32, the same of the last slots.
        newest: Whether slots are worth what the last row pays in all heads, not the sum of what rows pay in their own.
        merge: What becomes of slots that go, None where they are lost.
    """

    layers: np.ndarray
    held: np.ndarray
    worths: np.ndarray
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
        states, rows = len(self.worths), self.keeps.shape[1]
        struct.worth_layers, struct.worth_slots = layers, self.worths.shape[3]
        struct.worths = address(self.worths, np.float64, states, layers, kv_heads, self.worths.shape[3])
        struct.parents = address(self.parents, np.int32, states)
        struct.keeps, struct.lasts = (address(each, np.int32, layers, rows) for each in (self.keeps, self.last))
        struct.firsts, struct.newest = self.first, self.newest
        if self.merge is not None:
            self.merge.describe(struct)
