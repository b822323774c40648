"""Editing: what is sure enough is written, and what is written is replaced where something else is surer."""

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

    A block is done when nothing is open and a pass changes nothing, or after `more` passes over its written tokens.
    Models must have learned to correct tokens, as LLaDA 2.1 has.

    Attributes:
        tau: Confidence above which an open position is written.
        replace: Confidence above which a written token becomes another one.
        least: How many open positions every pass writes at least.
        more: Passes over a block in which nothing is open.
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
            raise SettingsError("edit writes at least 1 token a pass, and more is 0 or more passes")

    @property
    def revises(self) -> bool:
        return True

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        if self.cache is not None and run.model.config.block_length is None:
            raise SettingsError("edit replaces what caches of this model keep: leave cache out")
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
