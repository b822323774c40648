"""ORPO: an adapter learns chosen texts, and that they are more likely than rejected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from decodery.core.errors import SettingsError
from decodery.models.loaders.adapters import Adapter

from .adapter import LoRARemaking
from .adapter_learner import HELD, AdapterLearner
from .data import TrainingText
from .held_out import hold_out
from .kind import ARGUMENT, NON_NEGATIVE, Bounded, Data, Run, bounded, kind, option
from .lines import read_texts
from .loop import batches, content


@dataclass(frozen=True)
class ORPORecipe(Bounded):
    """How pairs are learned."""

    weight: float = bounded(0.1, NON_NEGATIVE, "Weight of the odds, 0.2 in SPARE. 0: learn the chosen texts alone.")
    steps: int = 200
    batch: int = option(4, "Pairs of a step.")
    lr: float = 1e-4
    seed: int = option(0, "Random seed of the trained weights and the order.")


def orpo(better: torch.Tensor, worse: torch.Tensor, weight: float) -> torch.Tensor:
    """[n] losses of pairs of texts, by the mean log-probabilities [n] of their tokens (ORPO, 2024)."""
    return -better - weight * logsigmoid(_log_odds(better) - _log_odds(worse))


def _log_odds(means: torch.Tensor) -> torch.Tensor:
    # Of what is all but sure the odds are bounded, as they have no gradient otherwise.
    means = means.clamp(max=-1e-6)
    return means - torch.log(-torch.expm1(means))


def train_orpo(run: Run, pairs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Train an adapter on prompts, chosen and rejected texts. One prompt in ten is held out.

    It is left in the folder of the run.

    Returns:
        Of held-out pairs that chose nothing the `loss` and the share whose chosen text is more likely per token
        (`preferred`), see `HeldOut.report`.
    """
    recipe, learner = run.of(ORPORecipe), AdapterLearner(run)
    texts = [(learner.text(prompt, chosen), learner.text(prompt, rejected)) for prompt, chosen, rejected in pairs]
    # Pairs of one prompt have texts in common.
    split = hold_out([prompt for prompt, _, _ in pairs], HELD)
    learned, held = ([texts[at] for at in part] for part in split)
    if not held:
        raise SettingsError(f"orpo learns from pairs of 2 prompts or more, not from {len(texts)} of one")
    batch = batches(len(learned), min(recipe.batch, len(learned)), recipe.seed)

    def means(found: Sequence[tuple[TrainingText, TrainingText]]) -> tuple[torch.Tensor, torch.Tensor]:
        each = torch.stack([logs.mean() for logs in learner.logprobs([text for pair in found for text in pair])])
        return each[::2], each[1::2]

    def loss(step: int) -> torch.Tensor:
        return orpo(*means([learned[int(number)] for number in batch(step)]), recipe.weight).mean()

    def figures(some: Sequence[tuple[TrainingText, TrainingText]]) -> dict[str, float]:
        # Logits of all held-out pairs at once might not fit.
        parts = [means(some[first : first + recipe.batch]) for first in range(0, len(some), recipe.batch)]
        better, worse = (torch.cat(each) for each in zip(*parts, strict=True))
        losses = orpo(better, worse, recipe.weight)
        return {"loss": float(losses.mean()), "preferred": float((better > worse).float().mean())}

    return learner.train(
        *(loss, figures, held, "loss", recipe, [pairs[at][0] for at in split[1]]),
        pairs=len(pairs),
        data=content([list(pairs), split]),
    )


@dataclass(frozen=True)
class Preferences(Data):
    """Pairs of texts."""

    pairs: Path = field(default=Path(), metadata=ARGUMENT)


@kind(
    "The adapter is ready: --logits-source adapter:file={out}",
    (Preferences(), ORPORecipe(), LoRARemaking()),
    "pairs.jsonl -m MODEL --out adapter",
    model="to tune",
    file=Adapter.FILE,
    without=("masked",),
)
def _orpo(run: Run) -> Mapping[str, Any]:
    """Train a LoRA adapter of MODEL on PAIRS of a chosen and a rejected text (ORPO).

    PAIRS holds one JSON object a line: {"prompt": ..., "chosen": ..., "rejected": ...}. One prompt in ten is
    held out.
    """
    return train_orpo(run, read_texts(run.of(Preferences).pairs, "prompt", "chosen", "rejected"))
