"""Lexical units: placeholders behind the text show which further tokens the model is already sure of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..budget.base import Budget
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..errors import SettingsError
from ..registry import register
from .base import Drafter, Observation


@dataclass(slots=True)
class _State:
    """unit: tokens expected behind the pending one; logs: the log-probability each was expected with."""

    unit: list[int]
    logs: list[float]


@register(
    "lexical-unit",
    paper="Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs (2024)",
    guarantee="the law of the output is unchanged under lossless rules; the rule lexical-unit trusts the units instead",
    lossless=True,
    needs=("a model trained on its placeholder", "logits of rejected rows"),
)
@dataclass(frozen=True)
class LexicalUnit(Drafter):
    """Feeds placeholders behind the draft and drafts next what the model expects in their place, while it is sure.

    span: most tokens of a unit (k), so span - 1 placeholders a pass. beta: a unit ends before the first token whose
    probability is lower, or which repeats what stands right before it. placeholder: the token id fed in place of
    tokens not known yet; None is an end-of-text token. The tokens found in one pass are fed by the next one anyway, so
    checking them there costs nothing: under the lossless rules a unit is a draft. The published decoding, which emits a
    unit unchecked, is the rule "lexical-unit". What a model never trained on placeholders expects in their place is
    poor: the paper fine-tunes it. Scope: the request; memory: one unit.
    """

    span: int = 4
    beta: float = 0.9
    placeholder: int | None = None

    def __post_init__(self) -> None:
        if self.span < 2 or not self.beta >= 0 or (self.placeholder is not None and self.placeholder < 0):
            raise SettingsError("lexical-unit needs span >= 2, beta >= 0 and a placeholder >= 0")

    def largest(self) -> int:
        return 2 * (self.span - 1)

    def start(self, seq: Sequence) -> _State:
        if self.placeholder is not None and self.placeholder >= seq.vocab_size:
            raise SettingsError(f"the placeholder {self.placeholder} is outside the vocabulary of {seq.vocab_size}")
        return _State([], [])

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        state: _State = seq.draft_state
        length = min(budget.nodes, budget.depth)
        drafted = state.unit + [self._placeholder(seq)] * (self.span - 1)
        logq = np.array([0.0, *state.logs, *[-math.inf] * (self.span - 1)])
        return TokenTree.chain(seq.pending, drafted[:length], logq=logq[: length + 1])

    def observe(self, seq: Sequence, seen: Observation) -> None:
        state: _State = seq.draft_state
        node: int | None = 0
        confirmed = len(seen.emitted) == len(state.unit) + 1
        for token in state.unit:
            node = None if node is None else seen.tree.child(node, token)
            confirmed = confirmed and node in seen.path
        state.unit, state.logs = [], []
        if not confirmed:
            # The placeholders stood behind tokens that did not come true.
            return
        read = [seq.tokens[-1]]
        while len(read) < self.span:
            node = None if node is None else seen.tree.child(node, self._placeholder(seq))
            if node is None:
                return
            token, log = _expected(seen, node)
            if log < math.log(self.beta or 1e-300) or _repeats([*read, token]):
                return
            read.append(token)
            state.unit.append(token)
            state.logs.append(log)

    def _placeholder(self, seq: Sequence) -> int:
        return min(seq.eos_ids, default=0) if self.placeholder is None else self.placeholder


def _expected(seen: Observation, node: int) -> tuple[int, float]:
    """The token the model finds likeliest after `node`, and its log-probability."""
    (token,) = seen.likeliest([node])
    # In numpy, which wakes no threads between two passes.
    row = seen.logits[node].cpu().numpy()
    return token, -math.log(float(np.exp(row - row[token]).sum()))


def _repeats(tokens: list[int]) -> bool:
    """Whether the end of `tokens` stands twice in a row."""
    return any(tokens[-n:] == tokens[-2 * n : -n] for n in range(1, len(tokens) // 2 + 1))
