"""`decodery train puzzle-model` and `prm`: what searches are measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from decodery.core.errors import SettingsError

from .options import OUT_FILE
from .training import FILE, command_line, model_option, out_option, resumable, seed_option

_SEARCHED = "mcts(scorer={scorer},delimiter={delimiter},n=4,simulations=8,rounds=16)"


@click.command("puzzle-model", short_help="Train a small model that solves puzzles, sometimes.")
@click.argument("puzzle")
@out_option
@click.option("--shape", default="tiny-1M", show_default=True, help="tiny-1M, tiny-3M or tiny-10M.")
@click.option("--steps", default=3000, show_default=True, help="Training steps at most.")
@click.option("--batch", default=48, show_default=True, help="Texts in a step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@click.option("--every", default=10, show_default=True, help="Steps between validations, at which it may stop.")
@seed_option("weights and puzzles")
def puzzle_model(puzzle: str, out: Path, shape: str, steps: int, batch: int, lr: float, every: int, seed: int) -> None:
    """Train a small model for PUZZLE, such as chain:operations=8 or countdown, for decodery bench --workload search.

    It stops on purpose as soon as greedy decoding solves between 25 and 55 % of held-out puzzles and one of 64 samples
    more than 80 %: outside of that no search can be told from another. Stop with Ctrl-C whenever you like: the same
    command goes on where it stopped.
    """
    from decodery.puzzles import puzzle as named
    from decodery.training.puzzle_model import PuzzleRecipe, check_folder, train_puzzle_model

    asked, recipe = named(puzzle), PuzzleRecipe(shape=shape, steps=steps, batch=batch, lr=lr, every=every, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        found = train_puzzle_model(asked, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(f"on puzzles held out: greedy {found['greedy']:.1%}, one of 64 samples {found['pass@64']:.1%}")


@click.command("pldr", short_help="Train a small model whose attention goes through learned operators (PLDR-LLM).")
@click.argument("puzzle")
@out_option
@click.option("--steps", default=1500, show_default=True, help="Training steps.")
@click.option("--batch", default=24, show_default=True, help="Texts in a step.")
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate at its highest.")
@seed_option("weights and puzzles")
def pldr(puzzle: str, out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """Train a small PLDR-LLM for PUZZLE, such as chain.

    The folder holds it with the mean of the operators that it makes of some texts, as a model that -m takes, and beside
    what makes them, which decodery.models.torch.power_law.PowerLaw.load reads. Stop with Ctrl-C at any time: the same
    command goes on where it stopped.
    """
    from decodery.puzzles import puzzle as named
    from decodery.training.pldr import PLDRRecipe, check_folder, train_pldr

    asked, recipe = named(puzzle), PLDRRecipe(steps=steps, batch=batch, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        found = train_pldr(asked, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(f"with kept operators it solves {found['greedy']:.1%} of puzzles held out")


@click.command(short_help="Train a process reward model for --search best-of-n and others.")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles, and whose states are read")
@click.option("--problems", default=200, show_default=True, help="Puzzles that are solved and labelled.")
@click.option("--solutions", default=4, show_default=True, help="Solutions of each.")
@click.option(
    "--labels",
    type=click.Choice(["rollouts", "reference", "restart"]),
    default="rollouts",
    show_default=True,
    help="How steps are labelled: by completing them, by comparison with a solution (SPARE), or by the share of other "
    "samples that are not better (for --search adaptive-sampling).",
)
@click.option("--rollouts", default=8, show_default=True, help="Completions of each beginning.")
@click.option("--missed", default=0.0, show_default=True, help="Share of steps that the comparison passes over.")
@click.option("--flipped", default=0.0, show_default=True, help="Share of its labels that are wrong.")
@seed_option("solutions, labels and training")
def prm(
    puzzle: str,
    out: Path,
    model: str,
    problems: int,
    solutions: int,
    labels: Any,
    rollouts: int,
    missed: float,
    flipped: float,
    seed: int,
) -> None:
    """Train a head that tells how likely a solution of PUZZLE is to end rightly, step by step.

    MODEL, such as one of decodery train puzzle-model, first samples solutions, whose steps are labelled by an exact
    verifier; the head then learns to read the labels off its hidden states. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors. Stop with Ctrl-C whenever you like: the same command goes on
    where it stopped.
    """
    from decodery.models.loaders.load import load
    from decodery.puzzles import puzzle as named
    from decodery.training.prm import PRM, PRMRecipe, train_prm

    recipe = PRMRecipe(problems, solutions, labels, rollouts, missed, flipped, seed=seed)
    asked, loaded = named(puzzle), load(model)
    with resumable(out) as progress:
        found = train_prm(loaded.model, asked, out, recipe=recipe, command=command_line(), progress=progress)
    facts = found.facts or {}
    click.echo(f"the reward model is ready: process-reward:head={out / PRM}")
    click.echo(
        f"on puzzles held out: AUC {facts['auc']}, cross-entropy {facts['cross_entropy']} against "
        f"{facts['cross_entropy_of_the_mean']} of the mean"
    )


@click.command(short_help="Let a small model learn from what a search preferred.")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles, and learns")
@click.option("--search", "spec", default=_SEARCHED, show_default=True, help="Over steps; {scorer} is the reward.")
@click.option("--reward", default="noisy", show_default=True, help="As for decodery bench --workload search.")
@click.option("--problems", default=100, show_default=True, help="Puzzles that are searched.")
@click.option("--margin", default=0.1, show_default=True, help="Of backed-up values, for two steps to be learned from.")
@click.option("--weight", default=0.1, show_default=True, help="Of the odds against the worse step.")
@click.option("--steps", default=200, show_default=True, help="Training steps.")
@seed_option("puzzles, searches and training")
def orpo(
    puzzle: str,
    out: Path,
    model: str,
    spec: str,
    reward: str,
    problems: int,
    margin: float,
    weight: float,
    steps: int,
    seed: int,
) -> None:
    """Search PUZZLE by MODEL, and train a copy of it by ORPO on the best and the worst step after each text.

    As COS(M+O)S does: a step is worth the mean of what the search found after it. This is one round: for the next one
    name the folder as MODEL, with another seed. Stop with Ctrl-C whenever you like: the same command goes on where it
    stopped.
    """
    from decodery.bench.searches.settings import SearchSettings
    from decodery.models.loaders.load import load
    from decodery.puzzles import puzzle as named
    from decodery.training.orpo import ORPORecipe, train_orpo

    recipe = ORPORecipe(problems, margin, weight, steps, seed=seed)
    asked, loaded = named(puzzle), load(model)
    search = SearchSettings(model, puzzle=puzzle).search(spec, 1, reward)
    with resumable(out) as progress:
        found = train_orpo(loaded.model, asked, search, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(
        f"of pairs held out it finds the better step likelier in {found['preferred']:.1%}, before in "
        f"{found['preferred_before']:.1%}"
    )


@click.command(short_help="Let a small model learn from rewards of its own texts.")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles, and learns")
@click.option("--reward", default="noisy", show_default=True, help="As for decodery bench --workload search.")
@click.option(
    "--calibrate",
    type=click.Choice(["none", "identity", "exp", "best-of", "worst-of"]),
    default="best-of",
    show_default=True,
    help="What counts: the reward, or the share of the model's first texts that it beats, as it is or transformed for "
    "the best of --n (InfAlign).",
)
@click.option("--n", default=4, show_default=True, help="Texts of which the best is to be taken.")
@click.option("--beta", default=0.5, show_default=True, help="Nats of distance from MODEL against a whole reward.")
@click.option("--problems", default=64, show_default=True, help="Puzzles that are learned from.")
@click.option("--steps", default=100, show_default=True, help="Training steps.")
@seed_option("puzzles, texts and training")
def grpo(
    puzzle: str,
    out: Path,
    model: str,
    reward: str,
    calibrate: Any,
    n: int,
    beta: float,
    problems: int,
    steps: int,
    seed: int,
) -> None:
    """Train a copy of MODEL on what a reward model says of its own texts for PUZZLE, by GRPO.

    As InfAlign does: rewards are calibrated against what MODEL writes untrained, and transformed for how texts will be
    used. Stop with Ctrl-C whenever you like: the same command goes on where it stopped.
    """
    from decodery.bench.searches.rewards import reward as spec_of
    from decodery.core.registry import resolve
    from decodery.models.loaders.load import load
    from decodery.puzzles import puzzle as named
    from decodery.training.grpo import GRPORecipe, train_grpo

    recipe = GRPORecipe(problems, calibrate=calibrate, n=n, beta=beta, steps=steps, seed=seed)
    asked, loaded = named(puzzle), load(model)
    scorer = resolve("scorer", spec_of(reward, asked)).bind(loaded.tokenizer)
    with resumable(out) as progress:
        found = train_grpo(loaded.model, asked, scorer, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(
        f"on puzzles held out: reward {found['reward']:.3f}, before {found['reward_before']:.3f}; the best of {n} "
        f"texts beats that of before in {found['win_rate']:.1%}, {found['kl']:.2f} nats away"
    )


@click.command("text-prm", short_help="Train a process reward model on judged texts.")
@click.argument("texts", type=FILE)
@out_option
@model_option("whose states are read")
@click.option("--delimiter", default="\n\n", help="What ends a step (a blank line).")
@click.option("--tap", type=int, metavar="N", help="Read the states after N layers (all).")
@click.option("--raw", is_flag=True, help="The prompts are plain text, without the chat template.")
@seed_option("where training begins, and its order")
def text_prm(texts: Path, out: Path, model: str, delimiter: str, tap: int | None, raw: bool, seed: int) -> None:
    """Train a head on judged TEXTS that tells, step by step, how likely a text is to end rightly.

    TEXTS holds one object a line: {"prompt": ..., "text": ..., "reward": from 0 to 1}; best are several texts of each
    prompt that MODEL has drawn itself. One prompt in ten is held out. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors.
    """
    from decodery import load
    from decodery.training.prm import PRM
    from decodery.training.text_prm import JudgedText, TextPRMRecipe, train_text_prm
    from decodery.training.value import read_judged

    found, lm = read_judged(texts), load(model)
    judged = [
        JudgedText(lm.encode(prompt, raw=raw), lm.tokenizer.encode(text, special=False), reward)
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
        f"on prompts held out: AUC {facts['auc']}, cross-entropy {facts['cross_entropy']} against "
        f"{facts['cross_entropy_of_the_mean']} of the mean"
    )


@click.command("compute-optimal", short_help="Fit a table for --search compute-optimal:table=FILE.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=OUT_FILE, help="The file to write.")
@click.option(
    "--reward", required=True, help="The reward of RUN that tells how hard a prompt is, and that searches ask."
)
@click.option("--bins", default=5, show_default=True, help="Bins of difficulty.")
@click.option("--probes", default=4, show_default=True, help="Texts drawn of each prompt to tell its bin.")
def compute_optimal(run: Path, out: Path, reward: str, bins: int, probes: int) -> None:
    """Fit which search spends a budget best on prompts of which difficulty, from the benchmark in the folder RUN.

    RUN is made by decodery bench --workload search --split validation: its methods, with {scorer} and {n} in their
    places, are what is chosen among. Prints accuracies by two-fold cross-validation: of the table, of the table if
    difficulty were known from the verifier, and of the best single search.
    """
    from decodery import load
    from decodery.bench.result import SEARCH, read, require
    from decodery.bench.searches.allocation import Fold, crossed, fitted
    from decodery.bench.searches.job import TRACES, read_traces
    from decodery.bench.searches.settings import SearchSettings

    settings = SearchSettings.from_dict(require(read(run), SEARCH)["settings"])
    if settings.split == "test":
        raise SettingsError(
            f"the benchmark in {run} is of test puzzles, and no table may know them: measure with --split validation"
        )
    fold = Fold.of(settings, read_traces(run / TRACES), reward, probes)
    found = crossed(fold, bins)
    facts = {"command": command_line(), "puzzles": len(fold.plain), "cross_validated": found}
    fingerprint = load(settings.model, dtype=settings.dtype).model.fingerprint
    fitted(fold, bins, model=fingerprint, facts=facts).save(out)
    for row in found:
        click.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    click.echo(f"the table is ready: --search compute-optimal:table={out},n={fold.budgets[-1]}")
