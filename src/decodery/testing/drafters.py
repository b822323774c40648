"""Drafters for checks: random trees, and trees or chains with the true continuation."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from decodery.core.noise import mix
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence


@dataclass(frozen=True)
class Garbage(Drafter):
    """Random trees of random tokens; no draft may change the decoded text.

    Attributes:
        nodes: Maximum number of drafted tokens.
        seed: Seed of the trees.
    """

    nodes: int = 12
    seed: int = 0

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        random = np.random.default_rng(mix(self.seed, seq.request.seed, len(seq.tokens)))
        tree = _Growing(seq.last_token)
        for _ in range(random.integers(0, min(self.nodes, budget.nodes) + 1)):
            parent = int(random.integers(0, len(tree.tokens)))
            if tree.depths[parent] < budget.depth:
                tree.add(parent, int(random.integers(0, seq.request.vocab_size)))
        return tree.finish()


@dataclass(frozen=True)
class Oracle(Drafter):
    """Trees with the true continuation among random branches, to a random depth.

    So accepted paths can be anywhere in a pass.

    Attributes:
        answer: The whole true text, including the prompt.
        nodes: Maximum number of drafted tokens.
        seed: Seed of the trees.
    """

    answer: tuple[int, ...]
    nodes: int = 12
    seed: int = 0

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        random = np.random.default_rng(mix(self.seed, seq.request.seed, len(seq.tokens)))
        tree, true_end = _Growing(seq.last_token), 0
        for _ in range(min(self.nodes, budget.nodes)):
            following = len(seq.tokens) + int(tree.depths[true_end])
            parent = int(random.integers(0, len(tree.tokens)))
            if random.random() < 0.5 and following < len(self.answer) and tree.depths[true_end] < budget.depth:
                true_end = tree.add(true_end, self.answer[following])
            elif tree.depths[parent] < budget.depth:
                tree.add(parent, int(random.integers(0, seq.request.vocab_size)))
        return tree.finish()


@dataclass(frozen=True)
class OracleChain(Drafter):
    """Chains of the true continuation, with errors at given positions.

    Attributes:
        answer: The whole true text, including the prompt.
        length: Number of tokens of a chain.
        wrong: Positions in `answer` at which another token is drafted.
    """

    answer: tuple[int, ...]
    length: int = 4
    wrong: frozenset[int] = frozenset()

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        begin = len(seq.tokens)
        end = min(begin + min(self.length, budget.nodes, budget.depth), len(self.answer))
        chain = [(self.answer[place] + (place in self.wrong)) % seq.request.vocab_size for place in range(begin, end)]
        return DraftTree.chain(seq.last_token, chain)


class _Growing:
    """A tree under construction; adding a child that exists already returns its node."""

    def __init__(self, last_token: int) -> None:
        self.tokens, self.parents, self.depths = [last_token], [-1], [0]
        self._index: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        node = self._index.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        return node

    def finish(self) -> DraftTree:
        return DraftTree(_array(self.tokens), _array(self.parents))


def _array(values: Ordered[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
