"""Adapters of other stacks are read with every field of their configuration, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.logits_sources.adapter import Tuned
from decodery.models.loaders.adapters import Adapter, Columns, Thin, tuned
from decodery.models.loaders.load import load
from decodery.testing import tiny_transformer
from decodery.training.adapter import LoRARemaking, S2FTRemaking
from scripted import Unigram
from tiny_models import assert_same_logits, make_model
from tiny_models import save as save_folder

MODEL = tiny_transformer(0)


def adapter(seed: int, size: float = 1.0) -> Adapter:
    draws = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64) * size

    columns = Columns(torch.tensor([2, 3, 17]), random(32, 3))
    return Adapter({"layers.0.output": columns, "layers.1.gate_up": Thin(random(128, 2), random(2, 32))})


def test_what_is_no_adapter_for_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decodery train s2ft"):
        Tuned().over(MODEL, [1])
    with pytest.raises(ModelNotFound, match="decodery train s2ft"):
        Tuned(str(tmp_path)).over(MODEL, [1])
    (tmp_path / Adapter.FILE).write_bytes(b"nothing")
    with pytest.raises(CorruptFile, match="decodery train s2ft"):
        Tuned(str(tmp_path)).over(MODEL, [1])
    delta = torch.zeros(32, 1)
    for parts in (
        {"layers.9.output": Columns(torch.tensor([0]), delta)},
        {"layers.0.output": Columns(torch.tensor([99]), delta)},
        {"layers.0.output": Thin(torch.zeros(32, 2), torch.zeros(3, 32))},
    ):
        with pytest.raises(SettingsError, match="this adapter is for a model"):
            tuned(MODEL, Adapter(parts))
    with pytest.raises(UnsupportedModel, match="runs itself"):
        Tuned(adapter(0)).over(Unigram(8), [1])
    Adapter({"x": Columns(torch.tensor([0]).int(), delta)}).save(tmp_path / "odd")
    with pytest.raises(CorruptFile, match="holds no adapter, or is damaged"):
        Adapter.load(tmp_path / "odd")
    for bad in ({"channels": 1.5}, {"channels": 0.0, "heads": 0.0}):
        with pytest.raises(SettingsError, match="shares"):
            S2FTRemaking(MODEL.config, **bad)
    with pytest.raises(SettingsError, match="rank of at least 1"):
        LoRARemaking(0)


@pytest.mark.integration
def test_lora_of_other_stacks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make_model("llama").float()
    save_folder(theirs, tmp_path / "model")
    model = load(tmp_path / "model", dtype="float32").model
    changed, tensors = copy.deepcopy(theirs), {}
    draws = torch.Generator().manual_seed(0)
    names = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    for name in (f"model.layers.{layer}.{part}" for layer in (0, 2) for part in names):
        weight = changed.get_parameter(f"{name}.weight")
        shapes = (weight.shape[0], 4), (4, weight.shape[1])
        first, second = (torch.randn(*shape, generator=draws) * 0.1 for shape in shapes)
        with torch.no_grad():
            weight += 2.0 * first @ second
        tensors |= {f"base_model.model.{name}.lora_B.weight": first, f"base_model.model.{name}.lora_A.weight": second}
    folder = tmp_path / "lora"
    folder.mkdir()
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
    assert_same_logits(tuned(model, Adapter.load(folder)), changed)
    with pytest.raises(AssertionError):
        assert_same_logits(model, changed)
    # Another rule of scaling is another model.
    (folder / "adapter_config.json").write_text(json.dumps(about | {"use_rslora": True}))
    with pytest.raises(AssertionError):
        assert_same_logits(tuned(model, Adapter.load(folder)), changed)
    for other in ({"use_dora": True}, {"peft_type": "IA3"}, {"bias": "all"}, {"alpha_pattern": {"q_proj": 3}}):
        (folder / "adapter_config.json").write_text(json.dumps(about | other))
        with pytest.raises(UnsupportedModel, match=f"{next(iter(other))} = .* is not supported"):
            Adapter.load(folder)
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(
        {**tensors, "base_model.model.lm_head.lora_A.weight": second.clone()}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(UnsupportedModel, match="only LoRA of linear layers"):
        Adapter.load(folder)
    save_file(dict(list(tensors.items())[:1]), folder / "adapter_model.safetensors")
    with pytest.raises(CorruptFile, match="only one of two matrices"):
        Adapter.load(folder)


def _lora_folder(
    folder: Path, theirs: torch.nn.Module, **about: object
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A folder as PEFT writes it for two matrices; returns [out, 4] and [4, in] by their names in the model."""
    draws, pairs, tensors = torch.Generator().manual_seed(0), {}, {}
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        outputs, inputs = theirs.get_parameter(f"{name}.weight").shape
        first, second = (torch.randn(*shape, generator=draws) * 0.1 for shape in ((outputs, 4), (4, inputs)))
        pairs[name] = first, second
        tensors |= {f"base_model.model.{name}.lora_B.weight": first, f"base_model.model.{name}.lora_A.weight": second}
    folder.mkdir(exist_ok=True)
    # All that PEFT 0.21 writes of a LoRA, in its own order.
    written = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "base_model_name_or_path": "x", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.1,
        "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
        "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
        "rank_pattern": {}, "revision": None, "target_modules": ["k_proj", "down_proj"], "target_parameters": None,
        "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False, "velora_config": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written | about))
    save_file(tensors, folder / "adapter_model.safetensors")
    return pairs


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_adapters_that_began_with_a_part_of_the_matrix_take_its_place(
    begun: str, rslora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make_model("llama").float()
    save_folder(theirs, tmp_path / "model")
    model = load(tmp_path / "model", dtype="float32").model
    pairs = _lora_folder(tmp_path / "lora", theirs, init_lora_weights=begun, use_rslora=rslora)
    scale = 8 / 2 if rslora else 8 / 4
    for name, (first, second) in pairs.items():
        weight = theirs.get_parameter(f"{name}.weight")
        with torch.no_grad():
            if begun == "pissa":
                # What is left is all that lies beyond the directions of the four largest singular values.
                left = torch.linalg.svd(weight)[0][:, :4]
                rest = weight - left @ (left.T @ weight)
            else:
                # The first columns of Q span the first columns of the matrix.
                basis = torch.linalg.qr(weight[:, :4])[0]
                rest = weight - scale * basis @ (basis.T @ weight)
            weight.copy_(rest + scale * first @ second)
    adapter = Adapter.load(tmp_path / "lora")
    assert_same_logits(tuned(model, adapter), theirs)
    adapter.save(tmp_path / "own")
    assert_same_logits(tuned(model, Adapter.load(tmp_path / "own")), theirs)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication = .* is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is not supported"),
        ({"lora_bias": True}, "lora_bias = True is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices = .* is not supported"),
        ({"something_new": {"x": 1}}, "something_new = .* is not supported"),
        ({"rank_pattern": {"k_proj": 8}}, "rank_pattern = .* is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16' changes the model's own"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    ],
)
def test_every_field_of_an_adapters_configuration_is_read_or_refused(about: dict, said: str, tmp_path: Path) -> None:
    theirs = make_model("llama")
    _lora_folder(tmp_path / "lora", theirs)
    assert len(Adapter.load(tmp_path / "lora").parts) == 2
    _lora_folder(tmp_path / "lora", theirs, **about)
    with pytest.raises(UnsupportedModel, match=said):
        Adapter.load(tmp_path / "lora")
    _lora_folder(tmp_path / "lora", theirs, r=8)
    with pytest.raises(CorruptFile, match="says r = 8"):
        Adapter.load(tmp_path / "lora")
