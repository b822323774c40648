"""Label the steps of solutions by one text of an annotator that reads a reference solution (SPARE, 2025)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.noise import nth_seed
from decodery.llm.llm import LLM
from decodery.models.loaders.store import write_text
from decodery.search.answers import AnswerExtractor
from decodery.step.writer import writes

from .annotation import labels_of, request_for, schema, steps_of
from .kind import ARGUMENT, Data, Run, kind, option
from .lines import read_objects

_PAIRS = 10


@dataclass(frozen=True)
class Exercise:
    """A question, the right solution, and texts that try to solve it."""

    question: str
    reference: str
    solutions: tuple[str, ...]


@dataclass(frozen=True)
class StepLabels:
    """A solution with a label of each step."""

    prompt: str
    text: str
    labels: tuple[float, ...]
    reward: float
    alignment: tuple[tuple[int, ...], ...] = ()  # Of each step, the steps of the reference that it matches, from 1
    errors: tuple[str, ...] = ()  # Of each step, what kind of error it has, "" for none
    tokens: int = 0

    @property
    def worth(self) -> tuple[float, float]:
        """What preferences compare: the outcome, and the share of right steps."""
        return self.reward, sum(self.labels) / max(len(self.labels), 1)


def read_exercises(path: Path) -> list[Exercise]:
    """Exercises of a file of JSON lines.

    A line is {"question": text, "reference": text, "solution": text}, or has "solutions" with a list of texts.
    Space around solutions is left out, as no step is made of it.
    """

    def read(entry: dict[str, Any]) -> Exercise | None:
        solutions = entry.get("solutions", [entry.get("solution")])
        given = [entry.get("question"), entry.get("reference"), *(solutions if isinstance(solutions, list) else [None])]
        if not all(isinstance(each, str) and each.strip() for each in given):
            return None
        return Exercise(entry["question"], entry["reference"].strip(), tuple(text.strip() for text in solutions))

    form = '{"question": text, "reference": text, "solution": text}, or with "solutions": [texts]'
    return read_objects(path, form, read)


@dataclass(frozen=True)
class LabelSettings(Data):
    """Solutions, and how their steps are labelled.

    Attributes:
        answer: Where answers stand in a text.
    """

    solutions: Path = field(default=Path(), metadata=ARGUMENT)
    pairs: Path | None = option(None, "Also write pairs of a better and a worse text, for ORPO.", path="new file")
    delimiter: str = option("\n\n", "Text that ends a step.")
    answer: Literal["auto", "number", "marked", "whole", "choice", "quantity"] = "auto"
    pattern: str | None = option(None, "A regular expression of answers in its place.")
    missing: Literal["incorrect", "outcome"] = option("incorrect", "Label of steps that the annotator leaves out.")
    max_new_tokens: int = option(1024, "Maximum tokens of an annotation.")

    def check(self) -> None:
        read_exercises(self.solutions)


def label_steps(run: Run, exercises: Sequence[Exercise]) -> list[StepLabels]:
    """Label solutions by one text of a model each, written to the file of a run.

    An interrupted run goes on after the last exercise in the file. The reference solution of each exercise is added as
    one whose steps are all right. A model that runs here is held to the form of the annotation by a JSON Schema.

    Args:
        run: Of the annotator, here or on a server; its file holds JSON lines, as `train text-prm` reads them.
    """
    given, out = run.of(LabelSettings), run.out
    found, done = _known(out, exercises, given.delimiter)
    for number in range(done, len(exercises)):
        labelled = list(_labelled(run.lm, exercises[number], given, nth_seed(0, number << 16)))
        with out.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(asdict(each))}\n" for each in labelled))
        found += labelled
        run.progress("labelling steps", number + 1, len(exercises))
    return found


def _labelled(lm: LLM, exercise: Exercise, given: LabelSettings, seed: int) -> Iterator[StepLabels]:
    answers, delimiter = AnswerExtractor(given.answer, given.pattern or ""), given.delimiter
    reference = steps_of(exercise.reference, delimiter)
    wanted, *found = answers.of([exercise.reference, *exercise.solutions])
    counts, engine, writing = list[int](), lm.engine(), []
    for number, text in enumerate(exercise.solutions):
        steps = steps_of(text, delimiter)
        constraint = None if writes(lm.model) else schema(len(steps), len(reference))
        prompt = request_for(exercise.question, reference, steps)
        request = lm.request_for(
            prompt,
            constraint=constraint,
            max_new_tokens=given.max_new_tokens,
            seed=nth_seed(seed, number),
            drafter=None,
        )
        counts.append(len(steps))
        writing.append(engine.submit(request))
    engine.run(writing)
    for text, answer, count, seq in zip(exercise.solutions, found, counts, writing, strict=True):
        said, right = lm.output(seq), answer is not None and answer == wanted
        labels, alignment, errors = labels_of(said.text, count, right, given.missing)
        yield StepLabels(exercise.question, text, labels, float(right), alignment, errors, len(said.tokens))
    every = tuple((number,) for number in range(1, len(reference) + 1))
    yield StepLabels(exercise.question, exercise.reference, (1.0,) * len(reference), 1.0, every, ("",) * len(reference))


def _known(out: Path, exercises: Sequence[Exercise], delimiter: str) -> tuple[list[StepLabels], int]:
    """The labels of whole exercises of an earlier run in the file, and how many these are; the rest is dropped."""
    try:
        # A line that an interrupted run was writing has no end.
        lines = out.read_text("utf-8").rpartition("\n")[0].splitlines() if out.is_file() else []
        found = [
            StepLabels(**{**each, "labels": tuple(each["labels"]), "alignment": tuple(map(tuple, each["alignment"])),
                          "errors": tuple(each["errors"])})
            for each in map(json.loads, lines)
        ]  # fmt: skip
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFile(f"{out} holds other lines than labelled steps: give another file as --out") from error
    wanted, ends = [], [0]
    for exercise in exercises:
        texts = (*exercise.solutions, exercise.reference)
        wanted += [(exercise.question, text, len(steps_of(text, delimiter))) for text in texts]
        ends.append(len(wanted))
    if [(each.prompt, each.text, len(each.labels)) for each in found] != wanted[: len(found)]:
        raise SettingsError(
            "the file has labels of other exercises, of more of them or of other steps: give another file as --out, or "
            "remove it"
        )
    whole = sum(end <= len(found) for end in ends) - 1
    if out.is_file():
        write_text(out, "".join(f"{json.dumps(asdict(each))}\n" for each in found[: ends[whole]]))
    return found[: ends[whole]], whole


def preference_pairs(found: Sequence[StepLabels], most: int = _PAIRS) -> list[dict[str, str]]:
    """Pairs of texts of one question, of which one is better by outcome or steps and worse by neither.

    Args:
        most: Pairs of a question; those of the largest difference are kept.

    Returns:
        {"prompt", "chosen", "rejected"} of each, as `train orpo` reads them.
    """
    groups: dict[str, list[StepLabels]] = {}
    for each in found:
        groups.setdefault(each.prompt, []).append(each)
    pairs = []
    for prompt, texts in groups.items():
        ways = [
            (sum(better.worth) - sum(worse.worth), better.text, worse.text)
            for better in texts
            for worse in texts
            if better.worth != worse.worth and all(a >= b for a, b in zip(better.worth, worse.worth, strict=True))
        ]
        ways.sort(key=lambda way: -way[0])
        pairs += [{"prompt": prompt, "chosen": better, "rejected": worse} for _, better, worse in ways[:most]]
    return pairs


def _ready(run: Run) -> str:
    pairs = run.of(LabelSettings).pairs
    more = "" if pairs is None else f", decodery train orpo {pairs}"
    return f"The labels are ready: decodery train text-prm {run.out}{more}"


@kind(
    _ready,
    (LabelSettings(),),
    "solutions.jsonl -m MODEL --out labelled.jsonl --pairs pairs.jsonl",
    model="that compares steps; the URL of a server works too",
    out="file",
)
def _step_labels(run: Run) -> dict[str, int]:
    """Label the steps of SOLUTIONS by comparing them with reference solutions: one text of MODEL for each solution.

    SOLUTIONS holds one JSON object a line: {"question": ..., "reference": ..., "solution": ...} or "solutions" with
    a list. MODEL says which reference steps each step matches, and whether it is right (SPARE). Steps it leaves out
    are wrong, and the last step's label is whether the final answers are equal.
    """
    given = run.of(LabelSettings)
    found = label_steps(run, read_exercises(given.solutions))
    figures = {"texts": len(found), "steps": sum(len(each.labels) for each in found)}
    figures["tokens written"] = sum(each.tokens for each in found)
    if given.pairs is not None:
        made = preference_pairs(found)
        write_text(given.pairs, "".join(f"{json.dumps(each)}\n" for each in made))
        figures["pairs"] = len(made)
    return figures
