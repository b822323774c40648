"""`decodery train direction` and `sequential`: what is read from a model's states."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import click

from .command import command, option
from .options import together
from .train_common import FILE, command_line, model_option, out_option, print_report, seed_option

RATE = option("--rate", default=0.1, show_default=True, help="Maximum rate of false alarms.")
SITES = option(
    "--site",
    "sites",
    multiple=True,
    show_default="five depths",
    help="Hook point to try, such as resid_post.3. Repeatable.",
)


def five_depths(layers: int) -> tuple[str, ...]:
    """Sites after layers at five depths, each once."""
    return tuple(dict.fromkeys(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6)))


@command(example="train sequential --out probe")
@click.argument("conversations", required=False, type=FILE)
@together(out_option, model_option("that reads the conversations"), RATE, SITES)
@seed_option("conversations, split and training")
@option("--count", default=400, show_default=True, type=click.IntRange(1), help="Number of built-in conversations.")
def sequential(
    conversations: Path | None, out: Path, model: str, rate: float, sites: tuple[str, ...], seed: int, count: int
) -> None:
    """Train a probe that detects when a conversation as a whole is what you look for, for the monitor sequential.

    CONVERSATIONS holds one JSON object a line, {"turns": [text, ...], "completes": number or null, "group": text}: the
    turns of a user, and the number (from 0) of the turn that completes it. The default is built-in shopping lists, some
    of which hold a secret triple of items. Or it holds your own conversations with labels, {"messages": [...], "label":
    true or false, "group": text}.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.probe import Probe
    from decodery.training.sequential import built_in_talks, evaluated, hear, read_talks, train_sequential

    talks = built_in_talks(count, seed) if conversations is None else read_talks(conversations)
    lm = load(model)
    sites = sites or five_depths(lm.model.config.num_layers)
    with terminal_progress(counts=True) as progress:
        heard = hear(lm, talks, sites, progress)
    learn = functools.partial(
        train_sequential,
        sites=sites,
        model=lm.model.fingerprint,
        rate=rate,
        seed=seed,
        data=str(conversations or "built-in conversations"),
        facts={"model": lm.name, "command": command_line()},
    )
    trained, report = evaluated(heard, learn, seed)
    replace(trained, facts={**trained.facts, "report": report}).save(out / Probe.FILE)
    print_report(report, trained.threshold, site=trained.site)
    click.echo(f"The probe is ready: --monitor sequential:probe={out}")


@command(example="train direction --kind lr --out direction")
@click.argument("statements", required=False, type=FILE)
@together(out_option, model_option("whose hidden states are read"), SITES)
@seed_option("the split")
@option(
    "--kind",
    default="lr",
    show_default=True,
    help="lr: the direction that separates the labels. pc1, pc2, ...: a principal component.",
)
def direction(statements: Path | None, out: Path, model: str, sites: tuple[str, ...], seed: int, kind: str) -> None:
    """Find a direction of the hidden states of MODEL that separates STATEMENTS, for the monitor neurofeedback.

    STATEMENTS holds one JSON object a line, {"text": ..., "label": true or false, "group": text}; half of them are for
    training. The default is right and wrong capitals. The hook point that separates the labels best on a part of the
    others is used. A principal component ignores the labels. The printed figures are those of the rest. Or it holds
    your own texts with labels, {"messages": [...], "label": true or false, "group": text}, whose last answer is read.
    """
    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.monitors.probe import Probe
    from decodery.training.direction import (
        axis_by,
        built_in_statements,
        evaluated,
        read_answers,
        read_by,
        read_statements,
    )
    from decodery.training.labelled import is_labelled, read_chats

    chats = read_chats(statements, answers=True) if statements is not None and is_labelled(statements) else []
    found = built_in_statements(seed) if statements is None else [] if chats else read_statements(statements)
    lm = load(model)
    sites = sites or five_depths(lm.model.config.num_layers)
    with terminal_progress(counts=True) as progress:
        read = read_answers(lm, chats, sites, progress) if chats else read_by(lm, found, sites, progress)
    facts = {"model": lm.name, "command": command_line()}
    chat = lm.chat_template is not None
    learn = functools.partial(axis_by, kind=kind, model=lm.model.fingerprint, chat=chat, seed=seed, facts=facts)
    trained, report = evaluated(read, learn, seed)
    replace(trained, facts={**trained.facts, "report": report}).save(out / Probe.FILE)
    print_report(report, site=trained.site, variance=trained.facts["variance"])
    click.echo(f"The direction is ready: --monitor neurofeedback:axis={out}")
