"""CALM: a token leaves the model at the first layer that is sure of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.trained.artifact import refuse_other
from decodery.models.trained.exits import Exits, agreeing
from decodery.step.logits_source import LogitsSource

from .early_exit import GO, LEAVE, Check, Gate, Leaving

Confidence = Literal["softmax", "state", "classifier"]


def softmax_gap(logits: torch.Tensor) -> torch.Tensor:
    """[n] how much more likely the first token is than the second, of logits [n, vocab]."""
    best = logits.double().softmax(dim=-1).topk(2).values
    return best[:, 0] - best[:, 1]


def state_similarity(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """[n] cosine of the hidden states [n, hidden] before and after a layer."""
    return torch.cosine_similarity(before.double(), after.double(), dim=-1)


def thresholds(threshold: float, steps: np.ndarray, tokens: int, tau: float) -> np.ndarray:
    """[n] what has to be reached at each of the output positions `steps` [n] of a text of `tokens` tokens."""
    return threshold * (0.9 + 0.1 * np.exp(-tau * steps / tokens))


@register(
    "calm",
    paper="Confident Adaptive Language Modeling (2022)",
    guarantee="lossy: with a calibrated threshold the mean loss is below its bound, with the probability it was "
    "calibrated for; the model's law where the threshold is out of reach",
    requirements=("a threshold, or a calibration",),
)
@dataclass(frozen=True)
class CALM(LogitsSource):
    """Lets a token leave the model after the first layer that is sure of what follows it.

    The prompt passes all layers. A threshold beside it takes the place of the calibrated one, and of its promise. What
    follows is what the head makes of the state at the exit. The layers above get keys and values of that state, so that
    later tokens find some in every layer; their MLPs are left out. Rows that share a pass with others that have not
    left go on with them, unchanged. Drafts, trees and batches give the text of plain decoding under this source.

    Attributes:
        threshold: A token leaves where the confidence is at least this, at the first output position, and 0.9 times
            this at the end of a text of `tokens` tokens, in between as `tau` says.
        confidence: "softmax", how much more likely the first token is than the second, which takes the head once more
            per check; "state", how little the last layer turned the hidden state (cosine); or "classifier", how likely
            a trained one finds it that the last layer will agree.
        every: Confidence is looked at after so many layers, again and again; 1 in the paper.
        tokens: Length of a text at which the threshold has fallen to 0.9 times its first value.
        tau: How fast the threshold falls; larger is faster.
        calibration: An `Exits`, or the file or folder of the one that `decodery train calm` made; it settles all of
            these, and has the classifier.
    """

    threshold: float | None = None
    confidence: Confidence = "state"
    every: int = 5
    tokens: int = 128
    tau: float = 4.0
    calibration: Exits | str | None = None

    requirements = Requirements(layer_plans=True, changes=True)
    provides = Provides()

    def __post_init__(self) -> None:
        if self.threshold is None and self.calibration is None:
            raise SettingsError(
                "calm needs either a threshold or a calibration: make one with decodery train calm -m MODEL --out DIR, "
                "and name it, as in calm:calibration=DIR"
            )
        if self.confidence == "classifier" and self.calibration is None:
            raise SettingsError(
                "calm has no classifier without a calibration: train one with decodery train calm -m MODEL "
                "--confidence classifier --out DIR, and name it, as in calm:calibration=DIR"
            )
        if self.confidence not in get_args(Confidence) or min(self.every, self.tokens) < 1 or not self.tau >= 0:
            raise SettingsError(
                "calm needs softmax, state or classifier as confidence, every and tokens >= 1 and tau >= 0"
            )

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        if self.calibration is None:
            assert self.threshold is not None
            gate = Sure(self.threshold, self.confidence, self.tokens, self.tau)
            return Leaving(model, gate, self.every, len(prompt))
        found = Exits.load(self.calibration)
        advice = "make one for this one with decodery train calm -m MODEL"
        refuse_other("this calibration", found.model, model, advice)
        if found.classifier is not None and len(found.classifier) != model.config.hidden_size + 1:
            raise UnsupportedModel(f"this calibration's classifier is for states of another width: {advice}")
        threshold = found.threshold if self.threshold is None else self.threshold
        gate = Sure(threshold, found.confidence, found.tokens, found.tau, found)
        return Leaving(model, gate, found.every, len(prompt))


@dataclass(frozen=True)
class Sure(Gate):
    """Lets rows leave that are sure; the settings are those of `CALM`.

    Attributes:
        exits: Where the classifier comes from.
    """

    threshold: float
    confidence: str
    tokens: int
    tau: float
    exits: Exits | None = None

    @property
    def logits(self) -> bool:
        return self.confidence == "softmax"

    def judge(self, check: Check) -> np.ndarray:
        found = self._confidence(check).cpu().numpy()
        return np.where(found >= thresholds(self.threshold, check.steps, self.tokens, self.tau), LEAVE, GO)

    def _confidence(self, check: Check) -> torch.Tensor:
        """[m] how sure the rows of a check are."""
        if self.confidence == "softmax":
            return softmax_gap(check.logits)
        if self.confidence == "state":
            return state_similarity(check.before, check.states)
        assert self.exits is not None and self.exits.classifier is not None
        return agreeing(check.states, self.exits.classifier)
