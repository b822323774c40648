"""What training and tuning around searches on puzzles are worth: votes, labels of steps, rounds of learning.

    python benchmarks/search_trained.py [GROUP ...] [--work DIR] [--out benchmarks/results]

grid: a vote by temperature and top-p. labels: reward heads by who labelled their steps, and what that cost. optimal:
which search is best for puzzles of which difficulty. orpo: rounds of search and learning. grpo: learning from rewards
calibrated, and transformed for the best of n. All on tiny-1M-chain, on puzzles of other splits than were
learned from; nothing is timed. What is trained is kept in --work, so that the same command goes on. Every group writes
search-GROUP.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import decodery as dc
from decodery.core.registry import resolve
from decodery.scorers.process_reward import ProcessHead, ProcessReward
from decodery.search.answers import AnswerExtractor
from decodery.search.base import Search
from decodery.training.loop import CHECKPOINT
from decodery.training.ranking import auc
from decodery.training.value import states_of
from decodery_benchmarks import solvers
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.puzzles import Puzzle, drawn, puzzle
from decodery_benchmarks.puzzles.alphabet import encoded
from decodery_benchmarks.searches.allocation import Fold, crossed
from decodery_benchmarks.searches.job import TRACES, SearchJob, read_traces
from decodery_benchmarks.searches.pools import Sampling, estimated
from decodery_benchmarks.searches.rewards import reward
from decodery_benchmarks.searches.settings import SearchSettings
from decodery_benchmarks.training.grpo import GRPORecipe, train_grpo
from decodery_benchmarks.training.orpo import ORPORecipe, train_orpo
from decodery_benchmarks.training.prm import PRMRecipe, train_prm
from groups import parser, record

MODEL, PUZZLE, TOGETHER, SPARE = "tiny-1M-chain", "chain", 8, 8
POOL, VOTES = 16, 8
TREES = "mcts(scorer={scorer},delimiter={delimiter},n=4,simulations=8,rounds=16)"


class Bench:
    """The model, and held-out puzzles."""

    def __init__(self, work: Path, prompts: int) -> None:
        self.work, self.lm = work, solvers.load(MODEL)
        self.asked: Puzzle = puzzle(PUZZLE)
        self.prompts = list(islice(drawn(self.asked, "test"), prompts))

    def pools(self, lm: dc.LLM, scorers: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
        """A pool of texts of every puzzle, as `estimated` takes it."""
        found, engine = [], lm.engine()
        settings = {
            "temperature": 1.0,
            "max_new_tokens": self.asked.length + SPARE,
            "apply_chat_template": False,
        } | settings
        for at in range(0, len(self.prompts), TOGETHER):
            part = self.prompts[at : at + TOGETHER]
            searches = [Sampling(POOL, scorers or {}) for _ in part]
            jobs = []
            for number, (prompt, search) in enumerate(zip(part, searches, strict=True), at):
                request = lm.request(
                    lm.encode(prompt, apply_chat_template=False), drafter=None, seed=number << 20, **settings
                )
                jobs.append(engine.enter(search.find(engine, request)))
            engine.run(jobs)
            for prompt, search, job in zip(part, searches, jobs, strict=True):
                found.append(self._pool(prompt, [lm.output(seq) for seq in job.result or ()], search.said))
        return found

    def _pool(self, prompt: str, outputs: list[dc.Output], said: dict[str, list[float | None]]) -> dict[str, Any]:
        ended = [output.finish_reason == "stop" for output in outputs]
        texts = [output.text for output in outputs]
        return {
            "texts": texts,
            "right": [int(end and self.asked.verify(prompt, text)) for text, end in zip(texts, ended, strict=True)],
            "answers": AnswerExtractor(pattern=self.asked.pattern).of(texts),
            "lengths": [len(output.tokens) for output in outputs],
            "ended": [int(end) for end in ended],
            "scores": said,
        }

    def share(self, each: Any) -> dict[str, Any]:
        """The mean over puzzles with its 95 % bootstrap interval."""
        values = np.array(list(each), dtype=np.float64)
        return {"share": round(float(values.mean()), 4), "interval": interval(values)}

    def method(self, pools: list[dict[str, Any]], name: str, n: int, judged: str = "") -> dict[str, Any]:
        return self.share(estimated(pool, name, judged, n)["right"] for pool in pools)

    def greedy(self, lm: dc.LLM) -> dict[str, Any]:
        outputs = lm.generate(
            self.prompts,
            apply_chat_template=False,
            drafter=None,
            temperature=0.0,
            max_new_tokens=self.asked.length + SPARE,
        )
        assert isinstance(outputs, list)
        pairs = zip(self.prompts, outputs, strict=True)
        return self.share(float(o.finish_reason == "stop" and self.asked.verify(p, o.text)) for p, o in pairs)


def grid(bench: Bench) -> dict[str, Any]:
    """Share of puzzles right by one text and by a vote of 8, by temperature and top-p."""
    found: dict[str, Any] = {}
    for temperature in (0.6, 0.8, 1.0):
        for top_p in (0.6, 0.8, 1.0):
            pools = bench.pools(bench.lm, temperature=temperature, top_p=top_p)
            one, vote = (bench.method(pools, "self-consistency", n) for n in (1, VOTES))
            most = bench.method(pools, "pass@n", VOTES)
            found[f"{temperature:g}/{top_p:g}"] = {"one": one, "vote": vote, "pass": most}
    return found


LABELS: dict[str, dict[str, Any]] = {
    "rollouts, 2 each": {"labels": "rollouts", "rollouts": 2},
    "rollouts, 8 each": {"labels": "rollouts", "rollouts": 8},
    "reference, exact": {"labels": "reference"},
    "reference, a tenth wrong and a tenth missed": {"labels": "reference", "missed": 0.1, "flipped": 0.1},
    "reference, a third wrong": {"labels": "reference", "flipped": 0.33},
}


def labels(bench: Bench) -> dict[str, Any]:
    """Reward heads of the same solutions: what labelling wrote, and what the heads tell of texts held out."""
    problems, heads = 60, dict[str, ProcessHead]()
    for name, settings in LABELS.items():
        recipe = replace(PRMRecipe(problems=problems, solutions=4, steps=300), **settings)
        heads[name] = train_prm(bench.lm.model, bench.asked, bench.work / name.replace(" ", "-"), recipe=recipe)
    pools = bench.pools(bench.lm, {name: ProcessReward(head) for name, head in heads.items()})
    states, steps, last, right = _read(bench, pools, bench.lm.model.config.num_layers)
    found: dict[str, Any] = {"problems": problems, "solutions": 4}
    for name, head in heads.items():
        scores = head.logits(states).numpy()
        found[name] = {
            "labelling_tokens": (head.facts or {})["labelling_tokens"],
            "auc_of_steps": round(auc(scores, steps), 4),
            "auc_of_texts": round(auc(scores[last], right), 4),
            "best_of_8": bench.method(pools, "best-of-n", VOTES, name),
            "weighted_vote_of_8": bench.method(pools, "weighted-vote", VOTES, name),
        }
    found["one text"], found["vote of 8"] = (bench.method(pools, "self-consistency", n) for n in (1, VOTES))
    return found


def _read(
    bench: Bench, pools: list[dict[str, Any]], tap: int
) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Of the texts that have ended: states [n, hidden] at the ends of their steps, whether a solver could still end
    rightly there [n], which of them are last ones [m], and whether these texts are right [m].
    """
    states, steps, last, right = [], [], [], []
    for prompt, pool in zip(bench.prompts, pools, strict=True):
        for text, ended, is_right in zip(pool["texts"], pool["ended"], pool["right"], strict=True):
            if ended:
                ends = np.cumsum([len(step) for step in bench.asked.steps(text)]) - 1
                states.append(states_of(bench.lm.model, encoded(prompt), encoded(text), tap)[ends].float())
                steps += bench.asked.labels(prompt, text)
                last.append(len(steps) - 1)
                right.append(is_right == 1)
    return torch.cat(states), np.array(steps), np.array(last), np.array(right)


def _standing(bench: Bench, lm: dc.LLM) -> dict[str, Any]:
    pools = bench.pools(lm)
    return {
        "greedy": bench.greedy(lm),
        "one": bench.method(pools, "pass@n", 1),
        "pass@8": bench.method(pools, "pass@n", VOTES),
    }


def orpo(bench: Bench) -> dict[str, Any]:
    """Rounds of search and ORPO, and the same without odds: greedy decoding, one sample, one of 8, of test puzzles."""
    found = {"before": _standing(bench, bench.lm)}
    search: Search = SearchSettings(MODEL, puzzle=PUZZLE).search(TREES, 1, "noisy")
    for name, weight, rounds in (("odds", 0.1, 2), ("better steps alone", 0.0, 1)):
        lm = bench.lm
        for number in range(1, rounds + 1):
            out = bench.work / f"{name.replace(' ', '-')}-{number}"
            recipe = ORPORecipe(problems=40, weight=weight, seed=number - 1)
            values = train_orpo(lm.model, bench.asked, search, out, recipe=recipe)
            lm = dc.load(str(out))
            found[f"{name}, round {number}"] = _standing(bench, lm) | {"preferred": round(values["preferred"], 4)}
    return found


def grpo(bench: Bench) -> dict[str, Any]:
    """Learning from the noisy reward, calibrated and transformed for the best of 4: how often the best of 4 texts beats
    that of before, and how far the model has gone, on puzzles held out."""
    found: dict[str, Any] = {"before": _standing(bench, bench.lm)}
    scorer = resolve("scorer", reward("noisy", bench.asked)).bind(bench.lm.tokenizer)
    for calibrate, beta in (("identity", 0.1), ("best-of", 0.5)):
        recipe = GRPORecipe(held=8, calibrate=calibrate, beta=beta, steps=20)
        out = bench.work / f"grpo-{calibrate}"
        values = train_grpo(bench.lm.model, bench.asked, scorer, out, recipe=recipe)
        told = {name: round(value, 4) for name, value in values.items()}
        found[calibrate] = told | {"beta": beta} | _standing(bench, dc.load(str(out))) | {"along": _along(out)}
    return found


def _along(out: Path) -> dict[str, dict[str, float]]:
    """What was said of held-out puzzles on the way, by step."""
    with safe_open(out / "training" / CHECKPOINT, "np") as file:
        metrics = json.loads(file.metadata()["history"])["metrics"]
    return {step: {name: round(value, 4) for name, value in values.items()} for step, values in metrics.items()}


CHOSEN_AMONG = (
    *("pass@n", "best-of-n", "weighted-vote", "self-consistency"),
    *(f"{name}(scorer={{scorer}},delimiter={{delimiter}},n={n},m=4)" for name in ("step-beam", "dvts") for n in (4, 8)),
    *(f"particle-filter(scorer={{scorer}},delimiter={{delimiter}},particles={n})" for n in (4, 8)),
)
BUDGETS, BINS, PROBES = (4, 8, 12), 3, 4


def optimal(bench: Bench) -> dict[str, Any]:
    """Which search is best for puzzles of which difficulty, told by the noisy scores of 4 texts: by two-fold
    cross-validation the table, one by known difficulty and the best single search; and every search by bin."""
    settings = SearchSettings(
        model=MODEL,
        puzzle=PUZZLE,
        methods=CHOSEN_AMONG,
        rewards=("noisy",),
        budgets=BUDGETS,
        prompts=len(bench.prompts),
        split="validation",
    )
    folder = bench.work / "optimal"
    folder.mkdir(parents=True, exist_ok=True)
    SearchJob(bench.lm, settings, folder, resumed=(folder / TRACES).is_file()).run(lambda what, place, count: None)
    fold = Fold.of(settings, read_traces(folder / TRACES), "noisy", PROBES)
    edges = np.quantile(fold.easy, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, fold.easy, side="right")
    filled = [place for place in range(BINS) if (bins == place).any()]
    shown = [re.split(r"[(:]", spec)[0] for spec in fold.strategies]
    rows = [
        {
            "search": f"{name}, n={re.findall(r'(?:n|particles)=([0-9]+)', spec)[-1]}",
            "tokens": round(float(tokens.mean()), 1),
            "right": [round(float(right[bins == place].mean()), 4) for place in filled],
        }
        for name, spec, right, tokens in zip(shown, fold.strategies, fold.right, fold.tokens, strict=True)
    ]
    return {
        "puzzles": len(fold.plain),
        "in_bins": [int((bins == place).sum()) for place in filled],
        "rows": rows,
        "crossed": crossed(fold, BINS),
    }


GROUPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "grid": grid,
    "labels": labels,
    "optimal": optimal,
    "orpo": orpo,
    "grpo": grpo,
}


def main() -> None:
    arguments = parser(__doc__, GROUPS)
    arguments.add_argument("--prompts", type=int, default=60)
    arguments.add_argument("--work", type=Path, default=Path("search-trained"))
    options = arguments.parse_args()
    bench = Bench(options.work, options.prompts)
    settings = {"model": bench.lm.name, "puzzle": PUZZLE, "prompts": options.prompts, "pool": POOL, "votes": VOTES}
    record("search", GROUPS, options, bench, settings)


if __name__ == "__main__":
    main()
