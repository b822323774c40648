"""FactCheckmate: foresee from the prompt's hidden states that the answer will be wrong, and shift the states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.models.hooks import Intervention
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, TrainedPart, expect
from decodery.step.monitor import Prompt, Row
from decodery.step.sequence import Sequence

from .probe import Pool, chained
from .probed import Probed

__all__ = ["Shift"]

SITE = "resid_post.-1"
"""After the last layer, where no keys and values are written any more."""


@dataclass(frozen=True, eq=False)
class Shift(TrainedPart):
    """What is added to a hidden state: an MLP of it.

    Attributes:
        tensors: "weight.i" [out, in] and "bias.i" [out] of its layers.
        model: `fingerprint` of the model it was trained for.
    """

    KIND = "shift"
    FILE = "shift.safetensors"
    MADE = "make one with `decodery train probe -m MODEL QUESTIONS --rows prompt --intervene --out DIR`"

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        number = len(self.tensors) // 2
        return [(self.tensors[f"weight.{at}"].double(), self.tensors[f"bias.{at}"].double()) for at in range(number)]

    @one_thread()
    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] float64, for rows [n, hidden].

        In double precision, so that rounding to that of the rows leaves nothing of what else is in the pass.
        """
        found = rows.double()
        for number, (weight, bias) in enumerate(self.layers):
            found = found @ weight.to(found.device).T + bias.to(found.device)
            found = found.relu() if number + 1 < len(self.layers) else found
        return found

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, self.tensors, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Shift:
        ins, outs = chained(found.tensors)
        layers = range(len(found.tensors) // 2)
        expect(ins == outs and set(found.tensors) == {f"{kind}.{at}" for kind in ("weight", "bias") for at in layers})
        return cls(found.tensors, found.facts, found.model)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """pool: of the prompt so far; value, apart: of the whole prompt; written: tokens of the answer."""

    pool: Pool
    value: float | None = None
    written: int = 0
    apart: float = 0.0


@register(
    "factcheckmate",
    paper="FactCheckmate: Preemptively Detecting and Mitigating Hallucinations in LMs (2024)",
    guarantee="read-only unless action=switch, which changes texts above the threshold and no others",
    requirements=("a probe made by decodery train probe --rows prompt",),
)
@dataclass(frozen=True)
class FactCheckmate(Probed):
    """Scores a prompt, before a token is written, by how likely its answer will be wrong.

    On wish it shifts the states. The shift is the mean of the paper's, without noise. Prompts are read whole, whatever
    others have read of them. Cost: an MLP per request; with a shift one more row per request above the threshold, and
    an MLP per token.

    Attributes:
        shift: Its file or folder, the probe's own by default, or a `Shift`.
        scope: For all tokens, or the first alone.
        action: "switch" adds a trained MLP of the state after the last layer to it, in answers above the threshold.
        probe: A file or folder made by `decodery train probe --rows prompt`, or a `Probe`, on the mean of the prompt's
            hidden states beside the last one.
    """

    waits = "states"
    pool = "prompt"
    made = "make one with `decodery train probe -m MODEL QUESTIONS --rows prompt --out DIR`"
    shift: Shift | str | None = None
    scope: Literal["all", "first"] = "all"
    action: Literal["flag", "stop", "switch"] = field(default="flag", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        shift = self.probe if self.shift is None and isinstance(self.probe, str) else self.shift
        super().__post_init__()
        if self.action == "switch":
            if shift is None:
                raise SettingsError(f"factcheckmate needs a trained shift to switch on: {Shift.MADE}")
            object.__setattr__(self, "shift", Shift.load(shift))

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(self.trained.site,), prompt_taps=True, changes=self.action == "switch")

    def fits(self, model: Reader) -> None:
        super().fits(model)
        if isinstance(self.shift, Shift) and self.action == "switch":
            if self.shift.layers[-1][0].shape[0] != model.config.hidden_size:
                raise SettingsError(f"this shift was trained for a model of another width: {self.shift.MADE}")
            self.shift.refuse_other(model)

    def start(self, seq: Sequence) -> _State:
        return _State(Pool())

    def read(self, state: _State, rows: Prompt) -> _State:
        pool = state.pool.with_rows(rows.hidden[self.trained.site])
        if not rows.last:
            return _State(pool)
        value, apart = self.trained.read_row(pool.numbers())
        return _State(pool, value, apart=apart)

    def unlike_training(self, state: _State) -> bool:
        return state.apart > self.trained.usual

    def observe(self, state: _State, row: Row) -> _State:
        return replace(state, written=state.written + 1)

    def score(self, state: _State) -> float | None:
        return state.value

    def steering(self, state: _State) -> str | None:
        found = state.value is not None and state.value > self.limit
        return "shift" if self.action == "switch" and found and (self.scope == "all" or not state.written) else None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        shift = self.shift
        assert isinstance(shift, Shift)
        return (Intervention(SITE, lambda rows, segment: (rows.double() + shift.of(rows)).to(rows.dtype)),)
