"""How much a text may draft in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from decodery.models.protocol import LanguageModel
from decodery.step.draft_length_policy import Budget
from decodery.step.pass_cost import CONTEXT, cost_curve
from decodery.step.sequence import Sequence

_COSTED_ROWS = 1024


class DraftBudgets:
    """Bounds of drafts, by what is left of the text and by its draft length policy.

    Args:
        model: The target.
        pass_seconds: As in `Budget`; measured where it is None.
    """

    def __init__(self, model: LanguageModel, pass_seconds: Callable[[int], np.ndarray] | None) -> None:
        self._model = model
        self._costs: tuple[np.ndarray, np.ndarray] | None = None
        self.pass_seconds = pass_seconds or self._measured

    def of(self, seq: Sequence, nodes: int, texts: list[Sequence]) -> Budget:
        """How much the text may draft in this step, `nodes` at most, beside all `texts` that take part."""
        # The bonus token needs a place too, so a draft is never deeper than what is left but one.
        limit = Budget(
            min(nodes, seq.request.max_draft_tokens),
            seq.remaining - 1,
            len(texts),
            self.pass_seconds,
            measured=self.pass_seconds == self._measured,
            context=len(seq.tokens),
        )
        policy = seq.request.draft_length
        if policy is None or seq.request.drafter is None or seq.remaining <= 1 or seq.position == 0:
            return limit
        if policy.requirements.pauses:
            limit = replace(limit, ask=partial(policy.goes_on, seq))
        return policy.bound(seq, limit, texts)

    def _measured(self, context: int) -> np.ndarray:
        """Times of passes over 0, 1, 2, ... rows of this model after `context` tokens; measured when first asked."""
        if self._costs is None:
            curve = cost_curve(self._model)
            rows = np.maximum(np.arange(_COSTED_ROWS), 1)
            self._costs = curve.times_of(rows), curve.token + curve.row_token * rows
        near, token = self._costs
        return near + max(0, context - CONTEXT) * token
