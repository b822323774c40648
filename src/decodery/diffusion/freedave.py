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
    guarantee="token for token what static decoding writes with the same cache, where a row's result does not depend "
    "on what else is in its pass",
    lossless=True,
)
@dataclass(frozen=True)
class FreeDave(DiffusionDecoder):
    """Writes what static decoding writes, one token after another, several of them in one pass.

    Draft k is the canvas with the k most confident proposals filled in; as far as the pass over draft k proposes what
    draft k + 1 holds, that is what static decoding would have done. The last open place of a block needs no pass. A
    pass costs up to `drafts` times the rows, so it pays where rows are cheap beside weights. With a cache it must be
    one that stays the same within a block. Memory: a fork of the cache per draft.

    Attributes:
        drafts: States of a pass, at most. At a temperature above 0 a draft and the pass that verifies it must draw
            alike, so noise is per position here, and what it writes is what static:noise=position does.
    """

    drafts: int = 4
    noise: Literal["pass", "position"] = field(default="position", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafts < 1:
            raise SettingsError(f"freedave needs at least one draft, not {self.drafts}")

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        require_repeatable(run, "freedave")
        for region in run.regions():
            view = yield from run.look(region)
            while len(view) > 1 and not run.canvas.ended:
                view = yield from self._round(run, region, view)
            if not run.canvas.ended:
                run.write(view, view.top(1))

    def _round(self, run: Run, region: Region, view: View) -> ForwardCoroutine[View]:
        """One pass; returns what it says of the canvas as far as it was right."""
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
    """Raise SettingsError for noise or a cache that changes between passes, as drafts need repetition."""
    if run.temperature > 0 and run.method.noise != "position":
        raise SettingsError(
            f"{method} verifies proposals of one pass by those of the next, which must draw alike: give "
            f"{method}:noise=position, or leave the temperature at 0"
        )
    require_steady(run, method)


def require_steady(run: Run, method: str) -> None:
    """Raise SettingsError for a cache that changes between passes, as states have to share it."""
    if run.cache is not None and not run.cache.steady:
        raise SettingsError(
            f"{method} looks at several states in one pass: leave cache out, or take prefix or dual without refresh"
        )
