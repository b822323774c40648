"""Drafters made of drafters: both at once, one where the other has nothing, or one chosen by the context."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register, resolve
from decodery.core.requirements import Provides
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

__all__ = ["cascade", "router", "union"]

Choice = Callable[[Sequence], int]
"""Says which drafter speaks in this step."""


@runtime_checkable
class Matcher(Protocol):
    """A drafter that knows how many of the last tokens it has seen before."""

    def match_length(self, seq: Sequence) -> int: ...


@dataclass(frozen=True)
class _Combined(Composite):
    """drafters: two or more, as instances or as texts (in one text separated by "/")."""

    drafters: tuple[Drafter | str, ...]

    def __post_init__(self) -> None:
        if len(self.drafters) < 2:
            raise SettingsError("a combination needs at least two drafters")
        parts = [resolve("drafter", each) for each in self.drafters]
        # A drafter that is given twice is two parts, with a state each.
        distinct = (copy(part) if part in parts[:number] else part for number, part in enumerate(parts))
        object.__setattr__(self, "drafters", tuple(distinct))

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.drafters  # type: ignore[return-value]  # resolved above

    @property
    def provides(self) -> Provides:
        return Provides.merged(part.provides for part in self.parts)


@register("union", lossless=True)
@dataclass(frozen=True)
class Union(_Combined):
    """Drafts what all of several drafters draft, as one tree; what the budget cuts is the later drafters'.

    Each learns from every pass, whichever drafts it scored. Siblings of the fused tree count as deterministic, which
    every rule verifies without bias: what a part draws at random is independent of what rules draw. Scope and memory:
    those of the parts.

    Attributes:
        drafters: Two or more, the most trusted first.
    """

    @property
    def provides(self) -> Provides:
        return replace(super().provides, drafts=("deterministic",))

    def largest(self) -> int | None:
        sizes = [part.largest() for part in self.parts]
        return None if None in sizes else sum(filter(None, sizes))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        tree = DraftTree.root(seq.last_token)
        for drafter in self.parts:
            tree = tree.merge((yield from as_coroutine(drafter.propose(seq, budget))))
            if len(tree) > budget.nodes:
                break
        # Parents stand before their children, so any beginning of the list of nodes is a tree.
        return tree.prune(np.arange(len(tree)) <= budget.nodes)


@register("cascade", lossless=True)
@dataclass(frozen=True)
class Cascade(_Combined):
    """Drafts what the first of several drafters drafts that has anything to say.

    Scope and memory: those of the parts.

    Attributes:
        drafters: Two or more, in the order they are asked.
    """

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        tree = DraftTree.root(seq.last_token)
        for drafter in self.parts:
            tree = yield from as_coroutine(drafter.propose(seq, budget))
            if len(tree) > 1:
                break
        return tree


@register("router", paper="SAM Decoding: Speculative Decoding via Suffix Automaton (2024)", lossless=True)
@dataclass(frozen=True)
class Router(_Combined):
    """Chooses one of several drafters by the length of its match or by a function.

    Scope and memory: those of the parts.

    Attributes:
        match: Tokens that a match must have for its drafter to be chosen.
        choose: In place of that, a function from the sequence to a drafter's number.
        drafters: Asked in order; the first whose match is at least `match` tokens long speaks, else the last one. All
            but the last must know how long their match is.
    """

    match: int = 5
    choose: Choice | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        blind = [part for part in self.parts[:-1] if not isinstance(part, Matcher)]
        if self.choose is None and blind:
            raise SettingsError(
                f"router cannot tell how long a match of {type(blind[0]).__name__} is: put it last, or give choose"
            )

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        return (yield from as_coroutine(self.parts[self._chosen(seq)].propose(seq, budget)))

    def _chosen(self, seq: Sequence) -> int:
        if self.choose is not None:
            return self.choose(seq)
        for number, drafter in enumerate(self.parts[:-1]):
            assert isinstance(drafter, Matcher)
            if drafter.match_length(seq) >= self.match:
                return number
        return len(self.parts) - 1


def union(*drafters: Drafter | str) -> Union:
    """What all of these draft, as one tree; the most trusted first."""
    return Union(drafters)


def cascade(*drafters: Drafter | str) -> Cascade:
    """What the first of these drafts that has anything to say."""
    return Cascade(drafters)


def router(*drafters: Drafter | str, match: int = 5, choose: Choice | None = None) -> Router:
    """The first drafter whose match is at least `match` tokens long, or the one that `choose` gives."""
    return Router(drafters, match, choose)
