"""Adaptive weighted rejection sampling: draws a token that a check accepts, from a few checks, with its weight.

Tokens are tried in the order of draws without replacement. Each function here is one step. Over the randomness of the
order (and of `uniform`), the weight w of the token a satisfies E[w f(a)] = sum over accepted tokens of p(a) f(a) for
any f. So E[w] is the probability mass of the accepted tokens. Source: Fast Controlled Generation from Language Models
with Adaptive Weighted Rejection Sampling (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from decodery.core.noise import gumbel_topk
from decodery.core.topk import topk

from .constraint import Constraint, constrained
from .logits_processor import Context
from .sampler import Sampler

_FIRST = 8
"""Number of tokens that are ordered first; most checks accept one of them."""
_PEAKED = 2 / 3
"""Probability of the most likely token above which the geometric estimator has the lower variance."""


@dataclass(frozen=True, slots=True)
class TokenTrial:
    """The result of one step.

    Attributes:
        token: The accepted token, None where no token was accepted.
        log_weight: Natural log of w, -inf for 0.
        checks: Number of tokens that were checked.
        rejections: Number of these that were rejected.
    """

    token: int | None
    log_weight: float
    checks: int
    rejections: int


def in_order(law: torch.Tensor, seed: int | None, position: int) -> Iterator[int]:
    """The tokens of a distribution drawn without replacement by the noise of `seed`.

    The first accepted token equals the draw of the same noise from the distribution that is restricted to accepted
    tokens. Tokens at -inf are left out. The order is computed lazily.

    Args:
        law: [vocab] unnormalised logits.
        seed: Seed of the noise; None orders by probability, the most likely first.
        position: Output position, which the noise depends on.
    """
    done, count = 0, _FIRST
    while True:
        if seed is None:
            ids, scores = topk(law[None], count)
        else:
            ids, scores = gumbel_topk(law[None], count, seed, [position])
        for token, score in zip(ids[0, done:].tolist(), scores[0, done:].tolist(), strict=True):
            if score == -math.inf:
                return
            yield token
        if count >= len(law):
            return
        done, count = count, 16 * count


def first_accepted(order: Iterable[int], accept: Callable[[int], bool]) -> TokenTrial:
    """Return the first accepted token, an exact draw from the distribution given acceptance.

    Args:
        order: Tokens in the order of `in_order`.
        accept: Whether a token is allowed.
    """
    rejections = 0
    for token in order:
        if accept(token):
            return TokenTrial(token, 0.0, rejections + 1, rejections)
        rejections += 1
    return TokenTrial(None, -math.inf, rejections, rejections)


def recursive(
    p: np.ndarray, order: Iterable[int], accept: Callable[[int], bool], max_rejects: float = math.inf
) -> TokenTrial:
    """The recursive estimator: one more check after the accepted token decides the weight.

    Every rejection multiplies the weight by the share of the mass that is left, so the product is the mass that was not
    rejected. The weight of the token is this mass if the next token is accepted too, and its own probability if not.

    Args:
        p: [vocab] probabilities, summing to 1, from which `order` was drawn.
        order: Tokens in the order of `in_order`.
        accept: Whether a token is allowed.
        max_rejects: Rejections after which no token is accepted; a token that the last check accepts needs no further
            check.
    """
    tokens = iter(order)
    rejected: list[int] = []
    for token in tokens:
        if not accept(token):
            rejected.append(token)
            if len(rejected) >= max_rejects:
                break
            continue
        checks = following = 0
        if len(rejected) + 1 < max_rejects and (other := next(tokens, None)) is not None:
            checks, following = 1, accept(other)
        whole = following or not checks
        mass = _left(p, rejected) if whole else float(p[token])
        count = len(rejected)
        return TokenTrial(token, _log(mass), count + 1 + checks, count + (checks - following))
    return TokenTrial(None, -math.inf, len(rejected), len(rejected))


def geometric(
    p: np.ndarray,
    order: Iterable[int],
    accept: Callable[[int], bool],
    uniform: Callable[[], float],
    accepts: int = 2,
    max_rejects: float = math.inf,
) -> TokenTrial:
    """The geometric estimator: draws until `accepts` are accepted; no token is checked twice.

    A draw with replacement gives an already rejected token (their number in a row is geometrically distributed), an
    already accepted token, or the next one of the order. The weight is the unbiased estimate of a negative binomial
    sample: (accepted - 1) / (draws - 1). It is accepted / (draws - 1) where the rejections, repeated ones included,
    reached max_rejects.

    Args:
        p: As for `recursive`.
        order: As for `recursive`.
        accept: As for `weighted`.
        uniform: Random numbers in (0, 1); each is used once.
        accepts: As for `weighted`.
        max_rejects: As for `weighted`.
    """
    tokens = iter(order)
    left = np.array(p, dtype=np.float64)
    mass, known, first = float(left.sum()), 0.0, None
    accepted, rejections, checks, refused = 0, 0.0, 0, 0
    while accepted < accepts and mass > 0:
        if refused:
            # Failures before a success of probability `mass`.
            rejections += math.floor(math.log(uniform()) / math.log1p(-mass)) if mass < 1 else 0
            if rejections >= max_rejects:
                break
        if known and uniform() * mass < known:
            accepted += 1
            continue
        token = next(tokens, None)
        if token is None or p[token] == 0:
            if not known:
                break
            accepted += 1
            continue
        checks += 1
        if accept(token):
            first = token if first is None else first
            known += float(p[token])
            accepted += 1
        else:
            refused += 1
            rejections += 1
            if rejections >= max_rejects:
                break
            left[token] = 0.0
            mass = float(left.sum())
    if first is None:
        return TokenTrial(None, -math.inf, checks, refused)
    draws = accepted + min(rejections, max_rejects)
    return TokenTrial(first, math.log(min(accepts - 1, accepted)) - math.log(draws - 1), checks, refused)


def weighted(
    law: torch.Tensor,
    accept: Callable[[int], bool],
    seed: int,
    position: int,
    uniform: Callable[[], float],
    accepts: int = 2,
    max_rejects: float = math.inf,
) -> TokenTrial:
    """Draw a token and its weight by the estimator with the lower variance.

    That is the recursive one for flat distributions, and the geometric one for peaked ones or for more than two
    `accepts`.

    Args:
        law: [vocab] unnormalised logits.
        accept: Whether a token is allowed.
        seed: Seed of the noise.
        position: Output position of the noise.
        uniform: See `geometric`.
        accepts: Number of accepted draws that the geometric estimator uses.
        max_rejects: Rejections after which no token is accepted.
    """
    p = law.double().softmax(dim=-1).cpu().numpy()
    order = in_order(law, seed, position)
    if accepts > 2 or p.max() > _PEAKED:
        return geometric(p, order, accept, uniform, accepts, max_rejects)
    return recursive(p, order, accept, max_rejects)


class CheckedSampler:
    """A sampler whose constraint checks single tokens instead of masking the distribution.

    Attributes:
        constraint: The constraint, None where the sampler has none.
    """

    def __init__(self, sampler: Sampler) -> None:
        found = constrained(sampler.processors)
        self._place = -1 if found is None else found[0]
        self.constraint: Constraint | None = None if found is None else found[1]
        self._rest = (
            sampler
            if found is None
            else Sampler(sampler.processors[: self._place] + sampler.processors[self._place + 1 :])
        )

    def law(self, logits: torch.Tensor, contexts: Sequence[Context], *, shaped: bool = True) -> torch.Tensor:
        """`Sampler.law` without the constraint: unnormalised logits [n, vocab]."""
        if self.constraint is not None:
            contexts = [
                Context(
                    each.prompt_length,
                    each.tokens,
                    (*each.state[: self._place], *each.state[self._place + 1 :]),
                    each.seed,
                )
                for each in contexts
            ]
        return self._rest.law(logits, contexts, shaped=shaped)

    def relaxed(self, law: torch.Tensor, logits: torch.Tensor, context: Context) -> tuple[torch.Tensor, int]:
        """Compute the distribution where the constraint accepts none of `law`'s tokens.

        The constraint is the first of the masks, and a later mask that would leave no token is not applied. So the
        constraint checks the tokens that other masks have excluded, and these are applied to the accepted ones.

        Args:
            law: [vocab] unnormalised logits after all processors.
            logits: [vocab] the model's own.
            context: The history.

        Returns:
            [vocab] unnormalised logits, all -inf where the constraint accepts no token, and the number of checks.
        """
        accept = self.accept(context)
        excluded = torch.nonzero(torch.isneginf(law) & ~torch.isneginf(logits)).flatten().tolist()
        accepted = [token for token in excluded if accept(token)]
        kept = torch.full_like(logits, -torch.inf)
        if accepted:
            kept[accepted] = logits[accepted]
            kept = self.law(kept[None], [context])[0]
        return kept, len(excluded)

    def accept(self, context: Context) -> Callable[[int], bool]:
        """The check of the token that follows `context`."""
        if self.constraint is None:
            return lambda token: True
        return partial(self.constraint.accepts, context.state[self._place])

    def is_complete(self, context: Context) -> bool:
        """Whether the text may end after `context`."""
        return self.constraint is None or self.constraint.is_complete(context.state[self._place])


def _left(p: np.ndarray, rejected: list[int]) -> float:
    """The mass of all other tokens, as a sum over them: 1 minus the rejected mass could round to 0."""
    if not rejected:
        return float(p.sum())
    rest = p.copy()
    rest[rejected] = 0.0
    return float(rest.sum())


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
