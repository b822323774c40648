"""Phase hand-off: one model runs the first denoising steps of a canvas, and another one the remaining steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from decodery.core.errors import SettingMissing, SettingsError
from decodery.core.registry import register, resolve
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, UnmaskingPolicy
from .canvas import Canvas
from .run import Run

SECOND = "draft"
"""Name of the second model in the ledger of forward passes, the same as for texts that are handed over."""
_OWN: dict[str, Any] = {field.name: field.default for field in fields(DiffusionDecoder)}
"""The settings that every method has: those of phase-handoff apply, not those of its policy."""


@register(
    "phase-handoff",
    paper="Collaborative Decoding Makes Visual Auto-Regressive Modeling Efficient (2024)",
    guarantee="lossy: nothing is verified; with steps=0, or with more steps than passes, one model writes the text",
    requirements=("a second masked diffusion model with the same vocabulary",),
)
@dataclass(frozen=True)
class PhaseHandoff(DiffusionDecoder):
    """Lets one model run the first `steps` passes over a canvas, and a second one all others.

    Cached keys and values belong to one model: the other one starts with an empty cache. For models that write from
    left to right, the search of the same name hands over by tokens or by difficulty.

    Attributes:
        policy: The policy of every pass of either model. Its memory, the noise and the written tokens are kept over the
            hand-off.
        steps: Number of passes of the first model. In the original, the large model has 8 of 10 image scales.
        begins: Which model has the first passes: the "model", as published, or the "second" one.
        model: The second model, a folder or a name.
        dtype: Data type of the second model.
    """

    policy: UnmaskingPolicy | str = "static"
    steps: int = 8
    begins: Literal["model", "second"] = "model"
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = resolve("diffusion", self.policy)
        if not isinstance(policy, UnmaskingPolicy):
            raise SettingsError(
                "phase-handoff changes models between passes over one state: choose a policy with one state, such as "
                "static or threshold"
            )
        if any(getattr(policy, name) != value for name, value in _OWN.items()):
            raise SettingsError(
                f"{', '.join(_OWN)} are settings of phase-handoff itself: as in phase-handoff:policy=static,block=32"
            )
        object.__setattr__(self, "policy", policy)
        if self.begins not in ("model", "second"):
            raise SettingsError(f"phase-handoff: begins must be model or second, not {self.begins!r}")
        if self.steps < 0:
            raise SettingsError(f"phase-handoff needs steps of at least 0, not {self.steps}")
        if self.model is None:
            raise SettingMissing(
                "phase-handoff needs a second model: name one, as in phase-handoff:model=DIR, which decodery train "
                "diffusion makes"
            )

    @property
    def revises(self) -> bool:
        assert isinstance(self.policy, UnmaskingPolicy)
        return self.policy.revises

    def fill(self, run: Run) -> ForwardCoroutine[None]:
        assert isinstance(self.policy, UnmaskingPolicy) and self.model is not None
        own, second = run.model, named(self.model, self.dtype)
        run.require_alike(second)
        for region in run.regions():
            memory = self.policy.begin(run, region)
            while len(run.canvas.open(*region)) and not run.canvas.ended:
                run.hand_to(*((own, "") if self._by_model(run.canvas) else (second, SECOND)))
                view = yield from run.look(region)
                commit, memory = self.policy.select(view, memory)
                run.write(view, commit)
                del view

    def _by_model(self, canvas: Canvas) -> bool:
        return (canvas.passes < self.steps) == (self.begins == "model")
