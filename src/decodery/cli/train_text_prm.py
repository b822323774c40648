"""`decodery train text-prm`: a process reward model of judged texts."""

from __future__ import annotations

from pathlib import Path

import click

from .command import command, option
from .options import chat_template_option
from .train_common import FILE, command_line, model_option, out_option, resumable, seed_option


@command(example="train text-prm texts.jsonl --out prm")
@click.argument("texts", type=FILE)
@out_option
@model_option("whose hidden states are read")
@option("--delimiter", default="\n\n", show_default="a blank line", help="Text that ends a step.")
@option("--tap", type=int, metavar="N", show_default="all", help="Read the hidden states after N layers.")
@chat_template_option("The prompts are plain text, without the chat template.")
@seed_option("the initial weights and the order")
def text_prm(
    texts: Path, out: Path, model: str, delimiter: str, tap: int | None, apply_chat_template: bool, seed: int
) -> None:
    """Train a head on judged TEXTS that predicts, step by step, whether a text will be right.

    TEXTS holds one JSON object a line: {"prompt": ..., "text": ..., "reward": from 0 to 1}. Several samples of MODEL
    for each prompt are best. One prompt in ten is held out. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors.
    """
    from decodery import load
    from decodery.training.reward_head import PRM
    from decodery.training.text_prm import JudgedText, TextPRMRecipe, train_text_prm
    from decodery.training.value import read_judged

    found, lm = read_judged(texts), load(model)
    judged = [
        JudgedText(
            lm.encode(prompt, apply_chat_template=apply_chat_template), lm.tokenizer.encode(text, special=False), reward
        )
        for prompt, text, reward in found
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
