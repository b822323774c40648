"""What early exits are trained on: the states of texts at the checks, and what the model's head makes of them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decodery.core.errors import SettingsError
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress
from decodery.models.protocol import OpenModel, is_open
from decodery.models.trained.exits import ExitHeads, agreeing, unit

from .corpus import Corpus
from .features import FeatureStore
from .held_out import HeldOut
from .loop import History, TrainingPlan, batches, train
from .tensors import float_tensor, zeros

HELD = 10
"""One text in so many is held out."""
_ROWS = 256


@dataclass(frozen=True, eq=False)
class Places:
    """The places of one text at which a token follows."""

    states: torch.Tensor  # [n, checks, hidden] float32, the residual stream there
    following: torch.Tensor  # [n] int64, the text's next token
    last: torch.Tensor  # [n] int64, the one that the whole model finds most likely


class ExitChecks:
    """The checks of a model that can be left early, and the texts it is seen to read at them."""

    def __init__(self, target: LoadedModel, every: int) -> None:
        can, layers = target.model.capabilities, target.model.config.num_layers
        if not is_open(target.model) or not (can.layer_plans and can.changes):
            raise SettingsError(f"{target.name} cannot be left early: use a model that this package runs itself")
        if not 1 <= every < layers:
            raise SettingsError(f"{target.name} has {layers} layers: look at it after fewer than that, not {every}")
        self.target, self.every = target, every
        self.model: OpenModel = target.model
        self.layers = tuple(range(every, layers, every))

    def __len__(self) -> int:
        return len(self.layers)

    def read(self, corpus: Corpus, out: Path, progress: Progress) -> ExitTexts:
        """The texts of a corpus at these checks; what is read is kept in the folder `out`."""
        corpus.of_vocabulary(self.model.vocab_size, self.target.name)
        return ExitTexts(self, FeatureStore(self.model, corpus, self.layers, out, 1, progress))

    @torch.no_grad()
    def said(self, states: torch.Tensor, heads: ExitHeads | None = None) -> torch.Tensor:
        """[n, checks] int64: the most likely token by the head, corrected where corrections exist.

        States are [n, checks, hidden].
        """
        n, checks, width = states.shape
        flat, numbers = states.reshape(-1, width), np.tile(np.arange(checks), n)
        found = []
        for first in range(0, len(flat), _ROWS):
            normed = self.model.final_norm(flat[first : first + _ROWS].to(self.model.device, self.model.dtype))
            if heads is not None:
                normed = heads.corrected(normed, numbers[first : first + _ROWS])
            found.append(self.model.project(normed).argmax(dim=-1).cpu())
        return torch.cat(found).view(n, checks)


class ExitTexts:
    """Texts as a model reads them, by number.

    Attributes:
        learned, held: The numbers of those to learn from and of those held out.
        known: Of the held-out ones, the half that chooses and the half that is tested.
    """

    def __init__(self, checks: ExitChecks, store: FeatureStore) -> None:
        self.checks, self.store, self.corpus = checks, store, store.corpus
        learned, held = self.corpus.split(HELD)
        self.learned, self.held = ([n for n in part if self._rows(n)] for part in (learned, held))
        if not self.learned or not self.held:
            raise SettingsError(f"{self.corpus.folder} holds too few texts: at least {HELD} are needed")
        self.known = HeldOut.of(self.held, self.corpus.prompts(self.held))

    def __getitem__(self, number: int) -> Places:
        seen = self.store[number]
        rows = self._rows(number)
        following = torch.from_numpy(seen.text.tokens.astype(np.int64))[rows.start + 1 : rows.stop + 1]
        states = torch.stack([seen.states[layer][rows.start : rows.stop] for layer in self.checks.layers], dim=1)
        return Places(states.float(), following, seen.likely[rows.start : rows.stop, 0])

    def _rows(self, number: int) -> range:
        text = self.corpus[number]
        return range(max(text.written - 1, 0), len(text.tokens) - 1)

    def train(
        self,
        parameters: Mapping[str, torch.Tensor],
        loss: Callable[[Sequence[int]], torch.Tensor],
        out: Path,
        *,
        epochs: float,
        batch: int,
        lr: float,
        validations: int = 4,
        seed: int = 0,
        share: float = 1.0,
        **more: Any,
    ) -> History:
        """Let parameters learn from these texts, by a loss of the texts of some numbers.

        Args:
            validations: How often it is validated.
            share: What the loss that validation prints is multiplied by.
            more: What else `loop.train` is given.
        """
        chosen = batches(len(self.learned), batch, seed)
        steps = max(1, round(epochs * len(self.learned) / batch))
        return train(
            parameters,
            lambda step: loss([self.learned[number] for number in chosen(step)]),
            TrainingPlan(steps, lr=lr, validate_every=max(1, steps // validations)),
            out,
            validate=lambda: {"cross_entropy": float(loss(self.known.choosing)) * share},
            metric="cross_entropy",
            **more,
        )

    def said(self, numbers: Sequence[int], heads: ExitHeads | None, progress: Progress) -> dict[int, torch.Tensor]:
        """By number, what is found most likely at the checks of these texts, see `ExitChecks.said`."""
        found: dict[int, torch.Tensor] = {}
        for number in numbers:
            found[number] = self.checks.said(self[number].states, heads)
            progress("looking at the checks", len(found), len(numbers))
        return found


def fit_agreement(reading: ExitTexts, out: Path, *, progress: Progress) -> tuple[torch.Tensor, dict[str, float]]:
    """A classifier, on states at the checks, of whether the head agrees with the last layer.

    A logistic regression [hidden + 1] float32 (`models.trained.exits.agreeing`), both answers counting the same; and of
    held-out texts: how often the head agrees, and how often the regression is right about that, as the mean over both
    answers. Interrupted, it goes on from its checkpoint in `out`.
    """
    said = reading.said([*reading.learned, *reading.held], None, progress)
    agrees = {number: said[number] == reading[number].last[:, None] for number in said}
    share = float(torch.cat([agrees[number].flatten() for number in reading.learned]).float().mean())
    balance = float_tensor([0.5 / max(1 - share, 1e-3), 0.5 / max(share, 1e-3)])
    classifier = zeros(reading[reading.learned[0]].states.shape[-1] + 1).requires_grad_()

    def loss(numbers: Sequence[int]) -> torch.Tensor:
        states = torch.cat([unit(reading[number].states).float().flatten(0, 1) for number in numbers])
        right = torch.cat([agrees[number].flatten() for number in numbers])
        found = states @ classifier[:-1] + classifier[-1]
        return binary_cross_entropy_with_logits(found, right.float(), weight=balance[right.long()])

    settings = {"corpus": reading.corpus.facts, "every": reading.checks.every}
    how: dict[str, Any] = {"settings": settings, "progress": progress, "what": "training a classifier"}
    reading.train({"classifier": classifier}, loss, out, epochs=20, batch=8, lr=3e-3, validations=10, **how)
    found, tested = classifier.detach(), reading.known.tested
    sure = torch.cat([agreeing(reading[number].states, found).flatten() for number in tested]) >= 0.5
    right = torch.cat([agrees[number].flatten() for number in tested])
    balanced = [float((sure[right == each] == each).float().mean()) for each in (False, True) if (right == each).any()]
    return found, {"agreement": float(right.float().mean()), "balanced accuracy": sum(balanced) / len(balanced)}
