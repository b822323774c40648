"""A second model or head, which is run only where its prediction is worth the time it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from decodery.core.abstract import Contract
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

from ..stores.blending import Blending, Offer, Told
from ..stores.expectations import Expectations

WIDTH = 8
"""Most likely tokens of an adviser that are weighed."""
_TRIED = 5
"""Questions after which what they take is known."""
_FALLS, _RISES = 0.3, 0.03
_USUAL = 8
"""Tokens that are read for a question at most, for its time to tell of others: a prompt is read once."""
_PATIENCE = 32
"""Steps without a question after which one is asked whatever it seems worth: texts change. Twice as many each time."""
_MOST_CREDIT = 48.0
"""Passes that questions may take in vain at most, however little was asked before."""
_FIRST_RISK, _RISK = 0.008, 0.004
"""The part of every pass that questions may take in vain, until the first trial and after it."""
_OF_TEXT, _OF_STEP = 0.02, 0.008
"""Passes that questions about one text may take in vain at first, and what each of its steps adds, less than 1 % of it
from a dozen steps on: what an adviser has earned with texts of another kind is not spent on this one."""
_RUN = 8
"""Questions of a trial: what was read for the first one is there for the others, and one answer says little."""
_BELIEVED, _REMEMBER = 4.0, 0.98
"""Tokens that promises are believed for at first, and what a question counts for after each later one."""

Opinion = tuple[list[list[int]], list[list[float]]]
"""The most likely tokens after each of some nodes, and their probabilities; 0 for a token that is none."""


@dataclass(slots=True)
class AskCosts:
    """Seconds of a question about the end of the text, after new text, and of one about nodes below it.

    0: unknown.

    Attributes:
        share: What a question is believed to take until then, in units of a pass.
        asked: How many there were of both.
        idle: Steps since the last one, in any text.
        patience: At most.
        fresh: Whether it was never tried.
        promised, kept: Tokens that answers were to save, and those that they saved; recent ones count more.
        taken, brought: Seconds that all questions took, and those that their answers saved.
        passed: Seconds of the passes of all steps in which one could be asked.
        recalled: Adds what is remembered of earlier processes; called once, in the first step whose times are measured.
        pace: Tokens in the time of a pass, questions and drafted rows included.
        credit: Seconds that questions may take in vain, earned in steps: what answers saved is added, what questions
            took is subtracted. It bounds what an adviser costs where it never helps.
    """

    share: float
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    asked: list[int] = field(default_factory=lambda: [0, 0])
    idle: int = 0
    patience: int = _PATIENCE
    fresh: bool = True
    promised: float = _BELIEVED
    kept: float = _BELIEVED
    taken: float = 0.0
    brought: float = 0.0
    passed: float = 0.0
    recalled: Callable[[AskCosts], None] | None = None
    pace: float = 1.0
    credit: float = 0.0

    def step(self, seconds: float, *, timed: bool, count: int = 1) -> None:
        """A step begins, or `count` of them, whose passes take so long each without drafts."""
        if timed and self.recalled is not None:
            recalled, self.recalled = self.recalled, None
            recalled(self)
        self.idle += count
        self.passed += count * seconds
        self.credit = min(self.credit + self.earned(count * seconds), _MOST_CREDIT * seconds)

    def earned(self, seconds: float) -> float:
        """What passes of so many seconds allow questions to take in vain."""
        return (_FIRST_RISK if self.fresh else _RISK) * seconds

    def spend(self, seconds: float) -> None:
        """A question took so long."""
        self.taken += seconds
        self.credit -= seconds

    def saved(self, seconds: float, promised: float, kept: float) -> None:
        """Answers of a step promised so many tokens and saved so many, which are worth so many seconds."""
        self.brought += seconds
        self.credit += seconds
        self.promised = _REMEMBER * self.promised + promised
        self.kept = _REMEMBER * self.kept + kept

    def known(self, below: bool) -> float:
        """What is known of such a question's time, 0 before enough were asked."""
        return self.seconds[below] if self.asked[below] >= _TRIED else 0.0

    def learn(self, below: bool, took: float) -> None:
        self.asked[below] += 1
        known = self.seconds[below] or took
        # Disturbances only ever make a question longer, and the first ones lay out weights.
        self.seconds[below] = known + (_FALLS if took < known else _RISES) * (min(took, 2 * known) - known)


@dataclass(slots=True)
class Advice(Contract):
    """One text's adviser.

    Attributes:
        blending, costs: Common to all texts.
        told: By node, what was said in this step.
        spent: Seconds it took.
        passes: Seconds of a pass of this step without drafts.
        timed: Whether times are measured, and not given.
        sharers: How many texts share the passes that questions take.
        budget: Of this step.
        chosen: Whether the end of the text is asked about in this step, whatever it seems worth by now.
        trial: Questions of a trial that are left.
        hoped: Tokens that the answers of this step are to save.
        without: The tree of this step without the adviser, None where none was asked.
        promised, kept: As in `costs`, of this text.
        balance: What questions about this text may take in vain, in passes: as `credit` of `costs`.
        row: The chance at which a node was worth its row when a question was last considered.
    """

    blending: Blending
    costs: AskCosts
    told: dict[int, Told] = field(default_factory=dict)
    spent: float = 0.0
    passes: float = 0.0
    timed: bool = False
    sharers: int = 1
    budget: Budget = field(default=Budget(0, 0))
    chosen: bool = False
    trial: int = 0
    hoped: float = 0.0
    without: DraftTree | None = None
    promised: float = 0.0
    kept: float = 0.0
    balance: float = _OF_TEXT
    row: float = 0.0

    @abstractmethod
    def reaches(self, depth: int) -> bool:
        """Whether it can say what follows a node this deep."""

    @abstractmethod
    def unread(self, seq: Sequence) -> int:
        """Tokens of the text that are to be read before anything can be said."""

    @abstractmethod
    def reading(self, tokens: int) -> float:
        """What so many of them add to a question, in seconds."""

    def uses(self, seq: Sequence) -> float:
        """How many questions have the use of what is read for one."""
        return 1.0

    @abstractmethod
    def most_likely(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> Opinion | ForwardCoroutine[Opinion]:
        """The `WIDTH` most likely tokens after each of `nodes`, and how likely they are."""

    def see(self, seq: Sequence, seen: VerificationFeedback) -> None:
        """A pass was scored."""

    def more_for(self, tokens: int) -> int:
        """Bytes that its caches have yet to take for a text of so many tokens."""
        return 0

    def forget(self) -> None:
        """Give back what can be read again."""

    def begin(self, budget: Budget) -> None:
        """A step begins."""
        self.budget, self.timed = budget, budget.measured
        self.passes = float(budget.seconds(np.array([budget.sequences]))[0])
        self.told, self.spent, self.hoped = {}, 0.0, 0.0
        self.chosen, self.without = False, None
        self.balance += _OF_STEP
        self.costs.step(self.passes, timed=self.timed)

    def silence(self, seq: Sequence) -> int:
        """Steps, at least, before the next question about the text.

        Until then it cannot be paid, or is not worth its time.
        """
        costs = self.costs
        if not self.passes or self.trial:
            return 0
        reading, takes = self.reading(self.unread(seq)), self.takes(0)
        earned, price = costs.earned(self.passes) * self.sharers, takes + reading
        waits = max((price - costs.credit) / earned, (price / self.passes - self.balance) / _OF_STEP)
        saved = self.blending.most(self.row) * self.token
        if saved * self.trust <= takes + reading / self.uses(seq):
            # A trial is left, which waits for its turn and its price.
            turn = 0 if costs.fresh else costs.patience - costs.idle
            waits = max(waits, (_RUN * takes + reading - costs.credit) / earned, turn)
        return max(int(waits), 0)

    def pass_over(self, steps: int, tokens: int, passes: float, seconds: float) -> None:
        """So many steps were taken without a look at it.

        Args:
            tokens: What they gave.
            passes, seconds: What the pass of one takes without a draft, and with what was drafted.
        """
        self.passes, self.balance = passes, self.balance + steps * _OF_STEP
        self.costs.step(passes, timed=self.timed, count=steps)
        pace = tokens / steps * passes / seconds
        self.costs.pace += (1 - _REMEMBER**steps) * (pace - self.costs.pace)

    def takes(self, node: int) -> float:
        """Seconds of a question about a node, and of one about several."""
        known = self.costs.known(node > 0) if self.timed else 0.0
        return (known or self.costs.share * self.passes) / self.sharers

    @property
    def trust(self) -> float:
        """How much of what answers promise comes true, in texts before and more and more in this one."""
        usual = self.costs.kept / self.costs.promised
        return min(max((self.kept + _BELIEVED * usual) / (self.promised + _BELIEVED), 0.0), 1.0)

    @property
    def token(self) -> float:
        """Seconds that a further token saves."""
        return self.passes / self.costs.pace

    @property
    def credit(self) -> float:
        """Seconds that questions about this text may take in vain."""
        return min(self.costs.credit, self.balance * self.passes)

    def choose(self, seq: Sequence, hoped: float) -> bool:
        """Whether to ask about the end of the text in this step.

        Args:
            seq: The text.
            hoped: Tokens that the answer promises to save.
        """
        costs, reading = self.costs, self.reading(self.unread(seq))
        takes = self.takes(0)
        if self.credit < takes + reading:
            return False
        saved = hoped * self.token
        if self.trial:
            self.trial -= 1
            self.chosen = True
        elif saved * self.trust > takes + reading / self.uses(seq):
            self.chosen = True
        elif (costs.fresh or costs.idle > costs.patience) and takes < 2 * saved:
            # A trial that would read too much waits for another text.
            self.chosen = _RUN * takes + reading < costs.credit
            if self.chosen:
                # What the first trial leaves is for no other one: that waits for credit of its own.
                costs.credit = _RUN * takes + reading
                costs.patience *= 1 if costs.fresh else 2
                self.trial = _RUN - 1
        costs.fresh = costs.fresh and not self.chosen
        return self.chosen

    def pays(self, node: int, hoped: float) -> bool:
        """Whether to ask about a node and others, where the answer saves so many tokens on average."""
        if not node:
            return self.chosen
        return hoped * self.token * self.trust > self.takes(node) < self.credit

    def ask(
        self,
        seq: Sequence,
        tree: DraftTree,
        nodes: Ordered[int],
        memory: Expectations,
        followed: Ordered[int],
        counted: Ordered[list],
        hoped: float,
    ) -> ForwardCoroutine[list[list[Offer]]]:
        """What may follow each of some nodes, by the adviser and by what was counted, most likely first.

        Args:
            hoped: Tokens that the answer saves on average.
        """
        begin, unread = perf_counter(), self.unread(seq)
        price, usual = self.takes(nodes[0]) + self.reading(unread), unread <= _USUAL
        ids, said = yield from as_coroutine(self.most_likely(seq, tree, nodes))
        found = []
        for node, tokens, chances in zip(nodes, ids, said, strict=True):
            opinion = {token: chance for token, chance in zip(tokens, chances, strict=True) if chance > 0}
            place = memory.place(followed[node], counted[node])
            offers, self.told[node] = self.blending.blend(place, counted[node], opinion)
            found.append(offers)
        took = perf_counter() - begin
        # What others do meanwhile tells nothing.
        if usual and self.sharers == 1:
            self.costs.learn(nodes[0] > 0, took)
        spent = took if self.timed and self.sharers == 1 else price
        self.spent, self.hoped, self.costs.idle = self.spent + spent, self.hoped + hoped, 0
        self.costs.spend(spent)
        self.balance -= spent / self.passes
        return found

    def wrote(self, rows: int, tokens: int) -> None:
        """A step over so many rows gave so many tokens."""
        step = float(self.budget.seconds(np.array([self.budget.sequences + rows - 1]))[0]) + self.spent
        self.costs.pace += (1 - _REMEMBER) * (tokens * self.passes / step - self.costs.pace)

    def explained(self) -> str:
        """A sentence on what it has brought, for people."""
        costs = self.costs
        gain = (costs.brought - costs.taken) / costs.passed if costs.passed else 0.0
        if not costs.taken:
            return "drafting with n-grams: the adviser was not asked yet"
        if gain >= 0:
            return f"drafting with n-grams and an adviser, which has saved {gain:.1%} of the time of passes"
        return f"drafting with n-grams: the adviser has cost {-gain:.1%} more than it brings"

    def settle(self, saved: float) -> None:
        """A step has ended, after which the answers so far have saved so many more seconds."""
        kept, self.hoped, hoped = saved / self.token, 0.0, self.hoped
        self.costs.saved(saved, hoped, kept)
        self.balance += saved / self.passes
        self.promised, self.kept = self.promised + hoped, self.kept + kept

    def learn(self, path: Ordered[int], emitted: Ordered[int]) -> None:
        """What came after the root and the accepted nodes."""
        with self.blending.lock:
            for node, token in zip((0, *path), emitted, strict=False):
                if (told := self.told.get(node)) is not None:
                    self.blending.learn(told, token)
