"""Other programs beside ours: what is counted of them, and what is said where they are missing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

import decodery
import tiny_gguf
import tiny_models
from decodery.bench.record import Prompt, Record
from decodery.bench.rows import make_rows
from decodery.bench.settings import Settings
from decodery.bench.subject import Own, UnavailableError, check_methods, open_subjects
from decodery.core.errors import DecoderyError, SettingsError, UnknownMethod
from decodery.llm.llm import LLM
from decodery_benchmarks.peers import PEERS, installed, open_peer, peers
from decodery_benchmarks.peers.apart import Apart, open_apart
from decodery_benchmarks.peers.base import Order, Peer, Told, checkpoint, dense_dtype
from decodery_benchmarks.peers.llama_cpp import Written, main_type, per_pass, requantize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a Hugging Face folder."""
    place = tmp_path_factory.mktemp("model") / "tiny"
    tiny_models.save(tiny_models.make_model("llama"), place)
    # Peers draw ids that are no token, too.
    tiny_models.whole_tokenizer().save(str(place / "tokenizer.json"))
    return place


@pytest.fixture(scope="module")
def lm(folder: Path) -> LLM:
    return decodery.load(str(folder), dtype="float32")


def test_transformers_writes_what_we_write(lm: LLM, folder: Path) -> None:
    settings = Settings(model=str(folder))
    prompts = [lm.encode(text, apply_chat_template=False) for text in ("abcabcabcabc", "one two one two one")]
    expected = Own(lm, "none", 0.0).decode(prompts, max_new_tokens=20, seed=0)
    for name in ("transformers", "transformers-lookup"):
        peer = open_peer(Order.of(name, lm, settings))
        run = peer.decode(prompts, max_new_tokens=20, seed=0)
        assert run.outputs == expected.outputs and peer.dtype == "float32"
        assert run.seconds > 0 and run.prefill_seconds > 0
        assert run.new_tokens == sum(tokens * count for tokens, count in run.emitted.items())
        assert run.passes == run.emitted.total() <= expected.passes
        if name == "transformers":
            assert (run.passes, run.new_tokens) == (expected.passes, expected.new_tokens)


def test_transformers_stops_where_we_stop(lm: LLM, folder: Path) -> None:
    prompt = lm.encode("abcabc", apply_chat_template=False)
    (whole,) = Own(lm, "none", 0.0).decode([prompt], max_new_tokens=12, seed=0).outputs
    order = Order.of("transformers", lm, Settings(model=str(folder)))
    peer = open_peer(replace(order, eos_ids=(whole[4],)))
    (cut,) = peer.decode([prompt], max_new_tokens=12, seed=0).outputs
    assert cut == whole[: whole.index(whole[4]) + 1]


def test_a_peer_in_a_process_of_its_own(lm: LLM, folder: Path) -> None:
    order = Order.of("transformers", lm, Settings(model=str(folder)))
    peer, here = open_apart(order), open_peer(order)
    assert isinstance(peer, Apart) and (peer.name, peer.dtype, peer.own) == (here.name, here.dtype, here.own)
    with pytest.raises(DecoderyError, match=r"transformers failed .*: leave it out"):
        peer.generate([10**9], 4, 0)
    prompt = lm.encode("one two one two", apply_chat_template=False)
    assert peer.generate(prompt, 8, 0).tokens == here.generate(prompt, 8, 0).tokens, "one failure does not end it"
    peer.process.kill()
    with pytest.raises(DecoderyError, match="the process of transformers ended while it was measured"):
        peer.generate(prompt, 8, 0)


@pytest.mark.parametrize(
    ("name", "package", "sentence"),
    [
        ("transformers", "transformers", "transformers is not installed"),
        ("economize", "economize", "economize is not installed"),
        ("economize-lookup", "economize", "economize is not installed"),
        ("llama.cpp", "xllamacpp", "xllamacpp is not installed"),
        ("openvino-lookup", "openvino_genai", "openvino-genai is not installed"),
    ],
)
def test_a_missing_package_is_said(
    lm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, sentence: str
) -> None:
    for module in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnavailableError, match=sentence):
        open_peer(Order.of(name, lm, Settings(model=str(folder))))


def test_a_missing_peer_has_a_row(lm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(model=str(folder), methods=("llama.cpp",))
    subjects, unavailable = open_subjects(lm, settings, peers())
    sentence = "xllamacpp is not installed"
    assert [subject.name for subject in subjects] == ["none"] and unavailable == {"llama.cpp": sentence}
    record = Record.of(subjects[0], Prompt("built-in", "qa", "qualitative", "1"), [[1, 2, 3]])
    record.add(subjects[0].decode([[1, 2, 3]], max_new_tokens=4, seed=0))
    rows = make_rows([record], settings, unavailable)
    (row,) = [row for row in rows if row["method"] == "llama.cpp"]
    assert (row["note"], row["prompts"], row["category"], row["speedup"]) == (sentence, 0, "all", None)


def test_programs_that_read_gguf_files_refuse_others(lm: LLM, folder: Path, tmp_path: Path) -> None:
    order = Order.of("llama.cpp-draft", lm, Settings(model=str(folder)))
    with pytest.raises(UnavailableError, match=r"name it as llama\.cpp-draft:model=FILE\.gguf"):
        order.draft()
    for setting in ("model=", "file=tiny.gguf"):
        with pytest.raises(UnavailableError, match="name it as"):
            replace(order, name=f"llama.cpp-draft:{setting}").draft()
    with pytest.raises(UnavailableError, match=r"tiny is no \.gguf file"):
        replace(order, name=f"llama.cpp-draft:model={folder}").draft()
    with pytest.raises(UnavailableError, match=r"there is no file .*none.gguf"):
        replace(order, name=f"llama.cpp-draft:model={tmp_path / 'none.gguf'}").draft()


def test_tokens_per_pass_by_those_accepted_so_far() -> None:
    # The first token is the prompt's; then passes of 1, 1 + 3 and 1 + 1 tokens, the last cut by the limit.
    assert per_pass([0, 0, 3, 3, 3, 3, 4]) == [1, 4, 1]
    assert per_pass([0]) == [] and per_pass([0, 0, 0]) == [1, 1]


def test_tokens_of_characters_that_are_not_complete_are_counted() -> None:
    """Events as llama.cpp sends them for emojis of three tokens, and one that the limit cuts."""

    def event(token: int | None, count: int, accepted: int) -> dict[str, Any]:
        timings = {"predicted_n": count, "draft_n_accepted": accepted, "draft_n": 9}
        return {"tokens": [] if token is None else [token], "timings": timings}

    found = Written.of([event(218, 3, 2), event(115, 6, 4), event(40993, 7, 4), event(None, 9, 4)])
    assert found.tokens == [218, 115, 40993] and found.drafted == 9
    assert len(found.times) == 9 and found.times.count(found.times[0]) == 3
    # Six tokens after those of the first event, two of them accepted drafts: four passes.
    assert per_pass(found.accepted[2:]) == [3, 1, 1, 1]


def test_a_peer_by_its_name_and_draft() -> None:
    assert "openvino" in peers() and "llama.cpp-draft:model=tiny.gguf" in peers()
    assert "prompt-lookup:length=5" not in peers()
    check_methods(("llama.cpp-draft:model=tiny.gguf", "none"), peers())
    with pytest.raises(UnknownMethod, match="the peers are transformers,"):
        check_methods(("llama-cpp",), peers())


def test_every_peer_has_its_module() -> None:
    assert set(installed()) <= set(PEERS) and "transformers" in installed()


class Three(Peer):
    """Says of every prompt: two passes of one and three tokens after the first."""

    def generate(self, prompt: list[int], max_new_tokens: int, seed: int) -> Told:
        return Told([seed] * 5, [1, 3], 0.5, 0.25, rows=6)


def test_prompts_of_a_peer_are_added_up() -> None:
    three = Three(Order("three", "", "float32", 0.0, (), 64, "cpu", 1), "float32")
    run = three.decode([[1], [2]], max_new_tokens=5, seed=7)
    assert run.outputs == [[7] * 5, [8] * 5]
    assert (run.passes, run.rows, run.new_tokens, dict(run.emitted)) == (4, 12, 8, {1: 2, 3: 2})
    assert (run.seconds, run.prefill_seconds, run.parts) == (1.0, 0.5, None)
    with pytest.raises(SettingsError, match="one prompt at a time"):
        three.decode([[1], [2]], max_new_tokens=5, seed=7, concurrency=2)


def test_the_checkpoint_behind_a_name(folder: Path, smollm2_int8: LLM, lm: LLM) -> None:
    assert checkpoint(str(folder)) == folder
    path = checkpoint("smollm2")
    assert main_type(path) == "Q4_1"
    assert dense_dtype(lm) == "float32" and dense_dtype(smollm2_int8) in ("bfloat16", "float32")


def test_a_file_in_another_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    source = tmp_path / "tiny.gguf"
    tiny_gguf.write_gguf(source, tiny_models.make_model("llama"), tiny_gguf.Kind.Q4_1)
    target = requantize(source, "Q8_0")
    before, after = GGUFReader(source), GGUFReader(target)
    assert (main_type(source), main_type(target)) == ("Q4_1", "Q8_0")
    kept = {name for name in before.fields if not name.startswith("GGUF.") and name != "general.file_type"}
    for name in kept:
        assert before.fields[name].contents() == after.fields[name].contents()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        values = dequantize(old.data, old.tensor_type), dequantize(new.data, new.tensor_type)
        assert np.abs(values[0] - values[1]).max() <= np.abs(values[0]).max() / 200
    written = target.stat().st_mtime_ns
    assert requantize(source, "Q8_0").stat().st_mtime_ns == written, "it is made once"
