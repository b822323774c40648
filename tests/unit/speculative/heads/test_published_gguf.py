"""DFlash and DSpark heads in GGUF files of llama.cpp: they are those of the folders that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.parts import Parts
from published import write
from published_heads import MASK, OUTPUTS, QWEN, SLIDING, SPOKEN, TAPS, VOCAB, block_config, block_tensors

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
    path: Path, layers: dict[str, Any], tensors: dict[str, torch.Tensor], kind: Coding = Coding.F32, **more: Any
) -> Path:
    """A head's tensors as llama.cpp's converter writes them, token ids for offsets.

    Args:
        path: The file.
        layers: What the layers are like.
        tensors: Those of a folder.
        kind: How matrices are kept.
        more: Further keys of the architecture.
    """
    writer = gguf.GGUFWriter(path, "dflash")
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


OWN_PLACES = {"sample_from_anchor": False}
DSPARK = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", EXACT, {}, {}),
    "dflash with windows": ("dflash", EXACT | SLIDING, {}, {}),
    "dflash from its anchor": ("dflash", EXACT, {"sample_from_anchor": True}, {"sample_from_anchor": True}),
    "dflash of some tokens": ("dflash", EXACT, {"draft_vocab_size": OUTPUTS}, {}),
    "dspark": ("dspark", EXACT, {"projector_type": "dspark", **DSPARK}, {}),
    "dspark of own places": ("dspark", EXACT, OWN_PLACES | {"projector_type": "dspark"} | DSPARK, OWN_PLACES),
}
"""The kind, its layers, what the folder's configuration says besides, and the file."""


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_folder_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    kind, layers, own, keys = CASES[name]
    outputs, rank = own.get("draft_vocab_size", VOCAB), own.get("markov_rank", 0)
    tensors = block_tensors(layers, outputs=outputs, rank=rank)
    config = block_config(kind, False, layers, **own)
    del config["num_target_layers"]
    folder = TrainedHead.load(write(tmp_path / "head", config, tensors))
    file = TrainedHead.load(file_of(tmp_path / "head.gguf", layers, tensors, **keys))
    assert (file.kind, file.settings) == (folder.kind, folder.settings) and file.kind == kind
    assert file.tensors.keys() == folder.tensors.keys()
    assert all(torch.equal(each, folder.tensors[known]) for known, each in file.tensors.items())
    assert file.settings["from_anchor"] == ("anchor" in name or name == "dspark")
    if outputs == OUTPUTS:
        assert torch.equal(file.tensors["vocabulary"], SPOKEN.int())


def test_a_quantized_file_is_near_the_whole_one(tmp_path: Path) -> None:
    tensors = block_tensors(EXACT)
    whole = TrainedHead.load(file_of(tmp_path / "whole.gguf", EXACT, tensors))
    coded = TrainedHead.load(file_of(tmp_path / "coded.gguf", EXACT, tensors, Coding.Q8_0))
    assert any(each.dtype == torch.int8 for each in coded.tensors.values())
    rows = [Parts(each.tensors).floating()["fc.weight"] for each in (whole, coded)]
    assert 0 < float((rows[0] - rows[1]).abs().max()) < 0.05


def test_what_is_not_run_is_refused_by_its_name(tmp_path: Path) -> None:
    tensors = block_tensors(EXACT)
    path = tmp_path / "head.gguf"
    with pytest.raises(UnsupportedModel, match=r"the key dflash.selector_count is not known here"):
        TrainedHead.load(file_of(path, EXACT, tensors, selector_count=2))
    missing = {name: each for name, each in tensors.items() if name != "hidden_norm.weight"}
    with pytest.raises(CorruptFile, match=r"no tensor hidden_norm.weight"):
        TrainedHead.load(file_of(path, EXACT, missing))
    short = EXACT | SLIDING | {"layer_types": ["sliding_attention"]}
    with pytest.raises(CorruptFile, match="sliding_window_pattern should have 2 values"):
        TrainedHead.load(file_of(path, short, tensors))
