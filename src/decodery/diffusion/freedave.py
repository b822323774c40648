"""FreeDave: static decoding drafts its own next steps, and one pass over all drafts verifies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, Region
from .run import Run
from .view import View


@register(
    "freedave",
    paper="Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models (2025)",
    guarantee="the same tokens as static decoding with the same cache, if the result of a row does not depend on the "
    "other rows of its pass",
    lossless=True,
)
@dataclass(frozen=True)
class FreeDave(DiffusionDecoder):
    """Writes the tokens of static decoding, several per pass.

    Draft k is the canvas with the k most confident proposals filled in. Static decoding would write draft k + 1 if the
    pass over draft k proposes its next token; drafts are accepted up to the first one where this fails. The last open
    position of a block needs no pass. A pass has up to `drafts` times the rows, so it is faster where reading weights
    costs more than computing rows. Its cache must stay the same within a block. At a temperature above 0, the drafts
    and the pass that verifies them need the same noise: give noise=position, as for static:noise=position. Memory: a
    fork of the cache per draft.

    Attributes:
        drafts: Maximum number of states in a pass.
    """

    drafts: int = 4
    noise: Literal["pass", "position"] = field(default="position", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafts < 1:
            raise SettingsError(f"freedave needs at least one draft, not {self.drafts}")

    @property
    def states(self) -> int:
        # There are no more drafts than open positions.
        return min(self.drafts, self.block or self.drafts)

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        require_repeatable(run, "freedave")
        for region in run.regions():
            view = yield from run.look(region)
            while len(view) > 1 and not run.canvas.ended:
                view = yield from self._round(run, region, view)
            if not run.canvas.ended:
                run.write(view, view.top(1))

    def _round(self, run: Run, region: Region, view: View) -> ForwardCoroutine[View]:
        """Run one pass over the drafts, write the accepted ones, and return the view of the last accepted one."""
        count = min(self.drafts, len(view) - 1)
        surest = view.order[:count]
        drafts, tokens = [], run.canvas.tokens.copy()
        for place, token in zip(view.positions[surest], view.tokens[surest], strict=True):
            tokens[place] = token
            drafts.append(tokens.copy())
        # The first draft is what static decoding does in any case.
        run.write(view, view.top(1))
        if run.canvas.ended:
            return view
        views = yield from run.look_at(drafts, region)
        for number, found in enumerate(views, 1):
            view, step = found, found.top(1)
            if number == count or run.canvas.ended or not _is(drafts[number], step.positions, step.tokens):
                break
            run.write(view, step)
        return view


def _is(draft: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> bool:
    return bool((draft[positions] == tokens).all())


def require_repeatable(run: Run, method: str) -> None:
    """Raise SettingsError for noise or a cache that changes between passes: drafts must be repeatable."""
    if run.temperature > 0 and run.method.noise != "position":
        raise SettingsError(
            f"{method} compares the proposals of two passes, which need the same noise: give "
            f"{method}:noise=position, or leave the temperature at 0"
        )
    require_steady(run, method)


def require_steady(run: Run, method: str) -> None:
    """Raise SettingsError for a cache that changes between passes: the states of a pass share it."""
    if run.cache is not None and not run.cache.steady:
        raise SettingsError(
            f"{method} runs several states in one pass, which must share one cache: leave cache out, or use prefix or "
            "dual without refresh"
        )
