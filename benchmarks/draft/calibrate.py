"""Runs the calibrations whose results the drafters `stand` and `graft` come with, and measures what they are worth.

    python benchmarks/draft/calibrate.py stand [--problems 29] [--trajectories 3] [--tokens 48]
    python benchmarks/draft/calibrate.py graft [--problems 20] [--tokens 48]

Questions come from GSM8K and Spec-Bench (DECODERY_DATA), the model is the embedded one at its own precision with its
draft. What is calibrated on and what is measured on are different questions. Writes benchmarks/results/draft-NAME.json
after every question; what is in it already, with the same settings, is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

import decodery as dc
from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.graft import Graft
from decodery.speculative.drafters.stand import STAND
from decodery.speculative.tree_building.layers import Layers, grow_layers
from decodery.speculative.tree_building.template import TOKEN_RECYCLING, Template
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import begun_result, write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[3] / "shared" / "data"))
RESULTS = Path(__file__).parents[1] / "results"
WIDE = 625
KEPT = 80


class Bench:
    """The model, the questions, and the file that grows."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.lm = dc.load("smollm2")
        self.path = RESULTS / f"draft-{name}.json"
        kept = begun_result(self.path)
        self.settings = settings
        self.figures: dict[str, Any] = kept.figures if kept["settings"] == settings else {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """The figure `name`; written as soon as it is made."""
        found = self.figures
        if name not in found:
            found[name] = make()
            self.write()
            print(name, json.dumps(found[name]), flush=True)
        return found[name]

    def write(self) -> None:
        write_result(self.path, {"settings": self.settings}, figures=self.figures)

    def run(self, drafter: Drafter | None, prompts: list[str], **settings: Any) -> list[dc.Output]:
        return [self.lm.generate(prompt, drafter=drafter, max_draft_tokens=1024, **settings) for prompt in prompts]


def spec_bench(every: int) -> list[str]:
    lines = (DATA / "spec_bench_dev.jsonl").read_text("utf-8").splitlines()[::every]
    return [json.loads(line)["turns"][0] for line in lines]


def gsm8k(count: int, first: int = 0) -> list[str]:
    lines = (DATA / "gsm8k_train_1000.jsonl").read_text("utf-8").splitlines()[first::33][:count]
    return [json.loads(line)["question"] for line in lines]


def figures(outputs: list[dc.Output]) -> dict[str, float]:
    steps = [step for out in outputs for step in out.trace.decoding]
    tokens = sum(step.emitted for step in steps)
    return {
        "tokens_per_pass": round(tokens / len(steps), 3),
        "rows_per_pass": round(sum(step.rows for step in steps) / len(steps), 1),
        "passes": len(steps),
    }


# -- stand: which places of a large tree are right most often ---------------------------------------------------------


def most_likely(nodes: int, width: int) -> Template:
    """The `nodes` places worth most, where rank r is right once in (r + 1)(r + 2) times."""
    counts: dict[tuple[int, ...], int] = {}
    heap: list[tuple[float, tuple[int, ...]]] = [(-0.5, (0,))]
    for _ in range(nodes):
        worth, path = heappop(heap)
        counts[path[:-1]] = path[-1] + 1
        heappush(heap, (worth / 2, (*path, 0)))
        if (rank := path[-1]) + 1 < width:
            heappush(heap, (worth * (rank + 1) / (rank + 3), (*path[:-1], rank + 1)))
    return Template(counts)


@dataclass(frozen=True)
class Counting(STAND):
    """STAND in a tree of 625 places, which counts how often each was accepted."""

    nodes: int = WIDE
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(WIDE + 1, dtype=np.int64), compare=False)

    shape: ClassVar[Template] = most_likely(WIDE, 10)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        places = seq.states[self].places
        if len(places) == len(seen.tree):
            self.accepted[places[seen.path[: len(seen.emitted)]]] += 1
        super().observe(seq, seen)


def most_accepted(shape: Template, accepted: np.ndarray, nodes: int) -> Template:
    """The `nodes` places accepted most often, shallow ones and low ranks first among equals.

    A place counts for no more than an earlier sibling: leaving one out of the middle would bias rules.
    """
    worth = accepted.astype(np.float64)
    for place in range(2, len(worth)):
        if shape.parents[place] == shape.parents[place - 1]:
            worth[place] = min(worth[place], worth[place - 1])
        worth[place] = min(worth[place], worth[shape.parents[place]] or np.inf)
    order = np.lexsort((shape.ranks, shape.depths, -worth))
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for place in range(1, len(worth)):
        paths[place] = (*paths[int(shape.parents[place])], int(shape.ranks[place]))
    counts: dict[tuple[int, ...], int] = {}
    for place in [place for place in order.tolist() if place][:nodes]:
        path = paths[place]
        counts[path[:-1]] = max(counts.get(path[:-1], 0), path[-1] + 1)
    return Template(counts)


def child_counts(shape: Template) -> list[int]:
    """How many children every place has, level by level, without the zeros at the end: what `Template.of` takes."""
    counts = np.bincount(shape.parents[1:], minlength=len(shape.parents))
    return counts[: int(np.flatnonzero(counts)[-1]) + 1].tolist()


def stand(bench: Bench, options: argparse.Namespace) -> None:
    """Count on several sampled texts of each problem, as trajectories of one problem share what they learn."""
    settings = {"max_new_tokens": options.tokens, "temperature": 0.7}
    total = np.zeros(WIDE + 1, dtype=np.int64)

    def count(question: str) -> dict[str, int]:
        drafter = Counting()
        bench.lm.reset_memory()
        for seed in range(options.trajectories):
            bench.run(drafter, [question], seed=seed, **settings)
        return {str(place): int(drafter.accepted[place]) for place in np.flatnonzero(drafter.accepted).tolist()}

    for number, question in enumerate(gsm8k(options.problems)):
        for place, accepted in bench.once(f"problem {number}", lambda: count(question)).items():  # noqa: B023
            total[int(place)] += accepted
    shape = most_accepted(Counting.shape, total, KEPT)
    bench.once("children", lambda: child_counts(shape))

    def worth(drafter: Drafter) -> dict[str, float]:
        bench.lm.reset_memory()
        questions = [*gsm8k(4, first=16), *spec_bench(60)]
        return figures([out for seed in range(3) for out in bench.run(drafter, questions, seed=seed, **settings)])

    for name, tree in {"calibrated": shape, "token-recycling": TOKEN_RECYCLING}.items():
        kind = type("STAND", (STAND,), {"shape": tree})
        bench.once(f"other questions, {name}", lambda: worth(kind()))  # noqa: B023


# -- graft: below which certainty of the draft it pays to stop drafting -----------------------------------------------


@dataclass(frozen=True)
class Rounds(Graft):
    """Graft that never prunes, and keeps of every round what each of its stages would have fed."""

    thresholds: tuple[float, ...] = (0.0, 0.0, 0.0)
    rounds: list[Round] = field(default_factory=list, compare=False)

    __hash__ = object.__hash__

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        chances: dict[int, float] = {}
        stages: list[DraftTree] = []

        def watch(level: int, chance: float) -> bool:
            chances[level] = chance
            return False

        (drafter,) = self.parts
        assert isinstance(drafter, TreeDrafter)
        depth = min(self.depth, budget.depth)
        full = grow_layers(drafter, seq, width=self.width, depth=depth, stop=watch)
        nodes = min(self.nodes, budget.nodes)
        for checkpoint, kept in zip(self.checkpoints, self.kept, strict=True):
            # What is grown up to a checkpoint is the beginning of what is grown beyond it.
            upto = full.tree.depths <= checkpoint + 1
            grown = Layers(full.tree.prune(upto), full.scores[upto], full.first, checkpoint + 1)
            stages.append(self._graft(seq, grown.kept(max(1, nodes * kept // self.nodes)), nodes, budget.depth))
        stages.append(full.kept(nodes))
        self.rounds.append(Round(len(seq.tokens), chances, full.levels, stages))
        return stages[len(self.rounds) % len(stages)]


@dataclass
class Round:
    """One round: where it began, the chance of the best path by level, levels grown, and the tree of every stage."""

    start: int
    chances: dict[int, float]
    levels: int
    stages: list[DraftTree]

    def facts(self, tokens: list[int], checkpoints: tuple[int, ...]) -> list[Any]:
        """Chances at the checkpoints, the tokens each stage's tree would have added to the text, and draft passes."""
        chances = [round(self.chances.get(level, 1.0), 4) for level in checkpoints]
        return [chances, [1 + _followed(tree, tokens[self.start :]) for tree in self.stages], self.levels]


def _followed(tree: DraftTree, tokens: list[int]) -> int:
    node, length = 0, 0
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            break
        node, length = child, length + 1
    return length


def draft_cost(bench: Bench, width: int, nodes: int, repeats: int = 15) -> float:
    """Time of expanding `width` nodes by that of a target pass over `nodes` rows, in turn, the shortest of each."""
    drafter, target = DraftModel(), bench.lm.model
    engine = bench.lm.engine()
    seq = engine.submit(bench.lm.request(bench.lm.encode("Name ten birds."), drafter=drafter, max_new_tokens=64))
    for _ in range(4):
        engine.step()
    tree = DraftTree.from_paths(seq.last_token, [[token] for token in range(300, 300 + width)])
    times: dict[str, list[float]] = {"draft": [], "target": []}
    for _ in range(repeats):
        begin = perf_counter()
        drafter.expand(seq, tree, list(range(1, width + 1)))
        middle = perf_counter()
        target.forward(Batch([Segment.chunk(np.arange(nodes) + 400, seq.cache)]))
        times["target"].append(perf_counter() - middle)
        times["draft"].append(middle - begin)
        seq.cache.keep([])
    return round(min(times["draft"]) / min(times["target"]), 4)


def worth(rounds: list[Any], thresholds: tuple[float, ...], checkpoints: tuple[int, ...], cost: float) -> list[float]:
    """Tokens and levels drafted per target pass, and tokens per time of a target pass."""
    tokens = passes = 0
    for chances, stages, levels in rounds:
        below = [number for number, chance in enumerate(chances) if chance < thresholds[number]]
        below = [number for number in below if checkpoints[number] < levels]
        stage = below[0] if below else len(checkpoints)
        tokens += stages[stage]
        passes += checkpoints[stage] + 1 if below else levels
    n = len(rounds)
    return [tokens / n, passes / n, tokens / (n + cost * passes)]


def graft(bench: Bench, options: argparse.Namespace) -> None:
    """Log what every stage would have been worth, then take the thresholds that make most tokens per time."""
    checkpoints = Graft.checkpoints
    every: list[Any] = []

    def log(prompt: str, temperature: float) -> list[Any]:
        drafter = Rounds("draft-model")
        (out,) = bench.run(drafter, [prompt], max_new_tokens=options.tokens, temperature=temperature, seed=1)
        tokens = [*out.prompt_tokens, *out.tokens]
        # A round near the end cannot tell what would have followed.
        return [r.facts(tokens, checkpoints) for r in drafter.rounds if r.start + 8 <= len(tokens)]

    prompts = spec_bench(240 // options.problems)
    for number, prompt in enumerate(prompts):
        every += bench.once(f"question {number}", lambda: log(prompt, 0.7 * (number % 2)))  # noqa: B023
    cost = bench.once("level by target pass", lambda: draft_cost(bench, 10, 61))
    grid = [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01]
    found = {each: worth(every, each, checkpoints, cost) for each in product(grid, grid, grid)}
    chosen = max(found, key=lambda each: (round(found[each][2], 4), -sum(each)))
    settings = {
        "calibrated": chosen,
        "before": (0.35, 0.25, 0.15),
        "dense": (0.0, 0.0, 0.0),
        "always at the root": (1.01, 0.0, 0.0),
    }
    for name, thresholds in settings.items():
        bench.once(name, lambda: [thresholds, [round(each, 4) for each in worth(every, thresholds, checkpoints, cost)]])  # noqa: B023


GROUPS: dict[str, Callable[[Bench, argparse.Namespace], None]] = {"stand": stand, "graft": graft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--trajectories", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    settings = {"problems": options.problems, "tokens": options.tokens}
    if options.group == "stand":
        settings["trajectories"] = options.trajectories
    GROUPS[options.group](Bench(options.group, settings), options)


if __name__ == "__main__":
    main()
