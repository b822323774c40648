"""Hierarchical drafting: a cheap drafter drafts for the draft model, which drafts for the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import MOST_NODES, Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter, expanding

from .writing import Writing

_DRAFT, _INNER = 0, 1


@register(
    "hierarchical",
    paper="Speculative Decoding Meets Quantization: Compatibility Evaluation and Hierarchical Framework Design (2025)",
    guarantee="the output distribution is unchanged; of a quantized target, that of the quantized one",
    lossless=True,
    requirements=("a drafter that can expand, such as draft-model",),
)
@dataclass(frozen=True)
class Hierarchical(Composite):
    """Drafts a chain with a small model that has a drafter of its own, n-grams by default.

    The drafter's first token takes a pass of its own, then every pass of it checks one inner draft and gives at least
    one token more, until there are `length`; what was accepted beyond them is drafted too. The chain is the one that
    the drafter alone would draw, token for token: only how many passes of it that takes is the inner one's doing. So
    trees, which a target in 4 bits is slow to check, are checked by the small model alone. Scope and memory: those of
    the parts. Source: AI9Stars/SpecMQuant (2025), whose inner drafter is an EAGLE head; its `length`, and the size and
    depth of its trees, are the defaults. The published one is greedy.

    Attributes:
        drafter: What drafts for the target, one that can expand: its own tree_policy and length are left aside.
        inner: What drafts for that one, as trees or chains; it learns from the rows of both.
        length: Tokens of a chain at least.
    """

    drafter: Drafter | str = "draft-model"
    inner: Drafter | str = "ngram:tree_policy=eagle-2(nodes=30,width=10,depth=3)"
    length: int = 6

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SettingsError(f"hierarchical needs length >= 1, not {self.length}")
        for name in ("drafter", "inner"):
            object.__setattr__(self, name, expanding(getattr(self, name), "hierarchical"))
        if self.parts[_INNER].requirements.taps:
            raise SettingsError("hierarchical shows its inner drafter no hidden states: use ngram or draft-model")

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.drafter, self.inner  # type: ignore[return-value]  # resolved above

    def largest(self) -> int | None:
        inner = self.parts[_INNER].largest()
        return None if inner is None else self.length + inner

    def start(self, seq: Sequence) -> None:
        if not all(model.capabilities.trees for model in self.parts[_DRAFT].auxiliary_models(seq.request.model)):
            raise UnsupportedModel("the draft model reads no rows that branch, as drafts for it do: use draft-model")
        super().start(seq)

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        drafter, inner = self.parts
        assert isinstance(drafter, TreeDrafter)
        most = min(budget.nodes, budget.depth, drafter.reach(seq))
        writing = Writing(seq)
        # All that the drafter has been asked about, and of that the draft below the last token it wrote.
        asked = guess = DraftTree.root(seq.last_token)
        fresh = [0]
        while most > 0:
            logits = yield from drafter.writable(seq, asked, fresh)
            seen = _follow(writing, guess, logits, most)
            inner.observe(writing.seq, seen)
            if writing.ended or len(writing.drafted) >= min(self.length, most):
                break
            room = Budget(MOST_NODES, most - len(writing.drafted) - 1)
            guess = yield from as_coroutine(inner.propose(writing.seq, room))
            guess = DraftTree.root(writing.seq.last_token).merge(guess)
            known, asked = len(asked), asked.merge(_behind(writing.chain, guess))
            fresh = list(range(known, len(asked)))
        return writing.chain


def _follow(writing: Writing, guess: DraftTree, logits: torch.Tensor, most: int) -> VerificationFeedback:
    """Write as far as a draft foresaw it, and one token more: of the whole chain at most `most` tokens.

    logits: [n, vocab] the drafter's own, of the draft's nodes.
    """
    start, root = len(writing.drafted), len(writing.seq.tokens) - 1
    path: list[int] = []
    node: int | None = 0
    while node is not None and len(writing.drafted) < most and not writing.ended:
        token = writing.draw(logits[node])
        node = None if token is None else guess.child(node, token)
        if node is not None:
            path.append(node)
    return VerificationFeedback(guess, logits, {}, path, writing.drafted[start:], root)


def _behind(chain: DraftTree, tree: DraftTree) -> DraftTree:
    """A chain, and after its last node a tree, of which that node is the root."""
    parents = np.concatenate((chain.parents, tree.parents[1:] + len(chain) - 1))
    return DraftTree(np.concatenate((chain.tokens, tree.tokens[1:])), parents)
