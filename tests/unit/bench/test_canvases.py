"""ParallelBench: scores of right, nearly right and malformed answers, figures by hand, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import decodery
from commands import inside
from decodery.bench.metrics import wilson
from decodery.bench.result import dump
from decodery.core.errors import CorruptFile, SettingsError
from decodery.training.diffusion import DiffusionRecipe, train_diffusion
from decodery_benchmarks.commands.parallelbench import parallelbench
from decodery_benchmarks.diffusion.figures import adaptivity_gap, fastest, table
from decodery_benchmarks.diffusion.job import kendall
from decodery_benchmarks.diffusion.released import released
from decodery_benchmarks.diffusion.released_scores import JUDGED, ModelJudge
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


RELEASED = {
    "waiting_line_n15/replace_random": ("list_random_replace_score", {"context": shown(ITEMS), "word": "Di Fox"},
        {"input": ITEMS, "word": "Di Fox"}, shown([*ITEMS[:2], "Di Fox"]), shown(["Di Fox", *ITEMS[:2]])),
    "waiting_line/remove_random": ("list_random_remove_score", {"context": shown(ITEMS)}, {"input": ITEMS},
        f"Sure: {shown(ITEMS[1:])}.", shown(ITEMS)),
    "waiting_line/insert_random": ("list_random_insert_score", {"context": shown(ITEMS), "word": "Di Fox"},
        {"input": ITEMS, "word": "Di Fox"}, "Ann Lee, Di Fox, Bo Ray, Cy Dee", shown(["Di Fox", *ITEMS[::-1]])),
    "waiting_line/shuffle": ("list_shuffle_score", {"context": shown(ITEMS)}, {"input": ITEMS}, shown(ITEMS[::-1]),
        shown(ITEMS)),
    "puzzle/latin_square_n4": ("latin_square_score", {"size": 2, "symbols": "[A, 1]"}, {"symbols": ["A", "1"]},
        "Here:\nA,1\n1, A\n", "A,1\nA,1"),
    "puzzle/sudoku_n4_12": ("sudoku_score", {"sudoku": "0042\n2031\n4023\n3214"}, "1342\n2431\n4123\n3214",
        "1 3 4 2\n2 4 3 1\n4 1 2 3\n3 2 1 4", "1342\n2431\n4123\n3241"),
    "words_to_sentence/easy": ("sentence_to_words_score", {"words": "dog and ball"}, {"words": ["dog", "ball"]},
        "The dog has a ball.", "The dog has a bal."),
    "paraphrase_summarize/samsum": ("summary_score", {"text": "A: Tea?\nB: Yes."}, {"summary": "They drink tea."},
        "They drink tea.", "Something else"),
    "paraphrase_summarize/chatgpt-paraphrases": ("paraphrase_score", {"text": "Is it late?"}, {"text": "Is it late?"},
        "What time is it?", "Is it late?"),
}  # fmt: skip


class _Lenient:
    """A judge that finds every sentence right."""

    def grammatical(self, text: str) -> float:
        return 1.0

    def alike(self, text: str, other: str) -> float:
        return 1.0


@pytest.mark.parametrize("task", RELEASED)
def test_published_files_are_read_by_name_and_scored_as_released(task: str, tmp_path: Path) -> None:
    metric, asked, answer, good, bad = RELEASED[task]
    path = tmp_path / "parallelbench" / f"{task}.jsonl"
    path.parent.mkdir(parents=True)
    prompt = "Now: " + " ".join("{" + name + "}" for name in asked)
    (path.parent / "task_config.yaml").write_text(json.dumps({task: {"prompt": prompt, "metric": metric}}))
    example = {"input": asked, "answer": {"example": "so"}}
    path.write_text(json.dumps({"input": {**asked, "icl_examples": [example]}, "answer": answer}) + "\n")
    (item,) = released([task], 5, tmp_path, _Lenient())
    assert [turn["role"] for turn in item.prompt] == ["user", "assistant", "user"] and item.prompt[1]["content"] == "so"
    assert item.prompt[2]["content"] == "Now: " + " ".join(str(value) for value in asked.values())
    said: Any = SimpleNamespace
    assert item.right(said(text=good)) == 1 and item.right(said(text=bad)) < 0.1 and not item.right(said(text=""))
    if metric in JUDGED:
        with pytest.raises(SettingsError, match="--judge"):
            released([task], 5, tmp_path, None)
    for other, wrong in (("puzzle/nothing", "has no task"), ("../x", "has no task")):
        with pytest.raises(SettingsError, match=wrong):
            released([other], 5, tmp_path, None)
    (path.parent / "task_config.yaml").write_text(json.dumps({task: {"prompt": prompt, "metric": "charm_score"}}))
    with pytest.raises(CorruptFile, match="charm_score"):
        released([task], 5, tmp_path, None)


def test_a_judge_says_yes_or_no_and_is_asked_once() -> None:
    lm = decodery.load()
    judge = ModelJudge(lm)
    found = [judge.grammatical("The cat sat on the mat."), judge.alike("It is late.", "It is late.")]
    assert set(found) <= {0.0, 1.0}
    assert judge.grammatical("The cat sat on the mat.") == found[0] and len(judge.said) == 2


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
        (["--rounds", "2"], "no option is called '--rounds'"),
    ):
        status, _, refused = inside(*asked, *options, group=parallelbench)
        assert status != 0 and wrong in refused
    with pytest.raises(SettingsError, match="prompts must be"):
        CanvasSettings("m", prompts=0)
