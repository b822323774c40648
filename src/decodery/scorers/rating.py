"""Rating: a model is asked what a text is worth, and answers with one of a few words that stand for numbers."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import gumbel, mix
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer

from .reading import read, reader

_QUESTION = (
    "\n\nCan what is written so far still lead to the right answer? Say sure, likely or impossible.\nThe judgement is:"
)


@register(
    "rating",
    paper="Tree of Thoughts: Deliberate Problem Solving with Large Language Models (2023)",
    guarantee="the text itself is left as it was",
    texts=("question", "words"),
)
@dataclass(frozen=True)
class Rating(Scorer):
    """Scores a text by the number that the model's answer to a question put after it stands for.

    The model that wrote the text is asked, on a fork of what it has read, so that nothing of the question is left.
    Cost: the question's rows, in passes that all candidates share. The published values, 0.001, 1 and 20, are summed
    over three answers.

    Attributes:
        question: A text, or token ids.
        words: Answers, separated by |, of each of which the first token counts, in all of its spellings with and
            without a space and a capital; or the token ids of each.
        values: The number of each.
        how: "mean" is what is to be expected, by the probabilities of the words alone; "argmax" the number of the most
            likely of all tokens, or the least where that is none of the words; "drawn" the mean of `draws` drawn words,
            the same ones whenever the same text is scored.
        draws: Words that "drawn" draws.
    """

    question: str | tuple[int, ...] = _QUESTION
    words: str | tuple[tuple[int, ...], ...] = "impossible|likely|sure"
    values: tuple[float, ...] = (0.001, 1.0, 20.0)
    how: Literal["mean", "argmax", "drawn"] = "mean"
    draws: int = 3

    requirements = Requirements(rows=True)

    def __post_init__(self) -> None:
        if self.how not in ("mean", "argmax", "drawn"):
            raise SettingsError(f"rating takes mean, argmax or drawn answers, not {self.how!r}")
        if self.draws < 1:
            raise SettingsError(f"rating draws an answer at least once, not {self.draws!r} times")
        known = self.words.split("|") if isinstance(self.words, str) else self.words
        if len(known) < 2 or not all(known) or len(known) != len(self.values):
            raise SettingsError("rating needs two words or more, and a value of each, as in words=no|yes,values=0/1")

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    def bind(self, tokenizer: Tokenizer) -> Rating:
        question, words = self.question, self.words
        if isinstance(question, str):
            question = tuple(tokenizer.encode(question, special=False))
        if isinstance(words, str):
            firsts = [_spellings(tokenizer, word) for word in words.split("|")]
            # A token that several begin with, such as a space by itself, tells nothing.
            words = tuple(
                tuple(sorted(own.difference(*(each for each in firsts if each is not own)))) for own in firsts
            )
        return replace(self, question=question, words=words)

    def fits(self, model: Reader) -> None:
        ids = [*self.question, *(token for word in self.words for token in word)]
        if any(isinstance(each, str) for each in ids):
            raise SettingsError("rating has texts: give token ids, or search through `LLM`")
        if not self.question or not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise SettingsError(
                f"rating needs a question, and token ids within the vocabulary of {model.vocab_size} tokens"
            )
        if sum(map(len, self.words)) != len(set().union(*self.words)):
            raise SettingsError("rating needs words whose first tokens differ: choose other words")

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        model = reader(candidates, "rating")
        self.fits(model)
        found = torch.zeros(len(candidates), dtype=torch.float64, device="cpu")
        texts = [[*candidates.prompt, *output, *map(int, self.question)] for output in candidates.outputs]

        def take(number: int, row: int, logits: torch.Tensor) -> None:
            found[number] = self.read_off(logits[-1], texts[number])

        yield from read(candidates, model, texts, [1] * len(texts), take)
        return found

    def read_off(self, logits: torch.Tensor, text: Ordered[int]) -> float:
        """The value of an answer whose logits [vocab] these are.

        Args:
            text: What was asked about, which decides draws.
        """
        ids = [[int(token) for token in word] for word in self.words]
        values = torch.tensor(self.values, dtype=torch.float64, device="cpu")
        if self.how == "argmax":
            top = int(logits.argmax())
            return next((value for word, value in zip(ids, self.values, strict=True) if top in word), self.bounds[0])
        law = logits.double().log_softmax(dim=-1)
        words = torch.stack([law[word].logsumexp(dim=0) for word in ids]).cpu()
        if self.how == "mean":
            return float(words.softmax(dim=0) @ values)
        noise = gumbel(mix(*text), range(self.draws), torch.arange(len(ids), device="cpu"))
        return float(values[(words + noise).argmax(dim=-1)].mean())


def _spellings(tokenizer: Tokenizer, word: str) -> set[int]:
    """The first tokens that a word may be written with."""
    cut = [tokenizer.encode(space + each, special=False) for each in {word, word.capitalize()} for space in ("", " ")]
    return {ids[0] for ids in cut if ids}
