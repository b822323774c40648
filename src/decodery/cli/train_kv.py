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


@click.group(cls=Group, sections=SECTIONS, example="train kv lserve notes.txt --out gates")
def kv() -> None:
    """Train or calibrate what a KV cache policy needs."""


@command(example="train kv double-sparsity notes.txt --out channels")
@files_of_text("whose keys are read")
def double_sparsity(files: tuple[Path, ...], out: Path, model: str, texts: int, length: int) -> None:
    """Find the channels of MODEL's keys that decide attention, on text FILES, for the policy double-sparsity.

    MODEL does not change. It takes as long as reading the texts.
    """
    from dataclasses import replace

    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.models.trained.key_channels import KeyChannels
    from decodery.training.key_channels import calibrate, check_folder

    check_folder(out)
    loaded = load(model)
    read = pieces(loaded, files, texts, length)
    with terminal_progress(counts=True) as progress:
        found = calibrate(loaded.model, read, progress)
    out.mkdir(parents=True, exist_ok=True)
    replace(found, facts={**found.facts, "command": command_line()}).save(out / KeyChannels.FILE)
    click.echo(f"The channels are ready: --cache-policy double-sparsity:calibration={out}")


@command(example="train kv lserve notes.txt --out gates")
@learning("whose heads are classified")
@option("--steps", default=150, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--recent", default=64, show_default=True, help="Recent tokens that a streaming head reads.")
@seed_option("the hidden keys and the order of texts")
def lserve(given: Learning, steps: int, recent: int, seed: int) -> None:
    """Train gates that tell which heads of MODEL need old tokens, for the policy lserve.

    The task is to find numbers that are hidden in text FILES. MODEL is read in floating point and does not change.
    Interrupt it with Ctrl-C: the same command continues.
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


@command(example="train kv write-gate notes.txt --out gate")
@learning("whose written tokens are judged")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--rate", default=0.5, show_default=True, help="Share of written tokens to store.")
@seed_option("the initial gate, its noise and the order of texts")
def write_gate(given: Learning, steps: int, rate: float, seed: int) -> None:
    """Train a gate that decides which tokens MODEL need not store, on text FILES, for the policy write-gate.

    MODEL is read in floating point and does not change. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.training.write_gates import WriteGateRecipe, check_folder, train_write_gate

    recipe = WriteGateRecipe(steps=steps, rate=rate, seed=seed)
    given.learn(check_folder, partial(train_write_gate, recipe=recipe))
    click.echo(f"The gate is ready: --cache-policy write-gate:gate={given.out}")


@command(example="train kv coprocessor notes.txt --out coprocessor")
@learning("to help")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--latents", default=8, show_default=True, help="Entries written after a prompt.")
@option("--ahead", default=16, show_default=True, help="Tokens after a prompt to predict.")
@option("--static", is_flag=True, help="Train a control: the same entries for every prompt.")
@seed_option("the initial weights, and the order and positions of texts")
def coprocessor(given: Learning, steps: int, latents: int, ahead: int, static: bool, seed: int) -> None:
    """Train adapters that let MODEL add helpful cache entries after a prompt, for the policy coprocessor.

    Text FILES are the training data. MODEL is read in floating point and does not change. Interrupt it with Ctrl-C: the
    same command continues.
    """
    from decodery.training.coprocessor import CoprocessorRecipe, check_folder, train_coprocessor

    recipe = CoprocessorRecipe(steps=steps, latents=latents, ahead=ahead, static=static, seed=seed)
    given.learn(check_folder, partial(train_coprocessor, recipe=recipe))
    click.echo(f"The coprocessor is ready: --cache-policy coprocessor:trained={given.out}")


@command(example="train kv meta-soft notes.txt --out meta")
@learning("whose prompts are read")
@option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Training steps.")
@option("--ahead", default=32, show_default=True, help="Tokens whose attention is the training target.")
@option("--static", is_flag=True, help="Train a control: the same tokens for every prompt.")
@seed_option("the initial tokens, their noise and the order of texts")
def meta_soft(given: Learning, steps: int, ahead: int, static: bool, seed: int) -> None:
    """Train soft tokens that predict which prompt tokens MODEL will attend to, for the policy meta-soft.

    They learn from text FILES how the end of a piece attends to the rest. MODEL is read in floating point and does not
    change. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.training.meta_tokens import MetaRecipe, check_folder, train_meta_tokens

    recipe = MetaRecipe(steps=steps, ahead=ahead, static=static, seed=seed)
    given.learn(check_folder, partial(train_meta_tokens, recipe=recipe))
    click.echo(f"The meta-tokens are ready: --cache-policy meta-soft:trained={given.out}")
