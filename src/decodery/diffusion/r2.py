"""R2-dLLM: three rules that write tokens earlier than threshold decoding, which predicts them repeatedly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import Region, UnmaskingPolicy, require_share
from .run import Run
from .view import Commit, View


class Streaks(NamedTuple):
    """By position: the proposal of the last pass, -1 for none, and how many passes it has stayed."""

    tokens: np.ndarray
    lengths: np.ndarray


@register(
    "r2",
    paper="R2-dLLM: Accelerating Diffusion Large Language Models via Spatio-Temporal Redundancy Reduction (2026)",
    guarantee="as threshold, and in addition tokens that are confident as a group or unchanged for some passes",
)
@dataclass(frozen=True)
class R2(UnmaskingPolicy):
    """Writes by threshold, then by groups of places, runs of one token, and proposals that stay.

    - Groups: where at most `filled` of `width` neighbours are written, and the open ones have an average confidence of
      at least `group`, all of them are written.
    - Runs: of neighbours with the same proposal, the most confident one is written if it is above `group`.
    - Streaks: a proposal that is the same in `passes` consecutive passes is written if it reaches `stay`.

    Each rule counts the tokens of the rules before it as written. `decodery train r2` tunes a model for these rules.

    Attributes:
        tau: The threshold.
        group: Confidence from which groups and runs are written.
        width: Positions of a group.
        filled: Maximum number of written positions of a group.
        passes: Passes for which a proposal must stay the same.
        stay: Confidence that such a proposal needs.
    """

    tau: float = 0.9
    group: float = 0.8
    width: int = 3
    filled: int = 1
    passes: int = 3
    stay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "group", "stay"):
            require_share("r2", name, getattr(self, name))
        if self.width < 2 or not 0 <= self.filled < self.width or self.passes < 1:
            raise SettingsError("r2 needs groups of at least 2, fewer than that filled, and at least one pass")

    def begin(self, run: Run, region: Region) -> Streaks:
        size = region[1] - region[0]
        return Streaks(np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64))

    def select(self, view: View, memory: Streaks) -> tuple[Commit, Streaks]:
        start, end = view.region
        places = view.positions - start
        sure, tokens = np.zeros(end - start), np.full(end - start, -1, dtype=np.int64)
        sure[places], tokens[places] = view.confidence, view.tokens
        is_open = tokens >= 0
        chosen = is_open & (sure >= self.tau)
        chosen[places[view.order[0]]] = True
        chosen |= clusters(is_open & ~chosen, sure, self.width, self.filled, self.group)
        chosen |= runs(is_open & ~chosen, sure, tokens, self.group)
        left = is_open & ~chosen
        lengths = np.where(left, np.where(tokens == memory.tokens, memory.lengths + 1, 1), 0)
        stays = left & (lengths >= self.passes) & (sure >= self.stay)
        rest = left & ~stays
        kept = Streaks(np.where(rest, tokens, -1), np.where(rest, lengths, 0))
        return view.at((chosen | stays)[places]), kept


def clusters(is_open: np.ndarray, sure: np.ndarray, width: int, filled: int, least: float) -> np.ndarray:
    """[n] bool: open positions of windows of `width` with at most `filled` written, confident on average."""
    n, found = len(is_open), np.zeros(len(is_open), dtype=bool)
    if n < width:
        return found
    counts = np.lib.stride_tricks.sliding_window_view(is_open, width).sum(axis=1)
    sums = np.lib.stride_tricks.sliding_window_view(np.where(is_open, sure, 0.0), width).sum(axis=1)
    hits = (counts >= max(width - filled, 1)) & (sums >= least * counts)
    for offset in range(width):
        found[offset : n - width + 1 + offset] |= hits
    return found & is_open


def runs(is_open: np.ndarray, sure: np.ndarray, tokens: np.ndarray, least: float) -> np.ndarray:
    """[n] bool: the most confident position of every run of two or more open ones with one proposal."""
    begins = np.ones(len(tokens), dtype=bool)
    begins[1:] = ~(is_open[1:] & is_open[:-1] & (tokens[1:] == tokens[:-1]))
    number = begins.cumsum() - 1
    # The most confident of each run comes first; ties in order of position.
    order = np.lexsort((-sure, number))
    heads = order[np.flatnonzero(np.diff(number[order], prepend=-1))]
    found = np.zeros(len(tokens), dtype=bool)
    found[heads] = is_open[heads] & (np.bincount(number) >= 2) & (sure[heads] > least)
    return found
