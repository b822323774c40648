"""The run of a method over one canvas. This is the only file of the package that requests forward passes.

It also hides the differences between models: which row predicts a token, which rows attend to each other, and which
tokens cannot be written. Methods receive only proposals for positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import PASS, mix
from decodery.core.trace import Step
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.vocabularies import excluded
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest

from .cache.base import NOTHING, DiffusionCache, Kept, Plan
from .canvas import Canvas
from .experts.base import ExpertSharing
from .held import Hold
from .kept_passes import KeptPasses, Passed
from .view import Commit, Truncation, View, blocks

if TYPE_CHECKING:
    from .base import DiffusionDecoder

__all__ = ["Run"]


class Run:
    """One canvas, the model that fills it, and the keys and values of its passes.

    Args:
        model: The model.
        canvas: The canvas, which is changed.
        method: The method that fills it.
        temperature: Temperature of the proposals; 0 proposes the most likely tokens.
        hold: The constraint on the text, None for none.

    Raises:
        SettingsError: If the method does not work with the model or the canvas.
    """

    def __init__(
        self,
        model: LanguageModel,
        canvas: Canvas,
        method: DiffusionDecoder,
        temperature: float = 0.0,
        hold: Hold | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise SettingsError(f"temperature must be 0 or more, not {temperature}")
        self.model, self.canvas, self.method, self.temperature = model, canvas, method, temperature
        self.role = ""
        self.cache: DiffusionCache | None = method.cache if isinstance(method.cache, DiffusionCache) else None
        self.hold = hold
        sharing = method.experts if isinstance(method.experts, ExpertSharing) else None
        self.layer_plan = WHOLE if sharing is None else LayerPlan(experts=sharing)
        self.kept = Kept(final=None if model.config.block_length is None else 0)
        self._earlier = self._new_passes()
        self._own = model.config.block_length
        self._views: WeakSet[View] = WeakSet()
        self._widest = 0
        self._check()

    def _check(self) -> None:
        if self.method.experts is not None and not self.model.config.experts:
            raise SettingsError("this model has one MLP a layer, so there are no experts to share: leave experts out")
        if self.cache is not None and self.cache.requires_predictable_order and not self.method.predictable_order:
            raise SettingsError(
                "this cache needs to know the next position before a pass, which only the policy random without steps "
                "fixes: leave cache out, or take that policy"
            )
        block, length = self.method.block, len(self.canvas) - self.canvas.prompt_length
        if self._own is not None:
            if block not in (None, self._own):
                raise SettingsError(
                    f"this model attends in blocks of {self._own} tokens, not {block}: leave block out, or give "
                    f"{self._own}"
                )
            if self.cache is not None and not self.cache.causal:
                raise SettingsError(
                    "rows of this model do not attend to later blocks: use cache=prefix, which is exact there"
                )
        elif block is not None and length % block:
            raise SettingsError(
                f"blocks of {block} do not divide a canvas of {length} tokens: give a block, or a length, that does"
            )

    def _new_passes(self) -> KeptPasses:
        return KeptPasses(self.model, 0 if self.cache is None else 1 + bool(self.method.guidance))

    def regions(self) -> Iterator[tuple[int, int]]:
        """The blocks in order, as first position and end, until the output cannot change any more."""
        start = self.canvas.prompt_length
        while start < len(self.canvas) and not self.canvas.ended:
            size = self.method.block or self._own or len(self.canvas)
            # The blocks of a block-causal model are counted from the first token of the prompt.
            end = min((start // size + 1) * size if self._own else start + size, len(self.canvas))
            yield start, end
            start = end

    def look(self, region: tuple[int, int], *, written: bool = False) -> ForwardCoroutine[View]:
        """Run one pass and return its proposals for the open positions of a region.

        Args:
            region: First and last position (exclusive).
            written: See `look_at`.
        """
        (view,) = yield from self.look_at([self.canvas.tokens], region, written=written)
        return view

    def look_at(
        self, variants: Sequence[np.ndarray], region: tuple[int, int], *, written: bool = False
    ) -> ForwardCoroutine[list[View]]:
        """Run one pass over several states of the canvas that differ within a region.

        More than one state requires no cache, or one whose keys and values stay the same within the region (`steady`).

        Args:
            variants: The states, [L] tokens each; the first may be the canvas itself.
            region: First and last position (exclusive).
            written: Return proposals for all positions of the region after the prompt, written ones too.
        """
        plan = self._plan(region)
        every = np.arange(max(region[0], self.canvas.prompt_length), region[1])
        opens = [every if written else self._open(tokens, region, plan) for tokens in variants]
        ready = self._ready(plan, len(variants), tokens=variants[0])
        requests, counts = [], []
        for tokens, places, caches in zip(variants, opens, ready, strict=True):
            segments = self._segments(tokens, places, plan, caches)
            requests += [
                ForwardRequest(self.model, segment, role=self.role, layer_plan=self.layer_plan) for segment in segments
            ]
            counts.append(len(segments))
        self._widest = max(self._widest, sum(map(len, opens)))
        scored = yield requests
        self._earlier.note(plan)
        self.canvas.experts += sum(each.cost.experts for each in scored if each.cost is not None)
        found = iter(scored)
        logits = [self._guided([next(found).logits for _ in range(count)]) for count in counts]
        # Each goes once nobody looks at it any more.
        del scored, found
        self._count([request.segment for request in requests], plan)
        first, passed = self.canvas.prompt_length, self.kept.passed
        fresh = self.method.noise == "pass"
        seed = mix(self.canvas.seed, PASS, self.canvas.passes) if fresh else self.canvas.seed
        self._remember(region, plan)
        views = [
            View.of(
                each,
                places,
                region,
                measure=self.method.measure,
                temperature=self.temperature,
                truncation=Truncation(self.method.top_k, self.method.top_p),
                tempered=self.method.tempered,
                seed=seed,
                first=first,
                late=tuple(self.canvas.eos_ids) if self.method.eos == "last" else (),
                passed=passed,
            )
            for each, places in zip(logits, opens, strict=True)
        ]
        self._views.update(views)
        return views

    def write(self, view: View, commit: Commit) -> None:
        """Write the tokens that a method has chosen from a view."""
        assert len(commit.positions), "a pass must write something"
        self.canvas.write(*commit, view.logprobs_of(commit))
        self.canvas.trace.steps[-1].emitted += len(commit.positions)

    def require_alike(self, model: LanguageModel) -> None:
        """Raise SettingsError if another model cannot continue this canvas."""
        own, other = self.model.config, model.config
        if self.method.experts is not None and not other.experts:
            raise SettingsError(
                "the second model has one MLP a layer, so there are no experts to share: leave them out"
            )
        if own.vocabulary != other.vocabulary or (own.vocab_size, own.mask_id) != (other.vocab_size, other.mask_id):
            raise SettingsError(
                "the second model has another vocabulary or another mask token: name a model with the same ones"
            )
        if (own.shifted, own.block_length) != (other.shifted, other.block_length):
            raise SettingsError(
                "rows of the second model predict other positions, or attend to other blocks: name a model of the "
                "same kind"
            )

    def hand_to(self, model: LanguageModel, role: str) -> None:
        """Run all later passes with another model; keys and values of earlier passes are dropped.

        Args:
            model: The model that takes over.
            role: Its name in the ledger of forward passes.
        """
        if model is self.model:
            return
        self.model, self.role = model, role
        self.kept = Kept(final=None if self._own is None else 0)
        self._earlier = self._new_passes()

    def close(self, place: int, end: int) -> None:
        """Fill the open positions from `place` on with the token `end`; they are after the end of the text."""
        rest = self.canvas.open(place, len(self.canvas))
        self.canvas.tokens[rest] = end

    def visible(self, region: tuple[int, int]) -> int:
        """Number of leading positions that the rows of a region attend to."""
        return len(self.canvas) if self._own is None else region[1]

    def _plan(self, region: tuple[int, int]) -> Plan:
        if self.kept.region != region:
            self.kept.region, self.kept.passed = region, 0
        visible = self.visible(region)
        if self.cache is None:
            return Plan(np.arange(visible), NOTHING)
        return self.cache.plan(self.canvas, region, visible, self.kept)

    def _open(self, tokens: np.ndarray, region: tuple[int, int], plan: Plan) -> np.ndarray:
        places = region[0] + np.flatnonzero(tokens[region[0] : region[1]] == self.canvas.mask_id)
        return places if plan.active is None else places[np.isin(places, plan.active)]

    def _ready(self, plan: Plan, count: int, tokens: np.ndarray) -> list[list[KVCache]]:
        """The caches of every state: they hold the rows that the pass reads, without those that it computes.

        A state has no caches where the method uses none.
        """
        if not self._earlier.caches:
            return [[] for _ in range(count)]
        assert count == 1 or (self.cache is not None and self.cache.steady), "what is kept differs between the states"
        rows = self._computed(plan)
        return self._earlier.ready(Passed(plan.keys, rows, tokens[rows], plan.fresh, count == 1), count)

    @property
    def bytes(self) -> int:
        """See `Recoverable`: distributions that somebody still looks at."""
        return sum(each.bytes for each in self._views)

    @property
    def awaited(self) -> int:
        """See `Recoverable`: distributions at all positions that a pass looks at, and pages of its rows.

        At as many positions at least as a pass has had.
        """
        length = len(self.canvas) - self.canvas.prompt_length
        block, states = min(self.method.block or self._own or length, length), self.method.states
        wide = min(block * self.method.blocks_at_once, length)
        copies = 1 + bool(self.method.guidance) + self.method.tempered
        row = copies * self.model.vocab_size * max(self.model.dtype.itemsize, torch.float32.itemsize)
        # A cache that also serves models whose rows see no later block computes all rows after it where they do.
        onward = self.cache is not None and self.cache.causal and not self.model.config.block_length
        computed = length if onward else wide
        return max(states * wide, self._widest) * row + self._earlier.due(len(self.canvas), computed, states)

    def give_back(self) -> bool:
        """See `Recoverable`: drop all keys and values, unless a pass over several states shares them."""
        return self._earlier.give_back()

    def recover(self) -> ForwardCoroutine[None]:
        """See `Recoverable`: repeat the recorded passes, with the tokens that they had then."""
        earlier = self._earlier
        for passed in earlier.passes:
            earlier.select(passed)
            halves = zip(
                earlier.caches, (passed.tokens, self._without_prompt(passed.rows, passed.tokens)), strict=False
            )
            segments = [Segment(passed.rows, tokens, cache=cache, logit_rows=[]) for cache, tokens in halves]
            yield [
                ForwardRequest(self.model, segment, role=self.role, layer_plan=self.layer_plan) for segment in segments
            ]
        if earlier.pending is not None:
            earlier.select(earlier.pending)

    def _computed(self, plan: Plan) -> np.ndarray:
        """[q] rows of a pass; where a row predicts the next token, also the rows before open positions."""
        if not self.model.config.shifted:
            return plan.queries
        assert self.kept.region is not None
        active = self.canvas.open(*self.kept.region) if plan.active is None else plan.active
        # The row before the region is always added: the computed rows must not depend on what the region holds.
        return np.union1d(plan.queries, np.maximum(np.append(active, self.kept.region[0]) - 1, 0))

    def _without_prompt(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[q] tokens of rows with masks in place of the prompt."""
        return np.where(rows < self.canvas.prompt_length, self.canvas.mask_id, tokens)

    def _segments(self, tokens: np.ndarray, places: np.ndarray, plan: Plan, caches: Sequence[KVCache]) -> list[Segment]:
        """The rows of one state of the canvas; with guidance also the same rows without the prompt."""
        rows = self._computed(plan)
        # Where rows predict the next token, no row predicts position 0, so row 0 is used for it.
        wanted = np.maximum(places - 1, 0) if self.model.config.shifted else places
        logit_rows = np.searchsorted(rows, wanted).tolist()
        own, other = caches or (None,), caches[1] if len(caches) > 1 else None
        segments = [Segment(rows, tokens[rows], cache=own[0], logit_rows=logit_rows)]
        if self.method.guidance:
            without = self._without_prompt(rows, tokens[rows])
            segments.append(Segment(rows, without, cache=other, logit_rows=logit_rows))
        return segments

    def _guided(self, logits: list[torch.Tensor]) -> torch.Tensor:
        """[m, vocab] logits, the first of these, with guidance; -inf for tokens that may not be written."""
        found = logits[0]
        if found.untyped_storage().nbytes() > found.nbytes:
            # A part of what a pass returned for several tasks would keep all of it.
            found = found.clone()
        for part in blocks(found) if len(logits) == 2 else ():
            found[part] += self.method.guidance * (found[part] - logits[1][part])
        found = excluded(self.model, found)
        found[:, self.canvas.mask_id] = -torch.inf
        if self.method.eos == "never":
            found[:, list(self.canvas.eos_ids)] = -torch.inf
        return found

    def _count(self, segments: list[Segment], plan: Plan) -> None:
        canvas, rows = self.canvas, sum(len(segment) for segment in segments)
        canvas.trace.steps.append(Step(rows=rows))
        read = len(np.setdiff1d(plan.keys, segments[0].positions))
        canvas.passes += 1
        canvas.rows += rows
        canvas.pairs += sum(len(segment) * (len(segment) + read) for segment in segments)

    def _remember(self, region: tuple[int, int], plan: Plan) -> None:
        kept = self.kept
        kept.passed += 1
        kept.age = 1 if plan.fresh else kept.age + 1
        if plan.fresh:
            kept.start, kept.read = self.canvas.passes - 1, plan.queries
            if self._own is not None:
                # When this pass computed the blocks before the region's first one, they were already written.
                kept.final = region[0] // self._own * self._own


def filled(
    model: LanguageModel, canvas: Canvas, method: DiffusionDecoder, temperature: float = 0.0, hold: Hold | None = None
) -> ForwardCoroutine[Canvas]:
    """Fill a canvas; open positions after a written end token are filled with that token.

    Args:
        model: The model.
        canvas: The canvas, which is changed.
        method: The method that fills it.
        temperature: 0 takes the most likely tokens.
        hold: The constraint, None for none.
    """
    return (yield from finished(Run(model, canvas, method, temperature, hold)))


def finished(run: Run) -> ForwardCoroutine[Canvas]:
    """`filled`, for an existing run."""
    canvas = run.canvas
    yield from run.method.fill(run)
    if canvas.ended and canvas.end is not None:
        run.close(canvas.end, int(canvas.tokens[canvas.end]))
    canvas.trace.ledger.tokens += len(canvas.output)
    return canvas
