"""How much a text may draft in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from decodery.models.protocol import LanguageModel
from decodery.step.draft_batch import JointBudget
from decodery.step.draft_length_policy import Budget
from decodery.step.pass_prices import ROWS, PassPrices, prices_of
from decodery.step.sequence import Sequence


class DraftBudgets:
    """Bounds of drafts, by what is left of the text and by its draft length policy.

    Args:
        model: The target.
        pass_seconds: As in `Budget`; learned from the steps where it is None.
    """

    def __init__(self, model: LanguageModel, pass_seconds: Callable[[int], np.ndarray] | None) -> None:
        self._model, self._given = model, pass_seconds
        self._texts: list[Sequence] = []
        self._seconds: Callable[[int], np.ndarray] | None = pass_seconds
        self._plain_known = True

    @cached_property
    def _prices(self) -> PassPrices:
        return prices_of(self._model)[0]

    def learn(self, rows: int, texts: int, context: float, seconds: float) -> None:
        """A step took so long; see `PassPrices.learn`."""
        if self._given is None:
            self._prices.learn(rows, texts, context, seconds)
            # The next step is priced anew, and texts that end in this one are not held until then.
            self._texts = []

    def joint(self, nodes: int, texts: list[Sequence], context: float) -> JointBudget:
        """How much texts may draft together.

        Args:
            nodes: Of each text at most.
            texts: All that take part in the step.
            context: Tokens of each, on average.
        """
        prices = self._prices if self._given is None else None
        return JointBudget(nodes, texts, context, prices, self._given)

    def of(self, seq: Sequence, nodes: int, texts: list[Sequence]) -> Budget:
        """How much the text may draft in this step, `nodes` at most, beside all `texts` that take part."""
        if self._given is None and self._texts is not texts:
            self._price(texts)
        # The bonus token needs a place too, so a draft is never deeper than what is left but one.
        limit = Budget(
            min(nodes, seq.request.max_draft_tokens),
            seq.remaining - 1,
            len(texts),
            self._seconds,
            measured=self._given is None,
            context=len(seq.tokens),
            plain_known=self._plain_known,
        )
        policy = seq.request.draft_length
        if policy is None or seq.request.drafter is None or seq.remaining <= 1 or seq.position == 0:
            return limit
        if policy.requirements.pauses:
            limit = replace(limit, ask=partial(policy.goes_on, seq))
        return policy.bound(seq, limit, texts)

    def _price(self, texts: list[Sequence]) -> None:
        """What passes of a step of these texts take, by rows."""
        count, prices = max(len(texts), 1), self._prices
        mean = sum(len(seq.tokens) for seq in texts) / count
        self._texts, self._plain_known = texts, prices.knows_plain(count, mean)
        known = prices.seconds(count, mean)[: ROWS - count]
        # Steps have a row of each text at least: what fewer rows take is not read.
        near = np.concatenate((np.full(min(count, ROWS), known[0]), known))[:ROWS] if len(known) else np.ones(ROWS)
        token, least = prices.token_seconds(np.arange(ROWS)), 0.1 * near
        self._seconds = lambda context: np.maximum(near + (context - mean) * token, least)
