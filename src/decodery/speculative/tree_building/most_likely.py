"""A tree of the most likely tokens by any source: as many as pay for themselves."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from ..drafters.advice import Advice
from ..stores.blending import Offer
from ..stores.expectations import CONTEXTS, LEAST, Candidate, Expectations

TOGETHER = 8
"""Nodes an adviser is asked about at a time."""
_NEARLY = 0.5
"""A question about a node is asked together with those that promise this share of what it does."""
_ASK = -1
_FEW = 4


class ExpectedSpeedup:
    """Which number of drafted nodes gives most tokens per second, as nodes are offered by falling chance.

    Args:
        costs: [limit + 1] times of this step with 0, 1, 2, ... drafted nodes.
        sequences: How many share it, each of which gets a token anyway.
    """

    def __init__(self, costs: np.ndarray, sequences: int) -> None:
        self._costs = costs
        self._counts = np.arange(1, len(costs))
        # Tokens by number of nodes, of those taken so far.
        self._tokens = [float(sequences)]
        self._most = self._tokens[0] / float(self._costs[0])
        self.best = 0
        """The number of nodes that is worth most among those taken."""
        cheapest = float(np.diff(self._costs).min(initial=self._costs[0]))
        self.least = max(LEAST, cheapest * self._most)
        """The chance below which no node is worth its row, even where rows are cheapest."""

    @property
    def _nodes(self) -> int:
        return len(self._tokens) - 1

    @property
    def full(self) -> bool:
        return self._nodes + 1 >= len(self._costs)

    @property
    def seconds(self) -> float:
        """What a token takes, with the best of all sizes so far."""
        return 1 / self._most

    @property
    def row(self) -> float:
        """The chance at which one of the next few nodes is worth its row."""
        last = min(self._nodes + _FEW, len(self._costs) - 1)
        return float(self._costs[last] - self._costs[self._nodes]) / max(last - self._nodes, 1) * self._most

    def bar(self) -> float:
        """The chance that all further nodes need at least for any larger tree to be worth more."""
        short = self._most * self._costs[self._nodes + 1 :] - self._tokens[-1]
        return float((short / self._counts[: len(short)]).min())

    def take(self, chance: float) -> None:
        """One more node."""
        self._tokens.append(self._tokens[-1] + chance)
        if (worth := self._tokens[-1] / float(self._costs[self._nodes])) > self._most:
            self._most, self.best = worth, self._nodes

    def spend(self, seconds: float) -> None:
        """The step has taken so long by now, whatever is fed in it: it has to bring more for that."""
        self._costs = self._costs + seconds
        worth = np.array(self._tokens) / self._costs[: len(self._tokens)]
        self.best = int(worth.argmax())
        self._most = float(worth[self.best])


def heeds(seq: Sequence) -> bool:
    """Whether the noise of a text's next tokens is informative, as under the coupled rule."""
    return not (seq.request.sampler.greedy or seq.request.acceptance_rule.requirements.laws)


class MostLikelyTree:
    """Takes the most likely next node repeatedly until no further one is worth its row.

    Args:
        advice: Who is to be asked about nodes where that pays; None: what was counted decides alone.
        base: A tree whose nodes are all taken first, None for none.
        end: How much of the text it follows, None: all.
    """

    def __init__(
        self,
        seq: Sequence,
        memory: Expectations,
        worth: ExpectedSpeedup,
        depth: int,
        advice: Advice | None = None,
        *,
        base: DraftTree | None = None,
        end: int | None = None,
    ) -> None:
        end = len(seq.tokens) if end is None else end
        self._seq, self._memory, self._worth, self._depth, self._advice = seq, memory, worth, depth, advice
        self._ends, self._drawn, self._base = seq.request.eos_ids, heeds(seq), base
        self._position = end - seq.request.prompt_length
        self._tokens, self._parents, self._depths, self._chances = [seq.tokens[end - 1]], [-1], [0], [1.0]
        self._children: set[tuple[int, int]] = set()
        # How far each node follows the copy, -1 where it left it; its last tokens; what may follow it.
        self._followed, self._contexts = [0], [seq.tokens[max(0, end - CONTEXTS[0]) : end]]
        self._counted: list[list[Candidate]] = []
        self._offers: list[list[Candidate] | list[Offer]] = []
        self._heap: list[tuple[float, int, int]] = []
        # Nodes the adviser may be asked about: what they promise, and what of it is the adviser's part.
        self._waiting: dict[int, tuple[float, float]] = {}

    def grown(self) -> ForwardCoroutine[DraftTree]:
        """The tree, for which the adviser may ask for passes."""
        worth, heap = self._worth, self._heap
        self._expand(0)
        least = self._begin_with_base()
        while heap and not worth.full:
            negative, parent, place = heappop(heap)
            if place == _ASK and parent not in self._waiting:
                continue
            if place != _ASK and (parent, self._offers[parent][place][1]) in self._children:
                self._offer(parent, place + 1)
                continue
            if -negative < worth.bar():
                break
            if place == _ASK:
                yield from self._ask(parent, -negative)
            else:
                token = self._offers[parent][place][1]
                self._take(parent, token, -negative)
                self._offer(parent, place + 1)
                self._expand(len(self._tokens) - 1)
        size = 1 + max(worth.best, least)
        return DraftTree(np.array(self._tokens[:size]), np.array(self._parents[:size]))

    def _begin_with_base(self) -> int:
        """Take the nodes of the base. Returns how many they are."""
        if self._base is None:
            return 0
        for token, parent in zip(self._base.tokens[1:].tolist(), self._base.parents[1:].tolist(), strict=True):
            chance = next((chance for chance, other, _ in self._counted[parent] if other == token), LEAST)
            self._take(parent, token, self._chances[parent] * chance)
            self._expand(len(self._tokens) - 1)
        return len(self._base) - 1

    def _take(self, parent: int, token: int, chance: float) -> None:
        """A node, by its parent and its token."""
        self._worth.take(chance)
        self._children.add((parent, token))
        self._tokens.append(token)
        self._parents.append(parent)
        self._chances.append(chance)
        self._depths.append(self._depths[parent] + 1)
        self._followed.append(self._memory.follows(self._followed[parent], token))
        self._contexts.append([*self._contexts[parent][1 - CONTEXTS[0] :], token])

    def _expand(self, node: int) -> None:
        """Find what may follow a new node."""
        ended = self._depths[node] >= self._depth or (node > 0 and self._tokens[node] in self._ends)
        chance, advice, seq = self._chances[node], self._advice, self._seq
        counted: list[Candidate] = []
        if not ended:
            least = self._worth.least / chance
            drawn = (seq.request.seed, self._position + self._depths[node]) if self._drawn else None
            counted = self._memory.candidates(self._contexts[node], self._followed[node], least, drawn)
        self._counted.append(counted)
        self._offers.append(counted)
        if ended or advice is None or not advice.reaches(self._depths[node]):
            self._offer(node, 0)
            return
        best, blending = counted[0][0] if counted else 0.0, advice.blending
        gain = blending.gain(best, chance, self._worth.row)
        if gain <= 0 and node:
            self._offer(node, 0)
            return
        promise = chance * blending.hoped(best)
        self._waiting[node] = promise, gain
        heappush(self._heap, (-promise, node, _ASK))

    def _offer(self, parent: int, place: int) -> None:
        offers = self._offers[parent]
        if place < len(offers):
            heappush(self._heap, (-self._chances[parent] * offers[place][0], parent, place))

    def _ask(self, node: int, promise: float) -> ForwardCoroutine[None]:
        """Ask about a node and those that promise nearly as much, where that pays."""
        assert self._advice is not None
        near = [each for each, (other, _) in self._waiting.items() if other >= _NEARLY * promise][:TOGETHER]
        nodes = near if node in near else [node, *near[1:]]
        hoped = sum(self._waiting[each][1] for each in nodes)
        if self._advice.pays(node, hoped):
            tree = DraftTree(np.array(self._tokens), np.array(self._parents))
            found = yield from self._advice.ask(
                self._seq, tree, nodes, self._memory, self._followed, self._counted, hoped
            )
            self._worth.spend(self._advice.takes(node))
            for each, offers in zip(nodes, found, strict=True):
                self._offers[each] = offers
        else:
            nodes = [node]
        for each in nodes:
            del self._waiting[each]
            self._offer(each, 0)
