"""Draft heads in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

from published_heads import MASK, QWEN, TAPS

EXACT = QWEN | {"rms_norm_eps": 2**-17}
"""With an epsilon that 32 bits hold."""
NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    **{f"self_attn.{each}_norm": f"attn_{each}_norm" for each in "qk"},
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}  # fmt: skip
WHOLE = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "vocab_size": "vocab_size",
}  # fmt: skip
Coding = gguf.GGMLQuantizationType


def file_of(
    path: Path,
    layers: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kind: Coding = Coding.F32,
    *,
    base: str = "",
    **more: Any,
) -> Path:
    """A head's tensors as llama.cpp's converter writes them, token ids for offsets.

    Args:
        path: The file.
        layers: What the layers are like.
        tensors: Those of a folder.
        kind: How matrices are kept.
        base: The Hub id of the model that the head was made for, "" where it names none.
        more: Further keys of the architecture.
    """
    writer = gguf.GGUFWriter(path, "dflash")
    if base:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base.rpartition("/")[2].replace("-", " "))
        writer.add_base_model_repo_url(0, f"https://huggingface.co/{base}")
    for key, theirs in WHOLE.items():
        writer.add_uint32(f"dflash.{key}", layers[theirs])
    writer.add_uint32("dflash.block_size", 4)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", layers["rms_norm_eps"])
    writer.add_float32("dflash.rope.freq_base", layers["rope_theta"])
    writer.add_array("dflash.target_layers", TAPS)
    if "sliding_window" in layers:
        writer.add_uint32("dflash.attention.sliding_window", layers["sliding_window"])
        slides = [each == "sliding_attention" for each in layers["layer_types"]]
        writer.add_array("dflash.attention.sliding_window_pattern", slides)
    for key, value in more.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"dflash.{key}", value)
    writer.add_mask_token_id(MASK)
    for name, each in tensors.items():
        if name == "d2t":
            writer.add_tensor("d2t", (each + torch.arange(len(each))).numpy())
            continue
        whole, _, ending = name.rpartition(".")
        number = whole.split(".")[1] if whole.startswith("layers.") else ""
        known = f"blk.{number}.{NAMES[whole.removeprefix(f'layers.{number}.')]}" if number else NAMES[whole]
        coded = each.ndim == 2 and each.shape[1] % 32 == 0 and kind != Coding.F32
        rows = gguf.quants.quantize(each.numpy(), kind) if coded else each.numpy()
        writer.add_tensor(f"{known}.{ending}", rows, raw_dtype=kind if coded else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
