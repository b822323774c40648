"""GGUF files of the exact shapes of known models with drawn weights, for speed, memory and load alone.

    python benchmarks/random_gguf.py 0.5B DIR/qwen-shaped-0.5B.gguf
    python benchmarks/random_gguf.py 1.5B DIR/qwen-shaped-1.5B.gguf
    python benchmarks/random_gguf.py qwen3.5-0.8B DIR/qwen3.5-shaped-0.8B.gguf
    python benchmarks/random_gguf.py qwen3.5-4B DIR/qwen3.5-shaped-4B.gguf
    python benchmarks/random_gguf.py lfm2-1.2B DIR/lfm2-shaped-1.2B.gguf
    python benchmarks/random_gguf.py gpt-oss-layers DIR/gpt-oss-shaped.gguf
    python benchmarks/random_gguf.py falcon-h1-0.5B DIR/falcon-h1-shaped-0.5B.gguf
    python benchmarks/random_gguf.py granite-4-h-350M DIR/granite-4-h-shaped-350M.gguf

The first two are Qwen2.5's; gpt-oss-layers has two layers of gpt-oss-20b, with a small vocabulary.

Types of blocks are those that llama.cpp's Q4_K_M gives these shapes: rows of 896 inputs, which 256 does not divide,
fall back to Q5_0 and Q8_0. Numbers of blocks are drawn, and scales give weights a mean of zero and a spread
like trained ones. What such a model writes means nothing: no perplexity, no share of drafts that come true.
The vocabulary is the embedded model's, filled up to as many tokens and merges as Qwen2.5 has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.loaders.package_index import pull

TOKENS, MERGES = 151_936, 151_387
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """hidden, inner: widths of the stream and of the MLP; whole: whether 256 divides `hidden`."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def whole(self) -> bool:
        return self.hidden % 256 == 0


SHAPES = {"0.5B": Shape(896, 4864, 24, 14, 2), "1.5B": Shape(1536, 8960, 28, 12, 2)}


def blocks(random: np.random.Generator, kind: Kind, rows: int, inputs: int, spread: float = 0.02) -> np.ndarray:
    """[rows, bytes] of a type: drawn numbers, and scales that give weights of this spread."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)

    def half(at: int, value: float) -> None:
        raw[..., at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if kind == Kind.Q4_K:
        # Mean of the 6-bit steps 31.5, of the numbers 7.5: the least values take their product away.
        half(0, spread / (36 * 4.6))
        half(2, 7.5 * spread / (36 * 4.6))
    elif kind == Kind.Q6_K:
        half(208, spread / (74 * 18.5))
    elif kind == Kind.Q5_0:
        half(0, spread / 9.2)
    elif kind == Kind.Q8_0:
        half(0, spread / 73.9)
    elif kind == Kind.MXFP4:
        # An exponent alone; the numbers' spread is 2.7.
        raw[..., 0] = 127 + round(np.log2(spread / 2.7))
    else:
        raise ValueError(f"no scales are known for {kind.name}")
    return raw.reshape(rows, -1)


def write(path: Path, shape: Shape, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_name(path.stem)
    writer.add_block_count(shape.layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(15)
    _vocabulary(writer)
    hidden, inner = shape.hidden, shape.inner
    values = shape.kv_heads * (hidden // shape.heads)
    few, more, most = (Kind.Q4_K, Kind.Q4_K, Kind.Q6_K) if shape.whole else (Kind.Q5_0, Kind.Q5_0, Kind.Q8_0)

    def add(name: str, kind: Kind, rows: int, inputs: int) -> None:
        writer.add_tensor(name, blocks(random, kind, rows, inputs), raw_dtype=kind)

    add("token_embd.weight", Kind.Q6_K if shape.whole else Kind.Q8_0, TOKENS, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        # Half of the layers keep values and what comes down in more bits: the first and last eighth, and every third.
        eighth = shape.layers // 8
        fine = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        add(f"{prefix}attn_q.weight", few, hidden, hidden)
        add(f"{prefix}attn_k.weight", few, values, hidden)
        add(f"{prefix}attn_v.weight", most if fine else more, values, hidden)
        add(f"{prefix}attn_output.weight", few, hidden, hidden)
        add(f"{prefix}ffn_gate.weight", few, inner, hidden)
        add(f"{prefix}ffn_up.weight", few, inner, hidden)
        add(f"{prefix}ffn_down.weight", Kind.Q6_K if fine else Kind.Q4_K, hidden, inner)
        for name, size in (("attn_q", hidden), ("attn_k", values), ("attn_v", values)):
            writer.add_tensor(f"{prefix}{name}.bias", random.normal(0, 0.1, size).astype(np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _begun(path: Path, family: str, tokens: int, **sizes: float | list[int]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_name(path.stem)
    writer.add_context_length(32_768)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_file_type(15)
    _vocabulary(writer, tokens)
    return writer


def _written(
    writer: gguf.GGUFWriter,
    random: np.random.Generator,
    matrices: dict[str, tuple[Kind, tuple[int, ...]]],
    vectors: dict[str, tuple[float, tuple[int, ...]]],
) -> None:
    """Matrices of blocks, and vectors of one number each with noise, and the file closed."""
    for name, (kind, shape) in matrices.items():
        drawn = blocks(random, kind, int(np.prod(shape[:-1])), shape[-1])
        writer.add_tensor(f"{name}.weight", drawn.reshape(*shape[:-1], -1), raw_dtype=kind)
    for name, (mean, shape) in vectors.items():
        writer.add_tensor(name, (mean + random.normal(0, 0.02, shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _mlp(prefix: str, layer: int, inner: int, hidden: int) -> dict[str, tuple[Kind, tuple[int, ...]]]:
    down = Kind.Q4_K if layer % 2 else Kind.Q6_K
    found = {f"{prefix}ffn_{half}": (Kind.Q4_K, (inner, hidden)) for half in ("gate", "up")}
    return found | {f"{prefix}ffn_down": (down, (hidden, inner))}


def write_qwen35(path: Path, *, hidden: int, layers: int, inner: int, heads: int, kv_heads: int, values: int) -> None:
    """Qwen3.5: three Gated DeltaNet layers of 16 key heads and `values` value heads, one that attends, and so on."""
    dim, keys, size = 256, 16, 128
    mixed = (2 * keys + values) * size
    writer = _begun(
        path, "qwen35", 248_320, block_count=layers, embedding_length=hidden, feed_forward_length=inner,
        head_count=heads, head_count_kv=kv_heads, key_length=dim, value_length=dim, ssm_conv_kernel=4,
        ssm_state_size=size, ssm_group_count=keys, ssm_time_step_rank=values, ssm_inner_size=values * size,
        full_attention_interval=4, rope_dimension_count=dim // 4, rope_dimension_sections=[11, 11, 10, 0],
        rope_freq_base=10_000_000,
    )  # fmt: skip
    matrices: dict[str, tuple[Kind, tuple[int, ...]]] = {"token_embd": (Kind.Q6_K, (248_320, hidden))}
    vectors: dict[str, tuple[float, tuple[int, ...]]] = {"output_norm.weight": (1.0, (hidden,))}
    for layer in range(layers):
        at = f"blk.{layer}."
        sizes = {"attn_q": 2 * heads * dim, "attn_k": kv_heads * dim, "attn_v": kv_heads * dim}
        if (layer + 1) % 4:
            sizes = {"attn_qkv": mixed, "attn_gate": values * size, "ssm_beta": values, "ssm_alpha": values}
            matrices[f"{at}ssm_out"] = (Kind.Q4_K, (hidden, values * size))
            vectors |= {f"{at}ssm_conv1d.weight": (0.3, (mixed, 4)), f"{at}ssm_dt.bias": (1.0, (values,))}
            vectors |= {f"{at}ssm_a": (-1.0, (values,)), f"{at}ssm_norm.weight": (1.0, (size,))}
        else:
            matrices[f"{at}attn_output"] = (Kind.Q4_K, (hidden, heads * dim))
            vectors |= {f"{at}attn_{each}_norm.weight": (1.0, (dim,)) for each in "qk"}
        matrices |= {f"{at}{name}": (Kind.Q4_K, (rows, hidden)) for name, rows in sizes.items()}
        matrices |= _mlp(at, layer, inner, hidden)
        vectors |= {f"{at}{name}.weight": (1.0, (hidden,)) for name in ("attn_norm", "post_attention_norm")}
    _written(writer, np.random.default_rng(0), matrices, vectors)


def write_lfm2(path: Path) -> None:
    """LFM2-1.2B: convolutions between gates, and six layers that attend."""
    hidden, inner, dim, kv_heads, attending = 2048, 8192, 64, 8, (2, 5, 8, 10, 12, 14)
    writer = _begun(
        path, "lfm2", 65_536, block_count=16, embedding_length=hidden, feed_forward_length=inner, head_count=32,
        head_count_kv=[kv_heads * (layer in attending) for layer in range(16)], shortconv_l_cache=3,
        rope_freq_base=1_000_000,
    )  # fmt: skip
    matrices: dict[str, tuple[Kind, tuple[int, ...]]] = {"token_embd": (Kind.Q6_K, (65_536, hidden))}
    vectors: dict[str, tuple[float, tuple[int, ...]]] = {"token_embd_norm.weight": (1.0, (hidden,))}
    for layer in range(16):
        at = f"blk.{layer}."
        sizes = {"attn_q": hidden, "attn_k": kv_heads * dim, "attn_v": kv_heads * dim, "attn_output": hidden}
        if layer in attending:
            vectors |= {f"{at}attn_{each}_norm.weight": (1.0, (dim,)) for each in "qk"}
        else:
            sizes = {"shortconv.in_proj": 3 * hidden, "shortconv.out_proj": hidden}
            vectors[f"{at}shortconv.conv.weight"] = (0.3, (hidden, 3))
        matrices |= {f"{at}{name}": (Kind.Q4_K, (rows, hidden)) for name, rows in sizes.items()}
        matrices |= _mlp(at, layer, inner, hidden)
        vectors |= {f"{at}{name}.weight": (1.0, (hidden,)) for name in ("attn_norm", "ffn_norm")}
    _written(writer, np.random.default_rng(0), matrices, vectors)


def _mamba(at: str, hidden: int, inner: int, heads: int, state: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Matrices and vectors of a Mamba-2 layer with one group."""
    wide = inner + 2 * state
    matrices = {
        f"{at}ssm_in": (Kind.Q4_K, (inner + wide + heads, hidden)),
        f"{at}ssm_out": (Kind.Q4_K, (hidden, inner)),
    }
    vectors = {f"{at}ssm_conv1d.weight": (0.3, (wide, 4)), f"{at}ssm_conv1d.bias": (0.0, (wide,))}
    vectors |= {f"{at}ssm_dt.bias": (1.0, (heads,)), f"{at}ssm_a": (-1.0, (heads, 1)), f"{at}ssm_d": (1.0, (heads, 1))}
    return matrices, vectors


def write_falcon_h1(path: Path) -> None:
    """Falcon-H1-0.5B: every layer attends and keeps a state."""
    hidden, layers, inner, states, heads, state, dim = 1024, 36, 2048, 1536, 24, 128, 64
    writer = _begun(
        path, "falcon-h1", 32_784, block_count=layers, embedding_length=hidden, feed_forward_length=inner, head_count=8,
        head_count_kv=2, key_length=dim, value_length=dim, vocab_size=32_784, ssm_conv_kernel=4, ssm_state_size=state,
        ssm_group_count=1, ssm_time_step_rank=heads, ssm_inner_size=states, rope_freq_base=1e11,
    )  # fmt: skip
    table = Kind.Q6_K, (32_784, hidden)
    matrices: dict[str, tuple[Kind, tuple[int, ...]]] = {"token_embd": table, "output": table}
    vectors: dict[str, tuple[float, tuple[int, ...]]] = {"output_norm.weight": (1.0, (hidden,))}
    for layer in range(layers):
        at = f"blk.{layer}."
        sizes = {"attn_q": 8 * dim, "attn_k": 2 * dim, "attn_v": 2 * dim}
        matrices |= {f"{at}{name}": (Kind.Q4_K, (rows, hidden)) for name, rows in sizes.items()}
        matrices[f"{at}attn_output"] = (Kind.Q4_K, (hidden, 8 * dim))
        recurrent = _mamba(at, hidden, states, heads, state)
        matrices |= recurrent[0] | _mlp(at, layer, inner, hidden)
        # llama.cpp has the second norm without an ending.
        vectors |= recurrent[1] | {f"{at}{name}": (1.0, (hidden,)) for name in ("attn_norm.weight", "ffn_norm")}
    _written(writer, np.random.default_rng(0), matrices, vectors)


def write_granite_h(path: Path) -> None:
    """Granite 4.0 H 350M: Mamba-2 layers, and four that attend."""
    hidden, layers, inner, dim, attending = 768, 32, 2048, 64, (10, 13, 17, 27)
    writer = _begun(
        path, "granitehybrid", 100_352, block_count=layers, embedding_length=hidden, feed_forward_length=inner,
        head_count=12, head_count_kv=[4 * (layer in attending) for layer in range(layers)], vocab_size=100_352,
        rope_dimension_count=dim, attention_scale=1 / dim, embedding_scale=12.0, residual_scale=0.246, logit_scale=3.0,
        ssm_conv_kernel=4, ssm_state_size=128, ssm_group_count=1, ssm_time_step_rank=48, ssm_inner_size=1536,
    )  # fmt: skip
    writer.add_rope_scaling_finetuned(False)
    matrices: dict[str, tuple[Kind, tuple[int, ...]]] = {"token_embd": (Kind.Q6_K, (100_352, hidden))}
    vectors: dict[str, tuple[float, tuple[int, ...]]] = {"output_norm.weight": (1.0, (hidden,))}
    for layer in range(layers):
        at = f"blk.{layer}."
        if layer in attending:
            sizes = {"attn_q": hidden, "attn_k": 4 * dim, "attn_v": 4 * dim, "attn_output": hidden}
            matrices |= {f"{at}{name}": (Kind.Q4_K, (rows, hidden)) for name, rows in sizes.items()}
        else:
            recurrent = _mamba(at, hidden, 1536, 48, 128)
            matrices |= recurrent[0]
            vectors |= recurrent[1] | {f"{at}ssm_norm.weight": (1.0, (1, 1536))}
        matrices |= _mlp(at, layer, inner, hidden)
        vectors |= {f"{at}{name}.weight": (1.0, (hidden,)) for name in ("attn_norm", "ffn_norm")}
    _written(writer, np.random.default_rng(0), matrices, vectors)


def write_gpt_oss(path: Path) -> None:
    """Two layers of gpt-oss-20b: 32 experts in MXFP4, of which each row takes four."""
    hidden, heads, kv_heads, dim, experts = 2880, 64, 8, 64, 32
    writer = _begun(
        path, "gpt-oss", 8192, block_count=2, embedding_length=hidden, feed_forward_length=hidden, head_count=heads,
        head_count_kv=kv_heads, key_length=dim, value_length=dim, expert_count=experts, expert_used_count=4,
        expert_feed_forward_length=hidden, sliding_window=128, rope_freq_base=150_000, rope_scaling_orig_ctx_len=4096,
    )  # fmt: skip
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    table = Kind.Q8_0, (8192, hidden)
    matrices: dict[str, tuple[Kind, tuple[int, ...]]] = {"token_embd": table, "output": table}
    vectors: dict[str, tuple[float, tuple[int, ...]]] = {"output_norm.weight": (1.0, (hidden,))}
    for layer in range(2):
        at = f"blk.{layer}."
        sizes = {"attn_q": heads * dim, "attn_k": kv_heads * dim, "attn_v": kv_heads * dim}
        matrices |= {f"{at}{name}": (Kind.Q8_0, (rows, hidden)) for name, rows in sizes.items()}
        matrices[f"{at}attn_output"] = (Kind.Q8_0, (hidden, heads * dim))
        vectors |= {f"{at}{name}.bias": (0.0, (rows,)) for name, rows in (sizes | {"attn_output": hidden}).items()}
        for half in ("gate", "up", "down"):
            matrices[f"{at}ffn_{half}_exps"] = (Kind.MXFP4, (experts, hidden, hidden))
            vectors[f"{at}ffn_{half}_exps.bias"] = (0.0, (experts, hidden))
        vectors |= {f"{at}ffn_gate_inp.weight": (0.0, (experts, hidden)), f"{at}ffn_gate_inp.bias": (0.0, (experts,))}
        vectors |= {f"{at}{name}.weight": (1.0, (hidden,)) for name in ("attn_norm", "post_attention_norm")}
        vectors[f"{at}attn_sinks.weight"] = (0.0, (heads,))
    _written(writer, np.random.default_rng(0), matrices, vectors)


def _vocabulary(writer: gguf.GGUFWriter, count_of_tokens: int = TOKENS) -> None:
    """As many tokens and merges as Qwen2.5 has, or fewer: the embedded model's, pairs of them, and padding."""
    known = GGUFFile(pull("smollm2")).metadata
    kinds = known["tokenizer.ggml.token_type"]
    ordinary = [token for token, kind in zip(known["tokenizer.ggml.tokens"], kinds, strict=True) if kind == 1]
    tokens, merges = ordinary[: count_of_tokens - 3], list(known["tokenizer.ggml.merges"])
    if len(tokens) < len(ordinary):
        kept = set(tokens)
        merges = [each for each in merges if each.replace(" ", "") in kept]
    seen, words = set(tokens), [token for token in ordinary if token.isascii() and token.isalpha()]
    for number in count():
        if len(tokens) >= min(151_643, count_of_tokens - 3) or len(merges) == MERGES:
            break
        first, second = words[number % len(words)], words[(number * 7919 + number // len(words)) % len(words)]
        if first + second not in seen:
            seen.add(first + second)
            tokens.append(first + second)
            merges.append(f"{first} {second}")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fill = count_of_tokens - len(tokens) - len(special)
    tokens += special + [f"[PAD{number}]" for number in range(fill)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (count_of_tokens - fill - 3) + [3] * 3 + [5] * fill)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(count_of_tokens - fill - 1)
    writer.add_pad_token_id(count_of_tokens - fill - 3)
    writer.add_chat_template(CHAT)


WRITERS: dict[str, Callable[[Path], None]] = {
    **{name: partial(write, shape=shape) for name, shape in SHAPES.items()},
    "qwen3.5-0.8B": partial(write_qwen35, hidden=1024, layers=24, inner=3584, heads=8, kv_heads=2, values=16),
    "qwen3.5-4B": partial(write_qwen35, hidden=2560, layers=32, inner=9216, heads=16, kv_heads=4, values=32),
    "lfm2-1.2B": write_lfm2,
    "gpt-oss-layers": write_gpt_oss,
    "falcon-h1-0.5B": write_falcon_h1,
    "granite-4-h-350M": write_granite_h,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=WRITERS)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    WRITERS[options.size](options.path)


if __name__ == "__main__":
    main()
