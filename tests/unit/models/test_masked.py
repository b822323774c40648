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
from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel
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
LIKE = {
    "llada": "llama", "Dream": "qwen2", "sdar": "qwen3, tied", "sdar_moe": "qwen3_moe", "rnd1": "qwen3_moe",
    "llada2_moe": "glm4_moe, in groups", "Fast_dLLM_Qwen": "qwen2", "a2d-qwen3": "qwen3, tied", "a2d-llama": "llama",
}  # fmt: skip
BLOCKS = {"sdar": "block_size", "sdar_moe": "block_size", "llada2_moe": "block_length", "Fast_dLLM_Qwen": "bd_size"}
"""The fields that say how long blocks are."""
SHIFTED = ("Dream", "rnd1", "Fast_dLLM_Qwen")
NAMED = {
    "Dream": "DreamModel", "sdar": "SDARForCausalLM", "sdar_moe": "SDARMoeForCausalLM", "rnd1": "RND1LM",
    "llada2_moe": "LLaDA2MoeModelLM", "Fast_dLLM_Qwen": "Fast_dLLM_QwenForCausalLM",
    "a2d-qwen3": "A2DQwen3LMHeadModel", "a2d-llama": "A2DLlamaLMHeadModel",
}  # fmt: skip
GLM = {"norm_topk_prob": True, "use_qk_norm": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
_LLADA2 = (
    ("model.embed_tokens", "model.word_embeddings"), ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"), ("self_attn.k_norm", "attention.key_layernorm"),
    ("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def write_masked(kind: str, folder: Path) -> transformers.PreTrainedModel:
    """A tiny checkpoint as its authors publish it; returns the causal model with the same weights."""
    model = make_model(LIKE[kind], **(GLM if kind == "llada2_moe" else {}))
    if kind == "llada2_moe":
        for layer in model.model.layers:
            # Which GLM's lacks.
            layer.self_attn.o_proj.bias = torch.nn.Parameter(torch.randn(64, dtype=torch.float32, device="cpu"))
    save(model, folder)
    config, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    if kind == "llada":
        save_file({_llada(name): tensor for name, tensor in load_file(path).items()}, path)
        config = dict(LLADA)
    else:
        config |= {"model_type": kind, "mask_token_id": MASK, "architectures": [NAMED[kind]]}
        config |= {BLOCKS[kind]: 4} if kind in BLOCKS else {}
    if kind == "llada2_moe":
        save_file(_llada2(load_file(path)), path)
        config = _llada2_config(config)
    if kind == "rnd1":
        config |= {"rope_scaling": False, "sliding_window": False, "moe_backend": "hf", "num_diffusion_steps": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def _llada2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for theirs, ours in _LLADA2:
                name = name.replace(theirs, ours)
            found[name] = tensor
    return found


def _llada2_config(config: dict[str, Any]) -> dict[str, Any]:
    """In the fields of LLaDA 2, whose released code reads no others."""
    kept = (
        *("model_type", "mask_token_id", "architectures", "block_length", "vocab_size", "hidden_size"),
        *("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "n_group"),
        *("topk_group", "moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor", "rms_norm_eps"),
        *("num_experts_per_tok", "max_position_embeddings", "eos_token_id", "bos_token_id"),
    )
    found = {name: config[name] for name in kept}
    return found | {
        "head_dim": 16, "num_experts": config["n_routed_experts"], "num_shared_experts": config["n_shared_experts"],
        "use_qk_norm": config["use_qk_norm"], "use_qkv_bias": False, "norm_head": False, "score_function": "sigmoid",
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "norm_topk_prob": True, "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True, "rotary_dim": 8,
    }  # fmt: skip


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
    return places[None] <= places[:, None] if kind in BLOCKS else np.ones((n, n), dtype=bool)


@pytest.mark.parametrize("kind", LIKE)
def test_a_folder_as_published_gives_the_logits_of_its_rows_that_see_each_other(kind: str, tmp_path: Path) -> None:
    theirs = write_masked(kind, tmp_path / kind)
    loaded = load(tmp_path / kind, dtype="float32", device="cpu")
    config, ids = loaded.model.config, random_ids(10)
    assert (config.causal, config.mask_id, config.shifted) == (False, MASK, kind in SHIFTED)
    assert config.block_length == (4 if kind in BLOCKS else None)
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


def test_an_adapted_model_names_its_mask_with_its_tokenizer_or_by_an_option(tmp_path: Path) -> None:
    theirs = write_masked("a2d-llama", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    del config["mask_token_id"]
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<|im_end|>"}))
    found = load(tmp_path / "own", dtype="float32", device="cpu").model.config
    assert found.eos_ids == (257, 259), "an answer ends where its turn does"
    assert (found.causal, found.mask_id, found.shifted) == (False, 259, False)
    save(theirs, tmp_path / "plain")
    ids = random_ids(10)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    assert load(tmp_path / "plain", **options).model.config.causal
    open_ = load(tmp_path / "plain", masking="mask=<|im_start|>,shifted=true", **options).model
    assert (open_.config.mask_id, open_.config.shifted, open_.config.block_length) == (258, True, None)
    assert (
        open_.forward(Batch([Segment(np.arange(10), ids)])).logits - plain(theirs, ids, sight("a2d-llama", 10))
    ).abs().max() < 1e-4
    blocks = load(tmp_path / "plain", masking="mask=258,block=4", **options).model
    assert (
        blocks.forward(Batch([Segment(np.arange(10), ids)])).logits - plain(theirs, ids, sight("sdar", 10))
    ).abs().max() < 1e-4
    for wrong in ("<mask>", "mask=", "mask=5,block=0", "mask=5,shift=true", "mask=5,shifted=yes"):
        with pytest.raises(SettingsError, match="mask=TOKEN"):
            load(tmp_path / "plain", masking=wrong, **options)
    for wrong in ("mask=<mask>", "mask=288"):
        with pytest.raises(SettingsError, match="vocabulary of 288 tokens"):
            load(tmp_path / "plain", masking=wrong, **options)


def test_masks_of_released_models_are_known_where_their_configurations_name_none() -> None:
    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "hidden_size": 64,
        "n_group": 1,
        "topk_group": 1,
    }
    moe |= {"num_attention_heads": 4, "num_hidden_layers": 2}
    for kind, vocabulary, mask in (
        ("llada2_moe", 157_184, 156_895), ("llada_moe", 157_184, 156_895), ("rnd1", 151_936, 151_669),
        ("Fast_dLLM_Qwen", 151_936, 151_665), ("rnd1", 1000, None),
    ):  # fmt: skip
        own = {} if kind == "Fast_dLLM_Qwen" else moe
        assert read_config({"model_type": kind, "vocab_size": vocabulary, **own}).mask_id == mask
    for kind, field in (("Dream", "block_length"), ("a2d-qwen3", "block_size"), ("sdar", "bd_size")):
        with pytest.raises(UnsupportedModel, match=field):
            read_config({"model_type": kind, "mask_token_id": 5, field: 32})
    for change in ({"norm_head": True}, {"score_function": "softmax"}, {"norm_topk_prob": False}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read_config({"model_type": "llada2_moe", **moe, **change})


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
