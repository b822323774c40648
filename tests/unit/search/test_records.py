"""Searches that go on from a file: the same result as in one go, and less written and scored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import decodery as dc
from decodery.core.errors import CorruptFile, SettingsError
from decodery.step.search_record import SearchRecord, TextPart, described, digest
from serving import tiny_lm

PROMPT = "What is 2 + 2?"
LENGTH = dc.scorers.TextScore(lambda text: 1 / (1 + text.count("e")), beginning=lambda text: 1 / (1 + text.count("e")))
SEARCHES = (
    "best-of-n:n=4",
    "weighted-vote:n=4",
    "adaptive-sampling:n=4,threshold=0.999",
    "particle-filter:particles=3,rounds=4,step_tokens=30",
    "step-beam:n=4,m=2,rounds=3,step_tokens=30",
    "mcts:n=2,simulations=4,rounds=3,step_tokens=30",
    "dvts:n=4,m=2,rounds=3,step_tokens=30",
    "iad:n=3,rounds=1",
    "self-consistency:n=3",
    "self-refine:iterations=1",
)


class Interrupted(Exception):
    """What stands for a process that is stopped."""


def search(name: str, record: Path | None = None, until: int | None = None, **settings: Any) -> list[tuple[Any, ...]]:
    """What a search finds; until: of how many turns it is interrupted."""
    turns = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal turns
        turns += 1
        if until is not None and turns > until:
            raise Interrupted

    scored = name.split(":")[0] not in ("self-consistency", "self-refine")
    given = {"temperature": 1.0, "max_new_tokens": 100, "seed": 3} | settings
    found = tiny_lm().search(PROMPT, name, scorer=LENGTH if scored else None, progress=progress, record=record, **given)
    return [(each.tokens, each.text, each.score, each.finish_reason, each.trace.ledger.counts) for each in found]


def texts(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [each[:4] for each in found]


@pytest.mark.parametrize("name", SEARCHES, ids=lambda name: name.split(":")[0])
def test_what_was_interrupted_goes_on_to_the_same_result(tmp_path: Path, name: str) -> None:
    whole, record = search(name), tmp_path / "record.jsonl"
    for until in (70, 20):
        with pytest.raises(Interrupted):
            search(name, record, until)
    assert record.stat().st_size > 500
    again = search(name, record)
    assert texts(again) == texts(whole) and again[0][4]["restored"] >= 64
    # All of it is in the file now: nothing is written or scored.
    last = search(name, record)
    assert texts(last) == texts(whole) and last[0][4]["restored"] > again[0][4]["restored"]


def test_scores_are_not_asked_for_again(tmp_path: Path) -> None:
    asked: list[str] = []
    scorer = dc.scorers.TextScore(lambda text: asked.append(text) or float(len(asked)))  # type: ignore[func-returns-value]
    found = [
        tiny_lm().search(
            PROMPT, "best-of-n:n=3", scorer=scorer, temperature=1.0, max_new_tokens=8, record=tmp_path / "scored.jsonl"
        )
        for _ in range(2)
    ]
    assert len(asked) == 3 and [each.score for each in found[0]] == [each.score for each in found[1]]


def test_a_line_that_was_cut_is_written_again(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    whole = search("best-of-n:n=3", record)
    full = record.read_bytes()
    for size in (len(full) - 7, len(full) // 2, 30):
        record.write_bytes(full[:size])
        assert texts(search("best-of-n:n=3", record)) == texts(whole)
        assert record.read_bytes().endswith(b"\n") and all(json.loads(line) for line in record.open())


def test_the_record_of_something_else_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    search("best-of-n:n=2", record, max_new_tokens=8)
    for name, settings, what in (
        ("best-of-n:n=3", {}, "search"),
        ("best-of-n:n=2", {"seed": 4}, "seed"),
        ("best-of-n:n=2", {"temperature": 0.5}, "sampler"),
        ("best-of-n:n=2", {"max_new_tokens": 9}, "max_new_tokens"),
    ):
        with pytest.raises(SettingsError, match=f"another {what}"):
            search(name, record, **{"max_new_tokens": 8} | settings)
    other = dc.scorers.TextScore(lambda text: 0.0, logarithmic=True)
    with pytest.raises(SettingsError, match="another search"):
        tiny_lm().search(
            PROMPT, "best-of-n:n=2", scorer=other, temperature=1.0, max_new_tokens=8, seed=3, record=record
        )
    with pytest.raises(SettingsError, match="another prompt"):
        tiny_lm().search("Hi", "best-of-n:n=2", scorer=LENGTH, temperature=1.0, max_new_tokens=8, seed=3, record=record)
    with pytest.raises(SettingsError, match="cannot go on from a record"):
        tiny_lm().search(PROMPT, "beam:width=2", record=tmp_path / "beam.jsonl")
    with pytest.raises(SettingsError, match="cannot go on from a record"):
        search("step-beam:step_seconds=1", tmp_path / "timed.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        '{"kind": "search record", "version": 1, "of": [1]}',
        '{"text": "a", "tokens": "x", "logprobs": [], "ended": true, "reason": null}',
        '{"text": "a", "tokens": [1], "logprobs": [[0, [[[], 0]]]], "ended": true, "reason": null}',
        '{"text": "a", "tokens": [1], "logprobs": [[1' + "0" * 400 + ', []]], "ended": true, "reason": null}',
        "no JSON",
        "9",
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, line: str) -> None:
    record = tmp_path / "record.jsonl"
    search("best-of-n:n=2", record, max_new_tokens=8)
    first = record.read_text().splitlines()[0]
    record.write_text(f"{first}\n{line}\n")
    with pytest.raises(CorruptFile, match="no record of a search"):
        search("best-of-n:n=2", record, max_new_tokens=8)
    record.write_text(f"{line}\n")
    with pytest.raises(CorruptFile, match="no record of a search"):
        search("best-of-n:n=2", record, max_new_tokens=8)


def test_a_record_names_the_version_that_wrote_it_and_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with SearchRecord(path, {"search": "a"}):
        pass
    first = json.loads(path.read_text())
    assert first["decodery"] == dc.__version__
    # The same format of another version is read.
    path.write_text(json.dumps(first | {"decodery": "0.0.9"}) + "\n")
    with SearchRecord(path, {"search": "a"}):
        pass
    written = json.dumps(first | {"version": 2, "decodery": "0.9.0", "of": {"another": "form"}}) + "\n"
    path.write_text(written)
    with pytest.raises(SettingsError, match=r"written by decodery 0\.9\.0 in format 2 .*goes on from format 1"):
        SearchRecord(path, {"search": "a"})
    assert path.read_text() == written


@pytest.mark.parametrize("content", ["notes", '{"kind": "notes"}', "{"])
def test_a_file_of_one_line_is_not_cut(tmp_path: Path, content: str) -> None:
    """A line without its end is cut off in a record alone."""
    path = tmp_path / "notes"
    path.write_text(content)
    if content == "{":
        with SearchRecord(path, {"search": "a"}):
            pass
        assert path.read_text().startswith('{"kind": "search record"')
    else:
        with pytest.raises(CorruptFile, match="no record of a search"):
            SearchRecord(path, {"search": "a"})
        assert path.read_text() == content


def test_functions_are_known_by_their_code_and_tensors_by_their_values() -> None:
    def scorer(worth: int) -> object:
        names: dict[str, object] = {}
        exec(f"def score(text):\n    return max(len(each) * {worth} for each in text)", names)
        return described(names["score"])

    assert scorer(2) == scorer(2) != scorer(3)
    tensors = torch.tensor(1.0), torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0], dtype=torch.bfloat16)
    assert len({digest(described(tensor)) for tensor in tensors}) == 4


def test_a_record_grows_with_its_texts_and_holds_each_once(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    (found, *_) = search("self-consistency:n=1", record, max_new_tokens=600, ignore_eos=True)
    parts = [json.loads(line) for line in record.open()][1:]
    assert len(parts) > 8 and [part["reads"] for part in parts if "reads" in part] == [found[1]]
    assert parts[-1]["ended"]


def test_a_line_that_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with SearchRecord(path, {"search": "a"}) as record:
        record.keep_part("long", TextPart(("a" * (1 << 24),)), None)
        record.keep_part("short", TextPart((1,)), None)
    with SearchRecord(path, {"search": "a"}) as record:
        assert record.part("long") is None and record.part("short") == TextPart((1,))


def test_where_no_files_are_locked_a_record_is_kept_all_the_same(tmp_path: Path) -> None:
    """Windows has no `fcntl`, which is imported with the package there."""
    code = """
import importlib, sys
from decodery.step import search_record
sys.platform, sys.modules["fcntl"] = "win32", None
importlib.reload(search_record)
for _ in range(2):
    with search_record.SearchRecord(sys.argv[1], {"search": "a"}) as record:
        known = record.score(print, "text")
        record.keep_score(print, "text", 1.0)
assert known == 1.0
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "record.jsonl")], check=True)


def test_one_process_has_it_and_it_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with SearchRecord(path, {"search": "a"}, most=200) as record:
        with pytest.raises(SettingsError, match="that is running"):
            SearchRecord(path, {"search": "a"})
        with pytest.warns(UserWarning, match="kept no more"):
            for number in range(20):
                record.keep_score(LENGTH, number, 1.0)
    assert path.stat().st_size <= 200
    with SearchRecord(path, {"search": "a"}, most=200) as record:
        assert record.score(LENGTH, 0) == 1.0 and record.score(LENGTH, 19) is None
    with pytest.raises(SettingsError, match="larger than 100 bytes"):
        SearchRecord(path, {"search": "a"}, most=100)
