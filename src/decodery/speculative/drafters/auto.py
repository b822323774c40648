"""`auto`: of all tokens that could be drafted, the most likely ones, as many as pay for themselves on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.loaders import drafts
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader, is_open
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from ..draft_length.steps import StepCosts
from ..draft_length.trials import Trials
from ..heads.advice import HeadAdvice
from ..heads.head import TrainedHead
from ..stores.contexts import Contexts
from ..stores.expectations import CONTEXTS, CopyRates, Expectations, SuccessorRates
from ..stores.ngrams import Occurrences
from ..stores.past import PastTexts
from ..stores.warm import WarmContexts
from ..tree_building.likeliest import TOGETHER, ExpectedSpeedup, LikeliestTree
from ..tree_building.native_tree import NativeTree
from .advice import Advice
from .model_advice import ModelAdvice

if TYPE_CHECKING:
    from decodery.step.logits_source import LogitsSource

    from ..heads.head import DraftHead

SHIPPED = "shipped"
_LONG = 3
"""Repetitions of fewer tokens are no reason to copy another text."""
_REST = 8
"""Steps that a text whose drafts cannot pay lets pass before it computes again."""
_FRUITLESS, _PAUSE = 8, 4
"""Steps without a draft after which a text by itself lets one pass, then one more each time, so many at most."""


@register("auto", lossless=True)
@dataclass(frozen=True)
class Auto(Drafter):
    """Chooses among copies of earlier text, the model's own runners-up and a second model.

    It feeds as many drafted tokens as pay on this machine.

    Candidates after a node: the token that followed the last repetition of its `orders` last tokens (prompt lookup), in
    the text or, where they agree for longer, in an earlier one; the `width` tokens the model ranked highest where the
    node's last three, two and one tokens last stood (as Token Recycling, 2024, with longer contexts first); and what an
    adviser expects, a smaller model or a draft head. How often such candidates are right is counted as texts go on, by
    length of the repetition, by context and rank, and by the adviser's own probabilities; a node's chance is the
    product along its path. The tree takes nodes by falling chance, and of all its sizes, 0 included, the one that gives
    most tokens per second by the measured cost of passes and by what the latest steps took. The adviser is asked only
    about nodes where what it adds, as it has done so far, is worth more than the time it takes. Where tokens are drawn
    by noise that is known ahead, as under the default rule, candidates with much of it count as likelier. Texts that
    share passes draft for some steps and do not for others, and go on in the way that gave more tokens per second.

    Contexts begin with those of `warm`, a file made by `decodery train ngram-cache`: by default of the one that comes
    along for the model, if one does; None: with none. Neither is asked by default, as long as having one costs what it
    brings. Scope: the request for copies, the process for contexts, earlier texts, all rates and what steps take.
    Memory: 2^17 * (8 + 4 * width) bytes per context length, one entry per order and token of text, and the adviser's
    keys and values.

    Attributes:
        width: Tokens kept per context, and candidates from it.
        orders: Lengths of the runs by which earlier text is found, longest first.
        most: Most drafted tokens per step.
        warm: The file of `decodery train ngram-cache` that contexts begin with; "shipped" for the one of the model,
            None for none.
        head: A file or folder made by `decodery train head`, a `TrainedHead`, "shipped" for the one that comes along,
            if one does.
        model: The second one, a `LanguageModel` or a name, which is loaded in `dtype`, as in `draft-model`; of a long
            prompt it reads the end.
        dtype: What a named second model is loaded in.
    """

    width: int = 6
    orders: tuple[int, ...] = (12, 8, 5, 3, 2, 1)
    most: int = 32
    warm: str | None = SHIPPED
    head: TrainedHead | str | None = None
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"

    keeps_logits = False

    def __post_init__(self) -> None:
        if self.head is not None and self.model is not None:
            raise SettingsError("auto takes a head or a second model, not both: give one of the two")

    @cached_property
    def trained(self) -> TrainedHead | None:
        """The head, None where there is none or it is left to what comes along."""
        if isinstance(self.head, TrainedHead) or self.head is None:
            return self.head
        return None if self.head == SHIPPED else TrainedHead.load(self.head)

    @cached_property
    def requirements(self) -> Requirements:
        if self.trained is None:
            return Requirements(costs=True)
        return Requirements(costs=True, taps=_kind(self.trained).watches(self.trained), prompt_taps=True, parts=True)

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        if self.head != SHIPPED:
            return self
        # What a source shows in the model's place need not be what the head has learned to read.
        reads = logits_source is None and is_open(model) and model.device.type == "cpu"
        path = drafts.shipped_head(drafts.HEAD, model.config.vocabulary) if reads else None
        return replace(self, head=None if path is None else TrainedHead.load(path))

    def largest(self) -> int:
        return self.most

    def start(self, seq: Sequence) -> _State:
        width = min(self.width, seq.request.vocab_size)

        def make() -> _Shared:
            contexts, rates = Contexts(CONTEXTS, width), SuccessorRates(len(CONTEXTS), width)
            if (warm := self._warm(seq)) is not None:
                rates = SuccessorRates(len(CONTEXTS), width, warm.rates)
                for order in CONTEXTS:
                    contexts.fill(order, warm.contexts[order], warm.rows[order])
            past = PastTexts([order for order in self.orders if order >= _LONG])
            return contexts, rates, StepCosts(), past, CopyRates(), Trials()

        key = ("auto", seq.request.vocab_size, width, self.orders, self.warm)
        contexts, rates, costs, past, trusted, trials = seq.request.memory.recall("process", seq, key, make)
        expected = Expectations(Occurrences(self.orders), contexts, rates, past, trusted)
        return _State(expected, costs, trials, self._advice(seq))

    def _advice(self, seq: Sequence) -> Advice | None:
        from ..heads.drafter import bound

        if self.trained is not None:
            return HeadAdvice.of(seq, self.trained, bound(_kind(self.trained), self.trained, seq.request.model))
        if self.model is None:
            return None
        model = named(self.model, self.dtype)
        if not model.capabilities.trees:
            raise UnsupportedModel("auto's second model reads no rows that branch, as its trees do: use draft-model")
        return ModelAdvice.of(seq, model, self.most)

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return () if self.model is None else (named(self.model, self.dtype),)

    def held_rows(self, nodes: int) -> int:
        # Logits of the nodes and of the text's end, and of those who are asked about at a time what comes of them.
        return 0 if self.model is None else nodes + 1 + 3 * TOGETHER

    def forget(self, seq: Sequence) -> None:
        state: _State = seq.states[self]
        if state.advice is not None:
            state.advice.forget()

    def _warm(self, seq: Sequence) -> WarmContexts | None:
        """What the contexts begin with, if with anything."""
        if self.warm is None:
            return None
        if self.warm == SHIPPED:
            found = drafts.shipped(drafts.CONTEXTS, seq.request.model.config.vocabulary)
            return None if found is None else WarmContexts.load(found)
        warm = WarmContexts.load(Path(self.warm))
        if warm.vocab_size != seq.request.vocab_size or warm.vocabulary != seq.request.model.config.vocabulary:
            raise SettingsError(
                f"{self.warm} was made for a model with another vocabulary: make contexts for this one with decodery "
                "train ngram-cache -m MODEL"
            )
        return warm

    def skips_step(self, seq: Sequence, budget: Budget) -> bool:
        state: _State = seq.states[self]
        # An adviser reads all of the text.
        state.rested, state.rests = state.rests, state.advice is None and state.lets_pass(seq, budget)
        return state.rests

    def asks(self, seq: Sequence) -> bool:
        state: _State = seq.states[self]
        return state.advice is not None

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        state: _State = seq.states[self]
        limit = min(self.most, budget.nodes)
        costs = state.step_costs(seq, budget, limit)
        worth = ExpectedSpeedup(costs, budget.sequences)
        if state.advice is not None:
            state.advice.begin(float(costs[0]), budget.measured, budget.sequences)
        # Where many texts share a pass, a row may cost more than the token it is for, however sure that is.
        state.silent = worth.full or worth.bar() >= 1
        # With as many texts as now it will not pay in the next steps either. A text by itself can always go on alone.
        state.resting, state.texts = _REST if state.silent and budget.sequences > 1 else 0, budget.sequences
        if state.silent:
            return DraftTree.root(seq.last_token)
        state.memory.find(seq.tokens, min(limit, budget.depth))
        if state.advice is None and (native := state.native(seq, self.most)) is not None:
            tree = native.grown(seq, costs, budget.sequences, budget.depth)
        else:
            tree = yield from LikeliestTree(seq, state.memory, worth, budget.depth, state.advice).grown()
        if budget.sequences == 1:
            state.fruitless = 0 if len(tree) > 1 else state.fruitless + 1
            state.resting = min(max(state.fruitless - _FRUITLESS, 0), _PAUSE)
        return tree

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        state: _State = seq.states[self]
        memory, advice = state.memory, state.advice
        if advice is not None:
            advice.see(seq, seen)
            if seen.start < seq.request.prompt_length:
                return
            advice.learn(seen.path, seen.emitted)
        # Who was not asked was not wrong.
        native, judged = state.native(seq, self.most), not state.silent
        if not state.rests and (native is None or not native.learn(seq, seen, judged)):
            if judged:
                memory.learn_all(seq.tokens, len(seq.tokens) - len(seen.emitted))
            memory.contexts.learn(seq.tokens, seen)
        if seq.finished:
            memory.past.add(seq.generated)


_Shared = tuple[Contexts, SuccessorRates, StepCosts, PastTexts, CopyRates, Trials]


def _kind(trained: TrainedHead) -> type[DraftHead]:
    """The kind of a head. Raises SettingsError for one that does not draft by itself."""
    from ..heads.drafter import head_kind
    from ..heads.head import DraftHead

    kind = head_kind(trained.kind)
    if not issubclass(kind, DraftHead):
        raise SettingsError(f"auto cannot ask a head for {trained.kind}: give one that drafts alone, such as eagle-3")
    return kind


@dataclass(slots=True)
class _State:
    """What `auto` knows of a text and of what its steps take. silent: in this step no draft could pay, however sure.

    resting: steps it lets pass without an estimate, as long as no fewer texts than `texts` take part. fruitless: steps
    since its last draft. drafted: whether texts drafted in the last step, None if that is not counted. rests, rested:
    whether it lets this step pass, and the one before.
    """

    memory: Expectations
    costs: StepCosts
    trials: Trials
    advice: Advice | None
    silent: bool = False
    resting: int = 0
    texts: int = 0
    fruitless: int = 0
    drafted: bool | None = None
    rests: bool = False
    rested: bool = False
    calls: NativeTree | None = None

    def native(self, seq: Sequence, most: int) -> NativeTree | None:
        """Its native calls, None where there are none. most: nodes of a tree."""
        if self.calls is None and NativeTree.fits(self.memory):
            self.calls = NativeTree(seq, self.memory, most)
        return self.calls

    def lets_pass(self, seq: Sequence, budget: Budget) -> bool:
        """Whether nothing is to be guessed in this step."""
        texts, tried, self.drafted = budget.sequences, self.drafted, None
        if self.resting and texts >= self.texts:
            self.resting -= 1
            return True
        if texts == 1 or not budget.measured:
            return False
        last = seq.trace.steps[-1] if seq.trace.steps else None
        if tried is not None and last is not None and last.sequences == texts == self.texts:
            self.trials.learn(texts, tried, last.seconds, last.emitted)
        self.texts, self.drafted = texts, self.trials.drafts(texts)
        return not self.drafted

    def step_costs(self, seq: Sequence, budget: Budget, limit: int) -> np.ndarray:
        """[limit + 1] times of this step with 0, 1, 2, ... drafted nodes; every sequence in it has a row of its own."""
        measured = budget.seconds(budget.sequences + np.arange(limit + 1))
        if not budget.measured:
            return measured
        last = seq.trace.steps[-1] if seq.trace.steps else None
        # Of a step that several texts share nobody knows whose nodes took how long.
        alone = last is not None and last.sequences == budget.sequences == 1 and not last.prefill and not self.rested
        if last is not None and alone and last.nodes <= limit:
            asking = 0.0 if self.advice is None else self.advice.spent
            self.costs.learn(measured, last.nodes, last.seconds - asking)
        return self.costs.corrected(measured)
