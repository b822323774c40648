"""FreeDave++: threshold decoding drafts its own next steps, and one pass over all drafts verifies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, Region, require_share
from .freedave import require_repeatable
from .run import Run
from .view import Commit, View


@register(
    "freedave-plus",
    paper="Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models (2025)",
    guarantee="as threshold, though not step by step: each token reached tau, or was the most confident, in some state",
)
@dataclass(frozen=True)
class FreeDavePlus(DiffusionDecoder):
    """Writes proposals that reach tau, and verifies several further states in one pass.

    The first draft is the canvas after a step of threshold decoding. Each further draft has the next most confident
    proposal too. The largest draft is accepted whose tokens threshold decoding would all write after the draft that was
    accepted before it. drafts=1 is threshold. A pass has up to `drafts` times the rows. As with `freedave`, the cache
    must stay the same within a block, and noise must be per position. Memory: a fork of the cache per draft.

    Attributes:
        tau: The threshold on confidence.
        drafts: Maximum number of states in a pass.
    """

    tau: float = 0.95
    drafts: int = 4
    noise: Literal["pass", "position"] = field(default="position", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("freedave-plus", "tau", self.tau)
        if self.drafts < 1:
            raise SettingsError(f"freedave-plus needs at least one draft, not {self.drafts}")

    @property
    def states(self) -> int:
        # There are no more drafts than open positions.
        return min(self.drafts, self.block or self.drafts)

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        require_repeatable(run, "freedave-plus")
        for region in run.regions():
            view: View | None = None
            while len(run.canvas.open(*region)) and not run.canvas.ended:
                if view is None:
                    view = yield from run.look(region)
                view = yield from self._round(run, region, view)

    def _round(self, run: Run, region: Region, view: View) -> ForwardCoroutine[View | None]:
        """Run one pass over the drafts and write the accepted one; return its view, None where no position is open."""
        run.write(view, self._step(view))
        left = view.order[run.canvas.masked[view.positions[view.order]]]
        if not len(left) or run.canvas.ended:
            return None
        added = left[: min(self.drafts, len(left)) - 1]
        drafts, tokens = [run.canvas.tokens.copy()], run.canvas.tokens.copy()
        for row in added:
            tokens[view.positions[row]] = view.tokens[row]
            drafts.append(tokens.copy())
        views = yield from run.look_at(drafts, region)
        best = 0
        while best < len(added):
            target = drafts[best].copy()
            step = self._step(views[best])
            target[step.positions] = step.tokens
            agrees = target[view.positions[added]] == view.tokens[added]
            # Up to the first draft that threshold decoding would not have written as a whole.
            further = best + int(np.argmin(np.append(agrees[best:], False)))
            if further == best:
                break
            rows = np.sort(added[best:further])
            run.write(views[best], Commit(view.positions[rows], view.tokens[rows]))
            best = further
        return views[best]

    def _step(self, view: View) -> Commit:
        return view.surest_and(view.confidence >= self.tau)
