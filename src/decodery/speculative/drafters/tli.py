"""A draft model of another vocabulary that drafts the tokens which both share (token-level intersection)."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch

from decodery.core.errors import UnsupportedModel
from decodery.core.registry import register
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from .shared_reading import SharedReading


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

    def more_for(self, seq: Sequence, tokens: int) -> int:
        state: SharedReading = seq.states[self]
        return state.more_for(tokens)

    def forget(self, seq: Sequence) -> None:
        state: SharedReading = seq.states[self]
        state.forget()
