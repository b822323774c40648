"""DEL: the target's first layers draft; how many layers and tokens is chosen anew for every draft."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.topk import logsumexp, topk
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import is_open
from decodery.step.draft_length_policy import Budget, Outlook
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

from .own_layers import OwnLayers, OwnReading

__all__ = ["tokens_per_layer"]

_MATCHED, _UNMATCHED = 0, 1


def tokens_per_layer(
    acceptance: np.ndarray, exits: np.ndarray, layers: int, longest: int, head: float = 0.0
) -> np.ndarray:
    """[n, longest + 1] expected tokens per layer loaded, by exit and number of drafted tokens.

    Drafting d tokens at layer l costs d (l + head), checking layers + head.

    Args:
        acceptance: [n] chance that a token drafted at each of the layers `exits` [n] is right.
        head: What the vocabulary projection costs in layers, 0 as published.
    """
    drafted = np.arange(longest + 1)
    gained = np.cumsum(acceptance[:, None] ** drafted, axis=1)
    return gained / (drafted * (exits[:, None] + head) + layers + head)


@dataclass(slots=True)
class _State:
    """What the exits have been worth, all sums decayed by the step.

    right, asked: [n] how often each exit's token was the target's, of how often. sure, told: [2, n] what probability it
    gave its token where that was right and where it was wrong, of how often. exit: which of the layers drafts now.
    last: the probability that the newest token's distribution gave its most likely token.
    """

    right: np.ndarray
    asked: np.ndarray
    sure: np.ndarray
    told: np.ndarray
    exit: int = 0
    last: float = 1.0
    reading: OwnReading = field(default_factory=OwnReading)

    @classmethod
    def begin(cls, exits: int) -> _State:
        """One right of two, and half of them sure."""
        sure = np.stack((np.ones(exits), np.zeros(exits)))
        return cls(np.ones(exits), np.full(exits, 2.0), sure, np.ones((2, exits)))

    def acceptance(self) -> np.ndarray:
        """[n] share of right tokens by exit."""
        return self.right / self.asked

    def threshold(self) -> float:
        """The confidence halfway between that of right and of wrong tokens at the exit in use."""
        return float((self.sure[:, self.exit] / self.told[:, self.exit]).mean())

    def learn(self, right: np.ndarray, probability: np.ndarray, decay: float) -> None:
        """One step's tokens, both [n, m] by exit and place: whether they were right, and how likely each found its."""
        self.right = decay * self.right + right.sum(axis=1)
        self.asked = decay * self.asked + right.shape[1]
        for kind, those in ((_MATCHED, right), (_UNMATCHED, ~right)):
            self.sure[kind] = decay * self.sure[kind] + (probability * those).sum(axis=1)
            self.told[kind] = decay * self.told[kind] + those.sum(axis=1)


@register(
    "del",
    paper="DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding (2025)",
    guarantee="the output distribution is unchanged",
    lossless=True,
    slower=True,
    requirements=("a model trained to exit early, to be of use",),
)
@dataclass(frozen=True)
class DEL(OwnLayers):
    """Drafts with the target's first layers, its final norm and its head, as many layers as promise most.

    The target reads drafted rows again in the layers that drafted them. That loads no layer more often: the last token
    drafted has to pass them anyway. Before the first step one of two tokens counts as right. Scope: the request;
    memory: forks of the text's cache while it drafts. Cost: a head row per exit and place checked. The published code
    could not be read; prior, threshold and the choice of no token are choices made here.

    Attributes:
        layers: Exits to choose from, by how many layers have run.
        decay: The weight of earlier steps' acceptance after each step, 0 to 1.
        dynamic: Drafts go on up to `length` as long as the exit is surer of the last token than halfway between its
            right and its wrong ones.
        head: What a head call costs in layers, 0 as published; about 8 for a model of 135M parameters.
        length: Most tokens drafted. Before every step the exit and the number of tokens are chosen that give most
            tokens per layer loaded (TPL) at the acceptance seen so far; no token where plain decoding gives more.
            Acceptance is that of shadow tokens: what each exit would have drafted at the places that the last step
            checked, up to the first wrong draft; every step takes the share `decay` of older ones.
    """

    bounds_trees: ClassVar[bool] = True

    layers: tuple[int, ...] = (4, 8, 12)
    decay: float = 0.95
    dynamic: bool = True
    head: float = 0.0
    length: int = field(default=18, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or min(self.layers) < 0 or not 0 <= self.decay <= 1 or not self.head >= 0:
            raise SettingsError("del needs at least one layer, a decay between 0 and 1 and head >= 0")

    @property
    def requirements(self) -> Requirements:
        return Requirements.merged((super().requirements, Requirements(taps=self.layers, parts=True)))

    def start(self, seq: Sequence) -> _State:
        return _State.begin(len(self.layers))

    def layer_plan(self, seq: Sequence) -> LayerPlan:
        state: _State = seq.states[self]
        return LayerPlan(tuple(range(self.layers[state.exit])))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        state: _State = seq.states[self]
        state.exit, length = self.chosen(state.acceptance(), seq.request.model.config.num_layers)
        if self.dynamic and length and self.tree_policy is None:
            budget, length = replace(budget, ask=partial(self._goes_on, state, budget)), self.length
        try:
            tree = yield from super().propose(seq, replace(budget, depth=min(budget.depth, length)))
        finally:
            state.reading.forget()
        count("rows read again", (len(tree) - 1) * self.layers[state.exit])
        return tree

    def chosen(self, acceptance: np.ndarray, layers: int) -> tuple[int, int]:
        """The number of the exit, and how many tokens are to be drafted there."""
        worth = tokens_per_layer(acceptance, np.array(self.layers), layers, self.length, self.head)
        exit, length = np.unravel_index(int(worth.argmax()), worth.shape)
        return int(exit), int(length)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        model, state = seq.request.model, seq.states[self]
        assert is_open(model)
        places = [0, *seen.path][: len(seen.emitted)]
        states = torch.stack([seen.hidden[layer][places] for layer in self.layers])
        said = model.project(model.final_norm(states.flatten(0, 1)))
        ids, most = topk(said, 1)
        shape = len(self.layers), len(places)
        probability = np.exp(most[:, 0] - logsumexp(said, most[:, 0])).reshape(shape)
        state.learn(ids.reshape(shape) == np.array(seen.emitted), probability, self.decay)
        count("shadow rows", ids.size)

    def _goes_on(self, state: _State, budget: Budget, outlook: Outlook) -> ForwardCoroutine[bool]:
        """Whether the last token was sure enough for another one, and the request's own budget agrees."""
        if outlook.drawn and state.last < state.threshold():
            return False
        if not (yield from as_coroutine(budget.goes_on(outlook))):
            return False
        state.last = float((yield from outlook.law()).softmax(dim=-1).max())
        return True
