"""`auto`: of all tokens that could be drafted, the likeliest ones, as many as pay for themselves on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from ..budget.base import Budget
from ..budget.steps import StepCosts
from ..core.needs import Needs
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..errors import SettingsError
from ..model import drafts
from ..registry import register
from .base import Drafter, Observation
from .stores.contexts import Contexts
from .stores.expectations import CONTEXTS, LEAST, Candidate, Expectations, SuccessorRates
from .stores.ngrams import Occurrences
from .stores.warm import WarmContexts

SHIPPED = "shipped"


@register("auto", lossless=True)
@dataclass(frozen=True)
class Auto(Drafter):
    """Weighs copies of earlier text against the model's own runners-up and feeds as many as this machine makes pay.

    Candidates after a node: the token that followed the last repetition of its `orders` last tokens (prompt lookup),
    and the `width` tokens the model ranked highest where the node's last three, two and one tokens last stood (as Token
    Recycling, 2024, with longer contexts first). How often such candidates are right is counted as the text goes on, by
    length of the repetition and by context and rank; a node's chance is the product along its path. The tree takes
    nodes by falling chance, and of all its sizes, 0 included, the one that gives most tokens per second by the measured
    cost of passes and by what the latest steps took. Contexts begin with those of `warm`, a file made by `decodery
    train contexts`: by default of the one that comes along for the model, if one does; None: with none. Scope: the
    request for copies, the process for contexts, their rates and what steps take.
    Memory: 2^17 * (8 + 4 * width) bytes per context length, and one entry per order and token of text.
    """

    width: int = 6
    orders: tuple[int, ...] = (12, 8, 5, 3, 2, 1)
    most: int = 32
    warm: str | None = SHIPPED

    needs = Needs(costs=True)

    def largest(self) -> int:
        return self.most

    def start(self, seq: Sequence) -> _State:
        width = min(self.width, seq.vocab_size)

        def make() -> tuple[Contexts, SuccessorRates, StepCosts]:
            contexts, warm = Contexts(CONTEXTS, width), self._warm(seq)
            if warm is None:
                return contexts, SuccessorRates(len(CONTEXTS), width), StepCosts()
            for order in CONTEXTS:
                contexts.fill(order, warm.contexts[order], warm.rows[order])
            return contexts, SuccessorRates(len(CONTEXTS), width, warm.rates), StepCosts()

        contexts, rates, costs = seq.memory.recall("process", seq, ("auto", seq.vocab_size, width, self.warm), make)
        return _State(Expectations(Occurrences(self.orders), contexts, rates), costs)

    def _warm(self, seq: Sequence) -> WarmContexts | None:
        """What the contexts begin with, if with anything."""
        if self.warm is None:
            return None
        if self.warm == SHIPPED:
            found = drafts.shipped(drafts.CONTEXTS, seq.model.config.vocabulary)
            return None if found is None else WarmContexts.load(found)
        warm = WarmContexts.load(Path(self.warm))
        if warm.vocab_size != seq.vocab_size or warm.vocabulary != seq.model.config.vocabulary:
            raise SettingsError(
                f"{self.warm} was made for a model with another vocabulary: make contexts for this one with decodery "
                "train contexts"
            )
        return warm

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        state: _State = seq.draft_state
        limit = min(self.most, budget.nodes)
        state.memory.find(seq.tokens, min(limit, budget.depth))
        return _grow(seq, state.memory, Worth(state.step_costs(seq, budget, limit), budget.sequences), budget.depth)

    def observe(self, seq: Sequence, seen: Observation) -> None:
        memory: Expectations = seq.draft_state.memory
        first = len(seq.tokens) - len(seen.emitted)
        context, followed = seq.tokens[max(0, first - CONTEXTS[0]) : first], 0
        for token in seen.emitted:
            memory.learn(context, followed, token)
            followed = memory.follows(followed, token)
            context = [*context[1 - CONTEXTS[0] :], token]
        memory.contexts.learn(seq.tokens, seen)


@dataclass(slots=True)
class _State:
    """What `auto` knows of a text and of what its steps take."""

    memory: Expectations
    costs: StepCosts

    def step_costs(self, seq: Sequence, budget: Budget, limit: int) -> np.ndarray:
        """[limit + 1] times of this step with 0, 1, 2, ... drafted nodes; every sequence in it has a row of its own."""
        measured = budget.seconds(budget.sequences + np.arange(limit + 1))
        if not budget.measured:
            return measured
        last = seq.trace.steps[-1] if seq.trace.steps else None
        # Of a step that several texts share nobody knows whose nodes took how long.
        if last is not None and not last.prefill and last.sequences == budget.sequences == 1 and last.nodes <= limit:
            self.costs.learn(measured, last.nodes, last.seconds)
        return self.costs.corrected(measured)


class Worth:
    """Which number of drafted nodes gives most tokens per second, as nodes are offered by falling chance.

    costs: [limit + 1] times of this step with 0, 1, 2, ... drafted nodes. sequences: how many share it, each of which
    gets a token anyway.
    """

    def __init__(self, costs: np.ndarray, sequences: int) -> None:
        self._costs = costs
        self._counts = np.arange(1, len(costs))
        self._expected = float(sequences)
        self._most = self._expected / float(self._costs[0])
        self._nodes = 0
        self.best = 0
        """The number of nodes that is worth most among those taken."""
        cheapest = float(np.diff(self._costs).min(initial=self._costs[0]))
        self.least = max(LEAST, cheapest * self._most)
        """The chance below which no node is worth its row, even where rows are cheapest."""

    @property
    def full(self) -> bool:
        return self._nodes + 1 >= len(self._costs)

    def bar(self) -> float:
        """The chance that all further nodes need at least for any larger tree to be worth more."""
        short = self._most * self._costs[self._nodes + 1 :] - self._expected
        return float((short / self._counts[: len(short)]).min())

    def take(self, chance: float) -> None:
        """One more node."""
        self._nodes += 1
        self._expected += chance
        if (worth := self._expected / float(self._costs[self._nodes])) > self._most:
            self._most, self.best = worth, self._nodes


def _grow(seq: Sequence, memory: Expectations, worth: Worth, depth: int) -> TokenTree:
    """The likeliest nodes, as many as are worth most."""
    tokens, parents, depths = [seq.pending], [-1], [0]
    # How far each node follows the copy, -1 where it left it; its last tokens; what may follow it.
    followed, contexts = [0], [seq.tokens[-CONTEXTS[0] :]]
    candidates: list[list[Candidate]] = []
    chances = [1.0]
    heap: list[tuple[float, int, int]] = []

    def expand(node: int) -> None:
        ended = depths[node] >= depth or (node > 0 and tokens[node] in seq.eos_ids)
        least = worth.least / chances[node]
        candidates.append([] if ended else memory.candidates(contexts[node], followed[node], least))
        offer(node, 0)

    def offer(parent: int, place: int) -> None:
        if place < len(candidates[parent]):
            heappush(heap, (-chances[parent] * candidates[parent][place][0], parent, place))

    expand(0)
    while heap and not worth.full:
        negative, parent, place = heappop(heap)
        if -negative < worth.bar():
            break
        worth.take(-negative)
        token, node = candidates[parent][place][1], len(tokens)
        tokens.append(token)
        parents.append(parent)
        chances.append(-negative)
        depths.append(depths[parent] + 1)
        followed.append(memory.follows(followed[parent], token))
        contexts.append([*contexts[parent][1 - CONTEXTS[0] :], token])
        offer(parent, place + 1)
        expand(node)
    size = 1 + worth.best
    return TokenTree(np.array(tokens[:size]), np.array(parents[:size]))
