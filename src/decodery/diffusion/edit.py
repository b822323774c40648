"""Token editing: confident proposals are written, and written tokens are replaced by more confident proposals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, Region, require_share
from .run import Run
from .view import Commit


@register(
    "edit",
    paper="LLaDA2.1: Speeding Up Text Diffusion via Token Editing (2026)",
    guarantee="tokens of one pass are each likely, and may be corrected in later passes of their block",
)
@dataclass(frozen=True)
class Edit(DiffusionDecoder):
    """Writes proposals above tau, and replaces written tokens of the block by proposals above `replace`.

    A block is done when it has no open position and a pass changes no token, or after `more` passes over its written
    tokens. The model must be trained to correct tokens, as LLaDA 2.1 is.

    Attributes:
        tau: Confidence above which an open position is written.
        replace: Confidence above which a written token becomes another one.
        least: Minimum number of open positions that a pass writes.
        more: Maximum number of passes over a block without open positions.
    """

    tau: float = 0.95
    replace: float = 0.9
    least: int = 1
    more: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("edit", "tau", self.tau)
        require_share("edit", "replace", self.replace)
        if self.least < 1 or self.more < 0:
            raise SettingsError(
                f"edit: least must be at least 1 token and more at least 0 passes, not least={self.least} and "
                f"more={self.more}"
            )

    @property
    def revises(self) -> bool:
        return True

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        if self.cache is not None and run.model.config.block_length is None:
            raise SettingsError("edit replaces tokens whose keys and values this model's cache reuses: leave cache out")
        for region in run.regions():
            yield from self._block(run, region)

    def _block(self, run: Run, region: Region) -> ForwardCoroutine[None]:
        canvas, idle = run.canvas, 0
        while True:
            is_open = len(canvas.open(*region)) > 0
            idle += not is_open
            if idle > self.more:
                return
            view = yield from run.look(region, written=True)
            masked = canvas.masked[view.positions]
            changed = ~masked & (view.confidence > self.replace) & (view.tokens != canvas.tokens[view.positions])
            chosen = masked & (view.confidence > self.tau)
            if is_open and chosen.sum() < self.least:
                order = [row for row in view.order if masked[row]]
                chosen[:] = False
                chosen[order[: self.least]] = True
            found = np.flatnonzero(chosen | changed)
            if not len(found):
                return
            positions = view.positions[found]
            canvas.reopen(positions[changed[found]])
            run.write(view, Commit(positions, view.tokens[found]))
            del view
