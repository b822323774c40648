"""Associative recall: a small model that is trained here and answers what stood after a letter, under each policy."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.step.cache_policy import CachePolicy
from decodery_benchmarks.monitors import recall

from .bounds import Oracle
from .measure import Reading
from .settings import WHOLE

_CASES = 48


@dataclass
class Recall:
    """Texts of letters and figures that end in a letter which stood there before, always with the same figure."""

    seed: int
    progress: Progress
    _model: Transformer | None = field(default=None, init=False)
    _cases: list[tuple[list[int], int]] = field(default_factory=list, init=False)

    def of(self, kv: CachePolicy) -> dict[str, list[int]]:
        """How many of those that the full cache solves, the last letter known when the prompt is compressed or not."""
        if self._model is None:
            self._model = recall._trained(self.seed, self.progress)
            texts, values, seen = recall._asked(2 * _CASES, self.seed)
            every = zip(texts.tolist(), values.tolist(), seen.tolist(), strict=True)
            cases = [(text, value) for text, value, there in every if there]
            self._cases = [case for case in cases if self._right(None, case, known=True)]
        if getattr(kv, "budget", 0) == WHOLE:
            return {}
        return {
            f"recall {mode}": [sum(self._right(kv, case, known=known) for case in self._cases), len(self._cases)]
            for mode, known in (("known", True), ("unknown", False))
        }

    @torch.no_grad()
    def _right(self, kv: CachePolicy | None, case: tuple[list[int], int], *, known: bool) -> bool:
        assert self._model is not None
        text, value = case
        if isinstance(kv, Oracle):
            place = max(at for at in range(0, len(text) - 1, 2) if text[at] == text[-1])
            kv = Oracle(kv.budget, (place, place + 2))
        _, logits = Reading(self._model).start(kv, text, len(text) if known else len(text) - 1)
        return int(logits[-1].argmax()) == value
