"""M4: how well monitors tell wrong answers to questions that can be checked, and what acting on them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...lm import LM
from ...model.batch import Batch, Segment
from ...model.store import Progress
from ...monitor.base import Monitor
from ...monitor.factcheckmate import FactCheckmate, Shift
from ...monitor.truthprint import TruthPrInt
from ...train.activations import ActivationCollector, Answered
from ...train.checkable import built_in
from ...train.los import scores as los_scores
from ...train.los import train_los
from ...train.probe import train_probe, worst
from ...train.ranking import parts
from ...train.shift import train_shift
from .figures import Judged, Row, detection, logistic, mcnemar
from .settings import WatchSettings

NAME = "answers"
MOST_ACTED_ON = 96
Scores = Callable[[list[Answered]], list[float]]


def measure(lm: LM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Answers the built-in questions once, trains every monitor per seed, and looks at the test part alone."""
    layers = lm.model.config.num_layers
    sites = tuple(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6))
    collector = ActivationCollector(lm, work / NAME, sites=sites)
    answers = collector.collect(built_in(settings.prompts), progress)
    found: dict[str, list[Judged]] = {}
    for seed in range(settings.seed, settings.seed + settings.rounds):
        part = parts([each.question.group for each in answers], seed)
        for name, (scores, limit) in scorers(lm, answers, part, sites[1:4], seed, settings.rate).items():
            # What learned from labels without meaning is tested on such labels.
            asked = of(shuffled(answers, seed) if "shuffled" in name else answers, part, "test")
            found.setdefault(name, []).append(
                Judged(
                    scores(asked),
                    [each.wrong for each in asked],
                    [each.question.group for each in asked],
                    [each.question.stratum for each in asked],
                    limit,
                )
            )
        progress("training monitors of answers", seed - settings.seed + 1, settings.rounds)
    rows = [detection(NAME, name, seeds) for name, seeds in found.items()]
    strata: dict[str, list[bool]] = {}
    for each in answers:
        strata.setdefault(each.question.stratum, []).append(each.wrong)
    wrong = ", ".join(f"{name} {sum(kinds)}/{len(kinds)}" for name, kinds in sorted(strata.items()))
    note = f"answers: {len(answers)} questions, answered wrongly: {wrong}"
    return rows, actions(lm, answers, sites[1:4], settings.rate), [note]


def of(answers: list[Answered], part: np.ndarray, name: str) -> list[Answered]:
    return [each for each, own in zip(answers, part, strict=True) if own == name]


def scorers(
    lm: LM, answers: list[Answered], part: np.ndarray, sites: tuple[str, ...], seed: int, rate: float
) -> dict[str, tuple[Scores, float | None]]:
    """How each scores answers, and where it flags."""
    los = {k: train_los(answers, k=k, epochs=40, rate=rate, seed=seed) for k in (0, 100)}
    common: dict[str, Any] = {"model": lm.model.fingerprint, "rate": rate, "seed": seed}
    prompt = train_probe(answers, sites, "prompt", **common)
    linear = train_probe(answers, sites, "prompt", inner=(), **common)
    new = train_probe(answers, sites, "new", **common)
    meaningless = train_probe(shuffled(answers, seed), sites, "prompt", **common)
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
    weight = logistic(data, torch.tensor([float(each.wrong) for each in train], dtype=torch.float64))
    return lambda test: [float(torch.tensor(features(each), dtype=torch.float64) @ weight) for each in test]


@dataclass(frozen=True)
class Anywhere(TruthPrInt):
    """Goes back as often as truthprint does, and wherever a hash of the place says so."""

    share_of_tokens: float = 0.0

    def observe(self, state: Any, row: Any) -> Any:
        after = super().observe(state, row)
        draw = np.random.default_rng((row.position, row.token)).random()
        return replace(after, value=1.0 if draw < self.share_of_tokens else 0.0)


def actions(lm: LM, answers: list[Answered], sites: tuple[str, ...], rate: float) -> list[Row]:
    """What acting does to the answers of the first seed's test part, both ways, and what it costs."""
    from ... import load

    part = parts([each.question.group for each in answers], 0)
    test, train = of(answers, part, "test")[:MOST_ACTED_ON], of(answers, part, "train")
    common: dict[str, Any] = {"model": lm.model.fingerprint, "rate": rate, "seed": 0}
    prompt, new = (train_probe(answers, sites, rows, **common) for rows in ("prompt", "new"))
    shift = train_shift(load(lm.name, dtype="float32"), train, seed=0)
    plain = price(lm, test, [each.tokens for each in test])
    found = {
        "factcheckmate, switch": FactCheckmate(prompt, shift, action="switch"),
        "factcheckmate, random shift of equal norm": FactCheckmate(prompt, at_random(shift), action="switch"),
        "truthprint, rollback": TruthPrInt(new),
    }
    told = {name: act(lm, test, monitor, name, plain) for name, monitor in found.items()}
    counts = told["truthprint, rollback"]
    share = counts["rollbacks"] / max(counts["tokens"], 1)
    name = "rollbacks at random places"
    told[name] = act(lm, test, Anywhere(new, threshold=0.5, share_of_tokens=share), name, plain)
    return list(told.values())


@torch.no_grad()
def price(lm: LM, test: list[Answered], texts: list[list[int]]) -> float:
    """The mean over tokens of -log p under the model itself, in nats: what it finds of the texts."""
    total = count = 0.0
    for each, tokens in zip(test, texts, strict=True):
        prompt = lm.encode(each.question.prompt, raw=True)
        if not tokens:
            continue
        wanted = list(range(len(prompt) - 1, len(prompt) + len(tokens) - 1))
        segment = Segment.chunk([*prompt, *tokens[:-1]], lm.model.new_cache(), logit_rows=wanted)
        rows = torch.log_softmax(lm.model.forward(Batch([segment])).logits.float(), dim=-1)
        total -= float(rows[torch.arange(len(tokens)), torch.tensor(tokens)].sum())
        count += len(tokens)
    return total / max(count, 1)


class Turned(Shift):
    """Shifts of the same length in a direction that has nothing to do with the state."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        length = super().of(rows).norm(dim=-1, keepdim=True)
        direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return length * direction / direction.norm()


def at_random(shift: Shift) -> Shift:
    return Turned(shift.tensors, shift.facts, shift.model)


def act(lm: Any, test: list[Answered], monitor: Monitor, name: str, plain: float) -> Row:
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
    taken = sum(count.get("tokens_taken_back", 0) for count in counts)
    return {
        "testbed": NAME,
        "what": name,
        "questions": len(test),
        "wrong before": sum(each.wrong for each in test),
        "wrong to right": mended,
        "right to wrong": broken,
        "mcnemar p": round(mcnemar(mended, broken), 4),
        "texts flagged": sum(output.monitors[0].flagged is not None for output in outputs),
        "rollbacks": int(sum(count.get("rollbacks", 0) for count in counts)),
        "tokens": written,
        "tokens computed per token": round(1 + taken / max(written, 1), 3),
        "nats per token more": round(price(lm, test, [output.tokens for output in outputs]) - plain, 4),
    }
