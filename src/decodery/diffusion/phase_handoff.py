"""Phase hand-off: one model runs the first denoising steps of a canvas, and another one those that are left."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from decodery.core.errors import SettingsError
from decodery.core.registry import register, resolve
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import ForwardCoroutine

from .base import DiffusionDecoder, UnmaskingPolicy
from .canvas import Canvas
from .run import Run

SECOND = "draft"
"""What the second model goes by in ledgers, as it does where texts are handed over."""
_OWN: dict[str, Any] = {field.name: field.default for field in fields(DiffusionDecoder)}
"""Settings of every method; the hand-off's own are those that count."""


@register(
    "phase-handoff",
    paper="Collaborative Decoding Makes Visual Auto-Regressive Modeling Efficient (2024)",
    guarantee="lossy: nothing is verified; with steps=0, and with more steps than passes, it is what one model writes",
    requirements=("a second masked diffusion model with the same vocabulary",),
)
@dataclass(frozen=True)
class PhaseHandoff(DiffusionDecoder):
    """Lets one model run the first `steps` passes over a canvas, and a second one all others.

    Keys and values that a cache holds are one model's: the other one begins without any. The same by tokens and by
    difficulty, for models that write from left to right, is the search of this name.

    Attributes:
        policy: What chooses in every pass of either model; what it remembers goes on over the hand-off, and so do the
            noise and what is written.
        steps: Passes of the model that begins.
        begins: Who has the first passes, the "model", as published for images by their scales, or the "second" one.
        model, dtype: The second model, a folder or a name. 8 of 10 scales are the large model's in the original.
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
                "phase-handoff changes models between passes over one state: take a policy that looks at one, such as "
                "static or threshold"
            )
        if any(getattr(policy, name) != value for name, value in _OWN.items()):
            raise SettingsError(
                f"{', '.join(_OWN)} are settings of phase-handoff itself: as in phase-handoff:policy=static,block=32"
            )
        object.__setattr__(self, "policy", policy)
        if self.begins not in ("model", "second"):
            raise SettingsError(f"phase-handoff begins with the model or the second one, not {self.begins!r}")
        if self.steps < 0:
            raise SettingsError(f"phase-handoff needs steps of at least 0, not {self.steps}")
        if self.model is None:
            raise SettingsError(
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

    def _by_model(self, canvas: Canvas) -> bool:
        return (canvas.passes < self.steps) == (self.begins == "model")
