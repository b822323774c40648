"""A model with a LoRA adapter that learns by any loss of the log-probabilities of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from decodery.compression.base import transformable
from decodery.core.errors import SettingsError
from decodery.models.loaders.adapters import Adapter
from decodery.models.torch.transformer import Transformer

from .adapter import LoRARemaking, adapter_of
from .card import check_folder
from .data import TrainingText
from .fitting import fit
from .held_out import HeldOut
from .kind import Run
from .loop import TrainingPlan
from .remade import Remade
from .training_batch import predictions, whole_batch

HELD = 10
"""One of so many pairs or prompts is held out."""


class AdapterLearner:
    """A model with an adapter that learns."""

    def __init__(self, run: Run) -> None:
        check_folder(run.out, Adapter.FILE)
        self.run, self.lm, self.remaking = run, run.lm, run.of(LoRARemaking)
        self.original: Transformer = transformable(run.lm.model)
        self.remade = Remade(self.original, self.remaking)

    def text(self, prompt: str, written: str) -> TrainingText:
        """A text after a prompt, with its end."""
        tokenizer = self.lm.tokenizer
        ids = [*tokenizer.encode(written, special=False), *tokenizer.eos_ids[:1]]
        return self.joined(self.lm.encode(prompt), ids)

    def joined(self, prompt: Sequence[int], written: Sequence[int]) -> TrainingText:
        """Token ids as a text to learn from."""
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
        """Log-probabilities of what is written in each text, with gradients."""
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
        recipe: Any,
        groups: Sequence[str],
        *,
        higher: bool = False,
        **data: Any,
    ) -> dict[str, Any]:
        """Learn, and write the adapter with its report of held-out data, see `HeldOut.report`.

        Args:
            groups: The prompts of what is held out.
        """
        form = repr(self.remaking)
        fitted = fit(
            self.run,
            HeldOut.of(held, groups),
            self.remade.parameters,
            loss,
            figures,
            TrainingPlan(recipe.steps, lr=recipe.lr, weight_decay=0.0, validate_every=max(1, recipe.steps // 5)),
            metric=metric,
            unit="items",
            higher=higher,
            settings={**data, "recipe": asdict(recipe), "form": form, "model": self.original.fingerprint},
        )
        adapter_of(self.remade, fitted.facts(recipe, made=form, **data)).save(self.run.out / Adapter.FILE)
        return fitted.report
