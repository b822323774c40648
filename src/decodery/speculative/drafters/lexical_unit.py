"""Lexical units: placeholders after the text show which further tokens the model is already sure of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.loaders.drafts import UNITS
from decodery.models.trained.placeholders import Placeholders
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.sequence import Sequence


@dataclass(slots=True)
class _State:
    """placeholders: [span - 1, hidden], on the model's device.

    unit: tokens expected after the last token; logs: the log-probability each was expected with.
    """

    placeholders: torch.Tensor
    unit: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)


@register(
    "lexical-unit",
    paper="Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs (2024)",
    guarantee="the output distribution is unchanged under lossless rules; the rule lexical-unit accepts whole units",
    lossless=True,
    slower=True,
    requirements=("trained placeholders",),
)
@dataclass(frozen=True)
class LexicalUnit(Drafter):
    """Feeds placeholders after the draft and drafts what the model predicts there while confident.

    The tokens found in one pass are fed by the next one anyway, so checking them there costs nothing: under lossless
    rules a unit is a draft, and a low beta only costs rows. The published decoding, which emits a unit unchecked and
    asks for a high one, is the rule "lexical-unit". Placeholders stand after every token that may be the last one
    accepted, so that every pass finds a unit: up to (span + 1) (span - 1) rows. The paper fine-tunes the model; here
    placeholders alone are learned, and the model stays as it is. Scope: the request; memory: one unit.

    Attributes:
        span: Most tokens of a unit (k): the model says the first, up to span - 1 placeholders the others.
        beta: A unit ends before the first token whose probability is lower, or which repeats what stands right before
            it.
        units: `Placeholders`, or the file or folder of those that `decodery train lexical-units` made; None: those that
            come with this package for the embedded model.
    """

    requirements = Requirements(trees=True, states=True)

    span: int = 4
    beta: float = 0.1
    units: Placeholders | str | None = None

    def __post_init__(self) -> None:
        if self.span < 2 or not self.beta >= 0:
            raise SettingsError("lexical-unit needs span >= 2 and beta >= 0")

    def largest(self) -> int:
        # A unit, and placeholders after each of the tokens that may be the last one accepted.
        return self.span * self.span - 1

    def start(self, seq: Sequence) -> _State:
        found = Placeholders.load_or_shipped(
            self.units, seq.request.model, file=UNITS, setting="lexical-unit:units", command="lexical-units"
        )
        found.check(seq.request.model.config)
        if len(found.data) < self.span - 1:
            raise SettingsError(
                f"a span of {self.span} needs {self.span - 1} placeholders and there are {len(found.data)}: lower "
                f"span, or train more with decodery train lexical-units -m MODEL --span {self.span}"
            )
        return _State(found.data[: self.span - 1].to(seq.request.model.device))

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        state: _State = seq.states[self]
        known = DraftTree.chain(seq.last_token, state.unit, logq=np.array([0.0, *state.logs]))
        tree = known.with_mask_nodes(np.full(len(known), self.span - 1), state.placeholders)
        return tree.prune((np.arange(len(tree)) <= budget.nodes) & (tree.depths <= budget.depth))

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        state: _State = seq.states[self]
        state.unit, state.logs = [], []
        read = [seq.tokens[-1]]
        for node in seen.tree.asked(seen.path[-1] if seen.path else 0):
            token, log = _expected(seen, node)
            if log < math.log(self.beta or 1e-300) or _repeats([*read, token]):
                return
            read.append(token)
            state.unit.append(token)
            state.logs.append(log)


def _expected(seen: VerificationFeedback, node: int) -> tuple[int, float]:
    """The token the model finds most likely after `node`, and its log-probability."""
    (token,) = seen.most_likely([node])
    # In numpy, which wakes no threads between two passes.
    row = seen.logits[node].cpu().numpy()
    return token, -math.log(float(np.exp(row - row[token]).sum()))


def _repeats(tokens: list[int]) -> bool:
    """Whether the end of `tokens` stands twice in a row."""
    return any(tokens[-n:] == tokens[-2 * n : -n] for n in range(1, len(tokens) // 2 + 1))
