"""`decodery train kv`: what cache policies need to know of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from .command import Entry, Group, command, option
from .train_common import Learning, command_line, files_of_text, learning, pieces, seed_option

SECTIONS = {
    "Commands": {
        "double-sparsity": Entry("Calibrate the channels of double-sparsity.", "train_kv"),
        "lserve": Entry("Train the head gates of lserve.", "train_kv"),
        "write-gate": Entry("Train the gate of write-gate.", "train_kv"),
        "coprocessor": Entry("Train the adapters of coprocessor.", "train_kv"),
        "meta-soft": Entry("Train the soft tokens of meta-soft.", "train_kv"),
    }
}


@click.group(cls=Group, sections=SECTIONS)
def kv() -> None:
    """Train or calibrate what a KV cache policy needs."""


@command(example="train kv double-sparsity notes.txt --out channels")
@files_of_text("whose keys are looked at")
def double_sparsity(files: tuple[Path, ...], out: Path, model: str, texts: int, length: int) -> None:
    """Find in text FILES which channels of MODEL's keys say most about attention: --kv double-sparsity:calibration=DIR.

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
    click.echo(f"The channels are ready: --kv double-sparsity:calibration={out}")


@command(example="train kv lserve notes.txt --out gates")
@learning("whose heads are told apart")
@option("--steps", default=150, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--recent", default=64, show_default=True, help="Last tokens that a streaming head reads.")
@seed_option("what is hidden where, and the order of the texts")
def lserve(given: Learning, steps: int, recent: int, seed: int) -> None:
    """Learn which heads of MODEL need old tokens, from numbers hidden in text FILES: --kv lserve:gates=DIR.

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
    click.echo(f"The gates are ready: --kv lserve:gates={given.out}")


@command(example="train kv write-gate notes.txt --out gate")
@learning("whose written tokens are judged")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--rate", default=0.5, show_default=True, help="Share of written tokens that is to be stored.")
@seed_option("where the gate begins, its noise, and the order of the texts")
def write_gate(given: Learning, steps: int, rate: float, seed: int) -> None:
    """Train a network that tells which tokens of a text MODEL need not store, on text FILES: --kv write-gate:gate=DIR.

    MODEL itself stays as it is; it is read in floating point. An interrupted run goes on where it stopped.
    """
    from decodery.training.write_gates import WriteGateRecipe, check_folder, train_write_gate

    recipe = WriteGateRecipe(steps=steps, rate=rate, seed=seed)
    given.learn(check_folder, partial(train_write_gate, recipe=recipe))
    click.echo(f"The gate is ready: --kv write-gate:gate={given.out}")


@command(example="train kv coprocessor notes.txt --out coprocessor")
@learning("that is helped")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--latents", default=8, show_default=True, help="Entries that are written behind a prompt.")
@option("--ahead", default=16, show_default=True, help="Tokens behind a prompt that are to be foreseen.")
@option("--static", is_flag=True, help="Learn entries that are the same for every prompt, to compare with.")
@seed_option("where it begins, and the order and places of the texts")
def coprocessor(given: Learning, steps: int, latents: int, ahead: int, static: bool, seed: int) -> None:
    """Train adapters with which MODEL writes entries after a prompt that help it go on: --kv coprocessor:trained=DIR.

    It learns from text FILES. MODEL itself stays as it is; it is read in floating point. An interrupted run goes on
    where it stopped.
    """
    from decodery.training.coprocessor import CoprocessorRecipe, check_folder, train_coprocessor

    recipe = CoprocessorRecipe(steps=steps, latents=latents, ahead=ahead, static=static, seed=seed)
    given.learn(check_folder, partial(train_coprocessor, recipe=recipe))
    click.echo(f"The coprocessor is ready: --kv coprocessor:trained={given.out}")


@command(example="train kv meta-soft notes.txt --out meta")
@learning("whose prompts are looked at")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--ahead", default=32, show_default=True, help="Tokens whose attention is the example.")
@option("--static", is_flag=True, help="Learn tokens that are the same for every prompt, to compare with.")
@seed_option("where they begin, their noise, and the order of the texts")
def meta_soft(given: Learning, steps: int, ahead: int, static: bool, seed: int) -> None:
    """Train soft tokens that tell what of a prompt MODEL will look at: --kv meta-soft:trained=DIR.

    They learn from text FILES what the end of a piece pays to the rest. MODEL itself stays as it is; it is read in
    floating point. An interrupted run goes on where it stopped.
    """
    from decodery.training.meta_tokens import MetaRecipe, check_folder, train_meta_tokens

    recipe = MetaRecipe(steps=steps, ahead=ahead, static=static, seed=seed)
    given.learn(check_folder, partial(train_meta_tokens, recipe=recipe))
    click.echo(f"The meta-tokens are ready: --kv meta-soft:trained={given.out}")
