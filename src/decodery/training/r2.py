"""R2-dLLM's tuning: a model learns to be sure, at once, of what its own hurried decoding writes a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.diffusion.base import DiffusionDecoder
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.r2 import R2
from decodery.diffusion.texts import fill_all
from decodery.engine.engine import Engine
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.transformer import Transformer

from .diffusion import MODEL, logits_at, trained
from .diffusion_tuning import DiffusionModel, TuningRecipe, report_of, tune
from .kind import COUNT, NON_NEGATIVE, Run, bounded, kind
from .lists import END, MASK, VOCABULARY, examples, ids
from .loop import History

_TOGETHER = 64
_HELD_OUT = 20
"""One state in so many is held out."""
_MASK, _END = VOCABULARY.index(MASK), VOCABULARY.index(END)


@dataclass(frozen=True)
class R2Recipe(TuningRecipe):
    """How a diffusion model is tuned to r2.

    A step learns from `batch` states of those that came out right: what the pass wrote there weighs 1 in the
    cross-entropy, what it left open `others`, and `entropy` is the weight of how undecided the model is about the
    former, in nats.
    """

    steps: int = 1000
    trajectories: int = bounded(2000, COUNT, "Number of canvases that the model fills.")
    others: float = bounded(0.3, NON_NEGATIVE, "Weight of what a pass left open, beside what it wrote.")
    entropy: float = bounded(0.05, NON_NEGATIVE, "Weight of the entropy at what a pass wrote.")


@dataclass(frozen=True)
class CanvasStates:
    """Canvases as passes found them.

    Attributes:
        shown, tokens: [n, length], then and in the end.
    """

    shown: np.ndarray
    tokens: np.ndarray
    written: np.ndarray  # [n, length] bool, by the pass
    right: float  # The share of all trajectories whose answer is, which are those that are here

    def some(self, rows: np.ndarray) -> CanvasStates:
        return CanvasStates(self.shown[rows], self.tokens[rows], self.written[rows], self.right)

    def drawn(self, count: int, number: int, seed: int) -> CanvasStates:
        """Some of those that are learned from, a function of the seed and a number alone."""
        return self.some(np.random.default_rng([seed, number, 3]).integers(self._learned, size=count))

    @property
    def held(self) -> CanvasStates:
        """The last states, of trajectories that are not trained on except for at most one."""
        return self.some(np.arange(self._learned, len(self.shown)))

    @property
    def _learned(self) -> int:
        return len(self.shown) - max(1, len(self.shown) // _HELD_OUT)


def states(
    model: Transformer, settings: R2Recipe, method: DiffusionDecoder | None = None, progress: Progress = silent
) -> CanvasStates:
    """What passes of `method`, by default `r2`, proposed and wrote of examples with a right answer."""
    recipe, filling = settings.recipe, method or R2()
    drawn = examples(recipe.tasks, settings.trajectories, np.random.default_rng([settings.seed, 2]), recipe.letters)
    found, right = list[tuple[np.ndarray, np.ndarray, np.ndarray]](), 0
    for first in range(0, len(drawn), _TOGETHER):
        some = drawn[first : first + _TOGETHER]
        canvases = [Canvas.of(model, ids(each.prompt), recipe.canvas, eos_ids=[_END]) for each in some]
        fill_all(Engine(model), model, canvases, filling, 0.0)
        for example, canvas in zip(some, canvases, strict=True):
            if example.right([VOCABULARY[token] for token in canvas.output if token != _END]):
                found += _passes(canvas)
                right += 1
        progress("decoding", min(first + _TOGETHER, len(drawn)), len(drawn))
    if len(found) < 2:
        raise SettingsError(f"{right} of {len(drawn)} answers of this model are right: train it for longer first")
    shown, tokens, written = (np.stack(each) for each in zip(*found, strict=True))
    return CanvasStates(shown, tokens, written, right / len(drawn))


def _passes(canvas: Canvas) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of every pass that wrote something: the canvas before, the whole answer, and what was written."""
    # After an end nothing is filled in any more, since no text changes by it: ends are what belongs there.
    whole, shown = np.where(canvas.masked, _END, canvas.tokens), canvas.tokens.copy()
    shown[canvas.prompt_length :] = _MASK
    found = []
    for each in canvas.rounds:
        written = np.zeros(len(whole), dtype=bool)
        written[each.positions] = True
        found.append((shown.copy(), whole, written))
        shown[each.positions] = each.tokens
    return found


def redundancy_loss(model: Transformer, some: CanvasStates, others: float, entropy: float) -> torch.Tensor:
    """Weighted mean cross-entropy of masked positions, and the model's entropy at written ones."""
    places = torch.from_numpy(np.flatnonzero(some.shown == _MASK))
    written = torch.from_numpy(some.written.reshape(-1))[places]
    logits = logits_at(model, some.shown, places)
    each = cross_entropy(logits, torch.from_numpy(some.tokens.reshape(-1))[places], reduction="none")
    weights = torch.where(written, 1.0, others)
    # The mask is no word of the law: minus infinity times nothing is no number.
    words = [token for token in range(logits.shape[1]) if token != _MASK]
    law = logits[written][:, words].log_softmax(dim=-1)
    undecided = -(law.exp() * law).sum(dim=-1).mean()
    return (weights * each).sum() / weights.sum() + entropy * undecided


def tune_r2(run: Run) -> tuple[History, CanvasStates | None]:
    """Train a copy of the model of a run's folder, one of `train_diffusion`.

    The paper (R2-dLLM: Accelerating Diffusion Large Language Models via Spatio-Temporal Redundancy Reduction, 2026) has
    no code of its tuning; this is a reading of it.

    Returns:
        What training noted, and what it learned from, None for the control.
    """
    settings, model = run.of(R2Recipe), trained(run.of(DiffusionModel).folder)
    if settings.control:
        return tune(run, model, settings, "tuning"), None
    seen = states(model, settings, progress=run.progress)

    def loss(some: CanvasStates) -> torch.Tensor:
        return redundancy_loss(model, some, settings.others, settings.entropy)

    def drawn(step: int) -> torch.Tensor:
        return loss(seen.drawn(settings.batch, step, settings.seed))

    return tune(run, model, settings, "tuning", drawn, lambda: loss(seen.held)), seen


@kind(
    "The model is ready: --model {out} --no-chat-template --diffuse threshold",
    (DiffusionModel(), R2Recipe()),
    "diffusion --out tuned",
    file=MODEL,
)
def _r2(run: Run) -> dict[str, Any]:
    """Tune the diffusion model in FOLDER, which `decodery train diffusion` made, to the decoder r2.

    The model fills canvases by the rules of r2. From those that are right it learns to be confident in what each
    pass wrote, so that a plain threshold decodes in the same order.
    """
    _, seen = tune_r2(run)
    right = {} if seen is None else {"trajectories that were right and used": round(seen.right, 4)}
    return right | report_of(run, run.of(R2Recipe))
