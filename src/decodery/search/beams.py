"""Beams: the best few texts so far, each step extended by all tokens and cut to the best few again."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.topk import topk
from decodery.sampling.logits_processor import require_number
from decodery.step.sequence import Sequence

from .base import choose

EarlyStopping = bool | Literal["never"]


@dataclass(slots=True)
class Hypothesis:
    """A branch.

    Attributes:
        total: The sum it is selected by.
        logprob: The sum of its tokens' own log-probabilities.
    """

    seq: Sequence
    total: float = 0.0
    logprob: float = 0.0

    def normalised(self, value: float, length_penalty: float) -> float:
        return value / len(self.seq.generated) ** length_penalty


@dataclass(frozen=True)
class Ending:
    """When a group of beams is done and how texts of different lengths compare.

    Attributes:
        length_penalty: Sums are divided by length ** length_penalty, the end token counted; above 0 favours long texts.
        early_stopping: True stops as soon as `width` texts are finished; False stops once the best running beam, were
            it to end now, would not be among them; "never" stops only once no running beam can get among them.
    """

    width: int
    length_penalty: float
    early_stopping: EarlyStopping

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 1:
            raise SettingsError(f"a beam search needs width >= 1, not {self.width!r}")
        require_number("length_penalty", self.length_penalty)
        if self.early_stopping not in (True, False, "never"):
            raise SettingsError(f"early_stopping must be true, false or never, not {self.early_stopping!r}")


class BeamGroup:
    """Beams that compete with each other.

    Args:
        running: Those to be extended.
        finished: The best ended ones, best first.
    """

    def __init__(self, root: Sequence, ending: Ending) -> None:
        self.ending = ending
        self.running = [Hypothesis(root)]
        self.finished: list[Hypothesis] = []

    def step(self, logprobs: torch.Tensor, logits: torch.Tensor, penalties: dict[int, float]) -> list[int]:
        """Extend every running beam by one token and keep the best.

        Among equals the earlier beam and the lower token id win.

        Args:
            logprobs, logits: [running, vocab], as selected by and as the model gave them.
            penalties: What tokens lose in the selection.

        Returns:
            The tokens chosen, end tokens left out.
        """
        width = self.ending.width
        ends = len(self.running[0].seq.request.eos_ids)
        # As many candidates as leave `width` that go on, should every beam be able to end in each way.
        kept = max(2, 1 + ends) * width
        full = len(self.finished) == width
        last = self.running[0].seq.remaining == 1
        parents, self.running = self.running, []
        ended: list[Hypothesis] = []
        for rank, (total, number, token) in enumerate(_best(parents, logprobs, penalties, kept)):
            # After the last token nothing goes on, so that nothing is worth keeping beside the best.
            if rank >= width and (last or len(self.running) == width):
                break
            parent = parents[number]
            if rank >= width and token in parent.seq.request.eos_ids:
                continue
            child = Hypothesis(parent.seq.fork(), total, parent.logprob + float(logprobs[number, token]))
            choose(child.seq, token, logits[number])
            if not child.seq.finished and len(self.running) < width:
                self.running.append(child)
            elif child.seq.finished and rank < width:
                ended.append(child)
        if not (full and self.ending.early_stopping is True):
            # A stable sort: of equal texts the one that ended first stays.
            self.finished = sorted(self.finished + ended, key=self._rank)[:width]
        chosen = [
            beam.seq.last_token for beam in self.running + ended if beam.seq.last_token not in beam.seq.request.eos_ids
        ]
        if not self._can_improve():
            self.running = []
        return chosen

    def _rank(self, beam: Hypothesis) -> float:
        return -beam.normalised(beam.total, self.ending.length_penalty)

    def _can_improve(self) -> bool:
        """Whether the running beams may still change what is finished."""
        if not self.running or len(self.finished) < self.ending.width:
            return True
        if self.ending.early_stopping is True:
            return False
        best, penalty = self.running[0], self.ending.length_penalty
        length = len(best.seq.generated)
        if self.ending.early_stopping == "never" and penalty > 0:
            # Sums are negative: the longest text divides them by the most.
            length = best.seq.request.max_new_tokens
        return best.total / length**penalty > -self._rank(self.finished[-1])


def _best(
    parents: Ordered[Hypothesis], logprobs: torch.Tensor, penalties: dict[int, float], count: int
) -> list[tuple[float, int, int]]:
    """The `count` best extensions of all beams: total, number of the beam, token."""
    if penalties:
        logprobs = logprobs.clone()
        logprobs[:, list(penalties)] -= torch.tensor(list(penalties.values()), dtype=logprobs.dtype, device="cpu")
    ids, values = topk(logprobs, count)
    totals = values.astype(np.float64) + np.array([[beam.total] for beam in parents])
    owners = np.broadcast_to(np.arange(len(parents))[:, None], ids.shape)
    order = np.lexsort((ids.ravel(), owners.ravel(), -totals.ravel()))[:count]
    found = zip(
        totals.ravel()[order].tolist(), owners.ravel()[order].tolist(), ids.ravel()[order].tolist(), strict=True
    )
    return [candidate for candidate in found if candidate[0] > -np.inf]
