"""The texts of an annotator that compares steps with a reference solution: the prompt, the schema and what it wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

CORRECT, INCORRECT = "CORRECT", "INCORRECT"
_CHARACTERS = 240
"""Of a reasoning or an error at most, where the annotator runs here."""
_PROMPT = (
    "Question:\n{question}\n\nReference solution, which is right:\n{reference}\n\nStudent's solution:\n{solution}\n\n"
    "Compare each step of the student with the reference. Write a JSON array with an object for each of the {count} "
    'steps of the student, in order: {{"step": its number, "reference": [numbers of the reference steps that it '
    'matches, if any], "reasoning": "how they compare", "error": "kind of error, or empty", "label": "CORRECT" or '
    '"INCORRECT"}}. Write nothing else.'
)
_OBJECT = re.compile(r"\{[^{}]*\}")


def steps_of(text: str, delimiter: str) -> list[str]:
    """The steps of a text, which are what stands between delimiters and is not blank."""
    return [step.strip() for step in text.split(delimiter) if step.strip()]


def annotation(said: str, steps: int) -> dict[int, tuple[bool, tuple[int, ...], str]]:
    """What an annotator said of steps: whether each is right, what it matches, and its error.

    Objects are read one by one where the text is no JSON as a whole, as where it was cut. Items without an integer
    `step` from 1 to `steps` or a `label` as text are ignored; of two items on a step the later one counts.
    """
    items = _items(said)
    found = {}
    for item in items:
        number, label = item.get("step"), item.get("label")
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(label, str):
            continue
        if 1 <= number <= steps:
            aligned = item.get("reference")
            matches = aligned if isinstance(aligned, list) else [aligned]
            kept = tuple(each for each in matches if isinstance(each, int) and not isinstance(each, bool))
            error = item.get("error")
            found[number] = (label.strip().upper() == CORRECT, kept, error.strip() if isinstance(error, str) else "")
    return found


def _items(said: str) -> list[Mapping[str, Any]]:
    begin, end = said.find("["), said.rfind("]")
    try:
        whole = json.loads(said[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, list) and all(isinstance(item, dict) for item in whole):
        return whole
    items = list[Mapping[str, Any]]()
    for each in _OBJECT.findall(said):
        try:
            item = json.loads(each)
        except ValueError:
            continue
        if isinstance(item, dict):
            items.append(item)
    return items


def labels_of(
    said: str, steps: int, right: bool, missing: Literal["incorrect", "outcome"] = "incorrect"
) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Labels, alignment and errors of the steps of a solution by what an annotator said.

    The label of the last step is the outcome, as in the published code.
    """
    found = annotation(said, steps)
    default = right if missing == "outcome" else False
    labels = [found[number][0] if number in found else default for number in range(1, steps + 1)]
    if labels:
        labels[-1] = right
    empty: tuple[bool, tuple[int, ...], str] = (False, (), "")
    others = [found.get(number, empty) for number in range(1, steps + 1)]
    return tuple(map(float, labels)), tuple(each[1] for each in others), tuple(each[2] for each in others)


def request_for(question: str, reference: Sequence[str], solution: Sequence[str]) -> str:
    """What an annotator is given: a question, and the steps of its reference and of a solution."""
    return _PROMPT.format(
        question=question, reference=_listed(reference), solution=_listed(solution), count=len(solution)
    )


def _listed(steps: Sequence[str]) -> str:
    return "\n".join(f"[{number}] {step}" for number, step in enumerate(steps, 1))


def schema(steps: int, reference: int) -> dict[str, Any]:
    """The JSON Schema of an annotation of so many steps, beside a reference of so many."""
    text = {"type": "string", "maxLength": _CHARACTERS}
    numbers = {"type": "array", "items": {"enum": list(range(1, reference + 1))}, "maxItems": reference}
    item = {
        "type": "object",
        "properties": {
            "step": {"enum": list(range(1, steps + 1))},
            "reference": numbers,
            "reasoning": text,
            "error": text,
            "label": {"enum": [CORRECT, INCORRECT]},
        },
        "required": ["step", "reference", "reasoning", "error", "label"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": steps, "maxItems": steps}
