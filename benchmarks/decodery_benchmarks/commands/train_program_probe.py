"""`benchmarks/train.py program-probe`: a probe of the state of a program."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import click

from decodery.cli.command import command, option
from decodery.cli.train_common import command_line, out_option

from .train_options import model_option, seed_option


@command(example="")
@out_option
@model_option("that writes programs, made by benchmarks/train.py puzzle-model robot")
@option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Seeds of the controls.")
@option("--rate", default=0.1, show_default=True, help="Maximum rate of false alarms.")
@option(
    "--site",
    "sites",
    multiple=True,
    show_default="five depths",
    help="Hook point to try, such as resid_post.3. Repeatable.",
)
@seed_option("prompts, split and training")
@option("--puzzle", default="robot", show_default=True, help="Puzzle of the programs: robot, with settings.")
@option(
    "--count", default=600, show_default=True, type=click.IntRange(1), help="Number of programs that the model writes."
)
def program_probe(
    out: Path, model: str, seeds: int, rate: float, sites: tuple[str, ...], seed: int, puzzle: str, count: int
) -> None:
    """Train a probe that reads the state of the robot from the hidden states of MODEL as it writes a program.

    MODEL writes programs greedily. An interpreter tells the state after each action. Test programs are distinct from
    those that were learned from. Beside the probe stand probes of other semantics, and of random weights.
    """
    from decodery import load
    from decodery.core.errors import SettingsError
    from decodery.models.loaders.load import load as named_model
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.probe import Probe
    from decodery.training.activations import Sites
    from decodery.training.direction import scrambled
    from decodery.training.evaluation import keep_evaluated
    from decodery_benchmarks.puzzles import puzzle as named
    from decodery_benchmarks.puzzles.robot import Robot
    from decodery_benchmarks.training.program_probe import (
        controls,
        evaluated,
        reread,
        train_program_probe,
        write_programs,
    )

    robot = named(puzzle)
    if not isinstance(robot, Robot):
        raise SettingsError("a program probe needs the puzzle robot: --puzzle robot")
    lm = load(model)
    sites = Sites(sites).of(lm)
    with terminal_progress(counts=True) as progress:
        programs = write_programs(lm.model, robot, count, sites, seed=seed, progress=progress)
    facts = {"model": lm.name, "command": command_line()}
    learn = functools.partial(
        train_program_probe,
        robot=robot,
        sites=sites,
        model=lm.model.fingerprint,
        rate=rate,
        seed=seed,
        facts=facts,
    )
    trained, report = evaluated(programs, robot, learn, seed)
    untrained = reread(scrambled(named_model(model, dtype="float32"), seed).model, programs, sites)
    report["controls"] = controls(programs, untrained, robot, range(seed, seed + seeds))
    figures = keep_evaluated(trained, report, out / Probe.FILE, site=trained.site)
    click.echo(json.dumps(figures, indent=1))
    click.echo(f"The probe is ready: --monitor program-probe:probe={out},goal=X/Y/FACING")
