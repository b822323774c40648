"""GGUF files as they are found: split, on the Hub by their quantization, and with a tokenizer that says too little."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
from decodery.models.loaders import package_index as embedded
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.loaders.gguf_tokenizer import read_texts
from decodery.models.loaders.load import load
from tiny_gguf import write_gguf
from tiny_models import assert_same_logits, make_model

TEXT = "<|im_start|>user\nWhat's 1234 + 5?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """Of the embedded model's file."""
    return GGUFFile(embedded.gguf_path("smollm2")).metadata


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_split_file_is_the_file_that_it_was_split_from(kind: Kind, tmp_path: Path) -> None:
    theirs = make_model("llama")
    write_gguf(tmp_path / "tiny.gguf", theirs, kind, split=7)
    parts = sorted(tmp_path.glob("tiny-*-of-*.gguf"))
    assert len(parts) > 2
    assert_same_logits(load(parts[0], dtype="float32", device="cpu").model, theirs)
    if kind != Kind.F32:
        write_gguf(tmp_path / "one.gguf", make_model("llama"), kind)
        whole, ours = (load(path, device="cpu") for path in (tmp_path / "one.gguf", parts[0]))
        assert whole.dtype == ours.dtype
        assert_same_logits(ours.model, theirs, tolerance=1.0)


def test_parts_that_are_missing_or_of_another_file_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), Kind.F32, split=12)
    parts = sorted(tmp_path.glob("tiny-*-of-*.gguf"))
    with pytest.raises(SettingsError, match=r"is part 2 of 3: give the first one, tiny-00001-of-00003\.gguf"):
        load(parts[1])
    first, second = (part.read_bytes() for part in parts[:2])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CorruptFile, match=r"tiny-00002-of-00003\.gguf is no part of"):
        load(parts[0])
    parts[1].write_bytes(second)
    (tmp_path / "renamed.gguf").write_bytes(first)
    with pytest.raises(CorruptFile, match="one of 3 parts with 30 tensors, and 1 with 12 are here"):
        load(tmp_path / "renamed.gguf")
    parts[2].unlink()
    with pytest.raises(CorruptFile, match=r"tiny-00003-of-00003\.gguf, one of the 3 parts .* is missing"):
        load(parts[0])


def test_a_hub_repository_gives_the_file_of_a_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--someone--tiny-GGUF"
    folder = cached / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    theirs = make_model("llama")
    write_gguf(folder / "tiny-q8_0.gguf", theirs, Kind.Q8_0)
    write_gguf(folder / "tiny-Q4_0.gguf", make_model("llama", seed=1), Kind.Q4_0)
    write_gguf(folder / "tiny-IQ4_0.gguf", make_model("llama", seed=2), Kind.Q4_0)
    # The vision tower of repositories with images.
    for name in ("mmproj-Q8_0.gguf", "tiny-mmproj-Q5_K_M.gguf"):
        (folder / name).write_bytes((folder / "tiny-Q4_0.gguf").read_bytes())
    assert_same_logits(load("someone/tiny-GGUF:Q8_0", dtype="float32", device="cpu").model, theirs)
    other = make_model("llama", seed=1)
    write_gguf(tmp_path / "same.gguf", other, Kind.Q4_0)
    assert_same_logits(load("someone/tiny-GGUF:q4_0", dtype="float32", device="cpu").model, other)
    with pytest.raises(ModelNotFound, match="Q5_K_M"):
        load("someone/tiny-GGUF:Q5_K_M")


def test_a_tokenizer_without_its_way_of_cutting_is_known_by_its_vocabulary(metadata: dict[str, Any]) -> None:
    less = {name: value for name, value in metadata.items() if name != "tokenizer.ggml.pre"}
    whole, found = (read_texts(each, "file.gguf")[0] for each in (metadata, less))
    assert found.encode(TEXT).ids == whole.encode(TEXT).ids
    # Digits apart, as smollm cuts them, which GPT-2 does not.
    assert len(found.encode("1234").ids) == 4
    other = less | {"tokenizer.ggml.tokens": [*less["tokenizer.ggml.tokens"][:-1], "another"]}
    with pytest.raises(UnsupportedModel, match=r"does not say how its tokenizer cuts texts \(tokenizer.ggml.pre\)"):
        read_texts(other, "file.gguf")


@pytest.mark.parametrize("damaged", ["all normal", "some normal", "none"])
def test_special_tokens_that_are_typed_as_text_are_special_and_that_is_said(
    damaged: str, metadata: dict[str, Any]
) -> None:
    types = metadata["tokenizer.ggml.token_type"].copy()
    backend, facts = read_texts(metadata, "file.gguf")
    changed = {name: value for name, value in metadata.items() if name != "tokenizer.ggml.token_type"}
    if damaged != "none":
        types[1 if damaged == "some normal" else slice(None)] = 1
        changed["tokenizer.ggml.token_type"] = types
    with pytest.warns(UserWarning, match=r"special tokens are typed as text \(.*<\|im_start\|>"):
        found, said = read_texts(changed, "file.gguf")
    assert found.encode(TEXT).ids == backend.encode(TEXT).ids
    assert found.decode(found.encode(TEXT).ids) == backend.decode(backend.encode(TEXT).ids)
    assert said.eos_ids == facts.eos_ids


def test_sound_files_are_read_without_a_word(metadata: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_texts(metadata, "file.gguf")
        # Text that looks like a special token, and that merges make.
        types = np.append(metadata["tokenizer.ggml.token_type"], 1)
        tokens = [*metadata["tokenizer.ggml.tokens"], "<|", "|>", "<||>"]
        merges = [*metadata["tokenizer.ggml.merges"], "< |", "| >", "<| |>"]
        changed = {"tokens": tokens, "merges": merges, "token_type": np.append(types, (1, 1))}
        read_texts(metadata | {f"tokenizer.ggml.{name}": each for name, each in changed.items()}, "file.gguf")


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([("split.count", "two")], "one of two parts"),
        ([("split.tensors.count", "none")], "with none tensors"),
        ([("general.name", "a"), ("general.name", "b")], "says general.name twice"),
    ],
)
def test_metadata_that_lies_is_refused(tmp_path: Path, pairs: list[tuple[str, str]], why: str) -> None:
    path, data = tmp_path / "lies.gguf", struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs))
    for key, text in pairs:
        data += struct.pack(f"<Q{len(key)}sIQ{len(text)}s", len(key), key.encode(), 8, len(text), text.encode())
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=why):
        GGUFFile.whole(path)
