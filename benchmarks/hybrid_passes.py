"""Passes of a hybrid of Gated DeltaNet and attention on random weights: one row, and a tree against its chains.

    DECODERY_THREADS=2 python benchmarks/hybrid_passes.py [--rounds 20] [--layers 24]

The shape is that of Qwen3.5-0.8B, weights int8 rows made in memory, after a text of 64 tokens. Milliseconds of a pass
of one row beside what the machine takes to read the same bytes; of a tree of 8 nodes in one pass; and of the chains
that the tree's leaves end, each a pass of its own from the same text. The least of `rounds`, all in turns.
Writes benchmarks/results/hybrid-passes.json; to be run on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decodery.core.native.kernels import library
from decodery.models.batch import Batch, Segment
from decodery.models.families.config_json import read_config
from decodery.models.loaders.fused_slots import Slot, slots
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Layer, Weights
from decodery_benchmarks.results import write_result

RESULTS = Path(__file__).parent / "results" / "hybrid-passes.json"
SHAPE = {
    "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3]
BEFORE = 64


def tensor(slot: Slot) -> Any:
    """Random numbers for a slot: int8 rows where it is a matrix."""
    if not slot.linear:
        norm = slot.name.endswith("norm.weight")
        return torch.ones(slot.shape) if norm else 0.1 * torch.randn(slot.shape)
    weight = torch.randint(-127, 128, slot.shape, dtype=torch.int8)
    return Int8Linear(weight, torch.full(slot.shape[:1], 0.3 / 127 / slot.shape[1] ** 0.5))


def random_model(layers: int) -> Transformer:
    config = read_config(SHAPE | {"num_hidden_layers": layers})
    parts: list[dict[str, Any]] = [{} for _ in range(layers)]
    whole: dict[str, Any] = {}
    for slot in slots(config):
        if slot.name == "embedding.weight":
            whole["embedding"] = torch.randn(slot.shape, dtype=torch.bfloat16)
        elif slot.name.startswith("layers."):
            _, layer, name = slot.name.removesuffix(".weight").split(".")
            parts[int(layer)][name] = tensor(slot)
        else:
            whole[slot.name.removesuffix(".weight")] = tensor(slot)
    return Transformer(config, Weights(layers=[Layer(**each) for each in parts], **whole))


def matrix_bytes(model: Transformer) -> int:
    """Of all matrices, which a pass reads once."""
    linears = [part for layer in model.weights.layers for part in vars(layer).values() if isinstance(part, Int8Linear)]
    return sum(each.weight.nbytes for each in (*linears, model.weights.head))  # type: ignore[attr-defined]


def mask_of(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = random_model(options.layers)
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(np.arange(BEFORE), cache)]))
    cache.keep(range(BEFORE))

    def passed(mask: np.ndarray) -> float:
        """Seconds of a pass whose rows are then forgotten."""
        begin = perf_counter()
        positions = BEFORE + mask.sum(axis=1) - 1
        model.forward(Batch([Segment(positions, tokens=np.arange(len(mask)), mask=mask, cache=cache)]))
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
        read = (perf_counter() - begin) * size / block.nbytes
        one, branched = passed(np.ones((1, 1), dtype=bool)), passed(tree)
        apart = sum(passed(chain) for chain in chains)
        found = {"reading the matrices": read, "one row": one, "tree of 8": branched}
        found |= {f"its {len(chains)} chains": apart}
        best = {name: min(value, best.get(name, value)) for name, value in found.items()}
    rows = {name: {"milliseconds": round(1e3 * value, 2)} for name, value in best.items()}
    for name, row in rows.items():
        print(f"{name}: {row['milliseconds']} ms", flush=True)
    command = f"DECODERY_THREADS=2 {shlex.join(['python', *sys.argv])}"
    write_result(RESULTS, {"command": command, "layers": options.layers, "matrix_bytes": size, "rows": rows})


if __name__ == "__main__":
    main()
