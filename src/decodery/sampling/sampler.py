"""The sampler: the ordered list of logits processors of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from decodery.core.errors import NumericalError, SettingsError
from decodery.core.noise import gumbel_argmax
from decodery.core.registry import method_of, resolve
from decodery.core.requirements import Requirements
from decodery.core.threads import one_thread
from decodery.core.topk import argmax

from .constraint import Constraint, constrained
from .dry import DRY
from .epsilon import Epsilon
from .eta import Eta
from .frequency_penalty import FrequencyPenalty
from .logit_bias import LogitBias
from .logits_processor import Context, LogitsProcessor, Stage
from .min_new_tokens import MinNewTokens
from .min_p import MinP
from .mirostat import Mirostat
from .no_repeat_ngram import NoRepeatNGram
from .presence_penalty import PresencePenalty
from .repetition_penalty import RepetitionPenalty
from .temperature import Temperature
from .top_h import TopH
from .top_k import TopK
from .top_p import TopP
from .typical import Typical
from .xtc import XTC

__all__ = ["ORDERS", "Sampler"]

_NO_LAW = (
    "the model's logits are not a distribution (NaN or infinite); check the weights, or load the model with "
    "dtype='float32'"
)
_PENALTIES = (RepetitionPenalty, FrequencyPenalty, PresencePenalty, DRY)

CHANCE: dict[str, Any] = {
    **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical": 1.0, "epsilon": 0.0, "eta": 0.0},
    **{"top_h": None, "xtc": 0.0, "mirostat": 0},
}
"""Settings that only matter where tokens are drawn, and their neutral values."""
ORDERS: dict[str, tuple[type[LogitsProcessor], ...]] = {
    "default": (
        *(NoRepeatNGram, MinNewTokens, LogitBias, *_PENALTIES),
        *(Temperature, TopK, TopP, MinP, Typical, Epsilon, Eta, TopH, XTC, Mirostat),
    ),
    "hf": (
        *(LogitBias, *_PENALTIES, NoRepeatNGram, MinNewTokens),
        *(Temperature, TopH, TopK, TopP, MinP, Typical, Epsilon, Eta, XTC, Mirostat),
    ),
    "vllm": (
        *(NoRepeatNGram, MinNewTokens, LogitBias, *_PENALTIES),
        *(Temperature, MinP, TopK, TopP, Typical, Epsilon, Eta, TopH, XTC, Mirostat),
    ),
    "llamacpp": (
        *(NoRepeatNGram, MinNewTokens, LogitBias, *_PENALTIES),
        *(TopK, Typical, TopP, MinP, Epsilon, Eta, TopH, XTC, Temperature, Mirostat),
    ),
}
"""Order of processors in other libraries; processors that a library lacks are placed as in the default order."""


@dataclass(frozen=True, init=False)
class Sampler:
    """Logits processors in order of application; an empty list samples the model's own distribution.

    Without a temperature processor, the temperature is 1.

    Attributes:
        processors: `LogitsProcessor`s or their texts, such as "top-p:p=0.9".
    """

    processors: tuple[LogitsProcessor, ...]

    def __init__(self, processors: LogitsProcessor | str | Iterable[LogitsProcessor | str] = ()) -> None:
        given = (processors,) if isinstance(processors, str | LogitsProcessor) else processors
        resolved = tuple(resolve("logits-processor", processor) for processor in given)
        for processor in resolved:
            if not isinstance(processor, LogitsProcessor):
                raise SettingsError(
                    f"{processor!r} is not a processor; pass a LogitsProcessor or a text such as top-p:p=0.9"
                )
        object.__setattr__(self, "processors", resolved)

    @classmethod
    def from_settings(
        cls,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical: float | None = None,
        epsilon: float | None = None,
        eta: float | None = None,
        top_h: float | None = None,
        xtc: float | None = None,
        xtc_threshold: float | None = None,
        mirostat: int | None = None,
        mirostat_tau: float | None = None,
        mirostat_eta: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        dry: float | None = None,
        dry_base: float | None = None,
        dry_allowed: int | None = None,
        dry_window: int | None = None,
        dry_breakers: Iterable[int] | None = None,
        no_repeat_ngram: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        min_new_tokens: int | None = None,
        eos_ids: Iterable[int] = (),
        order: str | None = None,
    ) -> Sampler:
        """Make the sampler of the usual settings; None leaves a processor out, and a temperature of None is 0.

        At temperature 0 (greedy), the settings that only matter where tokens are drawn (top_k to mirostat) have no
        effect.

        Args:
            temperature: 0 or None for greedy decoding; 1 samples from the model's distribution.
            top_k: See `top-k`.
            top_p: See `top-p`.
            min_p: See `min-p`.
            typical: Mass of `typical`.
            epsilon: Cutoff of `epsilon`.
            eta: Cutoff of `eta`.
            top_h: Alpha of `top-h`.
            xtc: Probability of `xtc`.
            xtc_threshold: Threshold of `xtc`; it needs `xtc`.
            mirostat: Version of `mirostat`, 0 for none.
            mirostat_tau: See `mirostat`; it needs `mirostat`.
            mirostat_eta: See `mirostat`; it needs `mirostat`.
            repetition_penalty: A factor above 0; 1 leaves logits as they are.
            presence_penalty: In logits, once per token that has occurred.
            frequency_penalty: In logits, per occurrence of a token.
            dry: Multiplier of `dry`.
            dry_base: See `dry`; it needs `dry`.
            dry_allowed: See `dry`; it needs `dry`.
            dry_window: See `dry`; it needs `dry`.
            dry_breakers: See `dry`; it needs `dry`.
            no_repeat_ngram: Size of n-grams that must not occur twice; 0 for none.
            logit_bias: Logits to add, by token id.
            min_new_tokens: Tokens before which no end token is chosen.
            eos_ids: End tokens, for `min_new_tokens`.
            order: Order of application, one of `ORDERS`; None is "default".

        Raises:
            SettingsError: If a value is out of range, if mirostat is combined with other truncations, or if a setting
                such as `dry_base` is given without its processor.
        """
        if order is None:
            order = "default"
        if order not in ORDERS:
            raise SettingsError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
        settings: dict[Callable[[Any], LogitsProcessor], Any] = {
            Temperature: 0.0 if temperature is None else temperature,
            TopK: top_k,
            TopP: top_p,
            MinP: min_p,
            Typical: typical,
            Epsilon: epsilon,
            Eta: eta,
            TopH: top_h,
            RepetitionPenalty: repetition_penalty,
            PresencePenalty: presence_penalty,
            FrequencyPenalty: frequency_penalty,
            NoRepeatNGram: no_repeat_ngram,
            LogitBias: logit_bias,
        }
        processors = [make(value) for make, value in settings.items() if value is not None]
        processors.append(MinNewTokens(min_new_tokens or 0, tuple(eos_ids)))
        processors += _set_up(XTC, "xtc", probability=xtc, threshold=xtc_threshold)
        processors += _set_up(Mirostat, "mirostat", version=mirostat or None, tau=mirostat_tau, eta=mirostat_eta)
        breakers = None if dry_breakers is None else tuple(dry_breakers)
        processors += _set_up(
            *(DRY, "dry"), multiplier=dry, base=dry_base, allowed=dry_allowed, window=dry_window, breakers=breakers
        )
        rank = ORDERS[order].index
        processors = sorted(
            (processor for processor in processors if not processor.neutral),
            key=lambda processor: rank(type(processor)),
        )
        truncations = [
            method
            for processor in processors
            if processor.stage == Stage.TRUNCATION and (method := method_of(processor))
        ]
        if mirostat and len(truncations) > 1:
            raise SettingsError(f"mirostat takes the place of every other truncation: leave out {truncations[0].name}")
        return cls(processors)

    @cached_property
    def greedy(self) -> bool:
        """Whether the token is the argmax, as at temperature 0; of equals the lowest id."""
        return any(processor.greedy for processor in self.processors)

    @cached_property
    def plain(self) -> bool:
        """True if the token is the argmax of the model's own logits."""
        return self.greedy and self.keeps()

    def keeps(self, *, shaped: bool = True) -> bool:
        """Whether `law` returns the model's own logits unchanged."""
        return not any(self._applies(processor, shaped) for processor in self.processors)

    @cached_property
    def stateful(self) -> bool:
        """True if any processor has a state."""
        return any(processor.stateful for processor in self.processors)

    @property
    def requirements(self) -> Requirements:
        """The requirements of all its processors."""
        return Requirements.merged(processor.requirements for processor in self.processors)

    def init(self, prompt: Sequence[int]) -> tuple[Any, ...]:
        """The state before the first output token, one entry per processor."""
        return tuple(processor.init(prompt) for processor in self.processors)

    def context(self, tokens: Sequence[int], prompt_length: int, state: Any, seed: int = 0) -> Context:
        """The history of the token after `tokens`, which are copied.

        Args:
            tokens: Prompt and output so far.
            prompt_length: Number of prompt tokens.
            state: The sampler's state after them.
            seed: The request's.
        """
        return Context(prompt_length, list(tokens), state, seed)

    def after(self, context: Context, token: int, logits: torch.Tensor) -> Any:
        """Return the state after `token` was chosen after `context`; pure.

        A processor with `hears_logprobs` gets the log-probability of the token under its input: after the temperature
        the tempered one, before a truncation that of the whole distribution.

        Args:
            context: The history before the token.
            token: The id that was chosen.
            logits: [V], the model's own at `context`.
        """
        if not self.stateful:
            return context.state
        state = list(self._deaf(context.state, [token]))
        # The last processor with `hears_logprobs`, and all later ones, do not change its input.
        last = max((index for index, processor in enumerate(self.processors) if self._listens(processor)), default=-1)
        row = logits[None].float()
        for index, processor in enumerate(self.processors[: last + 1]):
            if self._listens(processor):
                state[index] = processor.advance(state[index], token, float(row[0, token] - row[0].logsumexp(dim=-1)))
            if index < last and self._applies(processor):
                row = self._through(index, row, [context])
        return tuple(state)

    def follow(self, state: Sequence[Any], token: int) -> tuple[Any, ...]:
        """Return the state after `token`, where no processor has `hears_logprobs`."""
        return self._deaf(state, [token])

    def ahead(self, context: Context, tokens: Sequence[int]) -> Context:
        """The history after `tokens`, for drafts; states of processors with `hears_logprobs` stay unchanged."""
        state = self._deaf(context.state, tokens) if self.stateful else context.state
        return Context(context.prompt_length, [*context.tokens, *tokens], state, context.seed, draft=True)

    def _deaf(self, state: Sequence[Any], tokens: Iterable[int]) -> tuple[Any, ...]:
        """Advance the states of processors without `hears_logprobs` by `tokens`."""
        found = list(state)
        for index, processor in enumerate(self.processors):
            if processor.stateful and not processor.hears_logprobs:
                for token in tokens:
                    found[index] = processor.advance(found[index], token, math.nan)
        return tuple(found)

    def extend(self, context: Context, token: int, logits: torch.Tensor) -> Context:
        """Return the history after one more token, see `after`."""
        state = self.after(context, token, logits)
        return Context(context.prompt_length, [*context.tokens, token], state, context.seed, context.draft)

    def question(self, state: Sequence[Any]) -> Callable[[], object] | None:
        """The computation that must run before `law` in this state, see `Constraint.question`; None for none."""
        return None if self._constraint is None else self._constraint[1].question(state[self._constraint[0]])

    @cached_property
    def _constraint(self) -> tuple[int, Constraint] | None:
        return constrained(self.processors)

    @one_thread()
    def law(self, logits: torch.Tensor, contexts: Sequence[Context], *, shaped: bool = True) -> torch.Tensor:
        """Compute the distribution that each row is drawn from.

        Greedy samplers apply only masks and edits: later processors cannot change the argmax, except by rounding.

        Args:
            logits: [n, V], the model's own.
            contexts: The n histories.
            shaped: False applies only masks and edits, for code that compares tokens without drawing.

        Returns:
            Unnormalised logits [n, V] float32, -inf for excluded tokens; may be `logits` itself.

        Raises:
            NumericalError: If a row is not a distribution: its largest entry is NaN or infinite.
        """
        if len(contexts) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits need as many contexts, not {len(contexts)}")
        logits = logits.float()
        if not _largest_finite(logits):
            raise NumericalError(_NO_LAW)
        for index, processor in enumerate(self.processors):
            if not self._applies(processor, shaped):
                continue
            logits = self._through(index, logits, contexts)
            if processor.stage == Stage.EDIT and not _largest_finite(logits):
                raise SettingsError(f"{processor!r} makes logits exceed the range of float32: use a smaller value")
        return logits

    @one_thread()
    def probabilities(self, law: torch.Tensor) -> torch.Tensor:
        """[n, V] float64 probabilities, every row summing to 1; one-hot when greedy."""
        if not self.greedy:
            return law.double().softmax(dim=-1)
        return torch.zeros_like(law, dtype=torch.float64).scatter_(-1, law.argmax(dim=-1, keepdim=True), 1.0)

    def preferences(self, law: torch.Tensor) -> torch.Tensor:
        """[n, V] float64 probabilities of a drafter's distribution, not one-hot for greedy requests.

        Acceptance rules that compare distributions need the drafter's confidence even where it draws no token.
        """
        return law.double().softmax(dim=-1)

    @one_thread()
    def pick(self, law: torch.Tensor, seed: int, positions: Sequence[int]) -> torch.Tensor:
        """Draw the token ids [n] with the noise of `seed` at the n output positions.

        Args:
            law: [n, V] unnormalised logits, as `law` gives them.
            seed: The request's.
            positions: Output position of each row.
        """
        if not self.greedy:
            return gumbel_argmax(law, seed, positions)
        # Numpy is ten times faster than PyTorch here on a CPU, and wakes no threads between two passes.
        return torch.from_numpy(law.numpy().argmax(axis=-1)) if law.device.type == "cpu" else law.argmax(dim=-1)

    def largest(self, logits: torch.Tensor) -> list[int]:
        """The results of `law` and `pick` where this is `plain`, in one pass over the logits [n, V].

        Raises:
            NumericalError: As `law` does.
        """
        ids, values = argmax(logits)
        if not np.isfinite(values).all():
            raise NumericalError(_NO_LAW)
        return ids.tolist()

    def _applies(self, processor: LogitsProcessor, shaped: bool = True) -> bool:
        return processor.stage <= Stage.EDIT or (shaped and not self.greedy)

    def _listens(self, processor: LogitsProcessor) -> bool:
        return processor.stateful and processor.hears_logprobs and self._applies(processor)

    def _through(self, index: int, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        """Apply processor number `index` to logits [n, V]."""
        processor = self.processors[index]
        return processor.process(logits, _own_states(contexts, index) if processor.stateful else contexts)


def _set_up(kind: type[LogitsProcessor], name: str, **settings: Any) -> list[LogitsProcessor]:
    """The processor of these settings; an empty list where the first setting, which enables it, is None."""
    given = {key: value for key, value in settings.items() if value is not None}
    if next(iter(settings)) in given:
        return [kind(**given)]
    if given:
        raise SettingsError(f"{name}_{next(iter(given))} has no effect without {name}: give that too")
    return []


def _largest_finite(logits: torch.Tensor) -> bool:
    if logits.device.type == "cpu":
        return bool(np.isfinite(logits.numpy().max(axis=-1, initial=-np.inf)).all())
    return bool(logits.amax(dim=-1).isfinite().all())


def _own_states(contexts: Sequence[Context], index: int) -> list[Context]:
    """The contexts with only the state of processor number `index`."""
    return [Context(each.prompt_length, each.tokens, each.state[index], each.seed, each.draft) for each in contexts]
