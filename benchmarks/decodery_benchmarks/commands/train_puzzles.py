"""The commands of `benchmarks/train.py` that train on puzzles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from decodery.cli.command import command, option
from decodery.cli.options import OUT_FILE
from decodery.cli.train_common import command_line, out_option, resumable
from decodery.core.errors import SettingsError
from decodery_benchmarks import solvers

from .train_options import model_option, seed_option

_SEARCHED = "mcts(scorer={scorer},delimiter={delimiter},n=4,simulations=8,rounds=16)"


@command(example="")
@click.argument("puzzle")
@out_option
@option("--shape", default="tiny-1M", show_default=True, help="Model shape: tiny-1M, tiny-3M or tiny-10M.")
@option("--steps", default=3000, show_default=True, help="Maximum number of training steps.")
@option("--batch", default=48, show_default=True, help="Batch size in texts.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@option("--every", default=10, show_default=True, help="Steps between validations. Training can stop at each.")
@seed_option("weights and puzzles")
def puzzle_model(puzzle: str, out: Path, shape: str, steps: int, batch: int, lr: float, every: int, seed: int) -> None:
    """Train a small model for PUZZLE, such as chain:operations=8 or countdown, for bench --workload search.

    Training stops once greedy decoding solves 25 to 55 % of held-out puzzles and one of 64 samples solves more than 80
    %: outside this range searches do not differ. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery_benchmarks.puzzles import puzzle as named
    from decodery_benchmarks.training.puzzle_model import PuzzleRecipe, check_folder, train_puzzle_model

    asked, recipe = named(puzzle), PuzzleRecipe(shape=shape, steps=steps, batch=batch, lr=lr, every=every, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        found = train_puzzle_model(asked, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(f"on held-out puzzles: greedy {found['greedy']:.1%}, one of 64 samples {found['pass@64']:.1%}")


@command(example="")
@click.argument("puzzle")
@out_option
@option("--steps", default=1500, show_default=True, help="Training steps.")
@option("--batch", default=24, show_default=True, help="Batch size in texts.")
@option("--lr", default=1e-3, show_default=True, help="Peak learning rate.")
@seed_option("weights and puzzles")
def pldr(puzzle: str, out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """Train a small PLDR-LLM, whose attention uses learned operators, for PUZZLE, such as chain.

    The folder works as -m; it holds the model with the mean of its operators. Beside it are the operator networks,
    which decodery.models.torch.power_law.PowerLaw.load reads. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery_benchmarks.puzzles import puzzle as named
    from decodery_benchmarks.training.pldr import PLDRRecipe, check_folder, train_pldr

    asked, recipe = named(puzzle), PLDRRecipe(steps=steps, batch=batch, lr=lr, seed=seed)
    check_folder(out)
    with resumable(out) as progress:
        found = train_pldr(asked, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(f"with kept operators it solves {found['greedy']:.1%} of held-out puzzles")


@command(example="")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles, whose hidden states are read")
@option("--problems", default=200, show_default=True, help="Puzzles to solve and label.")
@option("--solutions", default=4, show_default=True, help="Solutions of a puzzle.")
@option(
    "--labels",
    type=click.Choice(["rollouts", "reference", "restart"]),
    default="rollouts",
    show_default=True,
    help="How to label steps. rollouts: by completing them. reference: by comparison with a solution (SPARE). "
    "restart: by the share of other samples that are not better, for --search adaptive-sampling.",
)
@option("--rollouts", default=8, show_default=True, help="Completions of a beginning.")
@option("--missed", default=0.0, show_default=True, help="Share of steps without a label (reference).")
@option("--flipped", default=0.0, show_default=True, help="Share of wrong labels (reference).")
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
    """Train a head that predicts, step by step, whether a solution of PUZZLE will be right.

    MODEL, such as one of `python benchmarks/train.py puzzle-model`, first samples solutions. An exact verifier labels
    their steps. The head learns the labels from the hidden states. It is a scorer for any search:
    process-reward:head=DIR/process-reward.safetensors. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery_benchmarks.puzzles import puzzle as named
    from decodery_benchmarks.training.prm import PRM, PRMRecipe, train_prm

    recipe = PRMRecipe(problems, solutions, labels, rollouts, missed, flipped, seed=seed)
    asked, loaded = named(puzzle), solvers.load_model(model)
    with resumable(out) as progress:
        found = train_prm(loaded.model, asked, out, recipe=recipe, command=command_line(), progress=progress)
    facts = found.facts or {}
    click.echo(f"the reward model is ready: process-reward:head={out / PRM}")
    click.echo(
        f"on held-out puzzles: AUC {facts['auc']}, cross-entropy {facts['cross_entropy']} against "
        f"{facts['cross_entropy_of_the_mean']} of the mean"
    )


@command(example="")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles and is trained")
@option(
    "--search",
    "spec",
    default=_SEARCHED,
    show_default=True,
    help="A search over steps. {scorer} stands for the reward.",
)
@option(
    "--reward",
    default="noisy",
    show_default=True,
    help="Reward model, as for python benchmarks/bench.py search --rewards.",
)
@option("--problems", default=100, show_default=True, help="Puzzles to search.")
@option("--margin", default=0.1, show_default=True, help="Minimum difference of two steps in backed-up value.")
@option("--weight", default=0.1, show_default=True, help="Weight of the odds ratio.")
@option("--steps", default=200, show_default=True, help="Training steps.")
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
    """Search PUZZLE with MODEL, and train a copy by ORPO on the best and the worst step after each text.

    The method is COS(M+O)S: the value of a step is the mean of what the search found after it. This is one round. For
    the next round name the folder as MODEL, with another seed. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery_benchmarks.puzzles import puzzle as named
    from decodery_benchmarks.searches.settings import SearchSettings
    from decodery_benchmarks.training.orpo import ORPORecipe, train_orpo

    recipe = ORPORecipe(problems, margin, weight, steps, seed=seed)
    asked, loaded = named(puzzle), solvers.load_model(model)
    search = SearchSettings(model, puzzle=puzzle).search(spec, 1, reward)
    with resumable(out) as progress:
        found = train_orpo(loaded.model, asked, search, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(
        f"on held-out pairs it prefers the better step in {found['preferred']:.1%}, before in "
        f"{found['preferred_before']:.1%}"
    )


@command(example="")
@click.argument("puzzle")
@out_option
@model_option("that solves the puzzles and is trained")
@option(
    "--reward",
    default="noisy",
    show_default=True,
    help="Reward model, as for python benchmarks/bench.py search --rewards.",
)
@option(
    "--calibrate",
    type=click.Choice(["none", "identity", "exp", "best-of", "worst-of"]),
    default="best-of",
    show_default=True,
    help="Calibration of the rewards (InfAlign). none: the reward. identity: the share of the model's first texts "
    "that it beats. exp, best-of, worst-of: this share, transformed.",
)
@option("--n", default=4, show_default=True, help="n of best-of-n.")
@option("--beta", default=0.5, show_default=True, help="Weight of the KL divergence from MODEL, against a reward of 1.")
@option("--problems", default=64, show_default=True, help="Puzzles to learn from.")
@option("--steps", default=100, show_default=True, help="Training steps.")
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
    """Train a copy of MODEL by GRPO on the rewards of its own texts for PUZZLE.

    The method is InfAlign: rewards are calibrated on the texts of the untrained MODEL, and transformed for the use of
    the texts. Interrupt it with Ctrl-C: the same command continues.
    """
    from decodery.core.registry import resolve
    from decodery_benchmarks.puzzles import puzzle as named
    from decodery_benchmarks.searches.rewards import reward as spec_of
    from decodery_benchmarks.training.grpo import GRPORecipe, train_grpo

    recipe = GRPORecipe(problems, calibrate=calibrate, n=n, beta=beta, steps=steps, seed=seed)
    asked, loaded = named(puzzle), solvers.load_model(model)
    scorer = resolve("scorer", spec_of(reward, asked)).bind(loaded.tokenizer)
    with resumable(out) as progress:
        found = train_grpo(loaded.model, asked, scorer, out, recipe=recipe, command=command_line(), progress=progress)
    click.echo(f"the model is ready: {out}")
    click.echo(
        f"on held-out puzzles: reward {found['reward']:.3f}, before {found['reward_before']:.3f}; the best of {n} "
        f"texts beats that of before in {found['win_rate']:.1%}, {found['kl']:.2f} nats away"
    )


@command(example="")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@option("--out", required=True, type=OUT_FILE, help="Output file.")
@option("--reward", required=True, help="Reward model of RUN that estimates difficulty and guides the searches.")
@option("--bins", default=5, show_default=True, help="Number of difficulty bins.")
@option("--probes", default=4, show_default=True, help="Samples of a prompt that estimate its bin.")
def compute_optimal(run: Path, out: Path, reward: str, bins: int, probes: int) -> None:
    """Fit which search is best for which difficulty and budget, from the benchmark in the folder RUN.

    RUN is made by `python benchmarks/bench.py search --split validation`. The choices are its methods, with {scorer}
    and {n} in them. The printed accuracies are two-fold cross-validated: of the table, of the table with the true
    difficulty, and of the best single search.
    """
    from decodery.bench.result import require
    from decodery_benchmarks.kinds import SEARCH, read
    from decodery_benchmarks.searches.allocation import Fold, crossed, fitted
    from decodery_benchmarks.searches.job import TRACES, read_traces
    from decodery_benchmarks.searches.settings import SearchSettings

    settings = SearchSettings.from_dict(require(read(run), SEARCH)["settings"])
    if settings.split == "test":
        raise SettingsError(f"the benchmark in {run} used the test puzzles: measure with --split validation")
    fold = Fold.of(settings, read_traces(run / TRACES), reward, probes)
    found = crossed(fold, bins)
    facts = {"command": command_line(), "puzzles": len(fold.plain), "cross_validated": found}
    fingerprint = solvers.load(settings.model, dtype=settings.dtype).model.fingerprint
    fitted(fold, bins, model=fingerprint, facts=facts).save(out)
    for row in found:
        click.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    click.echo(f"the table is ready: --search compute-optimal:table={out},n={fold.budgets[-1]}")
