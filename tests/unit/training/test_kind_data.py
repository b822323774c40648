"""What kinds of training learn from: text files, chats, datasets of the Hub, folders of texts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from decodery.core.errors import CorruptFile, ModelNotFound, PromptError, SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.speculative.stores.datastore import Datastore
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.datastore import Documents
from decodery.training.kind import KINDS, Run
from decodery.training.kind_data import CutFiles, OwnTexts, TextFiles, cut_texts, each_chat, read_chats
from decodery.training.lines import MOST_BYTES
from serving import tiny_lm


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], "id": 3}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def loaded(lm: LLM) -> LoadedModel:
    return LoadedModel(lm.model, lm.tokenizer, lm.chat_template, "tiny", "float64")


def cut(lm: LLM, out: Path, *files: Path, length: int = 60, said: list[str] | None = None) -> Corpus:
    given = CutFiles(files, length)
    given.check()
    return cut_texts(Run(loaded(lm), out, (given,), say=(said if said is not None else []).append))


def test_of_chats_the_last_answer_is_learned_after_the_chat_template(tmp_path: Path) -> None:
    lm, said = tiny_lm(), list[str]()
    chats = written(tmp_path / "chats.jsonl", chat("one?", "yes"), chat("x" * 60, "no"), chat("two?", "n" * 60))
    (tmp_path / "notes.txt").write_text("tide")
    corpus = cut(lm, tmp_path / "out", chats, tmp_path / "notes.txt", said=said)
    assert corpus[0].written == 0 and len(corpus) == 3
    for number, (question, answer) in enumerate((("one?", "yes"), ("two?", "n" * 60)), start=1):
        text, prompt = corpus[number], lm.encode([{"role": "user", "content": question}])
        assert text.tokens[: text.written].tolist() == prompt
        learned = [*lm.tokenizer.encode_after(answer), lm.tokenizer.eos_ids[0]]
        assert text.tokens[text.written :].tolist() == learned[: 60 - len(prompt)]
    assert said == [f"{chats}: 1 of 3 chats are left out, as no answer begins in 60 tokens"]


def test_pieces_of_chats_are_of_the_chat_template_one_after_another(tmp_path: Path) -> None:
    lm = tiny_lm()
    chats = written(tmp_path / "chats.jsonl", chat("one?", "yes"), chat("two?", "n" * 60))
    whole = list[int]()
    for question, answer in (("one?", "yes"), ("two?", "n" * 60)):
        whole += lm.encode(chat(question, "")["messages"][:1])
        whole += [*lm.tokenizer.encode_after(answer), *lm.tokenizer.eos_ids[:1]]
    # The first one alone is too short for a piece.
    found = TextFiles((chats,), length=40).pieces(loaded(lm))
    assert found == [whole[first : first + 40] for first in range(0, len(whole) - 39, 40)] and found
    with pytest.raises(CorruptFile, match=r"line 1 of .* is not .* that ends with an answer"):
        TextFiles((written(tmp_path / "text.jsonl", {"text": "tide" * 40}),), length=40).pieces(loaded(lm))


def test_chats_of_a_datastore_are_documents_by_the_chat_template(tmp_path: Path) -> None:
    lm, out = tiny_lm(), tmp_path / "out"
    chats = written(tmp_path / "chats.jsonl", chat("one?", "yes"), chat("two?", "n" * 60))
    (tmp_path / "notes.txt").write_text("tide")
    learn = KINDS["datastore"].learn
    figures = learn(Run(loaded(lm), out, (Documents((chats, tmp_path / "notes.txt")),)))
    documents = [each.tolist() for each in Datastore.open(str(out)).documents()]
    wanted = [lm.tokenizer.encode("tide", special=False)]
    for question, answer in (("one?", "yes"), ("two?", "n" * 60)):
        prompt = lm.encode([{"role": "user", "content": question}])
        wanted.append([*prompt, *lm.tokenizer.encode_after(answer)])
    assert sorted(each for each in documents if each) == sorted(wanted)
    # The end of an answer is there beside what separates documents.
    assert figures == {"tokens": sum(map(len, wanted)) + 2 + 3}
    with pytest.raises(CorruptFile, match=r"line 1 of .* is not .* that ends with an answer"):
        learn(Run(loaded(lm), tmp_path / "no", (Documents((written(tmp_path / "text.jsonl", {"text": "tide"}),)),)))


def test_chats_of_a_datastore_are_read_one_after_another(tmp_path: Path) -> None:
    lm, large = tiny_lm(), written(tmp_path / "large.jsonl", chat("one?", "yes"), "")
    # A hole makes it larger than what is held as a whole.
    os.truncate(large, MOST_BYTES + 1)
    prompt, answer = next(each_chat(lm, large))
    assert prompt == lm.encode(chat("one?", "")["messages"][:1]) and answer[:-1] == lm.tokenizer.encode_after("yes")
    with pytest.raises(SettingsError, match="larger than 256 MiB"):
        read_chats(lm, large)


def test_chats_that_cannot_be_indexed_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("tide")
    asked = {"messages": [{"role": "user", "content": "one?"}]}
    chats = written(tmp_path / "chats.jsonl", chat("one?", "yes"), asked)
    given = Documents((tmp_path / "notes.txt", chats))
    with pytest.raises(CorruptFile, match=f"line 2 of {chats} is not .* that ends with an answer"):
        given.check()
    with pytest.raises(SettingsError, match="no chat template"):
        KINDS["datastore"].learn(Run(loaded(tiny_lm(None)), tmp_path / "out", (given,)))
    assert not (tmp_path / "out.partial").exists()


def test_what_is_no_chat_and_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    lm, text = tiny_lm(), written(tmp_path / "text.jsonl", {"text": "tide"})
    asked = written(tmp_path / "asked.jsonl", {"messages": [{"role": "user", "content": "one?"}]})
    for file in (text, asked):
        with pytest.raises(CorruptFile, match=f"line 1 of {file} is not .* that ends with an answer"):
            cut(lm, tmp_path / file.stem, file)
    with pytest.raises(SettingsError, match="no chat template"):
        cut(tiny_lm(None), tmp_path / "plain", written(tmp_path / "chats.jsonl", chat("one?", "yes")))
    with pytest.raises(SettingsError, match=r"none\.txt does not exist"):
        cut(lm, tmp_path / "none", tmp_path / "none.txt")
    with pytest.raises(SettingsError, match="give it alone"):
        cut(lm, tmp_path / "two", tmp_path, text)


def test_a_chat_that_the_template_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    chats = written(tmp_path / "chats.jsonl", chat("one?", "yes"), chat("two?", "no"))
    lm = tiny_lm("{% if messages[0].content == 'two?' %}{{ raise_exception('no two') }}{% endif %}x")
    with pytest.raises(PromptError, match=rf"line 2 of {chats}: .*no two"):
        cut(lm, tmp_path / "out", chats)


def test_a_snapshot_of_the_same_bytes_is_the_same_text(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes.txt").write_text("tide")
        assert len(cut(tiny_lm(), tmp_path / "out", tmp_path / folder / "notes.txt")) == 1


def test_a_mistyped_path_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data/notes", "other/notes.txt", "other/chats.jsonl"):
        with pytest.raises(SettingsError, match=f"{name} does not exist"):
            CutFiles((Path(name),)).check()
    CutFiles((Path("owner/chats"),)).check()


def test_one_prompt_is_refused_before_texts_are_written(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\none\n")
    with pytest.raises(SettingsError, match=r"prompts\.txt holds one prompt: give two"):
        OwnTexts(prompts=prompts).check()
    prompts.write_text("one\ntwo\n")
    OwnTexts(prompts=prompts).check()


def test_texts_of_another_version_are_refused(tmp_path: Path) -> None:
    lm, prompts = tiny_lm(), [[256, number] for number in range(2)]
    write_texts(loaded(lm), prompts, tmp_path, max_new_tokens=2)
    facts = json.loads((tmp_path / "corpus.json").read_text())
    (tmp_path / "corpus.json").write_text(json.dumps({**facts, "format": 1}))
    with pytest.raises(SettingsError, match="made by another version: make the training text again"):
        write_texts(loaded(lm), prompts, tmp_path, max_new_tokens=2)


def test_a_folder_of_texts_that_is_not_finished_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    lm, prompts = tiny_lm(), [[256, number] for number in range(6)]
    monkeypatch.setattr("decodery.training.data.SHARD", 2)
    with pytest.raises(KeyboardInterrupt):
        write_texts(loaded(lm), prompts, tmp_path / "written", max_new_tokens=4, batch=1, progress=stop)
    with pytest.raises(SettingsError, match="holds 2 of 6 texts"):
        cut(lm, tmp_path / "out", tmp_path / "written")
    write_texts(loaded(lm), prompts, tmp_path / "written", max_new_tokens=4, batch=1)
    assert len(cut(lm, tmp_path / "out", tmp_path / "written")) == 6


def test_a_dataset_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **how: Any) -> str:
        asked.append({"name": name, **how})
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snapshot" / "data").mkdir(parents=True)
    with pytest.raises(ModelNotFound, match=r"dataset owner/chats has no \.jsonl"):
        cut(tiny_lm(), tmp_path / "out", Path("owner/chats"))
    (tmp_path / "snapshot" / "licence.txt").write_text("tide")
    written(tmp_path / "snapshot" / "data" / "chats.jsonl", chat("one?", "yes"))
    corpus = cut(tiny_lm(), tmp_path / "out", Path("owner/chats"))
    assert len(corpus) == 1 and corpus[0].written > 0
    (tmp_path / "snapshot" / "data" / "chats.jsonl").unlink()
    for name in ("README", "LICENSE", "requirements-dev", "tides"):
        (tmp_path / "snapshot" / f"{name}.txt").write_text("tide")
    said = list[str]()
    assert len(cut(tiny_lm(), tmp_path / "text", Path("owner/chats"), said=said)) == 1
    assert said == ["of owner/chats are read: tides.txt"]
    assert asked[-1]["name"] == "owner/chats" and asked[-1]["repo_type"] == "dataset"
