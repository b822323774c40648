"""`decodery train judge` and `adadec-thresholds`: what acceptance rules learn."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .train_common import FILE, command_line, model_option, out_option


@command(example="train judge questions.jsonl --out judge")
@click.argument("questions", type=FILE)
@out_option
@model_option("whose hidden states are judged")
@option("--max-new-tokens", default=96, show_default=True, help="Maximum tokens of an answer of the model.")
@option("--places", default=12, show_default=True, help="Positions of an answer where alternatives are tried.")
@option("--alternatives", default=2, show_default=True, help="Alternatives at a position.")
@option("--steps", default=600, show_default=True, help="Training steps.")
@option("--lr", default=1e-2, show_default=True, help="Learning rate.")
def judge(
    questions: Path, out: Path, model: str, max_new_tokens: int, places: int, alternatives: int, steps: int, lr: float
) -> None:
    """Train a head that predicts which drafted tokens keep an answer right, for the acceptance rule judge.

    QUESTIONS holds one JSON object a line. {"prompt": ..., "right": ..., "wrong": ...}: the wrong answer differs from
    the right one where the mistake begins. {"prompt": ...}, with a number as the answer: the model answers, tries its
    own next best tokens where it is unsure, and checks whether the number stays. One question in five is held out.
    Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.judge import JUDGE, fit
    from decodery.training.mining import Mining, examples, read_questions

    asked, mining = read_questions(questions), Mining(max_new_tokens, places, alternatives)
    target = load(model)
    with terminal_progress() as progress:
        found = examples(target, asked, out, mining=mining, progress=progress)
        facts = {"model": target.name, "command": command_line()}
        layer, of = target.model.config.num_layers, target.model.fingerprint
        head, _ = fit(found, layer, out, steps=steps, lr=lr, facts=facts, model=of, progress=progress)
    click.echo(json.dumps(head.facts, indent=1))
    click.echo(f"The judge is ready: --acceptance-rule judge:head={out / JUDGE}")


@command(example="train adadec-thresholds solutions.jsonl")
@click.argument("solutions", type=FILE)
@model_option("whose threshold is fitted")
def adadec_thresholds(solutions: Path, model: str) -> None:
    """Fit the entropy above which the first choice of MODEL is more often wrong than right.

    SOLUTIONS holds one JSON object a line, {"prompt": ..., "solution": ...}; the key "canonical_solution" works too.
    The threshold is for the acceptance rule adadec.
    """
    from dataclasses import asdict

    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.adadec_thresholds import fit, observe, read_solutions

    pairs = read_solutions(solutions)
    with terminal_progress(counts=True) as progress:
        loaded = load(model)
        found = fit(*observe(loaded.model, loaded.tokenizer, pairs, progress))
    click.echo(json.dumps(asdict(found), indent=1))
    click.echo(f"The threshold is ready: --acceptance-rule adadec:tau={found.tau:.3f}")
