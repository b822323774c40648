"""M2, the grid robot: whether a small model knows where its program has brought the robot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.store import Progress, write_text
from decodery.models.torch.transformer import Transformer
from decodery.training.ranking import parts
from decodery_benchmarks.puzzles.robot import ACTIONS, Robot
from decodery_benchmarks.training.program_probe import (
    OTHER_MEANINGS,
    WrittenProgram,
    accuracies,
    misses,
    read_by_seed,
    reread,
    split,
    train_program_probe,
    write_programs,
)
from decodery_benchmarks.training.puzzle_model import SHAPES, PuzzleRecipe, random_transformer, train_puzzle_model

from .figures import Judged, Row, detection, of_the_mean, ranks
from .records import recorded, solved_programs, surface
from .settings import WatchSettings

NAME = "programs"
_OWN, _ELSE = "its own semantics", "other semantics "
_SAMPLES = 8
FIELDS = ("x", "y", "facing")
_Way = tuple[list[WrittenProgram], list[WrittenProgram], dict[str, Any]]
"""Programs whose rows are read, further ones that are only learned from, and settings of the probe."""
_RECIPE = PuzzleRecipe(steps=8000, batch=64, every=250, least=0.7, most=0.95, greedy=240)
_GROWN = "growth.json"


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """The model is trained into `work` where it is not there; it is a model of its own, whatever else is watched."""
    from decodery import load

    robot, folder = Robot(), work / "robot"
    if not (folder / DESCRIPTION).is_file():
        train_puzzle_model(robot, folder, recipe=_RECIPE, progress=progress, seen=_growing(robot, work / _GROWN))
    model = load(str(folder)).model
    sites = tuple(f"resid_post.{layer}" for layer in range(model.config.num_layers))
    count = max(480, settings.prompts // 2)
    programs = write_programs(model, robot, count, sites, seed=settings.seed, progress=progress)
    sampled = write_programs(
        model, robot, 40, sites, split="test", each=_SAMPLES, temperature=1.0, seed=settings.seed, progress=progress
    )
    untrained = reread(random_transformer(SHAPES[_RECIPE.shape], settings.seed), programs, sites)
    ways: dict[str, _Way] = {
        _OWN: (programs, [], {}),
        "its own, one action ahead": (programs, [], {"ahead": 1}),
        "its own, two actions ahead": (programs, [], {"ahead": 2}),
        "its own, off a model of random weights": (untrained, [], {}),
        **{f"{_ELSE}{other}": (programs, [], {"meaning": other}) for other in OTHER_MEANINGS},
        **_by_record(programs, robot, settings.seed),
    }
    found: dict[str, list[Judged]] = {}
    read: dict[str, list[dict[str, float]]] = {}
    best: dict[str, list[float]] = {}
    for seed in range(settings.seed, settings.seed + settings.rounds):
        of = split(programs, seed)
        learned, test = of["train"], of["test"]
        for name, (rows, further, wanted) in ways.items():
            how: dict[str, Any] = {"rate": settings.rate, "further": further, **wanted}
            read.setdefault(name, []).extend(read_by_seed(rows, robot, [seed], **how))
        own_probe = train_program_probe(programs, robot, sites, rate=settings.rate, seed=seed)
        empty = train_program_probe(_elsewhere(programs, seed), robot, sites, rate=settings.rate, seed=seed)
        told = {
            "program-probe": (misses(own_probe, test), own_probe.threshold.value),
            "program-probe, shuffled states": (misses(empty, test), None),
            "mean log-probability": ([each.doubt for each in test], None),
            "length of the program": ([float(len(each.text)) for each in test], None),
            "surface": (surface(learned, test, robot), None),
        }
        for name, (scores, limit) in told.items():
            judged = Judged(
                scores,
                [not each.right for each in test],
                [each.prompt for each in test],
                [f"{len(each.text)}" for each in test],
                limit,
            )
            found.setdefault(name, []).append(judged)
        for name, chosen in _ranked(sampled, misses(own_probe, sampled)).items():
            best.setdefault(name, []).append(chosen)
        progress("training probes of programs", seed - settings.seed + 1, settings.rounds)
    acts: list[Row] = [
        {
            "testbed": NAME,
            "what": f"read, {name}",
            **{field: round(float(np.mean([each[field] for each in seeds])), 3) for field in FIELDS},
            "facing by seed": ", ".join(f"{each['facing']:.2f}" for each in seeds),
        }
        for name, seeds in read.items()
    ]
    acts += _gaps(read)
    right = np.mean([each.right for each in programs])
    chosen_by = "; ".join(f"{name} {np.mean(values):.3f}" for name, values in best.items())
    note = (
        f"programs: {len(programs)} programs, {right:.3f} of them right; chance is 0.25 for facing, else 0.17; "
        f"of {_SAMPLES} samples of each of 40 prompts the right share when chosen by: {chosen_by}"
    )
    notes = [note, *_grown(work / _GROWN)]
    return [detection(NAME, name, seeds) for name, seeds in found.items()], acts, notes


def _by_record(programs: list[WrittenProgram], robot: Robot, seed: int) -> dict[str, _Way]:
    """The same questions of a record of the tokens, which holds all that any semantics needs and no model."""
    records, more = [recorded(each, robot) for each in programs], solved_programs(robot, seed)
    found: dict[str, _Way] = {}
    for whose, meaning in (("its own", ACTIONS), (OTHER_MEANINGS[0], OTHER_MEANINGS[0])):
        name = f"{whose}, off a record of the tokens"
        inner: dict[str, Any] = {"meaning": meaning, "inner": (256, 256)}
        found[f"{name}, linearly"] = records, [], {"meaning": meaning}
        found[f"{name}, MLP"] = records, [], inner
        found[f"{name}, MLP and {len(more)} more programs"] = records, more, {**inner, "steps": 3000}
    return found


def _elsewhere(programs: list[WrittenProgram], seed: int) -> list[WrittenProgram]:
    """The same programs begun where others begin, so that no state of theirs is where they lead."""
    order = np.random.default_rng(seed).permutation(len(programs))
    return [replace(each, prompt=programs[at].prompt) for each, at in zip(programs, order, strict=True)]


def _gaps(read: dict[str, list[dict[str, float]]]) -> list[Row]:
    """How much better the model's own semantics is read than another one, over seeds: mean and 95 % interval."""
    own = np.array([[each[field] for field in FIELDS] for each in read[_OWN]])
    found = []
    for name in (each for each in read if each.startswith(_ELSE)):
        gaps = own - np.array([[each[field] for field in FIELDS] for each in read[name]])
        low, high = of_the_mean(gaps[:, -1])
        each = dict(zip(FIELDS, gaps.mean(axis=0).round(3).tolist(), strict=True))
        found.append(
            {
                "testbed": NAME,
                "what": f"its own beyond {name.removeprefix(_ELSE)}",
                **each,
                "facing by seed": f"95 %: {low:.3f} to {high:.3f}",
            }
        )
    return found


def _growing(robot: Robot, path: Path) -> Callable[[Transformer, float], None]:
    """Notes of every model on the way how often it is right, and how well its states tell where its programs lead."""

    def note(model: Transformer, greedy: float) -> None:
        known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        sites = tuple(f"resid_post.{layer}" for layer in range(model.config.num_layers))
        programs = write_programs(model, robot, 160, sites)
        part = parts([each.prompt for each in programs], 0)
        test = [each for each, own in zip(programs, part, strict=True) if own == "test"]
        try:
            # What the threshold would be is of no interest here, and few programs are right at first.
            learned = [replace(each, right=True) for each in programs]
            facing = accuracies(train_program_probe(learned, robot, sites, rate=0.5), test, robot)["facing"]
        except SettingsError:
            # At first it finishes hardly any program.
            return
        known[model.fingerprint] = [greedy, round(facing, 4)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(known))

    return note


def _grown(path: Path) -> list[str]:
    """What `_growing` noted: success and readability of the models on the way, and how their ranks go together."""
    points = list(json.loads(path.read_text("utf-8")).values()) if path.is_file() else []
    if len(points) < 4:
        return []
    success, facing = (ranks([point[at] for point in points]) for at in range(2))
    random = np.random.default_rng(0)
    rho = float(np.corrcoef(success, facing)[0, 1])
    draws = [float(np.corrcoef(success, random.permutation(facing))[0, 1]) for _ in range(2000)]
    chance = float(np.mean([abs(draw) >= abs(rho) - 1e-9 for draw in draws]))
    told = ", ".join(f"{own:.2f}/{read:.2f}" for own, read in points)
    return [
        f"programs: success of the {len(points)} models on the way and how well facing is read: {told}; "
        f"Spearman's rho {rho:.2f}, p {chance:.3f} by permutation"
    ]


def _ranked(programs: list[WrittenProgram], scores: list[float]) -> dict[str, float]:
    """The share of prompts whose chosen program is right, by what it is chosen."""
    by: dict[str, list[tuple[float, float, bool]]] = {}
    for each, score in zip(programs, scores, strict=True):
        by.setdefault(each.prompt, []).append((score, each.doubt * (len(each.text) + 1), each.right))
    return {
        "the probe": float(np.mean([min(own, key=lambda one: one[0])[2] for own in by.values()])),
        "likelihood": float(np.mean([min(own, key=lambda one: one[1])[2] for own in by.values()])),
        "chance": float(np.mean([np.mean([right for *_, right in own]) for own in by.values()])),
        "an oracle": float(np.mean([any(right for *_, right in own) for own in by.values()])),
    }
