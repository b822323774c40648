"""A second model as an adviser: it reads along when it is asked, in passes that texts share."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from weakref import ref

import numpy as np

from decodery.core.errors import VocabularyMismatch
from decodery.core.noise import gumbel_topk
from decodery.core.threads import one_thread
from decodery.core.topk import topk
from decodery.models.footprint import weight_bytes
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.reduced_vocabulary import reduced
from decodery.models.tokenizers.vocabularies import tokenizer_of
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import expected

from ..stores.blending import Blending
from .advice import WIDTH, Advice, AskCosts, Opinion
from .adviser_record import remembered
from .follower import Follower
from .shared_reading import SharedReading

_SHARE = 0.1
"""What a question is believed to take where nothing is known of the sizes of the models, in units of a pass."""
_APART = 8
"""Tokens of a text between two questions, by which what is read of a prompt is shared among them."""
_AHEAD = 256
"""Tokens that a text is expected to go on for at most."""
_WAITING = 1024
"""Tokens that are read for a question at most: of a longer text the end alone."""


@dataclass(slots=True)
class ModelAdvice(Advice):
    """One text's second model.

    Attributes:
        follower: What it has read; in its own tokens where it has another vocabulary.
        deepest: Nodes it is asked about.
        start: Where in the text begins what it reads.
    """

    follower: Follower | SharedReading = field(kw_only=True)
    deepest: int = field(kw_only=True)
    start: int = field(default=0, kw_only=True)

    @classmethod
    def of(
        cls, seq: Sequence, model: Reader, most: int, vocabulary: int | None = None, known_as: str = ""
    ) -> ModelAdvice:
        """Nothing read yet, drafts at most so deep.

        Args:
            seq: The text.
            model: The second model.
            most: Nodes it is asked about.
            vocabulary: How many tokens it predicts, those with the lowest ids; None: all.
            known_as: What its record is kept under, "" for its content.

        Raises:
            VocabularyMismatch: If its tokens are not the text's, and neither known nor shared in part.
        """
        asked = reduced(model, vocabulary, "auto")
        follower = _reading(asked, seq)

        def make() -> tuple[Blending, AskCosts]:
            recalled = remembered(seq.request.model, known_as or asked.fingerprint)
            return Blending(), AskCosts(_share(asked, seq.request.model), recalled=recalled)

        # Two models are two opinions, and so are those of greedy texts and of drawn ones.
        key = ("auto", "model", ref(model), vocabulary, seq.request.sampler.greedy)
        blending, costs = seq.request.memory.recall("process", seq, key, make)
        # Half of its context at least is for the text.
        return cls(blending, costs, follower=follower, deepest=min(most, model.config.max_positions // 2))

    def begin(self, budget: Budget) -> None:
        Advice.begin(self, budget)
        # Whoever asks in a step asks in the same pass.
        self.sharers = budget.sequences

    def reaches(self, depth: int) -> bool:
        return depth < self.deepest

    def unread(self, seq: Sequence) -> int:
        return min(self.follower.unread(self._text(seq)), _WAITING)

    def reading(self, tokens: int) -> float:
        # A pass of the second model over so many rows, by what the target's takes beyond a pass over one.
        last = float(self.budget.seconds(np.array([self.budget.sequences + tokens - 1]))[0]) if tokens > 1 else 0.0
        return max(last / self.passes - 1, 0.0) * self.takes(0)

    def uses(self, seq: Sequence) -> float:
        return max(min(seq.remaining, _AHEAD) / _APART, 1.0)

    def more_for(self, tokens: int) -> int:
        # Of a text that it was not asked about nothing may ever be read.
        return self.follower.more_for(tokens - self.start) if self.follower.begun else 0

    def forget(self) -> None:
        self.follower.forget()

    def most_likely(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[Opinion]:
        self._skip(seq)
        if not 0 < self.follower.length(self._text(seq)) <= self._room:
            # The end of a character is missing, or another vocabulary makes many more tokens of the text.
            return [[0] * WIDTH for _ in nodes], [[0.0] * WIDTH for _ in nodes]
        logits = yield from self.follower.after(self._text(seq), tree, nodes)
        law = expected(seq, tree, nodes, logits)
        with one_thread():
            if seq.request.sampler.greedy:
                ids, values = topk(law, WIDTH)
                return ids.tolist(), np.exp(values).tolist()
            # Under the text's own noise: two models that agree draw the same token.
            positions = (seq.position + tree.depths[list(nodes)]).tolist()
            ids, scores = gumbel_topk(law, WIDTH, seq.request.seed, positions)
            weights = np.exp(scores - scores[:, :1])
            return ids.tolist(), (weights / weights.sum(axis=1, keepdims=True)).tolist()

    def _text(self, seq: Sequence) -> list[int]:
        return seq.tokens[self.start :] if self.start else seq.tokens

    def _skip(self, seq: Sequence) -> None:
        """Begin anew near the end of a text of which more is unread than is worth it, or than the context holds."""
        text = self._text(seq)
        if self.follower.unread(text) > _WAITING or self.follower.length(text) > self._room:
            self.follower.forget()
            self.start = len(seq.tokens) - min(len(seq.tokens), _WAITING, (self._room + 1) // 2)

    @property
    def _room(self) -> int:
        return self.follower.model.config.max_positions - self.deepest


def _reading(model: Reader, seq: Sequence) -> Follower | SharedReading:
    """What reads a text along, by the tokens that both models have where the vocabularies differ.

    Raises:
        VocabularyMismatch: Where they differ, and a tokenizer is not known or nothing is shared.
    """
    target = seq.request.model
    try:
        return Follower.begin(model, target, slots=seq.request.slots)
    except VocabularyMismatch:
        if tokenizer_of(model) is None or tokenizer_of(target) is None:
            raise
    return SharedReading.begin(model, target, "auto")


def _share(model: Reader, target: Reader) -> float:
    """What a pass of a second model is believed to take in units of the target's: passes read all weights."""
    sizes = [weight_bytes(each) if isinstance(each, LanguageModel) else 0 for each in (model, target)]
    return sizes[0] / sizes[1] if all(sizes) else _SHARE
