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
@model_option("whose states are judged")
@option("--max-new-tokens", default=96, show_default=True, help="Length of the model's own answers.")
@option("--places", default=12, show_default=True, help="Places of an answer where alternatives are tried.")
@option("--alternatives", default=2, show_default=True, help="Alternatives tried at a place.")
@option("--steps", default=600, show_default=True, help="Training steps.")
@option("--lr", default=1e-2, show_default=True, help="Learning rate.")
def judge(
    questions: Path, out: Path, model: str, max_new_tokens: int, places: int, alternatives: int, steps: int, lr: float
) -> None:
    """Train a head that tells which drafted tokens leave an answer right, for --rule judge:head=DIR/judge.safetensors.

    QUESTIONS holds one object a line: {"prompt": ..., "right": ..., "wrong": ...}, whose wrong answer parts from the
    right one where it goes wrong, or {"prompt": ...} with an answer that ends in a number: the model then answers,
    tries its own next best tokens where it is unsure, and sees whether the number stays. An interrupted run goes on
    where it stopped. One question in five is kept for validation.
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
    click.echo(f"The judge is ready: --rule judge:head={out / JUDGE}")


@command(example="train adadec-thresholds solutions.jsonl")
@click.argument("solutions", type=FILE)
@model_option("whose threshold is learned")
def adadec_thresholds(solutions: Path, model: str) -> None:
    """Learn from SOLUTIONS the entropy above which the model's first choice is more often wrong than right.

    SOLUTIONS holds one object a line: {"prompt": ..., "solution": ...}; "canonical_solution" will do as well. Every
    solution is read once. Prints the threshold with what it was learned from.
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
    click.echo(f"The threshold is ready: --rule adadec:tau={found.tau:.3f}")
