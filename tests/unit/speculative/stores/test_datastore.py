"""Suffix arrays over a corpus, and how they get onto disk, against scans of the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from decodery.core.errors import CorruptFile, PromptError, SettingsError, VocabularyMismatch
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.speculative.drafters.rest import REST
from decodery.speculative.stores.datastore import Datastore, sort_suffixes
from decodery.step.draft_length_policy import Budget
from decodery.step.forward_request import run_sync
from decodery.testing import TableModel
from decodery.training.datastore import build_datastore
from tiny_models import make_tokenizer


def random_text(random: np.random.Generator, n: int, size: int) -> list[int]:
    return random.integers(0, size, n).tolist()


def runs_of(text: list[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(text[start : start + length]) for start in range(len(text) - length + 1)]


def test_suffixes_are_sorted_by_their_first_tokens() -> None:
    random = np.random.default_rng(6)
    for n, size in ((1, 1), (50, 2), (200, 1), (300, 4), (300, 60_000)):
        text = random_text(random, n, size)
        assert sort_suffixes(np.array(text)).tolist() == sorted(range(n), key=lambda at: (text[at : at + 64], at))


def corpus(random: np.random.Generator, texts: int, size: int) -> list[list[int]]:
    return [(1 + random.integers(0, size, int(random.integers(3, 40)))).tolist() for _ in range(texts)]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_datastore_answers_like_a_scan(shards: int) -> None:
    random = np.random.default_rng(7)
    texts = corpus(random, 12, 3)
    parts = [texts[number::shards] for number in range(shards)]
    store = Datastore([Datastore.build(part, 0, 9).shards[0] for part in parts], 0, 9)
    for _ in range(100):
        suffix = (1 + random.integers(0, 3, 8)).tolist()
        counts = [sum(runs_of(text, n).count(tuple(suffix[8 - n :])) for text in texts) for n in range(1, 9)]
        longest = max((n for n in range(1, 9) if counts[n - 1]), default=0)
        assert store.longest(suffix) == longest
        assert store.longest(suffix, 7) == (longest if longest >= 7 else 0)
        run = suffix[8 - longest :]
        assert store.count(run) == counts[longest - 1]
        expected = sorted(
            (text[at + longest : at + longest + 4] + [-1] * 4)[:4]
            for text in texts
            for at, other in enumerate(runs_of(text, longest))
            if other == tuple(run)
        )
        assert sorted(store.continuations(run, 5000, 4).tolist()) == expected
        some = store.continuations(run, 2, 4).tolist()
        assert len(some) == min(2, len(expected)) and all(each in expected for each in some)
    assert [sorted(text) for text in map(list, store.documents())] == [sorted(text) for part in parts for text in part]


@pytest.mark.parametrize("shards", [1, 2])
def test_of_many_hits_as_many_as_allowed_are_taken_and_no_other_runs(shards: int) -> None:
    # Floats that are added up may come to the end of the range, where the suffix after the last hit stands.
    for hits in (5001, 5015, 5043, 7001, 9999):
        texts = [[1, 2, 3 + number % 4] for number in range(hits)] + [[1, 7, 7], [2, 7, 7]]
        parts = [texts[number::shards] for number in range(shards)]
        store = Datastore([Datastore.build(part, 0, 9).shards[0] for part in parts], 0, 9)
        found = store.continuations([1, 2], 5000, 2)
        assert len(found) == 5000 and (found[:, 1] == -1).all()
        tokens, counts = np.unique(found[:, 0], return_counts=True)
        assert tokens.tolist() == [3, 4, 5, 6] and (abs(counts - 1250) <= shards).all(), "evenly spread"
        drafter = REST(store)
        seq = Engine(TableModel(9)).submit(Request([1, 2], drafter=drafter))
        assert sorted(run_sync(drafter.propose(seq, Budget(64, 64))).tokens.tolist()[1:]) == [3, 4, 5, 6]


def tokenizer(eos: bool = True) -> Tokenizer:
    return Tokenizer(make_tokenizer(), eos_ids=(257,) if eos else ())


def test_a_datastore_of_files_is_that_of_their_texts(tmp_path: Path) -> None:
    texts = ["one two one two three\n" * 5, "zwei drei — vier", "one two four\r\n" * 3]
    files = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, text in zip(files, texts, strict=True):
        path.write_bytes(text.encode())
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "00000.tokens.npy").write_text("left by a run that was interrupted")
    read: list[tuple[str, int, int]] = []
    total = build_datastore(
        files,
        tmp_path / "out",
        tokenizer=tokenizer(),
        vocab_size=288,
        progress=lambda *step: read.append(step),
        shard_tokens=50,
    )
    store = Datastore.open(str(tmp_path / "out"))
    ids = [tokenizer().encode(text, special=False) for text in texts]
    assert total == sum(len(each) + 1 for each in ids) == sum(len(shard.tokens) for shard in store.shards)
    size = sum(len(text.encode()) for text in texts)
    assert read[-1] == ("indexing", size, size)
    assert len(store.shards) == -(-total // 50)
    assert sum(len(part) for part in store.documents()) == sum(map(len, ids))
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(VocabularyMismatch, match="288 tokens and the model has 64"):
        store.fits(64)
    with pytest.raises(SettingsError, match="exists already"):
        build_datastore(files, tmp_path / "out", tokenizer=tokenizer(), vocab_size=288)


def test_bad_files_make_no_datastore(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(PromptError, match="no text"):
        build_datastore([tmp_path / "empty.txt"], tmp_path / "a", tokenizer=tokenizer(False), vocab_size=288)
    with pytest.raises(PromptError, match=r"latin.txt is not UTF-8"):
        build_datastore([tmp_path / "latin.txt"], tmp_path / "b", tokenizer=tokenizer(), vocab_size=288)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


@pytest.mark.parametrize("damage", ["header", "format", "missing", "short", "pickle"])
def test_a_damaged_datastore_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "text.txt").write_text("some text to index")
    out = tmp_path / "out"
    build_datastore([tmp_path / "text.txt"], out, tokenizer=tokenizer(), vocab_size=288)
    header, tokens = out / "datastore.json", out / "00000.tokens.npy"
    if damage == "header":
        header.write_text("{")
    elif damage == "format":
        header.write_text(json.dumps({"format": "other"}))
    elif damage == "missing":
        tokens.unlink()
    elif damage == "short":
        np.save(tokens, np.zeros(3, dtype=">u4"))
    else:
        np.save(tokens, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptFile):
        Datastore.open(str(out))
