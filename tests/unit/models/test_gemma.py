"""Gemma 3n and Gemma 4: shared keys, heads of two widths, streams and inputs of tokens in trees, caches and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile, DecoderyError, UnsupportedModel
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.models.batch import Batch, Segment
from decodery.models.config import ModelConfig
from decodery.models.families.config_json import read_config
from decodery.models.loaders.gguf_tokenizer import read_texts
from decodery.models.loaders.in_place import InPlace
from decodery.models.loaders.load import load
from decodery.models.torch.one_pass import narrowed, widened
from decodery.models.torch.transformer import Transformer
from decodery.testing import check_cache, check_identical, check_state, decode
from dense_gguf import write_dense
from tiny_models import doubled, make_model, random_ids, reference, save


def loaded(folder: Path, dtype: str = "float32") -> Transformer:
    model = load(folder, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer)
    return model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("case", ["gemma3n", "gemma4"])
def test_drafts_forks_and_cuts_leave_no_trace(case: str, tmp_path: Path) -> None:
    model = doubled(loaded(save(make_model(case), tmp_path / "model")))
    model = Transformer(replace(model.config, vocabulary=""), model.weights)
    assert check_cache(model, programs=1, steps=10) < 1e-9
    prompts = [[5, 6, 7, 8] * 4, [9, 10, 9, 10, 9]]
    check_identical(model, prompts, drafter="ngram", max_new_tokens=6, tested="drafted")
    assert check_state(model, prompts, drafter="token-recycling", max_new_tokens=4) < 1e-9


@pytest.mark.parametrize("case", ["gemma3n", "gemma4"])
def test_layers_read_the_keys_of_an_earlier_one_when_its_old_pages_are_gone(case: str, tmp_path: Path) -> None:
    theirs, ids = make_model(case, max_position_embeddings=1024), random_ids(540)
    ours = loaded(save(theirs, tmp_path / "model"))
    expected, cache = reference(theirs, ids), ours.new_cache()
    assert len(cache.lengths) == ours.config.num_layers - ours.config.reused_layers
    for begin in range(0, 540, 90):
        chunk = ids[begin : begin + 90]
        logits = ours.forward(Batch([Segment.chunk(chunk, cache)])).logits
        assert (logits - expected[begin : begin + 90]).abs().max() < 1e-4
        cache.keep(range(90))
        cache.release_passed()
    assert cache.pages.passed


def test_rows_of_all_layers_lie_in_one_cache() -> None:
    shapes = ((4, 16), (1, 32), (3, 32))
    config = ModelConfig(9, 8, 8, 3, 12, 3, 32, 64, head_shapes=shapes)
    for layer, (heads, dim) in enumerate(shapes):
        rows = torch.randn(5, heads, dim, generator=torch.Generator().manual_seed(layer))
        held = widened(rows, config)
        assert held.shape == (5, 3, 32) and torch.equal(
            narrowed(held.transpose(0, 1), config, layer), rows.transpose(0, 1)
        )


def test_tokens_without_inputs_of_their_own_have_those_of_token_0(tmp_path: Path) -> None:
    theirs = make_model("gemma3n")
    ours = loaded(save(theirs, tmp_path / "model"))
    ids = np.arange(ours.config.vocab_size - 40, ours.config.vocab_size)
    assert ids[5] < ours.config.layer_tokens < ids[-5]
    logits = ours.forward(Batch([Segment.chunk(ids, ours.new_cache())])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4


def test_a_published_folder_has_towers_and_keys_that_no_layer_reads(tmp_path: Path) -> None:
    theirs, ids = make_model("gemma4"), random_ids(16)
    folder = save(theirs, tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    own = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in held.items()}
    unread = {f"model.language_model.layers.5.self_attn.{part}.weight": torch.zeros(2) for part in ("k_proj", "k_norm")}
    towers = {name: torch.zeros(2) for name in ("model.audio_tower.x", "model.embed_vision.y", "model.vision_tower.z")}
    save_file(own | unread | towers, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma4", "text_config": raw, "vision_config": {}, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    for dtype, likeness in (("float32", 0.999999), ("int8", 0.99)):
        found = loaded(folder, dtype)
        logits = found.forward(Batch([Segment.chunk(ids, found.new_cache())])).logits
        assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).median() > likeness
    save_file(own | {"model.language_model.layers.0.self_attn.x.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"self_attn\.x\.weight"):
        loaded(folder)


def test_what_cannot_be_done_with_such_a_model_is_refused(tmp_path: Path) -> None:
    model = loaded(save(make_model("gemma3n"), tmp_path / "model"))
    can = model.capabilities
    assert can.trees and can.chains and not (can.policies or can.layer_plans or can.states or can.parts)
    with pytest.raises(DecoderyError, match="caches that are read as a policy says"):
        decode(model, [[5, 6, 7]], cache_policy=StreamingLLM(), max_new_tokens=2)
    states = torch.zeros(2, model.config.hidden_size)
    with pytest.raises(UnsupportedModel, match="read tokens"):
        model.forward(Batch([Segment(np.arange(2), states=states)]))


@pytest.mark.parametrize(
    ("case", "change", "error", "named"),
    [
        ("gemma3n", {"activation_sparsity_pattern": [0.9]}, CorruptFile, "activation_sparsity_pattern"),
        ("gemma3n", {"intermediate_size": [8, 8]}, CorruptFile, "intermediate_size"),
        ("gemma3n", {"altup_active_idx": 4}, CorruptFile, "streams"),
        ("gemma3n", {"num_kv_shared_layers": 6}, CorruptFile, "last 6 layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, UnsupportedModel, "use_bidirectional_attention"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 3}}}, UnsupportedModel, "sliding_window"),
        ("gemma4", {"per_layer_config": {"9": {"head_dim": 8}}}, CorruptFile, "layer '9'"),
        ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, CorruptFile, "key-value heads"),
        ("gemma4", {"per_layer_key": 1}, UnsupportedModel, "per_layer_key"),
    ],
)
def test_configurations_that_cannot_be_run_faithfully(case: str, change: dict, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        read_config(make_model(case).config.to_dict() | change)


def test_published_fields_and_those_of_transformers_are_one_configuration() -> None:
    raw = make_model("gemma4, values of keys").config.to_dict()
    published = {name: value for name, value in raw.items() if name not in ("per_layer_config", "rope_parameters")}
    published |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    found = read_config(published)
    assert found == read_config(raw)
    assert found.head_shapes == ((4, 16), (1, 32)) * 3 and (found.num_kv_heads, found.head_dim) == (2, 32)


@pytest.mark.parametrize("case", ["gemma3n", "gemma4"])
def test_blocks_of_a_file_are_read_in_place(case: str, tmp_path: Path) -> None:
    theirs, ids = make_model(case, hidden_size_per_layer_input=32), random_ids(16)
    write_dense(tmp_path / "model.gguf", theirs, Kind.Q8_0)
    ours = load(tmp_path / "model.gguf", device="cpu").model
    assert isinstance(ours, Transformer)
    (inputs,) = ours.weights.inputs
    assert isinstance(inputs.table, InPlace)
    assert all(isinstance(layer.qkv, InPlace) and isinstance(layer.down, InPlace) for layer in ours.weights.layers)
    logits = ours.forward(Batch([Segment.chunk(ids, ours.new_cache())])).logits
    assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).min() > 0.98


def test_files_of_gemma_4_list_merges_that_end_at_line_breaks() -> None:
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_of, "a", "b", "\u2581", "\n", "\n\n", "ab", "\u2581ab", "a\n"]
    types = np.array([3, 3, 3, 2, *[6] * 256, *[1] * 8])
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": np.zeros(len(tokens)),
        "tokenizer.ggml.merges": ["a \n", "\n \n", "a b", "\u2581 ab"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    backend, _ = read_texts(metadata, "file")
    encoded = backend.encode("ab ab a\n\n\u00e9b")
    assert encoded.tokens == ["<bos>", "ab", "\u2581ab", "\u2581", "a", "\n\n", "<0xC3>", "<0xA9>", "b"]
    assert backend.decode(encoded.ids, skip_special_tokens=True) == "ab ab a\n\n\u00e9b"
    with pytest.raises(CorruptFile, match="no merges"):
        read_texts({name: value for name, value in metadata.items() if "merges" not in name}, "file")
