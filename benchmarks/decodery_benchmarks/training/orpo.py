"""ORPO on the trees of a search: the step after which it found most is learned, against the worst one beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch

from decodery.core.errors import SettingsError
from decodery.core.trace import Grown
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.sampling.sampler import Sampler
from decodery.search.base import Search
from decodery.search.step_nodes import aggregated
from decodery.search.steps import StepSearch
from decodery.training.cut import changeable, parameters, quantized
from decodery.training.loop import TrainingPlan, batches, train
from decodery.training.orpo import orpo
from decodery_benchmarks.puzzles import Puzzle, drawn
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded, tokenizer

from .puzzle_model import check_folder, log_probability, save

PAIRS = "pairs.json"


@dataclass(frozen=True)
class ORPORecipe:
    """One round. problems: puzzles that are searched. margin: of values, below which two steps say nothing. weight: of
    the odds, 0 for learning the better steps alone. COS(M+O)S gives no numbers but that it does several rounds.
    """

    problems: int = 100
    margin: float = 0.1
    weight: float = 0.1
    steps: int = 200
    batch: int = 32
    lr: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.problems, self.batch, self.steps) < 1 or self.margin <= 0 or self.weight < 0:
            raise SettingsError("orpo needs problems, steps and batch of at least 1, a margin above 0, and weight >= 0")


@dataclass(frozen=True)
class PreferencePair:
    """Token ids. begin: what stands before both; better, worse: the steps that were written there."""

    begin: list[int]
    better: list[int]
    worse: list[int]


@dataclass(frozen=True)
class Found:
    """What a search found of one part of its tree. walks: through it or to it; value: the mean of what these backed up,
    its own where there was none.
    """

    walks: int
    value: float


def backed_up(grown: Ordered[Grown], hooks: Ordered[int], worth: Callable[[list[float]], float]) -> dict[int, Found]:
    """What a search found, by the number of each part that was scored.

    Args:
        grown: the parts of the tree.
        visits: the part that each walk of the search came to. A search without walks counts as one walk to every text
            that was scored and that no scored part goes on from.
        worth: of the scores of a text's parts, in order, see `aggregated`.

    Returns:
        The number of walks and the mean value of each scored part, as `mcts` has them.
    """
    own, above = dict[int, float](), dict[int, list[int]]()
    for number, part in enumerate(grown):
        if part.score is not None and part.tokens:
            above[number] = [*above.get(part.parent, ()), number]
            own[number] = worth([grown[each].score or 0.0 for each in above[number]])
    parents = {grown[number].parent for number in own}
    walks, totals = Counter[int](), dict.fromkeys(own, 0.0)
    for end in hooks or [number for number in own if number not in parents]:
        for number in above.get(end, ()):
            walks[number] += 1
            totals[number] += own[end]
    return {
        number: Found(walks[number], totals[number] / walks[number] if walks[number] else value)
        for number, value in own.items()
    }


def pairs(
    prompt: Ordered[int],
    grown: Ordered[Grown],
    margin: float,
    hooks: Ordered[int] = (),
    worth: Callable[[list[float]], float] = lambda scores: scores[-1],
) -> list[PreferencePair]:
    """The best and the worst way on from every text that a search went on from in several ways.

    Args:
        prompt: token ids before the tree.
        grown: the parts of the tree.
        margin: smallest difference of their values.
        visits: see `backed_up`.
        worth: see `backed_up`.

    Returns:
        Pairs by what the search found after the steps. The better step was walked where any step beside it was; of
        equal values the step with more walks is the better one.
    """
    known = backed_up(grown, hooks, worth)
    made, ways = [], dict[int, list[int]]()
    for number in known:
        ways.setdefault(grown[number].parent, []).append(number)
    for parent, numbers in ways.items():
        walked = [number for number in numbers if known[number].walks] or numbers
        best = max(walked, key=lambda number: (known[number].value, known[number].walks))
        worst = min(numbers, key=lambda number: known[number].value)
        if known[best].value - known[worst].value >= margin:
            begin, at = list[int](), parent
            while at >= 0:
                begin, at = [*grown[at].tokens, *begin], grown[at].parent
            made.append(PreferencePair([*prompt, *begin], grown[best].tokens, grown[worst].tokens))
    return made


def train_orpo(
    model: LanguageModel,
    puzzle: Puzzle,
    search: Search,
    out: Path,
    *,
    recipe: ORPORecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> dict[str, float]:
    """One round: search puzzles, learn from the trees, and leave the model in the folder `out`, in int8.

    search: over steps, of this model. Returns what held-out pairs say of the model that is kept: their `loss`, and
    the share of them whose better step it finds likelier (`preferred`), and the same before. Interrupted, it goes on
    when called again. Raises SettingsError where the trees hold too few pairs.
    """
    recipe = recipe or ORPORecipe()
    check_folder(out)
    if not isinstance(model, Transformer):
        raise SettingsError("orpo trains models that this package runs itself, such as one of train puzzle-model")
    found = _searched(model, puzzle, search, out, recipe, progress)
    if len(found) < 10:
        raise SettingsError(f"the trees hold {len(found)} pairs: search more problems, wider, or with a smaller margin")
    held, learned = found[::10], [pair for number, pair in enumerate(found) if number % 10]
    policy = changeable(model)
    batch = batches(len(learned), min(recipe.batch, len(learned)), recipe.seed)

    def loss(step: int) -> torch.Tensor:
        return orpo(*_likely(policy, [learned[int(number)] for number in batch(step)]), recipe.weight).mean()

    @torch.no_grad()
    def validate() -> dict[str, float]:
        better, worse = _likely(policy, held)
        return {
            "loss": float(orpo(better, worse, recipe.weight).mean()),
            "preferred": float((better > worse).float().mean()),
        }

    history = train(
        parameters(policy),
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, validate_every=max(1, recipe.steps // 10)),
        out / "training",
        validate=validate,
        metric="loss",
        settings={"puzzle": repr(puzzle), "search": repr(search), "recipe": asdict(recipe), "model": model.fingerprint},
        progress=progress,
        what="learning from trees",
    )
    values = dict(history.metrics[str(history.best_step)])
    values |= {f"{name}_before": value for name, value in history.metrics["0"].items()}
    told = f"`{json.dumps(asdict(recipe))}`, by\n\n    {command or 'python benchmarks/train.py orpo'}\n\n"
    told += f"{len(found)} pairs of steps from the trees of {recipe.problems} puzzles; of held-out ones: {values}\n"
    save(quantized(policy), out, f"# A model that learned {puzzle.spec} from what a search preferred\n\n{told}")
    return values


def _searched(
    model: Transformer, puzzle: Puzzle, search: Search, out: Path, recipe: ORPORecipe, progress: Progress
) -> list[PreferencePair]:
    """The pairs of all trees, kept in `out` once they are there."""
    path = out / PAIRS
    made = f"backed up {model.fingerprint} {puzzle!r} {search!r} {recipe.problems} {recipe.margin} {recipe.seed}"
    if path.is_file() and (known := json.loads(path.read_text("utf-8")))["made"] == made:
        return [PreferencePair(**each) for each in known["pairs"]]
    found, bound = list[PreferencePair](), search.bind(tokenizer())
    if not isinstance(bound, StepSearch):
        raise SettingsError("orpo learns from searches over steps, such as mcts and step-beam: name one of them")

    def worth(scores: list[float]) -> float:
        return aggregated(bound.aggregate, scores, bound.judge)

    for number, prompt in enumerate(islice(drawn(puzzle, "train", recipe.seed), recipe.problems)):
        tokens = encoded(prompt)
        request = Request(
            tokens,
            puzzle.length + 8,
            sampler=Sampler.from_settings(temperature=1.0),
            eos_ids=(END_ID,),
            seed=(recipe.seed << 32) + (number << 20),
        )
        best = bound.run(Engine(model, detokenizer=tokenizer().stream), request)[0]
        found += pairs(tokens, best.trace.grown, recipe.margin, best.trace.visits, worth)
        progress("searching", number + 1, recipe.problems)
    write_text(path, json.dumps({"made": made, "pairs": [asdict(pair) for pair in found]}))
    return found


def _likely(model: Transformer, found: Ordered[PreferencePair]) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] mean log-probabilities of a token, of the better and of the worse steps of these pairs."""
    rows = [(pair.begin, step) for pair in found for step in (pair.better, pair.worse)]
    means = log_probability(model, rows) / torch.tensor(
        [len(step) for _, step in rows], dtype=torch.int64, device="cpu"
    )
    return means[::2], means[1::2]
