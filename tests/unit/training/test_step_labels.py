"""Labels of steps by an annotator: what is read of any text, what it is asked, and what is learned of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from decodery.core.errors import CorruptFile, SettingsError
from decodery.training import annotation as annotations
from decodery.training.annotation import annotation, labels_of, steps_of
from decodery.training.kind import Run
from decodery.training.step_labels import (
    Exercise,
    LabelSettings,
    StepLabels,
    label_steps,
    preference_pairs,
    read_exercises,
)
from decodery.training.text_prm import step_ends
from scripted_lm import Asked, ScriptedLLM
from serving import tiny_lm


def _item(step: object, label: object = "CORRECT", **more: object) -> dict[str, object]:
    return {"step": step, "reference": [1], "reasoning": "", "error": "", "label": label, **more}


def test_what_an_annotator_says_is_read_however_it_is_broken() -> None:
    draws = random.Random(1)
    for _ in range(200):
        steps = draws.randint(1, 6)
        items, expected = [], [0.0] * steps
        for number in draws.sample(range(1, steps + 1), draws.randint(0, steps)):
            right = draws.random() < 0.5
            kind = draws.choice(["fine", "fine", "no number", "no label", "out of range", "twice", "true"])
            item = _item(number, "CORRECT" if right else "INCORRECT")
            if kind == "no number":
                item["step"] = str(number)
            elif kind == "no label":
                item["label"] = 1
            elif kind == "out of range":
                item["step"] = steps + 3
            elif kind == "true":
                item["step"] = True
            elif kind == "twice":
                items.append(_item(number, "INCORRECT" if right else "CORRECT"))
            if kind in ("fine", "twice"):
                expected[number - 1] = float(right)
            items.append(item)
        said, outcome = json.dumps(items), draws.random() < 0.5
        form = draws.choice(["whole", "fenced", "cut", "prose"])
        if form == "fenced":
            said = f"```json\n{said}\n```"
        elif form == "cut":
            said = said[:-1] + ', {"step": 1, "label": "CORR'
        elif form == "prose":
            said = "Here: " + " then ".join(map(json.dumps, items))
        expected[-1] = float(outcome)
        assert labels_of(said, steps, outcome)[0] == tuple(expected), (form, said)
    # What is missing may count as the outcome does.
    assert labels_of("", 3, True, "outcome")[0] == (1.0, 1.0, 1.0) and labels_of("", 3, True)[0] == (0.0, 0.0, 1.0)
    assert annotation(json.dumps([_item(2, reference=[1, "x", 3], error=" slip ")]), 2) == {2: (True, (1, 3), "slip")}
    assert labels_of("[" * 5000, 1, False)[0] == (0.0,)


def _script(asked: Asked) -> str:
    assert "[1] 2 * 3 = 6" in asked.text and "Reference solution" in asked.text
    wrong = "[1] 2 * 3 = 5" in asked.text
    return json.dumps([_item(1, "INCORRECT" if wrong else "CORRECT", error="sum" if wrong else ""), _item(2)])


EXERCISE = Exercise("How many?", "2 * 3 = 6\n\n#### 6", ("2 * 3 = 5\n\n#### 5", "2 * 3 = 6\n\n#### 6 "))


def test_solutions_are_labelled_by_one_text_each_and_a_run_goes_on(tmp_path: Path) -> None:
    lm, out = ScriptedLLM(_script), tmp_path / "labels.jsonl"
    found = label_steps(Run(lm, out), [EXERCISE])
    assert len(lm.asked) == 2
    assert [(each.labels, each.reward, each.errors) for each in found] == [
        ((0.0, 0.0), 0.0, ("sum", "")), ((1.0, 1.0), 1.0, ("", "")), ((1.0, 1.0), 1.0, ("", "")),
    ]  # fmt: skip
    assert found[2].text == EXERCISE.reference and found[0].alignment == ((1,), (1,))
    # A second exercise is added; what was cut in the middle of one is labelled again.
    lines = out.read_text().splitlines()
    out.write_text("\n".join([*lines, lines[0], lines[1][:20]]))
    again = ScriptedLLM(_script)
    assert label_steps(Run(again, out), [EXERCISE, EXERCISE]) == [*found, *found] and len(again.asked) == 2
    # A line may be cut after a brace of its text.
    written = out.read_text()
    out.write_text(written + '{"prompt": "How many {in all}')
    assert label_steps(Run(again, out), [EXERCISE, EXERCISE]) == [*found, *found] and len(again.asked) == 2
    assert out.read_text() == written
    # What the file has of others is refused and stays.
    longer = Exercise("?", "1", ("2",) * 9)
    for exercises, delimiter, said in (
        ([Exercise("?", "1", ("2",))], "\n\n", "other exercises"),
        ([longer], "\n\n", "other exercises"),
        ([Exercise("How few?", EXERCISE.reference, EXERCISE.solutions)], "\n\n", "other exercises"),
        ([EXERCISE, EXERCISE], "three", "other steps"),
        ([EXERCISE], "\n\n", "of more of them"),
    ):
        with pytest.raises(SettingsError, match=said):
            label_steps(Run(again, out, (LabelSettings(delimiter=delimiter),)), exercises)
        assert out.read_text() == written


def test_a_model_that_runs_here_is_held_to_the_form(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(annotations, "_CHARACTERS", 4)
    lm, out = tiny_lm(max_positions=4096), tmp_path / "labels.jsonl"
    said = label_steps(Run(lm, out, (LabelSettings(max_new_tokens=120),)), [Exercise("How many?", "6", ("5",))])
    assert said[0].labels == (0.0,) and said[0].tokens > 20
    assert steps_of("\n\na\n\n\n\nb\n", "\n\n") == ["a", "b"]


def test_pairs_are_those_of_pareto_dominance() -> None:
    def text(name: str, labels: tuple[float, ...], reward: float) -> StepLabels:
        return StepLabels("q", name, labels, reward)

    found = [text("best", (1, 1), 1), text("lucky", (0, 1), 1), text("near", (1, 0), 0), text("bad", (0, 0), 0)]
    pairs = [(each["chosen"], each["rejected"]) for each in preference_pairs(found)]
    assert set(pairs) == {
        ("best", "lucky"), ("best", "near"), ("best", "bad"), ("lucky", "bad"), ("lucky", "near"), ("near", "bad"),
    }  # fmt: skip
    # Better by one and worse by the other is no pair.
    assert not preference_pairs([text("a", (0, 0, 1), 1), text("b", (1, 1, 0), 0)])
    assert pairs[0] == ("best", "bad") and len(preference_pairs(found, most=2)) == 2


def test_files_of_exercises_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "exercises.jsonl"
    path.write_text(json.dumps({"question": "q", "reference": "r", "solution": "s"}))
    assert read_exercises(path) == [Exercise("q", "r", ("s",))]
    # Blank lines at the end are no step, as a trained head would find one there.
    path.write_text(json.dumps({"question": "q", "reference": "r\n", "solutions": ["a\n\nb\n\n\n\n"]}))
    (found,) = read_exercises(path)
    tokenizer = tiny_lm().tokenizer
    ends = step_ends(tokenizer, tokenizer.encode(found.solutions[0], special=False), "\n\n")
    assert found.reference == "r" and len(ends) == len(steps_of(found.solutions[0], "\n\n")) == 2
    for wrong in ({"question": "q", "reference": "r"}, {"question": "q", "reference": "r", "solutions": [1]}, []):
        path.write_text(json.dumps(wrong))
        with pytest.raises(CorruptFile, match="line 1"):
            read_exercises(path)
