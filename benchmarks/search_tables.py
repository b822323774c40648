"""The tables of searches on puzzles: what each finds and spends, with rewards of known quality.

    python benchmarks/search_tables.py [TABLE ...] --work DIR [--prompts N] [--out benchmarks/results]

puzzles: votes and best-of-n from one pool. steps: searches over steps. countdown: the same where legal steps may lead
nowhere. finish: what the length of a text tells where slips are taken back (needs DIR/tiny-1M-retry-chain, which it
trains). All of them where none is named. Texts are kept in --work, so that the same command goes on where it stopped;
every table that has any puzzle whole writes search-TABLE.json. Nothing is timed.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import decodery as dc
from decodery.bench.searches.job import TRACES, SearchJob
from decodery.bench.searches.settings import SearchSettings
from decodery.model.solvers import SHIPPED
from decodery.puzzles import puzzle
from decodery.train.prm import PRMRecipe, train_prm
from decodery.train.puzzle_model import PuzzleRecipe, train_puzzle_model

STEPS = "scorer={scorer},delimiter={delimiter}"
ALL_STEPS = (
    "adaptive-sampling(scorer={scorer},n={n})",
    "early-pruning(scorer={scorer},n={n},after=24,keep=0.5)",
    f"step-beam({STEPS},n={{n}},m=4)",
    f"dvts({STEPS},n={{n}},m=4)",
    f"value-guided({STEPS},n={{n}},width=4,choose=best)",
    f"tree-of-thoughts({STEPS},n=2,b={{n}},rounds=12)",
    f"mcts({STEPS},n=4,simulations={{n}},rounds=12)",
    f"a-star({STEPS},k=4,expansions=100,goals={{n}})",
    f"particle-filter({STEPS},n={{n}})",
    f"particle-filter({STEPS},n={{n}},choose=vote,pattern={{pattern}})",
    f"particle-gibbs({STEPS},n={{n}},sweeps=2)",
    f"entropic-particle-filter({STEPS},n={{n}})",
)
MAIN_STEPS = (
    f"step-beam({STEPS},n={{n}},m=4)",
    f"dvts({STEPS},n={{n}},m=4)",
    f"lookahead(search=step-beam({STEPS},n={{n}},m=4),k=1)",
    f"particle-filter({STEPS},n={{n}})",
    f"entropic-particle-filter({STEPS},n={{n}})",
    f"mcts({STEPS},n=4,simulations={{n}},rounds=8,widening=0.5)",
    f"a-star({STEPS},k=4,expansions=100,goals={{n}},widening=0.5)",
)
SAMPLED = ("pass@n", "best-of-n", "weighted-vote", "self-consistency")
HEADS = {
    "rollouts": PRMRecipe(problems=100, solutions=3, labels="rollouts", rollouts=4),
    "reference": PRMRecipe(problems=150, solutions=3, labels="reference"),
}


@dataclass(frozen=True)
class Table:
    """settings: what is measured. heads: rewards that are learned first. made: the model is, too."""

    settings: SearchSettings
    heads: tuple[str, ...] = ()
    made: bool = False


TABLES = {
    "puzzles": Table(
        SearchSettings(
            methods=SAMPLED, rewards=("clean", "noisy", "overconfident-early", "hackable", "constant"), prompts=100
        ),
        heads=tuple(HEADS),
    ),
    "steps": Table(
        SearchSettings(
            methods=(*SAMPLED, *ALL_STEPS), rewards=("noisy", "hackable", "constant"), budgets=(4, 16), prompts=32
        )
    ),
    "countdown": Table(
        SearchSettings(
            model="tiny-1M-countdown",
            puzzle="countdown:numbers=3",
            methods=(*SAMPLED, *MAIN_STEPS),
            rewards=("clean", "noisy", "overconfident-early", "hackable"),
            budgets=(4, 16),
            prompts=32,
        )
    ),
    "finish": Table(
        SearchSettings(
            model="tiny-1M-retry-chain",
            puzzle="retry-chain",
            methods=("pass@n", "self-consistency", "first-finish"),
            rewards=("constant",),
        ),
        made=True,
    ),
}


def ready(table: Table, work: Path) -> tuple[dc.LM, SearchSettings]:
    """The model and the settings of a table, with what has to be trained for it."""
    settings = table.settings
    made = work / settings.model
    if table.made and settings.model not in SHIPPED and not (made / "README.md").is_file():
        train_puzzle_model(settings.asked, made, recipe=PuzzleRecipe(every=25))
    lm = dc.load(settings.model if settings.model in SHIPPED else str(made))
    learned = []
    for name in table.heads:
        train_prm(lm.model, puzzle(settings.puzzle), work / name, recipe=HEADS[name])
        learned.append(f"process-reward:head={work / name}/process-reward.safetensors")
    return lm, replace(settings, rewards=(*settings.rewards, *learned))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, help="puzzles, in place of each table's own number")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for name in options.tables or TABLES:
        lm, settings = ready(TABLES[name], options.work)
        settings = replace(settings, prompts=options.prompts or settings.prompts)
        folder = options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        job = SearchJob(lm, settings, folder, resumed=(folder / TRACES).is_file())
        last = -1

        def told(what: str, place: int, count: int, name: str = name) -> None:
            nonlocal last
            if place * 100 // count > last:
                last = place * 100 // count
                print(f"{name}: {last} %, {what}", flush=True)

        job.run(told)
        shutil.copyfile(folder / "results.json", options.out / f"search-{name}.json")


if __name__ == "__main__":
    main()
