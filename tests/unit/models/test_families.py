"""Every family gives the logits that `transformers` gives, and what cannot be run faithfully is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile, PromptError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.config import Rope
from decodery.models.families.config_json import read_config
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.models.transformers.adapter import TransformersModel
from decodery.step.embedded import Embeddings
from tiny_models import CASES, SHAPE, assert_same_logits, make_model, random_ids, randomize, reference, save


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = make_model(case)
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu")
    assert isinstance(ours.model, Transformer)
    assert ours.model.config.family == CASES[case][0]
    assert_same_logits(ours.model, theirs)


@pytest.mark.parametrize(
    "case",
    [
        *(f"llama {kind} rope" for kind in ("linear", "llama3", "yarn")),
        "phi3, longrope",
        "phi, yarn",
        "olmo3",
        "exaone4",
    ],
)
def test_positions_beyond_what_was_trained_first(case: str, tmp_path: Path) -> None:
    theirs = make_model(case)
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    ids = random_ids(150)
    logits = ours.forward(Batch([Segment(np.arange(len(ids)), ids)])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4


def test_dynamic_rotation_is_the_plain_one_up_to_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    theirs = make_model("llama", rope_parameters=rope, max_position_embeddings=150)
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    assert isinstance(ours, Transformer) and ours.config.max_positions == 150
    ids = random_ids(150)
    logits = ours.forward(Batch([Segment(np.arange(len(ids)), ids)])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4


def test_su_is_what_longrope_was_called_first() -> None:
    base = json.loads(make_model("phi3, longrope").config.to_json_string(use_diff=False))
    assert read_config(base | {"rope_parameters": base["rope_parameters"] | {"rope_type": "su"}}) == read_config(base)


def test_any_mask_among_the_rows_of_a_pass(tmp_path: Path) -> None:
    theirs = make_model("llama")
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    rng = np.random.default_rng(0)
    n, cached = 12, 7
    mask = np.tril(rng.random((n, n)) < 0.4) | np.eye(n, dtype=bool)
    ids, positions = random_ids(cached + n), cached + np.sort(rng.integers(0, 6, n))
    cache = ours.new_cache()
    ours.forward(Batch([Segment.chunk(ids[:cached], cache)]))
    cache.keep(range(cached))
    logits = ours.forward(Batch([Segment(positions, tokens=ids[cached:], mask=mask, cache=cache)])).logits

    whole = np.tri(cached + n, dtype=bool)
    whole[cached:, cached:] = mask
    hidden = torch.from_numpy(np.where(whole, 0.0, np.finfo(np.float32).min).astype(np.float32))
    with torch.inference_mode():
        expected = theirs(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(np.concatenate([np.arange(cached), positions]))[None],
            attention_mask=hidden[None, None],
        ).logits[0, cached:]
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_beside_a_vision_tower(tied: bool, tmp_path: Path) -> None:
    text = make_model("mistral, no window").config
    sight = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Mistral3Config(
        text_config=text.to_dict(), vision_config=sight | {"model_type": "pixtral"}, tie_word_embeddings=tied
    )
    theirs = randomize(transformers.Mistral3ForConditionalGeneration(config))
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    ids = random_ids(16)
    logits = ours.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4
    # What is not known of the language model is refused, not left to transformers, which would leave it unread.
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    raw["text_config"]["clip_qkv"] = 8.0
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="the field clip_qkv"):
        load(tmp_path / "model", device="cpu")


def test_texts_of_a_gemma_3_that_sees(tmp_path: Path) -> None:
    text = make_model("gemma3_text").config
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=sight, mm_tokens_per_image=4)
    theirs = randomize(transformers.Gemma3ForConditionalGeneration(config))
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    assert isinstance(ours, Transformer) and ours.config.tie_embeddings
    ids = random_ids(16)
    logits = ours.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4
    # Rows of an image see each other in this model. Other placeholders are read as text is.
    for model in (ours, TransformersModel(theirs.eval())):
        assert model.config.image_tokens == (262_144,)
        embeddings = Embeddings(np.array([1]), torch.zeros(1, model.config.hidden_size))
        embeddings.check([5, 6, 7], model)
        with pytest.raises(PromptError, match="gemma3_text reads images with rows that see each other"):
            embeddings.check([5, 262_144, 7], model)


_SIGHT = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_texts_of_a_qwen_that_sees(name: str, tmp_path: Path) -> None:
    sections = [2, 3, 3]
    text = SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}
    text |= {"head_dim": 16} if name == "Qwen3VL" else {}
    sight = _SIGHT | ({"hidden_size": 64, "embed_dim": 32} if name == "Qwen2VL" else {})
    sight |= {"deepstack_visual_indexes": [0]} if name == "Qwen3VL" else {}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=sight)
    theirs = randomize(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    folder = save(theirs, tmp_path / "model")
    ours = load(folder, dtype="float32", device="cpu").model
    assert ours.config.image_tokens == (151_655, 151_656)
    ids = random_ids(16)
    logits = ours.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert (logits - reference(theirs, ids)).abs().max() < 1e-4
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="text_config: model_type = 'qwen3_moe'"):
        read_config(raw | {"text_config": raw["text_config"] | {"model_type": "qwen3_moe"}})
    if name == "Qwen3VL":
        return
    # The first files have no part for texts, and tensors that begin as those of a language model alone.
    inner = raw.pop("text_config")
    inner |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    inner.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(inner | raw | {"vision_token_id": 5}))
    tensors = load_file(folder / "model.safetensors")
    plain = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(
        {name.replace("model.visual.", "visual."): each for name, each in plain.items()}, folder / "model.safetensors"
    )
    again = load(folder, dtype="float32", device="cpu").model
    assert torch.equal(again.forward(Batch([Segment(np.arange(16), ids)])).logits, logits)


def test_shards_and_one_file_give_the_same_model(tmp_path: Path) -> None:
    theirs = make_model("gemma3_text")
    sharded = save(theirs, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_same_logits(load(sharded, dtype="float32", device="cpu").model, theirs)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 4}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        ),
    ],
)
def test_old_and_new_rope_fields_mean_the_same(old: dict, new: dict) -> None:
    base = json.loads(make_model("llama").config.to_json_string(use_diff=False))
    base.pop("rope_parameters")
    # transformers' own reading of the old form must agree with ours of the new one.
    translated = transformers.LlamaConfig(**(base | old)).to_dict()
    assert read_config(base | old) == read_config(base | new) == read_config(translated)


def test_gemma_ropes_in_the_old_form() -> None:
    base = json.loads(make_model("gemma3_text").config.to_json_string(use_diff=False))
    base.pop("rope_parameters")
    base.pop("layer_types")
    base |= {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    base |= {"sliding_window_pattern": 2, "num_hidden_layers": 4}
    config = read_config(base)
    assert config.rope == Rope(theta=2e6, kind="linear", factor=8.0)
    assert config.local_rope == Rope(theta=3e4)
    assert config.sliding_layers == (True, False, True, False)
    assert read_config(transformers.Gemma3TextConfig(**base).to_dict()) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),
        ({"model_type": "exaone4", "sliding_window": 4, "sliding_window_pattern": "LLG"}, "sliding_window_pattern"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"model_type": "helium"}, "helium"),
        ({"model_type": "mixtral", "layer_types": ["full_attention"] * 3, "sliding_window": 4}, "layer_types"),
        *(
            ({"model_type": family, "hidden_act": "gelu", "layer_types": kinds}, "hidden_act = 'gelu'")
            for family, kinds in {
                **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), None),
                "granitemoehybrid": ["mamba", "attention", "mamba"],
                **{family: ["conv", "full_attention", "conv"] for family in ("lfm2", "lfm2_moe")},
            }.items()
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "vptq"}}, "vptq"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 50.0}}, "alpha"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
def test_unsupported_fields_are_named(change: dict, named: str) -> None:
    base = json.loads(make_model("llama").config.to_json_string(use_diff=False))
    if "rope_scaling" in change:
        base.pop("rope_parameters")
    with pytest.raises(UnsupportedModel, match=named):
        read_config(base | change)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"head_dim": 15},
        {"rms_norm_eps": -1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_parameters": "linear"},
        {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"model_type": "smollm3", "no_rope_layers": [1]},
        {
            "model_type": "olmo3",
            "rope_parameters": None,
            "sliding_window": None,
            "layer_types": ["sliding_attention"] * 3,
        },
    ],
)
def test_damaged_configurations_are_refused_in_one_sentence(change: dict) -> None:
    base = json.loads(make_model("llama").config.to_json_string(use_diff=False))
    with pytest.raises(CorruptFile) as caught:
        read_config(base | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"rope_scaling": 5}, {"rope_parameters": "mrope_section"}, {"model_type": 5}])
def test_what_tells_of_images_is_refused_where_it_is_no_object(wrong: dict[str, object]) -> None:
    for named in ("llama", "gemma3_text", "qwen2_vl"):
        with pytest.raises(CorruptFile, match="should be"):
            read_config({"model_type": named} | wrong)
