"""Curiosity: a story's new step is worth most where it is moderately surprising, and follows from what came before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer, scores_of

from .log_probability import token_logprobs


def inverted_u(surprisal: torch.Tensor, peak: float, width: float) -> torch.Tensor:
    """[n] 1 at the peak, falling as a parabola to 0 at `width` from it on either side, and 0 beyond.

    Args:
        surprisal: [n] nats per token.
    """
    return (1 - ((surprisal - peak) / width) ** 2).clamp(min=0.0)


@register(
    "curiosity",
    paper="COS(M+O)S: Curiosity and RL-Enhanced MCTS for Exploring Story Space via Language Models (2025)",
    guarantee="moderate surprise is worth most",
    requirements=("logits of the last step's rows",),
)
@dataclass(frozen=True)
class Curiosity(Scorer):
    """Scores a text by the last step's surprise U and coherence C.

    The score is sigmoid(surprise * U + coherent * C + bias). U is an inverted U over the mean of -log p per token of
    the last step, or of all that was written where texts do not grow by steps, under the model that wrote it without
    temperature and masks: 1 at `peak` nats, 0 from `width` nats on either side of it. The peak and the width of a
    corpus of one's own are the ones to give; formula and numbers here are a reading, for none are published.

    Attributes:
        coherence: Any scorer, as in value-head(head=FILE) whose head `decodery train value` has fitted to real
            continuations (reward 1) and to those of other stories (reward 0); None leaves C out.
        peak: Mean surprise in nats per token at which U is 1.
        width: Distance from the peak in nats at which U is 0.
        surprise: Weight of U.
        coherent: Weight of C.
        bias: Added to the weighted sum.
    """

    coherence: Scorer | str | None = None
    peak: float = 2.5
    width: float = 2.5
    surprise: float = 1.0
    coherent: float = 1.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        for name in ("surprise", "coherent", "bias", "peak"):
            require_number(f"the {name} of curiosity", getattr(self, name))
        require_number("the width of curiosity", self.width, above=0)
        if self.coherence is not None:
            object.__setattr__(self, "coherence", resolve("scorer", self.coherence))

    @property
    def inner(self) -> Scorer | None:
        assert not isinstance(self.coherence, str)
        return self.coherence

    @property
    def prefixes(self) -> bool:
        return self.inner is None or self.inner.prefixes

    @property
    def writes(self) -> bool:
        return self.inner is not None and self.inner.writes

    @property
    def answers(self) -> bool:
        return self.inner is None or self.inner.answers

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0

    @property
    def requirements(self) -> Requirements:
        return Requirements(rows=True, taps=() if self.inner is None else self.inner.requirements.taps)

    def bind(self, tokenizer: Tokenizer) -> Curiosity:
        return self if self.inner is None else replace(self, coherence=self.inner.bind(tokenizer))

    def fits(self, model: Reader) -> None:
        if self.inner is not None:
            self.inner.fits(model)

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        begins = candidates.begins or [0] * len(candidates)
        counts = [len(output) - begin for output, begin in zip(candidates.outputs, begins, strict=True)]
        logprobs = yield from token_logprobs(candidates, counts)
        # A text that ends at once has no tokens, so its surprise is 0.
        surprisal = torch.stack(
            [-each.mean() if len(each) else torch.zeros((), dtype=torch.float64, device="cpu") for each in logprobs]
        )
        total = self.bias + self.surprise * inverted_u(surprisal, self.peak, self.width)
        if self.inner is not None:
            total = total + self.coherent * (yield from scores_of(self.inner, candidates)).double()
        return torch.sigmoid(total)
