"""VED: a budgeted tree search over short structured outputs, by a value, the model's entropy and visits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.noise import PARTICLE, draw
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.topk import topk
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Segment
from decodery.models.loaders.store import Progress, silent
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import judge
from decodery.step.sequence import Sequence

from .base import Branches, candidates, choose, law
from .judged import JudgedSearch
from .pool import require_count

_FAN = 4096
"""Next tokens of a node at most, the most likely ones."""
_ROUNDS = 8
"""For each token of the budget at most: last tokens cost nothing, and each node may have thousands of them."""


@register(
    "ved",
    paper="Spend Search Where It Pays: Value-Guided Structured Sampling and Optimization for Generative "
    "Recommendation (2026)",
    guarantee="every text keeps the request's constraint, and the budget is never exceeded; no exact search",
    requirements=("a scorer of beginnings and answers",),
)
@dataclass(frozen=True)
class VED(JudgedSearch):
    """Grows a tree of valid beginnings where value and entropy are high, within a budget of tokens.

    The k whole texts of most value are returned.
    Meant for short outputs from a finite set, such as item ids in `choice`: the constraint of the request is the trie.
    A node s has G(s) = value + entropy_weight * entropy of the valid next tokens. A beam search by probability makes
    the first tree. Then each round descends to the child of largest G + beta * sqrt(ln(N_root + 1) / (N + 1)) until a
    node has valid tokens that were not tried and a G of at least the mean of its depth (over nodes that have such
    tokens), and draws one of those from the model. Texts that are unfinished when the budget is spent are left out, as
    writing them to their end would exceed it. The first 4,096 valid tokens of a node count, by probability.

    Attributes:
        k: Texts to return at most.
        width: Of the beam search.
        budget: Tokens that the model reads after the prompt. A beam search over ids of L tokens takes
            (L - 1) * width, and width more for a scorer that reads hidden states. At most 8 rounds follow for
            each token of it, as a last token that is not read costs nothing.
        entropy_weight: The lambda of the paper, in value per nat.
        beta: Of the exploration term.
        scorer: Of beginnings and answers, as in value-head(head=FILE), whose states come from the same pass.
    """

    k: int = 16
    width: int = 8
    budget: int = 68
    entropy_weight: float = 0.1
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k", "width", "budget"):
            require_count("ved", name, getattr(self, name))
        require_number("entropy_weight of ved", self.entropy_weight, least=0)
        require_number("beta of ved", self.beta, least=0)
        if not (self.judge.answers and self.judge.prefixes):
            raise SettingsError("ved judges beginnings and whole texts: give a scorer of both, such as value-head")

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`: each node that was read keeps its cache and its logits."""
        return max(super().texts_at_once, self.budget)

    @property
    def requirements(self) -> Requirements:
        own = Requirements(rows=True, alone=True, law=True)
        return Requirements.merged((own, self.judge.requirements))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        tree = ValueTree(self, Branches(engine, request, self))
        yield from tree.begin()
        for _ in range(_ROUNDS * self.budget):
            if tree.root.closed or tree.spent >= self.budget:
                break
            node = tree.select()
            yield from tree.expand(node, tree.drawn(node))
            progress("ved", tree.spent, self.budget)
        return tree.finish()


@dataclass(eq=False, slots=True)
class ValueNode:
    """A valid beginning.

    Attributes:
        seq: Its text.
        parent: The beginning that is one token shorter.
        logprob: Of its tokens together.
        logits: [vocab] of the model after it.
        ids, shares: Valid next tokens, most likely first, and their probabilities.
        value, gain: V and G.
        visits: N, 1 when it is made.
        children: By token.
        closed: Nothing new is after it.
    """

    seq: Sequence
    parent: ValueNode | None = None
    logprob: float = 0.0
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    shares: np.ndarray = field(default_factory=lambda: np.empty(0))
    value: float = 0.0
    gain: float = 0.0
    visits: int = 1
    children: dict[int, ValueNode] = field(default_factory=dict)
    closed: bool = False

    @property
    def depth(self) -> int:
        return len(self.seq.generated)

    @property
    def untried(self) -> bool:
        return len(self.children) < len(self.ids)


class ValueTree:
    """The nodes, and what was spent on them.

    Args:
        settings: Of the search.
        branches: Of its request.

    Attributes:
        spent: Tokens that the model has read after the prompt.
        nodes: All of them, in the order they were made.
    """

    def __init__(self, settings: VED, branches: Branches) -> None:
        settings.fits(branches.model)
        self.settings, self.branches, self.spent = settings, branches, 0
        self.root = ValueNode(branches.root)
        self.nodes = [self.root]
        self._taps = settings.judge.requirements.taps

    def begin(self) -> ForwardCoroutine[None]:
        """Read the prompt, and build the tree of a beam search."""
        logits = yield from self.branches.score([self.root.seq])
        self._learn([self.root], logits)
        beams = [self.root]
        while beams:
            ways = [
                (node.logprob + math.log(share), node, int(token))
                for node in beams
                for token, share in zip(
                    node.ids[: self.settings.width], node.shares[: self.settings.width], strict=True
                )
            ]
            ways.sort(key=lambda way: -way[0])
            made, left = list[ValueNode](), self.settings.budget - self.spent
            for child in [self._child(node, token) for _, node, token in ways[: self.settings.width]]:
                # What costs nothing is kept when the budget is spent.
                if (cost := self._cost(child)) <= left:
                    made.append(child)
                    left -= cost
            yield from self._read(made)
            beams = [node for node in made if not node.seq.finished]

    def select(self) -> ValueNode:
        """The node that is expanded next."""
        means = self._means()

        def passes(node: ValueNode) -> bool:
            return node.untried and node.gain >= means[node.depth]

        node = self.root
        while not passes(node):
            if not (following := [child for child in node.children.values() if not child.closed]):
                # The gate leaves nothing here; in each depth the node of largest gain passes it.
                count("gated")
                return max(filter(passes, self.nodes), key=self.bound)
            node = max(following, key=self.bound)
        return node

    def bound(self, node: ValueNode) -> float:
        """What the descent compares."""
        explored = math.sqrt(math.log(self.root.visits + 1) / (node.visits + 1))
        return node.gain + self.settings.beta * explored

    def drawn(self, node: ValueNode) -> int:
        """A token that was not tried after this node, drawn from the model."""
        left = np.array([token not in node.children for token in node.ids])
        ids, shares = node.ids[left], node.shares[left]
        uniform = draw(self.root.seq.request.seed, len(self.nodes), stream=PARTICLE)
        return int(ids[min(int(np.searchsorted(shares.cumsum(), uniform * shares.sum())), len(ids) - 1)])

    def expand(self, node: ValueNode, token: int) -> ForwardCoroutine[None]:
        """Make the child, read and value it, and count the visit up to the root."""
        yield from self._read([self._child(node, token)])
        above: ValueNode | None = node
        while above is not None:
            above.visits += 1
            above = above.parent

    def finish(self) -> list[Sequence]:
        """The whole texts of most value, each once."""
        whole: dict[object, ValueNode] = {}
        for node in sorted((node for node in self.nodes if node.seq.finished), key=lambda node: -node.value):
            seq = node.seq
            whole.setdefault(tuple(seq.generated) if seq.text is None else seq.text.text, node)
        if not whole:
            raise SettingsError(
                f"no text of ved was complete after budget={self.settings.budget} tokens: give a larger budget, or a "
                "constraint whose texts are shorter"
            )
        count("nodes", len(self.nodes) - 1)
        count("whole", len(whole))
        found = list(whole.values())[: self.settings.k]
        for node in found:
            node.seq.score = node.value
        return self.branches.finish([node.seq for node in found])

    def _means(self) -> dict[int, float]:
        """The mean gain of the nodes of each depth that have untried tokens."""
        gains: dict[int, list[float]] = {}
        for node in self.nodes:
            if node.untried:
                gains.setdefault(node.depth, []).append(node.gain)
        # The mean of equal numbers may be above them by a rounding.
        return {depth: min(math.fsum(each) / len(each), max(each)) for depth, each in gains.items()}

    def _child(self, node: ValueNode, token: int) -> ValueNode:
        seq = node.seq.fork()
        choose(seq, token, node.logits)
        share = float(node.shares[node.ids == token][0])
        return ValueNode(seq, node, node.logprob + math.log(share))

    def _cost(self, node: ValueNode) -> int:
        """Tokens to be read: none after a whole text, unless the scorer reads its state."""
        return int(not node.seq.finished or bool(self._taps))

    def _read(self, made: list[ValueNode]) -> ForwardCoroutine[None]:
        """Read the last tokens of nodes in one pass, value them, and put them into the tree."""
        reading = [node for node in made if self._cost(node)]
        found = []
        if reading:
            segments = [Segment.chunk([node.seq.last_token], node.seq.cache) for node in reading]
            found = yield from self.branches.ask(segments, taps=self._taps)
            self.spent += len(reading)
        for node in reading:
            node.seq.cache.keep(range(1))
        if made:
            hidden = {tap: torch.stack([scored.hidden[tap][0] for scored in found]) for tap in self._taps}
            values = yield from judge(self.settings.judge, candidates([node.seq for node in made], hidden))
            for node, value in zip(made, values.tolist(), strict=True):
                node.value = node.gain = value
        going = [node for node in reading if not node.seq.finished]
        if going:
            yield from self.branches.find_out([node.seq for node in going])
            logits = [scored.logits[0] for node, scored in zip(reading, found, strict=True) if node in going]
            self._learn(going, torch.stack(logits))
        for node in made:
            assert node.parent is not None
            node.parent.children[node.seq.last_token] = node
            self.nodes.append(node)
            self._close(node)

    def _learn(self, nodes: list[ValueNode], logits: torch.Tensor) -> None:
        """Note what may follow these nodes. logits: [n, vocab] there."""
        shares = law([node.seq for node in nodes], logits).double().softmax(dim=-1)
        ids, values = topk(shares, min(_FAN, shares.shape[-1]))
        for number, node in enumerate(nodes):
            node.logits = logits[number]
            valid = values[number] > 0
            node.ids, node.shares = ids[number][valid], values[number][valid].astype(np.float64)
            entropy = -float((node.shares * np.log(node.shares)).sum())
            node.gain += self.settings.entropy_weight * entropy

    def _close(self, node: ValueNode | None) -> None:
        """Mark what has nothing new after it, from this node up."""
        while node is not None and not node.untried and all(child.closed for child in node.children.values()):
            node.closed = True
            node.logits = torch.empty(0, dtype=torch.float32, device="cpu")
            node = node.parent
