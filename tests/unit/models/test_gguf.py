"""GGUF files of every family and quantization read back to the right logits; damaged ones are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.loaders.gguf_model import GGUFCheckpoint
from decodery.models.loaders.load import LoadedModel, load
from decodery.testing import check_identical
from tiny_gguf import TEMPLATE, write_gguf, write_states
from tiny_models import assert_same_logits, make_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def load_exact(path: Path) -> LoadedModel:
    return load(path, dtype="float32", device="cpu")


WRITABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_every_quantization_reads_back_to_the_right_logits(kind: Kind, home: Path, tmp_path: Path) -> None:
    model = make_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model, kind)
    assert_same_logits(load_exact(tmp_path / "tiny.gguf").model, model)


@pytest.mark.parametrize(
    "case",
    [
        "llama tied, biases, wide heads",
        "llama linear rope",
        "llama llama3 rope",
        "llama yarn rope",
        "mistral, every layer slides",
        "qwen2",
        "qwen3, tied",
    ],
)
def test_every_family_reads_back_to_the_right_logits(case: str, home: Path, tmp_path: Path) -> None:
    model = make_model(case)
    write_gguf(tmp_path / "tiny.gguf", model, Kind.Q8_0)
    assert_same_logits(load_exact(tmp_path / "tiny.gguf").model, model)


def test_gemma_reads_back_to_the_right_logits(home: Path, tmp_path: Path) -> None:
    # The files leave out what the family fixes: every sixth layer sees all, heads scale by their own width.
    model = make_model("gemma3_text")
    model.config.layer_types = ["sliding_attention"] * 3
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.head_dim**-0.5
        layer.self_attn.layer_type, layer.self_attn.sliding_window = "sliding_attention", model.config.sliding_window
    write_gguf(tmp_path / "tiny.gguf", model, Kind.Q8_0)
    ours = load_exact(tmp_path / "tiny.gguf").model
    assert_same_logits(ours, model)
    assert ours.config.image_tokens == (262_144,)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1])
def test_mamba_2_reads_back_to_the_right_logits(kind: Kind, home: Path, tmp_path: Path) -> None:
    theirs = make_model("mamba2")
    write_states(tmp_path / "model.gguf", theirs, kind)
    ours = load_exact(tmp_path / "model.gguf").model
    assert ours.config.family == "mamba2" and ours.config.mamba.groups == 2
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1])
@pytest.mark.parametrize("case", ["falcon_h1", "falcon_h1, multiplied and normed"])
def test_falcon_h1_reads_back_to_the_right_logits(case: str, kind: Kind, home: Path, tmp_path: Path) -> None:
    theirs = make_model(case, tie_word_embeddings=False)
    write_states(tmp_path / "model.gguf", theirs, kind)
    ours = load_exact(tmp_path / "model.gguf").model
    assert ours.config.family == "falcon_h1" and ours.config.mamba.normed == ("normed" in case)
    assert_same_logits(ours, theirs)
    check_identical(ours, [[5, 6, 7, 8] * 3], drafter="ngram", seeds=(0,), max_new_tokens=8, tested="nothing")


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name), ids=lambda k: k.name)
def test_every_type_the_package_expands_is_read(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    # More rows than are expanded at once.
    raw = rng.integers(0, 256, ((1 << 20) // (4 * block) + 3, 4 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        found = GGUFFile(tmp_path / "one.gguf").rows("token_embd.weight")
        expected = gguf.quants.dequantize(raw, kind)
    assert found.shape == (len(raw), 4 * block)
    np.testing.assert_array_equal(found, expected)


def test_tokenizer_template_and_ends_come_from_the_metadata(home: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.F32, metadata={"add_bos": True})
    loaded = load_exact(tmp_path / "tiny.gguf")
    assert loaded.tokenizer.encode("hé<|im_end|>") == [256, 104, 0xC3, 0xA9, 259]
    assert loaded.tokenizer.encode("a", special=False) == [97]
    assert set(loaded.tokenizer.eos_ids) == {257, 259} == set(loaded.model.config.eos_ids)
    assert loaded.tokenizer.bos_id == 256
    assert loaded.chat_template is not None and loaded.chat_template.source == TEMPLATE
    assert loaded.chat_template.render([{"role": "user", "content": "x"}]) == "<|im_start|>user\nx<|im_end|>\n"


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, make_model("llama"), Kind.Q4_0)
    return path.read_bytes()


def _open_all(path: Path) -> None:
    checkpoint = GGUFCheckpoint(path)
    checkpoint.texts()
    for name in ("embedding.weight", "layers.0.q.weight", "norm.weight"):
        checkpoint.part(name)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_gguf_files_are_refused_or_read(data: st.DataObject, tiny_bytes: bytes, tmp_path: Path) -> None:
    content = bytearray(tiny_bytes)
    header = len(tiny_bytes) // 3
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, header))
        piece = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\xff", struct.pack("<Q", 1 << 40), b"\x09"]))
        content[at : at + len(piece)] = piece
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:cut])
    try:
        _open_all(path)
    except (CorruptFile, UnsupportedModel) as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + b"\0" * 40, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 40, "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 40, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 50), "list of"),
    ],
)
def test_hostile_headers_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises((CorruptFile, UnsupportedModel), match=message):
        GGUFFile(tmp_path / "x.gguf")


def test_unknown_kinds_of_scaling_are_refused_by_name(home: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", make_model("llama linear rope"), Kind.F32)
    kind = struct.pack("<Q", 6)
    content = (tmp_path / "x.gguf").read_bytes()
    assert content.count(kind + b"linear") == 1
    (tmp_path / "x.gguf").write_bytes(content.replace(kind + b"linear", kind + b"spiral"))
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.type = .*spiral.* is not supported"):
        load(tmp_path / "x.gguf", device="cpu")


def test_other_architectures_are_refused_with_a_next_step(home: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv6")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'rwkv6' is not one of .*: give the safetensors folder or the Hub id"):
        load(tmp_path / "x.gguf", device="cpu")
