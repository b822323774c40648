"""EasySpec: the draft model runs several layers on the same rows, and its cache is put right after every step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.layer_plan import LayerPlan
from decodery.step.sequence import Sequence

from .draft_model import DraftModel
from .follower import Follower


@register(
    "easyspec",
    paper="EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (2025)",
    lossless=True,
    requirements=(
        "a second model with the same vocabulary that this package runs itself, or the one that comes with the target",
    ),
)
@dataclass(frozen=True)
class EasySpec(DraftModel):
    """Drafts with a second model of which `layers` layers at a time attend to the same input.

    The first and the last layer stay apart, and MLPs stay in order: a draft pass is 2 + (M - 2) / layers attentions
    deep where the model has M layers. Scope: the request; memory: one more cache. Source: Yize-Wu/EasySpec (2025),
    whose code could not be read: where what a layer finds is added to the rows is the paper's text as understood here.

    Attributes:
        layers: How many layers attend at the same time; 1 is `draft-model`.
        calibrate: What that leaves in the cache is thrown away after every step, and the tokens accepted are read again
            as they should be, with the bonus token in the one pass that would have read it; the first token of a draft
            is therefore the draft model's own.
        model, dtype, transform, length, tree_policy: See draft-model, which layers=1 is, bit for bit; more than stand
            between the first and the last change nothing, and a warning says so. It pays where layers can really run
            side by side; on one processor the attentions follow each other all the same, and drafts are only less often
            right.
    """

    layers: int = 4
    calibrate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise SettingsError(f"easyspec needs layers >= 1, not {self.layers}")
        if self.layers == 1 and not self.calibrate:
            raise SettingsError(
                "easyspec:layers=1 drafts as draft-model does, with nothing to calibrate: leave calibrate out"
            )
        if self.recycled:
            raise SettingsError("easyspec puts a cache of its own right: leave recycled out, or use draft-model")
        if self.vocabulary is not None:
            raise SettingsError("easyspec predicts all tokens: leave vocabulary out, or use draft-model")

    @property
    def provides(self) -> Provides:
        return replace(super().provides, draft_states=False)

    def start(self, seq: Sequence) -> Follower:
        reading = super().start(seq)
        assert isinstance(reading, Follower)
        of = reading.model.config.num_layers
        if self.layers > (inner := max(of - 2, 1)):
            same = "as draft-model does" if inner == 1 else f"as layers={inner} does"
            warnings.warn(
                f"easyspec:layers={self.layers} drafts {same}: the first and the last layer stay apart, and the "
                f"draft model's number of layers is {of}",
                stacklevel=2,
            )
        if self.layers > 1:
            if not reading.model.capabilities.layer_plans:
                raise UnsupportedModel(
                    "the layers of this draft model cannot be run apart: use draft-model, or a model that this "
                    "package runs itself"
                )
            reading.layer_plan, reading.kept = LayerPlan(abreast=self.layers), not self.calibrate
        return reading
