"""GGUF files that are quantized already keep their own numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile
from decodery.core.mapped_memory import forget, mapped_files
from decodery.core.native.kernels import Form, choose, kernel_sets
from decodery.models.batch import Batch, Segment
from decodery.models.footprint import precision
from decodery.models.loaders import fused
from decodery.models.loaders.fused_slots import slots
from decodery.models.loaders.gguf_blocks import READ
from decodery.models.loaders.gguf_model import GGUFCheckpoint
from decodery.models.loaders.load import load
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear, quantize_rows
from decodery.models.native.packed import BITS
from decodery.models.native.super_blocks import SuperBlockLinear
from decodery.models.torch.transformer import Transformer
from decodery.testing import tiny_transformer
from tiny_gguf import as_linear, random_blocks, write_gguf
from tiny_models import make_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def model_of(path: Path, dtype: str = "auto") -> Transformer:
    model = load(path, dtype=dtype, device="cpu").model
    assert isinstance(model, Transformer)
    return model


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(READ))
def test_blocks_are_what_the_file_says(kind: str) -> None:
    raw = random_blocks(Kind[kind], 5, 3)
    found, expected = as_linear(kind, raw).dense().numpy(), gguf.quants.dequantize(raw, Kind[kind])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", list(READ))
def test_every_kernel_multiplies_blocks_to_the_same_bits_for_any_number_of_rows(kind: str) -> None:
    """33 outputs leave a panel nearly empty, and 96 inputs half a group of activations."""
    block, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
    linear = as_linear(kind, random_blocks(Kind[kind], 33, 256 // block * 2 if block == 256 else 3))
    linear.bias = torch.randn(33, generator=torch.Generator().manual_seed(1))
    x = torch.randn(21, linear.shape[1], generator=torch.Generator().manual_seed(2))
    expected = linear.portable(x)
    for kernels in kernel_sets():
        choose(kernels)
        try:
            for n in (1, 2, 3, 5, 8, 9, 16, 21):
                assert torch.equal(linear(x[:n]), expected[:n]), (kernels, n)
        finally:
            choose(kernel_sets()[0])
    exact = x.double() @ linear.dense().double().T + linear.bias
    assert (expected - exact).norm() / exact.norm() < 0.01
    # And no worse than with inputs of 8 bits in floating point: nothing else is rounded.
    whole, scale = quantize_rows(x)
    rounded = (whole * scale[..., None]).view(21, -1)[:, : linear.shape[1]]
    alone = rounded.double() @ linear.dense().double().T + linear.bias
    assert (expected - alone).norm() / exact.norm() < 1e-4
    # One number that is another shows: a bit of the last input's.
    linear.weight[7, -1] ^= 128
    assert not torch.equal(dataclasses.replace(linear)(x)[:, 7], expected[:, 7])


@pytest.mark.parametrize("kind", list(READ))
def test_the_largest_numbers_and_inputs_fit_the_sums_of_every_kernel(kind: str) -> None:
    """Drawn numbers hardly come near what 16 bits hold: here all products have one sign and are as large as can be."""
    block, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
    linear = as_linear(kind, random_blocks(Kind[kind], 33, 256 // block))
    x = torch.ones(9, linear.shape[1])
    x[1::2] = -1
    # 119 is the largest number of MXFP4 twice.
    for byte in (0, 119, 255):
        linear.weight.fill_(byte)
        expected = linear.portable(x)
        for kernels in kernel_sets():
            choose(kernels)
            try:
                packed = dataclasses.replace(linear)
                for n in (1, 2, 3, 4, 9):
                    assert torch.equal(packed(x[:n]), expected[:n]), (kernels, byte, n)
            finally:
                choose(kernel_sets()[0])


def test_any_rows_of_a_part_are_those_of_the_whole(tmp_path: Path) -> None:
    """Rows of queries and keys move within their heads."""
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.Q4_1)
    checkpoint = GGUFCheckpoint(tmp_path / "tiny.gguf")
    for name in ("layers.1.q.weight", "layers.1.v.weight", "norm.weight", "embedding.weight"):
        whole = checkpoint.part(name)
        assert tuple(whole.shape) == checkpoint.shape(name)
        for begin, end in ((0, 1), (3, 21), (17, 32)):
            assert torch.equal(checkpoint.part(name, begin, end), whole[begin:end])
            if checkpoint.forms(name):
                form = checkpoint.forms(name)[0]
                assert torch.equal(checkpoint.blocks(name, begin, end, form).dense(), whole[begin:end])


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_auto_keeps_the_files_own_numbers(kind: Kind, home: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), kind)
    ours, exact = model_of(tmp_path / "tiny.gguf"), model_of(tmp_path / "tiny.gguf", "float32")
    for layer, other in zip(ours.weights.layers, exact.weights.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            kept = getattr(layer, name)
            assert isinstance(kept, Int4Linear)
            assert torch.equal(kept.dense(), getattr(other, name).weight)
    head = ours.weights.head
    assert isinstance(head, Int4Linear) and torch.equal(head.dense(), exact.weights.head.weight)


def test_layers_with_more_bits_keep_them(home: Path, tmp_path: Path) -> None:
    """As in Q4_K_M files, whose values and some projections have more bits; what is fused of two is int8."""
    others = {"v_proj": Kind.Q8_0, "1.mlp.down_proj": Kind.Q5_1}
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.Q4_1, others=others)
    ours, exact = model_of(tmp_path / "tiny.gguf"), model_of(tmp_path / "tiny.gguf", "float32")
    layer = ours.weights.layers[1]
    assert isinstance(layer.qkv, Int8Linear) and isinstance(layer.down, BlockLinear)
    assert isinstance(layer.gate_up, Int4Linear) and isinstance(ours.weights.layers[0].down, Int4Linear)
    assert torch.equal(layer.down.dense(), exact.weights.layers[1].down.weight)
    wanted = exact.weights.layers[1].qkv.weight
    assert (layer.qkv.dense() - wanted).abs().max() <= wanted.abs().max() / 127


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q5_0, 5), (Kind.Q5_1, 5), (Kind.Q8_0, 8)], ids=lambda each: str(each))
def test_files_with_more_bits_keep_them_and_have_four_where_asked_for(
    kind: Kind, bits: int, home: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), kind)
    loaded = load(tmp_path / "tiny.gguf", device="cpu")
    ours, exact = loaded.model, model_of(tmp_path / "tiny.gguf", "float32")
    assert loaded.dtype == "int8" == precision(ours)
    for name in ("qkv", "output", "gate_up", "down"):
        kept = getattr(ours.weights.layers[1], name)
        assert isinstance(kept, BlockLinear) and kept.bits == bits
        assert torch.equal(kept.dense(), getattr(exact.weights.layers[1], name).weight)
    assert isinstance(ours.weights.head, Int8Linear)
    assert isinstance(model_of(tmp_path / "tiny.gguf", "int4").weights.layers[0].qkv, Int4Linear)


def test_a_pass_over_blocks_is_that_of_the_portable_layers(home: Path, tmp_path: Path) -> None:
    """The native stack, whose gates and values share panels, against the layers one by one."""
    others = {"gate_proj": Kind.Q5_1, "up_proj": Kind.Q5_1, "down_proj": Kind.Q8_0}
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.Q4_0, others=others)
    model = model_of(tmp_path / "tiny.gguf", "int4")
    layer = model.weights.layers[0]
    assert isinstance(layer.qkv, Int4Linear)
    assert isinstance(layer.gate_up, BlockLinear) and isinstance(layer.down, BlockLinear)
    with mock.patch("decodery.models.torch.transformer.runs_natively", lambda config: False):
        portable = Transformer(model.config, model.weights)
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    caches = [model.new_cache(), model.new_cache()]
    for cache in caches:
        cache.reserve(np.arange(5))
    batches = [Batch([Segment.chunk([1, 2, 3, 4, 5], cache)]) for cache in caches]
    found = [each.layers(hidden, batch) for each, batch in zip((model, portable), batches, strict=True)]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4", "float32"])
def test_a_file_without_one_of_its_matrices_is_refused(dtype: str, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_model("llama"), Kind.Q8_0)
    # A name of the same length that readers pass over.
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.xxattn_rot_embd"))
    with pytest.raises(CorruptFile, match=r"no tensor blk\.1\.ffn_down\.weight: the file is incomplete"):
        load(path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "Q5_K", "Q6_K"])
def test_super_blocks_are_kept_in_a_file_and_others_are_refused(kind: str, tmp_path: Path) -> None:
    config = tiny_transformer(0).config
    config = dataclasses.replace(
        config, hidden_size=256, intermediate_size=256, num_heads=16, num_kv_heads=16, head_dim=16
    )
    path, tensors, layers = tmp_path / "weights.safetensors", dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for slot in slots(config):
        if not slot.linear:
            tensors[slot.name] = torch.ones(slot.shape)
            continue
        layer = as_linear(kind, random_blocks(Kind[kind], slot.shape[0], 1))
        layers[slot.name] = layer.dense()
        tensors |= {slot.name.removesuffix("weight") + name: tensor for name, tensor in layer.tensors().items()}
    save_file(tensors, path)
    weights = fused.read(path, config, torch.device("cpu"))
    down = weights.layers[1].down
    assert isinstance(down, SuperBlockLinear) and down.form == as_linear(kind, random_blocks(Kind[kind], 1, 1)).form
    assert torch.equal(down.dense(), layers["layers.1.down.weight"])
    # Saved anew they are the same.
    fused.save(path, weights)
    again = fused.read(path, config, torch.device("cpu")).layers[1].down
    assert isinstance(again, SuperBlockLinear) and torch.equal(again.dense(), down.dense())
    stem = "layers.1.down."
    wrong = {
        "integers": [tensors[f"{stem}integers"][:, :4], tensors[f"{stem}integers"].float()],
        "super_scales": [tensors[f"{stem}super_scales"][:, :0], tensors[f"{stem}super_scales"].repeat(1, 1, 3)],
        "weight": [tensors[f"{stem}weight"][:, :-1]],
    }
    for name, others in wrong.items():
        for other in others:
            save_file(tensors | {stem + name: other.contiguous()}, path)
            with pytest.raises(CorruptFile, match="do not fit their configuration"):
                fused.read(path, config, torch.device("cpu"))


@pytest.mark.parametrize("form", [Form.BLOCKS4, Form.BLOCKS5])
def test_weights_in_blocks_that_leave_inputs_over_are_refused(form: Form, tmp_path: Path) -> None:
    """72 inputs are two blocks and a quarter: kernels would read a third one after what was packed."""
    config = dataclasses.replace(tiny_transformer(0).config, hidden_size=72)
    tensors: dict[str, torch.Tensor] = {}
    for slot in slots(config):
        if not slot.linear:
            tensors[slot.name] = torch.zeros(slot.shape)
            continue
        (outputs, inputs), stem = slot.shape, slot.name.removesuffix("weight")
        tensors[slot.name] = torch.zeros(outputs, inputs * BITS[form] // 8, dtype=torch.uint8)
        steps = torch.zeros(outputs, inputs // 32, 2).half()
        scales = {"scales": steps} if form == Form.BLOCKS5 else dict.fromkeys(("step", "least"), steps[..., 0])
        tensors |= {stem + name: scale.clone() for name, scale in scales.items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises(CorruptFile, match="do not fit their configuration"):
        fused.read(tmp_path / "weights.safetensors", config, torch.device("cpu"))


# --- memory ---------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_was_packed_is_given_back_and_read_again(tmp_path: Path) -> None:
    content = torch.arange(1 << 23, dtype=torch.int32)
    save_file({"x": content}, tmp_path / "x.safetensors")
    (tensor,) = load_file(tmp_path / "x.safetensors").values()
    assert torch.equal(tensor, content)
    before = resident()
    forget(tensor, mapped_files())
    assert before - resident() > 30e6
    assert torch.equal(tensor, content)
    forget(content, mapped_files())
    assert int(content[-1]) == (1 << 23) - 1, "memory that no file stands behind must stay"
