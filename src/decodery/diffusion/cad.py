"""CAD: threshold decoding with bounds on how much a pass writes, on passes per block, and on early ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import Region, UnmaskingPolicy, require_share
from .run import Run
from .view import Commit, View


@register(
    "cad",
    paper="CD4LM: Consistency Distillation and aDaptive Decoding for Diffusion Language Models (2026)",
    guarantee="tokens of one pass are each likely, and are chosen independently of each other",
)
@dataclass(frozen=True)
class CAD(UnmaskingPolicy):
    """Writes the most confident proposals that reach tau, `least` to `most` per pass.

    A block that has had as many passes as it has positions is written as a whole, which bounds the cost where the model
    is never confident. CAD works with any model; the distillation of the paper is not included. Defaults are those of
    the published evaluation.

    Attributes:
        tau: The threshold on confidence.
        least: Fewest tokens written per pass.
        most: Most tokens written per pass.
        eos_share: Share of the canvas that must be written before an end token may be written. Until then, proposals
            of an end token are skipped, whatever `least` is, unless every open position proposes one.
    """

    tau: float = 0.95
    least: int = 1
    most: int = 32
    eos_share: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("cad", "tau", self.tau)
        if not 1 <= self.least <= self.most:
            raise SettingsError(f"cad needs 1 <= least <= most, not least={self.least} and most={self.most}")
        if not 0 <= self.eos_share <= 1:
            raise SettingsError(f"cad: eos_share must be a share of the canvas, from 0 to 1, not {self.eos_share}")

    def begin(self, run: Run, region: Region) -> Any:
        return run.canvas

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        canvas, size = memory, view.region[1] - view.region[0]
        if view.passed + 1 >= size:
            return view.at(np.arange(len(view))), memory
        written = 1 - canvas.masked[canvas.prompt_length :].mean()
        early = np.isin(view.tokens, list(canvas.eos_ids)) & (written < self.eos_share)
        if early.all():
            # Every open position proposes an end token, and a pass must write at least one token.
            return view.top(self.least), memory
        order = view.order[~early[view.order]]
        sure = int((view.confidence[order] >= self.tau).sum())
        return view.at(np.sort(order[: min(max(sure, self.least), self.most)])), memory
