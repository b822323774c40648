"""`decodery train`: make what some methods need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import OUT_FILE, OUT_FOLDER
from .train_codes import codebook, keys, sae
from .train_copies import bitnet, hyperfit, lora, lq_lora, nm_sparsity, s2ft
from .train_cppd import cppd
from .train_diffusion import diffusion
from .train_drafts import deer, draft, nested
from .train_dscd import dscd
from .train_exits import calm, del_, sec
from .train_ftp import ftp
from .train_hamburger import hamburger
from .train_head import head
from .train_kv import kv
from .train_learn2pd import learn2pd
from .train_merges import merges
from .train_monitors import los, probe
from .train_own_texts import acceptance, contexts, hidden_transfer, hmm, ngrams, ppd, swift, units
from .train_puzzles import compute_optimal, grpo, orpo, pldr, prm, puzzle_model, text_prm
from .train_r2 import r2
from .train_router import router
from .train_seq2seq import seq2seq
from .train_states import axis, program_probe, sequential
from .train_to_diffusion import to_diffusion
from .training import FILE, command_line, learning_dtype, model_option, out_option, resumable, seed_option

if TYPE_CHECKING:
    from decodery.training.value import Judged


@click.group(short_help="Make what some methods need.")
def train() -> None:
    """Make what some methods need, such as a datastore to draft from."""


for learned in (
    acceptance,
    axis,
    bitnet,
    calm,
    codebook,
    compute_optimal,
    contexts,
    cppd,
    deer,
    del_,
    diffusion,
    draft,
    dscd,
    ftp,
    hamburger,
    grpo,
    head,
    hidden_transfer,
    hmm,
    hyperfit,
    keys,
    kv,
    learn2pd,
    lora,
    los,
    lq_lora,
    merges,
    nested,
    ngrams,
    nm_sparsity,
    ppd,
    orpo,
    pldr,
    prm,
    probe,
    program_probe,
    puzzle_model,
    r2,
    router,
    s2ft,
    sae,
    sec,
    sequential,
    seq2seq,
    swift,
    text_prm,
    to_diffusion,
    units,
):
    train.add_command(learned)


@train.command(short_help="Index text files to draft from.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--out", required=True, type=OUT_FOLDER, help="The folder to make.")
@model_option("whose tokens are indexed")
def datastore(files: tuple[Path, ...], out: Path, model: str) -> None:
    """Index text FILES, each one document, into a folder for --drafter rest:datastore=DIR.

    Memory stays bounded however much text there is; an interrupted run is begun anew.
    """
    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.datastore import build_datastore

    loaded = load(model)
    with terminal_progress() as progress:
        tokens = build_datastore(
            files, out, tokenizer=loaded.tokenizer, vocab_size=loaded.model.vocab_size, progress=progress
        )
    click.echo(f"{tokens:,} tokens are ready: {out}")


@train.command(short_help="Train a head for --acceptance-rule judge:head=FILE.")
@click.argument("questions", type=FILE)
@out_option
@model_option("whose states are judged")
@click.option("--max-new-tokens", default=96, show_default=True, help="Length of the model's own answers.")
@click.option("--places", default=12, show_default=True, help="Places of an answer where alternatives are tried.")
@click.option("--alternatives", default=2, show_default=True, help="Alternatives tried at a place.")
@click.option("--steps", default=600, show_default=True, help="Training steps.")
@click.option("--lr", default=1e-2, show_default=True, help="Learning rate.")
def judge(
    questions: Path, out: Path, model: str, max_new_tokens: int, places: int, alternatives: int, steps: int, lr: float
) -> None:
    """Train a head that tells which drafted tokens leave an answer right, for --acceptance-rule
    judge:head=DIR/judge.safetensors.

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
    click.echo(f"The judge is ready: --acceptance-rule judge:head={out / JUDGE}")


@train.command(short_help="Train prefixes for --logits-source sven:prefix=DIR.")
@click.argument("pairs", required=False, type=FILE)
@out_option
@model_option("that is to be steered")
@click.option("--length", default=5, show_default=True, help="Positions of a prefix.")
@click.option("--epochs", default=4.0, show_default=True, metavar="E", help="How often all pairs are learned from.")
@click.option("--lr", default=1e-2, show_default=True, help="Learning rate of the first step.")
@seed_option("the order and what is left out")
def sven(pairs: Path | None, out: Path, model: str, length: int, epochs: float, lr: float, seed: int) -> None:
    """Train two short prefixes that turn MODEL towards programs as they are after a fix, or before it.

    PAIRS holds one object a line: {"before": ..., "after": ...}, the same program before and after. Without it, 100
    built-in pairs about security are used. Only the prefixes learn, never the model; one pair in ten is kept for
    validation. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.training.fixes import built_in_pairs
    from decodery.training.programs import read_pairs
    from decodery.training.sven import CONTROLS, SVENRecipe, check_folder, train_sven

    recipe = SVENRecipe(length=length, epochs=epochs, lr=lr, seed=seed)
    check_folder(out)
    given = read_pairs(pairs) if pairs else built_in_pairs(100)
    loaded = load(model, dtype=learning_dtype())
    with resumable(out) as progress:
        found, _ = train_sven(loaded, given, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(json.dumps(found.facts["validation"], indent=1))
    click.echo(f"The prefixes are ready: --logits-source sven:control={CONTROLS[0]},prefix={out}")


@train.command(short_help="Learn where --acceptance-rule adadec:tau=TAU should pause.")
@click.argument("solutions", type=FILE)
@model_option("whose threshold is learned")
def thresholds(solutions: Path, model: str) -> None:
    """Learn from SOLUTIONS the entropy above which the model's first choice is more often wrong than right.

    SOLUTIONS holds one object a line: {"prompt": ..., "solution": ...}; "canonical_solution" will do as well. Every
    solution is read once. Prints the threshold with what it was learned from.
    """
    from dataclasses import asdict

    from decodery.models.loaders.load import load
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.thresholds import fit, observe, read_solutions

    pairs = read_solutions(solutions)
    with terminal_progress(counts=True) as progress:
        loaded = load(model)
        found = fit(*observe(loaded.model, loaded.tokenizer, pairs, progress))
    click.echo(json.dumps(asdict(found), indent=1))
    click.echo(f"The threshold is ready: --acceptance-rule adadec:tau={found.tau:.3f}")


@train.command(short_help="Learn what texts promise, for --logits-source controlled-decoding.")
@click.argument("texts", type=FILE)
@click.option("--out", required=True, type=OUT_FILE, help="The file to write.")
@model_option("whose states are read")
@click.option("--tap", type=int, metavar="N", help="Read the states after N layers (all).")
@click.option("--ridge", default=1e-2, show_default=True, help="Higher is more cautious.")
@click.option("--raw", is_flag=True, help="The prompts are plain text, without the chat template.")
@click.option("--restart", is_flag=True, help="Learn how likely another text is not better (for adaptive-sampling).")
@click.option("--switch", is_flag=True, help="Learn by the prompt alone whether texts fail (for edge).")
def value(
    texts: Path, out: Path, model: str, tap: int | None, ridge: float, raw: bool, restart: bool, switch: bool
) -> None:
    """Learn from judged TEXTS how good a text will become, by its beginning.

    TEXTS holds one object a line: {"prompt": ..., "text": ..., "reward": number}. Every text is read once. The file is
    for --logits-source "controlled-decoding:value=value-head(head=FILE),strength=5" and for the search
    controlled-blocks. With --restart, which needs several texts of each prompt, it is for the searches
    adaptive-sampling and early-pruning. With --switch it tells of prompts how likely a reward below 0.5 is, for the
    search edge.
    """
    from decodery import load
    from decodery.core.errors import SettingsError
    from decodery.models.loaders.store import terminal_progress
    from decodery.training.restart import compared
    from decodery.training.value import fit_switch, fit_value, read_judged

    if restart and switch:
        raise SettingsError("a head is for --restart or for --switch: leave one of the two out")
    found = read_judged(texts)
    if restart:
        found = compared(found)
    lm = load(model)
    with terminal_progress(counts=True) as progress:

        def judged() -> Iterator[Judged]:
            for number, (prompt, text, reward) in enumerate(found):
                progress("reading texts", number, len(found))
                yield lm.encode(prompt, raw=raw), lm.tokenizer.encode(text, special=False), reward
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


@train.command(short_help="Train a second attention for --logits-source partial-attention.")
@click.argument("pairs", type=FILE)
@out_option
@model_option("that is to look at its prompts")
@click.option("--last", type=int, metavar="N", help="Only the last N layers get a second attention (all).")
@click.option("--reset/--no-reset", default=True, show_default=True, help="Count positions anew behind the prompt.")
@click.option("--echo", default=0.5, show_default=True, help="Weight of the prompt's auto-encoding.")
@click.option("--steps", default=200, show_default=True, help="Training steps.")
@click.option("--batch", default=4, show_default=True, help="Pairs per step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@click.option("--raw", is_flag=True, help="The sources are plain text, without the chat template.")
@seed_option("where training begins, and its order")
def partial(pairs: Path, out: Path, model: str, raw: bool, **settings: Any) -> None:
    """Train a second attention that sees the prompt alone: --logits-source
    partial-attention:weights=DIR/partial.safetensors.

    PAIRS holds one object a line: {"source": ..., "target": ...}, a prompt and what is to be written. The model stays
    as it is, and has to be loaded in floating point to be used so. One pair in ten is kept for validation. Stop with
    Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery import load
    from decodery.training.partial import PARTIAL, fit_partial, read_pairs

    found = read_pairs(pairs)
    lm = load(model, dtype="float32")
    texts = [
        (lm.encode(source, raw=raw), [*lm.tokenizer.encode(target, special=False), *lm.tokenizer.eos_ids[:1]])
        for source, target in found
    ]
    facts = {"model": lm.name, "command": command_line()}
    with resumable(out) as progress:
        weights = fit_partial(lm.model, texts, out, facts=facts, progress=progress, **settings)
    click.echo(json.dumps(weights.facts["validation"], indent=1))
    click.echo(f"The second attention is ready: --logits-source partial-attention:weights={out / PARTIAL}")
