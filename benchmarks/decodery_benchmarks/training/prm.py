"""Train a process reward model for puzzles: steps are labelled by rollouts or by comparison, and a head learns that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.noise import nth_seed
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.protocol import LanguageModel
from decodery.scorers.process_reward import ProcessHead
from decodery.step.sequence import Sequence as Written
from decodery.training.lines import read_json_lines
from decodery.training.ranking import auc
from decodery.training.reward_head import PRM, fitted
from decodery.training.value import not_better, states_of
from decodery_benchmarks.puzzles import Puzzle, drawn
from decodery_benchmarks.puzzles.alphabet import encoded

from .solving import solved, text_of

LABELS = "labels.jsonl"
_SPARE = 8


@dataclass(frozen=True)
class PRMRecipe:
    """What a process reward model learns from. problems: of the split "reward"; solutions: sampled of each.

    labels: "rollouts" is the share of `rollouts` completions of a beginning that are right (Math-Shepherd, 2024);
    "reference" compares each step with what a solver knows, as one call of an annotator who sees a reference solution
    would (SPARE, 2025): the last step's label is the outcome, and the reference itself is learned as all right;
    "restart" is, for every step alike, the share of a problem's other samples that are not better than the text, see
    `restart.not_better`. missed, flipped: how often that annotator passes over a step, which then counts as wrong, and
    gives the other label.
    """

    problems: int = 200
    solutions: int = 4
    labels: Literal["rollouts", "reference", "restart"] = "rollouts"
    rollouts: int = 8
    missed: float = 0.0
    flipped: float = 0.0
    steps: int = 600
    batch: int = 256
    lr: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.problems < 10 or min(self.solutions, self.rollouts, self.batch) < 1:
            raise SettingsError(
                "a process reward model needs 10 problems, and solutions, rollouts and batch of at least 1"
            )
        if self.labels == "restart" and self.solutions < 2:
            raise SettingsError(
                "labels=restart compares solutions of a problem with each other: give at least 2 of each"
            )
        if not 0 <= self.missed <= 1 or not 0 <= self.flipped <= 1:
            raise SettingsError("missed and flipped are shares, from 0 to 1")
        if self.labels != "reference" and (self.missed or self.flipped):
            raise SettingsError("missed and flipped are of an annotator: they go with labels=reference")


@dataclass(frozen=True)
class LabelledSolution:
    """One solution. labels: of its steps, between 0 and 1. tokens: what was written to label it."""

    problem: int
    prompt: str
    text: str
    labels: tuple[float, ...]
    tokens: int = 0


def train_prm(
    model: LanguageModel,
    puzzle: Puzzle,
    out: Path,
    *,
    recipe: PRMRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> ProcessHead:
    """Label solutions that `model` samples, and leave in `out` a head that reads the labels off its hidden states.

    One problem in ten is held out; the head's facts say how well it ranks steps there: auc, cross_entropy, and that of
    always saying the mean. Interrupted, it goes on from what is in `out` when called again.
    """
    recipe = recipe or PRMRecipe()
    if not puzzle.delimiter:
        raise SettingsError(f"{puzzle.spec} has no steps to be rewarded: choose another puzzle")
    examples = labelled(model, puzzle, out, recipe, progress)
    tap = model.config.num_layers
    learned, held = (_rows(model, puzzle, examples, tap, part) for part in (False, True))
    settings = {"puzzle": repr(puzzle), "recipe": asdict(recipe), "model": model.fingerprint}
    head, scores, costs = fitted(model, tap, learned, held, recipe, out, settings=settings, progress=progress)
    told = held[1].numpy()
    facts: dict[str, object] = {
        "puzzle": puzzle.spec,
        "command": command,
        "recipe": asdict(recipe),
        "solutions": len(examples),
        "labelling_tokens": sum(example.tokens for example in examples),
        # Of labels that compare, nearly all are above a half.
        "auc": round(auc(scores, told if recipe.labels == "restart" else told > 0.5), 4),
        **costs,
    }
    found = replace(head, facts=facts)
    found.save(out / PRM)
    return found


def labelled(
    model: LanguageModel, puzzle: Puzzle, out: Path, recipe: PRMRecipe, progress: Progress = silent
) -> list[LabelledSolution]:
    """Solutions with their labels, kept in `out` problem by problem; those that are there are read."""
    path = out / LABELS
    head = {"puzzle": puzzle.spec, "model": model.fingerprint, **asdict(recipe)}
    head = {name: value for name, value in head.items() if name not in ("steps", "batch", "lr", "problems")}
    found = list(_read(path, head)) if path.is_file() else []
    begun = 1 + max((example.problem for example in found), default=-1)
    prompts = list(islice(drawn(puzzle, "reward", recipe.seed), recipe.problems))
    for number in range(begun, recipe.problems):
        found += _of_problem(model, puzzle, number, prompts[number], recipe)
        # Whole or not at all, so that an interruption leaves whole problems.
        write_text(path, "".join(json.dumps(each) + "\n" for each in (head, *map(asdict, found))))
        progress("labelling solutions", number + 1, recipe.problems)
    return [example for example in found if example.problem < recipe.problems]


def _read(path: Path, head: dict[str, object]) -> Iterator[LabelledSolution]:
    for number, entry in read_json_lines(path):
        if number == 1:
            if entry != head:
                raise SettingsError(f"{path} has labels of other settings: name another folder, or remove that file")
            continue
        try:
            yield LabelledSolution(**{**entry, "labels": tuple(entry["labels"])})
        except (TypeError, KeyError) as error:
            raise CorruptFile(f"line {number} of {path} is no labelled solution: remove that file") from error


def _of_problem(
    model: LanguageModel, puzzle: Puzzle, number: int, prompt: str, recipe: PRMRecipe
) -> Iterator[LabelledSolution]:
    seed, length = nth_seed(recipe.seed, number << 24), puzzle.length + _SPARE
    (texts,) = solved(model, [prompt], length, each=recipe.solutions, temperature=1.0, seed=seed)
    if recipe.labels == "restart":
        yield from _compared(puzzle, number, prompt, [text_of(seq) for seq in texts], sum(map(_length, texts)))
        return
    written = dict.fromkeys(text for seq in texts if (text := text_of(seq)) is not None)
    if recipe.labels == "reference":
        random = Random(f"annotator {recipe.seed} {number}")
        for text in (*written, puzzle.solve(prompt, random)):
            yield LabelledSolution(number, prompt, text, annotated(puzzle, prompt, text, recipe, random), len(text))
        return
    values, tokens = _rolled_out(model, puzzle, prompt, list(written), recipe, seed)
    for place, text in enumerate(written):
        beginnings = list(_beginnings(puzzle, text))
        labels = [values.get(begun, 0.0) for begun in beginnings[:-1]] + [float(puzzle.verify(prompt, text))]
        yield LabelledSolution(number, prompt, text, tuple(labels), tokens if place == 0 else 0)


def annotated(puzzle: Puzzle, prompt: str, text: str, recipe: PRMRecipe, random: Random) -> tuple[float, ...]:
    """Labels as an annotator gives them in one go: what is passed over is wrong, the last one is the outcome."""
    labels = puzzle.labels(prompt, text)
    for place in range(len(labels) - 1):
        if random.random() < recipe.flipped:
            labels[place] = not labels[place]
        if random.random() < recipe.missed:
            labels[place] = False
    return tuple(map(float, labels))


def _rolled_out(
    model: LanguageModel, puzzle: Puzzle, prompt: str, texts: Sequence[str], recipe: PRMRecipe, seed: int
) -> tuple[dict[str, float], int]:
    """The share of right completions of every beginning that some completion solves, and the tokens that took."""
    # After what no solver could mend none is right, and none need be drawn.
    begun = dict.fromkeys(each for text in texts for each in _beginnings(puzzle, text) if each != text)
    asked = [each for each in begun if puzzle.open(prompt, each)]
    rolled = solved(
        model,
        [prompt + each for each in asked],
        puzzle.length + _SPARE,
        each=recipe.rollouts,
        temperature=1.0,
        seed=nth_seed(seed, 1 << 16),
    )
    found, tokens = {}, 0
    for each, several in zip(asked, rolled, strict=True):
        right = [(rest := text_of(seq)) is not None and puzzle.verify(prompt, each + rest) for seq in several]
        found[each] = sum(right) / len(right)
        tokens += sum(map(_length, several))
    return found, tokens


def _compared(
    puzzle: Puzzle, number: int, prompt: str, texts: Sequence[str | None], tokens: int
) -> Iterator[LabelledSolution]:
    """All samples that have ended, as often as they were drawn, so that what is learned is calibrated."""
    shares = not_better([float(text is not None and puzzle.verify(prompt, text)) for text in texts])
    for text, share in zip(texts, shares, strict=True):
        if text is not None:
            yield LabelledSolution(number, prompt, text, (share,) * len(puzzle.steps(text)), tokens)
            tokens = 0


def _length(seq: Written) -> int:
    return len(seq.generated)


def _beginnings(puzzle: Puzzle, text: str) -> Iterator[str]:
    """A text up to the end of each of its steps."""
    begun = ""
    for step in puzzle.steps(text):
        begun += step
        yield begun


def _rows(
    model: LanguageModel, puzzle: Puzzle, examples: Sequence[LabelledSolution], tap: int, held: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [n, hidden] at the ends of steps, and labels [n], of the problems held out or of the others."""
    states: list[torch.Tensor] = []
    labels: list[float] = []
    for example in examples:
        if (example.problem % 10 == 9) is not held or not example.labels:
            continue
        ends = np.cumsum([len(step) for step in puzzle.steps(example.text)]) - 1
        # One pass over a whole solution has the states of all its beginnings.
        states.append(states_of(model, encoded(example.prompt), encoded(example.text), tap)[ends].float())
        labels += example.labels
    if not states:
        raise SettingsError("no solution was finished to learn rewards from: give more problems, or a better model")
    return torch.cat(states), torch.tensor(labels, dtype=torch.float32, device="cpu")
