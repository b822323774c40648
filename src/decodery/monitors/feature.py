"""Features of a sparse autoencoder: how active they are, and steering by their directions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.hooks import Intervention, hook_point
from decodery.models.protocol import Reader
from decodery.step.monitor import Monitor, Row
from decodery.step.sequence import Sequence

from .sparse_autoencoder import SparseAutoencoder


@register(
    "feature",
    paper="Scaling and Evaluating Sparse Autoencoders (2024)",
    guarantee="read-only unless action=switch, which adds the features' directions to every row",
    requirements=("a sparse autoencoder of SAELens, sparsify or decodery train autoencoder",),
)
@dataclass(frozen=True)
class Feature(Monitor):
    """Scores tokens by how active features of a sparse autoencoder are; can also steer by them.

    Autoencoders are those of SAELens (standard, topk, jumprelu, gated) and sparsify (topk, groupmax). They were trained
    on the model's own states: those of models whose weights TransformerLens centres or folds first are refused where
    their folder says so. Cost: a product with the encoder per token.

    Attributes:
        sae: A folder of SAELens or sparsify, or a `SparseAutoencoder`.
        features: Numbers of the features that are watched. The score is the largest of their activations at the row
            that the newest token was chosen at.
        strength: With "switch", the multiple of the direction of every watched feature that is added.
        site: The hook point, where the folder does not name it, such as resid_post.10.
        action: "switch" adds the directions to the rows at the hook point, in prompt and answer. The score is then of
            the rows with them.
    """

    waits = "states"

    sae: SparseAutoencoder | str | None = None
    features: tuple[int, ...] = ()
    strength: float = 1.0
    site: str = ""
    action: Literal["flag", "stop", "switch"] = field(default="flag", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sae", SparseAutoencoder.load(self.sae, self.site))
        last = self.trained.features - 1
        if not self.features or not all(0 <= each <= last for each in self.features):
            raise SettingsError(f"feature watches features=, numbers from 0 to {last}, not {list(self.features)}")

    @property
    def trained(self) -> SparseAutoencoder:
        assert isinstance(self.sae, SparseAutoencoder)
        return self.sae

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(self.trained.site,), changes=self.action == "switch")

    def fits(self, model: Reader) -> None:
        config, trained = model.config, self.trained
        place = hook_point(trained.site, config.num_layers)
        width = config.num_heads * config.head_dim if place.name == "head_out" else config.hidden_size
        if trained.width != width:
            raise SettingsError(
                f"this sparse autoencoder reads {trained.width} numbers, and {trained.site} of this model has {width}: "
                "give one that was trained for this model"
            )
        if trained.centring and config.centred_norms:
            warnings.warn(
                "TransformerLens takes the mean from hidden states of models with LayerNorm unless it is told not to, "
                "and this autoencoder's folder does not say: activations may differ from those of SAELens",
                stacklevel=2,
            )

    def start(self, seq: Sequence) -> float | None:
        return None

    def observe(self, state: float | None, row: Row) -> float | None:
        return float(self.trained.encode(row.hidden[self.trained.site][None])[0, list(self.features)].max())

    def score(self, state: float | None) -> float | None:
        return state

    def steering(self, state: float | None) -> str | None:
        return "features" if self.action == "switch" else None

    def changes(self, steering: Any) -> tuple[Intervention, ...]:
        added = self.trained.decoder[list(self.features)].sum(dim=0).double() * self.strength

        def steered(rows: torch.Tensor, segment: object) -> torch.Tensor:
            return (rows.double() + added.to(rows.device)).to(rows.dtype)

        return (Intervention(self.trained.site, steered),)
