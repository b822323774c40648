"""The cache of converted weights, and what bad input gets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.loaders.gguf_model import GGUFCheckpoint
from decodery.models.loaders.load import LoadedModel, load
from tiny_gguf import write_gguf
from tiny_models import assert_same_logits, make_model, reference, save

CPU = torch.device("cpu")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def load_exact(path: Path) -> LoadedModel:
    return load(path, dtype="float32", device="cpu")


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


@pytest.mark.integration
def test_a_warm_load_needs_neither_source_nor_heavy_imports(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_model("llama"), Kind.Q8_0)
    load(path, device="cpu")
    code = (
        "import sys; from decodery.models.loaders.load import load\n"
        "m = load(sys.argv[1], device='cpu'); print(m.dtype)\n"
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

    def failing(self: GGUFCheckpoint, name: str, begin: int, end: int) -> torch.Tensor:
        calls.append(name)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return part(self, name, begin, end)

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


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "from 32 tokens by .* yarn"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, ""),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "from 64 tokens by .* llama3",
        ),
        ({"rope_type": "linear", "factor": 4.0}, "its files do not name by .* linear"),
        ({"rope_type": "linear", "factor": 1.0}, ""),
        ({"rope_type": "default"}, ""),
    ],
)
def test_a_stretched_context_is_announced_once_to_who_is_watching(
    scaling: dict,
    said: str,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1e4} | scaling}
    (folder / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    load_exact(folder)
    assert capsys.readouterr().err == "", "nobody is watching"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_exact(folder)
    lines = [line for line in capsys.readouterr().err.splitlines() if "stretched" in line]
    assert len(lines) == bool(said) and all(re.search(said, line) and "context of 128 tokens" in line for line in lines)


@pytest.mark.integration
def test_two_processes_may_load_at_once(home: Path, tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "model")
    code = "import sys; from decodery.models.loaders.load import load; print(load(sys.argv[1], dtype='float32').dtype)"
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
    kinds = ("int4", "quantized", "bfloat16", "float16", "float32")
    for hardware, bfloat16 in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("decodery.models.loaders.dtype.computes_bfloat16", lambda device, has=hardware: has)
        chosen = [choose_dtype("auto", kind, CPU) for kind in kinds]
        assert chosen == ["int4", "int8", bfloat16, "float32", "float32"]
    assert choose_dtype("bfloat16", "float32", CPU) == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_checkpoints_of_16_bits_keep_them_where_kernels_do(
    dtype: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model("qwen2").to(getattr(torch, dtype)), tmp_path / "model")
    monkeypatch.setattr("decodery.models.loaders.dtype.vectorised", lambda: True)
    loaded = load(folder, device="cpu")
    assert loaded.dtype == dtype
    monkeypatch.setattr("decodery.models.loaders.dtype.vectorised", lambda: False)
    monkeypatch.setattr("decodery.models.loaders.dtype.computes_bfloat16", lambda device: False)
    exact = load(folder, device="cpu")
    assert exact.dtype == "float32"
    segment, other = (Segment.chunk(list(range(20, 60)), each.model.new_cache()) for each in (loaded, exact))
    ours, theirs = loaded.model.forward(Batch([segment])).logits, exact.model.forward(Batch([other])).logits
    assert (ours - theirs).abs().max() < 1e-4


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "did you mean smollm2"),
        (
            "nothing-like-it",
            "smollm2, smollm2-draft, a folder, a .gguf file or a Hub id",
        ),
        ("./missing/model.gguf", "no file or folder"),
        ("nobody/nothing", "cannot fetch nobody/nothing from the Hub"),
    ],
)
def test_unknown_names(name: str, message: str, home: Path) -> None:
    with pytest.raises(ModelNotFound, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_a_revision_is_for_the_hub_alone(home: Path) -> None:
    with pytest.raises(SettingsError, match="leave revision out"):
        load("smollm2", revision="main")


def test_hub_models_that_are_here_need_no_network(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc123")
    model = make_model("qwen3, tied")
    folder = save(model, cached / "snapshots" / "abc123", max_shard_size="60KB")
    loaded = load("someone/tiny", dtype="float32", device="cpu")
    assert loaded.name == "someone/tiny"
    assert_same_logits(loaded.model, model)
    # A fetch that was cut off is not taken for the model.
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelNotFound, match="no complete safetensors weights"):
        load("someone/tiny", device="cpu")


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
    from decodery.models.loaders.folder import FolderCheckpoint

    with pytest.raises(UnsupportedModel, match="bias"):
        FolderCheckpoint(folder)


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(SettingsError, match="float32, bfloat16, float16, int8"):
        load("smollm2", dtype="float8")
    with pytest.raises(SettingsError, match="no device"):
        load("smollm2", device="processor")


@pytest.mark.integration
@pytest.mark.parametrize(("kept", "share"), [("float16", 1 / 2), ("int8", (1 + 2 / 64) / 4)])
def test_keys_and_values_in_less_memory(kept: str, share: float):
    """Fewer bytes in caches, the same bits however a text is fed, logits as near as int8's steps."""
    whole, less = load("smollm2", dtype="int8"), load("smollm2", dtype="int8", kv_dtype=kept)
    assert (whole.dtype, less.dtype) == ("int8", f"int8/{kept}")
    tokens, found = whole.tokenizer.encode("The tide comes in twice a day, and goes out as often."), []
    for loaded, parts in ((whole, 1), (less, 1), (less, 3)):
        cache = loaded.model.new_cache()
        for part in np.array_split(tokens, parts):
            logits = loaded.model.forward(Batch([Segment.chunk(part, cache)])).logits
            cache.keep(range(len(part)))
        found.append(logits[-1])
    assert less.model.new_cache().slot_bytes == share * whole.model.new_cache().slot_bytes
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1]), "less is kept"
    assert torch.nn.functional.cosine_similarity(found[0], found[1], dim=0) > 0.99
    for dtype, kv_dtype in (("int8", "int4"), ("float32", kept)):
        with pytest.raises(SettingsError, match=kept):
            load("smollm2", dtype=dtype, kv_dtype=kv_dtype)
