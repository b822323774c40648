"""`decodery train text-prm` and `step-labels`: a process reward model of judged texts, and labels of their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .command import command, option
from .options import OUT_FILE, chat_template_option
from .train_common import FILE, command_line, model_option, out_option, resumable, seed_option


@command(example="train text-prm texts.jsonl --out prm")
@click.argument("texts", type=FILE)
@out_option
@model_option("whose hidden states are read")
@option("--delimiter", default="\n\n", show_default="a blank line", help="Text that ends a step.")
@option("--tap", type=int, metavar="N", show_default="all", help="Read the hidden states after N layers.")
@chat_template_option("The prompts are plain text, without the chat template.")
@option(
    "--published",
    is_flag=True,
    help="Write a folder in a published form, a classifier of tokens, for reward-model:model=DIR. MODEL is a folder.",
)
@seed_option("the initial weights and the order")
def text_prm(
    texts: Path,
    out: Path,
    model: str,
    delimiter: str,
    tap: int | None,
    apply_chat_template: bool,
    published: bool,
    seed: int,
) -> None:
    """Train a head on judged TEXTS that predicts, step by step, whether a text will be right.

    TEXTS holds one JSON object a line: {"prompt": ..., "text": ..., "reward": from 0 to 1}; "labels" with a number of
    each step, as `decodery train step-labels` writes them, are learned in place of the reward. Several samples of MODEL
    for each prompt are best. One prompt in ten is held out. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors.
    """
    from decodery import load
    from decodery.training.reward_head import PRM
    from decodery.training.text_prm import JudgedText, TextPRMRecipe, train_text_prm
    from decodery.training.value import read_judged, read_step_labels

    found = zip(read_judged(texts), read_step_labels(texts), strict=True)
    if published:
        if delimiter != "\n\n" or tap is not None or not apply_chat_template:
            raise click.UsageError(
                "--published reads questions as text and steps between blank lines: leave others out"
            )
        _publish(model, [(*text, labels) for text, labels in found], out)
        return
    lm = load(model)
    judged = [
        JudgedText(
            lm.encode(prompt, apply_chat_template=apply_chat_template),
            lm.tokenizer.encode(text, special=False),
            reward,
            labels,
        )
        for (prompt, text, reward), labels in found
    ]
    recipe = TextPRMRecipe(delimiter, tap, seed=seed)
    with resumable(out) as progress:
        head = train_text_prm(
            lm.model, lm.tokenizer, judged, out, recipe=recipe, command=command_line(), progress=progress
        )
    facts = head.facts or {}
    click.echo(f"the reward model is ready: process-reward:head={out / PRM}")
    click.echo(
        f"on held-out prompts: AUC {facts['auc']}, cross-entropy {facts['cross_entropy']} against "
        f"{facts['cross_entropy_of_the_mean']} of the mean"
    )


def _publish(model: str, judged: list[Any], out: Path) -> None:
    import json

    from decodery.core.errors import SettingsError
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.published_prm import train_published_prm

    source = Path(model)
    if not source.is_dir():
        raise SettingsError(f"--published copies the tensors of a folder of safetensors, and {model} is none: give one")
    with terminal_progress(counts=True) as progress:
        values = train_published_prm(load(model), source, judged, out, command=command_line(), progress=progress)
    click.echo(json.dumps(values, indent=1))
    click.echo(f"the reward model is ready: reward-model:model={out}")


@command(example="train step-labels solutions.jsonl -m MODEL --out labelled.jsonl --pairs pairs.jsonl")
@click.argument("solutions", type=FILE)
@option("--out", required=True, type=OUT_FILE, help="Output file, for `decodery train text-prm`.")
@option("--pairs", type=OUT_FILE, metavar="FILE", help="Also write pairs of a better and a worse text, for ORPO.")
@model_option("that compares steps; the URL of a server works too")
@option("--delimiter", default="\n\n", show_default="a blank line", help="Text that ends a step.")
@option(
    "--answer",
    type=click.Choice(["auto", "number", "marked", "whole", "choice", "quantity"]),
    default="auto",
    show_default=True,
    help="Where answers stand in a text.",
)
@option("--pattern", metavar="REGEX", help="A regular expression of answers in its place.")
@option(
    "--missing",
    type=click.Choice(["incorrect", "outcome"]),
    default="incorrect",
    show_default=True,
    help="Label of steps that the annotator leaves out.",
)
@option("--max-new-tokens", default=1024, show_default=True, help="Maximum tokens of an annotation.")
def step_labels(
    solutions: Path,
    out: Path,
    pairs: Path | None,
    model: str,
    delimiter: str,
    answer: Any,
    pattern: str | None,
    missing: Any,
    max_new_tokens: int,
) -> None:
    """Label the steps of SOLUTIONS by comparing them with reference solutions: one text of MODEL for each solution.

    SOLUTIONS holds one JSON object a line: {"question": ..., "reference": ..., "solution": ...} or "solutions" with a
    list. MODEL says which reference steps each step matches, and whether it is right (SPARE). Steps it leaves out are
    wrong, and the last step's label is whether the final answers are equal. Interrupt it with Ctrl-C: the same command
    continues.
    """
    import json

    from decodery import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.search.answers import AnswerExtractor
    from decodery.training.step_labels import label_steps, preference_pairs, read_exercises

    exercises, lm = read_exercises(solutions), load(model)
    with terminal_progress(counts=True) as progress:
        found = label_steps(
            lm, exercises, out, delimiter=delimiter, answers=AnswerExtractor(answer, pattern or ""), missing=missing,
            max_new_tokens=max_new_tokens, progress=progress,
        )  # fmt: skip
    click.echo(
        f"{sum(len(each.labels) for each in found)} steps of {len(found)} texts are labelled, "
        f"{sum(each.tokens for each in found)} tokens written: decodery train text-prm {out}"
    )
    if pairs is not None:
        made = preference_pairs(found)
        pairs.write_text("".join(f"{json.dumps(each)}\n" for each in made), encoding="utf-8")
        click.echo(f"{len(made)} pairs are ready: decodery train orpo {pairs}")
