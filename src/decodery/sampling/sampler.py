"""The ordered list of processors a request is sampled with."""

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
"""Settings that only shape chance, and their neutral values."""
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
"""The order in which each stack applies what it has; what it lacks stands where the default has it."""


@dataclass(frozen=True, init=False)
class Sampler:
    """Warps in the order they are applied; an empty list samples from the model's own distribution.

    Without a temperature among them it is 1.

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
        """The sampler of the usual settings; None leaves a stage out, and a temperature of None is 0: greedy.

        Under temperature 0 the settings that only shape chance (top_k to mirostat) have no effect.

        Args:
            temperature: 0 or None for greedy decoding; 1 samples from the model's distribution.
            top_k: See `top-k`.
            top_p: See `top-p`.
            min_p: See `min-p`.
            typical: Mass of `typical`.
            epsilon, eta: Cutoffs of the processors of these names.
            top_h: Alpha of `top-h`.
            xtc: Its probability.
            xtc_threshold: See `xtc`.
            mirostat: Its version, 0 for none; what begins with such a name sets up that processor.
            mirostat_tau, mirostat_eta: See `mirostat`.
            repetition_penalty: A factor above 0; 1 leaves logits as they are.
            presence_penalty: In logits, once per token that has occurred.
            frequency_penalty: In logits, per occurrence of a token.
            dry: Its multiplier.
            dry_base, dry_allowed, dry_window, dry_breakers: See `dry`.
            no_repeat_ngram: Size of n-grams that must not occur twice; 0 for none.
            logit_bias: Logits to add, by token id.
            min_new_tokens: Tokens before which no end token is chosen.
            eos_ids: End tokens, for `min_new_tokens`.
            order: Whose order of application, one of `ORDERS`; None is "default".

        Raises:
            SettingsError: For a value out of range, for truncations beside mirostat, and for setting up a processor
                that is not there.
        """
        if order is None:
            order = "default"
        if order not in ORDERS:
            raise SettingsError(f"there is no order {order!r}; choose one of {', '.join(ORDERS)}")
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
        """Whether the token is the argmax, the lowest id among equals, as at temperature 0."""
        return any(processor.greedy for processor in self.processors)

    @cached_property
    def plain(self) -> bool:
        """True if the token is the argmax of the model's own logits."""
        return self.greedy and self.keeps()

    def keeps(self, *, shaped: bool = True) -> bool:
        """Whether `law` gives back the model's own logits."""
        return not any(self._applies(processor, shaped) for processor in self.processors)

    @cached_property
    def stateful(self) -> bool:
        """True if any processor remembers something, so that contexts carry a state."""
        return any(processor.stateful for processor in self.processors)

    @property
    def requirements(self) -> Requirements:
        """What its processors need together."""
        return Requirements.merged(processor.requirements for processor in self.processors)

    def init(self, prompt: Sequence[int]) -> tuple[Any, ...]:
        """The state before the first output token, one entry per processor."""
        return tuple(processor.init(prompt) for processor in self.processors)

    def context(self, tokens: Sequence[int], prompt_length: int, state: Any, seed: int = 0) -> Context:
        """The history of the token after `tokens`, which are copied.

        Args:
            tokens: Prompt and output so far.
            prompt_length: How many of them are the prompt.
            state: The sampler's state after them.
            seed: The request's.
        """
        return Context(prompt_length, list(tokens), state, seed)

    def after(self, context: Context, token: int, logits: torch.Tensor) -> Any:
        """The state once `token` has been chosen after `context`; nothing is changed in place.

        A processor that hears log-probabilities hears the token's under what it was given: after a temperature the
        tempered ones, before a truncation the whole distribution.

        Args:
            context: The history before the token.
            token: The id that was chosen.
            logits: [V], the model's own at `context`.
        """
        if not self.stateful:
            return context.state
        state = list(self._deaf(context.state, [token]))
        # Warps after the last one that listens, and that one itself, change nothing it hears.
        last = max((index for index, processor in enumerate(self.processors) if self._listens(processor)), default=-1)
        row = logits[None].float()
        for index, processor in enumerate(self.processors[: last + 1]):
            if self._listens(processor):
                state[index] = processor.advance(state[index], token, float(row[0, token] - row[0].logsumexp(dim=-1)))
            if index < last and self._applies(processor):
                row = self._through(index, row, [context])
        return tuple(state)

    def follow(self, state: Sequence[Any], token: int) -> tuple[Any, ...]:
        """The state once `token` has been chosen, where no processor hears log-probabilities."""
        return self._deaf(state, [token])

    def ahead(self, context: Context, tokens: Sequence[int]) -> Context:
        """The history `tokens` on, for drafts: processors that ask how likely tokens were stay where they are."""
        state = self._deaf(context.state, tokens) if self.stateful else context.state
        return Context(context.prompt_length, [*context.tokens, *tokens], state, context.seed, draft=True)

    def _deaf(self, state: Sequence[Any], tokens: Iterable[int]) -> tuple[Any, ...]:
        """The state `tokens` on of the processors that do not hear log-probabilities."""
        found = list(state)
        for index, processor in enumerate(self.processors):
            if processor.stateful and not processor.hears_logprobs:
                for token in tokens:
                    found[index] = processor.advance(found[index], token, math.nan)
        return tuple(found)

    def extend(self, context: Context, token: int, logits: torch.Tensor) -> Context:
        """The history one token on, see `after`; `context` stays as it is."""
        state = self.after(context, token, logits)
        return Context(context.prompt_length, [*context.tokens, token], state, context.seed, context.draft)

    def question(self, state: Sequence[Any]) -> Callable[[], object] | None:
        """What must be called before `law` in this state, see `Constraint.question`; None for nothing."""
        return None if self._constraint is None else self._constraint[1].question(state[self._constraint[0]])

    @cached_property
    def _constraint(self) -> tuple[int, Constraint] | None:
        return constrained(self.processors)

    @one_thread()
    def law(self, logits: torch.Tensor, contexts: Sequence[Context], *, shaped: bool = True) -> torch.Tensor:
        """The distribution each row is drawn from, as unnormalised logits [n, V] float32; -inf is excluded.

        When greedy, masks and edits only are applied: what follows them could not change the argmax, or would by
        mistake. With shaped=False this holds in any case, for code that compares tokens and draws none. May return
        `logits` itself.

        Args:
            logits: [n, V], the model's own.
            contexts: The n histories.
            shaped: False applies masks and edits only.

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
                raise SettingsError(f"{processor!r} takes the logits beyond float32: use a smaller value")
        return logits

    @one_thread()
    def probabilities(self, law: torch.Tensor) -> torch.Tensor:
        """[n, V] float64 of a distribution, every row summing to 1; one-hot when greedy."""
        if not self.greedy:
            return law.double().softmax(dim=-1)
        return torch.zeros_like(law, dtype=torch.float64).scatter_(-1, law.argmax(dim=-1, keepdim=True), 1.0)

    def preferences(self, law: torch.Tensor) -> torch.Tensor:
        """[n, V] float64 of a drafter's distribution, rows summing to 1, for greedy requests too.

        It tells what the drafter thought of every token. A greedy drafter draws nothing, and rules that compare
        distributions still want to know how sure it was.
        """
        return law.double().softmax(dim=-1)

    @one_thread()
    def pick(self, law: torch.Tensor, seed: int, positions: Sequence[int]) -> torch.Tensor:
        """The token ids [n] that the noise of `seed` at the n output positions draws from a distribution.

        Args:
            law: [n, V] unnormalised logits, as `law` gives them.
            seed: The request's.
            positions: Output position of each row.
        """
        if not self.greedy:
            return gumbel_argmax(law, seed, positions)
        # Ten times faster than PyTorch on a CPU, and it wakes no threads between two passes.
        return torch.from_numpy(law.numpy().argmax(axis=-1)) if law.device.type == "cpu" else law.argmax(dim=-1)

    def largest(self, logits: torch.Tensor) -> list[int]:
        """The results of `law` and `pick` where this is `plain`, in one sweep over the logits [n, V].

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
        """What processor number `index` makes of logits [n, V]."""
        processor = self.processors[index]
        return processor.process(logits, _own_states(contexts, index) if processor.stateful else contexts)


def _set_up(kind: type[LogitsProcessor], name: str, **settings: Any) -> list[LogitsProcessor]:
    """The processor of `settings`, of which the first is its own; none where that is None."""
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
    """The contexts as processor number `index` sees them."""
    return [Context(each.prompt_length, each.tokens, each.state[index], each.seed, each.draft) for each in contexts]
