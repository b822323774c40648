"""What configurations of published draft heads say beside the shapes of their layers."""

from __future__ import annotations

from typing import Any

from decodery.core.errors import CorruptFile
from decodery.models.config import MOST_LAYERS, POSITIONS, TOKEN_ID, TOKENS, WIDTH
from decodery.models.loaders.fields import Anything, Fields, Flag, Kind, Listed, Record, Text, Whole, shown

SPECULATORS = "speculators_model_type"
SPECULATORS_KINDS = ("eagle", "eagle3", "mtp", "dflash", "dspark", "peagle")
_ENTERED, _LEFT = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
"""Where states are read: the layers that they enter, and the layers that they leave."""
_NESTED = ("dflash_config", "eagle_config")
_LAYERS, _LEFT_LAYERS = Listed(Whole(-(1 << 10), 1 << 10), 64), Listed(Whole(-1, 1 << 10), 64)
_METHOD = Record({"speculative_tokens": Whole(1, 1 << 10), "proposal_type": Text(64)})
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_ALWAYS: dict[str, Any] = {
    "is_neox_style": True,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""What configurations say of a head that is run at this value alone, which is meant where it is missing."""
SETTINGS: dict[str, Kind] = {
    SPECULATORS: Text(64),
    "architectures": Listed(Text(256), 64),
    "transformer_layer_config": Record({}),
    "speculators_config": Record(
        {"proposal_methods": Listed(_METHOD, 64), "verifier": Record({"name_or_path": Text(1 << 12)})}
    ),
    "target_model_name_or_path": Text(1 << 12),
    "layernorms": Flag(),
    "norm_before_residual": Flag(),
    "norm_before_fc": Flag(),
    "fc_norm": Flag(),
    "norm_output": Flag(),
    "draft_vocab_size": TOKENS,
    "target_hidden_size": WIDTH,
    _ENTERED: _LAYERS,
    "aux_hidden_state_layer_ids": _LAYERS,
    _LEFT: _LEFT_LAYERS,
    **dict.fromkeys(_NESTED, Record({})),
    "projector_type": Text(64),
    "block_size": Whole(1, 1 << 10),
    **dict.fromkeys(_MASKS, TOKEN_ID),
    "num_target_layers": Whole(1, MOST_LAYERS),
    "sliding_window_non_causal": Flag(),
    "is_causal": Flag(),
    "causal": Flag(),
    "use_swa": Flag(),
    "swa_window_size": POSITIONS,
    "sample_from_anchor": Flag(),
    "parallel_drafting": Flag(),
    "num_nextn_predict_layers": Whole(1, 64),
    "model_type": Text(64),
    "markov_rank": Whole(0, 1 << 16),
    "markov_head_type": Text(64),
    "enable_confidence_head": Flag(),
    "confidence_head_with_markov": Flag(),
    "confidence_head_alpha": Anything(),
    **dict.fromkeys(_ALWAYS, Anything()),
}
UNREAD = (
    *("bias", "fusion_bias", "speculators_version", "embed_requires_grad", "auto_map", "attention_mode"),
    *("num_anchors", "loss_decay_gamma", "ttt_length", "step_loss_decay", "draft_num_hidden_layers"),
    *("target_model_type", "parallel_draft_heads_num_layers"),
)
"""What tensors say as well, what the head was made with, and code that is not run here."""
HEAD_FIELDS = {*SETTINGS, *UNREAD} - {"model_type"}
"""Fields that are no fields of a model."""


def flat(raw: Any, origin: str) -> Fields:
    """A head's configuration, with what nested records say of the head beside its other fields.

    Raises:
        CorruptFile: A field stands in both, and says two things.
        UnsupportedModel: For a value that is not run here.
    """
    Record(dict.fromkeys(_NESTED, Record({}))).check(raw, origin)
    found = dict(raw)
    for nested in _NESTED:
        for name, value in (raw.get(nested) or {}).items():
            # These records name the layers that states leave, in both ways of writing.
            own = _LEFT if name == _ENTERED else name
            if value is not None and found.get(own) not in (None, value):
                raise CorruptFile(f"{origin}: {own} is {shown(found[own])}, and {nested} has {shown(value)}")
            found[own] = found.get(own) if value is None else value
    settings = Fields(found, origin, SETTINGS)
    refuse_others(settings)
    return settings


def refuse_others(settings: Fields) -> None:
    """Raise UnsupportedModel for a value of a head that is not run here."""
    for name, value in _ALWAYS.items():
        if settings.get(name, value) != value:
            raise settings.unsupported(name)


def verifier(settings: Fields) -> str:
    """The name of the model that a head was made for, "" where its folder names none."""
    found: str | None = ((settings.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return found or str(settings.get("target_model_name_or_path", ""))


def mask_token(settings: Fields, tokens: int) -> int:
    """The token that stands for one that is not known yet, of so many tokens."""
    found = next((each for name in _MASKS if (each := settings.get(name)) is not None), None)
    if found is None:
        raise CorruptFile(f"{settings.origin} has no field mask_token_id: the file is incomplete")
    if not 0 <= found < tokens:
        raise CorruptFile(f"{settings.origin}: mask_token_id = {found}, and tokens are 0 to {tokens - 1}")
    return int(found)


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
    entering = settings.get(_ENTERED) or settings.get("aux_hidden_state_layer_ids")
    leaving = settings.get(_LEFT)
    if not (entering or leaving) and layers and settings.get(SPECULATORS) is None:
        leaving = _spread(settings, layers)
    # speculators numbers the layers that states enter, the others those that they leave.
    left = [layer + 1 for layer in leaving or ()]
    if entering and left and entering != left:
        raise CorruptFile(f"{settings.origin}: {_ENTERED} names other states than {_LEFT}")
    # EAGLE-3 defaults to the states that enter layers 2, the middle one and the third from the end.
    return entering or left or [2, "half", -4]


def _spread(settings: Fields, layers: int) -> list[int]:
    """The layers of a target that a DFlash head of so many layers reads where its configuration names none."""
    target = settings.get("num_target_layers")
    if target is None:
        raise CorruptFile(f"{settings.origin}: neither target_layer_ids nor num_target_layers is given")
    if layers == 1:
        return [target // 2]
    return [round(1 + number * (target - 4) / (layers - 1)) for number in range(layers)]
