"""DRY: a token that would go on repeating the text is penalised, exponentially in the length of the repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from decodery.core.registry import register

from .history import Repeats
from .logits_processor import Context, LogitsProcessor, Stage, require_count, require_number

_LARGEST = 88.7228391
"""Logarithm of the largest float32, the upper limit of a penalty's exponent."""


@register("dry", guarantee="lossy; multiplier=0 is the identity")
@dataclass(frozen=True)
class DRY(LogitsProcessor):
    """Penalises tokens that would extend a repetition of n tokens by multiplier * base ** (n - allowed).

    Repetitions of prompt and output count; shorter ones than `allowed` are not penalised. The time per position grows
    with the number of occurrences of its last token. As in llama.cpp (2024).

    Attributes:
        multiplier: Size of the penalty, in logits.
        base: How fast the penalty grows with the length of a repetition.
        allowed: Length from which a repetition is penalised.
        window: Number of last tokens that are searched, None for all.
        breakers: Token ids that end a repetition and are never penalised, usually those whose text has a newline, a
            colon, a quotation mark or an asterisk; `LLM.request` and the command line find them in the vocabulary.
    """

    multiplier: float = 0.8
    base: float = 1.75
    allowed: int = 2
    window: int | None = None
    breakers: tuple[int, ...] = ()
    stage = Stage.EDIT
    stateful = True
    hears_logprobs = False

    def __post_init__(self) -> None:
        require_number("the multiplier of dry", self.multiplier, least=0.0)
        require_number("the base of dry", self.base, least=1.0)
        require_number("the allowed length of dry", self.allowed, least=1)
        require_count("the allowed length of dry", self.allowed)
        if self.window is not None:
            require_count("the window of dry", self.window)
        object.__setattr__(self, "breakers", tuple(self.breakers))
        for token in self.breakers:
            require_count("a breaker of dry", token)

    @property
    def neutral(self) -> bool:
        return self.multiplier == 0.0 or self.window == 0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        fined = [self._fines(context.state, logits.shape[-1]) for context in contexts]
        if not any(len(ids) for ids, _ in fined):
            return logits
        rows = np.repeat(np.arange(len(fined)), [len(ids) for ids, _ in fined])
        places = rows * logits.shape[-1] + np.concatenate([ids for ids, _ in fined])
        fines = torch.from_numpy(np.concatenate([fines for _, fines in fined])).to(logits)
        flat = logits.reshape(-1).index_add(0, torch.from_numpy(places).to(logits.device), -fines)
        return flat.view_as(logits)

    def init(self, prompt: Sequence[int]) -> Repeats:
        since = next((n for n, token in enumerate(reversed(prompt)) if token in self._breaking), None)
        return Repeats.of(prompt, most=since)

    def advance(self, state: Repeats, token: int, logprob: float) -> Repeats:
        return state.add(token).broken() if token in self._breaking else state.add(token)

    @cached_property
    def _breaking(self) -> frozenset[int]:
        return frozenset(self.breakers)

    def _fines(self, seen: Repeats, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and their penalties, float64."""
        if self.window is not None:
            seen = seen.within(self.window)
        ids, lengths = seen.followers(self.allowed)
        free = np.array([token < vocab_size and token not in self._breaking for token in ids.tolist()], dtype=bool)
        ids, exponents = ids[free], lengths[free] - self.allowed
        if self.base > 1.000001:
            exponents = np.minimum(exponents, int(_LARGEST / math.log(self.base)))
        return ids, self.multiplier * np.power(float(self.base), exponents)
