"""Neurofeedback: where a text's hidden states lie along one direction, in units of what is usual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingMissing
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.step.monitor import Monitor, Row
from decodery.step.sequence import Sequence

from .probe import Probe

_MADE = "make one with `decodery train direction -m MODEL STATEMENTS --out DIR`"


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """count, total: number and sum [width] float64 of the answer's rows so far."""

    count: int = 0
    total: torch.Tensor | None = None


@register(
    "neurofeedback",
    paper="Language Models Are Capable of Metacognitive Monitoring and Control of Their Internal Activations (2025)",
    guarantee="read-only: the text is the one without it, until the action is taken",
    lossless=True,
    requirements=("an axis made by decodery train direction",),
)
@dataclass(frozen=True)
class Neurofeedback(Monitor):
    """Scores a text by the mean of its hidden states along a direction.

    The unit is the standard deviation over the statements that the direction was found on. The score is 0 where the
    sentences it was found on lie on average, and known from the second token on: the newest token's own row does
    not exist yet. After as many tokens as the statements have it is compared once with them, for `unlike_training`.
    Whether the model can report or steer that score from feedback in its prompt is what `python benchmarks/bench.py
    monitors` asks. Cost: one addition per token, and a product with the direction.

    Attributes:
        axis: A file or folder made by `decodery train direction`, or a linear `Probe` of "answer" rows: a direction
            that tells the label of sentences, or a principal component.
    """

    waits = "states"

    axis: Probe | str | None = None

    def __post_init__(self) -> None:
        if self.axis is None:
            raise SettingMissing(f"neurofeedback needs an axis, as in neurofeedback:axis=DIR: {_MADE}")
        object.__setattr__(self, "axis", Probe.load(self.axis))

    @property
    def trained(self) -> Probe:
        assert isinstance(self.axis, Probe)
        return self.axis

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(self.trained.site,))

    def fits(self, model: Reader) -> None:
        self.trained.require(model, "answer", _MADE)

    @property
    def limit(self) -> float:
        return super().limit if self.threshold is not None or not self.calibrated else self.trained.threshold.value

    @property
    def calibrated(self) -> bool:
        """Whether the axis has a threshold, which `decodery train threshold` gives it."""
        return self.trained.threshold.harmless > 0

    def check(self, seq: Sequence) -> None:
        own = self.threshold is not None or not self.calibrated
        self.trained.threshold.check(seq, "neurofeedback", _MADE, own=own)

    def start(self, seq: Sequence) -> _State:
        return _State()

    def observe(self, state: _State, row: Row) -> _State:
        # The row that the first token is chosen at is the prompt's last one.
        if row.position == 0:
            return state
        own = row.hidden[self.trained.site].double().cpu()
        return _State(state.count + 1, own if state.total is None else state.total + own)

    def unlike_training(self, state: _State) -> bool:
        # Means of fewer rows are farther from the mean of all; those of more rows are nearer.
        if state.total is None or state.count != self.trained.facts.get("inputs", {}).get("tokens"):
            return False
        return float(self.trained.distance((state.total / state.count)[None])[0]) > self.trained.usual

    def score(self, state: _State) -> float | None:
        if state.total is None:
            return None
        return float(self.trained.logits((state.total / state.count)[None])[0, 0])
