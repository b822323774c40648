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
    guarantee="as threshold, though not step by step: each token reached tau, or was the surest, in some state",
)
@dataclass(frozen=True)
class FreeDavePlus(DiffusionDecoder):
    """Writes what reaches tau, and verifies several states after that in one pass.

    The first is the canvas with all written that reaches tau, and the most confident token in any case; each further
    one has the next most confident proposal too. The largest draft is taken of which everything would be written from
    the one taken before it. drafts=1 is threshold. A pass costs up to `drafts` times the rows. With a cache it must be
    one that stays the same within a block; noise is per position, as with `freedave`. Memory: a fork of the cache per
    draft.

    Attributes:
        tau: The threshold on confidence.
        drafts: States of a pass, at most.
    """

    tau: float = 0.95
    drafts: int = 4
    noise: Literal["pass", "position"] = field(default="position", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("freedave-plus", "tau", self.tau)
        if self.drafts < 1:
            raise SettingsError(f"freedave-plus needs at least one draft, not {self.drafts}")

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        require_repeatable(run, "freedave-plus")
        for region in run.regions():
            view: View | None = None
            while len(run.canvas.open(*region)) and not run.canvas.ended:
                if view is None:
                    view = yield from run.look(region)
                view = yield from self._round(run, region, view)

    def _round(self, run: Run, region: Region, view: View) -> ForwardCoroutine[View | None]:
        """One pass; returns what it says of the canvas as far as it was right, None where nothing is left to say."""
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
            # The next proposals in turn, as far as the target has them.
            further = best + int(np.argmin(np.append(agrees[best:], False)))
            if further == best:
                break
            rows = np.sort(added[best:further])
            run.write(views[best], Commit(view.positions[rows], view.tokens[rows]))
            best = further
        return views[best]

    def _step(self, view: View) -> Commit:
        return view.surest_and(view.confidence >= self.tau)
