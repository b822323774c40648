"""`decodery train router`: what two models write, and which of them does better where."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .command import command, option
from .options import OUT_FILE, chat_template_option
from .train_common import FILE, model_option, seed_option


@command(example='train router prompts.txt --scorer "value-head(head=value.safetensors)" --out router.safetensors')
@click.argument("prompts", type=FILE)
@option("--out", required=True, type=OUT_FILE, help="Output file.")
@model_option("that rewrites steps")
@option(
    "--second",
    metavar="NAME",
    show_default="the shipped draft model",
    help="The smaller model, which writes each step first.",
)
@option("--scorer", required=True, help="A scorer of steps, such as value-head(head=FILE).")
@option("--delimiter", default="\n\n", show_default="a blank line", help="Text that ends a step.")
@option("--step-tokens", default=128, show_default=True, help="Maximum tokens of a step.")
@option("--max-new-tokens", default=256, show_default=True, help="Maximum tokens of a text.")
@option("--temperature", default=0.0, show_default=True, help="Sampling temperature of the steps.")
@chat_template_option("The prompts are plain text, without the chat template.")
@seed_option("texts and training")
def router(
    prompts: Path,
    out: Path,
    model: str,
    second: str | None,
    scorer: str,
    delimiter: str,
    step_tokens: int,
    max_new_tokens: int,
    temperature: float,
    apply_chat_template: bool,
    seed: int,
) -> None:
    """Train a router that predicts where MODEL would write a better step than a smaller model did.

    Both models write every step of a text after each line of PROMPTS. The scorer chooses the better step. One text in
    four is held out; there the router is rated by how well it ranks steps by the gain of MODEL (Spearman).
    """
    from decodery import load
    from decodery.core.noise import nth_seed
    from decodery.core.registry import resolve
    from decodery.models.loaders.store import terminal_progress
    from decodery.search.arbitrage import Arbitrage
    from decodery.training.data import read_prompts
    from decodery.training.router import decisions, fit_router

    lines, lm = read_prompts(prompts), load(model)
    search = Arbitrage(
        resolve("scorer", scorer), delimiter=delimiter, step_tokens=step_tokens, model=second, router="oracle"
    ).bind(lm.tokenizer)
    requests = []
    for number, line in enumerate(lines):
        request = lm.request(
            lm.encode(line, apply_chat_template=apply_chat_template),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            drafter=None,
            seed=nth_seed(seed, number),
            apply_chat_template=apply_chat_template,
        )
        request.search = search
        requests.append(request)
    small = search.second(lm.model)
    with terminal_progress(counts=True) as progress:
        found = decisions(lm.engine(), small, requests, progress=progress)
    tap = small.config.num_layers
    learned, rank = fit_router(found, tap, small.fingerprint, seed=seed)
    learned.save(out)
    better = float((found.advantage > 0).double().mean())
    click.echo(json.dumps({"steps": len(found.text), "better": round(better, 4), "spearman": round(rank, 4)}, indent=1))
    click.echo(f"The router is ready: --search arbitrage:router={out},theta=0.5")
