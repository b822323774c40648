"""What configurations of published draft heads say beside the shapes of their layers."""

from __future__ import annotations

from typing import Any

from decodery.core.errors import CorruptFile
from decodery.models.config import MOST_LAYERS, TOKEN_ID, TOKENS, WIDTH
from decodery.models.loaders.fields import Anything, Fields, Flag, Kind, Listed, Record, Text, Whole

SPECULATORS = "speculators_model_type"
SPECULATORS_KINDS = ("eagle", "eagle3", "mtp", "dflash", "dspark", "peagle")
_LAYERS, _OUTPUTS = Listed(Whole(-(1 << 10), 1 << 10), 64), Listed(Whole(0, 1 << 10), 64)
_BLOCK, _RANK = Whole(1, 1 << 10), Whole(0, 1 << 16)
_MARKOV: dict[str, Kind] = {
    "markov_rank": _RANK,
    "markov_head_type": Text(64),
    "enable_confidence_head": Flag(),
    "confidence_head_with_markov": Flag(),
    "confidence_head_alpha": Anything(),
}
_DFLASH: dict[str, Kind] = {
    "target_layer_ids": _OUTPUTS,
    "mask_token_id": TOKEN_ID,
    "block_size": _BLOCK,
    "projector_type": Text(64),
    "attention_mode": Text(64),
    **_MARKOV,
}
_METHOD = Record({"speculative_tokens": Whole(1, 1 << 10), "proposal_type": Text(64)})
SETTINGS: dict[str, Kind] = {
    SPECULATORS: Text(64),
    "transformer_layer_config": Record({}),
    "speculators_config": Record(
        {"proposal_methods": Listed(_METHOD, 64), "verifier": Record({"name_or_path": Text(1 << 12)})}
    ),
    "layernorms": Flag(),
    "norm_before_residual": Flag(),
    "norm_before_fc": Flag(),
    "fc_norm": Flag(),
    "norm_output": Flag(),
    "draft_vocab_size": TOKENS,
    "target_hidden_size": WIDTH,
    "eagle_aux_hidden_state_layer_ids": _LAYERS,
    "aux_hidden_state_layer_ids": _LAYERS,
    "eagle_config": Record({"eagle_aux_hidden_state_layer_ids": _OUTPUTS, "use_aux_hidden_state": Flag()}),
    "dflash_config": Record(_DFLASH),
    "block_size": _BLOCK,
    "mask_token_id": TOKEN_ID,
    "num_target_layers": Whole(1, MOST_LAYERS),
    "sliding_window_non_causal": Flag(),
    "sample_from_anchor": Flag(),
    "num_nextn_predict_layers": Whole(1, 64),
    "model_type": Text(64),
    **_MARKOV,
}
UNREAD = ("bias", "fusion_bias", "speculators_version", "embed_requires_grad", "auto_map")
"""What tensors say as well, what the head was made with, and code that is not run here."""
HEAD_FIELDS = {*SETTINGS, *UNREAD} - {"model_type"}
"""Fields that are no fields of a model."""


def verifier(settings: Fields) -> str:
    """The name of the model that a head was made for, "" where its folder names none."""
    found: str | None = ((settings.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return found or ""


def steps(settings: Fields, default: int) -> int:
    """How many tokens a head is said to draft."""
    methods: list[dict[str, Any]] = (settings.get("speculators_config") or {}).get("proposal_methods") or []
    found = next((each["speculative_tokens"] for each in methods if each.get("speculative_tokens")), default)
    return int(found)


def draft_taps(settings: Fields, layers: int = 0) -> list[Any]:
    """Where a head reads the target's states: the layers that they enter, as this package numbers them.

    Args:
        layers: Of the head, which decide the defaults of a DFlash head.

    Raises:
        CorruptFile: Nothing says which they are.
    """
    own = settings.get("dflash_config")
    if own is not None:
        # Numbers of the layers that the states leave.
        leaving = own.get("target_layer_ids")
        return [layer + 1 for layer in (_spread(settings, layers) if leaving is None else leaving)]
    entering = settings.get("eagle_aux_hidden_state_layer_ids") or settings.get("aux_hidden_state_layer_ids")
    leaving = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # speculators numbers the layers that states enter, SpecForge those that they leave. Both default to the states that
    # enter layers 2, the middle one and the third from the end.
    return entering or [layer + 1 for layer in leaving or ()] or [2, "half", -4]


def _spread(settings: Fields, layers: int) -> list[int]:
    """The layers of a target that a DFlash head of so many layers reads where its configuration names none."""
    target = settings.get("num_target_layers")
    if target is None:
        raise CorruptFile(f"{settings.origin}: neither target_layer_ids nor num_target_layers is given")
    if layers == 1:
        return [target // 2]
    return [round(1 + number * (target - 4) / (layers - 1)) for number in range(layers)]
