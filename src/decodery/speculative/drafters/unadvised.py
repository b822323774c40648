"""The steps that `auto` would take without its adviser, over the text that it writes with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback


@dataclass(slots=True)
class UnadvisedSteps:
    """Steps without an adviser over a known text, each of which ends where the text leaves its draft.

    A token that an adviser brought has saved only what these steps take longer to reach the same text: what n-grams
    would have drafted one step later is no merit of the adviser.

    Attributes:
        tree: The draft of the current step.
        takes: Seconds that this step takes.
        begin: Tokens of the text when it began.
        read: Tokens of the text up to which the draft was followed.
        node: The node reached.
        before: Seconds of all steps before it.
    """

    tree: DraftTree
    takes: float
    begin: int
    read: int
    node: int = 0
    before: float = 0.0
    _ended: bool = False
    _below: list[int] = field(init=False)
    _children: dict[tuple[int, int], int] = field(init=False)

    def __post_init__(self) -> None:
        parents, tokens = self.tree.parents.tolist(), self.tree.tokens.tolist()
        self._children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
        }
        self._below = [0] * len(parents)
        for node in range(len(parents) - 1, 0, -1):
            self._below[parents[node]] = max(self._below[parents[node]], self._below[node] + 1)

    @property
    def seconds(self) -> float:
        """What it takes to reach the end of what was read.

        Of a step that has not ended, the part of its tokens that was read, if all that may still be accepted is.
        """
        read = self.read - self.begin
        return self.before + self.takes * read / (read + 1 + self._below[self.node])

    @property
    def ended(self) -> bool:
        """Whether the current step has ended where what was read ends."""
        return self._ended

    def follow(self, text: list[int]) -> bool:
        """Follow the draft of the current step. Returns whether the step ends, at `read`, within the text."""
        while self.read < len(text):
            child = self._children.get((self.node, text[self.read]))
            self.read += 1
            if child is None:
                self.before, self.takes, self._ended = self.before + self.takes, 0.0, True
                return True
            self.node = child
        return False

    def next(self, tree: DraftTree, takes: float) -> UnadvisedSteps:
        """The next step, after the current one has ended, with its draft and the seconds it takes."""
        return UnadvisedSteps(tree, takes, self.read, self.read, before=self.before)


def accepted(tree: DraftTree, emitted: list[int]) -> int:
    """How many of the tokens that became text a tree holds, from its root on."""
    steps = UnadvisedSteps(tree, 0.0, 0, 0)
    return steps.read - 1 if steps.follow(emitted) else steps.read


def split(seen: VerificationFeedback, count: int) -> tuple[VerificationFeedback, VerificationFeedback]:
    """What a pass showed of its first `count` tokens, and what of the others, as a chain.

    Nothing below the last one of the first is among what it showed of these.
    """
    path, later = seen.path[: count - 1], seen.path[count - 1 : len(seen.emitted) - 1]
    parents = seen.tree.parents.tolist()
    below = {later[0]}
    for node in range(later[0] + 1, len(parents)):
        if parents[node] in below:
            below.add(node)
    kept = [node for node in range(len(parents)) if node not in below]
    place = {node: at for at, node in enumerate(kept)}
    tree = DraftTree(seen.tree.tokens[kept], np.array([place.get(parents[node], -1) for node in kept]))
    first = replace(
        seen, tree=tree, logits=seen.logits[kept], hidden={}, path=[place[node] for node in path],
        emitted=seen.emitted[:count],
    )  # fmt: skip
    chain = DraftTree(seen.tree.tokens[later], np.arange(len(later)) - 1)
    rest = VerificationFeedback(
        chain, seen.logits[later], {}, list(range(1, len(later))), seen.emitted[count:], seen.start + count
    )
    return first, rest
