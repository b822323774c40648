"""Masked diffusion checkpoints in their public layouts, and what their rows see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

import tiny_gguf
from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.families.config_json import read_config
from decodery.models.families.tensor_names import tensor_name
from decodery.models.loaders.load import load
from decodery.testing import tiny_transformer
from tiny_models import make_model, random_ids, save

MASK = 280
_PARTS = {
    "embed_tokens": "wte", "norm": "ln_f", "lm_head": "ff_out", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm", "q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj",
    "o_proj": "attn_out", "gate_proj": "ff_proj", "up_proj": "up_proj", "down_proj": "ff_out",
}  # fmt: skip
LLADA = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "activation_type": "silu", "alibi": False,
    "attention_layer_norm": False, "block_type": "llama", "d_model": 64, "embedding_size": 288, "eos_token_id": 257,
    "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms",
    "mask_token_id": MASK, "max_sequence_length": 512, "mlp_hidden_size": 96, "multi_query_attention": None,
    "n_heads": 4, "n_kv_heads": 2, "n_layers": 3, "rms_norm_eps": 1e-6, "rope": True, "rope_theta": 10000.0,
    "scale_logits": False, "vocab_size": 288, "weight_tying": False,
}  # fmt: skip
LIKE = {"llada": "llama", "Dream": "qwen2", "sdar": "qwen3, tied"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def write_masked(kind: str, folder: Path) -> transformers.PreTrainedModel:
    """A tiny checkpoint as its authors publish it; returns the causal model with the same weights."""
    model = make_model(LIKE[kind])
    save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "llada":
        tensors = load_file(folder / "model.safetensors")
        save_file({_llada(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
        config = dict(LLADA)
    else:
        config |= {"model_type": kind, "mask_token_id": MASK}
        config |= {"architectures": ["DreamModel"]} if kind == "Dream" else {"block_size": 4}
        if kind == "sdar":
            config["architectures"] = ["SDARForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return model


def _llada(name: str) -> str:
    path = name.removeprefix("model.").split(".")
    if path[0] == "layers":
        return f"model.transformer.blocks.{path[1]}.{_PARTS[path[-2]]}.weight"
    return f"model.transformer.{_PARTS[path[0]]}.weight"


def plain(model: transformers.PreTrainedModel, ids: np.ndarray, seen: np.ndarray) -> torch.Tensor:
    """What transformers makes of rows that see each other as a mask [n, n] says."""
    mask = torch.zeros(1, 1, *seen.shape).masked_fill(~torch.from_numpy(seen), torch.finfo(torch.float32).min)
    with torch.inference_mode():
        return model(torch.from_numpy(ids)[None], attention_mask=mask, use_cache=False).logits[0].float()


def sight(kind: str, n: int) -> np.ndarray:
    places = np.arange(n) // 4
    return places[None] <= places[:, None] if kind == "sdar" else np.ones((n, n), dtype=bool)


@pytest.mark.parametrize("kind", LIKE)
def test_a_folder_as_published_gives_the_logits_of_its_rows_that_see_each_other(kind: str, tmp_path: Path) -> None:
    theirs = write_masked(kind, tmp_path / kind)
    loaded = load(tmp_path / kind, dtype="float32", device="cpu")
    config, ids = loaded.model.config, random_ids(10)
    assert (config.causal, config.mask_id, config.shifted) == (False, MASK, kind == "Dream")
    assert config.block_length == (4 if kind == "sdar" else None)
    ours = loaded.model.forward(Batch([Segment(np.arange(10), ids)])).logits
    assert (ours - plain(theirs, ids, sight(kind, 10))).abs().max() < 1e-4
    # The mask has to be told apart from the causal one, or nothing is tested here.
    assert (ours - plain(theirs, ids, np.tri(10, dtype=bool))).abs().max() > 1e-2


@pytest.mark.parametrize(("kind", "shifted"), [("llada", None), ("Dream", None), ("Dream", False)])
def test_gguf_files_of_llada_and_dream_give_the_same(
    kind: str, shifted: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation pairs lie side by side in LLaDA's files, and a file may say that rows are not shifted."""
    theirs, path, name = make_model(LIKE[kind]), tmp_path / "tiny.gguf", kind.lower()
    add = tiny_gguf._add_tokenizer

    def masked(writer: Any, metadata: dict[str, Any]) -> None:
        add(writer, metadata)
        writer.add_causal_attention(False)
        writer.add_mask_token_id(MASK)
        if kind == "llada" or shifted is not None:
            writer.add_diffusion_shift_logits(bool(shifted))

    monkeypatch.setattr(tiny_gguf, "_add_tokenizer", masked)
    real = tiny_gguf.gguf.GGUFWriter
    monkeypatch.setattr(tiny_gguf.gguf, "GGUFWriter", lambda path, _, **options: real(path, name, **options))
    tiny_gguf.write_gguf(path, theirs, Kind.F32)
    loaded = load(path, dtype="float32", device="cpu")
    config, ids = loaded.model.config, random_ids(8)
    assert (config.causal, config.mask_id) == (False, MASK)
    assert config.shifted == (kind == "Dream" and shifted is not False)
    ours = loaded.model.forward(Batch([Segment(np.arange(8), ids)])).logits
    assert (ours - plain(theirs, ids, sight(kind, 8))).abs().max() < 1e-4


def test_what_llada_can_switch_on_and_we_do_not_do_is_refused() -> None:
    assert read_config(LLADA).mask_id == MASK
    for change in ({"alibi": True}, {"layer_norm_type": "default"}, {"include_qkv_bias": True}, {"rope": False}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read_config(LLADA | change)
    with pytest.raises(CorruptFile, match="mask token is 288"):
        read_config(LLADA | {"mask_token_id": 288})
    assert read_config(LLADA | {"mask_token_id": None}).mask_id is None


def test_llada_moe_is_told_by_its_experts_and_read_as_qwen_3_moe() -> None:
    released = {
        "model_type": "llada", "architectures": ["LLaDAMoEModel"], "hidden_act": "silu", "hidden_size": 64,
        "expert_intermediate_size": 32, "dense_intermediate_size": 256, "shared_expert_intermediate_size": None,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
        "rope_theta": 50000, "rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": None,
        "qk_layernorm": True, "attention_bias": False, "moe_router_score_function": None, "mask_token_id": 99,
    }  # fmt: skip
    config = read_config(released)
    assert (config.experts, config.experts_per_token, config.intermediate_size, config.head_dim) == (8, 2, 32, 16)
    assert config.qk_norm and not config.causal and not config.normed_experts and config.mask_id == 99
    assert tensor_name("layers.1.experts.3.up.weight", config) == "model.layers.1.mlp.experts.3.up_proj.weight"
    for change in (
        {"qk_layernorm": False},
        {"moe_router_score_function": "sigmoid"},
        {"shared_expert_intermediate_size": 8},
    ):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read_config(released | change)


def test_slots_of_a_cache_can_be_selected_in_any_order_and_stand_for_what_they_hold() -> None:
    """Content and tentative rows, out of order, become one content: it scores as if it had been read like that."""
    model, cache = tiny_transformer(), tiny_transformer().new_cache()
    ids = np.arange(1, 9)
    everything = np.ones((8, 8), dtype=bool)
    model.forward(Batch([Segment(np.arange(8), ids, mask=everything, cache=cache)]))
    held = cache.view(1)[0].clone()
    cache.select(np.array([6, 0, 2, 3]))
    assert cache.positions[0, :4].tolist() == [0, 2, 3, 6] and cache.next_position == 7
    model.forward(Batch([Segment(np.array([1, 5]), ids[[1, 5]], mask=np.ones((2, 2), dtype=bool), cache=cache)]))
    clone = cache.fork()
    cache.select(np.array([5, 0, 4, 3]))
    assert cache.positions[0, :4].tolist() == [0, 1, 5, 6]
    assert torch.equal(cache.view(1)[0][:, [0, 3]], held[:, [0, 6]]), "the fork's slots or these were written over"
    assert torch.equal(clone.view(1)[0], held[:, [0, 2, 3, 6]])
    with pytest.raises(ValueError, match="same position"):
        cache.select(np.array([0, 1, 1]))
