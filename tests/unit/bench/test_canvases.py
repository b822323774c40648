"""ParallelBench: scores of right, nearly right and malformed answers, figures by hand, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commands import inside
from decodery.bench.result import dump
from decodery.core.errors import SettingsError
from decodery.training.diffusion import DiffusionRecipe, train_diffusion
from decodery_benchmarks.commands.parallelbench import parallelbench
from decodery_benchmarks.diffusion.figures import adaptivity_gap, fastest, table
from decodery_benchmarks.diffusion.job import kendall, wilson
from decodery_benchmarks.diffusion.settings import CanvasSettings
from decodery_benchmarks.diffusion.tasks import published, right
from decodery_benchmarks.kinds import read

ITEMS = ["Ann Lee", "Bo Ray", "Cy Dee"]


def shown(items: list[str]) -> str:
    return json.dumps(items)


@pytest.mark.parametrize(
    ("task", "word", "index", "good", "bad"),
    [
        ("copy", None, None, ITEMS, ITEMS[::-1]),
        ("reverse", None, None, ITEMS[::-1], ITEMS),
        ("sort", None, None, ITEMS, ITEMS[1:]),
        ("shuffle", None, None, [ITEMS[1], ITEMS[0], ITEMS[2]], ITEMS),
        ("insert-index", "Di Fox", 2, [*ITEMS[:2], "Di Fox", ITEMS[2]], ["Di Fox", *ITEMS]),
        ("insert-random", "Di Fox", None, ["Di Fox", *ITEMS], ["Di Fox", *ITEMS[::-1]]),
        ("remove-index", None, 0, ITEMS[1:], ITEMS[:2]),
        ("remove-random", None, None, ITEMS[:2], ITEMS[:1]),
        ("replace-index", "Di Fox", 1, [ITEMS[0], "Di Fox", ITEMS[2]], [*ITEMS[:2], "Di Fox"]),
        ("replace-random", "Di Fox", None, [*ITEMS[:2], "Di Fox"], ["Di Fox", "Di Fox", ITEMS[2]]),
    ],
)
def test_scores(task: str, word: str | None, index: int | None, good: list[str], bad: list[str]) -> None:
    assert right(task, ITEMS, word, index, f"Sure: {shown(good)}")
    assert right(task, ITEMS, word, index, f"{shown(bad)} no, {shown(good)}."), "the last list counts"
    for wrong in (shown(bad), shown(good)[1:-1], "", shown([*good, "X"])):
        assert not right(task, ITEMS, word, index, wrong)


def test_published_prompts_hold_an_example_and_their_own_answer_is_right(tmp_path: Path) -> None:
    folder = tmp_path / "parallelbench"
    folder.mkdir()
    example = {"input": {"context": shown(ITEMS), "word": "Di Fox", "index": 0}, "answer": shown(["Di Fox", *ITEMS])}
    row = {"input": {"context": shown(ITEMS[::-1]), "word": "Ed Oak", "index": 3, "icl_examples": [example]}}
    (folder / "waiting_line__insert_index.jsonl").write_text(json.dumps(row) + "\n")
    (item,) = published(["insert-index"], 5, tmp_path)
    assert "Ed Oak" in item.prompt and example["answer"] in item.prompt and item.apply_chat_template
    said: Any = SimpleNamespace(text=shown([*ITEMS[::-1], "Ed Oak"]))
    assert item.right(said) and not item.right(SimpleNamespace(text=example["answer"]))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="--data"):
        published(["copy"], 1, None)
    with pytest.raises(SettingsError, match="no task 'sudoku'"):
        published(["copy", "sudoku"], 1, tmp_path)


def test_figures_by_hand() -> None:
    def order(passes: list[int]) -> float:
        canvas: Any = SimpleNamespace(prompt_length=2, written=np.array([-1, -1, *passes]), output=[0] * len(passes))
        return kendall(canvas)

    assert order([0, 1, 2]) == 1 and order([2, 1, 0]) == -1 and order([4, 4, 4]) == 0
    assert order([0, 2, 1]) == pytest.approx(1 / 3)
    low, high = wilson(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-3) and wilson(10, 10)[1] == 1

    def row(method: str, task: str, right: int, speed: float) -> dict[str, Any]:
        return {"method": method, "task": task, "right": right, "prompts": 10, "tokens_per_pass": speed}

    rows = [
        *(row("static", task, 10, 1.0) for task in ("copy", "shuffle")),
        row("threshold:tau=0.5", "copy", 10, 6.0), row("threshold:tau=0.5", "shuffle", 2, 6.0),
        row("threshold:tau=0.9", "copy", 10, 4.0), row("threshold:tau=0.9", "shuffle", 10, 2.0),
    ]  # fmt: skip
    assert fastest(rows, ["threshold:tau=0.5", "threshold:tau=0.9"]) == {"copy": 6.0, "shuffle": 2.0}
    # Each alone: (6 + 1) / 2 and (4 + 2) / 2.
    assert adaptivity_gap(rows) == pytest.approx(4 / 3.5) and adaptivity_gap(rows[:4]) is None


def test_a_run_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    train_diffusion(DiffusionRecipe(("copy", "shuffle"), letters=4, steps=1, batch=8), tmp_path / "m")
    asked = ["-m", str(tmp_path / "m"), "--dtype", "float32", "--prompts", "2"]
    status, said, _ = inside(
        *asked,
        "--tasks",
        "copy,shuffle",
        "--letters",
        "4",
        "--methods",
        "threshold:tau=0.5",
        "--out",
        str(tmp_path / "o"),
        group=parallelbench,
    )
    assert status == 0 and "| `threshold:tau=0.5` |" in said
    result = read(tmp_path / "o")
    assert [(row["method"], row["task"]) for row in result["rows"]] == [
        (method, task) for method in ("static", "threshold:tau=0.5") for task in ("copy", "shuffle")
    ]
    assert all(0 <= row["low"] <= row["right"] / 2 <= row["high"] <= 1 for row in result["rows"])
    assert table(result) in said and "<svg" in (tmp_path / "o" / "report.html").read_text()
    # What was interrupted after its first method goes on with the second, and ends as if nothing had been.
    half = result | {"complete": False, "rows": result["rows"][:2]}
    (tmp_path / "o" / "results.json").write_text(dump(half))
    status, said, _ = inside("--resume", "--out", str(tmp_path / "o"), group=parallelbench)
    assert status == 0 and read(tmp_path / "o")["rows"][:2] == result["rows"][:2]
    assert [row["right"] for row in read(tmp_path / "o")["rows"]] == [row["right"] for row in result["rows"]]
    for options, wrong in (
        (["--resume", "--out", str(tmp_path / "o")], "is complete: choose another"),
        (["--tasks", "dance"], "no task 'dance'"),
        (["--rounds", "2"], "No such option '--rounds'"),
    ):
        status, _, refused = inside(*asked, *options, group=parallelbench)
        assert status != 0 and wrong in refused
    with pytest.raises(SettingsError, match="prompts must be"):
        CanvasSettings("m", prompts=0)
