"""Fit a head that reads rewards from hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decodery.models.loaders.store import Progress
from decodery.models.protocol import LanguageModel
from decodery.scorers.process_reward import ProcessHead

from .evaluation import figures
from .held_out import CONTROL
from .loop import TrainingPlan, batches, train
from .tensors import normal, zeros

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


def reported(
    logits: torch.Tensor,
    control: torch.Tensor,
    truth: torch.Tensor,
    mean: float,
    places: Sequence[int],
    prompts: Sequence[str],
) -> dict[str, Any]:
    """How well a head tells beginnings that go wrong, beside what it is compared with.

    Args:
        logits: [n] of held-out beginnings.
        control: [n] those of the same training on shuffled rewards.
        truth: [n] their rewards.
    """
    wrong, constant = (truth <= 0.5).tolist(), torch.full_like(truth, mean).logit()
    cost = {"cross_entropy": round(float(binary_cross_entropy_with_logits(constant, truth)), 4)}
    return {
        **figures((-logits).tolist(), wrong, prompts),
        "cross_entropy": round(float(binary_cross_entropy_with_logits(logits, truth)), 4),
        "baselines": {"length": figures(places, wrong, prompts), "always the mean": cost},
        CONTROL: figures((-control).tolist(), wrong, prompts),
    }


def random_head(hidden: int, seed: int) -> dict[str, torch.Tensor]:
    """A head of one inner unit per number it reads, which says nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "inner.weight": normal(generator, hidden, hidden) / hidden**0.5,
        "inner.bias": zeros(hidden),
        "outer.weight": zeros(hidden),
        "outer.bias": torch.zeros((), dtype=torch.float32, device="cpu"),
    }
