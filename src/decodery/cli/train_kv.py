"""`decodery train kv`: what cache policies need to know of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from .training import Learning, command_line, files_of_text, learning, pieces, seed_option


@click.group(short_help="Make what some cache policies need.")
def kv() -> None:
    """Make what some cache policies need."""


@kv.command("double-sparsity", short_help="Calibrate --cache-policy double-sparsity:calibration=DIR.")
@files_of_text("whose keys are looked at")
def double_sparsity(files: tuple[Path, ...], out: Path, model: str, texts: int, length: int) -> None:
    """Find in text FILES which channels of MODEL's keys say most about attention: --cache-policy
    double-sparsity:calibration=DIR.

    MODEL itself stays as it is. It takes as long as reading the texts does.
    """
    from dataclasses import replace

    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.models.trained.key_channels import CHANNELS
    from decodery.training.key_channels import calibrate, check_folder

    check_folder(out)
    loaded = load(model)
    read = pieces(loaded, files, texts, length)
    with terminal_progress(counts=True) as progress:
        found = calibrate(loaded.model, read, progress)
    out.mkdir(parents=True, exist_ok=True)
    replace(found, facts={**found.facts, "command": command_line()}).save(out / CHANNELS)
    click.echo(f"The channels are ready: --cache-policy double-sparsity:calibration={out}")


@kv.command("lserve", short_help="Learn the head gates of --cache-policy lserve:gates=DIR.")
@learning("whose heads are told apart")
@click.option("--steps", default=150, show_default=True, type=click.IntRange(1), help="Training steps.")
@click.option("--recent", default=64, show_default=True, help="Last tokens that a streaming head reads.")
@seed_option("what is hidden where, and the order of the texts")
def lserve(given: Learning, steps: int, recent: int, seed: int) -> None:
    """Learn which heads of MODEL need old tokens, from numbers hidden in text FILES: --cache-policy lserve:gates=DIR.

    MODEL itself stays as it is; it is read in floating point. An interrupted run goes on where it stopped.
    """
    from decodery.training.head_gates import GateRecipe, check_folder, hide_keys, train_head_gates

    recipe = GateRecipe(steps=steps, recent=recent, seed=seed)
    given.learn(
        check_folder,
        lambda loaded, read, out, **how: train_head_gates(
            loaded, hide_keys(loaded.tokenizer, read, seed=seed), out, recipe=recipe, **how
        ),
    )
    click.echo(f"The gates are ready: --cache-policy lserve:gates={given.out}")


@kv.command("write-gate", short_help="Train the gate of --cache-policy write-gate:gate=DIR.")
@learning("whose written tokens are judged")
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@click.option("--rate", default=0.5, show_default=True, help="Share of written tokens that is to be stored.")
@seed_option("where the gate begins, its noise, and the order of the texts")
def write_gate(given: Learning, steps: int, rate: float, seed: int) -> None:
    """Train a network that tells which tokens of a text MODEL need not store, on text FILES: --cache-policy
    write-gate:gate=DIR.

    MODEL itself stays as it is; it is read in floating point. An interrupted run goes on where it stopped.
    """
    from decodery.training.write_gates import WriteGateRecipe, check_folder, train_write_gate

    recipe = WriteGateRecipe(steps=steps, rate=rate, seed=seed)
    given.learn(check_folder, partial(train_write_gate, recipe=recipe))
    click.echo(f"The gate is ready: --cache-policy write-gate:gate={given.out}")


@kv.command("coprocessor", short_help="Train --cache-policy coprocessor:trained=DIR.")
@learning("that is helped")
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@click.option("--latents", default=8, show_default=True, help="Entries that are written behind a prompt.")
@click.option("--ahead", default=16, show_default=True, help="Tokens behind a prompt that are to be foreseen.")
@click.option("--static", is_flag=True, help="Learn entries that are the same for every prompt, to compare with.")
@seed_option("where it begins, and the order and places of the texts")
def coprocessor(given: Learning, steps: int, latents: int, ahead: int, static: bool, seed: int) -> None:
    """Train adapters with which MODEL writes entries after a prompt that help it go on: --cache-policy
    coprocessor:trained=DIR.

    It learns from text FILES. MODEL itself stays as it is; it is read in floating point. An interrupted run goes on
    where it stopped.
    """
    from decodery.training.coprocessor import CoprocessorRecipe, check_folder, train_coprocessor

    recipe = CoprocessorRecipe(steps=steps, latents=latents, ahead=ahead, static=static, seed=seed)
    given.learn(check_folder, partial(train_coprocessor, recipe=recipe))
    click.echo(f"The coprocessor is ready: --cache-policy coprocessor:trained={given.out}")


@kv.command("meta-soft", short_help="Train the meta-tokens of --cache-policy meta-soft:trained=DIR.")
@learning("whose prompts are looked at")
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@click.option("--ahead", default=32, show_default=True, help="Tokens whose attention is the example.")
@click.option("--static", is_flag=True, help="Learn tokens that are the same for every prompt, to compare with.")
@seed_option("where they begin, their noise, and the order of the texts")
def meta_soft(given: Learning, steps: int, ahead: int, static: bool, seed: int) -> None:
    """Train soft tokens that tell what of a prompt MODEL will look at: --cache-policy meta-soft:trained=DIR.

    They learn from text FILES what the end of a piece pays to the rest. MODEL itself stays as it is; it is read in
    floating point. An interrupted run goes on where it stopped.
    """
    from decodery.training.meta_tokens import MetaRecipe, check_folder, train_meta_tokens

    recipe = MetaRecipe(steps=steps, ahead=ahead, static=static, seed=seed)
    given.learn(check_folder, partial(train_meta_tokens, recipe=recipe))
    click.echo(f"The meta-tokens are ready: --cache-policy meta-soft:trained={given.out}")
