"""The commands that make copies and compress texts, from a folder to a folder and from a file to a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import inside
from decodery.compression import Int8, transformed
from decodery.compression.folder import save
from decodery.models.loaders.load import load
from tiny_models import tiny_loaded


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A folder with a tiny model in int8."""
    loaded = tiny_loaded()
    save(tmp_path / "tiny", *transformed(loaded.model, [Int8()]), loaded)
    return str(tmp_path / "tiny")


def test_a_copy_is_made_and_told_about(tiny: str, tmp_path: Path) -> None:
    text, copy = tmp_path / "text.txt", str(tmp_path / "copy")
    text.write_text("The tide comes in and goes out again. " * 20)
    specs = ("--with", "nm-sparsity:by=activation", "--with", "int4:bits=3")
    code, output, errors = inside("compress-model", str(text), "-m", tiny, *specs, "--length", "64", "--out", copy)
    assert code == 0 and f"The copy is ready: {copy}" in output, errors
    assert "NMSparsity(n=2" in output and "bits per weight" in output
    assert load(copy).dtype == "int4" and json.loads((tmp_path / "copy" / "report.json").read_text())["of"]
    code, output, errors = inside(
        "generate", "ab", "-m", tiny, "--drafter", f"draft-model:model={copy}", "--json", "--max-new-tokens", "8"
    )
    assert code == 0 and json.loads(output)["text"] is not None, errors
    again = str(tmp_path / "again")
    code, _, errors = inside("compress-model", tiny, str(text), *specs, "--length", "64", "--out", again)
    assert code == 0 and all(
        (tmp_path / "again" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()
        for name in ("int4.safetensors", "report.json")
    ), errors
    code, _, errors = inside("compress-model", tiny, "--with", "slicegpt", "--out", copy)
    assert code == 1 and "slicegpt must read a text" in errors
    code, _, errors = inside("compress-model", tiny, "nowhere.txt", "--with", "slicegpt", "--out", copy)
    assert code == 2 and "nowhere.txt" in errors
    (tmp_path / "bytes").write_bytes(b"\xff\xfe tides")
    code, _, errors = inside("compress-model", tiny, str(tmp_path / "bytes"), "--with", "slicegpt", "--out", copy)
    assert code == 1 and "is not UTF-8 text" in errors
    code, _, errors = inside("compress-model", "-m", tiny, "--with", "int8", "--out", str(tmp_path))
    assert code == 1 and "name a new folder" in errors


def test_a_file_is_compressed_and_comes_back(tiny: str, tmp_path: Path) -> None:
    file, made, again = tmp_path / "notes.txt", tmp_path / "notes.txt.dcy", tmp_path / "again.txt"
    file.write_bytes(b"tides \xff and times")
    code, output, errors = inside("compress-text", str(file), "-m", tiny)
    assert code == 0 and "bits per byte" in output and made.is_file(), errors
    code, _, errors = inside("decompress-text", str(made), "-m", tiny)
    assert code == 1 and "exists" in errors
    code, output, errors = inside("decompress-text", str(made), "-m", tiny, "--out", str(again), "--drafter", "ngram")
    assert code == 0 and again.read_bytes() == file.read_bytes(), errors
    made.write_bytes(made.read_bytes()[:-1])
    code, _, errors = inside("decompress-text", str(made), "-m", tiny, "--out", str(tmp_path / "third"))
    assert code == 1 and "damaged" in errors and not (tmp_path / "third").exists()
