"""Models of quantized folders against `transformers` with the same weights in floating point."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form
from decodery.models.batch import Batch, Segment
from decodery.models.loaders import fused
from decodery.models.loaders.folder import FolderCheckpoint
from decodery.models.loaders.load import load
from decodery.models.loaders.quantized.integers import unpacked
from decodery.models.native.floats import MXFP4Linear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.reordered import ReorderedLinear
from decodery.models.native.stack import NativeStack
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from quantized_weights import LAYOUTS, quantize_folder, strings
from tiny_models import SHAPE, assert_same_logits, make_model, random_ids, randomize, reference, save

MODELS = (
    *(
        "GPTQ 4 bits, act-order",
        "GPTQ 8 bits, act-order",
        "AWQ gemv",
        "FP8, blocks of 48 by 40",
        "compressed-tensors W4A16, any zeros",
    ),
    *("compressed-tensors W8A8", "compressed-tensors NVFP4", "Model Optimizer FP8", "bitsandbytes NF4, double"),
)
"""Layouts of which whole models are run."""
OTHERS = {
    "qwen2": "compressed-tensors W8A8",
    "phi3": "FP8, blocks of 48 by 40",
    "stablelm": "AWQ gemm",
    "mixtral": "compressed-tensors FP8, channels",
    "qwen3_moe": "compressed-tensors MXFP4",
    "deepseek_v2": "Model Optimizer FP8",
    "falcon_h1, multiplied and normed": "bitsandbytes FP4",
    "gemma3_text": "bitsandbytes NF4",
}
"""Models with biases, fused tensors, rows in another order, experts, latents, factors and tied embeddings."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def model_of(path: Path, dtype: str = "auto") -> Transformer:
    model = load(path, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer)
    return model


def reference_of(folder: Path, exact: dict[str, torch.Tensor], at: Path) -> transformers.PreTrainedModel:
    """The model of `transformers` in float32, of the same folder with these weights in place of quantized ones."""
    shutil.copytree(folder, at)
    raw = json.loads((at / "config.json").read_text())
    del raw["quantization_config"]
    (at / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    save_file(exact, at / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(at, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_logits_of_transformers(name: str, home: Path, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[name], save(make_model("llama"), tmp_path / "model")
    exact = quantize_folder(folder, layout)
    assert_same_logits(model_of(folder, "float32"), reference_of(folder, exact, tmp_path / "exact"))
    kept, wanted = model_of(folder).weights.layers[2].output, exact["model.layers.2.self_attn.o_proj.weight"]
    if layout.forms:
        assert not isinstance(kept, Dense) and kept.form == layout.forms[0]  # type: ignore[attr-defined]
        assert torch.allclose(kept.dense(), wanted, rtol=2.0**-22, atol=0.0)  # type: ignore[attr-defined]
    else:
        # As `transformers` makes them: rounded once to the type of the folder.
        assert isinstance(kept, Dense) and torch.equal(kept.weight, wanted.to(layout.dtype))


@pytest.mark.parametrize(
    "name", ["compressed-tensors MXFP4", "Model Optimizer FP8, channels", "bitsandbytes NF4, double"]
)
def test_layers_of_floats_are_kept_in_a_file_and_others_are_refused(name: str, home: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    quantize_folder(folder, LAYOUTS[name])
    model, path = model_of(folder), tmp_path / "weights.safetensors"
    fused.save(path, model.weights)
    first, again = (each.layers[1].output for each in (model.weights, fused.read(path, model.config, model.device)))
    assert type(first) is type(again)
    assert torch.equal(first.dense(), again.dense())  # type: ignore[attr-defined]
    tensors = load_file(path)
    stem = "layers.1.output."
    for last in first.tensors():  # type: ignore[attr-defined]
        for other in (tensors[stem + last][:-1], tensors[stem + last].float().double()):
            save_file(tensors | {stem + last: other.contiguous()}, path)
            with pytest.raises(CorruptFile, match="do not fit their configuration"):
                fused.read(path, model.config, model.device)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_in_act_order_run_natively(bits: int, home: Path, tmp_path: Path) -> None:
    """Every matrix keeps its blocks and its order, in a file, too; near `transformers`, which another order is not."""
    layout, folder = LAYOUTS[f"GPTQ {bits} bits, act-order"], save(make_model("llama"), tmp_path / "model")
    exact = quantize_folder(folder, layout)
    wanted, ids = reference_of(folder, exact, tmp_path / "exact"), random_ids(40)
    ours, path = model_of(folder), tmp_path / "weights.safetensors"
    assert isinstance(ours._stack, NativeStack)
    matrices = [getattr(layer, name) for layer in ours.weights.layers for name in ("qkv", "output", "gate_up", "down")]
    assert all(isinstance(each, ReorderedLinear) and each.form == layout.forms[0] for each in matrices)

    def error(model: Transformer) -> float:
        found = model.forward(Batch([Segment(np.arange(40), tokens=ids)])).logits
        return float((found - reference(wanted, ids)).norm() / reference(wanted, ids).norm())

    fused.save(path, ours.weights)
    again = fused.read(path, ours.config, ours.device)
    # Rows are rounded to bytes, and so small a model with weights of this size feels it.
    assert error(ours) == error(Transformer(ours.config, again)) < 0.15
    tensors = load_file(path)
    name = "layers.1.down.order"
    save_file(tensors | {name: tensors[name].flip(0)}, path)
    assert error(Transformer(ours.config, fused.read(path, ours.config, ours.device))) > 2 * error(ours)
    for wrong in (tensors[name][:-1], tensors[name].long(), tensors[name].clamp(min=1)):
        save_file(tensors | {name: wrong.clone()}, path)
        with pytest.raises(CorruptFile, match="do not fit their configuration"):
            fused.read(path, ours.config, ours.device)


def test_weights_whose_orders_kernels_cannot_take_are_made_16_bits(home: Path, tmp_path: Path) -> None:
    """Parts of a matrix in different orders, and experts; and what is made of four bits anew has no order."""
    layout, folder = LAYOUTS["GPTQ 4 bits, act-order"], save(make_model("llama"), tmp_path / "model")
    exact = quantize_folder(folder, layout)
    path, name = folder / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(path)
    moved = torch.arange(len(tensors[f"{name}.g_idx"])).roll(1)
    exact[f"{name}.weight"] = exact[f"{name}.weight"][:, moved]
    whole = unpacked(tensors[f"{name}.qweight"].T, 4, len(moved))[:, moved].numpy()
    change = {f"{name}.qweight": strings(whole, 4).T.contiguous(), f"{name}.g_idx": tensors[f"{name}.g_idx"][moved]}
    save_file(tensors | change, path, metadata={"format": "pt"})
    ours = model_of(folder)
    assert isinstance(ours.weights.layers[1].qkv, Dense) and isinstance(ours.weights.layers[0].qkv, ReorderedLinear)
    assert_same_logits(model_of(folder, "float32"), reference_of(folder, exact, tmp_path / "exact"))

    mixed = save(make_model("mixtral"), tmp_path / "mixed")
    quantize_folder(mixed, layout)
    assert not any(isinstance(layer.down, ReorderedLinear) for layer in model_of(mixed).weights.layers)

    eight = save(make_model("llama"), tmp_path / "eight")
    exact = quantize_folder(eight, LAYOUTS["GPTQ 8 bits, act-order"])
    four = model_of(eight, "int4").weights.layers[2].output
    assert isinstance(four, Int4Linear)
    wanted = exact["model.layers.2.self_attn.o_proj.weight"]
    assert float((four.dense() - wanted).norm() / wanted.norm()) < 0.15


@pytest.mark.parametrize("case", OTHERS)
def test_other_families_are_read_too(case: str, home: Path, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[OTHERS[case]], save(make_model(case), tmp_path / "model")
    exact = quantize_folder(folder, layout)
    theirs = reference_of(folder, exact, tmp_path / "exact")
    assert_same_logits(model_of(folder, "float32"), theirs)
    # What has a native form keeps it, beside what was not quantized.
    ours = model_of(folder)
    linears = (each for layer in ours.weights.layers for each in (layer.down, layer.output))
    forms = {getattr(linear, "form", None) for linear in linears}
    assert not layout.forms or layout.forms[0] in forms


def test_what_is_not_quantized_keeps_its_own_type_beside_blocks(home: Path, tmp_path: Path) -> None:
    """As lists of modules that are not converted leave it; one matrix of both kinds is rounded to int8."""
    folder = save(make_model("llama"), tmp_path / "model")
    exact = quantize_folder(folder, LAYOUTS["compressed-tensors W4A16"], kept=("0.mlp.", "2.self_attn.v_proj"))
    model = model_of(folder)
    for index, form in ((0, Form.BFLOAT16), (1, Form.BLOCKS4)):
        down = model.weights.layers[index].down
        weight = down.weight if isinstance(down, Dense) else down.dense()  # type: ignore[attr-defined]
        assert down.form == form  # type: ignore[attr-defined]
        assert torch.equal(weight.float(), exact[f"model.layers.{index}.mlp.down_proj.weight"])
    assert isinstance(model.weights.layers[2].qkv, Int8Linear)
    ids = random_ids(9)
    expected = reference(reference_of(folder, exact, tmp_path / "exact"), ids)
    found = model.forward(Batch([Segment.chunk(ids, model.new_cache())])).logits
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_head_may_be_quantized_and_other_scales_are_left_alone(home: Path, tmp_path: Path) -> None:
    folder = save(make_model("qwen3, tied"), tmp_path / "model")
    exact = quantize_folder(folder, LAYOUTS["compressed-tensors W8A8"])
    state = load_file(folder / "model.safetensors")
    tensors, weight = LAYOUTS["compressed-tensors W8A8"].make(np.random.default_rng(3), 288, 64)
    state |= {f"lm_head.{last}": tensor for last, tensor in tensors.items()}
    state |= {
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.1.mlp.up_proj.input_scale": torch.ones(1),
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = model_of(folder)
    head = model.weights.head
    assert isinstance(head, Int8Linear) and torch.equal(head.dense(), torch.from_numpy(weight.copy()))
    assert torch.equal(model.weights.embedding.float(), exact["model.embed_tokens.weight"])
    save_file(state | {"model.layers.1.mlp.up_proj.pre_quant_scale": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"up_proj\.pre_quant_scale belongs to a part that"):
        load(folder, device="cpu")


def test_groups_of_layers_may_be_kept_in_different_ways(home: Path, tmp_path: Path) -> None:
    """FP8 beside NVFP4, as a configuration of two groups says."""
    folder = save(make_model("llama"), tmp_path / "model")
    first, second = LAYOUTS["compressed-tensors FP8, channels"], LAYOUTS["compressed-tensors NVFP4"]
    exact = quantize_folder(folder, first, kept=("mlp.",)) | quantize_folder(folder, second, kept=("self_attn.",))
    raw = json.loads((folder / "config.json").read_text())
    groups = {"first": first.config["config_groups"]["group_0"], "second": second.config["config_groups"]["group_0"]}
    raw["quantization_config"] |= {"config_groups": groups, "format": "mixed-precision"}
    (folder / "config.json").write_text(json.dumps(raw))
    name, state = "model.layers.1.self_attn.q_proj.weight", load_file(folder / "model.safetensors")
    # It was replaced twice over.
    wanted = state[name].float() * state[f"{name}_scale"].float()
    assert torch.equal(FolderCheckpoint(folder).part("layers.1.q.weight"), wanted)
    up = FolderCheckpoint(folder).part("layers.1.up.weight")
    assert torch.equal(up, exact["model.layers.1.mlp.up_proj.weight"])


def test_a_file_of_its_own_may_say_how_weights_are_kept(home: Path, tmp_path: Path) -> None:
    """As older folders of Model Optimizer have it."""
    folder = save(make_model("llama"), tmp_path / "model")
    exact = quantize_folder(folder, LAYOUTS["Model Optimizer NVFP4"])
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    found = FolderCheckpoint(folder).part("layers.2.down.weight")
    assert torch.equal(found, exact["model.layers.2.mlp.down_proj.weight"])


def test_models_that_run_through_transformers_are_made_floating_point(home: Path, tmp_path: Path) -> None:
    """In the type that is asked for, which is the folder's by default."""
    config = transformers.ArceeConfig(**SHAPE)
    folder = save(randomize(transformers.AutoModelForCausalLM.from_config(config)), tmp_path / "model")
    exact = quantize_folder(folder, LAYOUTS["compressed-tensors NVFP4"])
    theirs = reference_of(folder, exact, tmp_path / "exact")
    assert_same_logits(load(folder, dtype="float32", device="cpu").model, theirs)
    (copy,) = home.rglob("dequantized-float32/model.safetensors")
    before = copy.stat().st_mtime_ns
    assert_same_logits(load(folder, dtype="float32", device="cpu").model, theirs)
    assert copy.stat().st_mtime_ns == before
    load(folder, device="cpu")
    (copy,) = home.rglob("dequantized-bfloat16/model.safetensors")
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in load_file(copy).items())


def test_experts_of_gpt_oss_stay_four_bits(home: Path, tmp_path: Path) -> None:
    """A folder as it is published: a pair of tensors for all experts of a layer, beside biases in floating point."""
    from transformers.integrations.mxfp4 import dequantize_convertops

    theirs = make_model("gpt_oss")
    folder, generator, packed = save(theirs, tmp_path / "model"), torch.Generator().manual_seed(0), {}
    stored = load_file(folder / "model.safetensors")
    for name in [each for each in stored if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact = dequantize_convertops(blocks, scales, torch.float32)
        theirs.load_state_dict({name: exact}, strict=False)
    save_file(stored | packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    form = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    assert_same_logits(load(folder, dtype="float32", device="cpu").model, theirs)
    ours = load(folder, device="cpu")
    assert isinstance(ours.model, Transformer) and ours.model.capabilities.exact_rows
    assert all(isinstance(layer.gate_up, MXFP4Linear) for layer in ours.model.weights.layers)
    ids = random_ids(16)
    logits = ours.model.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert torch.nn.functional.cosine_similarity(logits, reference(theirs, ids)).median() > 0.99
