"""Blocks of a GGUF file are read where they lie: the same bits as from tensors, with no copy on disk."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from decodery.core.errors import CorruptFile
from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.batch import Batch, Segment
from decodery.models.footprint import weight_bytes
from decodery.models.loaders.gguf_blocks import NUMBERS, READ, SIZES
from decodery.models.loaders.gguf_model import GGUFCheckpoint
from decodery.models.loaders.in_place import (
    IN_PLACE,
    BlocksInPlace,
    File,
    InPlace,
    Piece,
    Plan,
    Rows,
    WeightsInPlace,
    in_place,
)
from decodery.models.loaders.load import load
from decodery.models.loaders.store import converted
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.packed import Packed, packed_size
from decodery.models.torch.transformer import Transformer
from tiny_gguf import as_linear, random_blocks, write_gguf
from tiny_models import make_model, random_ids


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def bytes_of(packed: Packed, size: int) -> bytes:
    return ctypes.string_at(packed.struct.weight, size)


def rows_of(kind: str, raw: np.ndarray, path: Path, turned: int = 0) -> Rows:
    path.write_bytes(b"front" + raw.tobytes())
    block, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
    inputs = raw.shape[1] // gguf.GGML_QUANT_SIZES[Kind[kind]][1] * block
    piece = Piece(kind, 5, len(raw), inputs, turned)
    return Rows(File(path, Plan(5 + raw.size, {"slot": (piece,)})), [piece])


def test_types_have_ggmls_numbers_and_sizes() -> None:
    assert {name: Kind[name].value for name in READ} == NUMBERS
    assert {name: gguf.GGML_QUANT_SIZES[Kind[name]] for name in READ} == SIZES


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", list(READ))
def test_blocks_are_laid_out_as_from_tensors_and_expanded_as_the_file_says(
    kind: str, gated: bool, tmp_path: Path
) -> None:
    """34 outputs leave a panel nearly empty, and 96 inputs half a group of activations."""
    block, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = random_blocks(Kind[kind], 34, 2 if block == 256 else 3)
    linear, rows = as_linear(kind, raw), rows_of(kind, raw, tmp_path / "raw")
    ours, size = in_place(rows), packed_size(linear, gated=gated)
    assert packed_size(ours, gated=gated) == size and ours.shape == linear.shape and ours.form == linear.form
    expected = bytes_of(Packed(linear, gated=gated), size)
    for kernels in kernel_sets():
        choose(kernels)
        try:
            assert bytes_of(Packed(ours, gated=gated), size) == expected, kernels
            np.testing.assert_array_equal(rows.expanded().numpy(), gguf.quants.dequantize(raw, Kind[kind]))
        finally:
            choose(kernel_sets()[0])
    assert torch.equal(ours.dense(), linear.dense())
    raw[33, -3] ^= 1
    assert bytes_of(Packed(as_linear(kind, raw), gated=gated), size) != expected


def test_turned_heads_come_in_halves(tmp_path: Path) -> None:
    raw = random_blocks(Kind.Q4_0, 16, 2)
    rows = rows_of("Q4_0", raw, tmp_path / "raw", turned=8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    expected = gguf.quants.dequantize(raw, Kind.Q4_0)[[*order, *(8 + row for row in order)]]
    np.testing.assert_array_equal(rows.expanded().numpy(), expected)
    np.testing.assert_array_equal(rows.layer().dense().numpy(), expected)


def test_blocks_that_are_to_become_others_are_converted(home: Path, tmp_path: Path) -> None:
    """Int4 of a file with five bits."""
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.Q5_0)
    layer = load(tmp_path / "tiny.gguf", dtype="int4", device="cpu").model.weights.layers[0]  # type: ignore[attr-defined]
    assert type(layer.down) is Int4Linear
    assert type(load(tmp_path / "tiny.gguf", device="cpu").model.weights.layers[0].down) is BlocksInPlace  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_read_in_place_keeps_no_copy_of_its_blocks_and_says_the_same(
    family: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"v_proj": Kind.Q8_0, "1.mlp.down_proj": Kind.Q5_1}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_model(family), Kind.Q4_1, others=others)
    model = load(path, device="cpu").model
    assert isinstance(model, Transformer) and isinstance(model.weights, WeightsInPlace)
    layer = model.weights.layers[0]
    # What is fused of two types is int8, and kept.
    assert isinstance(layer.down, InPlace) and not isinstance(layer.qkv, InPlace)
    (copy,) = converted().rglob("*.safetensors")
    with safe_open(copy, "pt") as file:
        names = set(file.keys())
        plan = Plan.read(file.metadata()[IN_PLACE], copy)
    assert "embedding.weight" in plan.slots and "layers.0.qkv.weight" in names
    assert not names & plan.slots.keys()
    ids = random_ids(19)
    said = model.forward(Batch([Segment.chunk(ids, model.new_cache(), logit_rows=range(19))])).logits
    monkeypatch.setattr("decodery.models.loaders.load._in_place", lambda *_: False)
    whole = load(path, device="cpu").model
    assert isinstance(whole, Transformer) and not isinstance(whole.weights, WeightsInPlace)
    assert torch.equal(said, whole.forward(Batch([Segment.chunk(ids, whole.new_cache(), logit_rows=range(19))])).logits)
    assert model.fingerprint == whole.fingerprint and weight_bytes(model) > 0
    some = torch.tensor([[3, 0], [7, 3]])
    assert torch.equal(model.weights.rows(some), whole.weights.embedding[some])
    assert torch.equal(model.weights.embedding, whole.weights.embedding)
    changed = replace(model.weights, norm=model.weights.norm * 2)
    assert torch.equal(changed.rows(some), whole.weights.embedding[some])
    assert changed.tokens == model.weights.tokens == whole.weights.tokens


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.Q4_1)
    checkpoint = GGUFCheckpoint(tmp_path / "tiny.gguf")
    piece = checkpoint.piece("layers.0.down.weight")
    assert piece is not None
    plan = Plan(checkpoint.size, {"layers.0.down.weight": (piece,)})
    (tmp_path / "tiny.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="cut or exchanged"):
        File(tmp_path / "tiny.gguf", plan)
    with pytest.raises(CorruptFile, match="cannot read"):
        File(tmp_path / "none.gguf", plan)


@pytest.mark.parametrize(
    "change",
    [
        {"begin": -1},
        {"begin": 1 << 62},
        {"rows": 0},
        {"rows": 1 << 40},
        {"inputs": 33},
        {"inputs": 1.5},
        {"kind": "F32"},
        {"kind": "Q9_0"},
        {"turned": 3},
        {"turned": -2},
        {"other": 1},
    ],
    ids=str,
)
def test_a_plan_that_no_file_can_keep_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    piece = {"kind": "Q4_0", "begin": 64, "rows": 8, "inputs": 64, "turned": 4}
    good = {"size": 64 + 8 * 36, "slots": {"head.weight": [piece]}}
    assert Plan.read(json.dumps(good), tmp_path).slots["head.weight"][0].end == good["size"]
    bad = {**good, "slots": {"head.weight": [piece | change]}}
    with pytest.raises(CorruptFile, match="read in place"):
        Plan.read(json.dumps(bad), tmp_path)
    for text in ("", "[]", "{}", '{"size": 9, "slots": {"a": []}}', '{"size": 9, "slots": 3}'):
        with pytest.raises(CorruptFile, match="read in place"):
            Plan.read(text, tmp_path)
