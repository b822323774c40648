"""SliceGPT: a narrower residual stream, turned so that what is cut off carries little."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.models.config import ModelConfig
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights, floating

from .base import Change, ModelCompression, Part, Size, Texts
from .each_linear import size_of
from .stream import Stream, cast, floats

_MULTIPLE = 8
"""Widths that kernels like."""
_DAMPING = 0.01
"""Added to the covariance's diagonal, as a share of its mean."""


@register(
    "slicegpt",
    paper="SliceGPT: Compress Large Language Models by Deleting Rows and Columns (2024)",
    guarantee="changes the output, at share 0 by rounding alone; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class SliceGPT(ModelCompression):
    """Rotates the residual stream to its principal directions and cuts off the last ones.

    Every sublayer has a rotation of its own. The head is sliced with the layers, so that a model has one width; the
    published default leaves it whole. No training follows. Keys and values are as large as before, and a table that
    embedding and head shared is there twice. The copy is in float32.

    Attributes:
        share: Of the stream's width that is cut, the rest rounded down to a multiple of 8. RMSNorm commutes with
            rotations, so that every matrix takes its rotation in and only one product per sublayer is added, from one
            basis to the next. Directions are those of the calibration text on its way through the layers that are
            sliced already; norms divide by the original width, as if what was cut were zero.
        orientation: What is left is turned once more, at random by `seed`, which changes no function and spreads what
            single directions carry; "pca" leaves the principal directions as they are.
        seed: Decides the random rotation.
    """

    share: float = 0.25
    orientation: Literal["random", "pca"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.orientation not in ("random", "pca"):
            raise SettingsError(f"the orientations of slicegpt are random and pca, not {self.orientation!r}")
        if not 0.0 <= self.share < 1.0:
            raise SettingsError(f"slicegpt cuts a share of the width from 0 to below 1, not {self.share}")

    @property
    def reads(self) -> bool:
        return True

    @torch.no_grad()
    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        config, weights = model.config, model.weights
        width = self._width(config)
        if config.sandwich_norms or config.shortcuts:
            kind = "has norms after its sublayers" if config.sandwich_norms else "is sliced already"
            raise UnsupportedModel(f"this model {kind}, where no rotation passes: slicegpt cannot change it")
        stream = Stream(model, list(texts))
        chance = torch.Generator().manual_seed(self.seed) if self.orientation == "random" else None
        slicing = _Slicing(stream, width, config.norm_eps, chance)
        basis, error = slicing.basis(stream.rows)
        entries = weights.embedding.shape[0] * width
        parts = [Part("embedding", error, Size(entries * stream.rows.itemsize, 0))]
        embedding = weights.embedding.to(stream.dtype) @ basis[:, :width]
        stream.rows = stream.rows @ basis[:, :width]
        layers = []
        for index, layer in enumerate(weights.layers):
            sliced, basis, errors = slicing.layer(index, floats(layer, stream.dtype), basis)
            layers.append(sliced)
            names = (f"layers.{index}.output", f"layers.{index}.down")
            for name, linear, share in zip(names, (sliced.output, sliced.down), errors, strict=True):
                parts.append(Part(name, share, size_of(linear)))
            progress("slicing", index + 1, len(weights.layers))
        head = cast(floating(weights.head), stream.dtype)
        gain = weights.norm.to(stream.dtype)
        head = Dense((head.weight * gain) @ basis[:, :width], head.bias)
        shape = replace(config, hidden_size=width, norm_eps=slicing.eps, shortcuts=True, tie_embeddings=False)
        return Change(Transformer(shape, Weights(embedding, layers, slicing.norm, head)), tuple(parts))

    def _width(self, config: ModelConfig) -> int:
        if self.share == 0.0:
            return config.hidden_size
        width = int((1.0 - self.share) * config.hidden_size) // _MULTIPLE * _MULTIPLE
        if width < 1:
            raise SettingsError(f"slicegpt would leave nothing of a width of {config.hidden_size}: cut a smaller share")
        return width


class _Slicing:
    """Slices layer after layer of a narrow stream. norm: [width], the weight of its norms; eps: theirs.

    chance: what turns the stream within what is left, None for nothing.
    """

    def __init__(self, stream: Stream, width: int, eps: float, chance: torch.Generator | None) -> None:
        self.stream, self.width, self._chance = stream, width, chance
        full = stream.rows.shape[1]
        # x / sqrt(sum(x^2) / full + eps), written with the mean over `width` that the model computes.
        self.eps = eps * full / width
        self.norm = torch.full((width,), (full / width) ** 0.5, dtype=stream.dtype, device=stream.rows.device)

    def basis(self, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """[full, full] a basis for rows [n, full], and the share of their energy that is cut off.

        The first `width` directions span the strongest principal ones; the others are principal themselves.
        """
        rows = rows.double()
        gram = rows.T @ rows
        gram.diagonal().add_(_DAMPING * gram.diagonal().mean())
        # In ascending order of strength.
        basis = torch.linalg.eigh(gram).eigenvectors.flip(1)
        cut = rows @ basis[:, self.width :]
        if self._chance is not None:
            turn = torch.randn(self.width, self.width, generator=self._chance, dtype=basis.dtype, device="cpu").to(
                basis.device
            )
            basis[:, : self.width] = basis[:, : self.width] @ torch.linalg.qr(turn).Q
        return basis.to(self.stream.dtype), float(cut.square().sum() / rows.square().sum())

    def layer(self, index: int, whole: Layer, before: torch.Tensor) -> tuple[Layer, torch.Tensor, tuple[float, float]]:
        """A sliced layer, the basis of the stream after it, and what either sublayer's stream lost.

        before: [full, full] the basis of the stream in front of it.
        """
        stream, width = self.stream, self.width
        narrow = before[:, :width]
        qkv = self._reads(whole.qkv, whole.attention_norm, narrow)
        # Out of the narrow basis and into the full one: the sum is what directions are looked for in.
        trial = replace(whole, attention_norm=self.norm, qkv=qkv, attention_shortcut=narrow.T)
        rows = stream.through(index, trial, skip="mlp", eps=self.eps)
        middle, first = self.basis(rows)
        between = middle[:, :width]
        stream.rows = rows @ between
        gate_up = self._reads(whole.gate_up, whole.mlp_norm, between)
        trial = replace(whole, mlp_norm=self.norm, gate_up=gate_up, mlp_shortcut=between.T)
        rows = stream.through(index, trial, skip="attention", eps=self.eps)
        after, second = self.basis(rows)
        behind = after[:, :width]
        stream.rows = rows @ behind
        sliced = replace(
            whole,
            attention_norm=self.norm,
            mlp_norm=self.norm,
            qkv=qkv,
            gate_up=gate_up,
            output=_writes(whole.output, between),
            down=_writes(whole.down, behind),
            attention_shortcut=narrow.T @ between,
            mlp_shortcut=between.T @ behind,
        )
        return sliced, after, (first, second)

    def _reads(self, linear: object, gain: torch.Tensor, basis: torch.Tensor) -> Dense:
        """A layer that reads the stream, with its norm's gain taken in."""
        assert isinstance(linear, Dense)
        return Dense((linear.weight * gain) @ basis, linear.bias)


def _writes(linear: object, basis: torch.Tensor) -> Dense:
    """A layer that writes to the stream."""
    assert isinstance(linear, Dense)
    return Dense(basis.T @ linear.weight, None if linear.bias is None else basis.T @ linear.bias)
