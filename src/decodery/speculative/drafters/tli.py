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

    @classmethod
    def begin(cls, model: Reader, target: Reader, name: str) -> SharedReading:
        """Nothing read yet.

        Args:
            model, target: The draft model and the text's.
            name: The drafter, for messages.

        Raises:
            SettingsError: Where a tokenizer is not known.
            VocabularyMismatch: Where the models share no token.
        """
        reading = UniversalReading.begin(model, target, name)
        shared = shared_tokens(reading.target, reading.draft, (target.vocab_size, model.vocab_size))
        if not len(shared.own):
            raise VocabularyMismatch(
                f"the two models share no token, and {name} drafts shared ones alone: use universal-draft"
            )
        return cls(reading, shared, (*model.config.eos_ids, 0)[0])

    def __deepcopy__(self, memo: dict[int, object]) -> SharedReading:
        return replace(self, reading=deepcopy(self.reading, memo))

    @property
    def model(self) -> Reader:
        return self.reading.follower.model

    def length(self, tokens: list[int]) -> int:
        """How many tokens of the draft model a text has, 0 where it ends inside a character."""
        return len(self.reading.text(tokens))

    def unread(self, tokens: list[int]) -> int:
        """About how many tokens the draft model would read to predict after `tokens`."""
        return abs(len(tokens) - len(self.reading.known)) if self.reading.follower.tokens else len(tokens)

    def after(self, tokens: list[int], tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        """The logits [k, vocab] of the text's model after `nodes`, minus infinity for what is not shared.

        Args:
            tokens: The text, which does not end inside a character.
            tree: Below its end.
            nodes: Of it.
        """
        text = self.reading.text(tokens)
        below = self.shared.others[tree.tokens]
        below[below < 0] = self.stand_in
        below[0] = text[-1]
        found = yield from self.reading.follower.after(text, DraftTree(below, tree.parents), nodes)
        return self.shared.translated(found)

    def forget(self) -> None:
        """Give back the cache's memory: all is read again where it is needed."""
        self.reading.follower.forget()


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
        return SharedReading.begin(model, target, "tli")

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return (named(self.model, self.dtype),)

    def reach(self, seq: Sequence) -> int:
        state: SharedReading = seq.states[self]
        length = state.length(seq.tokens)
        # Inside a character the draft model's tokens are not known.
        return state.model.config.max_positions - length + 1 if length else 0

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        state: SharedReading = seq.states[self]
        if not state.length(seq.tokens):
            return torch.full(
                (len(nodes), state.shared.size), -torch.inf, dtype=torch.float32, device=seq.request.model.device
            )
        return (yield from state.after(seq.tokens, tree, nodes))

    def forget(self, seq: Sequence) -> None:
        state: SharedReading = seq.states[self]
        state.forget()
