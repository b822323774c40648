"""`decodery train router`: what two models write, and which of them does better where."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .options import OUT_FILE
from .training import FILE, model_option, seed_option


@click.command(short_help="Train a router for --search arbitrage:router=FILE.")
@click.argument("prompts", type=FILE)
@click.option("--out", required=True, type=OUT_FILE, help="The file to write.")
@model_option("that steps are escalated to")
@click.option("--second", metavar="NAME", help="The model that writes steps first (the draft that comes along).")
@click.option("--scorer", required=True, help="What tells how good steps are, such as value-head(head=FILE).")
@click.option("--delimiter", default="\n\n", help="What ends a step (a blank line).")
@click.option("--step-tokens", default=128, show_default=True, help="Tokens of a step at most.")
@click.option("--max-new-tokens", default=256, show_default=True, help="Tokens of a text at most.")
@click.option("--temperature", default=0.0, show_default=True, help="What steps are drawn at.")
@click.option("--raw", is_flag=True, help="The prompts are plain text, without the chat template.")
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
    raw: bool,
    seed: int,
) -> None:
    """Train a router that tells where MODEL would write a better step than a smaller one has written.

    Both models write every step of texts after PROMPTS, one a line, and the better one by the scorer becomes text. One
    text in four is kept for validation, and tells how well the router ranks steps by what MODEL gains (Spearman).
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
            lm.encode(line, raw=raw),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            drafter=None,
            seed=nth_seed(seed, number),
            raw=raw,
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
