"""The files that `benchmarks/trained_kinds.py` gives to the commands, made of built-in facts and this repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from decodery.training.checkable import built_in, capitals
from decodery.training.diffusion import DiffusionRecipe, held_out

ROOT = Path(__file__).parents[2]
LISTS = ("copy", "reverse")
"""Tasks of the diffusion model."""
_PAGES = 12
_SUMS = 20
"""Sums among the pairs of answers, so that one prompt in ten is twelve: six that are tested."""
_PARAGRAPH = 240
"""Characters of a paragraph at least, of which one half is the prompt and one the solution."""


def written_files(folder: Path) -> dict[str, str]:
    """The paths of all files in a folder, by name; they are written anew, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = [page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))[:_PAGES]]
    sums = built_in(120, families=("sums",), chat=True)
    answers = [(asked, _said(country, city), _said(country, other)) for country, asked, city, other in _asked()]
    answers += [(each.prompt, str(each.answer), str(int(each.answer) + 1)) for each in sums[:_SUMS]]
    lines: dict[str, list[Any]] = {
        "rewarded": _rewarded(),
        "labelled": [
            {
                "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}],
                "label": not right,
                "group": country,
            }
            for country, asked, said, right in _answers()
        ],
        "preferences": [{"prompt": asked, "chosen": right, "rejected": wrong} for asked, right, wrong in answers],
        "questions": [{"prompt": asked, "right": right, "wrong": wrong} for asked, right, wrong in answers[:-_SUMS]],
        "sources": [{"source": asked, "target": right} for asked, right, _ in answers],
        "solutions": [
            {"prompt": text[: len(text) // 2], "solution": text[len(text) // 2 :]} for text in _paragraphs(pages)[:24]
        ],
        "problems": [{"question": each.prompt, "answer": each.answer} for each in sums],
        "exercises": [
            {
                "question": f"What is {n} + {n + 1} + {n + 2}?",
                "reference": f"{n} + {n + 1} = {2 * n + 1}\n\n{2 * n + 1} + {n + 2} = {3 * n + 3}",
                "solution": f"{n} + {n + 1} = {2 * n + 1}\n\n{2 * n + 1} + {n + 2} = {3 * n + 3 + n % 2}",
            }
            for n in range(2, 6)
        ],
    }
    found = {}
    for name, each in lines.items():
        found[name] = str(folder / f"{name}.jsonl")
        Path(found[name]).write_text("\n".join(map(json.dumps, each)) + "\n", encoding="utf-8")
    lists = [" ".join(each.prompt) for each in held_out(DiffusionRecipe(tasks=LISTS), 24)]
    texts = {
        "text": "\n\n".join(pages)[:72000],
        "prompts": "\n".join(f"Explain how {each} works." for each in _THINGS),
        "lists": "\n".join(lists),
    }
    for name, text in texts.items():
        found[name] = str(folder / f"{name}.txt")
        Path(found[name]).write_text(text + "\n", encoding="utf-8")
    return found


_THINGS = (
    *("a clock", "a lock", "a pump", "a sail", "a mill", "a lamp", "a bridge", "a kite"),
    *("a bell", "a saw", "a scale", "a plough", "a press", "a well", "a wheel", "a loom"),
)


def _asked() -> list[tuple[str, str, str, str]]:
    """Countries, the question, the right city and a wrong one."""
    pairs, random = list(capitals().items()), np.random.default_rng(0)
    return [
        (
            country,
            f"What is the capital of {country}?",
            city,
            pairs[(n + int(random.integers(1, len(pairs)))) % len(pairs)][1],
        )
        for n, (country, city) in enumerate(pairs)
    ]


def _said(country: str, city: str) -> str:
    return f"The capital of {country} is {city}."


def _answers() -> list[tuple[str, str, str, bool]]:
    """Countries, the question, an answer and whether it is right, each country once rightly and once wrongly."""
    return [
        (country, asked, _said(country, said), right)
        for country, asked, city, other in _asked()
        for said, right in ((city, True), (other, False))
    ]


def _rewarded() -> list[dict[str, Any]]:
    return [
        {"prompt": asked, "text": said, "reward": float(right), "labels": [float(right)]}
        for _, asked, said, right in _answers()
    ]


def _paragraphs(pages: list[str]) -> list[str]:
    return [part for page in pages for part in page.split("\n\n") if len(part) >= _PARAGRAPH and part[0].isalpha()]
