"""A canvas that is being filled: passes are asked for here, and nowhere else in this package.

What models differ in ends here as well: where the row that predicts a token stands, which rows see each other, which
tokens cannot be written. Methods see proposals for places, and nothing of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
from .view import Commit, Truncation, View

if TYPE_CHECKING:
    from .base import DiffusionDecoder
    from .held import Hold

__all__ = ["Run"]


class _Passed(NamedTuple):
    """A pass that a cache was prepared for.

    Attributes:
        keys: Positions that it reads.
        rows: Positions that it computes.
        tokens: Of those.
        fresh: See `Plan`.
        alone: Whether it scores one state, whose rows the cache then holds.
    """

    keys: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    fresh: bool
    alone: bool


class Run:
    """One canvas, the model that fills it, and what is kept of its passes.

    Args:
        temperature: 0 proposes what is most likely.
        hold: The constraint that it is held to, where there is one.

    Raises:
        SettingsError: If the method does not go with the model or the canvas.
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
        self._kv = self._new_caches()
        self._own = model.config.block_length
        self._passes: list[_Passed] = []
        self._pending: _Passed | None = None
        self._check()

    def _check(self) -> None:
        if self.method.experts is not None and not self.model.config.experts:
            raise SettingsError("this model has one MLP a layer, so there are no experts to share: leave experts out")
        if self.cache is not None and self.cache.foretold and not self.method.foretold:
            raise SettingsError(
                "this cache needs the next position before a pass, which only random without steps fixes: leave "
                "cache out, or take that policy"
            )
        block, length = self.method.block, len(self.canvas) - self.canvas.prompt_length
        if self._own is not None:
            if block not in (None, self._own):
                raise SettingsError(
                    f"this model's rows see blocks of {self._own} tokens: leave block out, or give {self._own}"
                )
            if self.cache is not None and not self.cache.causal:
                raise SettingsError("rows of this model see nothing of later blocks: the cache prefix is exact there")
        elif block is not None and length % block:
            raise SettingsError(
                f"blocks of {block} do not divide a canvas of {length} tokens: give a block, or a length, that does"
            )

    def _new_caches(self) -> list[KVCache]:
        """What is kept of earlier passes: one cache, with guidance a second one of the rows without the prompt."""
        if self.cache is None:
            return []
        return [self.model.new_cache() for _ in range(2 if self.method.guidance else 1)]

    def regions(self) -> Iterator[tuple[int, int]]:
        """The blocks in order, first position and last, until what is returned cannot change any more."""
        start = self.canvas.prompt_length
        while start < len(self.canvas) and not self.canvas.ended:
            size = self.method.block or self._own or len(self.canvas)
            # Blocks that a model's rows see are counted from the first token of the prompt.
            end = min((start // size + 1) * size if self._own else start + size, len(self.canvas))
            yield start, end
            start = end

    def look(self, region: tuple[int, int], *, written: bool = False) -> ForwardCoroutine[View]:
        """One pass, and what it says of the open positions of a region.

        Args:
            region: First and last position (exclusive).
            written: See `look_at`.
        """
        (view,) = yield from self.look_at([self.canvas.tokens], region, written=written)
        return view

    def look_at(
        self, variants: Sequence[np.ndarray], region: tuple[int, int], *, written: bool = False
    ) -> ForwardCoroutine[list[View]]:
        """One pass over several states [L] of the canvas that differ within a region.

        The first may be its own. Only a cache whose keys and values stay the same within the region allows more than
        one.

        Args:
            variants: The states.
            region: First and last position (exclusive).
            written: Look at all positions of the region after the prompt, those that are written too.
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
        scored = yield requests
        self._note(plan)
        self.canvas.experts += sum(each.cost.experts for each in scored if each.cost is not None)
        found = iter(scored)
        logits = [self._guided([next(found).logits for _ in range(count)]) for count in counts]
        self._count([request.segment for request in requests], plan)
        first, passed = self.canvas.prompt_length, self.kept.passed
        fresh = self.method.noise == "pass"
        seed = mix(self.canvas.seed, PASS, self.canvas.passes) if fresh else self.canvas.seed
        self._remember(region, plan)
        return [
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

    def write(self, view: View, commit: Commit) -> None:
        """Fill in what a method has chosen from what it was shown."""
        assert len(commit.positions), "a pass must write something"
        self.canvas.write(*commit, view.logprobs_of(commit))
        self.canvas.trace.steps[-1].emitted += len(commit.positions)

    def require_alike(self, model: LanguageModel) -> None:
        """Raise SettingsError where another model could not go on with this canvas."""
        own, other = self.model.config, model.config
        if self.method.experts is not None and not other.experts:
            raise SettingsError(
                "the second model has one MLP a layer, so there are no experts to share: leave them out"
            )
        if own.vocabulary != other.vocabulary or (own.vocab_size, own.mask_id) != (other.vocab_size, other.mask_id):
            raise SettingsError("the second model has other tokens, or another mask: name one with this model's")
        if (own.shifted, own.block_length) != (other.shifted, other.block_length):
            raise SettingsError("rows of the second model stand for other places, or see others: name one of this kind")

    def hand_to(self, model: LanguageModel, role: str) -> None:
        """Let this model run the passes from here on; nothing that is kept of earlier passes is used.

        Args:
            role: What it goes by in ledgers.
        """
        if model is self.model:
            return
        self.model, self.role = model, role
        self.kept = Kept(final=None if self._own is None else 0)
        self._kv, self._passes = self._new_caches(), []

    def close(self, place: int, end: int) -> None:
        """Fill what is open from a place on with an end token, after which nothing counts."""
        rest = self.canvas.open(place, len(self.canvas))
        self.canvas.tokens[rest] = end

    def visible(self, region: tuple[int, int]) -> int:
        """How many positions the rows of a region see."""
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
        """Caches of every state, which hold what the pass reads and none of what it computes; [] where none is kept."""
        if not self._kv:
            return [[] for _ in range(count)]
        rows = self._computed(plan)
        self._pending = _Passed(plan.keys, rows, tokens[rows], plan.fresh, count == 1)
        self._select(self._pending)
        if count == 1:
            return [self._kv]
        assert self.cache is not None and self.cache.steady, "what is kept would differ between the states"
        return [[each.fork() for each in self._kv] for _ in range(count)]

    def _select(self, passed: _Passed) -> None:
        for kept in self._kv:
            there = kept.positions[0, : kept.length + kept.tentative]
            kept.select(np.flatnonzero(np.isin(there, passed.keys) & ~np.isin(there, passed.rows)))

    def _note(self, plan: Plan) -> None:
        """Remember a pass that left keys and values, and forget those of which nothing is left."""
        passed, self._pending = self._pending, None
        if passed is None or not passed.alone:
            return
        if plan.fresh:
            # Such a pass computes all but what is final, which other such passes have computed.
            self._passes = [each for each in self._passes if each.fresh] if len(plan.keys) else []
        self._passes.append(passed)

    def give_back(self) -> int | None:
        """See `Recoverable`: drop all keys and values; not while several states that share them are looked at."""
        if not self._kv or (self._pending is not None and not self._pending.alone):
            return None
        freed = sum(each.bytes for each in self._kv)
        for each in self._kv:
            each.become(self.model.new_cache())
        return freed

    def recover(self) -> ForwardCoroutine[None]:
        """See `Recoverable`: the passes that left what there was once more, of the tokens that they saw."""
        assert self._kv
        for passed in self._passes:
            self._select(passed)
            halves = zip(self._kv, (passed.tokens, self._without_prompt(passed.rows, passed.tokens)), strict=False)
            segments = [Segment(passed.rows, tokens, cache=cache, logit_rows=[]) for cache, tokens in halves]
            yield [
                ForwardRequest(self.model, segment, role=self.role, layer_plan=self.layer_plan) for segment in segments
            ]
        if self._pending is not None:
            self._select(self._pending)

    def _computed(self, plan: Plan) -> np.ndarray:
        """[q] rows of a pass: where the row of a token predicts the next one, also those before open places."""
        if not self.model.config.shifted:
            return plan.queries
        assert self.kept.region is not None
        active = self.canvas.open(*self.kept.region) if plan.active is None else plan.active
        # The one before the region always: which rows are computed must not hang on what is written in it.
        return np.union1d(plan.queries, np.maximum(np.append(active, self.kept.region[0]) - 1, 0))

    def _without_prompt(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[q] tokens of rows with masks in place of the prompt."""
        return np.where(rows < self.canvas.prompt_length, self.canvas.mask_id, tokens)

    def _segments(self, tokens: np.ndarray, places: np.ndarray, plan: Plan, caches: Sequence[KVCache]) -> list[Segment]:
        """The rows of one state of the canvas; with guidance the same once more, without the prompt."""
        rows = self._computed(plan)
        # Row 0 stands for itself where rows predict the next token: nothing else says anything of the first one.
        wanted = np.maximum(places - 1, 0) if self.model.config.shifted else places
        logit_rows = np.searchsorted(rows, wanted).tolist()
        own, other = caches or (None,), caches[1] if len(caches) > 1 else None
        segments = [Segment(rows, tokens[rows], cache=own[0], logit_rows=logit_rows)]
        if self.method.guidance:
            without = self._without_prompt(rows, tokens[rows])
            segments.append(Segment(rows, without, cache=other, logit_rows=logit_rows))
        return segments

    def _guided(self, logits: list[torch.Tensor]) -> torch.Tensor:
        """[m, vocab] logits of what may be written."""
        found = logits[0].clone()
        if len(logits) == 2:
            found += self.method.guidance * (logits[0] - logits[1])
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
                # Blocks before the one that the region begins in were written when this pass computed them.
                kept.final = region[0] // self._own * self._own


def filled(
    model: LanguageModel, canvas: Canvas, method: DiffusionDecoder, temperature: float = 0.0, hold: Hold | None = None
) -> ForwardCoroutine[Canvas]:
    """Fill a canvas; what is left open after a written end is closed with that end.

    Args:
        model: What fills it.
        canvas: The canvas, which is changed.
        method: How it is filled.
        temperature: 0 takes the most likely tokens.
        hold: The constraint, None for none.
    """
    return (yield from finished(Run(model, canvas, method, temperature, hold)))


def finished(run: Run) -> ForwardCoroutine[Canvas]:
    """`filled`, by a run that is at hand."""
    canvas = run.canvas
    yield from run.method.fill(run)
    if canvas.ended and canvas.end is not None:
        run.close(canvas.end, int(canvas.tokens[canvas.end]))
    canvas.trace.ledger.tokens += len(canvas.output)
    return canvas
