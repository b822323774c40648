"""The decoder layers of published draft heads: their shapes as a configuration says, and their tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.config import MOST_LAYERS, POSITIONS, ModelConfig
from decodery.models.families.config_json import read_config
from decodery.models.families.seeing import of_text
from decodery.models.families.tensor_names import stores_less_one
from decodery.models.loaders.fields import Fields, Flag, Kind, Listed, Record, Text, Whole
from decodery.models.torch.rope import rope_frequencies

from .checkpoint import EMBEDDING, Tensors
from .copied import layer_shape
from .experts import expert_tensors
from .head import OWN_EMBEDDING
from .latents import latent_tensors
from .parts import LayerShape

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Families whose decoder layers are run here."""
HYBRIDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
"""Families whose own layers mix in other ways, and whose next-token layer is one of gated attention."""
_WINDOWS: dict[str, Kind] = {
    "layer_types": Listed(Text(64), MOST_LAYERS),
    "sliding_window": POSITIONS,
    "use_sliding_window": Flag(),
    "max_window_layers": Whole(0, 2**31 - 1),
}
_ROTATION = Record(dict.fromkeys(("rope_parameters", "rope_scaling"), Record({})))
_TEXT_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Tokens that a head has no use for: those of its target count, and some files name another model's."""
SLIDING, _FULL = "sliding_attention", "full_attention"
_FIRST_WINDOW = 28
"""The first layer of the Qwen families that slides where a configuration names no other."""


@dataclass(frozen=True)
class DraftLayers:
    """What a configuration says of a head's layers.

    Attributes:
        config: Its sizes, as those of a model.
        shapes: Of every layer.
        less_one: Whether weights of norms are stored less one.
    """

    config: ModelConfig
    shapes: tuple[LayerShape, ...]
    less_one: bool = False

    @classmethod
    def of(cls, raw: dict[str, Any], origin: str, families: tuple[str, ...] = FAMILIES) -> DraftLayers:
        """The layers of a configuration that is written as that of a model.

        Raises:
            UnsupportedModel: For what is not run here, by its name.
        """
        family = raw.get("model_type") or "llama"
        if family not in families:
            raise UnsupportedModel(f"{origin}: a head whose layer is of model_type {family!r} is not known here")
        _ROTATION.check(raw, origin)
        left_out = ("architectures", *_TEXT_ENDS, *_WINDOWS)
        known = {name: value for name, value in of_text(raw).items() if name not in left_out}
        config = read_config(known | {"model_type": family}, origin)
        if config.activation != "silu":
            raise UnsupportedModel(f"{origin}: hidden_act of a head is silu here, not {config.activation}")
        # Of a hybrid a head's layer is one that attends to all of the text.
        mixed = {"layer_types": None} if family in HYBRIDS else {}
        windows = _windows(Fields(raw | mixed, origin, _WINDOWS), family, config.num_layers)
        shape = replace(layer_shape(config, 0), factor=rope_frequencies(config.rope, config.head_dim)[1])
        shapes = tuple(replace(shape, sliding=window) for window in windows)
        return cls(config, shapes, stores_less_one("norm.weight", config))

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    def settings(self) -> dict[str, Any]:
        """The shapes as a head's settings hold them: of the first layer, and of those after it."""
        first, *further = (asdict(shape) for shape in self.shapes)
        return {"layer": first, **({"further": further} if further else {})}

    def take(self, tensors: Tensors, prefix: str, name: str, width: int | None = None) -> dict[str, torch.Tensor]:
        """The tensors of one layer.

        Args:
            prefix: How their published names begin.
            name: How their names begin here.
            width: Of what attention reads, the layer's own where it is None; then the norm before it belongs to them.
        """
        config, hidden = self.config, self.hidden
        found: dict[str, torch.Tensor] = {}
        if config.gated_attention:
            gates = tensors.ungated(f"{prefix}self_attn.q_proj", config.num_heads, config.head_dim, width or hidden)
            found[f"{name}out_gate.weight"] = gates
        if config.latent is not None:
            found |= latent_tensors(tensors, prefix, name, config)
        else:
            found |= tensors.layer(
                prefix,
                hidden=hidden,
                inner=None if config.experts else config.intermediate_size,
                own=config.num_heads * config.head_dim,
                shared=config.num_kv_heads * config.head_dim,
                width=width or hidden,
                name=name,
            )
        if config.experts:
            found |= expert_tensors(tensors, prefix, name, config)
        if config.qk_norm:
            for each in "qk":
                found[f"{name}{each}_norm.weight"] = tensors.take(
                    f"{prefix}self_attn.{each}_norm.weight", config.head_dim
                )
        if width is None:
            found[f"{name}attention_norm.weight"] = tensors.take(f"{prefix}input_layernorm.weight", hidden)
        return self.norms(found)

    def norms(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors, with the weights of norms as they are used."""
        less = self.less_one
        return {name: each + 1 if less and name.endswith("norm.weight") else each for name, each in found.items()}

    def words(
        self, tensors: Tensors, outputs: int, *, needed: bool = False, tied: bool = False
    ) -> dict[str, torch.Tensor]:
        """The vocabulary projection, embedding and draft vocabulary, as far as the head brings its own.

        Args:
            outputs: Tokens it can draft.
            needed: Whether it cannot use the target's projection.
            tied: Whether its embedding is its projection where it brings no other.
        """
        found: dict[str, torch.Tensor] = {}
        if EMBEDDING in tensors:
            found[f"{OWN_EMBEDDING}.weight"] = tensors.take(EMBEDDING, self.config.vocab_size, self.hidden)
        if tied and found and "lm_head.weight" not in tensors and outputs == self.config.vocab_size:
            found["lm_head.weight"] = found[f"{OWN_EMBEDDING}.weight"].clone()
        elif needed or "lm_head.weight" in tensors:
            found |= tensors.linear("lm_head", {"lm_head": outputs}, self.hidden)
        if "d2t" in tensors:
            # Offsets: a token of the target is the place in the draft vocabulary plus what stands there.
            found["vocabulary"] = (torch.arange(outputs, device="cpu") + tensors.take("d2t", outputs)).int()
        return found


def slides(raw: dict[str, Any]) -> bool:
    """Whether the kinds of layers that a configuration names have sliding ones."""
    kinds = raw.get("layer_types")
    return isinstance(kinds, list) and SLIDING in kinds


def _windows(fields: Fields, family: str, layers: int) -> list[int | None]:
    """Of every layer how many positions it sees, None for all."""
    qwen = family.startswith("qwen")
    window = fields.get("sliding_window") if fields.get("use_sliding_window", not qwen) else None
    types = fields.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise CorruptFile(f"{fields.origin}: layer_types should name a kind for each of the {layers} layers")
        if any(kind not in (SLIDING, _FULL) or (kind == SLIDING and window is None) for kind in types):
            raise fields.unsupported("layer_types")
        return [window if kind == SLIDING else None for kind in types]
    if window is None:
        return [None] * layers
    if not qwen:
        # Public code reads such a field in some versions only.
        raise fields.unsupported("sliding_window")
    first = fields.get("max_window_layers", _FIRST_WINDOW)
    return [window if layer >= first else None for layer in range(layers)]
