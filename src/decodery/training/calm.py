"""Find how sure a model must be to leave early without its texts changing too much: learn-then-test.

Confident Adaptive Language Modeling (2022); Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control
(2021), with fixed sequence testing: thresholds are tried from the strictest on, in an order that is fixed beforehand,
until one cannot be shown to keep the loss below its bound; the one before it holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.calm import CALM, Confidence
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, write_text
from decodery.models.trained.exits import EXITS, Exits
from decodery.step.logits_source import LogitsSource

from .data import write_texts
from .exits import ExitChecks, fit_agreement
from .kind import Run, kind, option
from .kind_data import OwnTexts, Seed
from .loop import known_figures
from .tensors import zeros

TESTED = "tested.json"
NEVER = 2.0
"""A threshold that no confidence reaches."""
_TOGETHER = 16


@dataclass(frozen=True)
class CalmRecipe:
    """Settings of the calibration: a mean loss of at most `delta`, except with probability `epsilon`.

    The probability is over the prompts of the test. The loss of a text is 1 minus its ROUGE-L, over tokens, with the
    text of the whole model.
    """

    confidence: Confidence = option("state", "What is compared with the threshold.")
    every: int = option(5, "Layers between two confidence checks.")
    tokens: int = option(64, "Maximum tokens of a text.")
    delta: float = option(0.25, "Maximum mean loss (1 - ROUGE-L).")
    epsilon: float = option(0.05, "Maximum probability of a higher loss.")

    def __post_init__(self) -> None:
        self.source(NEVER, zeros(1))
        if not 0 < self.delta < 1 or not 0 < self.epsilon < 1:
            raise SettingsError("calm needs delta and epsilon between 0 and 1")

    def candidates(self) -> list[float]:
        """Thresholds in the order in which they are tested."""
        if self.confidence == "state":
            return [round(1 - 0.005 * step, 4) for step in range(1, 41)]
        return [round(1 - 0.05 * step, 4) for step in range(1, 20)]

    def source(self, threshold: float, classifier: torch.Tensor | None = None) -> CALM:
        """What is tested."""
        if self.confidence != "classifier":
            return CALM(threshold, self.confidence, self.every, self.tokens)
        plain = CALM(threshold, "state", self.every, self.tokens)
        tested = zeros(0, 3)
        exits = Exits(threshold, self.confidence, self.every, self.tokens, plain.tau, tested, classifier=classifier)
        return replace(plain, confidence=self.confidence, calibration=exits)


def hoeffding(losses: np.ndarray, delta: float) -> float:
    """Upper bound of the probability of losses [n] in [0, 1] with so small a mean if they expect `delta`."""
    return math.exp(-2 * len(losses) * max(0.0, delta - float(losses.mean())) ** 2)


def last_passed(
    losses: Iterator[tuple[float, np.ndarray]], delta: float, epsilon: float
) -> tuple[float, list[list[float]]]:
    """The last threshold that passed before the first that did not, NEVER for none, and what was tested.

    Of every threshold tested: itself, its mean loss, its p-value.

    Args:
        losses: Thresholds in a fixed order with the losses [n] of each; no more are drawn than needed.
    """
    found, rows = NEVER, []
    for threshold, each in losses:
        p = hoeffding(each, delta)
        rows.append([threshold, float(each.mean()), p])
        if p > epsilon:
            break
        found = threshold
    return found, rows


def rouge_l(left: Sequence[int], right: Sequence[int]) -> float:
    """F-measure of the longest common subsequence of two texts' tokens, 1 for two that are empty."""
    if not left or not right:
        return float(len(left) == len(right))
    row, other = np.zeros(len(right) + 1, dtype=np.int64), np.asarray(right)
    for token in left:
        grown = np.maximum(row[1:], (row[:-1] + 1) * (other == token))
        row[1:] = np.maximum.accumulate(grown)
    return 2 * int(row[-1]) / (len(left) + len(right))


def calibrate(run: Run, prompts: Sequence[Sequence[int]], learned: Sequence[Sequence[int]] = ()) -> Exits:
    """Calibrate the source `calm` on prompts.

    Interrupted, it goes on after the last threshold that was tested.

    Args:
        learned: Prompts of the texts that a classifier learns from, where that is the confidence; others than those of
            the test, whose losses would be too small otherwise.
    """
    target, out, recipe, progress = run.loaded, run.out, run.of(CalmRecipe), run.progress
    if not target.model.capabilities.layer_plans:
        raise SettingsError(f"{target.name} cannot be left early: use a model that this package runs itself")
    least = math.ceil(math.log(1 / recipe.epsilon) / (2 * recipe.delta**2))
    if len(prompts) < least:
        raise SettingsError(f"{len(prompts)} prompts can show nothing: give at least {least}, or a larger delta")
    settings = {"recipe": asdict(recipe), "prompts": [list(prompt) for prompt in prompts]}
    known: dict[str, Any] = {"losses": {}, "layers": {}, **known_figures(out / TESTED, settings)}
    classifier, about = _classifier(target, learned, out, recipe, progress)

    def write(source: LogitsSource | None) -> tuple[list[list[int]], float]:
        return written(target, prompts, source, recipe.tokens, progress)

    if "whole" not in known:
        known["whole"] = write(None)[0]
    whole: list[list[int]] = known["whole"]

    def losses() -> Iterator[tuple[float, np.ndarray]]:
        for threshold in recipe.candidates():
            name = str(threshold)
            if name not in known["losses"]:
                texts, layers = write(recipe.source(threshold, classifier))
                known["losses"][name] = [1 - rouge_l(text, full) for text, full in zip(texts, whole, strict=True)]
                known["layers"][name] = layers
                write_text(out / TESTED, json.dumps({**known, **settings}) + "\n")
            yield threshold, np.array(known["losses"][name])

    threshold, rows = last_passed(losses(), recipe.delta, recipe.epsilon)
    chosen = recipe.source(threshold, classifier)
    facts: dict[str, Any] = {
        **run.facts,
        "prompts": len(prompts),
        "delta": recipe.delta,
        "epsilon": recipe.epsilon,
        "layers": {str(row[0]): round(known["layers"][str(row[0])], 3) for row in rows},
        **({"classifier": about} if about else {}),
    }
    values = (threshold, chosen.confidence, chosen.every, chosen.tokens, chosen.tau)
    found = Exits(
        *values, torch.tensor(rows, dtype=torch.float64, device="cpu"), facts, target.model.fingerprint, classifier
    )
    found.save(out / EXITS)
    return found


def _classifier(
    target: LoadedModel, learned: Sequence[Sequence[int]], out: Path, recipe: CalmRecipe, progress: Progress
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """The classifier that is the confidence, learned from texts the model writes after these prompts, and its figures.

    None for other confidences.
    """
    if recipe.confidence != "classifier":
        return None, {}
    checks = ExitChecks(target, recipe.every)
    corpus = write_texts(
        target, learned, out / "text", max_new_tokens=recipe.tokens, temperatures=(0.0,), progress=progress
    )
    reading = checks.read(corpus, out / "states", progress)
    found, figures = fit_agreement(reading, out / "classifier", progress=progress)
    return found, {name: round(value, 4) for name, value in figures.items()}


def written(
    target: LoadedModel, prompts: Sequence[Sequence[int]], source: LogitsSource | None, tokens: int, progress: Progress
) -> tuple[list[list[int]], float]:
    """Greedy texts of all prompts, and their tokens' mean number of layers, first tokens left out."""
    texts, layers, rows = list[list[int]](), 0.0, 0.0
    for first in range(0, len(prompts), _TOGETHER):
        engine = Engine(target.model)
        part = [
            engine.submit(
                Request(prompt, max_new_tokens=tokens, logits_source=source, eos_ids=target.tokenizer.eos_ids)
            )
            for prompt in prompts[first : first + _TOGETHER]
        ]
        engine.run(part)
        texts += [seq.generated for seq in part]
        layers += sum(seq.trace.ledger.counts.get("layers", 0.0) for seq in part)
        rows += sum(seq.trace.ledger.counts.get("rows", 0.0) for seq in part)
        what = "writing texts" if source is None else f"testing {getattr(source, 'threshold', None)}"
        progress(what, min(first + _TOGETHER, len(prompts)), len(prompts))
    return texts, layers / rows if rows else float(target.model.config.num_layers)


@kind(
    "The calibration is ready: --logits-source calm:calibration={out}",
    (OwnTexts(64, max_new_tokens=64), CalmRecipe(), Seed()),
    "--delta 0.25 --out calibration",
    model="to leave early",
    file=EXITS,
    without=("tokens",),
)
def _calm(run: Run) -> dict[str, Any]:
    """Calibrate how confident MODEL must be to exit early, for the source calm.

    MODEL writes texts with all layers, then with decreasing thresholds. The last threshold whose mean loss is
    provably below the bound is kept. A classifier is first trained on as many texts of other prompts, the next
    lines of the file.
    """
    own = run.of(OwnTexts)
    recipe = replace(run.of(CalmRecipe), tokens=own.max_new_tokens)
    # A classifier learns from texts of other prompts, the next lines of the file.
    count = 2 * own.texts if recipe.confidence == "classifier" else own.texts
    lines = own.lines()
    prompts = own.encoded(run, min(count, len(lines)) if lines else count)
    learned = prompts[own.texts :]
    run.settings = (recipe, *run.settings)
    return {"tested": calibrate(run, prompts[: own.texts], learned).tested.tolist()}
