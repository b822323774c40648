"""Drafters that ask a trained head: what they share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.method_spec import given, parts, spelled
from decodery.core.registry import methods
from decodery.core.requirements import Origin, Requirements
from decodery.models.loaders.drafts import shipped_head
from decodery.models.loaders.origins import origin_of, same_model
from decodery.models.protocol import Reader
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.logits_source import LogitsSource
from decodery.step.look_ahead import Ahead, Level, Look
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter, logged
from decodery.step.tree_policy import TreePolicy

from .grown import DraftHead
from .head import MADE, BoundHead, TrainedHead
from .head_pass import after, ahead, drawn
from .reading import HeadReading

K = TypeVar("K", bound=BoundHead)
_BOUND = "_bound_heads"
"""Where a target keeps the heads that read it. Its words are packed once for a head, not once for every text."""


@dataclass(frozen=True)
class TrainedDrafter(TreeDrafter):
    """An expander that needs a trained head.

    Attributes:
        head: The file or folder that `decodery train head` made, or a `TrainedHead`; None: the one that comes with this
            package for the embedded model.
    """

    kind: ClassVar[type[BoundHead]]

    head: TrainedHead | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.kind.kind
        if self.trained is not None and self.trained.kind != name:
            raise SettingsError(
                f"this is a head for {self.trained.kind}, not for {name}: use the drafter {self.trained.kind}, or "
                f"{MADE} --kind {name}"
            )

    @cached_property
    def trained(self) -> TrainedHead | None:
        """The head, None while it is left to what comes along for the target."""
        if isinstance(self.head, TrainedHead):
            return self.head
        return None if self.head is None else TrainedHead.load(self.head)

    @property
    def requirements(self) -> Requirements:
        taps = () if self.trained is None else self.kind.watches(self.trained)
        return Requirements.merged((super().requirements, Requirements(taps=taps, prompt_taps=True, parts=True)))

    @cached_property
    def rates(self) -> tuple[tuple[float, ...], ...]:
        found = () if self.trained is None else self.trained.facts.get("rates", ())
        return tuple(tuple(ranks) for ranks in found)

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        if self.head is not None:
            return self
        name, path = self.kind.kind, shipped_head(self.kind.kind, model.config.vocabulary)
        if path is None:
            raise SettingsError(
                f"no head for {name} comes along for this model: make one with `decodery train head -m MODEL --kind "
                f"{name} --out DIR` and name it, as in {spelled(self, name, head='DIR')}"
            )
        return replace(self, head=TrainedHead.load(path))

    def _bound(self, model: Reader) -> BoundHead:
        assert self.trained is not None
        return bound(self.kind, self.trained, model)


@dataclass(frozen=True)
class HeadDrafter(TrainedDrafter):
    """One that grows trees with its head alone."""

    kind: ClassVar[type[DraftHead]]

    tree_policy: TreePolicy | str | None = field(default="eagle-2", kw_only=True)

    def start(self, seq: Sequence) -> HeadReading:
        head = self._bound(seq.request.model)
        assert isinstance(head, DraftHead)
        return HeadReading.begin(head)

    def reach(self, seq: Sequence) -> int:
        reading: HeadReading = seq.states[self]
        return 0 if reading.empty else min(seq.remaining, reading.head.reach)

    def drawn(self, seq: Sequence, length: int) -> ForwardCoroutine[list[int]]:
        return drawn(seq.states[self], seq, length)

    def read_ahead(
        self,
        seq: Sequence,
        plan: tuple[Level, ...],
        *,
        shaped: bool = True,
        origin: Origin = "deterministic",
    ) -> ForwardCoroutine[Ahead | None] | None:
        reading: HeadReading = seq.states[self]
        look = Look.below(seq, plan, origin, shaped=shaped) if reading.head.model.device.type != "cpu" else None
        return None if look is None else ahead(reading, look)

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        reading: HeadReading = seq.states[self]
        return reading.head.spread((yield from after(reading, tree, nodes)))

    def most_likely(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], k: int, *, shaped: bool = True
    ) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray]]:
        if not seq.request.sampler.keeps(shaped=shaped):
            return (yield from super().most_likely(seq, tree, nodes, k, shaped=shaped))
        reading: HeadReading = seq.states[self]
        logits = yield from after(reading, tree, nodes)
        ids, chances = reading.best(logits, k)
        return logged((np.array(ids), np.array(chances)))

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        reading: HeadReading = seq.states[self]
        reading.see(seq, seen)


def bound(kind: type[K], trained: TrainedHead, model: Reader) -> K:
    """A trained head of a kind beside its target, on the target's device; the same one for all texts."""
    # A head holds its target: a table beside the target would never let go of it.
    heads: dict[int, BoundHead] = vars(model).setdefault(_BOUND, {})
    if id(trained) not in heads:
        heads[id(trained)] = kind(trained, model)
        _warn_of_another(trained, model)
    found = heads[id(trained)]
    assert isinstance(found, kind)
    return found


def _warn_of_another(trained: TrainedHead, model: Reader) -> None:
    """Warn where a published head names another model than the one that it fits by its shape."""
    verifier, origin = trained.facts.get("verifier", ""), origin_of(model)
    if verifier and origin and not same_model(verifier, origin):
        warnings.warn(
            f"this head was made for {verifier}, and the model is {origin}: its drafts may be accepted less often",
            stacklevel=2,
        )


def head_kind(name: str) -> type[BoundHead]:
    """The kind of head that the drafter `name` asks.

    Raises:
        SettingsError: If there is none.
    """
    kinds = {each.name: each.cls.kind for each in methods("drafter") if issubclass(each.cls, TrainedDrafter)}
    if name not in kinds:
        raise SettingsError(f"{name} has no head to train: train one for {', '.join(kinds)}")
    return kinds[name]


def head_named(spec: str) -> tuple[type[BoundHead], dict[str, Any]]:
    """The kind of head that a text such as "hydra:prefix=true" names, and the shape it is to have.

    Settings are the keyword arguments of the kind's `untrained`.

    Raises:
        SettingsError: For others.
    """
    name, settings = parts(spec)
    kind = head_kind(name)
    shape = [each for each, told in signature(kind.untrained).parameters.items() if told.kind is told.KEYWORD_ONLY]
    kinds = get_type_hints(kind.untrained) if shape else {}
    return kind, given(name, settings, {each: kinds[each] for each in shape})
