"""Own prompts: files that are read and refused, requests as methods, right answers, and the files that are written."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest

from commands import inside
from decodery.bench.exports import to_csv, to_latex, to_svg
from decodery.bench.report import table
from decodery.bench.settings import Settings
from decodery.bench.terminal import show
from decodery.bench.workloads import OWN, digest_of, own_questions
from decodery.cli.bench_requests import requests_of
from decodery.core.errors import SettingsError, UnknownMethod
from tiny_bench import make_lm, measure

LINES: list[dict[str, Any]] = [
    {"id": "sum", "category": "math", "prompt": "What is 2 + 3? Give the number.", "answer": 5},
    {"category": "talk", "turns": ["Name a colour.", "Another one."]},
    {
        "category": "math",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 7 + 1?"}],
        "answer": "a banana",
    },
]


def written(folder: Path, lines: list[dict[str, Any]], name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_own_prompts_are_texts_turns_or_messages(tmp_path: Path) -> None:
    summed, talk, short = own_questions(written(tmp_path, LINES))
    assert (summed.id, summed.category, summed.turns) == ("sum", "math", (LINES[0]["prompt"],))
    assert (talk.id, talk.turns, talk.problem) == ("2", ("Name a colour.", "Another one."), None)
    assert short.before == (("system", "Be short."),) and short.turns == ("What is 7 + 1?",)
    assert summed.problem is not None and summed.problem.answer == "5"
    (tmp_path / "p.txt").write_text("One prompt.\n\nAnother.\n")
    assert [each.turns[0] for each in own_questions(tmp_path / "p.txt")] == ["One prompt.", "Another."]
    assert len(own_questions(tmp_path / "p.txt", 1)) == 1


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ({"prompt": "x", "lable": 1}, "the field 'lable'"),
        ({"prompt": "x", "turns": ["y"]}, "has prompt and turns"),
        ({"answer": 1}, "has no prompt"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "the user's last"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "both texts"),
        ({"turns": []}, "must be a text"),
        ({"prompt": 3}, "must be a text"),
        ({"prompt": ""}, "must be a text, not an empty one"),
        ({"prompt": "x", "answer": None}, "neither an answer nor tests"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(line: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=wrong):
        own_questions(written(tmp_path, [line]))


def test_options_of_a_request_are_read_as_generate_reads_them() -> None:
    found = requests_of(["--drafter prompt-lookup:length=3 --top-k 5", "--search beam:width=2"])
    settings, search = found["--drafter prompt-lookup:length=3 --top-k 5"]
    assert settings["top_k"] == 5 and settings["drafter"].length == 3 and search is None
    assert found["--search beam:width=2"][1].width == 2  # type: ignore[union-attr]
    for text, wrong in (("--seed 3", "--seed is the same"), ("--what 3", "--what"), ("'", "mind the quotes")):
        with pytest.raises(click.UsageError, match=wrong):
            requests_of([text])
    with pytest.raises(UnknownMethod, match="autoo"):
        requests_of(["--drafter autoo"])


def test_a_run_counts_right_answers_and_writes_what_papers_need(tmp_path: Path) -> None:
    lm, tries = make_lm(), ["--drafter none --sampler top-k:k=3", "--search best-of-n:n=2,scorer=log-probability"]
    # The first answer is the model's own and the other one is not.
    text = lm.generate("What is 2?", max_new_tokens=12).text
    lines = [
        {"prompt": "What is 2?", "answer": text}, {"prompt": "What is 3?", "answer": f"{text}!"}, {"prompt": "Hello."},
    ]  # fmt: skip
    settings = Settings(
        methods=("none",), workloads=(OWN,), file=str(written(tmp_path, lines)), requests=tuple(tries), answer="whole",
        max_new_tokens=12, rounds=1, warmup=0, timelines=0,
    )  # fmt: skip
    found = measure(lm, tmp_path, settings, requests=requests_of(tries))
    sums = {row["method"]: row for row in found["rows"] if row["category"] == "all"}
    assert list(sums) == ["none", *tries]
    assert (sums["none"]["right"], sums["none"]["answered"]) == (1, 2) and "right (95 %)" in table(found)
    assert sums[tries[1]]["rows_per_token"] > 1, "two texts are written for one"
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert len(rows) == len(found["rows"]) and rows[0]["method"] == "none" and rows[0]["right"] == "1"
    latex = to_latex(found)
    assert latex.count(r"\\") == len(sums) + 1 and "{-}{-}drafter none" in latex and r"\%" in latex
    assert sum(each.tag.endswith("rect") for each in ElementTree.fromstring(to_svg(found)).iter()) == len(sums)
    # A result says how to repeat it: its prompts, and the requests by their text.
    assert Settings.from_dict(found["settings"]) == settings
    # Other prompts in the same file are no repetition of it.
    noted = replace(settings, digest=digest_of(tmp_path / "p.jsonl"))
    written(tmp_path, lines[:2])
    with pytest.raises(SettingsError, match="has changed since"):
        measure(lm, tmp_path, noted, requests=requests_of(tries))


@pytest.mark.parametrize("methods", [("none",), ("none", "prompt-lookup")])
def test_speed_ups_by_category_need_a_method_that_has_one(
    tmp_path: Path, methods: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(
        methods=methods, workloads=(OWN,), file=str(written(tmp_path, LINES)), max_new_tokens=4, rounds=1, warmup=0,
        timelines=0,
    )  # fmt: skip
    show(measure(make_lm(), tmp_path, settings))
    shown = capsys.readouterr().out
    assert "right (95 %)" in shown and ("by category" in " ".join(shown.split())) == (len(methods) > 1)


def test_what_does_not_go_with_a_file_is_refused(tmp_path: Path) -> None:
    path = str(written(tmp_path, LINES))
    for given, wrong in ((["--pass"], "FILE excludes"), (["--try", "--seed 1"], "give it to bench")):
        status, _, errors = inside("bench", path, *given)
        assert status != 0 and wrong in errors
    for wrong, said in (
        ("--drafterr auto", "did you mean --drafter?"),
        ("--nothing-like-it", "`decodery generate --help` lists them"),
        ("--help", "`decodery generate --help` lists them"),
        ("--temperature hot", "'hot' is not a valid float"),
    ):
        status, shown, errors = inside("bench", path, "--try", wrong)
        assert status == 2 and not shown and f"--try {wrong!r}: " in errors and said in errors
        assert "--try --help" not in errors
    with pytest.raises(SettingsError, match="no workload 'own'"):
        Settings(workloads=(OWN,))


def test_searches_that_make_prompts_of_the_question_are_measured(tmp_path: Path) -> None:
    lm = make_lm()
    tries = [
        "--search self-refine:iterations=1 --sampler top-k:k=9",
        "--search best-of-n:n=2,scorer=question-likelihood",
    ]
    settings = Settings(
        methods=("none",), workloads=(OWN,), file=str(written(tmp_path, LINES[:2])), requests=tuple(tries),
        max_new_tokens=4, rounds=1, warmup=1, timelines=0, temperature=1.0,
    )  # fmt: skip
    found = measure(lm, tmp_path, settings, requests=requests_of(tries))
    rows = [row for row in found["rows"] if row["category"] == "all"]
    assert [row["method"] for row in rows] == ["none", *tries] and all(row["prompts"] == 3 for row in rows)
