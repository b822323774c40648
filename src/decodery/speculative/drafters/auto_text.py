"""What `auto` knows of a text, and its drafts for the texts of a step together."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from time import perf_counter
from typing import cast

import numpy as np

from decodery.core.errors import NumericalError
from decodery.core.topk import NAN
from decodery.models.protocol import LanguageModel
from decodery.models.step_arrays import StepArrays
from decodery.step.draft_batch import DraftBatch, JointBudget
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.pass_prices import MARGIN, ROWS, Promises, prices_of
from decodery.step.sequence import Sequence

from ..stores.expectations import Expectations
from ..tree_building.most_likely import ExpectedSpeedup
from ..tree_building.native_batch import NativeBatch
from ..tree_building.native_tree import NativeText, learn_together, propose_together
from .advice import Advice
from .draft_credit import AHEAD, EXPOSED, LONGEST, SHARE, DraftCredit, JointCredit
from .forced import unforced
from .unadvised import UnadvisedSteps

_REST = 8
"""Steps that a text whose drafts cannot pay lets pass before it computes again."""
_FRUITLESS, _PAUSE = 8, 4
"""Steps without a draft after which a text by itself lets one pass, then one more each time, so many at most."""


@dataclass(slots=True)
class Skips:
    """Which steps pass without an estimate.

    Attributes:
        silent: In this step no draft could pay, however sure.
        resting: Steps to skip, as long as no fewer texts than `texts` take part.
        fruitless: Steps since the last draft.
    """

    silent: bool = False
    resting: int = 0
    texts: int = 0
    fruitless: int = 0

    def skip(self, budget: Budget) -> bool:
        """Whether nothing is to be drafted in this step."""
        if budget.sequences < self.texts:
            # What did not pay with more texts may pay now.
            self.resting = 0
        if self.resting:
            self.resting -= 1
            return True
        return budget.measured and not budget.plain_known

    def note(self, texts: int, silent: bool, size: int) -> None:
        """What came of an estimate: no row could pay, or a tree of so many nodes."""
        self.silent, self.texts = silent, texts
        if texts > 1:
            # With as many texts as now it will not pay in the next steps either.
            self.resting = _REST if silent else 0
        elif not silent:
            self.fruitless = 0 if size > 1 else self.fruitless + 1
            self.resting = min(max(self.fruitless - _FRUITLESS, 0), _PAUSE)


@dataclass(slots=True)
class AutoText:
    """What `auto` knows of a text.

    Attributes:
        skips: The steps that it skips.
        credit: What its drafts may lose.
        rests: Whether it skips this step.
        tree, promised: The draft of this step and its part of the tokens that all drafts promise.
        costs: What the step takes with 0, 1, 2, ... drafted nodes, up to those of all drafts.
        together: Whether the step is learned with that of others, until which `seen` is what became of it.
        consults: Whether the adviser is asked in this step, None before that is decided.
        kept: Drafted tokens of this step that became text, as far as `tree` had them; None: all.
        unadvised: The steps without the adviser, None where they have come to the same place.
    """

    memory: Expectations
    advice: Advice | None
    skips: Skips = field(default_factory=Skips)
    credit: DraftCredit = field(default_factory=DraftCredit)
    rests: bool = False
    calls: NativeText | None = None
    tree: DraftTree | None = None
    promised: float = 0.0
    costs: np.ndarray | None = None
    together: bool = False
    consults: bool | None = None
    kept: int | None = None
    unadvised: UnadvisedSteps | None = None
    seen: VerificationFeedback | None = None

    def native(self, seq: Sequence, most: int) -> NativeText | None:
        """Its native calls, None where there are none; trees have `most` nodes at most."""
        if self.calls is None and NativeText.fits(seq, self.memory):
            self.calls = NativeText(seq, self.memory, most)
        return self.calls

    def accepted(self, seen: VerificationFeedback) -> int:
        """How many tokens of its draft became text."""
        return len(seen.path) if self.kept is None else self.kept


def text_of(seq: Sequence, drafter: Drafter) -> AutoText:
    """What `auto` knows of a text.

    It is the state of the text's own drafter, or of that inside `Forced`, or where that is another one, of its part
    `drafter`. Texts that draft together have drafters that are alike, not the same one.
    """
    own = unforced(seq.request.drafter or drafter)
    state: AutoText = seq.states[own if type(own) is type(drafter) else drafter]
    return state


def draft(drafter: Drafter, sequences: Ordered[Sequence], budget: Budget, limits: Ordered[int], *, skips: bool) -> None:
    """The trees of texts that share a step, in one native call; they become their states' `tree`.

    Args:
        drafter: Theirs.
        sequences: [n] the texts, all of which have native calls.
        budget: Of this step; its times are those after their mean context.
        limits: [n] nodes of each tree at most.
        skips: Whether they may skip the step.
    """
    begin, states = perf_counter(), [text_of(seq, drafter) for seq in sequences]
    skipped = [state.skips.skip(budget) for state in states] if skips else [False]
    rests, weights = all(skipped), None
    credit = JointCredit([state.credit for state in states], budget.sequences)
    if not rests:
        costs, given = _priced(budget, sum(limits), promises_of(sequences[0]))
        if budget.measured:
            weights, waits = credit.weights(costs), credit.waits(costs)
            costs = costs[: credit.affords(costs) + 1]
            if skips and len(costs) < 2:
                rests = True
                for state in states:
                    state.skips.resting, state.skips.texts = waits, budget.sequences
    for state, seq in zip(states, sequences, strict=True):
        state.rests, state.tree, state.promised, state.costs = rests, DraftTree.root(seq.last_token), 0.0, None
    credit.step()
    if rests:
        return
    calls = [call for state in states if (call := state.calls) is not None]
    depths = [max(seq.remaining - 1, 0) for seq in sequences]
    found = propose_together(calls, sequences, costs, given, limits, depths, None, weights)
    for number, state in enumerate(states):
        state.skips.note(budget.sequences, found is None, 1 if found is None else len(found[0][number]))
        if found is not None:
            state.tree, state.promised = found[0][number], found[1] / len(states)
            state.costs = costs[: sum(map(len, found[0])) - len(states) + 1]
    if budget.measured and (found is None or len(found[0]) == sum(map(len, found[0]))):
        # The time of a step with drafts has that of drafting in it.
        credit.pay((perf_counter() - begin) / costs[0])


def learn(drafter: Drafter, texts: Ordered[Sequence], most: int) -> None:
    """Learn of a step from the texts that were observed in it.

    Args:
        drafter: Theirs.
        texts: The texts.
        most: Nodes of a tree.
    """
    begin, steps = perf_counter(), [(seq, state := text_of(seq, drafter), state.seen) for seq in texts]
    asked = [(seq, state, seen) for seq, state, seen in steps if seen is not None and not state.rests]
    calls = [call for seq, state, _ in asked if (call := state.native(seq, most)) is not None]
    if asked:
        for number in learn_together(calls, [seq for seq, _, _ in asked], [seen for _, _, seen in asked]):
            asked[number][0].fail(NumericalError(NAN))
        promised = sum(state.promised for _, state, _ in asked)
        each = [state.accepted(seen) for _, state, seen in asked]
        if promised:
            promises_of(texts[0]).learn(asked[0][1].skips.texts, promised, sum(each))
        if (costs := asked[0][1].costs) is not None:
            credit = JointCredit([state.credit for _, state, _ in asked], asked[0][1].skips.texts)
            if len(costs) > 1:
                credit.settle(each, costs)
            credit.pay((perf_counter() - begin) / costs[0])
    for seq, state, seen in steps:
        state.seen, state.kept, state.together = None, None, False
        if seen is not None and seq.finished:
            state.memory.past.add(seq.generated)


def promises_of(seq: Sequence) -> Promises:
    """What is known of the drafts for the text's model."""
    return prices_of(cast(LanguageModel, seq.request.model))[1]


def _priced(budget: Budget, nodes: int, promises: Promises) -> tuple[np.ndarray, float]:
    """What the step takes with 0, 1, 2, ... drafted nodes, and how many tokens it gives without any.

    A promise that is worth less than a token is the same as steps that give more without any.
    """
    costs = budget.drafted(min(nodes, ROWS - budget.sequences))
    if not budget.measured:
        return costs, float(budget.sequences)
    costs[1:] *= MARGIN
    return costs, budget.sequences / promises.rate(budget.sequences)


def affordable(seq: Sequence, state: AutoText, budget: Budget, nodes: int) -> tuple[np.ndarray, float]:
    """As `_priced`, of one text, up to as many nodes as its credit affords."""
    costs, given = _priced(budget, nodes, promises_of(seq))
    if budget.measured:
        costs = costs[: JointCredit([state.credit], budget.sequences).affords(costs) + 1]
    return costs, given


def worth_of(budget: Budget, nodes: int) -> ExpectedSpeedup:
    """What numbers of nodes are worth in a step, `nodes` at most."""
    costs = budget.drafted(nodes)
    if budget.measured:
        costs[1:] *= MARGIN
    return ExpectedSpeedup(costs, budget.sequences)


class AdviceInArrays:
    """An adviser that is not asked while its text is one of a batch.

    Args:
        seq: The text.
        advice: Its adviser.
    """

    def __init__(self, seq: Sequence, advice: Advice) -> None:
        self._seq, self._advice, self._steps = seq, advice, seq.trace.steps
        self._begin, self._tokens = len(self._steps), len(seq.tokens)
        self._end = self._begin + advice.silence(seq)

    @property
    def asks(self) -> bool:
        """Whether it may be asked in the next step."""
        return len(self._steps) >= self._end

    def leave(self, budget: JointBudget | None) -> None:
        """Account for the steps since the last time.

        Args:
            budget: Of the last of them, None where there was none.
        """
        if (count := len(self._steps) - self._begin) and budget is not None:
            rows = sum(step.rows for step in islice(self._steps, self._begin, None)) / count
            seconds = budget.drafted(ceil(rows) - 1)
            self._advice.pass_over(count, len(self._seq.tokens) - self._tokens, float(seconds[0]), float(seconds[-1]))
        self._begin, self._tokens = len(self._steps), len(self._seq.tokens)


class AutoBatch(DraftBatch):
    """The drafts of texts in arrays.

    Args:
        drafter: Theirs.
        sequences: [n] the texts.
        places: [n] their numbers in the batch.
        limits: [n] nodes of each tree at most.
        calls: [n] their native calls.
    """

    def __init__(
        self,
        drafter: Drafter,
        sequences: Ordered[Sequence],
        places: Ordered[int],
        limits: Ordered[int],
        calls: Ordered[NativeText],
    ) -> None:
        begin = perf_counter()
        super().__init__(places)
        self._sequences, self._states = sequences, [text_of(seq, drafter) for seq in sequences]
        # All of them skip a step where all would.
        skips = min((state.skips for state in self._states), key=lambda each: each.resting)
        self._credit = JointCredit([state.credit for state in self._states], len(sequences))
        self._began = self._credit.balance
        self._native = NativeBatch(
            calls, sequences, places, limits, promises_of(sequences[0]), [state.credit.lead for state in self._states],
            balance=self._began, share=SHARE, ahead=AHEAD, exposed=EXPOSED, longest=LONGEST, resting=skips.resting,
            noted=skips.texts, fruitless=skips.fruitless, silent=skips.silent, rests=_REST, patience=_FRUITLESS,
            pause=_PAUSE,
        )  # fmt: skip
        self._advised = [AdviceInArrays(seq, state.advice) for seq, state in self._texts() if state.advice is not None]
        self._budget: JointBudget | None = None
        # Seconds that are not paid for yet, and those of this step.
        self._planned, self._owed, self._took = 0, perf_counter() - begin, 0.0

    def propose(self, steps: StepArrays, budget: JointBudget) -> int:
        begin, known, self._budget = perf_counter(), self._native.state, budget
        if self._planned:
            self._return()
            self._native.catch_up()
        drafted = self._native.propose(steps, budget)
        if known.skipped and known.resting:
            # Steps that draft nothing anyway are skipped without a look.
            self._planned = self.rests = known.resting
            known.resting = 0
        self._took = perf_counter() - begin
        return drafted

    @property
    def looked(self) -> bool:
        """Whether anything was looked for in the last step."""
        return not self._native.state.skipped

    @property
    def resting(self) -> bool:
        """Whether this step is skipped without a look."""
        return self.rests < self._planned

    @property
    def asks(self) -> bool:
        return any(each.asks for each in self._advised)

    def _texts(self) -> zip[tuple[Sequence, AutoText]]:
        return zip(self._sequences, self._states, strict=True)

    def _return(self) -> None:
        """Account for the steps that were skipped without a look."""
        known = self._native.state
        if known.prices:
            known.balance += SHARE * (self._planned - self.rests)
        known.resting, self.rests, self._planned = self.rests, 0, 0

    def learn(self, steps: StepArrays, ended: Ordered[int]) -> dict[int, Exception]:
        begin = perf_counter()
        failed = [] if self.resting else self._native.learn(steps)
        for place in ended:
            number = self.places.index(place) if place in self.places and place not in failed else None
            # A text that failed is no example for later ones.
            if number is not None and self._sequences[number].error is None:
                self._states[number].memory.past.add(self._sequences[number].generated)
                if (advice := self._states[number].advice) is not None:
                    self._sequences[number].trace.notes.append(advice.explained())
        self._took += perf_counter() - begin
        self._owed += self._took
        if self._native.priced:
            # Whatever was done for drafts takes the time of the texts, whether or not any came of it.
            self._native.charge(self._owed, self._took)
            self._owed = 0.0
        self._took = 0.0
        return {place: NumericalError(NAN) for place in failed}

    def leave(self) -> None:
        if self._planned:
            self._return()
        known = self._native.state
        for state, lead in zip(self._states, self._native.leads, strict=True):
            state.skips = Skips(bool(known.silent), known.resting, known.noted, known.fruitless)
            state.credit.balance += known.balance - self._began
            state.credit.lead = lead
        self._began = known.balance
        for each in self._advised:
            each.leave(self._budget)
