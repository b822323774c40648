"""Passes of families with states, latents and experts, on drawn weights of known shapes, beside llama.cpp.

    DECODERY_THREADS=2 python benchmarks/hybrid_passes.py --files DIR [NAME ...] [--rounds 5]

Models from GGUF files of random_gguf.py, which are written into DIR where they are missing, and models of int8 rows
made in memory: Qwen3-Next, Qwen3-30B-A3B and DeepSeek-V2-Lite with a vocabulary of 8,192 and few layers, and Gemma 4
E2B.
After a text of 16 tokens: milliseconds of passes of 1 to 16 rows, of a tree of 8 nodes in one pass, and of the chains
that the tree's leaves end, each a pass of its own; what the machine takes to read the bytes of one row's matrices, of
experts those that it takes. Of a file also tokens a second of plain decoding and rows a second of a prompt of 64, here
and in llama.cpp. Least milliseconds and greatest speeds of `rounds`, in which all alternate. Writes the rows of these
models in benchmarks/results/hybrid-passes.json; to be run on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np
import torch

import decodery
from decodery.core.native.kernels import library
from decodery.models.batch import Batch, Segment
from decodery.models.families.config_json import read_config
from decodery.models.loaders.fused_slots import TABLES, Slot, slots
from decodery.models.native.int8 import Int8Linear
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, TokenInputs, Weights
from decodery_benchmarks.peers.llama_cpp_server import LlamaCppServer
from decodery_benchmarks.results import begun_result, write_result
from llama_cpp_speed import ours, theirs
from random_gguf import WRITERS

RESULTS = Path(__file__).parent / "results" / "hybrid-passes.json"
FILES = ("qwen3.5-0.8B", "qwen3.5-4B", "lfm2-1.2B", "falcon-h1-0.5B", "granite-4-h-350M", "gpt-oss-layers")
_HEADS = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next", "num_hidden_layers": 2,
        "vocab_size": 8192, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, "full_attention_interval": 2, **_HEADS,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 3,
        "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "num_hidden_layers": 3,
        "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 10_944,
        "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text", "num_hidden_layers": 35,
        "vocab_size": 262_144, "hidden_size": 1536, "intermediate_size": 6144,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 8192,
    },
}  # fmt: skip
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3]
_DRAWN = 5_000_011
BEFORE, PROMPT, WRITTEN = 16, 64, 24
ROWS = (1, 2, 4, 8, 16)


def tensor(slot: Slot) -> Any:
    """Random numbers for a slot: int8 rows where it is a matrix."""
    if not slot.linear:
        ones = slot.name.endswith(("norm.weight", ".scale.weight"))
        return torch.ones(slot.shape) if ones else 0.1 * torch.randn(slot.shape)
    # Of many experts each is drawn from the same few million numbers, another part of them each time.
    drawn = torch.randint(-127, 128, (min(math.prod(slot.shape), _DRAWN),), dtype=torch.int8)
    weight = drawn.repeat(-(-math.prod(slot.shape) // len(drawn)))[: math.prod(slot.shape)].view(slot.shape)
    return Int8Linear(weight, torch.full(slot.shape[:1], 0.3 / 127 / slot.shape[1] ** 0.5))


def random_model(name: str) -> Transformer:
    config = read_config(SHAPES[name])
    parts: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
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


def file_bytes(path: Path) -> int:
    """Of all tensors of a file that a pass of one row reads, of experts those that it takes."""
    reader = gguf.GGUFReader(path)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    ends = ("expert_used_count", "expert_count")
    counts = {
        end: field.contents() for end in ends for name, field in reader.fields.items() if name.endswith(f".{end}")
    }
    found = 0
    for tensor in reader.tensors:
        if tensor.name != "token_embd.weight" or tied:
            size = int(tensor.n_bytes)
            found += size * counts[ends[0]] // counts[ends[1]] if "_exps." in tensor.name else size
    return found


def passes(model: LanguageModel, size: int, more: Callable[[], dict[str, float]], rounds: int) -> dict[str, Any]:
    """What passes take, and the greatest of what `more` measures in every round.

    Args:
        size: Bytes that a pass of one row reads.
    """
    cache, lib = model.new_cache(), library()
    assert lib is not None
    model.forward(Batch([Segment.chunk(np.arange(BEFORE), cache)]))
    cache.keep(range(BEFORE))

    def passed(mask: np.ndarray) -> float:
        """Seconds of a pass whose rows are then forgotten."""
        begin, positions = perf_counter(), BEFORE + mask.sum(axis=1) - 1
        model.forward(Batch([Segment(positions, tokens=np.arange(len(mask)), mask=mask, cache=cache)]))
        whole = perf_counter() - begin
        cache.truncate(BEFORE)
        return whole

    tree = mask_of(PARENTS)
    leaves = [node for node in range(len(PARENTS)) if node not in PARENTS]
    chains = [np.tri(int(tree[leaf].sum()), dtype=bool) for leaf in leaves]
    block = np.ones(min(size, 1 << 28), dtype=np.uint8)
    least, greatest = dict[str, float](), dict[str, float]()
    # The first round warms up.
    for number in range(rounds + 1):
        begin = perf_counter()
        lib.decodery_read(block.ctypes.data, block.nbytes)
        found = {"reading": (perf_counter() - begin) * size / block.nbytes}
        found |= {f"{rows} rows": passed(np.tri(rows, dtype=bool)) for rows in ROWS}
        found |= {"tree": passed(tree), f"{len(chains)} chains": sum(map(passed, chains))}
        speeds = more()
        if number:
            least = {name: min(value, least.get(name, value)) for name, value in found.items()}
            greatest = {name: max(value, greatest.get(name, value)) for name, value in speeds.items()}
    milliseconds = {name: round(1e3 * value, 2) for name, value in least.items()}
    speed = {name: round(value, 2) for name, value in greatest.items()}
    return {"bytes": size, "milliseconds": milliseconds, "tokens_per_s": speed}


def of_file(name: str, options: argparse.Namespace) -> dict[str, Any]:
    path = options.files / f"{name}.gguf"
    if not path.is_file():
        WRITERS[name](path)
    lm = decodery.load(str(path))
    prompt = [(7 * place + 11) % 4000 for place in range(PROMPT)]
    try:
        peer = LlamaCppServer(options.peer, path, torch.get_num_threads())
    except RuntimeError as error:
        print(error, flush=True)
        peer = None

    def speeds() -> dict[str, float]:
        both = {"ours": ours(lm, prompt, WRITTEN)}
        if peer is not None:
            both["llama.cpp"] = theirs(peer, prompt, WRITTEN)
        return {f"{what}, {who}": value for who, each in both.items() for what, value in each.items()}

    try:
        return passes(lm.model, file_bytes(path), speeds, options.rounds)
    finally:
        if peer is not None:
            peer.close()


def of_shape(name: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = random_model(name)
    found = passes(model, matrix_bytes(model), dict, options.rounds)
    return {"layers": model.config.num_layers} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*FILES, *SHAPES])}")
    parser.add_argument("--files", type=Path, required=True, help="a folder for GGUF files")
    parser.add_argument("--peer", default=sys.executable, help="an interpreter that has xllamacpp")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if wrong := {*options.names} - {*FILES, *SHAPES}:
        parser.error(f"no model is called {', '.join(sorted(wrong))}")
    options.files.mkdir(parents=True, exist_ok=True)
    command = f"DECODERY_THREADS={os.environ.get('DECODERY_THREADS', '')} {shlex.join(['python', *sys.argv])}"
    for name in options.names or [*FILES, *SHAPES]:
        begin, found = perf_counter(), (of_file if name in FILES else of_shape)(name, options)
        print(f"{name} {found} {perf_counter() - begin:.0f} s", flush=True)
        known = begun_result(RESULTS)["rows"] if RESULTS.is_file() else {}
        rows = {each: row for each, row in known.items() if each in (*FILES, *SHAPES)} | {name: found}
        write_result(RESULTS, {"command": command, "threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
