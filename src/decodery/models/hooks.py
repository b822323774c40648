"""Named places of a pass, where hidden states are read and where a segment's own rows may be changed."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from decodery.core.errors import SettingsError, UnsupportedModel

from .layer_plan import LayerPlan, layer_steps
from .torch.mixture import Shared

if TYPE_CHECKING:
    from .batch import Batch, Segment

Tap = int | str
"""A site, named as `site` says."""

OF_LAYERS = ("head_out", "attn_out", "mlp_out")
OF_OUTPUTS = ("final_norm", "logits")
SITES = frozenset(("residual", *OF_LAYERS, *OF_OUTPUTS))
OF_SCORES = "attn_scores"
_WITHIN = ("resid_pre", "resid_post", *OF_LAYERS, OF_SCORES)


class HookPoint(NamedTuple):
    """residual: the stream after so many layers, 0 the embeddings.

    The others as `site` says, with their layer or 0.

    Attributes:
        given: As its rows were before they were changed there.
    """

    name: str
    layer: int = 0
    given: bool = False


@functools.lru_cache(maxsize=4096)
def hook_point(tap: Tap, layers: int) -> HookPoint:
    """The place a tap of a model of so many layers names.

    A number is the residual stream [n, hidden] after so many layers: 0 the embeddings, -1 after the last one. So are
    "embed", "half", after half of the layers, and "resid_pre.L" and "resid_post.L", before and after layer L.
    "head_out.L": [n, heads * head_dim], what the heads read, before the output projection; "attn_out.L" and
    "mlp_out.L": [n, hidden], what a sublayer adds to the stream; "final_norm" [m, hidden] and "logits" [m, vocab]: what
    the vocabulary projection is given and what it gives, for the rows whose logits are wanted. Layers count from either
    end. "given." before a hook point within a layer: its rows before any change there. "attn_scores.L" [n, slots] is
    only written: what is added to the scores of all heads before the softmax, see `Intervention`.

    Args:
        tap: A number or a name.
        layers: Layers of the model.

    Raises:
        SettingsError: For any other.
    """
    if isinstance(tap, int):
        after = tap if tap >= 0 else layers + 1 + tap
        if not 0 <= after <= layers:
            raise SettingsError(
                f"there is no state after layer {tap} of {layers}: taps are 0 (the embeddings) to {layers}, "
                f"or -1 (after the last layer) to {-layers - 1}"
            )
        return HookPoint("residual", after)
    if tap.startswith("given.") and tap.split(".")[1] in OF_LAYERS:
        return hook_point(tap.removeprefix("given."), layers)._replace(given=True)
    name, dot, number = tap.partition(".")
    if not dot and name == "embed":
        return HookPoint("residual", 0)
    if not dot and name == "half":
        return HookPoint("residual", layers // 2)
    if not dot and name in OF_OUTPUTS:
        return HookPoint(name)
    if dot and name in _WITHIN and number.removeprefix("-").isdecimal():
        layer = int(number) if int(number) >= 0 else layers + int(number)
        if 0 <= layer < layers:
            return (
                HookPoint("residual", layer + (name == "resid_post"))
                if name.startswith("resid")
                else HookPoint(name, layer)
            )
    known = ["embed", "half", *OF_OUTPUTS]
    known += [f"{name}.{layer}" for name in _WITHIN for layer in range(layers)]
    near = difflib.get_close_matches(tap, known, n=3, cutoff=0.6)
    raise SettingsError(
        f"there is no site {tap!r} in a model of {layers} layers{', the nearest are ' if near else ''}"
        f"{', '.join(near)}: sites are embed, half, final_norm, logits, and for L "
        f"from 0 to {layers - 1}, or from -1 down, {', '.join(f'{name}.L' for name in _WITHIN)}"
    )


@dataclass(frozen=True, eq=False)
class Intervention:
    """A change of a segment's rows at one hook point; keys and values of earlier rows stay.

    Attributes:
        hook_point: Where it is applied.
        change: Given the rows there [n, width] and their segment, returns what they are to be; it must neither write to
            what it is given nor depend on anything else that shares the pass. At "attn_scores.L" it is given zeros [n,
            slots] float64, whose slots are those of the segment's cache, content and then tentative rows, at
            `segment.slots(L)`.
    """

    hook_point: Tap
    change: Callable[[torch.Tensor, Segment], torch.Tensor]


class Hooks:
    """What one pass has to do at its hook points.

    A hook point that is read shows the rows after all changes there.

    Args:
        where: The hook point of every tap.
        shared: Which ones the rows of a segment may take together, None for each row's own choice.
        states: What was read, by hook point.
        chosen: [N, k] the experts that rows took, by layers that have some.
    """

    def __init__(
        self,
        where: dict[Tap, HookPoint],
        changes: dict[HookPoint, list[tuple[int, Intervention]]],
        batch: Batch | None,
        shared: Shared | None = None,
    ) -> None:
        self.where = where
        self.states: dict[HookPoint, torch.Tensor] = {}
        self.chosen: list[torch.Tensor] = []
        self._given = {place for place in where.values() if place.given}
        self._wanted = set(where.values()) - self._given
        self._places = {place._replace(given=False) for place in where.values()} | changes.keys()
        self.shared = shared
        self._changes = changes
        self._batch = batch

    @classmethod
    def of(
        cls, batch: Batch, taps: Sequence[Tap], layer_plan: LayerPlan, layers: int, *, steers: bool = False
    ) -> Hooks:
        """The visits of a pass over a route.

        Args:
            steers: Whether what attends adds to attention's scores.

        Raises:
            SettingsError: For a hook point that the pass does not come by.
            UnsupportedModel: If scores cannot be changed.
        """
        where = {tap: hook_point(tap, layers) for tap in taps}
        if any(place.name == OF_SCORES for place in where.values()):
            raise SettingsError("attention's scores are added to and not read: attn_scores.L is no tap")
        changes: dict[HookPoint, list[tuple[int, Intervention]]] = {}
        for number, segment in enumerate(batch.segments):
            for intervention in segment.interventions:
                changes.setdefault(hook_point(intervention.hook_point, layers), []).append((number, intervention))
            if segment.steered and (segment.cache is None or not steers):
                raise UnsupportedModel(
                    "attention is steered in decoder models that decodery runs itself, over a cache: load the model "
                    "with decodery, or steer at another site"
                )
        if layer_plan.layers is not None or layer_plan.skip:
            _check({place._replace(given=False) for place in where.values()} | changes.keys(), layer_plan, layers)
        # What is added to scores is asked for where attention is worked out.
        changes = {place: each for place, each in changes.items() if place.name != OF_SCORES}
        shared = None if layer_plan.experts is None else Shared(layer_plan.experts, batch.offsets)
        return cls(where, changes, batch, shared)

    @classmethod
    def reading(cls, places: Sequence[HookPoint]) -> Hooks:
        """Visits that read at these places and change nothing."""
        return cls({f"{place.name}.{place.layer}": place for place in places}, {}, None)

    def __contains__(self, place: HookPoint) -> bool:
        return place in self._places

    def __iter__(self) -> Iterator[HookPoint]:
        return iter(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def changed(self, place: HookPoint) -> bool:
        """Whether some rows are changed there."""
        return place in self._changes

    def changes(self) -> bool:
        """Whether some rows are changed anywhere."""
        return bool(self._changes)

    def streams(self) -> bool:
        """Whether nothing is changed, and nothing is read within a layer: the stream between layers at most."""
        return not self._changes and all(place.name not in OF_LAYERS for place in self._places)

    def enter(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows as they enter a layer; after the first one they are states, which were changed there already."""
        place = HookPoint("residual", layer)
        if layer == 0:
            return self.visit(place, rows)
        if place in self._wanted:
            self.states[place] = rows
        return rows

    def visit(self, place: HookPoint, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all segments as they go on from `place`; kept where they are wanted."""
        if self._given and (before := place._replace(given=True)) in self._given:
            self.states[before] = rows
        if place in self._changes:
            rows = self._change(place, rows)
        if place in self._wanted:
            self.states[place] = rows
        return rows

    def tapped(self) -> dict[Tap, torch.Tensor]:
        """What was read, by the taps as they were asked for."""
        return {tap: self.states[place] for tap, place in self.where.items()}

    def _change(self, place: HookPoint, rows: torch.Tensor) -> torch.Tensor:
        assert self._batch is not None
        bounds = self._batch.logit_rows[1] if place.name in OF_OUTPUTS else self._batch.offsets
        rows = rows.clone()
        for number, intervention in self._changes[place]:
            own = slice(bounds[number], bounds[number + 1])
            changed = intervention.change(rows[own], self._batch.segments[number])
            if changed.shape != rows[own].shape:
                raise SettingsError(
                    f"an intervention at {intervention.hook_point} was given rows {list(rows[own].shape)} and returned "
                    f"{list(changed.shape)}"
                )
            rows[own] = changed.to(rows.dtype)
        return rows


def _check(places: set[HookPoint], layer_plan: LayerPlan, layers: int) -> None:
    """Raise SettingsError unless the route comes by all of these."""
    run = layer_steps(layer_plan, layers)
    passed = {HookPoint(name) for name in OF_OUTPUTS} | {HookPoint("residual", run[0].layer if run else 0)}
    for stop in run:
        passed.add(HookPoint("residual", stop.layer + 1))
        passed |= (
            {HookPoint(name, stop.layer) for name in ("head_out", "attn_out", OF_SCORES)} if stop.attention else set()
        )
        passed |= {HookPoint("mlp_out", stop.layer)} if stop.mlp else set()
    for place in places - passed:
        if place.name == "residual":
            raise SettingsError(f"there is no state after layer {place.layer} in a pass that leaves that layer out")
        raise SettingsError(f"there is no {place.name}.{place.layer} in a pass that leaves that sublayer out")
