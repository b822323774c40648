"""CALM: a token exits the model at the first layer whose prediction is confident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from decodery.core.errors import SettingMissing, SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.trained.artifact import refuse_other
from decodery.models.trained.exits import Exits, agreeing
from decodery.step.logits_source import LogitsSource

from .early_exit import GO, LEAVE, Check, Gate, Leaving

Confidence = Literal["softmax", "state", "classifier"]


def softmax_gap(logits: torch.Tensor) -> torch.Tensor:
    """[n] difference in probability between the two most likely tokens, from logits [n, vocab]."""
    best = logits.double().softmax(dim=-1).topk(2).values
    return best[:, 0] - best[:, 1]


def state_similarity(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """[n] cosine of the hidden states [n, hidden] before and after a layer."""
    return torch.cosine_similarity(before.double(), after.double(), dim=-1)


def thresholds(threshold: float, steps: np.ndarray, tokens: int, tau: float) -> np.ndarray:
    """[n] confidence that is needed at the output positions `steps` [n] of a text of `tokens` tokens."""
    return threshold * (0.9 + 0.1 * np.exp(-tau * steps / tokens))


@register(
    "calm",
    paper="Confident Adaptive Language Modeling (2022)",
    guarantee="lossy: with a calibrated threshold the mean loss is below its bound, with the probability it was "
    "calibrated for; the model's distribution where the threshold is never reached",
    requirements=("a threshold, or a calibration",),
)
@dataclass(frozen=True)
class CALM(LogitsSource):
    """Lets a token exit the model after the first layer whose prediction of the next token is confident.

    The prompt passes all layers. At the exit, the head computes the logits from the hidden state. Later layers compute
    keys and values from that state, so that later tokens find some in every layer; their MLPs are skipped. If other
    rows of the pass have not exited, the state passes through their layers unchanged. Drafts, trees and batches give
    the text of plain decoding under this source. A threshold that is given beside a calibration replaces the calibrated
    one, and its guarantee is lost.

    Attributes:
        threshold: Confidence from which a token exits at the first output position. It decreases to 0.9 times this
            value at the end of a text of `tokens` tokens, as fast as `tau` sets.
        confidence: How confidence is measured. "softmax": the difference in probability between the two most likely
            tokens, which computes the head at every check. "state": the cosine of the hidden states before and after
            the last layer. "classifier": a trained classifier's probability that the last layer will agree.
        every: Confidence is checked after every this many layers; 1 in the paper.
        tokens: Length of a text at which the threshold has decreased to 0.9 times its first value.
        tau: How fast the threshold decreases; larger is faster.
        calibration: An `Exits`, or the file or folder that `decodery train calm` wrote; it sets all of these, and
            contains the classifier.
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
            raise SettingMissing(
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
                "calm: confidence must be softmax, state or classifier, every and tokens at least 1, tau at least 0"
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
    """The exit rule of `CALM`; its settings are those of `CALM`.

    Attributes:
        exits: The calibration with the classifier.
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
        """[m] confidence of the rows of a check."""
        if self.confidence == "softmax":
            return softmax_gap(check.logits)
        if self.confidence == "state":
            return state_similarity(check.before, check.states)
        assert self.exits is not None and self.exits.classifier is not None
        return agreeing(check.states, self.exits.classifier)
