"""Passes of hybrids and of mixtures of experts on random weights: one row, and a tree against its chains.

    DECODERY_THREADS=2 python benchmarks/hybrid_passes.py [--model qwen3.5-0.8b] [--rounds 20] [--layers 24]

Models have the shape of Qwen3.5-0.8B, LFM2-1.2B and Gemma 4 E2B, and of Qwen3-Next, Qwen3-30B-A3B and
DeepSeek-V2-Lite with a vocabulary of 8,192 and few layers, and int8 rows made in memory. After a text of 64 tokens:
milliseconds of a pass of one row beside what the machine takes to read the same bytes, which are those of the experts
that the row takes; of a tree of 8 nodes in one pass; of the chains that the tree's leaves end, each a pass of its own
from the same text; and of one row and the tree where layers run one by one, in PyTorch with kernels for matrices. The
least of `rounds`, all in turns. Writes the row of the model in benchmarks/results/hybrid-passes.json; to be run on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch

from decodery.core.native.kernels import library
from decodery.models.batch import Batch, Segment
from decodery.models.families.config_json import read_config
from decodery.models.loaders.fused_slots import TABLES, Slot, slots
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, TokenInputs, Weights
from decodery_benchmarks.results import begun_result, write_result

RESULTS = Path(__file__).parent / "results" / "hybrid-passes.json"
_HEADS = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16,
        "linear_conv_kernel_dim": 4, "tie_word_embeddings": True, **_HEADS,
    },
    "qwen3-next": {
        "model_type": "qwen3_next", "vocab_size": 8192, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, "full_attention_interval": 2, **_HEADS,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 10_944,
        "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 1536, "intermediate_size": 6144,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 8192,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_word_embeddings": True,
    },
}  # fmt: skip
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3]
ONE = np.ones((1, 1), dtype=bool)
_DRAWN = 5_000_011
BEFORE = 64


def tensor(slot: Slot) -> Any:
    """Random numbers for a slot: int8 rows where it is a matrix."""
    if not slot.linear:
        ones = slot.name.endswith(("norm.weight", ".scale.weight"))
        return torch.ones(slot.shape) if ones else 0.1 * torch.randn(slot.shape)
    # Of many experts each is drawn from the same few million numbers, another part of them each time.
    drawn = torch.randint(-127, 128, (min(math.prod(slot.shape), _DRAWN),), dtype=torch.int8)
    weight = drawn.repeat(-(-math.prod(slot.shape) // len(drawn)))[: math.prod(slot.shape)].view(slot.shape)
    return Int8Linear(weight, torch.full(slot.shape[:1], 0.3 / 127 / slot.shape[1] ** 0.5))


def random_model(name: str, layers: int) -> Transformer:
    config = read_config(SHAPES[name] | {"num_hidden_layers": layers})
    parts: list[dict[str, Any]] = [{} for _ in range(layers)]
    whole: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for slot in slots(config):
        if slot.name == "embedding.weight":
            whole["embedding"] = torch.randn(slot.shape, dtype=torch.bfloat16)
        elif slot.name.startswith("inputs.0."):
            table = slot.name in TABLES
            inputs[slot.name.split(".")[2]] = Dense(torch.randn(slot.shape).bfloat16()) if table else tensor(slot)
        elif slot.name.startswith("layers."):
            _, layer, name = slot.name.removesuffix(".weight").split(".")
            parts[int(layer)][name] = tensor(slot)
        else:
            whole[slot.name.removesuffix(".weight")] = tensor(slot)
    whole["inputs"] = [TokenInputs(**inputs)] if inputs else []
    return Transformer(config, Weights(layers=[Layer(**each) for each in parts], **whole))


def layer_by_layer(model: Transformer) -> Transformer:
    """The same weights without the one native pass: the kernels multiply, all else is PyTorch."""
    with mock.patch("decodery.models.torch.transformer.runs_natively", lambda config: False):
        return Transformer(model.config, model.weights)


def matrix_bytes(model: Transformer) -> int:
    """Of all matrices that a pass of one row reads, of experts those that it takes."""
    config, found = model.config, model.weights.head.weight.nbytes  # type: ignore[attr-defined]
    found += sum(inputs.projection.weight.nbytes for inputs in model.weights.inputs)  # type: ignore[attr-defined]
    for layer in model.weights.layers:
        found += 0 if layer.heads_up is None else layer.heads_up.nbytes
        for name, part in vars(layer).items():
            if isinstance(part, Int8Linear):
                routed = layer.router is not None and name in ("gate_up", "down")
                found += (
                    part.weight.nbytes * config.experts_per_token // config.experts if routed else part.weight.nbytes
                )
    return int(found)


def mask_of(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = random_model(options.model, options.layers)
    both = {"": model, " layer by layer": layer_by_layer(model)}
    caches = {name: each.new_cache() for name, each in both.items()}
    for name, cache in caches.items():
        both[name].forward(Batch([Segment.chunk(np.arange(BEFORE), cache)]))
        cache.keep(range(BEFORE))

    def passed(mask: np.ndarray, name: str = "") -> float:
        """Seconds of a pass whose rows are then forgotten."""
        begin, cache = perf_counter(), caches[name]
        positions = BEFORE + mask.sum(axis=1) - 1
        both[name].forward(Batch([Segment(positions, tokens=np.arange(len(mask)), mask=mask, cache=cache)]))
        whole = perf_counter() - begin
        cache.truncate(BEFORE)
        return whole

    tree = mask_of(PARENTS)
    leaves = [node for node in range(len(PARENTS)) if node not in PARENTS]
    chains = [np.tri(int(tree[leaf].sum()), dtype=bool) for leaf in leaves]
    size, lib = matrix_bytes(model), library()
    assert lib is not None
    block = np.ones(min(size, 1 << 28), dtype=np.uint8)
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        begin = perf_counter()
        lib.decodery_read(block.ctypes.data, block.nbytes)
        found = {"reading the matrices": (perf_counter() - begin) * size / block.nbytes}
        for name in both:
            found |= {f"one row{name}": passed(ONE, name), f"tree of 8{name}": passed(tree, name)}
        found |= {f"its {len(chains)} chains": sum(passed(chain) for chain in chains)}
        best = {name: min(value, best.get(name, value)) for name, value in found.items()}
    least = {name: round(1e3 * value, 2) for name, value in best.items()}
    for name, value in least.items():
        print(f"{name}: {value} ms", flush=True)
    command = f"DECODERY_THREADS={os.environ.get('DECODERY_THREADS', '')} {shlex.join(['python', *sys.argv])}"
    known = begun_result(RESULTS)["rows"]
    rows = {name: row for name, row in known.items() if name in SHAPES}
    rows[options.model] = {"layers": options.layers, "matrix_bytes": size, "milliseconds": least, "command": command}
    write_result(RESULTS, {"command": command, "rows": rows})


if __name__ == "__main__":
    main()
