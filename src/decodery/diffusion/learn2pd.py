"""Learn2PD: a small trained filter predicts which proposals are final."""

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
    guarantee="static at rho=1; else as good as the filter, whose false positives are written as tokens",
    requirements=("a trained filter",),
)
@dataclass(frozen=True)
class Learn2PD(UnmaskingPolicy):
    """Writes the proposals that a trained filter predicts to be final, and always the most confident one.

    The filter reads the confidences of all positions of a block. Written positions count as 1, as do positions that a
    shorter block lacks; the released code computes their confidences with the model.

    Attributes:
        filter: The folder that `decodery train learn2pd` has written; it also sets the block size.
        rho: Probability of being final from which a proposal is written.
        cut: When the canvas is cut. "filter": after the first end token that is predicted final. "any": if there is
            none, also after the most confident proposed end token of the block whose confidence is at least `floor`
            (the released code uses the whole canvas and no floor). "never": not at all.
        floor: Confidence of an end token from which "any" cuts.
    """

    filter: str | Filter = ""
    rho: float = 0.96
    cut: Literal["filter", "any", "never"] = "filter"
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("learn2pd", "rho", self.rho)
        if self.cut not in ("filter", "any", "never"):
            raise SettingsError(f"learn2pd: cut must be filter, any or never, not {self.cut!r}")
        if not 0 <= self.floor <= 1:
            raise SettingsError(f"learn2pd: floor must be a probability from 0 to 1, not {self.floor}")
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
            # The most confident proposal was after the cut.
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
    """[places] float32 confidences of a block; 1 at written positions and after a shorter block."""
    found = np.ones(places, dtype=np.float32)
    found[view.positions - view.region[0]] = np.maximum(view.confidence, 0.0)
    return found
