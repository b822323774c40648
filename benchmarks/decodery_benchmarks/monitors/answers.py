"""M4: how well monitors tell wrong answers to questions that can be checked, and what acting on them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress
from decodery.monitors.factcheckmate import FactCheckmate, Shift
from decodery.monitors.probe import Probe
from decodery.monitors.truthprint import TruthPrInt
from decodery.step.monitor import Monitor
from decodery.training.activations import Answered, collect
from decodery.training.checkable import built_in
from decodery.training.evaluation import MonitorContext
from decodery.training.los import scores as los_scores
from decodery.training.los import train_los
from decodery.training.probe import Rows, train_probe, worst
from decodery.training.ranking import logistic, parts, word_scores
from decodery.training.shift import train_shift

from .figures import Judged, Row, detection
from .more_questions import more_questions
from .price import both_ways, price
from .settings import WatchSettings
from .specificity import specificity
from .transfer import transferred

NAME = "answers"
MOST_ACTED_ON, _FEWEST = 96, 300
_RIVALS = (0, 1, 5, 20, 100, 1000)
"""How many of a row's log-probabilities LOS-Net is given, of which the first seed alone tries all."""
Scores = Callable[[list[Answered]], list[float]]


def measure(lm: LLM, settings: WatchSettings, work: Path, progress: Progress) -> tuple[list[Row], list[Row], list[str]]:
    """Answers the built-in questions once, trains every monitor per seed, and looks at the test part alone.

    Kinds of questions that are answered rightly or wrongly nearly always are left out of what is learned and tested.
    """
    layers = lm.model.config.num_layers
    sites = tuple(f"resid_post.{min(layers * at // 5, layers - 1)}" for at in range(1, 6))
    questions = built_in(settings.prompts, settings.seed, more=more_questions())
    everything = collect(lm, questions, work / NAME, sites=sites, k=max(_RIVALS), progress=progress)
    answers, note = _kept(everything)
    notes = [note]
    found: dict[str, list[Judged]] = {}
    for seed in range(settings.seed, settings.seed + settings.rounds):
        part = parts([each.question.group for each in answers], seed)
        for name, (scores, limit) in scorers(lm, answers, part, sites, seed, settings).items():
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
    common: dict[str, Any] = {
        "rate": settings.rate,
        "seed": settings.seed,
        "context": MonitorContext(lm.model.fingerprint),
    }
    prompt, new = (train_probe(answers, sites, pool, **common) for pool in _POOLS)
    for name, probe in (("factcheckmate", prompt), ("truthprint", new)):
        swept = ", ".join(f"{site} {value:.2f}" for site, value in probe.facts["selection"].items())
        notes.append(f"answers: {name} on the validation part of the first seed, by site: {swept}")
    acts = actions(lm, answers, prompt, new, settings.seed)
    part = parts([each.question.group for each in answers], settings.seed)
    acts += transferred(answers, prompt.site, settings)
    acts += specificity(answers, of(answers, part, "test"), sites, settings)
    return rows, acts, notes


_POOLS: tuple[Rows, Rows] = ("prompt", "new")


def _kept(answers: list[Answered]) -> tuple[list[Answered], str]:
    """The answers of kinds of which a quarter to three quarters are right, and what there was of all kinds.

    Where these are too few to learn from, the kinds that are nearest to that join them.
    """
    strata: dict[str, list[bool]] = {}
    for each in answers:
        strata.setdefault(each.question.stratum, []).append(each.wrong)
    good, count = set[str](), 0
    for name in sorted(strata, key=lambda each: abs(float(np.mean(strata[each])) - 0.5)):
        if abs(np.mean(strata[name]) - 0.5) <= 0.25 or count < _FEWEST:
            good.add(name)
            count += len(strata[name])
    kept = [each for each in answers if each.question.stratum in good]
    told = ", ".join(
        f"{name} {sum(kinds)}/{len(kinds)}{'' if name in good else ' (left out)'}"
        for name, kinds in sorted(strata.items())
    )
    return kept, f"answers: {len(answers)} questions, {len(kept)} kept; answered wrongly: {told}"


def of(answers: list[Answered], part: np.ndarray, name: str) -> list[Answered]:
    return [each for each, own in zip(answers, part, strict=True) if own == name]


def scorers(
    lm: LLM, answers: list[Answered], part: np.ndarray, sites: tuple[str, ...], seed: int, settings: WatchSettings
) -> dict[str, tuple[Scores, float | None]]:
    """How each scores answers, and where it flags."""
    rate, train = settings.rate, of(answers, part, "train")
    wide = _RIVALS if seed == settings.seed else (0, 100)
    los = {k: train_los(answers, k=k, epochs=40, rate=rate, seed=seed) for k in wide}
    common: dict[str, Any] = {"rate": rate, "seed": seed, "context": MonitorContext(lm.model.fingerprint)}
    prompt = train_probe(answers, sites, "prompt", **common)
    linear = train_probe(answers, sites, "prompt", inner=(), **common)
    new = train_probe(answers, sites, "new", **common)
    meaningless = train_probe(shuffled(answers, seed), sites, "prompt", **common)
    return {
        "constant": (lambda test: [0.0] * len(test), None),
        "surface": (surface(train), None),
        "bag of words": (bag(train), None),
        "first token": (doubt(lambda rows: -float(rows[0, -5])), None),
        "mean log-probability": (doubt(lambda rows: -float(rows[:, -5].mean())), None),
        "worst log-probability": (doubt(lambda rows: -float(rows[:, -5].min())), None),
        "least likely fifth": (doubt(_least_likely), None),
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


def _least_likely(rows: torch.Tensor) -> float:
    """Min-K%: the mean of -log p of the fifth of the tokens that were least likely."""
    return -float(rows[:, -5].sort().values[: -(-len(rows) // 5)].mean())


def doubt(measure: Callable[[torch.Tensor], float]) -> Scores:
    return lambda test: [measure(each.signatures) for each in test]


def bag(train: list[Answered]) -> Scores:
    known, labels = [_asked(each) for each in train], [each.wrong for each in train]
    return lambda test: word_scores(known, labels, [_asked(each) for each in test])


def _asked(each: Answered) -> str:
    """The question without the examples before it."""
    return each.question.prompt.rpartition("Question:")[2]


def surface(train: list[Answered]) -> Scores:
    """Logistic regression on what anybody sees: the kind of question with its digits, lengths of prompt and answer."""
    kinds = sorted({each.question.stratum for each in train})

    def features(each: Answered) -> list[float]:
        kind = [float(each.question.stratum == name) for name in kinds]
        return [1.0, len(each.question.prompt) / 100, len(each.tokens) / 10, *kind]

    data = torch.tensor([features(each) for each in train], dtype=torch.float64, device="cpu")
    weight = logistic(data, torch.tensor([float(each.wrong) for each in train], dtype=torch.float64, device="cpu"))
    return lambda test: [
        float(torch.tensor(features(each), dtype=torch.float64, device="cpu") @ weight) for each in test
    ]


@dataclass(frozen=True)
class Anywhere(TruthPrInt):
    """Goes back as often as truthprint does, and wherever a hash of the place says so."""

    share_of_tokens: float = 0.0

    def observe(self, state: Any, row: Any) -> Any:
        after = super().observe(state, row)
        draw = np.random.default_rng((row.position, row.token)).random()
        return replace(after, value=1.0 if draw < self.share_of_tokens else 0.0)


@dataclass(frozen=True)
class Unasked(TruthPrInt):
    """Goes back where the probe objects, and takes the most likely other branch, whatever the probe says of it."""

    tries: int = 1

    def _trial(self, state: Any) -> Any:
        return super()._trial(state) if state.trial is None else None


def actions(lm: LLM, answers: list[Answered], prompt: Probe, new: Probe, seed: int) -> list[Row]:
    """What acting does to the answers of the first seed's test part, both ways, and what it costs."""
    from decodery import load

    part = parts([each.question.group for each in answers], seed)
    test, train = of(answers, part, "test")[:MOST_ACTED_ON], of(answers, part, "train")
    shift = train_shift(load(lm.name, dtype="float32"), train, seed=seed)
    plain = found_likely(lm, test, [each.tokens for each in test])
    found = {
        "factcheckmate, switch": FactCheckmate(prompt, shift, action="switch"),
        "factcheckmate, random shift of equal norm": FactCheckmate(prompt, at_random(shift), action="switch"),
        "truthprint, rollback": TruthPrInt(new),
        "the most likely other branch, unasked": Unasked(new),
    }
    told = {name: act(lm, test, monitor, name, plain) for name, monitor in found.items()}
    counts = told["truthprint, rollback"]
    share = counts["rollbacks"] / max(counts["tokens"], 1)
    name = "rollbacks at random places"
    told[name] = act(lm, test, Anywhere(new, threshold=0.5, share_of_tokens=share), name, plain)
    return list(told.values())


def found_likely(lm: LLM, test: list[Answered], texts: list[list[int]]) -> float:
    return price(
        lm,
        (
            (lm.encode(each.question.prompt, apply_chat_template=False), own)
            for each, own in zip(test, texts, strict=True)
        ),
    )


class Turned(Shift):
    """Shifts of the same length in a direction that has nothing to do with the state."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        length = super().of(rows).norm(dim=-1, keepdim=True)
        direction = torch.randn(
            rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
        )
        return length * direction / direction.norm()


def at_random(shift: Shift) -> Shift:
    return Turned(shift.tensors, shift.facts, shift.model)


def act(lm: Any, test: list[Answered], monitor: Monitor, name: str, plain: float) -> Row:
    outputs = [
        output
        for first in range(0, len(test), 16)
        for output in lm.generate(
            [each.question.prompt for each in test[first : first + 16]],
            apply_chat_template=False,
            max_new_tokens=12,
            stop="\n",
            drafter=None,
            monitor=monitor,
        )
    ]
    right = [each.question.right(output.text) for each, output in zip(test, outputs, strict=True)]
    counts = [output.trace.ledger.counts for output in outputs]
    written = sum(len(output.tokens) for output in outputs)
    taken = sum(count.get("tokens_taken_back", 0) for count in counts)
    return {
        "testbed": NAME,
        "what": name,
        "questions": len(test),
        "wrong before": sum(each.wrong for each in test),
        **both_ways([not each.wrong for each in test], right),
        "texts flagged": sum(output.monitors[0].flagged is not None for output in outputs),
        "rollbacks": int(sum(count.get("rollbacks", 0) for count in counts)),
        "tokens": written,
        "tokens computed per token": round(1 + taken / max(written, 1), 3),
        "nats per token more": round(found_likely(lm, test, [output.tokens for output in outputs]) - plain, 4),
    }
