"""CALM: a token leaves the model at the first layer that is sure of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from ..core.ask import Ask, Asking, Composed, Scored, score
from ..core.ledger import count
from ..core.needs import Gives, Needs
from ..errors import SettingsError, UnsupportedModel
from ..model.artifact import refuse_other, remembered
from ..model.batch import Segment
from ..model.cache import KVCache
from ..model.config import ModelConfig
from ..model.exits import Exits
from ..model.protocol import LanguageModel, Reader
from ..model.route import Route
from ..model.sites import Intervention, Tap
from ..registry import register
from .base import Source

Confidence = Literal["softmax", "state"]
EXITS = "exits.safetensors"


def softmax_gap(logits: torch.Tensor) -> torch.Tensor:
    """[n] how much likelier the first token is than the second, of logits [n, vocab]."""
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
    needs=("a threshold, or a calibration",),
)
@dataclass(frozen=True)
class CALM(Source):
    """Lets a token leave the model after the first layer that is sure of what follows it; the prompt passes all layers.

    threshold: a token leaves where the confidence is at least this, at the first output position, and 0.9 times this
    at the end of a text of `tokens` tokens, in between as `tau` says. confidence: "softmax", how much likelier the
    first token is than the second, which takes the head once more per check, or "state", how little the last layer
    turned the hidden state (cosine). every: confidence is looked at after so many layers, again and again; 1 in the
    paper. calibration: an `Exits`, or the file or folder of the one that `decodery train calm` made; it settles all of
    these.

    What follows is what the head makes of the state at the exit. The layers above get keys and values of that state, so
    that later tokens find some in every layer; their MLPs are left out. Rows that share a pass with others that have
    not left go on with them, unchanged. Drafts, trees and batches give the text of plain decoding under this source.
    """

    threshold: float | None = None
    confidence: Confidence = "state"
    every: int = 5
    tokens: int = 128
    tau: float = 4.0
    calibration: Exits | str | None = None

    needs = Needs(routes=True)
    gives = Gives()

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.calibration is None):
            raise SettingsError(
                "calm needs either a threshold or a calibration: make one with decodery train calm --out DIR, and name "
                "it, as in calm:calibration=DIR"
            )
        if self.confidence not in get_args(Confidence) or min(self.every, self.tokens) < 1 or not self.tau >= 0:
            raise SettingsError("calm needs softmax or state as confidence, every and tokens >= 1 and tau >= 0")

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        if self.threshold is not None:
            return Leaving(model, self.threshold, self.confidence, self.every, self.tokens, self.tau, len(prompt))
        found = _load(_file(self.calibration)) if isinstance(self.calibration, str) else self.calibration
        assert found is not None
        refuse_other("this calibration", found.model, model, "make one for this one with decodery train calm")
        settings = (found.threshold, found.confidence, found.every, found.tokens, found.tau)
        return Leaving(model, *settings, len(prompt))


def _file(path: str) -> Path:
    whole = Path(path).expanduser()
    return whole / EXITS if whole.is_dir() else whole


@remembered
def _load(path: Path) -> Exits:
    return Exits.load(path)


@dataclass(frozen=True)
class Leaving(Composed):
    """A model whose rows from `prompt_length` on may leave early; the others as in `CALM`."""

    model: LanguageModel
    threshold: float
    confidence: str
    every: int
    tokens: int
    tau: float
    prompt_length: int = field(compare=False)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def new_cache(self) -> KVCache:
        return self.model.new_cache()

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> Asking[Scored]:
        if segment.interventions:
            raise UnsupportedModel("rows that may leave early cannot be changed on their way")
        steps = segment.positions - self.prompt_length + 1
        if not (steps > 0).any():
            # The first token, too, is said by the whole model.
            return (yield from score(self.model, segment, taps, role))
        bound = np.where(steps > 0, thresholds(self.threshold, steps, self.tokens, self.tau), np.inf)
        return (yield from _Walk(self, segment, bound, role or "layers").run())


class _Walk:
    """One segment on its way up. left: [n] bool, the rows that have left; states: [n, hidden] of all rows."""

    def __init__(self, source: Leaving, segment: Segment, bound: np.ndarray, role: str) -> None:
        self.source, self.segment, self.bound, self.role = source, segment, bound, role
        self.left = np.zeros(len(segment), dtype=bool)
        self.states: torch.Tensor | None = None
        self.layers = np.zeros(len(segment), dtype=np.int64)

    def run(self) -> Asking[Scored]:
        """From check to check; the logits of the rows that are wanted."""
        last, first = self.source.config.num_layers, 0
        for end in range(self.source.every, last, self.source.every):
            confidence = yield from self._up(first, end)
            self.layers[~self.left] = end
            self.left |= confidence >= self.bound
            first = end
            if self.left.all():
                break
        self.layers[~self.left] = last
        # Whoever has left leaves keys and values above, and nothing else; if all have, MLPs have nothing to do.
        skip = [f"mlp.{layer}" for layer in range(first, last)] if self.left.all() else []
        (scored,) = yield [self._ask(first, last, self.segment.logit_rows, (), skip)]
        count("layers", int(self.layers[np.isfinite(self.bound)].sum()))
        count("rows", int(np.isfinite(self.bound).sum()))
        return scored

    def _up(self, first: int, end: int) -> Asking[np.ndarray]:
        """Go from one layer to another; the confidence [n] there, 0 for rows that nobody asks about."""
        asked = np.flatnonzero(np.isfinite(self.bound) & ~self.left)
        wide = self.source.confidence == "softmax"
        (scored,) = yield [self._ask(first, end, asked.tolist() if wide else [], (end - 1, end))]
        self.states = scored.hidden[end]
        if wide:
            found = softmax_gap(scored.logits)
        else:
            found = state_similarity(scored.hidden[end - 1][asked], self.states[asked])
        confidence = np.zeros(len(self.segment))
        confidence[asked] = found.cpu().numpy()
        return confidence

    def _ask(
        self, first: int, end: int, logit_rows: Sequence[int] | None, taps: tuple[Tap, ...], skip: Sequence[str] = ()
    ) -> Ask:
        segment = replace(self.segment, logit_rows=logit_rows, interventions=self._held(first, end))
        if self.states is not None:
            segment = replace(segment, tokens=None, states=self.states)
        route = Route(tuple(range(first, end)), frozenset(skip))
        return Ask(self.source.model, segment, taps, self.role, route)

    def _held(self, first: int, end: int) -> tuple[Intervention, ...]:
        """What keeps the states of rows that have left as they were there."""
        if not self.left.any():
            return ()
        assert self.states is not None
        left, states = torch.from_numpy(self.left.copy()).to(self.states.device), self.states

        def hold(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
            return torch.where(left[:, None], states.to(rows.dtype), rows)

        return tuple(Intervention(f"resid_post.{layer}", hold) for layer in range(first, end))
