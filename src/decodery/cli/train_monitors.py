"""`decodery train los` and `decodery train probe`: what monitors read answers by."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import Decorator, together
from .training import FILE, command_line, model_option, out_option, resumable, seed_option

if TYPE_CHECKING:
    from ..lm import LM
    from ..train.activations import Answered
    from ..train.checkable import Question


def _asked(most: int = 960) -> Decorator:
    """The options of the questions that are answered first, handed on as `questions`."""
    options = together(
        click.argument("questions", required=False, type=FILE),
        out_option,
        model_option("that is watched"),
        click.option("--count", default=most, show_default=True, type=click.IntRange(1), help="Built-in questions."),
        click.option("--rate", default=0.1, show_default=True, help="Right answers that are flagged, at most."),
        seed_option("questions, split and training"),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(questions: Path | None, count: int, seed: int, **others: Any) -> Any:
            from ..train.checkable import built_in, read_checkable

            found = built_in(count, seed) if questions is None else read_checkable(questions)
            return command(questions=found, seed=seed, data=str(questions or "built-in questions"), **others)

        return options(call)

    return decorate


def _collected(lm: LM, questions: list[Question], out: Path, sites: tuple[str, ...], k: int) -> list[Answered]:
    from ..train.activations import ActivationCollector

    with resumable(out) as progress:
        return ActivationCollector(lm, out / "answers", sites=sites, k=k).collect(questions, progress)


@click.command(short_help="Train a head for --monitor los:head=DIR.")
@_asked()
@click.option(
    "--k", default=100, show_default=True, type=click.IntRange(0), help="Log-probabilities of a row it reads."
)
def los(questions: list[Question], out: Path, model: str, rate: float, seed: int, data: str, k: int) -> None:
    """Train LOS-Net to tell MODEL's wrong answers by how likely their tokens and the rivals were.

    QUESTIONS holds one object a line, {"prompt": text, "answer": text, "group": text}: MODEL answers each, greedily, to
    the end of the line, and an answer is right where it is the one given. Questions of one group are never both learned
    from and tested on. Without a file: sums and capitals. An interrupted run goes on where it stopped.
    """
    from .. import load
    from ..model.store import terminal_progress
    from ..monitor.los import HEAD
    from ..train.los import train_los

    lm = load(model)
    answers = _collected(lm, questions, out, (), k)
    with terminal_progress(counts=True) as progress:
        facts = {"model": lm.name, "command": command_line()}
        head = train_los(answers, k=k, rate=rate, seed=seed, data=data, facts=facts, progress=progress)
    head.save(out / HEAD)
    click.echo(json.dumps(dict(head.facts) | {"threshold": head.threshold.facts()}, indent=1))
    click.echo(f"The head is ready: --monitor los:head={out}")


@click.command(short_help="Train a probe for --monitor factcheckmate or truthprint.")
@_asked()
@click.option(
    "--rows",
    type=click.Choice(["prompt", "new"]),
    default="prompt",
    show_default=True,
    help="What it reads: the prompt, for factcheckmate, or each token of the answer, for truthprint.",
)
@click.option(
    "--site", "sites", multiple=True, help="Where it may read, such as resid_post.15 (five depths); repeated."
)
@click.option("--intervene", is_flag=True, help="Train what factcheckmate adds to hidden states, too.")
def probe(
    questions: list[Question],
    out: Path,
    model: str,
    rate: float,
    seed: int,
    data: str,
    rows: Any,
    sites: tuple[str, ...],
    intervene: bool,
) -> None:
    """Train a probe to tell MODEL's wrong answers by its hidden states: --monitor factcheckmate:probe=DIR, say.

    QUESTIONS and what becomes of them: as for `train los`. The site is the one at which answers kept for validation are
    told apart best.
    """
    from .. import load
    from ..model.store import terminal_progress
    from ..monitor.factcheckmate import SHIFT
    from ..monitor.probe import PROBE
    from ..train.probe import train_probe
    from ..train.ranking import parts
    from ..train.shift import train_shift

    if intervene and rows != "prompt":
        raise click.UsageError("--intervene goes with --rows prompt")
    lm = load(model)
    layers = lm.model.config.num_layers
    sites = sites or tuple(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6))
    answers = _collected(lm, questions, out, sites, 1)
    facts = {"model": lm.name, "command": command_line()}
    trained = train_probe(
        answers, sites, rows, model=lm.model.fingerprint, rate=rate, seed=seed, data=data, facts=facts
    )
    trained.save(out / PROBE)
    if intervene:
        part = parts([each.question.group for each in answers], seed)
        learned = [each for each, name in zip(answers, part, strict=True) if name == "train"]
        with terminal_progress(counts=True) as progress:
            shift = train_shift(load(model, dtype="float32"), learned, seed=seed, facts=facts, progress=progress)
        shift.save(out / SHIFT)
    told = dict(trained.facts) | {"site": trained.site, "threshold": trained.threshold.facts()}
    click.echo(json.dumps(told, indent=1))
    name = "factcheckmate" if rows == "prompt" else "truthprint"
    click.echo(f"The probe is ready: --monitor {name}:probe={out}{',action=switch' if intervene else ''}")
