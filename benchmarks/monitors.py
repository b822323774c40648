"""How well monitors tell wrong answers from right ones, beside what needs no monitor, and what acting on them does.

    python benchmarks/monitors.py --work DIR --out benchmarks/results/monitors.json

Answers the built-in questions once (in DIR, where an interrupted run goes on), then trains every monitor for three
seeds of split and training, and looks at the test part alone. Figures are means over seeds; intervals are 95%
bootstraps over the groups of the first seed's test part. Counts only: no times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import decodery
from decodery.monitor.base import Monitor
from decodery.monitor.factcheckmate import FactCheckmate, Shift
from decodery.monitor.truthprint import TruthPrInt
from decodery.train.activations import ActivationCollector, Answered
from decodery.train.checkable import built_in
from decodery.train.los import scores as los_scores
from decodery.train.los import train_los
from decodery.train.probe import train_probe, worst
from decodery.train.ranking import auroc, average_precision, interval, parts, rate_at, within
from decodery.train.shift import train_shift

SEEDS = range(3)
MOST_ACTED_ON = 96
RATE = 0.1
Scores = Callable[[list[Answered]], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=960)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lm = decodery.load("smollm2")
    layers = lm.model.config.num_layers
    sites = tuple(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6))
    collector = ActivationCollector(lm, given.work, sites=sites)
    swept = sites[1:4]
    answers = collector.collect(built_in(given.count), lambda what, done, total: print(what, done, total, flush=True))
    strata: dict[str, list[bool]] = {}
    for each in answers:
        strata.setdefault(each.question.stratum, []).append(each.wrong)
    result: dict[str, Any] = {
        "model": lm.name,
        "questions": len(answers),
        "wrong": {name: [sum(found), len(found)] for name, found in sorted(strata.items())},
        "rate": RATE,
        "seeds": len(SEEDS),
        "monitors": {},
    }
    result["monitors"] = detection(lm, answers, swept)
    save(given.out, result)
    result["actions"] = actions(lm, answers, swept)
    save(given.out, result)


def save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def of(answers: list[Answered], part: np.ndarray, name: str) -> list[Answered]:
    return [each for each, own in zip(answers, part, strict=True) if own == name]


def detection(lm: Any, answers: list[Answered], sites: tuple[str, ...]) -> dict[str, Any]:
    """Per monitor: figures of the test part, means over seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in SEEDS:
        part = parts([each.question.group for each in answers], seed)
        test = of(answers, part, "test")
        for name, (scores, limit) in scorers(lm, answers, part, sites, seed).items():
            # What learned from labels without meaning is tested on such labels.
            asked = of(shuffled(answers, seed), part, "test") if "shuffled" in name else test
            found.setdefault(name, []).append(figures(scores(asked), asked, limit, seed == SEEDS[0]))
            print(seed, name, found[name][-1], flush=True)
    return {name: mean(each) for name, each in found.items()}


def scorers(
    lm: Any, answers: list[Answered], part: np.ndarray, sites: tuple[str, ...], seed: int
) -> dict[str, tuple[Scores, float | None]]:
    """How each scores answers, and where it flags."""
    los = {k: train_los(answers, k=k, epochs=40, rate=RATE, seed=seed) for k in (0, 100)}
    common: dict[str, Any] = {"model": lm.model.fingerprint, "rate": RATE, "seed": seed}
    prompt = train_probe(answers, sites, "prompt", **common)
    linear = train_probe(answers, sites, "prompt", inner=(), **common)
    new = train_probe(answers, sites, "new", **common)
    meaningless = train_probe(shuffled(answers, seed), sites, "prompt", **common)
    print(
        seed, {"prompt": prompt.site, "new": new.site}, prompt.facts["validation"], new.facts["validation"], flush=True
    )
    return {
        "constant": (lambda test: [0.0] * len(test), None),
        "surface": (surface(of(answers, part, "train")), None),
        "first token": (doubt(lambda rows: -float(rows[0, -5])), None),
        "mean log-probability": (doubt(lambda rows: -float(rows[:, -5].mean())), None),
        "worst log-probability": (doubt(lambda rows: -float(rows[:, -5].min())), None),
        "mean entropy": (doubt(lambda rows: float(rows[:, -1].mean())), None),
        **{f"los, k={k}": (_bound(los_scores, head), head.threshold.value) for k, head in los.items()},
        "factcheckmate": (_bound(worst, prompt), prompt.threshold.value),
        "factcheckmate, linear": (_bound(worst, linear), linear.threshold.value),
        "factcheckmate, shuffled labels": (_bound(worst, meaningless), None),
        "truthprint": (_bound(worst, new), new.threshold.value),
    }


def shuffled(answers: list[Answered], seed: int) -> list[Answered]:
    order = np.random.default_rng(seed).permutation(len(answers))
    return [replace(each, wrong=answers[at].wrong) for each, at in zip(answers, order, strict=True)]


def _bound(scores: Callable[[Any, list[Answered]], list[float]], trained: Any) -> Scores:
    return lambda test: scores(trained, test)


def doubt(measure: Callable[[torch.Tensor], float]) -> Scores:
    return lambda test: [measure(each.signatures) for each in test]


def surface(train: list[Answered]) -> Scores:
    """Logistic regression on what anybody sees: the kind of question with its digits, lengths of prompt and answer."""
    kinds = sorted({each.question.stratum for each in train})

    def features(each: Answered) -> list[float]:
        kind = [float(each.question.stratum == name) for name in kinds]
        return [1.0, len(each.question.prompt) / 100, len(each.tokens) / 10, *kind]

    data = torch.tensor([features(each) for each in train], dtype=torch.float64)
    labels = torch.tensor([float(each.wrong) for each in train], dtype=torch.float64)
    weight = torch.zeros(data.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (
            torch.nn.functional.binary_cross_entropy_with_logits(data @ weight, labels) + 1e-3 * weight.square().sum()
        )
        value.backward()
        return value

    optimizer.step(loss)
    return lambda test: [float(torch.tensor(features(each), dtype=torch.float64) @ weight.detach()) for each in test]


def figures(scores: list[float], test: list[Answered], limit: float | None, bounds: bool) -> dict[str, Any]:
    wrong = [each.wrong for each in test]
    found: dict[str, Any] = {
        "auroc": auroc(scores, wrong),
        "average precision": average_precision(scores, wrong),
        "caught at 5% false": rate_at(scores, wrong),
        "auroc within strata": within(scores, wrong, [each.question.stratum for each in test]),
    }
    if bounds:
        found["interval"] = interval(scores, wrong, [each.question.group for each in test])
    if limit is not None:
        flagged = np.array(scores) > limit
        found["flagged of right"] = float(flagged[~np.array(wrong)].mean())
        found["flagged of wrong"] = float(flagged[np.array(wrong)].mean())
    return found


def mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in found[-1] if name != "interval"]
    values = {name: [each[name] for each in found] for name in names}
    told: dict[str, Any] = {name: round(fmean(each), 4) for name, each in values.items()}
    told["auroc by seed"] = [round(each, 4) for each in values["auroc"]]
    told["interval"] = [round(bound, 4) for bound in found[0]["interval"]]
    return told


@dataclass(frozen=True)
class Anywhere(TruthPrInt):
    """Goes back as often as truthprint does, and wherever a hash of the place says so."""

    share_of_tokens: float = 0.0

    def observe(self, state: Any, row: Any) -> Any:
        after = super().observe(state, row)
        draw = np.random.default_rng((row.position, row.token)).random()
        return replace(after, value=1.0 if draw < self.share_of_tokens else 0.0)


def actions(lm: Any, answers: list[Answered], sites: tuple[str, ...]) -> dict[str, Any]:
    """What acting does to the answers of the first seed's test part, both ways, and what it costs."""
    part = parts([each.question.group for each in answers], 0)
    test, train = of(answers, part, "test")[:MOST_ACTED_ON], of(answers, part, "train")
    common: dict[str, Any] = {"model": lm.model.fingerprint, "rate": RATE, "seed": 0}
    prompt, new = (train_probe(answers, sites, rows, **common) for rows in ("prompt", "new"))  # type: ignore[arg-type]
    shift = train_shift(decodery.load("smollm2", dtype="float32"), train, seed=0)
    found = {
        "factcheckmate, switch": FactCheckmate(prompt, shift, action="switch"),
        "factcheckmate, random shift of equal norm": FactCheckmate(prompt, at_random(shift), action="switch"),
        "truthprint, rollback": TruthPrInt(new),
    }
    told = {name: act(lm, test, monitor) for name, monitor in found.items()}
    counts = told["truthprint, rollback"]
    share = counts["rollbacks"] / max(counts["tokens"], 1)
    told["rollbacks at random places"] = act(lm, test, Anywhere(new, threshold=0.5, share_of_tokens=share))
    print(told)
    return told


class Turned(Shift):
    """Shifts of the same length in a direction that has nothing to do with the state."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        length = super().of(rows).norm(dim=-1, keepdim=True)
        direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return length * direction / direction.norm()


def at_random(shift: Shift) -> Shift:
    return Turned(shift.tensors, shift.facts, shift.model)


def act(lm: Any, test: list[Answered], monitor: Monitor) -> dict[str, Any]:
    outputs = [
        output
        for first in range(0, len(test), 16)
        for output in lm.generate(
            [each.question.prompt for each in test[first : first + 16]],
            raw=True,
            max_new_tokens=12,
            stop="\n",
            drafter=None,
            monitor=monitor,
        )
    ]
    right = [each.question.right(output.text) for each, output in zip(test, outputs, strict=True)]
    mended = sum(each.wrong and now for each, now in zip(test, right, strict=True))
    broken = sum(not each.wrong and not now for each, now in zip(test, right, strict=True))
    counts = [output.trace.ledger.counts for output in outputs]
    written = sum(len(output.tokens) for output in outputs)
    return {
        "questions": len(test),
        "wrong before": sum(each.wrong for each in test),
        "wrong to right": mended,
        "right to wrong": broken,
        "mcnemar p": round(mcnemar(mended, broken), 4),
        "texts flagged": sum(output.monitors[0].flagged is not None for output in outputs),
        "rollbacks": int(sum(count.get("rollbacks", 0) for count in counts)),
        "tokens": written,
        "tokens computed per token": round(1 + sum(count.get("tokens_taken_back", 0) for count in counts) / written, 3),
    }


def mcnemar(one: int, other: int) -> float:
    """The exact two-sided p of as uneven a split, if both ways were as likely."""
    from math import comb

    n, least = one + other, min(one, other)
    return min(1.0, 2 * sum(comb(n, k) for k in range(least + 1)) / 2**n)


if __name__ == "__main__":
    main()
