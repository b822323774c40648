"""How likely a model finds a text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer
from decodery.step.scorer_calls import ScorerCalls

from .reading import read, reader

_KEPT = 1024
"""Texts whose log-probabilities are kept until they have grown; more where more are scored at once."""


@register("log-probability", guarantee="the model's own distribution", requirements=("logits of every row",))
@dataclass(frozen=True)
class LogProbability(Scorer):
    """Scores a text by what the model that wrote it finds its tokens likely, each after those before it.

    The distribution is the model's own, without temperature and masks; the end token does not count. Cost: a row per
    token of the output, or of its last step where texts grow by steps, in passes that all candidates share. Of a model
    on a server it is what that says of the tokens (`logprobs`).

    Attributes:
        of: "sum" is the text's log-probability, "mean" that per token, "min" that of its least likely token. A text
            without tokens has 0, but as a finished answer -inf under "mean" and "min": nothing is known of it.
    """

    of: Literal["sum", "mean", "min"] = "mean"

    def __post_init__(self) -> None:
        if self.of not in ("sum", "mean", "min"):
            raise SettingsError(f"log-probability takes sum, mean or min, not {self.of!r}")

    requirements = Requirements(logprobs=True)

    @property
    def bounds(self) -> tuple[float, float]:
        return -torch.inf, 0.0

    @property
    def log(self) -> bool:
        return True

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        logprobs = yield from token_logprobs(candidates, [len(output) for output in candidates.outputs])
        return torch.stack([self._of(*each) for each in zip(logprobs, candidates.finished, strict=True)])

    def _of(self, logprobs: torch.Tensor, finished: bool) -> torch.Tensor:
        if not len(logprobs):
            # Else an empty answer is the best of all, for its end token does not count.
            worth = -torch.inf if finished and self.of != "sum" else 0.0
            return torch.tensor(worth, dtype=torch.float64, device="cpu")
        total = logprobs.min() if self.of == "min" else logprobs.sum()
        if self.of == "mean":
            total = total / len(logprobs)
        # Rounding may leave a token of probability 1 a little above it.
        return total.clamp(max=0.0)


def token_logprobs(candidates: Candidates, counts: Sequence[int]) -> ForwardCoroutine[list[torch.Tensor]]:
    """By output: [count] float64 log-probabilities of its last `counts` tokens under its model."""
    if candidates.logprobs is not None:
        told = zip(candidates.logprobs, candidates.outputs, counts, strict=True)
        return [_told(values, len(output))[len(output) - wanted :] for values, output, wanted in told]
    model, start = reader(candidates, "log-probability"), len(candidates.prompt)
    found = [torch.zeros(wanted, dtype=torch.float64, device="cpu") for wanted in counts]
    left = _recalled(candidates, found)

    def take(number: int, row: int, logits: torch.Tensor) -> None:
        output, wanted = candidates.outputs[number], counts[number]
        following = torch.tensor(output[row - start + 1 :][: len(logits)], dtype=torch.int64, device=logits.device)
        law = logits.double().log_softmax(dim=-1).gather(1, following[:, None])[:, 0]
        first = row - start + 1 - (len(output) - wanted)
        found[number][first : first + len(law)] = law.cpu()

    texts = [[*candidates.prompt, *output[:-1]] for output in candidates.outputs]
    yield from read(candidates, model, texts, left, take)
    _remember(candidates, found)
    return found


def _recalled(candidates: Candidates, found: Sequence[torch.Tensor]) -> list[int]:
    """Fill in what is known of the texts before their last steps.

    Returns:
        How many tokens of each are left.
    """
    left = [len(each) for each in found]
    if candidates.begins is None or candidates.calls is None:
        return left
    for number, (output, begin) in enumerate(zip(candidates.outputs, candidates.begins, strict=True)):
        model, known = _remembered(candidates.calls).get(_key(candidates, output[:begin]), (None, None))
        if model is candidates.model and known is not None and len(output) == left[number]:
            found[number][:begin] = known
            left[number] -= begin
    return left


def _remember(candidates: Candidates, found: Sequence[torch.Tensor]) -> None:
    """Keep the log-probabilities of whole texts that may go on, of the newest ones alone."""
    if candidates.begins is None or candidates.calls is None:
        return
    kept = _remembered(candidates.calls)
    for output, finished, each in zip(candidates.outputs, candidates.finished, found, strict=True):
        if not finished and len(output) == len(each):
            kept[_key(candidates, output)] = candidates.model, each
    while len(kept) > max(_KEPT, 2 * len(candidates)):
        del kept[next(iter(kept))]


def _remembered(calls: ScorerCalls) -> dict[Hashable, tuple[Reader | None, torch.Tensor]]:
    """Log-probabilities of texts that may go on, with the model that gave them, by `_key`; the oldest first."""
    found: dict[Hashable, tuple[Reader | None, torch.Tensor]] = calls.remembered.setdefault(
        "token log-probabilities", {}
    )
    return found


def _key(candidates: Candidates, output: Sequence[int]) -> Hashable:
    return id(candidates.model), (*candidates.prompt, -1, *output)


def _told(values: Sequence[float], tokens: int) -> torch.Tensor:
    """[tokens] log-probabilities that a server told of a text's tokens."""
    if len(values) < tokens:
        raise SettingsError(
            f"the server told the log-probabilities of {len(values)} of {tokens} tokens: log-probability needs the "
            "field logprobs; use another scorer"
        )
    return torch.tensor(values[:tokens], dtype=torch.float64, device="cpu")
