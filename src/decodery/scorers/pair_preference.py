"""RLHFlow's pair-preference model: it reads a conversation with two answers, and answers with A or B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decodery.core.conversation import Conversation, content_of
from decodery.core.errors import SettingsError
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.chat_prompt import chat_tokens
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates

from .reading import read

_LABELS = "A", "B"
_ROLE = "reward"


@dataclass(frozen=True)
class PairPreference:
    """The probability that one answer is preferred to another one.

    Attributes:
        loaded: The model with its tokenizer and chat template.
    """

    loaded: LoadedModel

    def __post_init__(self) -> None:
        if self.loaded.chat_template is None:
            raise SettingsError("form=rlhflow needs the chat template of its model, and the folder has none")
        self.label_tokens()

    def label_tokens(self) -> tuple[int, int]:
        """Tokens of A and B.

        Raises:
            SettingsError: Where one of them is not a token of its own.
        """
        first, second = (self.loaded.tokenizer.encode(label, special=False) for label in _LABELS)
        if len(first) != 1 or len(second) != 1:
            raise SettingsError("form=rlhflow reads the logits of A and B, and this tokenizer has no token for them")
        return first[0], second[0]

    def tokens(self, conversation: Conversation, first: str, second: str) -> list[int]:
        """The tokens of a prompt with two answers, up to where A or B follows."""
        chat = self.loaded.chat_template
        assert chat is not None
        said = f"[CONTEXT] {_context(conversation)} [RESPONSE A] {first} [RESPONSE B] {second} \n"
        found = list(chat_tokens(chat, self.loaded.tokenizer, [{"role": "user", "content": said}]))
        # The published code takes the token that begins a text out of the template's.
        begin = self.loaded.tokenizer.encode(chat.special.get("bos_token") or "", special=False)
        return found[1:] if begin == found[:1] else found

    def preferred(self, conversation: Conversation, answers: Sequence[str]) -> ForwardCoroutine[list[list[float]]]:
        """By answer, the probability that it is preferred to each of the others, averaged over both orders.

        Answers that stand first in the same place share the rows up to there.

        Returns:
            A square of probabilities, with .5 on its diagonal.
        """
        model, labels = self.loaded.model, list(self.label_tokens())
        count = len(answers)
        # Row: the answer that stands first.
        chosen = torch.full((count, count), 0.5, dtype=torch.float64, device="cpu")
        for first in range(count):
            others = [number for number in range(count) if number != first]

            def take(number: int, row: int, logits: torch.Tensor, first: int = first, others: Any = others) -> None:
                chosen[first, others[number]] = torch.softmax(logits[-1, labels].double(), dim=-1)[0]

            texts = [self.tokens(conversation, answers[first], answers[other]) for other in others]
            asked = Candidates((), [()] * len(texts), [True] * len(texts), model=model, role=_ROLE)
            yield from read(asked, model, texts, [1] * len(texts), take)
        both: list[list[float]] = ((chosen + 1 - chosen.T) / 2).tolist()
        return both


def _context(conversation: Conversation) -> str:
    """The conversation as the model was trained to read it."""
    prompt = conversation.prompt
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    roles = [str(turn.get("role")) for turn in turns]
    if roles != [("user", "assistant")[number % 2] for number in range(len(turns))]:
        raise SettingsError(
            "form=rlhflow reads turns of user and assistant that alternate, and this prompt has "
            f"{', '.join(roles)}: leave the other turns out"
        )
    return "\n" + "".join(f"\n<turn> {turn['role']}\n {content_of(turn)}" for turn in turns) + "\n"
