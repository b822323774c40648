"""A model with a LoRA adapter that learns by any loss of the log-probabilities of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.compression.base import transformable
from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders.adapters import Adapter
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer

from .adapter import LoRARemaking, adapter_of
from .card import check_folder
from .data import TrainingText
from .held_out import HeldOut
from .loop import TrainingPlan, train
from .remade import Remade
from .training_batch import predictions, whole_batch

HELD = 10
"""One of so many pairs or prompts is held out."""


class AdapterLearner:
    """A model with an adapter that learns.

    Args:
        lm: The model.
        out: The folder of the adapter.
        remaking: What learns.
    """

    def __init__(self, lm: LLM, out: Path, remaking: LoRARemaking) -> None:
        check_folder(out, Adapter.FILE)
        self.lm, self.out, self.remaking = lm, out, remaking
        self.original: Transformer = transformable(lm.model)
        self.remade = Remade(self.original, remaking)

    def text(self, prompt: str, written: str) -> TrainingText:
        """A text after a prompt, with its end."""
        tokenizer = self.lm.tokenizer
        ids = [*tokenizer.encode(written, special=False), *tokenizer.eos_ids[:1]]
        return self.joined(self.lm.encode(prompt), ids)

    def joined(self, prompt: Sequence[int], written: Sequence[int]) -> TrainingText:
        """Token ids as a text to learn from.

        Raises:
            SettingsError: If it does not fit the model's context.
        """
        tokens = np.array([*prompt, *written], dtype=np.int32)
        if len(tokens) > self.original.config.max_positions:
            raise SettingsError(
                f"a text of {len(tokens)} tokens is longer than the model's context of "
                f"{self.original.config.max_positions}: leave it out"
            )
        return TrainingText(tokens, len(prompt))

    def logprobs(
        self, texts: Sequence[TrainingText], *, temperature: float = 1.0, plain: bool = False
    ) -> Sequence[torch.Tensor]:
        """Log-probabilities of what is written in each text, with gradients.

        Args:
            texts: Prompts and what follows them.
            temperature: At which the texts were drawn.
            plain: Without the adapter.
        """
        taught = whole_batch(texts, self.original)
        self.remade.progress_made.written = None
        (found,) = predictions(self.original if plain else self.remade.model, taught)
        if temperature != 1:
            found = (found / temperature).log_softmax(dim=-1)
        each = found.gather(1, taught.likely[:, :1])[: taught.count, 0]
        return each.split([len(text.tokens) - text.written for text in texts])

    def train(
        self,
        loss: Callable[[int], torch.Tensor],
        figures: Callable[[list[Any]], Mapping[str, float]],
        held: Sequence[Any],
        metric: str,
        steps: int,
        lr: float,
        settings: Mapping[str, object],
        command: str,
        progress: Progress,
        *,
        higher: bool = False,
    ) -> dict[str, Any]:
        """Learn, and write the adapter with its report of held-out data, see `HeldOut.report`.

        Args:
            loss: Of a step.
            figures: Of held-out items.
            held: These items.
            metric: The figure that chooses the best step.
            steps: How many.
            lr: Peak learning rate.
            settings: Whatever else a run depends on.
            command: For the facts.
            progress: Called with the steps done.
            higher: Whether the figure is best where it is highest.
        """
        known = HeldOut.of(held)
        with torch.no_grad():
            before = known.measured(figures, metric)
        history = train(
            self.remade.parameters,
            loss,
            TrainingPlan(steps, lr=lr, weight_decay=0.0, validate_every=max(1, steps // 5)),
            self.out / "training",
            validate=lambda: figures(known.choosing),
            metric=metric,
            higher=higher,
            settings={**settings, "form": repr(self.remaking), "model": self.original.fingerprint},
            progress=progress,
        )
        with torch.no_grad():
            report = known.report(known.measured(figures, metric), {"untrained": before}, "items")
        facts = {
            "model": self.lm.name, "made": repr(self.remaking), **settings, "best step": history.best_step,
            "validation": report, "command": command,
        }  # fmt: skip
        adapter_of(self.remade, facts).save(self.out / Adapter.FILE)
        return report
