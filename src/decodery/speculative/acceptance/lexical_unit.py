"""The rule of lexical units: what the draft was sure of becomes text unchecked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence


@register(
    "lexical-unit",
    paper="Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs (2024)",
    guarantee="lossy: tokens drafted with a probability of at least beta are not checked; beta > 1 checks all of them",
    requirements=("drafts with their log-probabilities",),
)
@dataclass(frozen=True)
class LexicalUnit(AcceptanceRule):
    """Accepts the first child whose draft probability is at least `beta`.

    Else goes on as the coupled rule does. Drafts without log-probabilities are checked like any other.

    Attributes:
        beta: Published as a threshold on the model's probability at a placeholder; 0.9 is a choice made here.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise SettingsError("lexical-unit needs beta > 0")

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> Accepted:
        trusted = np.zeros(len(tree), dtype=bool) if tree.logq is None else tree.logq >= math.log(self.beta)
        path: list[int] = []
        node = 0
        while True:
            sure = [
                child
                for child in tree.children(node).tolist()
                if trusted[child] and not seq.is_padding(tree.tokens[child])
            ]
            token = int(tree.tokens[sure[0]]) if sure else laws.picks([node])[0]
            child = tree.child(node, token)
            if child is None:
                return Accepted(path, token)
            path.append(child)
            node = child
