"""Whether the numbers of a configuration fit together."""

from __future__ import annotations

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import MOST_STREAMS, ModelConfig


def check_config(config: ModelConfig, origin: str) -> None:
    """Raise CorruptFile if numbers of a configuration that was read from `origin` are inconsistent."""
    if (not config.head_shapes and config.num_heads % config.num_kv_heads) or config.head_dim % 2:
        raise CorruptFile(
            f"{origin}: {config.num_heads} heads of {config.head_dim} do not fit {config.num_kv_heads} key-value heads"
        )
    if len(config.sliding_layers) != config.num_layers or (
        config.sliding_window is None and any(config.sliding_layers)
    ):
        raise CorruptFile(f"{origin}: the sliding layers do not fit {config.num_layers} layers")
    if config.local_rope_layers and (len(config.local_rope_layers) != config.num_layers or config.local_rope is None):
        raise CorruptFile(f"{origin}: the layers with a rotation of their own do not fit {config.num_layers} layers")
    _check_layers(config, origin)
    if list(config.exits) != sorted({each for each in config.exits if 0 < each <= config.num_layers}):
        raise CorruptFile(f"{origin}: exits should ascend from 1 to {config.num_layers}, not {list(config.exits)}")
    if not 0 <= config.experts_per_token <= config.experts or (config.experts and not config.experts_per_token):
        raise CorruptFile(f"{origin}: {config.experts_per_token} of {config.experts} experts cannot be taken")
    if groups := config.expert_groups:
        fits = config.experts % groups == 0 and config.experts // groups > 1 and 0 < config.taken_groups <= groups
        fits = fits and 0 < config.group_best <= config.experts // groups
        if not fits or config.experts_per_token > config.experts // groups * config.taken_groups:
            raise CorruptFile(f"{origin}: {config.taken_groups} of {groups} groups of experts cannot be taken")
    if config.experts_floor and (len(config.experts_floor) != config.num_layers or not config.experts):
        raise CorruptFile(f"{origin}: floors of experts do not fit {config.num_layers} layers")
    if len(config.dense_layers) not in (0, config.num_layers) or (any(config.dense_layers) and not config.dense_inner):
        raise CorruptFile(f"{origin}: the dense layers do not fit {config.num_layers} layers")
    if config.temperature is not None and not config.temperature.length:
        raise CorruptFile(f"{origin}: the length after which queries grow should be above 0")
    if (latent := config.latent) is not None and (
        config.num_kv_heads != 1 or config.head_dim != latent.rank + latent.turned or latent.turned % 2
    ):
        raise CorruptFile(f"{origin}: latents of {latent.rank} and {latent.turned} numbers do not fit the heads")
    if not 0 <= config.kept_tokens <= config.vocab_size:
        raise CorruptFile(f"{origin}: {config.kept_tokens} of {config.vocab_size} tokens cannot be kept")
    for id in (*config.eos_ids, *(() if config.bos_id is None else (config.bos_id,))):
        if not 0 <= id < config.vocab_size:
            raise CorruptFile(
                f"{origin}: the token {id} begins or ends texts, and there are {config.vocab_size} tokens"
            )
    if config.mask_id is not None and not 0 <= config.mask_id < config.vocab_size:
        raise CorruptFile(f"{origin}: the mask token is {config.mask_id}, and there are {config.vocab_size} tokens")
    if (states := config.states) is not None and (
        states.heads % states.groups or states.inner % states.groups or len(config.state_layers) != config.num_layers
    ):
        raise CorruptFile(f"{origin}: {states.groups} groups do not fit {states.heads} states, or the layers do not")
    if (channels := config.selective) is not None and (channels.head_dim, channels.groups) != (1, 1):
        raise CorruptFile(f"{origin}: channels of {channels.head_dim} numbers in {channels.groups} groups are none")
    for marked in (config.mixing_layers, config.mlp_layers):
        if len(marked) not in (0, config.num_layers):
            raise CorruptFile(f"{origin}: the layers of each kind do not fit {config.num_layers} layers")
    if sum(each is not None for each in (config.mamba, config.selective, config.delta)) + bool(config.gated_conv) > 1:
        raise CorruptFile(f"{origin}: layers of one model keep states, or convolutions, of one kind")
    if bool(config.gated_conv) != bool(config.conv_layers) or len(config.conv_layers) not in (0, config.num_layers):
        raise CorruptFile(f"{origin}: the layers that convolve do not fit {config.num_layers} layers")
    if config.attending_layers and (
        len(config.attending_layers) != len(config.state_layers)
        or any(
            attends and not state for attends, state in zip(config.attending_layers, config.state_layers, strict=True)
        )
    ):
        raise CorruptFile(f"{origin}: layers that attend beside their state should be among the recurrent ones")
    others = (layer for layer in range(config.num_layers) if config.recurrent(layer) or config.convolves(layer))
    if any(config.window(layer) and not config.attends_too(layer) for layer in others):
        raise CorruptFile(f"{origin}: the sliding layers should be among those that attend")
    if config.shared is not None and len(config.sharing) < config.shared.blocks:
        raise CorruptFile(f"{origin}: {config.shared.blocks} blocks are shared by {len(config.sharing)} layers")
    if config.short_conv is not None and (config.states is not None or config.latent is not None):
        raise CorruptFile(f"{origin}: convolutions of queries, keys and values do not fit layers that have none")
    for rope in (config.rope, config.local_rope):
        if rope is not None and rope.rotated > config.head_dim:
            raise CorruptFile(f"{origin}: {rope.rotated} dimensions of heads of {config.head_dim} cannot be turned")
        if rope is not None and rope.rotated % 2:
            raise UnsupportedModel(f"{origin}: {rope.rotated} dimensions of a head are turned, which are not pairs")
        if rope is not None and rope.kind == "llama3" and rope.low_freq_factor > rope.high_freq_factor:
            raise CorruptFile(f"{origin}: low_freq_factor should not be above high_freq_factor")
        if rope is not None and rope.kind == "factors" and len(rope.factors) != (rope.rotated or config.head_dim) // 2:
            raise CorruptFile(f"{origin}: {len(rope.factors)} frequencies do not fit heads of {config.head_dim}")


def _check_layers(config: ModelConfig, origin: str) -> None:
    """Whether what layers have of their own fits."""
    for each in (config.head_shapes, config.inners, config.sparsity):
        if len(each) not in (0, config.num_layers):
            raise CorruptFile(f"{origin}: {len(each)} values do not fit {config.num_layers} layers")
    for shape in config.head_shapes:
        fits = len(shape) == 2 and config.num_heads % shape[0] == 0 and shape[1] % 2 == 0
        if not fits or shape[0] * shape[1] > config.num_kv_heads * config.head_dim or shape[1] > config.head_dim:
            raise CorruptFile(f"{origin}: key-value heads {list(shape)} do not fit {config.num_heads} heads")
    shapes = config.head_shapes or config.reused_layers or config.inners or config.keys_as_values
    shapes = shapes or config.experts_beside
    if (shapes or config.layer_inputs or config.layer_scales or config.sparsity) and not config.unit_values:
        raise CorruptFile(f"{origin}: layers have shapes or inputs of their own, and values that are not normed")
    own = config.num_layers - config.reused_layers
    if own < 1 or not {*config.sliding_layers[own:]} <= {*config.sliding_layers[:own]}:
        raise CorruptFile(f"{origin}: no layer has the keys that the last {config.reused_layers} layers read")
    if config.layer_inputs and not config.layer_tokens:
        raise CorruptFile(f"{origin}: layers read {config.layer_inputs} numbers of tokens, and no token has any")
    if any(not 0.0 <= share < 1.0 for share in config.sparsity):
        raise CorruptFile(f"{origin}: the share of gates that are shut should be below 1")
    if (streams := config.alternating) is not None and not (
        1 < streams.streams <= MOST_STREAMS and streams.active < streams.streams and config.layer_inputs
    ):
        raise CorruptFile(
            f"{origin}: {streams.streams} streams, of which layers read number {streams.active}, do not fit"
        )
