"""Searches compared on own problems: samples drawn once, what is right, intervals, and going on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decodery.bench.metrics import wilson
from decodery.bench.searches import job
from decodery.bench.searches.figures import plot, rows, table
from decodery.bench.searches.job import SearchJob, Settings
from decodery.bench.searches.pooled import Pooled
from decodery.bench.searches.problems import docstring_tests, read_problems
from decodery.bench.searches.tasks import Task, batches, run_together
from decodery.core.errors import SettingsError
from decodery.scorers import TextScore
from decodery.scorers.sandbox import Sandbox
from decodery.search import AdaptiveSampling, BestOfN, FirstFinish, SelfConsistency
from decodery.search.answers import AnswerExtractor
from decodery.search.base import Search
from scripted_lm import Asked, ScriptedLLM
from serving import tiny_lm

ADD = 'def add(a, b):\n    """Sum.\n\n    >>> add(1, 2)\n    3\n    >>> print("x")\n    x\n    """\n'


def written(path: Path, *entries: dict[str, Any] | str) -> Path:
    path.write_text("".join(each if isinstance(each, str) else f"{json.dumps(each)}\n" for each in entries))
    return path


def test_problems_are_read_and_checked(tmp_path: Path) -> None:
    humaneval = {"task_id": "t", "prompt": ADD, "entry_point": "add", "test": "def check(f):\n    assert f(2, 2) == 4"}
    gsm8k = {"question": "How many?", "answer": "It is 3.\n#### 1,000"}
    program, number, word = read_problems(
        written(tmp_path / "p.jsonl", humaneval, gsm8k, {"id": "w", "problem": "Where?", "answer": "Paris"})
    )
    assert program.examples == ("assert (add(1, 2)) == (3)",) == tuple(docstring_tests(ADD))
    box, answers = Sandbox(seconds=3.0), AnswerExtractor()
    assert program.right("    return a + b\n", answers, box) and not program.right(
        "    return a * b + 1\n", answers, box
    )
    assert number.right("so it is 1000.0", answers, box) and not number.right("3", answers, box)
    assert word.right("The answer is Paris.", answers, box) and not word.right("The answer is Rome.", answers, box)
    for line, words in (
        ("[]\n", "line 1"),
        ({"answer": "1"}, "no question"),
        ({"question": "q"}, "neither an answer nor tests"),
        ({"question": "q", "tests": "assert f"}, "list of Python statements"),
        ("\n", "holds no problem"),
    ):
        with pytest.raises(SettingsError, match=words):
            read_problems(written(tmp_path / "bad.jsonl", line))
    with pytest.raises(SettingsError, match="same id"):
        read_problems(written(tmp_path / "bad.jsonl", {"id": 1, **gsm8k}, {"id": 1, **gsm8k}))


def test_samples_drawn_once_are_those_of_each_search() -> None:
    lm, score = tiny_lm(), TextScore(lambda text: sum(map(ord, text)) % 97)
    searches = [BestOfN(score, n=1), BestOfN(score, n=4), SelfConsistency(n=3, answer="whole")]
    searches.append(AdaptiveSampling(score, n=4, threshold=60, schedule="constant"))
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8, "seed": 5}
    pooled = Pooled(searches)
    pooled.run(lm.engine(), lm.request_for("q", drafter=None, **settings))
    for search, found in zip(searches, pooled.found, strict=True):
        (alone, *_) = lm.search("q", search, **settings)
        assert (found.text, found.tokens) == (alone.text, alone.trace.ledger.tokens)
    assert len({found.tokens for found in pooled.found}) > 2


def test_figures_are_shares_with_intervals() -> None:
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4) and wilson(0, 0) == (0.0, 1.0)
    records = [
        {
            "problem": str(n),
            "search": name,
            "budget": 1,
            "right": right,
            "tokens": cost,
            "scorer_calls": 2,
            "seconds": 1,
        }
        for name, rights, cost in (("a", [0, 0, 1, 1], 10), ("b<", [1, 1, 1, 0], 30))
        for n, right in enumerate(rights)
    ]
    first, second = found = rows(records, [("a", 1), ("b<", 1), ("never", 1)])
    assert (first["accuracy"], second["accuracy"], second["tokens"]) == (0.5, 0.75, 30)
    assert (
        first["gain"] == first["gain_low"] == 0
        and second["gain"] == 0.25
        and second["gain_low"] < 0 < second["gain_high"]
    )
    assert "| `b<` | 1 | 4 | 75 % [30, 95] | +25" in table(found) and "b&lt;" in plot(found)
    # A search may have marks of its own that would end a row or a cell.
    marked = table([first | {"search": 'dvts:delimiter="\n",pattern=a|b'}])
    assert marked.count("\n") == 2 and '| `dvts:delimiter="\\n",pattern=a\\|b` |' in marked
    # A point has a price where the gain is beyond chance.
    assert "tokens_per_point" not in second
    always = [each | {"right": each["search"] == "b<"} for each in records]
    _, dear = rows(always, [("a", 1), ("b<", 1)])
    assert dear["tokens_per_point"] == pytest.approx(20 / 100) and table([dear]).endswith("| 30 | 2.0 | 1.0 | 0 |")


def test_a_comparison_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    def script(asked: Asked) -> str:
        return f"#### {7 if asked.seed % 3 else 8}"

    problems = read_problems(written(tmp_path / "p.jsonl", *({"question": f"q{n}", "answer": 7} for n in range(6))))
    settings = Settings(("self-consistency:n={n}", "first-finish:n=2", "best-of-n:scorer={examples},n={n}"), (1, 3))
    out = tmp_path / "out"
    calls: list[str] = []
    first = SearchJob(ScriptedLLM(script), problems, settings, out).run(
        lambda what, done, total: calls.append(what), lambda: bool(calls)
    )
    # The samples of four problems, and two other searches: sixteen texts.
    assert not first["complete"] and [row["problems"] for row in first["rows"]] == [4, 4, 2] and calls == ["1"]
    (out / "records.jsonl").open("a").write('{"problem": "5", "sea')
    lm = ScriptedLLM(script)
    whole = SearchJob(lm, problems, settings, out).run()
    assert whole["complete"] and {asked.text for asked in lm.asked} == {"q2", "q3", "q4", "q5"}
    by_run = {(row["search"], row["budget"]): row for row in whole["rows"]}
    assert by_run["self-consistency:n={n}", 3]["accuracy"] == 1 and by_run["first-finish:n=2", 0]["problems"] == 6
    # Problems without examples have no program to run.
    assert not any("examples" in search for search, _ in by_run)
    assert {path.name for path in out.iterdir()} == {"records.jsonl", "results.json", "table.md", "accuracy.svg"}
    with pytest.raises(SettingsError, match="other settings"):
        SearchJob(lm, problems, Settings(settings.searches, temperature=0.1), out).run()
    with pytest.raises(SettingsError, match=r"no \{question\}"):
        Settings(("beam",), prompt="x")


def test_no_batch_of_texts_begins_after_the_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = read_problems(written(tmp_path / "p.jsonl", *({"question": f"q{n}", "answer": 7} for n in range(4))))
    clock = iter(range(100))
    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    lm = ScriptedLLM(lambda asked: "#### 7")
    settings = Settings(("first-finish:n=9",))
    found = SearchJob(lm, problems, settings, tmp_path / "out", seconds=2).run()
    # The time begins at 0; batches of one problem each would begin at 1, 2, 3 and 4.
    assert not found["complete"] and [row["problems"] for row in found["rows"]] == [2]


def test_problems_that_share_passes_have_the_results_of_each_alone(tmp_path: Path) -> None:
    lm, score = tiny_lm(), TextScore(lambda text: sum(map(ord, text)) % 97)

    def task(number: int, search: Search, *, prompt: str = "") -> Task:
        settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8, "seed": number}
        runs = [(type(each).__name__, each.n) for each in search.searches] if isinstance(search, Pooled) else [("s", 0)]
        return Task(number, runs, search, lambda: lm.request_for(prompt or f"q{number}", drafter=None, **settings))

    def tasks() -> list[Task]:
        made = [task(n, Pooled([BestOfN(score, n=1), BestOfN(score, n=3)])) for n in range(2)]
        # Its prompt does not fit, which is its own affair.
        return [*made, task(5, FirstFinish(n=2), prompt="x" * 4096), *(task(n, FirstFinish(n=2)) for n in range(3, 5))]

    (batch,) = batches(tasks())
    together = {(each.number, each.run): each for each in run_together(lm.engine(), batch)}
    for each in tasks():
        for alone in run_together(lm.engine(), [each]):
            assert alone.found == together[alone.number, alone.run].found
    failed = together[5, ("s", 0)]
    assert failed.found.error and failed.seconds == 0 < together[4, ("s", 0)].seconds
    assert [[one.number for one in each] for each in batches([task(n, FirstFinish(n=7)) for n in range(3)])] == [
        [0, 1],
        [2],
    ]
