"""Mirostat: truncation under feedback, so that the text is as surprising as it is asked to be."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_number
from .masks import keep, largest

_ZIPF = 100
"""How many of the most likely tokens the exponent is estimated from, each against the next."""
_RUNAWAY = 64.0
"""Bits. A bound as high as this excludes nothing that could ever be drawn."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """State of Mirostat after some tokens.

    All in bits.

    Attributes:
        mu: The bound on a token's surprise.
        tokens, surprise: How many were chosen, and their total.
    """

    mu: float
    tokens: int = 0
    surprise: float = 0.0


@register(
    "mirostat",
    paper="Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity (2021)",
    guarantee="lossy; mean surprise = tau + (first mu - last mu) / (eta * tokens), so tau while mu stays bounded",
)
@dataclass(frozen=True)
class Mirostat(LogitsProcessor):
    """Keeps tokens below a bound on surprise, which adapts to the surprise of the chosen tokens.

    The surprise is that under the distribution before this truncation and after whatever stands before it. A tau the
    model cannot reach lets the bound run away, which is warned of. The defaults are those of llama.cpp; the authors'
    script has tau=3, eta=1.

    Attributes:
        tau: The surprise to aim at, in bits per token.
        eta: How fast the bound follows.
        version: 2 bounds the surprise itself, 1 the rank, from a Zipf exponent estimated anew at every position; at
            least one token stays. It takes the place of the other truncations.
    """

    tau: float = 5.0
    eta: float = 0.1
    version: Literal[1, 2] = 2
    stage = Stage.TRUNCATION
    stateful = True

    def __post_init__(self) -> None:
        require_number("the tau of mirostat", self.tau, least=0.0)
        require_number("the eta of mirostat", self.eta, least=0.0)
        if self.version not in (1, 2):
            raise SettingsError(f"mirostat has the versions 1 and 2, not {self.version!r}")

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if not contexts:
            return logits
        if self.version == 2:
            log_probs = logits.log_softmax(dim=-1)
            bounds = torch.tensor(
                [[each.state.mu] for each in contexts], dtype=torch.float32, device=logits.device
            ) * -math.log(2)
            return logits.masked_fill(
                log_probs < torch.minimum(bounds, log_probs.amax(dim=-1, keepdim=True)), -torch.inf
            )
        exponents = zipf_exponents(largest(logits, _ZIPF + 1)[0])
        sizes = [rank_bound(s, each.state.mu, logits.shape[-1]) for s, each in zip(exponents, contexts, strict=True)]
        if logits.device.type == "cpu":
            return keep(logits, (_best(*each) for each in zip(logits.numpy(), sizes, strict=True)))
        values, ids = largest(logits, max(sizes))
        beyond = (
            torch.arange(ids.shape[-1], device="cpu") >= torch.tensor(sizes, dtype=torch.int64, device="cpu")[:, None]
        )
        kept = values.masked_fill(beyond.to(logits.device), -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter_(-1, ids, kept)

    def init(self, prompt: Sequence[int]) -> Feedback:
        return Feedback(2 * self.tau)

    def advance(self, state: Feedback, token: int, logprob: float) -> Feedback:
        surprise = -logprob / math.log(2)
        if not math.isfinite(surprise):
            # Excluded before it came here, and written all the same, by a rule that takes drafts on trust: it tells
            # nothing of how surprising the text is, and counted as infinitely so it would end all truncation at one.
            return state
        mu = state.mu - self.eta * (surprise - self.tau)
        if state.mu <= _RUNAWAY < mu:
            warnings.warn(
                f"mirostat cannot reach {self.tau:g} bits per token: the model's own surprise is below that, so "
                f"nothing is truncated any more (mean so far: {state.surprise / max(state.tokens, 1):.2f} bits)",
                RuntimeWarning,
                stacklevel=2,
            )
        return Feedback(mu, state.tokens + 1, state.surprise + surprise)


def _best(row: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest entries, the lowest ids among equals: without sorting them, as k may be most of them."""
    border = np.partition(row, len(row) - k)[len(row) - k]
    above = np.flatnonzero(row > border)
    return np.concatenate([above, np.flatnonzero(row == border)[: k - len(above)]])


def zipf_exponents(best: torch.Tensor) -> list[float]:
    """Least-squares exponents of p ~ 1 / rank ** s for rows of `best` [n, m] logits, descending.

    Excluded tokens (-inf) end a row.
    """
    steps = (best[:, :-1] - best[:, 1:]).double()
    logs = (
        (torch.arange(2, best.shape[-1] + 1, device="cpu") / torch.arange(1, best.shape[-1], device="cpu"))
        .double()
        .log()
        .to(best.device)
    )
    known = best[:, 1:] > -torch.inf
    falls = torch.where(known, steps * logs, 0.0).sum(dim=-1)
    return (falls / torch.where(known, logs**2, 0.0).sum(dim=-1).clamp_min(1e-12)).tolist()


def rank_bound(s: float, mu: float, vocab_size: int) -> int:
    """How many of the most likely tokens have a surprise below `mu` bits, if p ~ 1 / rank ** s.

    Args:
        s: Exponent of the distribution.
        mu: Bound on surprise, in bits.
        vocab_size: Most tokens to keep.
    """
    s, vocab_size = max(s, 1e-6), max(vocab_size, 2)
    gap = s - 1
    # log((1 - N ** -gap) / gap), whose limit at 0 is log log N: the sum of the first N values is about this.
    whole = math.log(math.log(vocab_size) if abs(gap) < 1e-6 else -math.expm1(-gap * math.log(vocab_size)) / gap)
    return max(1, round(math.exp(min((mu * math.log(2) - whole) / s, math.log(vocab_size)))))
