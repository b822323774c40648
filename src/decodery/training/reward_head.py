"""Fit a head that reads rewards from hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decodery.core.errors import SettingsError
from decodery.models.loaders.store import Progress
from decodery.models.protocol import LanguageModel
from decodery.scorers.process_reward import ProcessHead

from .evaluation import figures
from .held_out import Measured, compared
from .loop import TrainingPlan, batches, train
from .ranking import turned
from .tensors import float_tensor, normal, zeros

PRM = "process-reward.safetensors"


def fitted(
    model: LanguageModel,
    tap: int,
    learned: tuple[torch.Tensor, torch.Tensor],
    held: tuple[torch.Tensor, torch.Tensor],
    recipe: Any,
    out: Path,
    *,
    settings: Mapping[str, object],
    weight_decay: float = 0.01,
    progress: Progress,
) -> tuple[ProcessHead, np.ndarray, dict[str, float]]:
    """A head that learned rewards from states, going on from its checkpoint in `out`.

    Args:
        learned: States [n, hidden] and their rewards [n].
        settings: What else the run depends on.

    Returns:
        The head, its logits [n] of what is held out, and the cross-entropy there: its own, and that of the mean.
    """
    head = ProcessHead(random_head(model.config.hidden_size, recipe.seed), tap, model.fingerprint)
    batch = batches(len(learned[1]), min(recipe.batch, len(learned[1])), recipe.seed)

    def loss(step: int) -> torch.Tensor:
        chosen = batch(step)
        return binary_cross_entropy_with_logits(head.logits(learned[0][chosen]), learned[1][chosen])

    def validate() -> dict[str, float]:
        return {"cross_entropy": float(binary_cross_entropy_with_logits(head.logits(held[0]), held[1]))}

    history = train(
        head.tensors,
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, validate_every=10, weight_decay=weight_decay),
        out / "training",
        validate=validate,
        metric="cross_entropy",
        settings=settings,
        progress=progress,
        what="learning rewards",
    )
    head = replace(head, tensors={name: tensor.detach() for name, tensor in head.tensors.items()})
    constant = float(binary_cross_entropy_with_logits(learned[1].mean().logit().expand(len(held[1])), held[1]))
    costs = {"cross_entropy": round(history.best or 0.0, 4), "cross_entropy_of_the_mean": round(constant, 4)}
    return head, head.logits(held[0]).numpy(), costs


@dataclass
class StepExamples:
    """The ends of steps: states [n, hidden] there, labels, length and doubt until then, and prompts."""

    states: list[torch.Tensor] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    doubts: list[float] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def add(
        self, states: torch.Tensor, labels: Sequence[float], places: Sequence[int], doubts: Sequence[float], prompt: str
    ) -> None:
        """Those of a text.

        Args:
            places: The ends of steps among its tokens.
            doubts: -log p of its tokens, of which each end has the mean until then.
        """
        self.states.append(states)
        self.labels.extend(labels)
        self.places.extend(places)
        self.doubts.extend((np.cumsum(doubts)[list(places)] / (np.array(places) + 1)).tolist())
        self.prompts.extend([prompt] * len(places))

    @property
    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] states and [n] labels."""
        return torch.cat(self.states), float_tensor(self.labels)

    def reported(self, logits: torch.Tensor, control: torch.Tensor, learned: StepExamples) -> dict[str, Any]:
        """How well a head tells beginnings that go wrong, beside what it is compared with.

        Args:
            logits: [n] of these beginnings.
            control: [n] those of the same training on shuffled rewards.
            learned: What it learned from.
        """
        truth, known = float_tensor(self.labels), float_tensor(learned.labels)
        wrong, taught = (truth <= 0.5).tolist(), (known <= 0.5).tolist()

        def ranks(scores: Sequence[float]) -> Measured:
            return figures(scores, wrong, self.prompts)

        own, always = ranks((-logits).tolist()), ranks([0.0] * len(wrong))
        for found, said in ((own, logits), (always, known.mean().logit().expand(len(truth)))):
            found["cross_entropy"] = float(binary_cross_entropy_with_logits(said, truth))
        baselines = {
            "length": ranks(turned(self.places, learned.places, taught)),
            "mean log-probability": ranks(turned(self.doubts, learned.doubts, taught)),
            "always the mean": always,
        }
        return compared(own, baselines, ranks((-control).tolist()))


def labels_of_steps(reward: float, labels: Sequence[float] | None, steps: int, which: str, more: str) -> list[float]:
    """The labels of the steps of a text: its own, or its reward for each. Others than so many are refused."""
    found = [reward] * steps if labels is None else list(labels)
    if len(found) != steps:
        raise SettingsError(f"a text has {steps} steps {which} and {len(found)} labels: {more}")
    return found


def check_rewards(judged: Iterable[tuple[float, Sequence[float] | None]]) -> None:
    """Raise SettingsError where a reward, or the label of a step, is not from 0 to 1."""
    if any(not 0 <= value <= 1 for reward, labels in judged for value in (reward, *(labels or ()))):
        raise SettingsError("a process reward model learns rewards and labels from 0 to 1: scale those of the texts")


def random_head(hidden: int, seed: int) -> dict[str, torch.Tensor]:
    """A head of one inner unit per number it reads, which says nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "inner.weight": normal(generator, hidden, hidden) / hidden**0.5,
        "inner.bias": zeros(hidden),
        "outer.weight": zeros(hidden),
        "outer.bias": torch.zeros((), dtype=torch.float32, device="cpu"),
    }
