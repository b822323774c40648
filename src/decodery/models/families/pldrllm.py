"""PLDR-LLM checkpoints as their authors publish them: a folder of config.json, safetensors and tokenizer.json.

Their heads turn neighbours, where this package turns dimension i together with i + head_dim / 2. Operators stand
between two turned vectors, so that all that makes them is brought into the other order as queries and keys are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from decodery.core.errors import CorruptFile

from ..config import EPS, HEAD_DIM, HEADS, LAYERS, POSITIONS, THETA, TOKENS, WIDTH, ModelConfig, Rope
from ..loaders.fields import Anything, Fields, Flag, Kind, Text, Whole, read_json
from ..loaders.folder import read_texts
from ..loaders.shards import Shards
from ..tokenizers.tokenizer import Tokenizer
from ..torch.power_law import OperatorNets, PowerLaw
from ..torch.transformer import Transformer
from ..torch.weights import Dense, Layer, Weights
from .config_json import TOKEN_IDS, token_ids

FAMILY = "pldrllm"
_EPS = 1e-6
_CONFIG: dict[str, Kind] = {
    "model_type": Text(64),
    "vocab_size": TOKENS,
    **dict.fromkeys(("hidden_size", "intermediate_size", "A_dff"), WIDTH),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    **dict.fromkeys(("num_reslayerA", "num_denseA"), Whole(1, 64)),
    "max_position_embeddings": POSITIONS,
    "rope_theta": THETA,
    "layer_norm_eps": EPS,
    "hidden_act": Text(64),
    **dict.fromkeys(("attention_bias", "glu_bias", "final_bias", "reference_rope", "tie_word_embeddings"), Flag()),
    **dict.fromkeys(("custom_G_type", "rope_scaling"), Anything()),
    "bos_token_id": TOKEN_IDS,
    "eos_token_id": TOKEN_IDS,
}
_FIXED = {"hidden_act": "silu", "layer_norm_eps": _EPS, "tie_word_embeddings": False} | dict.fromkeys(
    ("attention_bias", "glu_bias"), True
)
"""What all published ones have alike; nothing else is run here."""


def read_pldr(folder: str | Path) -> tuple[PowerLaw, Tokenizer]:
    """The model of a published folder in float32, with what makes its operators, and its tokenizer.

    Of a model that comes with operators in their place (`custom_G_type`), or whose positions are stretched, nothing is
    read.

    Raises:
        CorruptFile, UnsupportedModel: With a sentence.
    """
    at = Path(folder).expanduser()
    origin = str(at / "config.json")
    fields = Fields(read_json(at / "config.json"), origin, _CONFIG)
    if fields.need("model_type") != FAMILY:
        raise fields.unsupported("model_type")
    for name in ("custom_G_type", "rope_scaling"):
        if fields.get(name) is not None:
            raise fields.unsupported(name)
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            raise fields.unsupported(name)
    config = _config(fields)
    shards = Shards(at)
    read = _Reader(config, lambda name: shards.tensor(name).float(), fields.get("reference_rope", True))
    model = Transformer(config, read.weights(fields.get("final_bias", True)))
    units, depth = fields.get("num_reslayerA", 8), fields.get("num_denseA", 2)
    nets = OperatorNets(read.nets(units, depth, fields.get("A_dff", 170)), units, depth)
    shards.refuse_rest(FAMILY)
    shards.close()
    backend, facts = read_texts(at)
    tokenizer = Tokenizer(backend, bos_id=config.bos_id, eos_ids=facts.eos_ids or config.eos_ids)
    config = dataclasses.replace(config, eos_ids=tokenizer.eos_ids, vocabulary=tokenizer.fingerprint())
    return PowerLaw(Transformer(config, model.weights), nets), tokenizer


def _config(fields: Fields) -> ModelConfig:
    heads, dim, hidden = (fields.need(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    if heads * dim != hidden or dim % 2:
        raise CorruptFile(f"{fields.origin}: {heads} heads of {dim} do not make a width of {hidden}")
    begins = token_ids(fields.get("bos_token_id", 2))
    return ModelConfig(
        vocab_size=fields.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.need("intermediate_size"),
        num_layers=fields.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        max_positions=fields.get("max_position_embeddings", 1024),
        family="pldr",
        rope=Rope(theta=fields.get("rope_theta", 10_000.0)),
        norm_eps=_EPS,
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_scale=hidden**0.5,
        bos_id=begins[0] if begins else None,
        eos_ids=token_ids(fields.get("eos_token_id", 3)),
        centred_norms=True,
        joined_norms=True,
    )


class _Reader:
    """Takes tensors of a checkpoint, checked for their shapes, in this package's order.

    neighbours: whether the checkpoint turns neighbours.
    """

    def __init__(self, config: ModelConfig, tensor: Callable[[str], torch.Tensor], neighbours: bool) -> None:
        self.config, self.tensor = config, tensor
        places = torch.arange(config.head_dim, device="cpu")
        self.order = places.view(-1, 2).T.flatten() if neighbours else places

    def part(self, name: str, *shape: int) -> torch.Tensor:
        found = self.tensor(name)
        if tuple(found.shape) != shape:
            raise CorruptFile(f"the tensor {name} has shape {list(found.shape)} in place of {list(shape)}")
        return found

    def norm(self, name: str, size: int, order: torch.Tensor | None = None) -> torch.Tensor:
        """[2 size] scale and shift."""
        pair = [self.part(f"{name}.{each}", size) for each in ("weight", "bias")]
        return torch.cat(pair if order is None else [each[order] for each in pair])

    def dense(self, inputs: int, outputs: int, *names: str) -> Dense:
        """Layers of the same shape, one after the other."""
        weight = torch.cat([self.part(f"{name}.weight", outputs, inputs) for name in names])
        return Dense(weight, torch.cat([self.part(f"{name}.bias", outputs) for name in names]))

    def turned(self, dense: Dense) -> Dense:
        """Queries, keys and values, of which the first two are brought into the other order in every head."""
        config = self.config
        heads = torch.arange(2 * config.num_heads, device="cpu")[:, None] * config.head_dim
        values = torch.arange(2 * config.hidden_size, 3 * config.hidden_size, device="cpu")
        rows = torch.cat(((heads + self.order).flatten(), values))
        assert dense.bias is not None
        return Dense(dense.weight[rows], dense.bias[rows])

    def weights(self, bias: bool) -> Weights:
        """All but what makes operators. bias: whether the head has one."""
        config = self.config
        hidden, inner, tokens = config.hidden_size, config.intermediate_size, config.vocab_size
        layers = []
        for index in range(config.num_layers):
            at = f"decoder.dec_layers.{index}."
            layers.append(
                Layer(
                    attention_norm=self.norm(f"{at}layernorm1", hidden),
                    qkv=self.turned(self.dense(hidden, hidden, *(f"{at}mha1.w{name}" for name in "qkv"))),
                    output=self.dense(hidden, hidden, f"{at}mha1.dense"),
                    mlp_norm=self.norm(f"{at}layernorm2", hidden),
                    gate_up=self.dense(hidden, inner, f"{at}ffn.gluw1", f"{at}ffn.gluw2"),
                    down=self.dense(inner, hidden, f"{at}ffn.gluw3"),
                )
            )
        head = Dense(
            self.part("final_layer.weight", tokens, hidden), self.part("final_layer.bias", tokens) if bias else None
        )
        table = self.part("decoder.embedding.weight", tokens, hidden)
        return Weights(table, layers, self.norm("decoder.layernorm1", hidden), head)

    def nets(self, units: int, depth: int, inner: int) -> dict[str, torch.Tensor]:
        """What makes operators; see `OperatorNets`."""
        dim, heads, order = self.config.head_dim, self.config.num_heads, self.order
        found = {}
        for index in range(self.config.num_layers):
            at = f"decoder.dec_layers.{index}.mha1."
            found[f"{index}.density"] = self.norm(f"{at}layernorm1", dim, order)
            for unit in range(units):
                of = f"{at}reslayerAs.{unit}."
                found[f"{index}.{unit}.norm"] = self.norm(f"{of}layernormA", dim, order)
                for number in range(depth):
                    gated, name = f"{of}denseAs.{number}.gluw", f"{index}.{unit}.{number}."
                    up, down = self.dense(dim, inner, f"{gated}1", f"{gated}2"), self.dense(inner, dim, f"{gated}3")
                    assert up.bias is not None and down.bias is not None
                    found |= {f"{name}gate_up": up.weight[:, order], f"{name}gate_up_bias": up.bias}
                    found |= {f"{name}down": down.weight[order], f"{name}down_bias": down.bias[order]}
            for name, theirs in _SQUARES.items():
                square = self.part(f"{at}plgatt_layer.{theirs}", heads, dim, dim)
                found[f"{index}.{name}"] = square[:, order][:, :, order]
        return found


_SQUARES = {"weight": "Wlst", "bias": "blst", "power": "pwlst", "coupling": "alst", "offset": "balst"}
"""By what `OperatorNets` calls them."""
