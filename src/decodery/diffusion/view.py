"""The result of one pass for the open positions of a canvas: proposals, their confidence, and distributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch

from decodery.core.noise import gumbel_argmax

__all__ = ["Commit", "Measure", "Truncation", "View", "blocks"]

_AT_ONCE = 1 << 22
"""Numbers of distributions that are computed with at once."""

Measure = Literal["probability", "margin", "entropy"]


class Commit(NamedTuple):
    """The tokens that a method writes after a pass.

    Attributes:
        positions: [n].
        tokens: [n] ids.
    """

    positions: np.ndarray
    tokens: np.ndarray


class Truncation(NamedTuple):
    """The tokens that proposals are drawn from.

    Attributes:
        top_k: Number of most likely tokens, 0 for all.
        top_p: Of these, the most likely ones that together have this probability.
    """

    top_k: int = 0
    top_p: float = 1.0

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """[m, vocab] logits, -inf for tokens that are left out."""
        if 0 < self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            values, order = logits.sort(dim=-1, descending=True)
            shares = values.softmax(dim=-1)
            # A token is kept where more likely tokens together have not reached top_p.
            out = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, shares.cumsum(-1) - shares > self.top_p)
            logits = logits.masked_fill(out, -torch.inf)
        return logits


ALL_TOKENS = Truncation()


@dataclass(eq=False)
class View:
    """The open positions of a region after one pass.

    Attributes:
        positions: [m], ascending.
        tokens: [m] proposals.
        confidence: [m] float64, the confidence of each proposal: its probability, the lead of the most likely token
            over the next one, or minus the entropy in nats; -inf for proposals that rank last.
        logprobs: [m, vocab] at temperature 1.
        region: First and last position (exclusive) of the region, written positions included.
        passed: Number of earlier passes over this region.
        shown: [m, vocab] log-probabilities that confidence and entropy are computed from, None for `logprobs`.
    """

    positions: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray
    logprobs: torch.Tensor
    region: tuple[int, int]
    passed: int = 0
    shown: torch.Tensor | None = None
    _likely: tuple[int, list[list[int]], list[list[float]]] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        positions: np.ndarray,
        region: tuple[int, int],
        *,
        measure: Measure = "probability",
        temperature: float = 0.0,
        seed: int = 0,
        first: int = 0,
        late: Sequence[int] = (),
        passed: int = 0,
        truncation: Truncation = ALL_TOKENS,
        tempered: bool = False,
    ) -> View:
        """Propose a token for every open position.

        At a temperature above 0, seed and position decide the noise of a draw.

        Args:
            logits: [m, vocab] of the open positions, -inf for tokens that cannot be written; they become the view's
                log-probabilities.
            positions: [m], ascending.
            region: See `View`.
            measure: How confidence is measured, see `View`.
            temperature: Temperature of the draws; 0 takes the most likely tokens.
            seed: Seed of the draws.
            first: Position at which the output begins.
            late: Tokens whose proposals rank after all others.
            passed: See `View`.
            truncation: The tokens that may be proposed.
            tempered: Whether confidence is measured on the distribution that proposals are drawn from.
        """
        found = logits.new_empty(len(logits), dtype=torch.int64)
        sure, shown = logits.new_empty(len(logits)), torch.empty_like(logits) if tempered else None
        for part in blocks(logits):
            logprobs = logits[part].log_softmax(dim=-1)
            drawn = truncation.applied(logprobs / temperature if temperature > 0 else logprobs)
            if temperature > 0:
                tokens = gumbel_argmax(drawn, seed, [int(place) - first for place in positions[part]])
            else:
                tokens = logprobs.argmax(dim=-1)
            seen = drawn.log_softmax(dim=-1) if tempered else logprobs
            found[part], sure[part], logits[part] = tokens, _confidence(seen, tokens, measure), logprobs
            if shown is not None:
                shown[part] = seen
        confidence, ids = sure.double().cpu().numpy(), found.cpu().numpy()
        if late:
            confidence = np.where(np.isin(ids, list(late)), -np.inf, confidence)
        return cls(positions, ids, confidence, logits, region, passed, shown)

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def order(self) -> np.ndarray:
        """[m] indices, the most confident first; ties in order of position."""
        return np.lexsort((self.positions, -self.confidence))

    @cached_property
    def entropy(self) -> np.ndarray:
        """[m] in nats."""
        shown = self.logprobs if self.shown is None else self.shown
        parts = [_entropy(shown[part]).double().cpu().numpy() for part in blocks(shown)]
        return np.concatenate([np.zeros(0), *parts])

    @property
    def bytes(self) -> int:
        """Bytes of the distributions."""
        return self.logprobs.nbytes + (0 if self.shown is None else self.shown.nbytes)

    def likely(self, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` most likely tokens of every row and their log-probabilities, computed once."""
        if self._likely is None or self._likely[0] != count:
            best, ids = self.logprobs.topk(min(count, self.logprobs.shape[1]))
            self._likely = count, ids.tolist(), best.tolist()
        return self._likely[1:]

    def at(self, indices: np.ndarray) -> Commit:
        """The proposals of these rows, given as indices or as a mask [m]."""
        return Commit(self.positions[indices], self.tokens[indices])

    def top(self, n: int) -> Commit:
        """The n most confident proposals."""
        return self.at(np.sort(self.order[:n]))

    def surest_and(self, chosen: np.ndarray) -> Commit:
        """The proposals of a mask [m] and the most confident one, so that every pass writes a token."""
        chosen = chosen.copy()
        chosen[self.order[0]] = True
        return self.at(chosen)

    def logprobs_of(self, commit: Commit) -> np.ndarray:
        """[n] log-probabilities of the tokens of a commit."""
        rows = torch.from_numpy(np.searchsorted(self.positions, commit.positions)).to(self.logprobs.device)
        ids = torch.from_numpy(commit.tokens).to(self.logprobs.device)
        return self.logprobs[rows, ids].double().cpu().numpy()


def blocks(rows: torch.Tensor) -> Iterator[slice]:
    """Parts of rows [m, vocab], so that what is computed of them is never there for all at once."""
    size = max(_AT_ONCE // max(rows.shape[1], 1), 1)
    for first in range(0, len(rows), size):
        yield slice(first, first + size)


def _confidence(logprobs: torch.Tensor, tokens: torch.Tensor, measure: Measure) -> torch.Tensor:
    if measure == "entropy":
        return -_entropy(logprobs)
    if measure == "margin":
        best = logprobs.topk(2, dim=-1).values.exp()
        return best[:, 0] - best[:, 1]
    return logprobs.gather(1, tokens[:, None])[:, 0].exp()


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(logprobs.exp()).sum(dim=-1)
