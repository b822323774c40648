"""CCD as in its released code: a proposal is written if the last pass proposed it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import Region, UnmaskingPolicy
from .run import Run
from .view import Commit, View


class Proposed(NamedTuple):
    """The policy's memory of the last pass.

    Attributes:
        masks: Number of open positions at the beginning of the region.
        width: How many positions were stored at most.
        tokens: Most likely token by position, for the most confident positions that the pass did not write.
    """

    masks: int
    width: int = 0
    tokens: Mapping[int, int] = {}


@register(
    "ccd-agreement",
    paper="Beyond Confidence: Adaptive and Coherent Decoding for Diffusion Language Models (2025)",
    guarantee="tokens that two passes agree on are written first; adaptive writes several per pass independently of "
    "each other",
)
@dataclass(frozen=True)
class CCDAgreement(UnmaskingPolicy):
    """Writes the most confident position whose proposal equals that of the last pass, or all such ones.

    The paper's own form, which averages distributions, is `ccd`.

    Attributes:
        warm_up: Passes at the start of every region that write the most confident token. Later passes do so too where
            no proposal agrees, or where the most confident position was not stored.
        places: Most positions that a pass stores, the most confident ones: 1 in each pass of the warm-up except the
            last, one more in every later pass, and 2 again when 10 % of the region is left.
        adaptive: True (CCD-DS) writes all proposals that agree.
    """

    warm_up: int = 5
    places: int = 5
    adaptive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warm_up < 0 or self.places < 1:
            raise SettingsError(
                f"ccd-agreement: warm_up must be 0 or more and places at least 1, not {self.warm_up} and {self.places}"
            )

    def begin(self, run: Run, region: Region) -> Proposed:
        return Proposed(len(run.canvas.open(*region)))

    def select(self, view: View, memory: Proposed) -> tuple[Commit, Proposed]:
        before = 1 if 10 * len(view) <= memory.masks else memory.width
        width = 1 if view.passed < max(self.warm_up - 1, 1) else min(before + 1, self.places)
        order, best = view.order, view.logprobs.argmax(dim=-1).tolist()
        agree = [row for row in order[:width] if memory.tokens.get(int(view.positions[row])) == best[row]]
        surest = order[:1].tolist()
        if view.passed < self.warm_up or int(view.positions[surest[0]]) not in memory.tokens or not agree:
            rows = surest
        else:
            rows = agree if self.adaptive else agree[:1]
        left = [row for row in order if row not in rows][:width]
        kept = {int(view.positions[row]): best[row] for row in left}
        return view.at(np.sort(rows)), Proposed(memory.masks, width, kept)
