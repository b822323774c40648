"""GGUF files of the exact shapes of Qwen2.5-0.5B and -1.5B with drawn weights, for speed, memory and load alone.

    python benchmarks/random_gguf.py 0.5B DIR/qwen-shaped-0.5B.gguf
    python benchmarks/random_gguf.py 1.5B DIR/qwen-shaped-1.5B.gguf

Types of blocks are those that llama.cpp's Q4_K_M gives these shapes: rows of 896 inputs, which 256 does not divide,
fall back to Q5_0 and Q8_0. Numbers of blocks are drawn, and scales give weights a mean of zero and a spread
like trained ones. What such a model writes means nothing: no perplexity, no share of drafts that come true.
The vocabulary is the embedded model's, filled up to as many tokens and merges as Qwen2.5 has.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import count
from pathlib import Path

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


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    """As many tokens and merges as Qwen2.5 has: the embedded model's, pairs of them, and padding."""
    known = GGUFFile(pull("smollm2")).metadata
    kinds = known["tokenizer.ggml.token_type"]
    ordinary = [token for token, kind in zip(known["tokenizer.ggml.tokens"], kinds, strict=True) if kind == 1]
    tokens, merges = list(ordinary), list(known["tokenizer.ggml.merges"])
    seen, words = set(tokens), [token for token in ordinary if token.isascii() and token.isalpha()]
    for number in count():
        if len(tokens) == 151_643 or len(merges) == MERGES:
            break
        first, second = words[number % len(words)], words[(number * 7919 + number // len(words)) % len(words)]
        if first + second not in seen:
            seen.add(first + second)
            tokens.append(first + second)
            merges.append(f"{first} {second}")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fill = TOKENS - len(tokens) - len(special)
    tokens += special + [f"[PAD{number}]" for number in range(fill)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (TOKENS - fill - 3) + [3] * 3 + [5] * fill)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(TOKENS - fill - 1)
    writer.add_pad_token_id(TOKENS - fill - 3)
    writer.add_chat_template(CHAT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    write(options.path, SHAPES[options.size])


if __name__ == "__main__":
    main()
