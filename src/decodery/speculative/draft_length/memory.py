"""SpecMemo: a bound in bytes on what decoding one text takes, kept by planning all of it before the text begins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.cache.cache import KVCache
from decodery.models.cache.page_pool import SLOTS
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy
from decodery.step.sequence import Sequence

_CHOOSING = 64
"""Bytes per token of the vocabulary that choosing one token takes at most: sorted copies, masks, laws in float64."""
_ROW = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How much a step drafts, and with how many requests at a time.

    Attributes:
        nodes: Drafted tokens per step.
        slots: Room of every cache.
        bytes: The most that is held at any time.
    """

    nodes: int
    slots: int
    bytes: int


def plan(seq: Sequence, budget: int) -> MemoryPlan:
    """The largest draft with which no step of the text ever holds more than `budget` bytes.

    It is no larger than the request allows, nor than its drafter would make.

    Raises:
        SettingsError: If the text does not fit even without drafts.
    """
    sizes = range(1 + _largest(seq))
    # More nodes never hold less.
    if fitting := bisect_right(sizes, budget, key=lambda nodes: held(seq, nodes)):
        nodes = fitting - 1
        return MemoryPlan(nodes, _slots(seq, nodes), held(seq, nodes))
    needed, most = held(seq, 0), seq.request.prompt_length + seq.request.max_new_tokens
    raise SettingsError(
        f"memory allows {budget / 2**20:.3g} MiB, and a text of up to {most} tokens "
        f"takes {needed / 2**20:.3g} MiB without any draft: allow more, or ask for fewer new tokens"
    )


def held(seq: Sequence, nodes: int) -> int:
    """Bytes of keys, values and logits that a text may come to hold with drafts of `nodes` nodes.

    The target's cache with the rows of the tree, and a copy of those that are kept; the cache of every model that reads
    along; logits of all rows of a pass; draft distributions, where the rule wants them; and what choosing takes.
    """
    slots = _slots(seq, nodes)
    total = seq.cache.slot_bytes * (seq.cache.prefix + slots + nodes)
    rows = _logit_bytes(seq) * (nodes + 1)
    if seq.request.drafter is not None and nodes:
        total += (
            sum(model.new_cache().slot_bytes for model in seq.request.drafter.auxiliary_models(seq.request.model))
            * slots
        )
        rows += _ROW * seq.request.drafter.held_rows(nodes)
        if seq.request.acceptance_rule.requirements.laws and seq.request.drafter.provides.drafts != ("deterministic",):
            rows += torch.float64.itemsize * nodes
    # Off the CPU the laws of all nodes are worked out at once.
    chosen_at_once = 1 if seq.request.model.device.type == "cpu" else nodes + 1
    return total + seq.request.vocab_size * (rows + _CHOOSING * chosen_at_once)


def _largest(seq: Sequence) -> int:
    """The most nodes that a step of the text could draft."""
    if seq.request.drafter is None:
        return 0
    largest = seq.request.drafter.largest()
    return seq.request.max_draft_tokens if largest is None else min(largest, seq.request.max_draft_tokens)


def _slots(seq: Sequence, nodes: int) -> int:
    """Slots of whole pages for the text at its longest."""
    return -(-(seq.request.prompt_length + seq.request.max_new_tokens + nodes) // SLOTS) * SLOTS


def _logit_bytes(seq: Sequence) -> int:
    """Bytes per logit of a pass; a model in half precision computes them in that, and gives them in float32."""
    dtype = seq.request.model.dtype
    return max(dtype.itemsize, 4) + (dtype.itemsize if dtype.itemsize < 4 else 0)


@register(
    "memory",
    paper="SpecMemo: Speculative Decoding is in Your Pocket (2025)",
    guarantee="the output distribution is unchanged, and its tensors never exceed the given bytes",
    lossless=True,
)
@dataclass(frozen=True)
class MemoryBound(DraftLengthPolicy):
    """Drafts no more than fits, with the text at its longest, into a given number of MiB per text.

    Counted are keys and values (of the target, of the rows of the tree, and of draft models), logits and distributions;
    not counted are weights, the states inside a pass, and what drafters without a model remember. Every cache gets its
    final size at once, so that none is ever copied into a larger one. Where the drafter reads the prompt's logits, the
    prompt is read in chunks no longer than a draft. A text that does not fit even without drafts is refused. On a CUDA
    device caches move into memory shared by all texts, which is not counted.

    Attributes:
        mib: Memory per text, in MiB.
    """

    mib: float

    requirements = Requirements(keys=True)

    def __post_init__(self) -> None:
        if not self.mib > 0:
            raise SettingsError(f"memory needs mib above 0, not {self.mib}")

    def start(self, seq: Sequence) -> MemoryPlan:
        assert isinstance(seq.cache, KVCache)
        found = plan(seq, int(self.mib * 2**20))
        seq.rebind(slots=found.slots, chunk=found.nodes + 1)
        seq.cache.provide(found.slots)
        return found

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        return replace(limit, nodes=min(seq.states[self].nodes, limit.nodes))
