"""M2, the grid robot: whether a small model knows where its program has brought the robot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...lm import LM
from ...model.drafts import DESCRIPTION
from ...model.store import Progress
from ...puzzles.robot import ACTIONS, Robot
from ...train.program_probe import Program, accuracies, misses, train_program_probe, write_programs
from ...train.puzzle_model import PuzzleRecipe, train_puzzle_model
from ...train.ranking import parts
from .figures import Judged, Row, detection
from .settings import WatchSettings

NAME = "programs"
_OTHER = ("lrm", "rml", "mmr")
"""Other meanings of m, l and r: two that change places, and one under which two words mean the same."""
_SAMPLES = 8


def measure(lm: LM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """The model is trained into `work` where it is not there; it is a model of its own, whatever else is watched."""
    from ... import load

    robot, folder = Robot(), work / "robot"
    if not (folder / DESCRIPTION).is_file():
        train_puzzle_model(robot, folder, recipe=PuzzleRecipe(every=100), progress=progress)
    model = load(str(folder)).model
    sites = tuple(f"resid_post.{layer}" for layer in range(model.config.num_layers))
    count = max(480, settings.prompts // 2)
    programs = write_programs(model, robot, count, sites, seed=settings.seed, progress=progress)
    sampled = write_programs(
        model, robot, 40, sites, split="test", each=_SAMPLES, temperature=1.0, seed=settings.seed, progress=progress
    )
    found: dict[str, list[Judged]] = {}
    read: dict[str, list[dict[str, float]]] = {}
    best: dict[str, list[float]] = {}
    for seed in range(settings.seed, settings.seed + settings.rounds):
        part = parts([each.prompt for each in programs], seed)
        test = [each for each, own in zip(programs, part, strict=True) if own == "test"]
        for name, ahead, meaning in (
            ("its own semantics", 0, ACTIONS),
            ("its own, one action ahead", 1, ACTIONS),
            *((f"other semantics {other}", 0, other) for other in _OTHER),
        ):
            probe = train_program_probe(
                programs, robot, sites, rate=settings.rate, meaning=meaning, ahead=ahead, seed=seed
            )
            read.setdefault(name, []).append(accuracies(probe, test, robot, meaning, ahead))
            if name == "its own semantics":
                own = probe
        told = {
            "program-probe": (misses(own, test), own.threshold.value),
            "mean log-probability": ([each.doubt for each in test], None),
            "length of the program": ([float(len(each.text)) for each in test], None),
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
        for name, chosen in _ranked(sampled, misses(own, sampled)).items():
            best.setdefault(name, []).append(chosen)
        progress("training probes of programs", seed - settings.seed + 1, settings.rounds)
    acts: list[Row] = [
        {
            "testbed": NAME,
            "what": f"read linearly, {name}",
            **{field: round(float(np.mean([each[field] for each in seeds])), 3) for field in ("x", "y", "facing")},
            "facing by seed": ", ".join(f"{each['facing']:.2f}" for each in seeds),
        }
        for name, seeds in read.items()
    ]
    right = np.mean([each.right for each in programs])
    told_of = "; ".join(f"{name} {np.mean(values):.3f}" for name, values in best.items())
    note = (
        f"programs: {len(programs)} programs, {right:.3f} of them right; chance is 0.25 for facing, else 0.17; "
        f"of {_SAMPLES} samples of each of 40 prompts the right share when chosen by: {told_of}"
    )
    return [detection(NAME, name, seeds) for name, seeds in found.items()], acts, [note]


def _ranked(programs: list[Program], scores: list[float]) -> dict[str, float]:
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
