"""A draft model of another vocabulary that drafts the tokens which both share (token-level intersection)."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from decodery.core.errors import UnsupportedModel, VocabularyMismatch
from decodery.core.registry import register
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.tokenizers.shared_tokens import SharedTokens, shared_tokens
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from .universal_draft import UniversalReading


@dataclass(slots=True)
class SharedReading:
    """What the draft model has read of a text, in its own tokens.

    Attributes:
        reading: The text in the draft model's tokens.
        shared: The tokens that both models have.
        stand_in: What it reads in place of a drafted token that it lacks.
    """

    reading: UniversalReading
    shared: SharedTokens
    stand_in: int

    def __deepcopy__(self, memo: dict[int, object]) -> SharedReading:
        return replace(self, reading=deepcopy(self.reading, memo))

    def tree(self, text: list[int], tree: DraftTree) -> DraftTree:
        """The same tree in the draft model's tokens, below the end of `text`."""
        tokens = self.shared.others[tree.tokens]
        tokens[tokens < 0] = self.stand_in
        tokens[0] = text[-1]
        return DraftTree(tokens, tree.parents)


@register(
    "tli",
    paper="Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies "
    "(2025)",
    lossless=True,
    slower=True,
    requirements=("a second model whose vocabulary shares tokens with the model's",),
)
@dataclass(frozen=True)
class TLI(TreeDrafter):
    """Drafts with a model of another vocabulary, from the tokens that both vocabularies have.

    It is what the paper calls token-level intersection. The draft's distribution is restricted to tokens of equal bytes
    and normalised, so that rules which want probabilities have them; control tokens are left out. The draft model
    reads the text as its own tokenizer cuts it. Where the vocabularies share little, `universal-draft` drafts more.
    Scope: the request; memory: one more cache.

    Attributes:
        model: A `LanguageModel` whose tokenizer is known, or a name `decodery.load` knows.
        dtype: What a named one is loaded in, such as "int4".
        length: Tokens of a chain.
        tree_policy: How trees are grown in place of it, such as "eagle-2(nodes=32)".
    """

    model: LanguageModel | str
    dtype: Precision = "auto"

    def start(self, seq: Sequence) -> SharedReading:
        model, target = named(self.model, self.dtype), seq.request.model
        if isinstance(self.tree_policy, TreePolicy) and not model.capabilities.trees:
            raise UnsupportedModel("the draft model reads no rows that branch, as trees do: leave tree_policy out")
        reading = UniversalReading.begin(model, target, "tli")
        shared = shared_tokens(reading.target, reading.draft, (target.vocab_size, model.vocab_size))
        if not len(shared.own):
            raise VocabularyMismatch(
                "the two models share no token, and tli drafts shared ones alone: use universal-draft"
            )
        return SharedReading(reading, shared, (*model.config.eos_ids, 0)[0])

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return (named(self.model, self.dtype),)

    def reach(self, seq: Sequence) -> int:
        reading: UniversalReading = seq.states[self].reading
        text = reading.text(seq.tokens)
        # Inside a character the draft model's tokens are not known.
        return reading.follower.model.config.max_positions - len(text) + 1 if text else 0

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        state: SharedReading = seq.states[self]
        text = state.reading.text(seq.tokens)
        if not text:
            return torch.full(
                (len(nodes), state.shared.size), -torch.inf, dtype=torch.float32, device=seq.request.model.device
            )
        found = yield from state.reading.follower.after(text, state.tree(text, tree), nodes)
        return state.shared.translated(found)

    def forget(self, seq: Sequence) -> None:
        reading: UniversalReading = seq.states[self].reading
        reading.follower.forget()
