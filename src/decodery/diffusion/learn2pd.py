"""Learn2PD: a small trained filter says which proposals are final."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import Region, UnmaskingPolicy, require_share
from .filter import Filter
from .run import Run
from .view import Commit, View


@register(
    "learn2pd",
    paper="Learning to Parallel: Accelerating Diffusion Large Language Models via Learnable Parallel Decoding (2025)",
    guarantee="static at rho=1; else as good as the filter, whose false alarms are written as tokens",
    requirements=("a trained filter",),
)
@dataclass(frozen=True)
class Learn2PD(UnmaskingPolicy):
    """Writes the proposals that a trained filter takes for final, and the most confident one in any case.

    Attributes:
        filter: What `decodery train learn2pd` has made, which also says how large blocks are. It reads how sure all
            places of a block are: those that are written count as 1, where the released code asks the model about them
            too, and so do places that a shorter block lacks.
        rho: How likely a proposal must be final.
        cut: Where the filter takes an end for final, the canvas is cut after the first such end ("filter"); or, where
            it takes none, after the most confident end that is proposed in the block and at least `floor` sure ("any";
            the released code, over the whole canvas and without a floor); "never" leaves it as long as it is.
        floor: Confidence of an end at which "any" cuts.
    """

    filter: str | Filter = ""
    rho: float = 0.96
    cut: Literal["filter", "any", "never"] = "filter"
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("learn2pd", "rho", self.rho)
        if self.cut not in ("filter", "any", "never"):
            raise SettingsError(f"learn2pd cuts by filter, any or never, not {self.cut!r}")
        if not 0 <= self.floor <= 1:
            raise SettingsError(f"learn2pd: floor is a probability, from 0 to 1, not {self.floor}")
        if self.measure != "probability":
            raise SettingsError("the filter of learn2pd was trained on probabilities: leave out measure")

    def begin(self, run: Run, region: Region) -> Any:
        """The canvas and the filter."""
        found = Filter.load(self.filter or None, "learn2pd:filter")
        found.fits(run.model)
        if region[1] - region[0] > found.places:
            raise SettingsError(f"this filter reads blocks of {found.places} places: add block={found.places}")
        return run.canvas, found

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        canvas, filter = memory
        with torch.no_grad():
            final = torch.sigmoid(filter.logits(torch.from_numpy(block(view, filter.places))[None]))[0].numpy()
        final = final[view.positions - view.region[0]] > self.rho
        ends = np.flatnonzero(np.isin(view.tokens, list(canvas.eos_ids)))
        last = self._last(view, final, ends)
        if last is not None:
            canvas.resize(int(view.positions[last]) + 1)
        kept = view.positions < len(canvas)
        final[view.order[0]] = True
        if not (final & kept).any():
            # The surest proposal was after the cut.
            final[next(row for row in view.order if kept[row])] = True
        return view.at(final & kept), memory

    def _last(self, view: View, final: np.ndarray, ends: np.ndarray) -> int | None:
        """The row of the end after which the canvas is cut, None where it is not."""
        if self.cut == "never" or not len(ends):
            return None
        if final[ends].any():
            return int(ends[final[ends]][0])
        best = int(ends[view.confidence[ends].argmax()])
        return best if self.cut == "any" and view.confidence[best] >= self.floor else None


def block(view: View, places: int) -> np.ndarray:
    """[places] float32 confidences of a block; 1 at written positions and beyond a shorter block's end."""
    found = np.ones(places, dtype=np.float32)
    found[view.positions - view.region[0]] = np.maximum(view.confidence, 0.0)
    return found
