"""What a draft model of another vocabulary has read of a text, and its logits for the tokens that both models have."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from decodery.core.errors import VocabularyMismatch
from decodery.models.protocol import Reader
from decodery.models.tokenizers.shared_tokens import SharedTokens, shared_tokens
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine

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

    @property
    def begun(self) -> bool:
        return self.reading.follower.begun

    def more_for(self, tokens: int) -> int:
        """See `Follower.more_for`, by the tokens of the text's model."""
        return self.reading.follower.more_for(tokens)

    def forget(self) -> None:
        """Give back the cache's memory: all is read again where it is needed."""
        self.reading.follower.forget()
