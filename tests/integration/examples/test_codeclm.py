"""The example of CodecLM with scripted models: what is kept, how often it tries, and that a judge's places cancel."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

FOUND: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "codeclm.py"))


def test_what_is_kept_has_a_larger_gap_and_nothing_is_made_harder_too_often() -> None:
    asked: list[str] = []

    def model(prompt: str) -> str:
        asked.append(prompt)
        if prompt.startswith("Rewrite"):
            return prompt.rpartition(": ")[2] + "!"
        if prompt.startswith("Name one"):
            return "shout"
        return prompt.rpartition("\n")[2]

    # Every rewriting adds 1 to it.
    gaps = {"a": 3.5, "b": 1.5, "c": 3.0, "d": -9.0}
    codec = FOUND["Codec"](model, lambda prompt: gaps[prompt.rstrip("!")] + prompt.count("!"))
    assert list(codec.prompts(list(gaps))) == [("a", 3.5), ("b!!", 3.5), ("c!", 4.0)]
    assert sum(each.startswith("Rewrite") for each in asked) == 2 + 1 + 4
    assert not list(FOUND["Codec"](model, lambda prompt: 3.0).prompts(["a"]))


def test_what_a_judge_gives_to_a_place_cancels_out() -> None:
    worth = {"good": 8.0, "poor": 2.0}

    def judge(prompt: str, first: str, second: str) -> tuple[float, float]:
        return worth[first] + 5, worth[second]

    answers = {name: (lambda prompt, name=name: name) for name in worth}
    gap = FOUND["judged"]
    assert gap(answers["good"], answers["good"], judge)("?") == 0.0
    assert gap(answers["good"], answers["poor"], judge)("?") == 6.0
    # One order alone would have found a gap between equals.
    assert judge("?", "good", "good")[0] - judge("?", "good", "good")[1] == pytest.approx(5)
