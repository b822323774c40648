"""`decodery train value`: a head that predicts the reward of a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command import command, option
from .options import OUT_FILE, chat_template_option
from .train_common import FILE, model_option

if TYPE_CHECKING:
    from decodery.training.value import Judged


@command(example="train value texts.jsonl --out value.safetensors")
@click.argument("texts", type=FILE)
@option("--out", required=True, type=OUT_FILE, help="Output file.")
@model_option("whose hidden states are read")
@option("--tap", type=int, metavar="N", show_default="all", help="Read the hidden states after N layers.")
@option("--ridge", default=1e-2, show_default=True, help="Strength of the ridge penalty.")
@chat_template_option("The prompts are plain text, without the chat template.")
@option(
    "--restart",
    is_flag=True,
    help="Predict the probability that another text is not better, for the search adaptive-sampling.",
)
@option("--switch", is_flag=True, help="Predict from the prompt alone whether texts fail, for the search edge.")
def value(
    texts: Path,
    out: Path,
    model: str,
    tap: int | None,
    ridge: float,
    apply_chat_template: bool,
    restart: bool,
    switch: bool,
) -> None:
    """Train a head that predicts the reward of a text from its beginning.

    TEXTS holds one JSON object a line: {"prompt": ..., "text": ..., "reward": number}. The head is for the source
    controlled-decoding and the search controlled-blocks. With --restart it is for the searches adaptive-sampling and
    early-pruning, and needs several texts of each prompt. With --switch it predicts from a prompt how likely a reward
    below 0.5 is, for the search edge.
    """
    from decodery import load
    from decodery.core.errors import SettingsError
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.restart import compared
    from decodery.training.value import fit_switch, fit_value, read_judged

    if restart and switch:
        raise SettingsError("--restart and --switch exclude each other: give one of them")
    found = read_judged(texts)
    if restart:
        found = compared(found)
    lm = load(model)
    with terminal_progress(counts=True) as progress:

        def judged() -> Iterator[Judged]:
            for number, (prompt, text, reward) in enumerate(found):
                progress("reading texts", number, len(found))
                yield (
                    lm.encode(prompt, apply_chat_template=apply_chat_template),
                    lm.tokenizer.encode(text, special=False),
                    reward,
                )
            progress("reading texts", len(found), len(found))

        if switch:
            hard = ((prompt, reward < 0.5) for prompt, _, reward in judged())
            head = fit_switch(lm.model, hard, tap=tap, ridge=ridge)
        else:
            head = fit_value(lm.model, judged(), tap=tap, ridge=ridge)
    head.save(out)
    if switch:
        click.echo(f'The switch is ready: --search "edge:switch={out},adapter=DIR,scorer=..."')
    elif restart:
        click.echo(f'The value head is ready: --search "adaptive-sampling:scorer=value-head(head={out})"')
    else:
        click.echo(f'The value head is ready: --logits-source "controlled-decoding:value=value-head(head={out})"')
