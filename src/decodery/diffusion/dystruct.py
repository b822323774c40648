"""Dystruct: the canvas grows by windows, is split into blocks of like entropy, and is corrected at their edges.

Only a summary of the paper was available. It names these parts without formulas; the formulas are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, Region, require_share
from .run import Run
from .view import Commit, View


@register(
    "dystruct",
    paper="Dystruct: Dynamically Structured Diffusion Language Model Decoding via Bayesian Inference (2026)",
    guarantee="as threshold, on a canvas whose length and blocks are estimated; alpha=0 and mean=most with weld=0 is "
    "threshold",
)
@dataclass(frozen=True)
class Dystruct(DiffusionDecoder):
    """Estimates the length of a window and its blocks, and fills stable blocks next to written text first.

    The instability of a position is the entropy of its distribution, divided by that of a uniform one.

    - Length: the most likely one from `least` to `most` positions, under a Poisson prior with mean `mean` and the
      likelihood exp(-penalty * total instability). It ends at the first end token whose probability reaches `end`.
    - Blocks: from left to right, a position joins the current block under a condition. The block's size times a normal
      density around its mean instability (width `spread`) must be at least alpha times a normal density around
      `centre` (width `wide`).
    - Order: the block with the least instability - gamma * share of written positions within `reach` of its edges.
      Within it, proposals that reach tau are written, as in threshold. A block below `calm` is written at once.
    - Edges: up to `weld` positions on either side of a border are opened again where their tokens are less likely than
      `doubt`. Their tokens are replaced only by more likely ones.

    Attributes:
        tau: Confidence from which positions of a block are written.
        mean: Mean of the Poisson prior of the length.
        least: Minimum length of a window, in positions.
        most: Maximum length of a window, in positions.
        penalty: Weight of instability against length.
        end: Probability of an end token from which a window ends there.
        alpha: How readily a new block begins.
        spread: Standard deviation of instability within a block.
        wide: Standard deviation of instability over all blocks.
        centre: Mean of instability over all blocks.
        gamma: Weight of written neighbours in the order of blocks.
        reach: Positions beside a block that count as neighbours.
        calm: Instability below which a block is written at once.
        weld: Positions on either side of a border that are opened again.
        doubt: Probability below which they are opened again.
        passes: Maximum number of passes, None for one per token; the last one writes all open positions.
    """

    tau: float = 0.9
    mean: int = 32
    least: int = 8
    most: int = 64
    penalty: float = 1.0
    end: float = 0.5
    alpha: float = 1.0
    spread: float = 0.1
    wide: float = 0.3
    centre: float = 0.5
    gamma: float = 1.0
    reach: int = 4
    calm: float = 0.0
    weld: int = 2
    doubt: float = 0.5
    passes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "end", "doubt"):
            require_share("dystruct", name, getattr(self, name))
        if not 1 <= self.least <= self.mean <= self.most:
            raise SettingsError("dystruct needs 1 <= least <= mean <= most places a window")
        if min(self.alpha, self.weld, self.reach, self.penalty) < 0 or not min(self.spread, self.wide) > 0:
            raise SettingsError("dystruct: alpha, weld, reach and penalty are 0 or more, spread and wide above 0")
        if self.cache is not None or self.block is not None:
            raise SettingsError("dystruct chooses the canvas and its blocks itself: leave out cache and block")

    @property
    def revises(self) -> bool:
        return self.weld > 0

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        if run.model.config.block_length is not None:
            raise SettingsError(
                "dystruct needs a model whose rows attend to all later positions, and this one attends in blocks: use "
                "another method"
            )
        canvas, whole = run.canvas, len(run.canvas)
        budget = self.passes or whole - canvas.prompt_length
        start, before = canvas.prompt_length, None
        while start < whole and canvas.passes < budget and not canvas.ended:
            canvas.resize(min(start + self.most, whole))
            view = yield from run.look((start, len(canvas)))
            unsure = view.entropy / np.log(view.logprobs.shape[1])
            length = self._length(view, unsure, list(canvas.eos_ids))
            blocks = [(start + a, start + b) for a, b in self.partition(unsure[:length])]
            known = view if start + length == len(canvas) or canvas.passes >= budget else None
            canvas.resize(start + length)
            yield from self._window(run, (start, len(canvas)), blocks, known, budget)
            edges = [each for each in (before, *(b for _, b in blocks[:-1])) if each is not None]
            for edge in edges if self.weld else ():
                if canvas.passes + 2 <= budget and not canvas.ended:
                    yield from self._weld(run, edge)
            start = before = len(canvas)

    def _length(self, view: View, unsure: np.ndarray, ends: list[int]) -> int:
        """Number of positions of the window to keep."""
        sizes = np.arange(1, len(view) + 1)
        prior = sizes * np.log(self.mean) - np.cumsum(np.log(sizes))
        score = prior - self.penalty * np.cumsum(unsure)
        least = min(self.least, len(view))
        # With the mean at the upper bound the window always has its full length.
        length = len(view) if self.mean == self.most else least + int(score[least - 1 :].argmax())
        if ends:
            likely = view.logprobs[:, ends].exp().sum(dim=1).double().cpu().numpy() >= self.end
            found = np.flatnonzero(likely & np.isin(view.logprobs.argmax(dim=1).cpu().numpy(), ends))
            length = min(length, int(found[0]) + 1) if len(found) else length
        return length

    def partition(self, unsure: np.ndarray) -> list[Region]:
        """Blocks of positions with similar instability [n], as first and last position (exclusive)."""
        found, start, mean = [], 0, float(unsure[0])
        for place in range(1, len(unsure)):
            size, value = place - start, float(unsure[place])
            stay = np.log(size) + _normal(value, mean, self.spread)
            begin = np.log(self.alpha) + _normal(value, self.centre, self.wide) if self.alpha else -np.inf
            if stay >= begin:
                mean += (value - mean) / (size + 1)
            else:
                found.append((start, place))
                start, mean = place, value
        return [*found, (start, len(unsure))]

    def _window(
        self, run: Run, window: Region, blocks: list[Region], known: View | None, budget: int
    ) -> ForwardCoroutine[None]:
        """Fill all blocks of a window.

        Args:
            known: The view of a pass over the window, which saves one; wider than the window if no pass is left.
        """
        canvas = run.canvas
        while len(canvas.open(*window)) and not canvas.ended:
            view, known = (known or (yield from run.look(window))), None
            if canvas.passes >= budget:
                run.write(view, view.at(view.positions < window[1]))
                return
            unsure = view.entropy / np.log(view.logprobs.shape[1])
            inside = [(view.positions >= start) & (view.positions < end) for start, end in blocks]
            left = [number for number, rows in enumerate(inside) if rows.any()]
            energies = [self.energy(canvas.masked, blocks[n], float(unsure[inside[n]].mean())) for n in left]
            rows = inside[left[int(np.argmin(energies))]]
            sure = rows & (view.confidence >= self.tau)
            if unsure[rows].mean() < self.calm:
                sure = rows
            sure[np.flatnonzero(rows)[view.confidence[rows].argmax()]] = True
            run.write(view, view.at(sure))

    def energy(self, masked: np.ndarray, block: Region, unsure: float) -> float:
        """Low for a block that is stable and has written neighbours.

        Args:
            masked: [L] of the canvas.
        """
        near = np.concatenate((masked[max(block[0] - self.reach, 0) : block[0]], masked[block[1] :][: self.reach]))
        return unsure - self.gamma * (1 - near.mean() if len(near) else 0.0)

    def _weld(self, run: Run, edge: int) -> ForwardCoroutine[None]:
        """Correct a border in two passes: the first with masks around it, the second with half of the replacements."""
        canvas = run.canvas
        strip = np.arange(max(edge - self.weld, canvas.prompt_length), min(edge + self.weld, len(canvas)))
        old, region = canvas.tokens[strip].copy(), (int(strip[0]), int(strip[-1]) + 1)
        state = canvas.tokens.copy()
        state[strip] = canvas.mask_id
        (view,) = yield from run.look_at([state], region)
        weak = view.logprobs_of(Commit(strip, old)) < np.log(self.doubt)
        if not (weak & (view.tokens != old)).any():
            return
        # The more confident half is decided first, so that the rest is predicted from it, in both versions.
        order = [row for row in view.order if weak[row]]
        first, rest = np.sort(order[: -(-len(order) // 2)]), np.sort(order[-(-len(order) // 2) :])
        states = [canvas.tokens.copy() for _ in range(2)]
        states[0][strip[first]] = view.tokens[first]
        scores = [view.logprobs_of(Commit(strip[first], each[first])).sum() for each in (view.tokens, old)]
        new = old.copy()
        new[first] = view.tokens[first]
        if len(rest):
            for each in states:
                each[strip[rest]] = canvas.mask_id
            views = yield from run.look_at(states, region)
            new[rest] = views[0].tokens
            for number, (seen, tokens) in enumerate(zip(views, (new, old), strict=True)):
                scores[number] += seen.logprobs_of(Commit(strip[rest], tokens[rest])).sum()
        if scores[0] > scores[1] and (new != old).any():
            changed = np.flatnonzero(new != old)
            canvas.reopen(strip[changed])
            run.write(view, Commit(strip[changed], new[changed]))


def _normal(value: float, mean: float, width: float) -> float:
    """Log-density of a normal distribution, without its constant."""
    return -0.5 * ((value - mean) / width) ** 2 - float(np.log(width))
