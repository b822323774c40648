"""Training the head of Judge Decoding on examples, which `training/mining.py` makes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decodery.core.errors import PromptError
from decodery.models.loaders.store import Progress, silent
from decodery.speculative.acceptance.judge import Head

from .evaluation import figures
from .held_out import Measured, compared
from .kind import ARGUMENT, Data, Run, kind
from .loop import History, TrainingPlan, batches, train
from .mining import HELD_OUT, PLAIN, Examples, Mining, examples, read_questions
from .ranking import auc, turned
from .tensors import zeros

JUDGE = "judge.safetensors"


def fit(
    found: Examples,
    layer: int,
    out: Path,
    *,
    steps: int = 600,
    lr: float = 1e-2,
    facts: dict[str, Any] | None = None,
    model: str = "",
    progress: Progress = silent,
) -> tuple[Head, History]:
    """Weighted logistic regression on the examples of four questions in five; validated on the others.

    Both labels weigh the same in all. The head's facts say how well it tells invalid from valid on held-out questions
    (`evaluation.figures`), the same of `PLAIN` baselines and of a training on shuffled labels, and which threshold
    rejects 90% of the invalid ones.

    Args:
        out: The folder of the head; checkpoints lie in `training` of it.
        model: `fingerprint` of the model whose states the examples hold.
    """
    held = found.question % HELD_OUT == HELD_OUT - 1
    for part, name in ((~held, "train on"), (held, "validate with")):
        if not 0 < found.valid[part].sum() < part.sum():
            raise PromptError(f"the questions give no {name} examples of both kinds: give more or other questions")
    states = torch.from_numpy(found.states[~held])
    # Standardised for the optimizer; folded into the head afterwards.
    mean, spread = states.mean(dim=0), states.std(dim=0).clamp_min(1e-3)
    states = (states - mean) / spread
    # Of the held-out questions every other one chooses the best step, and where both kinds allow it the rest nothing.
    testing = held & (found.question // HELD_OUT % 2 == 1)
    choosing = held & ~testing
    if any(len(set(found.valid[part].tolist())) < 2 for part in (testing, choosing)):
        testing = choosing = held
    others, truth = (torch.from_numpy(found.states[choosing]) - mean) / spread, found.valid[choosing]
    tested, right = (torch.from_numpy(found.states[testing]) - mean) / spread, found.valid[testing]
    batch = batches(len(states), min(256, len(states)), seed=0)

    def trained(
        valid: np.ndarray, where: Path
    ) -> tuple[Callable[[torch.Tensor], torch.Tensor], History, dict[str, torch.Tensor]]:
        """The logits of rows, after training on labels of the learned ones."""
        labels = torch.from_numpy(valid).float()
        weights = torch.where(labels > 0, 0.5 / labels.mean(), 0.5 / (1 - labels.mean()))
        parameters = {"weight": zeros(states.shape[1]), "bias": zeros(1)}

        def logits(rows: torch.Tensor) -> torch.Tensor:
            return rows @ parameters["weight"] + parameters["bias"]

        def loss(step: int) -> torch.Tensor:
            chosen = batch(step)
            cost = binary_cross_entropy_with_logits(logits(states[chosen]), labels[chosen], weight=weights[chosen])
            return cost + 1e-3 * (parameters["weight"] ** 2).sum()

        history = train(
            parameters,
            loss,
            TrainingPlan(steps, lr=lr, validate_every=max(1, steps // 20)),
            where,
            validate=lambda: {"auc": auc(logits(others).numpy(), truth)},
            metric="auc",
            higher=True,
            settings={"examples": hashlib.sha256(found.states.tobytes() + found.valid.tobytes()).hexdigest()},
            progress=progress,
        )
        return logits, history, parameters

    logits, history, parameters = trained(found.valid[~held], out / "training")
    shuffled = np.random.default_rng(0).permutation(found.valid[~held])
    control, _, _ = trained(shuffled, out / "training" / "control")
    asked, wrong = list(map(str, found.question[testing])), (~right).tolist()

    def plain(column: int) -> Measured:
        """Figures of a baseline, whose sense the learned examples say."""
        values, known = (found.plain[part, column].tolist() for part in (testing, ~held))
        return figures(turned(values, known, (~found.valid[~held]).tolist()), wrong, asked)

    with torch.no_grad():
        scores, chance = logits(tested).sigmoid().numpy(), float(np.quantile(logits(others).sigmoid()[~truth], 0.9))
        weight = parameters["weight"] / spread
        bias = float(parameters["bias"] - (weight * mean).sum())
    facts = dict(facts or {}) | {
        "examples": len(found.valid),
        "valid": round(float(found.valid.mean()), 4),
        "held_out": int(held.sum()),
        "tested on": f"{len(set(asked))} questions that "
        + ("also chose the best step" if testing is choosing else "chose nothing"),
        "threshold_90": round(chance, 4),
        "kept_at_threshold_90": round(float((scores[right] > chance).mean()), 4),
        **compared(
            figures((-scores).tolist(), wrong, asked),
            {name: plain(column) for column, name in enumerate(PLAIN)},
            figures((-control(tested)).tolist(), wrong, asked),
        ),
    }
    head = Head(weight.detach(), bias, layer, facts, model)
    head.save(out / JUDGE)
    return head, history


@dataclass(frozen=True)
class JudgeSettings(Data):
    """What a judge learns from, and how.

    Attributes:
        questions: The file of questions.
        lr: Learning rate.
    """

    NOTE = "Interrupt it with Ctrl-C: the same command continues."

    questions: Path = field(default=Path(), metadata=ARGUMENT)
    steps: int = 600
    lr: float = 1e-2

    def check(self) -> None:
        read_questions(self.questions)


@kind(
    f"The judge is ready: --acceptance-rule judge:head={{out}}/{JUDGE}",
    (JudgeSettings(), Mining()),
    "questions.jsonl --out judge",
    model="whose hidden states are judged",
)
def _judge(run: Run) -> dict[str, Any]:
    """Train a head that predicts which drafted tokens keep an answer right, for the acceptance rule judge.

    QUESTIONS holds one JSON object a line. {"prompt": ..., "right": ..., "wrong": ...}: the wrong answer differs
    from the right one where the mistake begins. {"prompt": ...}, with a number as the answer: the model answers,
    tries its own next best tokens where it is unsure, and checks whether the number stays. One question in five is
    held out.
    """
    given, target = run.of(JudgeSettings), run.loaded
    asked, layer = read_questions(given.questions), target.model.config.num_layers
    found = examples(target, asked, run.training, mining=run.of(Mining), progress=run.progress)
    how: dict[str, Any] = {
        "steps": given.steps,
        "lr": given.lr,
        "model": target.model.fingerprint,
        "progress": run.progress,
    }
    head, _ = fit(found, layer, run.out, facts=dict(run.facts), **how)
    return head.facts
