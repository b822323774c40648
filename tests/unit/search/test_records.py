"""Searches that go on from a file: the same result as in one go, and less written and scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import decodery as dc
from decodery.core.errors import CorruptFile, SettingsError
from decodery.step.search_record import SearchRecord
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
    "line", ["{}", "[1]", '{"text": "a", "tokens": "x", "logprobs": [], "ended": true, "reason": null}', "no JSON", "9"]
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
