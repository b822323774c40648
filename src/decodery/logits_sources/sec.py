"""SEC: a token exits the model at the first layer that predicts it, and a text that becomes wrong is ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingMissing, SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides, Requirements
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.trained.artifact import refuse_other
from decodery.models.trained.exits import EXIT, STOP, ExitHeads
from decodery.step.logits_source import LogitsSource

from .early_exit import END, GO, LEAVE, Check, Gate, Leaving

_TRAIN = "train some with decodery train sec -m MODEL FILES --out DIR, and name them, as in sec:heads=DIR"


@register(
    "sec",
    paper="When Neural Code Completion Models Size up the Situation: Cheaper and Faster Completion through Dynamic "
    "Model Inference (2024)",
    guarantee="lossy: quality is traded for layers, and texts may end early; the model's distribution if both "
    "thresholds are at least 1",
    requirements=("trained heads",),
)
@dataclass(frozen=True)
class SEC(LogitsSource):
    """Lets a token exit where a classifier predicts that the layer is enough; ends wrong texts.

    The first token is predicted by the whole model. Layers after an exit compute keys and values from its state, as in
    `calm`. The method is meant for short completions of about 10 tokens. A request that ignores end tokens continues
    after one. Drafts, trees and batches give the text of plain decoding under this source. The paper has no default
    thresholds: it evaluates 0, 0.5 and 0.6 to 0.999 for both. Cost: three dot products of the hidden size per check,
    and one head per token, at any exit.

    Attributes:
        heads: An `ExitHeads`, or the file or folder that `decodery train sec` wrote. It has a classifier of three
            classes (stop, exit, continue), shared by all checks, and a low-rank correction of the model's head for each
            check.
        t_exit: A row exits where exit is the most likely class and its probability is above this; at 1 no row does.
        t_stop: A row ends the text with the model's end token where stop is the most likely class and its probability
            is above this; at 1 no row does.
    """

    heads: ExitHeads | str | None = None
    t_exit: float = 0.9
    t_stop: float = 0.9

    requirements = Requirements(layer_plans=True, changes=True)
    provides = Provides()

    def __post_init__(self) -> None:
        if not (self.t_exit >= 0 and self.t_stop >= 0):
            raise SettingsError("sec needs t_exit and t_stop of at least 0")
        if self.heads is None:
            raise SettingMissing(f"sec needs trained heads: {_TRAIN}")

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        heads = ExitHeads.load(self.heads)
        refuse_other("these heads", heads.model, model, _TRAIN)
        if not heads.fits(model.config.num_layers, model.config.hidden_size):
            raise UnsupportedModel(f"these heads were made for a model of another shape: {_TRAIN}")
        if not model.config.eos_ids and self.t_stop < 1:
            raise UnsupportedModel("this model has no token that ends a text: give sec t_stop=1")
        end = model.config.eos_ids[0] if model.config.eos_ids else None
        return Leaving(model, Sized(self.t_exit, self.t_stop, heads), heads.every, len(prompt), heads, end)


@dataclass(frozen=True)
class Sized(Gate):
    """Decides by the most likely class where its probability is above the threshold of `SEC`."""

    t_exit: float
    t_stop: float
    heads: ExitHeads

    def judge(self, check: Check) -> np.ndarray:
        likely, best = (each.cpu().numpy() for each in self.heads.classes(check.states).max(dim=-1))
        ends = (best == STOP) & (likely > self.t_stop)
        leaves = (best == EXIT) & (likely > self.t_exit)
        return np.select([ends, leaves], [END, LEAVE], GO)
