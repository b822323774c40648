"""Sparse autoencoders of hidden states as SAELens and sparsify keep them in folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, ModelNotFound, SettingMissing, SettingsError, UnsupportedModel
from decodery.core.threads import one_thread
from decodery.models.loaders.fields import read_json
from decodery.models.loaders.store import replacing, write_text
from decodery.models.trained.artifact import read_tensors, remembered

__all__ = ["SparseAutoencoder"]

CONFIG, SAELENS, SPARSIFY = "cfg.json", "sae_weights.safetensors", "sae.safetensors"
_SITES = (
    (r"blocks\.(\d+)\.hook_(resid_pre|resid_post|attn_out|mlp_out)", lambda layer, name: f"{name}.{layer}"),
    (r"blocks\.(\d+)\.attn\.hook_(z)", lambda layer, _: f"head_out.{layer}"),
    (r"(?:.*\.)?(?:layers|h)\.(\d+)()", lambda layer, _: f"resid_post.{layer}"),
    (r"(?:.*\.)?(?:layers|h)\.(\d+)\.(mlp)", lambda layer, _: f"mlp_out.{layer}"),
    (r"(?:.*\.)?(?:layers|h)\.(\d+)\.(self_attn|attn|attention)", lambda layer, _: f"attn_out.{layer}"),
)
"""Names of TransformerLens hooks and of modules, and the hook points that they are."""
_KINDS = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu", "gated": "gated"}
_EPS = 1e-5


@dataclass(frozen=True, eq=False)
class SparseAutoencoder:
    """An encoder of rows into many features, few of which are active, and their directions.

    Attributes:
        encoder: [width, features].
        bias: [features] of the encoder.
        decoder: [features, width], the direction of each feature.
        shift: [width], added to what is decoded.
        activation: "relu", "topk", "groupmax", "jumprelu" or "gated".
        k: Features that are active at most, of "topk" and "groupmax".
        centred: Whether the shift is taken from rows before they are encoded.
        limits: [features] of "jumprelu", above which a feature is active.
        gates: Of "gated", "gate" and "scale" [features]: the bias of the gate, and the logarithm of the magnitude's
            scale; the magnitude's bias is `bias`.
        scaled: Whether activations are weighted by the length of their directions.
        normed: Whether rows are standardised first, each by its own mean and deviation.
        site: The hook point, "" where the folder does not say.
        centring: Whether it may have been trained on rows without their means, as TransformerLens makes them.
    """

    encoder: torch.Tensor
    bias: torch.Tensor
    decoder: torch.Tensor
    shift: torch.Tensor
    activation: str = "relu"
    k: int = 0
    centred: bool = True
    limits: torch.Tensor | None = None
    gates: Mapping[str, torch.Tensor] | None = None
    scaled: bool = False
    normed: bool = False
    site: str = ""
    centring: bool = False

    @property
    def features(self) -> int:
        return len(self.bias)

    @property
    def width(self) -> int:
        return len(self.shift)

    @one_thread()
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, features] float32 activations of rows [n, width]."""
        given = rows.float().cpu()
        if self.normed:
            given = given - given.mean(dim=-1, keepdim=True)
            given = given / (given.std(dim=-1, keepdim=True) + _EPS)
        given = given - self.shift if self.centred else given
        found = given @ self.encoder
        if self.gates is not None:
            active = found + self.gates["gate"] > 0
            return (found * self.gates["scale"].exp() + self.bias).relu() * active
        found = found + self.bias
        lengths = self.decoder.norm(dim=-1) if self.scaled else None
        found = found if lengths is None else found * lengths
        if self.activation == "topk":
            values, numbers = found.topk(self.k, dim=-1)
            return torch.zeros_like(found).scatter_(-1, numbers, values.relu())
        if self.activation == "groupmax":
            values, places = found.relu().unflatten(-1, (self.k, -1)).max(dim=-1, keepdim=True)
            grouped = torch.zeros_like(found).unflatten(-1, (self.k, -1))
            return grouped.scatter_(-1, places, values).flatten(-2)
        if self.limits is not None:
            return found.relu() * (found > self.limits.relu())
        return found.relu()

    @one_thread()
    def decode(self, active: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, width] float32 for activations [n, features] of rows [n, width]."""
        found = (active / self.decoder.norm(dim=-1) if self.scaled else active) @ self.decoder + self.shift
        if self.normed:
            given = rows.float().cpu()
            apart = given - given.mean(dim=-1, keepdim=True)
            return found * apart.std(dim=-1, keepdim=True) + given.mean(dim=-1, keepdim=True)
        return found

    def save(self, folder: Path) -> None:
        """Write a folder that SAELens reads: of "relu" and "topk" encoders."""
        from safetensors.torch import save_file

        kinds = {"relu": "standard", "topk": "topk"}
        if self.activation not in kinds or self.normed:
            raise SettingsError(f"only encoders with {' or '.join(kinds)} are written, not {self.activation}")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"W_enc": self.encoder, "b_enc": self.bias, "W_dec": self.decoder, "b_dec": self.shift}
        with replacing(folder / SAELENS) as temporary:
            save_file({name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}, temporary)
        name, _, layer = self.site.partition(".")
        hook = f"blocks.{layer}.attn.hook_z" if name == "head_out" else f"blocks.{layer}.hook_{name}"
        config: dict[str, Any] = {
            "architecture": kinds[self.activation],
            "d_in": self.width,
            "d_sae": self.features,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": self.centred,
            "normalize_activations": "none",
            "reshape_activations": "hook_z" if name == "head_out" else "none",
            "metadata": {"hook_name": hook},
        }
        if self.activation == "topk":
            config |= {"k": self.k, "rescale_acts_by_decoder_norm": self.scaled}
        write_text(folder / CONFIG, json.dumps(config, indent=1))

    @classmethod
    def load(cls, given: SparseAutoencoder | str | Path | None, site: str = "") -> SparseAutoencoder:
        """One that a setting names.

        Args:
            given: Itself, or a folder of SAELens or sparsify.
            site: The hook point, where the folder does not name it.

        Raises:
            SettingsError: There is none, or its hook point is not known.
            ModelNotFound: The folder holds none.
            CorruptFile, UnsupportedModel: It is damaged, or of a kind that cannot be run.
        """
        if isinstance(given, cls):
            return given
        if given is None:
            raise SettingMissing(
                "feature needs a sparse autoencoder, as in feature:sae=DIR: give a folder of SAELens or sparsify, or "
                "make one with `decodery train autoencoder FILES -m MODEL --out DIR`"
            )
        found = _read(Path(str(given)).expanduser().absolute())
        if not (site or found.site):
            raise SettingsError(f"{given} does not say which hidden states it reads: give site=, such as resid_post.10")
        return cls(**{**found.__dict__, "site": site}) if site else found


def site_of(name: str) -> str:
    """The hook point of a name of TransformerLens or of a module; "" for another name."""
    for pattern, made in _SITES:
        if (match := re.fullmatch(pattern, name)) is not None:
            return made(*match.groups())
    return ""


@remembered
def _read(folder: Path) -> SparseAutoencoder:
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{folder} has no {CONFIG}: give a folder of SAELens or sparsify")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CorruptFile(f"{folder / CONFIG} holds no settings")
    read = _saelens if (folder / SAELENS).is_file() else _sparsify
    path = folder / (SAELENS if read is _saelens else SPARSIFY)
    if not path.is_file():
        raise ModelNotFound(f"{folder} has neither {SAELENS} nor {SPARSIFY}: give a folder of SAELens or sparsify")
    tensors = {name: tensor.float() for name, tensor in read_tensors(path)[0].items()}
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise CorruptFile(f"{path} holds numbers that are not finite")
    try:
        found = read(config, tensors, folder)
        width, features = found.encoder.shape
        fits = tuple(found.decoder.shape) == (features, width) and tuple(found.shift.shape) == (width,)
        of_features = [found.bias, found.limits, *(found.gates or {}).values()]
        fits = fits and all(each is None or tuple(each.shape) == (features,) for each in of_features)
        sizes = {"d_in": width, "d_sae": features, "num_latents": features}
        # sparsify writes 0 latents where they are a multiple of the width.
        fits = fits and all(config.get(name) in (None, 0, size) for name, size in sizes.items())
        grouped = found.activation in ("topk", "groupmax")
        if not fits or (grouped and not 1 <= found.k <= features):
            raise ValueError("shapes")
        if found.activation == "groupmax" and features % found.k:
            raise ValueError("groups")
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise CorruptFile(f"{path} does not hold what {folder / CONFIG} says, or is damaged") from error
    if tensors:
        raise UnsupportedModel(f"{path} has {', '.join(sorted(tensors))}, which this reader does not know")
    return found


def _saelens(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> SparseAutoencoder:
    about = config.get("metadata") if isinstance(config.get("metadata"), dict) else config
    # Before version 6 the activation had a name of its own.
    kind = config.get("architecture", "standard")
    old = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    if kind == "standard" and old in ("topk", "topk-sae"):
        kind, config = "topk", {**config, "k": (config.get("activation_fn_kwargs") or {}).get("k")}
    elif old != "relu" and kind == "standard":
        raise _unknown(folder, "activation_fn", old)
    if kind not in _KINDS:
        raise _unknown(folder, "architecture", kind)
    norm = config.get("normalize_activations", "none")
    if norm not in ("none", "layer_norm"):
        raise _unknown(folder, "normalize_activations", norm)
    for name in ("hook_head_index", "model_from_pretrained_kwargs"):
        value = (about or {}).get(name)
        if value not in (None, {}) and not (name == "model_from_pretrained_kwargs" and _plain(value)):
            raise _unknown(folder, name, value)
    if config.get("finetuning_scaling_factor"):
        raise _unknown(folder, "finetuning_scaling_factor", True)
    scaled = bool(config.get("rescale_acts_by_decoder_norm", False))
    if scaled and kind != "topk":
        raise _unknown(folder, "rescale_acts_by_decoder_norm", True)
    tensors.pop("scaling_factor", None)
    gated = kind == "gated"
    gates = {"gate": tensors.pop("b_gate"), "scale": tensors.pop("r_mag")} if gated else None
    limits = tensors.pop("threshold") if kind == "jumprelu" else None
    return SparseAutoencoder(
        tensors.pop("W_enc"),
        tensors.pop("b_mag" if gated else "b_enc"),
        tensors.pop("W_dec"),
        tensors.pop("b_dec"),
        _KINDS[kind],
        int(config["k"]) if kind == "topk" else 0,
        bool(config.get("apply_b_dec_to_input", True)),
        limits,
        gates,
        scaled,
        norm == "layer_norm",
        site_of(str((about or {}).get("hook_name", ""))),
        not (about or {}).get("model_from_pretrained_kwargs"),
    )


def _plain(value: Any) -> bool:
    """Whether the model was trained with as it is, and not with weights that TransformerLens folds or centres."""
    return isinstance(value, dict) and set(value) <= {"center_writing_weights", "fold_ln"} and not any(value.values())


def _sparsify(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> SparseAutoencoder:
    for name in ("transcode", "skip_connection", "embed_skip", "gram_lookup"):
        if config.get(name):
            raise _unknown(folder, name, config[name])
    activation = config.get("activation", "topk")
    if activation not in ("topk", "groupmax"):
        raise _unknown(folder, "activation", activation)
    return SparseAutoencoder(
        tensors.pop("encoder.weight").T.contiguous(),
        tensors.pop("encoder.bias"),
        tensors.pop("W_dec"),
        tensors.pop("b_dec"),
        activation,
        int(config["k"]),
        site=site_of(folder.name),
    )


def _unknown(folder: Path, name: str, value: Any) -> UnsupportedModel:
    return UnsupportedModel(f"{folder / CONFIG}: {name} = {value!r} is not supported")
