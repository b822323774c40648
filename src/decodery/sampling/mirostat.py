"""Mirostat: truncation with feedback control, so that the surprise of the text reaches a target."""

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
"""Number of most likely tokens that the exponent is estimated from, each against the next."""
_RUNAWAY = 64.0
"""Bound, in bits, from which no token that could be drawn is excluded."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """State of Mirostat after some tokens.

    Attributes:
        mu: The bound on a token's surprise, in bits.
        tokens: Number of chosen tokens.
        surprise: Their total surprise, in bits.
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

    It replaces the other truncations. Surprise is measured under the distribution before this truncation, after all
    earlier processors. If the model cannot reach tau, the bound grows without limit, and a warning is given. The
    defaults are those of llama.cpp; the authors' script has tau=3, eta=1.

    Attributes:
        tau: Target surprise, in bits per token.
        eta: Learning rate of the bound.
        version: 2 bounds the surprise; 1 bounds the rank, by a Zipf exponent that is estimated at every position. At
            least one token is kept.
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
            raise SettingsError(f"mirostat: version must be 1 or 2, not {self.version!r}")

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
            # An earlier processor excluded this token, and a lossy acceptance rule wrote it all the same. Its surprise
            # is infinite and would end all truncation at once, so it is not counted.
            return state
        mu = state.mu - self.eta * (surprise - self.tau)
        if state.mu <= _RUNAWAY < mu:
            warnings.warn(
                f"mirostat cannot reach {self.tau:g} bits per token, because the model's own surprise is lower: it no "
                f"longer truncates (mean so far: {state.surprise / max(state.tokens, 1):.2f} bits)",
                RuntimeWarning,
                stacklevel=2,
            )
        return Feedback(mu, state.tokens + 1, state.surprise + surprise)


def _best(row: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest entries, ties in order of id; they are not sorted, since k may be nearly all of them."""
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
    """Number of most likely tokens with a surprise below `mu` bits, if p ~ 1 / rank ** s.

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
