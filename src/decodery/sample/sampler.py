"""The ordered list of warps a request is sampled with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import NumericalError, SettingsError
from ..registry import resolve
from .base import Context, Stage, Warp
from .epsilon import Epsilon
from .eta import Eta
from .frequency_penalty import FrequencyPenalty
from .logit_bias import LogitBias
from .min_new_tokens import MinNewTokens
from .min_p import MinP
from .no_repeat_ngram import NoRepeatNGram
from .presence_penalty import PresencePenalty
from .repetition_penalty import RepetitionPenalty
from .temperature import Temperature
from .top_k import TopK
from .top_p import TopP
from .typical import Typical

_PENALTIES = (RepetitionPenalty, FrequencyPenalty, PresencePenalty)

ORDERS: dict[str, tuple[type[Warp], ...]] = {
    "default": (
        *(NoRepeatNGram, MinNewTokens, LogitBias, *_PENALTIES),
        *(Temperature, TopK, TopP, MinP, Typical, Epsilon, Eta),
    ),
    "hf": (
        *(LogitBias, *_PENALTIES, NoRepeatNGram, MinNewTokens),
        *(Temperature, TopK, TopP, MinP, Typical, Epsilon, Eta),
    ),
    "vllm": (
        *(NoRepeatNGram, MinNewTokens, LogitBias, *_PENALTIES),
        *(Temperature, MinP, TopK, TopP, Typical, Epsilon, Eta),
    ),
    "llamacpp": (
        *(NoRepeatNGram, MinNewTokens, LogitBias, *_PENALTIES),
        *(TopK, Typical, TopP, MinP, Epsilon, Eta, Temperature),
    ),
}
"""The order in which each stack applies what it has; what it lacks stands where the default has it."""


@dataclass(frozen=True)
class Sampler:
    """Warps in the order they are applied; an empty list samples from the model's own distribution.

    warps: `Warp`s or their texts, such as "top-p:p=0.9". Without a temperature it is 1.
    """

    warps: tuple[Warp, ...] = ()

    def __post_init__(self) -> None:
        given = (self.warps,) if isinstance(self.warps, str | Warp) else self.warps
        resolved = tuple(resolve("sample", warp) for warp in given)
        for warp in resolved:
            if not isinstance(warp, Warp):
                raise SettingsError(f"{warp!r} is not a warp; pass a Warp or a text such as top-p:p=0.9")
        object.__setattr__(self, "warps", resolved)

    @classmethod
    def from_settings(
        cls,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        typical: float = 1.0,
        epsilon: float = 0.0,
        eta: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        no_repeat_ngram: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        min_new_tokens: int = 0,
        eos_ids: Iterable[int] = (),
        order: str = "default",
    ) -> Sampler:
        """The sampler of the usual settings, each at its neutral value but the temperature, which is 0: greedy.

        order: whose order of application, one of `ORDERS`. Under temperature 0 the settings that only shape chance
        (top_k to eta) have no effect. Raises SettingsError for a value out of range.
        """
        if order not in ORDERS:
            raise SettingsError(f"there is no order {order!r}; choose one of {', '.join(ORDERS)}")
        warps: list[Warp] = [
            Temperature(temperature),
            TopK(top_k),
            TopP(top_p),
            MinP(min_p),
            Typical(typical),
            Epsilon(epsilon),
            Eta(eta),
            RepetitionPenalty(repetition_penalty),
            PresencePenalty(presence_penalty),
            FrequencyPenalty(frequency_penalty),
            NoRepeatNGram(no_repeat_ngram),
            LogitBias(tuple((logit_bias or {}).items())),
            MinNewTokens(min_new_tokens, tuple(eos_ids)),
        ]
        ranks = {kind: rank for rank, kind in enumerate(ORDERS[order])}
        active = [warp for warp in warps if not warp.neutral]
        return cls(tuple(sorted(active, key=lambda warp: ranks[type(warp)])))

    @cached_property
    def greedy(self) -> bool:
        """True under temperature 0: the token is the argmax of the law, the lowest id among equals."""
        return any(isinstance(warp, Temperature) and warp.greedy for warp in self.warps)

    @cached_property
    def stateful(self) -> bool:
        """True if any warp remembers something, so that `advance` must be called for every token."""
        return any(warp.stateful for warp in self.warps)

    def law(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        """The distribution each row is drawn from, as unnormalised logits [n, V] float32; -inf is excluded.

        logits: [n, V], the model's own. contexts: the n histories. When greedy, masks and edits only are applied: what
        follows them could not change the argmax, or would by mistake. May return `logits` itself.

        Raises NumericalError if a row is not a distribution: NaN or infinite at its largest entry.
        """
        if len(contexts) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits need as many contexts, not {len(contexts)}")
        logits = logits.float()
        if not bool(logits.amax(dim=-1).isfinite().all()):
            raise NumericalError("the model gave logits that are not a distribution (NaN or infinite values)")
        for index, warp in enumerate(self.warps):
            if self.greedy and warp.stage > Stage.EDIT:
                continue
            logits = warp.warp(logits, _own_states(contexts, index) if warp.stateful else contexts)
        return logits

    def init(self, prompt: Sequence[int]) -> tuple[Any, ...]:
        """The state before the first output token, one entry per warp."""
        return tuple(warp.init(prompt) for warp in self.warps)

    def advance(self, state: tuple[Any, ...], token: int, logprob: float) -> tuple[Any, ...]:
        """The state after `token`, chosen with natural log-probability `logprob` under the model; pure."""
        if not self.stateful:
            return state
        pairs = zip(self.warps, state, strict=True)
        return tuple(warp.advance(own, token, logprob) for warp, own in pairs)


def _own_states(contexts: Sequence[Context], index: int) -> list[Context]:
    """The contexts as warp number `index` sees them."""
    return [Context(each.prompt_length, each.tokens, each.state[index], each.seed) for each in contexts]
