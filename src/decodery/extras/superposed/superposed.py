"""Superposed Decoding: several short drafts from one run of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import PromptError, SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.models.batch import Segment
from decodery.models.protocol import LanguageModel, takes_states
from decodery.models.tokenizers.vocabularies import excluded
from decodery.step.forward_request import ForwardCoroutine, score

from .ngrams import NGrams

__all__ = ["Draft"]

_ORDER_WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)
"""Of 2-grams to 6-grams; they sum to 0.5, and unseen runs add nothing."""
_UNSEEN = 1e-4
"""The frequency given to what the n-grams do not know, where it is not dropped."""
_DROPPED = -200.0
"""The released code's score for all candidates of a draft after which the n-grams know none: such drafts rank last."""
_CHUNK = 512


@register(
    "superposed",
    paper="Superposed Decoding: Multiple Generations from a Single Autoregressive Inference Pass (2024)",
    guarantee="none: drafts approximate what the model would write; one draft with alpha 0 is greedy decoding",
    requirements=("input embeddings", "n-grams"),
)
@dataclass(frozen=True)
class Superposition:
    """Writes several short drafts for the passes of one: `lm.suggestions(prompt, k)`.

    The model reads, at every position, the average of the drafts' last tokens; all drafts share its prediction, and
    what distinguishes them is how often their own last tokens went on with each candidate in other texts, and in the
    prompt. For 5 to 20 tokens: the longer, the worse. `Superposition.published(k)` has the published values for k
    drafts but this one; the defaults are those for three.

    Attributes:
        alpha: Weight of those n-grams against the model.
        temperature: Of the model's distribution.
        top: How many of its most likely tokens are candidates.
        unseen: What becomes of candidates that the n-grams do not know after a draft. "floor" gives them a small
            frequency. "drop", as published, leaves them out while the draft has others, and ranks a draft that has none
            last; the published tables are of 200,000 documents, small ones drop what the model is sure of.
    """

    alpha: float = 0.54
    temperature: float = 0.06
    top: int = 9
    unseen: Literal["floor", "drop"] = "floor"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1 or not 0 < self.temperature < math.inf or self.top < 1:
            raise SettingsError("superposed drafts need 0 <= alpha < 1, temperature > 0 and top >= 1")
        if self.unseen not in ("floor", "drop"):
            raise SettingsError(f"unseen of superposed is floor or drop, not {self.unseen!r}")

    @classmethod
    def published(cls, k: int) -> Superposition:
        """What the paper found best for k drafts; between its values of k those of the next smaller one."""
        if k < 1:
            raise SettingsError(f"drafts need k >= 1, not {k}")
        table = {1: (0.0, 0.06, 3), 2: (0.62, 0.06, 6), 3: (0.54, 0.06, 9), 4: (0.52, 0.06, 12), 5: (0.60, 0.06, 15),
                 6: (0.52, 0.06, 18), 10: (0.54, 0.12, 30)}  # fmt: skip
        alpha, temperature, top = table[max(size for size in table if size <= k)]
        return cls(alpha, temperature, max(top, 3 * k))


@dataclass(frozen=True)
class Draft:
    """One draft.

    Attributes:
        tokens: What follows the prompt, an end of text included.
        score: Its log-score, higher is better.
        text: Empty where there is no tokenizer.
    """

    tokens: list[int]
    score: float
    text: str = ""


@dataclass(frozen=True)
class _Branch:
    tokens: tuple[int, ...]
    score: float


def superpose(
    model: LanguageModel,
    prompt: Ordered[int],
    k: int,
    *,
    length: int,
    settings: Superposition,
    ngrams: NGrams,
    eos_ids: Ordered[int] = (),
) -> ForwardCoroutine[list[Draft]]:
    """The k best drafts of up to `length` tokens, best first.

    It takes one pass over the prompt and one for each further token.

    Args:
        ngrams: What is known of the language; the prompt counts as the history of every draft.

    Raises:
        SettingsError: For k or length below 1.
        PromptError: For a prompt that is empty or leaves no room.
        UnsupportedModel: For a model that cannot read embeddings.
    """
    if k < 1 or length < 1:
        raise SettingsError(f"drafts need k >= 1 and at least one new token, not k={k} and {length}")
    room = model.config.max_positions - len(prompt)
    if not prompt or room < 1:
        raise PromptError(f"the prompt has {len(prompt)} tokens: give at least one, and room for one more")
    prompt = [int(token) for token in prompt]
    cache = model.new_cache()
    for start in range(0, len(prompt), _CHUNK):
        chunk = prompt[start : start + _CHUNK]
        scored = yield from score(model, Segment.chunk(chunk, cache, logit_rows=[len(chunk) - 1]))
        logits = excluded(model, scored.logits)[-1]
        cache.keep(range(len(chunk)))
    running, finished = [_Branch((), 0.0)], list[_Branch]()
    for number in range(min(length, room)):
        best = _extend(running, prompt, candidates(logits, settings), settings, ngrams)[: 2 * k]
        ended = [branch for branch in best if branch.tokens[-1] in eos_ids]
        finished = sorted(finished + ended, key=lambda branch: -branch.score)[:k]
        running = [branch for branch in best if branch.tokens[-1] not in eos_ids][:k]
        if not running or number + 1 == min(length, room):
            break
        mixed = mixture(model, [branch.tokens[-1] for branch in running], [branch.score for branch in running])
        segment = Segment(np.array([cache.next_position]), states=mixed, cache=cache)
        logits = excluded(model, (yield from score(model, segment)).logits)[-1]
        cache.keep([0])
    # The paper ranks by exp(-score / length), the smaller the better.
    ranked = sorted(running + finished, key=lambda branch: -branch.score / len(branch.tokens))
    return [Draft(list(branch.tokens), branch.score) for branch in ranked[:k]]


def candidates(logits: torch.Tensor, settings: Superposition) -> list[tuple[int, float]]:
    """The most likely tokens of [vocab] logits, with log-probabilities among themselves, best first."""
    row = logits.double().cpu().numpy()
    # A stable sort: of equal logits the lowest id comes first, as in greedy decoding.
    near = np.flatnonzero(row >= np.partition(row, -min(settings.top, len(row)))[-min(settings.top, len(row))])
    ids = near[np.argsort(-row[near], kind="stable")][: settings.top]
    scaled = (row[ids] - row[ids[0]]) / settings.temperature
    return list(zip(ids.tolist(), (scaled - math.log(np.exp(scaled).sum())).tolist(), strict=True))


def ngram_scores(ngrams: NGrams, history: Ordered[int], tokens: Ordered[int]) -> np.ndarray:
    """[n] weighted relative frequency of each of `tokens` after the last 1 to 5 tokens of `history`."""
    scores, wanted = np.zeros(len(tokens)), np.asarray(tokens)
    for n, weight in enumerate(_ORDER_WEIGHTS[: len(history)], start=1):
        scores += weight * ngrams.frequencies(history[len(history) - n :], wanted)
    return scores


def mixture(model: LanguageModel, tokens: Ordered[int], scores: Ordered[float]) -> torch.Tensor:
    """[1, hidden] input embedding: those of `tokens`, averaged with the softmax of their drafts' scores."""
    if not takes_states(model):
        raise UnsupportedModel(f"{type(model).__name__} takes no input embeddings, which superposed drafts need")
    weights = torch.tensor(scores, dtype=torch.float64, device="cpu").softmax(dim=0)
    rows = model.embed_tokens(torch.tensor(list(tokens), dtype=torch.int64, device=model.device))
    return (weights.to(rows.device, rows.dtype)[:, None] * rows).sum(dim=0, keepdim=True)


def _extend(
    running: list[_Branch],
    prompt: list[int],
    likely: list[tuple[int, float]],
    settings: Superposition,
    ngrams: NGrams,
) -> list[_Branch]:
    """Every draft with every candidate, best first."""
    extended = []
    for branch in running:
        history = (prompt + list(branch.tokens))[-len(_ORDER_WEIGHTS) :]
        known = _known(ngram_scores(ngrams, history, [token for token, _ in likely]), settings)
        for (token, log), own in zip(likely, known.tolist(), strict=True):
            if own > -math.inf:
                score = (1 - settings.alpha) * log + own
                extended.append(_Branch((*branch.tokens, token), branch.score + score))
    return sorted(extended, key=lambda branch: -branch.score)


def _known(frequencies: np.ndarray, settings: Superposition) -> np.ndarray:
    """[n] what n-grams add to the scores of a draft's candidates; minus infinity for those that are dropped."""
    if settings.unseen == "drop" and settings.alpha:
        if not frequencies.any():
            return np.full(len(frequencies), _DROPPED)
        with np.errstate(divide="ignore"):
            return np.asarray(settings.alpha * np.log(frequencies))
    return np.asarray(settings.alpha * np.log(frequencies.clip(min=_UNSEEN)))
