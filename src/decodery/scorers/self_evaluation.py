"""Self-evaluation: the model is asked whether its own text is any good, and how likely it says so is read off."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer

from .reading import read, reader

_QUESTION = "\n\nIs this answer right? Say Yes or No.\n"


@register(
    "self-evaluation",
    paper="Adaptive Inference-Time Compute: LLMs Can Predict if They Can Do Better, Even Mid-Generation (2024)",
    guarantee="the text itself is left as it was",
    texts=("question", "yes", "no"),
)
@dataclass(frozen=True)
class SelfEvaluation(Scorer):
    """Scores a text by the probability of yes among the answers to a question that is put after it.

    The model that wrote the text is asked, on a fork of what it has read, so that nothing of the question is left.
    Cost: the question's rows, in passes that all candidates share. The model was trained for this question in the
    paper; as it is, its answer is worth what measuring says.

    Attributes:
        question: A text, or token ids.
        yes, no: Texts, of each of which the first token counts, in all spellings separated by |, or token ids; their
            probabilities are summed.
    """

    question: str | tuple[int, ...] = _QUESTION
    yes: str | tuple[int, ...] = "Yes| Yes|yes| yes"
    no: str | tuple[int, ...] = "No| No|no| no"

    requirements = Requirements(rows=True)

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0

    def bind(self, tokenizer: Tokenizer) -> SelfEvaluation:
        def first(words: str | tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(words, str):
                return words
            cut = [tokenizer.encode(word, special=False) for word in words.split("|") if word]
            return tuple(sorted({ids[0] for ids in cut if ids}))

        question = self.question
        if isinstance(question, str):
            question = tuple(tokenizer.encode(question, special=False))
        return replace(self, question=question, yes=first(self.yes), no=first(self.no))

    def fits(self, model: Reader) -> None:
        ids = self._ids()
        if not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise SettingsError(f"self-evaluation has token ids outside the vocabulary of {model.vocab_size}")

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        model = reader(candidates, "self-evaluation")
        self.fits(model)
        found = torch.zeros(len(candidates), dtype=torch.float64, device="cpu")

        def take(number: int, row: int, logits: torch.Tensor) -> None:
            law = logits[-1].double().log_softmax(dim=-1)
            yes, no = law[list(self.yes)].logsumexp(dim=0), law[list(self.no)].logsumexp(dim=0)
            found[number] = torch.sigmoid(yes - no)

        texts = [[*candidates.prompt, *output, *self.question] for output in candidates.outputs]
        yield from read(candidates, model, texts, [1] * len(texts), take)
        return found

    def _ids(self) -> list[int]:
        parts = (self.question, self.yes, self.no)
        if any(isinstance(part, str) for part in parts):
            raise SettingsError("self-evaluation has texts: give token ids, or search through `LLM`")
        if not all(parts) or set(self.yes) & set(self.no):
            raise SettingsError("self-evaluation needs a question, and answers yes and no that begin differently")
        return [int(token) for part in parts for token in part]
