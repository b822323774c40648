"""Published heads as other projects write them: names, places and defaults that differ, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.loaders.fields import INDEX
from decodery.models.loaders.origins import loaded_from
from decodery.speculative.heads.found import found_heads
from decodery.speculative.heads.head import TrainedHead
from decodery.testing import tiny_transformer
from published import TARGET, TEXT, write
from published_blocks import eagle_rows, enter
from published_heads import (
    LLAMA,
    MASK,
    OUTPUTS,
    QWEN,
    SLIDING,
    TAPS,
    VOCAB,
    block_config,
    block_tensors,
    check,
    eagle_formula,
    eagle_tensors,
    embedding,
    found_logits,
    ids,
    projected,
    rows_of,
    speculators,
    spread,
    states_of,
)

ONE = {"num_hidden_layers": 1}
EMBEDDING = TARGET.embed_tokens(torch.arange(VOCAB)).float()


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.double() for name, each in tensors.items()}


def same(found: TrainedHead, wanted: TrainedHead) -> bool:
    names = found.tensors.keys() | wanted.tensors.keys()
    equal = all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in names)
    return equal and (found.kind, found.settings) == (wanted.kind, wanted.settings)


def deep_spec(architecture: str, **settings: Any) -> dict[str, Any]:
    """A configuration of DeepSpec: all in one, and layers by the number that states leave."""
    own = {"architectures": [architecture], "target_layer_ids": [tap - 1 for tap in TAPS], "num_target_layers": 6}
    return QWEN | own | settings


@pytest.mark.parametrize("rank", [0, 6])
def test_blocks_of_deepspec_predict_from_their_anchor(rank: int, tmp_path: Path) -> None:
    """Every row answers for the place after its own, with and without a Markov head."""
    tensors = block_tensors(QWEN, rank=rank)
    tensors |= {"embed_tokens.weight": EMBEDDING.clone(), "lm_head.weight": EMBEDDING.flip(0).clone()}
    own = {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": rank > 0}
    own |= {"confidence_head_with_markov": True, "num_anchors": 512, "block_size": 4, "mask_token_id": MASK}
    folder = write(tmp_path / "head", deep_spec("Qwen3DSparkModel", **own), tensors)
    # An embedding that is the target's is left out.
    weights = {name: each for name, each in doubled(tensors).items() if name != "embed_tokens.weight"}
    rows = rows_of(weights, QWEN, {}, False)

    def wanted(path: list[int]) -> torch.Tensor:
        before = [TEXT[-1], *path][-1]
        bias = torch.zeros(VOCAB).double()
        if rank:
            bias = weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][before]
        return projected(weights, rows[len(path)]) + bias

    check(folder, wanted)
    assert found_logits(folder, [8], [1])[0].reach == 4


def test_the_embedding_of_a_target_may_be_read_as_its_first_state(tmp_path: Path) -> None:
    own = {"markov_rank": 0, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [-1, 2, 5]}
    folder = write(tmp_path / "head", deep_spec("Qwen3DSparkModel", **own), block_tensors(QWEN))
    assert TrainedHead.load(folder).settings["taps"] == [0, 3, 6]


def test_an_eagle_3_head_of_deepspec(tmp_path: Path) -> None:
    layers, settings = QWEN | ONE, {"prefix": "layers.0."}
    tensors = eagle_tensors(layers, settings) | {"lm_head.weight": EMBEDDING.flip(0).clone()}
    tensors = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")}
    own = {"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "target_model_name_or_path": "a/b"}
    folder = write(tmp_path / "head", deep_spec("Qwen3Eagle3Model", **ONE, **own), tensors)
    weights = doubled(tensors)
    check(folder, lambda path: eagle_formula(weights, layers, settings, path))
    assert TrainedHead.load(folder).facts["verifier"] == "a/b"


@pytest.mark.parametrize("tied", [False, True])
def test_an_eagle_3_head_without_a_projection_speaks_by_the_targets_or_its_embedding(
    tied: bool, tmp_path: Path
) -> None:
    layers = LLAMA | ONE | {"tie_word_embeddings": tied}
    tensors = eagle_tensors(layers, {}, own=tied)
    tensors = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    folder = write(tmp_path / "head", layers | ids(), tensors)
    weights = doubled(tensors)

    def wanted(path: list[int]) -> torch.Tensor:
        embed, tokens = embedding(weights), TEXT[1:]
        features = enter(weights, {}, states_of(TEXT[:-1], TAPS))
        fed, last = eagle_rows(weights, layers, {}, embed(tokens), features)
        for token in path:
            tokens, features = [*tokens, token], torch.cat((features, fed[-1:]))
            fed, last = eagle_rows(weights, layers, {}, embed(tokens), features)
        return last[-1] @ weights["embed_tokens.weight"].T if tied else projected(weights, last[-1])

    check(folder, wanted)
    (folder / "config.json").write_text(json.dumps(layers | ids() | {"draft_vocab_size": OUTPUTS}))
    with pytest.raises(CorruptFile, match=r"no tensor lm_head.weight"):
        TrainedHead.load(folder)


WINDOWS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], bool]] = {
    "all layers": ({}, {"use_swa": True, "swa_window_size": 4}, ["sliding_attention"] * 2, True),
    "all layers, causal": (
        {}, {"use_swa": True, "swa_window_size": 4, "causal": True}, ["sliding_attention"] * 2, False
    ),
    "both ways": (SLIDING, {"causal": False}, SLIDING["layer_types"], True),
    "size": (
        {"layer_types": SLIDING["layer_types"]}, {"use_swa": True, "swa_window_size": 4}, SLIDING["layer_types"], False
    ),
}  # fmt: skip
"""What the configuration says of the layers and in `dflash_config`, the kinds that are run, whether windows look on."""


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_dflash_are_read_as_vllm_reads_them(name: str, tmp_path: Path) -> None:
    described, own, kinds, both = WINDOWS[name]
    tensors = block_tensors(QWEN)
    folder = write(tmp_path / "head", block_config("dflash", False, QWEN | described, **own), tensors)
    weights, run = doubled(tensors), QWEN | {"layer_types": kinds, "sliding_window": 4}
    rows = rows_of(weights, run, {"sliding_window_non_causal": both}, False)
    check(folder, lambda path: spread(projected(weights, rows[1 + len(path)])))


@pytest.mark.parametrize("mask", [{"pard_token": MASK}, {"ptd_token_id": MASK, "mask_token_id": None}])
def test_the_mask_of_p_eagle_has_several_names(mask: dict[str, Any], tmp_path: Path) -> None:
    tensors = eagle_tensors(LLAMA, {"mask": True, "prefix": "midlayer."}, own=True)
    shared = LLAMA | ids() | {"draft_vocab_size": OUTPUTS, "architectures": ["LlamaForCausalLMEagle3"]}
    usual = TrainedHead.load(write(tmp_path / "usual", shared | {"mask_token_id": MASK}, tensors))
    named = shared | {"parallel_drafting": True} | mask
    flat = tensors | {"mask_hidden": tensors["mask_hidden"][0]}
    assert usual.kind == "p-eagle"
    assert same(TrainedHead.load(write(tmp_path / "head", named, flat)), usual)


SAME: dict[str, dict[str, Any]] = {
    "another family": {"model_type": "phi3"},
    "tokens of another model": {"bos_token_id": 1 << 20, "eos_token_id": [1 << 20], "pad_token_id": 1 << 20},
    "places in images": {
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "target_model_type": "qwen2_vl",
    },
    "what is always so": {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS],
            **{"use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False},
            **{"use_input_layernorm_in_first_layer": True, "next_layer_regular": True, "parallel_draft_step": 1},
        }
    },
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_is_read(name: str, tmp_path: Path) -> None:
    tensors = eagle_tensors(LLAMA | ONE, {"prefix": "midlayer."})
    shared = LLAMA | ONE | ids() | {"draft_vocab_size": OUTPUTS, "architectures": ["LlamaForCausalLMEagle3"]}
    usual = TrainedHead.load(write(tmp_path / "usual", shared, tensors))
    assert same(TrainedHead.load(write(tmp_path / "head", shared | SAME[name], tensors)), usual)


KINDS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    "eagle-3": lambda: (speculators("eagle3", QWEN, draft_vocab_size=OUTPUTS, **ids()), eagle_tensors(QWEN, {})),
    "dspark": lambda: (
        block_config("dspark", False, QWEN, markov_rank=6, projector_type="dspark", enable_confidence_head=True,
                     confidence_head_with_markov=True),
        block_tensors(QWEN, rank=6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_several_files_is_that_in_one(kind: str, tmp_path: Path) -> None:
    config, tensors = KINDS[kind]()
    whole = TrainedHead.load(write(tmp_path / "whole", config, tensors))
    folder = write(tmp_path / "head", config, {})
    (folder / "model.safetensors").unlink()
    # SpecForge once kept the heads of a block within another part.
    named = {
        f"logit_head.{name}" if name.startswith(("markov_head", "confidence_head")) else name: each
        for name, each in tensors.items()
    }
    files: dict[str, dict[str, torch.Tensor]] = {"model-00001-of-00002.safetensors": {}}
    files["model-00002-of-00002.safetensors"] = {}
    for number, name in enumerate(sorted(named)):
        files[sorted(files)[number % 2]][name] = named[name]
    for file, each in files.items():
        save_file(each, folder / file)
    places = {name: file for file, each in files.items() for name in each}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    assert same(TrainedHead.load(folder), whole)
    short = folder / places["fc.weight"]
    save_file({name: each for name, each in load_file(short).items() if name != "fc.weight"}, short)
    with pytest.raises(CorruptFile, match=r"no tensor fc.weight, which its index names"):
        TrainedHead.load(folder)


def test_a_whole_model_in_several_files_is_no_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    names = {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}
    save_file({"model.embed_tokens.weight": EMBEDDING}, tmp_path / names["model.embed_tokens.weight"])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UnsupportedModel, match="llama is no layout of a draft head that is known here"):
        TrainedHead.load(tmp_path)


@pytest.mark.parametrize(("verifier", "finds"), [("some/mine", True), ("some/other", False)])
def test_heads_beside_a_model_are_found_by_the_name_they_have_for_it(
    verifier: str, finds: bool, tmp_path: Path
) -> None:
    model = tiny_transformer(0, num_layers=6)
    (tmp_path / "mine").mkdir()
    loaded_from(model, str(tmp_path / "mine"))
    own = {"markov_rank": 0, "block_size": 4, "mask_token_id": MASK, "target_model_name_or_path": verifier}
    write(tmp_path / "head", deep_spec("Qwen3DSparkModel", **own), block_tensors(QWEN))
    assert [each.trained.kind for each in found_heads(model)] == ["dspark"] * finds
