"""The tables of searches on puzzles: what each finds and spends, with rewards of known quality.

    python benchmarks/search_tables.py [TABLE ...] --work DIR [--prompts N] [--out benchmarks/results]

puzzles: votes and best-of-n from one pool. steps: searches over steps. countdown: the same where legal steps may lead
nowhere. ahead: look-ahead there, by a reward that sees no dead ends. early: particle filters where rewards are sure too
soon. enough: sampling until it is good enough, by a head that tells whether another text would be better. finish: what
the length of a text tells where slips are taken back. prog: rounds of attempts that are shown the last ones. Of the
last three DIR holds the models, which are trained first. All of them where none is named. Texts are kept in --work, so
that the same command goes on where it stopped; every table that has any puzzle whole writes search-TABLE.json. Nothing
is timed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import decodery as dc
from decodery.bench.result import dump
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.searches.job import TRACES, SearchJob, read_traces
from decodery_benchmarks.searches.settings import SearchSettings
from decodery_benchmarks.training.prm import PRM, PRMRecipe, train_prm
from decodery_benchmarks.training.puzzle_model import PuzzleRecipe, train_puzzle_model
from search_reliability import reliability
from search_signs import signs

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
    f"particle-filter({STEPS},particles={{n}})",
    f"particle-filter({STEPS},particles={{n}},choose=vote,pattern={{pattern}})",
    f"particle-gibbs({STEPS},particles={{n}},sweeps=2)",
    f"entropic-particle-filter({STEPS},particles={{n}})",
)
MAIN_STEPS = (
    f"step-beam({STEPS},n={{n}},m=4)",
    f"dvts({STEPS},n={{n}},m=4)",
    f"lookahead(search=step-beam({STEPS},n={{n}},m=4),k=1)",
    f"particle-filter({STEPS},particles={{n}})",
    f"entropic-particle-filter({STEPS},particles={{n}})",
    f"mcts({STEPS},n=4,simulations={{n}},rounds=8,widening=0.5)",
    f"a-star({STEPS},k=4,expansions=100,goals={{n}},widening=0.5)",
)
REVISED = 'shown="{attempt}{remark}|"'
"""What `prog` with attempts teaches models to read."""
LEVELS = "none", "best", "best-worst"
AGAIN = (
    *(f"iad(scorer={{scorer}},n={{n}},rounds=3,feedback={level},{REVISED})" for level in LEVELS),
    f'revisions(scorer={{scorer}},n={{n}},length=4,window=3,{REVISED},ask="",pattern={{pattern}})',
)
EXAMPLES = "puzzle-examples(puzzle=prog(longest=3))"
EARLY = (
    f"particle-filter({STEPS},particles={{n}},rounds=12)",
    f"entropic-particle-filter({STEPS},particles={{n}},rounds=12)",
    f"entropic-particle-filter({STEPS},particles={{n}},rounds=12,lookahead=fresh)",
)
BLIND = (
    f"step-beam({STEPS},n={{n}},m=4)",
    f"lookahead(search=step-beam({STEPS},n={{n}},m=4),k=1)",
    f"dvts({STEPS},n={{n}},m=4)",
    f"lookahead(search=dvts({STEPS},n={{n}},m=4),k=1)",
    f"particle-filter({STEPS},particles={{n}})",
)
SAMPLED = ("pass@n", "best-of-n", "weighted-vote", "self-consistency")
HEADS = {
    "rollouts": PRMRecipe(problems=100, solutions=3, labels="rollouts", rollouts=4),
    "reference": PRMRecipe(problems=150, solutions=3, labels="reference"),
    "restart": PRMRecipe(problems=100, solutions=8, labels="restart"),
}


@dataclass(frozen=True)
class Table:
    """settings: what is measured. heads: rewards that are learned first. recipe: of a model that is made, too, of
    the puzzle `taught` where that is another one. mark: whose number in a text, beside its length, is laid beside
    whether it is right. along: the head that is asked along the texts of the pools, too."""

    settings: SearchSettings
    heads: tuple[str, ...] = ()
    recipe: PuzzleRecipe | None = None
    taught: str = ""
    mark: str = ""
    along: str = ""


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
        ),
        heads=("reference",),
    ),
    "ahead": Table(
        SearchSettings(
            model="tiny-1M-countdown",
            puzzle="countdown:numbers=3",
            methods=("pass@n", "best-of-n", *BLIND),
            rewards=("outcome",),
            budgets=(4, 16),
            prompts=32,
        ),
    ),
    "early": Table(
        SearchSettings(
            methods=("pass@n", "best-of-n", *EARLY),
            rewards=("clean", "overconfident-early"),
            budgets=(4, 8, 16),
            prompts=32,
        )
    ),
    "enough": Table(
        SearchSettings(
            model="tiny-1M-retry-chain",
            puzzle="retry-chain",
            methods=("pass@n", "best-of-n", "self-consistency", *ALL_STEPS[:2]),
            rewards=("clean",),
            budgets=(4, 16),
            prompts=48,
        ),
        heads=("restart",),
        recipe=PuzzleRecipe(every=5),
        along="restart",
    ),
    "finish": Table(
        SearchSettings(
            model="tiny-1M-retry-chain",
            puzzle="retry-chain",
            methods=("pass@n", "self-consistency", "first-finish"),
            rewards=("constant",),
            temperature=0.6,
        ),
        mark="!",
        # It learns so suddenly that fewer validations miss the place to stop at.
        recipe=PuzzleRecipe(every=5),
    ),
    "prog": Table(
        SearchSettings(
            model="tiny-1M-prog",
            puzzle="prog:longest=3",
            methods=("pass@n", "best-of-n", "self-consistency", *AGAIN),
            rewards=(
                EXAMPLES,
                # A program that passes two examples is ranked above one that passes three in 18 % of pairs.
                f"corrupted(scorer={EXAMPLES},noise=3.0)",
                # All or nothing.
                f"corrupted(scorer={EXAMPLES},confidence=10.0,optimism=-30.0,length=1000000)",
            ),
            budgets=(1, 4),
            prompts=32,
        ),
        recipe=PuzzleRecipe(batch=32, every=50),
        taught="prog:longest=3,attempts=3",
    ),
}


def head_of(table: Table, name: str, work: Path) -> Path:
    """Where a head of a table's model is kept."""
    return work / f"{name}-of-{table.settings.model}" / PRM


def ready(table: Table, work: Path) -> tuple[dc.LLM, SearchSettings]:
    """The model and the settings of a table, with what has to be trained for it."""
    settings = table.settings
    made = work / settings.model
    if table.recipe is not None and not (made / "README.md").is_file():
        train_puzzle_model(puzzle(table.taught or settings.puzzle), made, recipe=table.recipe)
    lm = solvers.load(settings.model if settings.model in solvers.SOLVERS else str(made))
    learned = []
    for name in table.heads:
        path = head_of(table, name, work)
        train_prm(lm.model, puzzle(settings.puzzle), path.parent, recipe=HEADS[name])
        learned.append(f"process-reward:head={path}")
    return lm, replace(settings, rewards=(*settings.rewards, *learned))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--prompts", type=int, help="puzzles, in place of each table's own number")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for name in options.tables or TABLES:
        table = TABLES[name]
        lm, settings = ready(table, options.work)
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
        found = json.loads((folder / "results.json").read_text("utf-8"))
        if table.mark:
            found["signs"] = signs(read_traces(folder / TRACES), table.mark, settings.budgets)
        if table.along:
            head = head_of(table, table.along, options.work)
            found["along"] = reliability(lm, puzzle(settings.puzzle), read_traces(folder / TRACES), head)
        # What is learned lies elsewhere on every machine.
        (options.out / f"search-{name}.json").write_text(dump(found).replace(str(options.work), "DIR"), "utf-8")


if __name__ == "__main__":
    main()
