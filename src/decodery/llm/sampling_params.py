"""The settings of a text as types: what editors complete, and what type checkers check."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from decodery.core.errors import SettingsError
from decodery.core.settings import advice
from decodery.engine.output import Output
from decodery.sampling.logits_processor import LogitsProcessor
from decodery.sampling.sampler import Sampler
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.cache_policy import CachePolicy
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.sequence import Sequence

from .other_names import OTHER_NAMES


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """How tokens are sampled and where a text ends, to be given to several calls.

    A keyword argument of the call takes precedence. None leaves a setting at its default.

    Attributes:
        temperature: 0 is greedy, which is the default.
        top_k: Keep the k most probable tokens.
        top_p: Keep the fewest tokens that hold this probability.
        min_p: Keep tokens with at least this share of the highest probability.
        typical: Keep tokens about as surprising as expected, up to this probability.
        epsilon: Keep tokens with at least this probability.
        eta: As `epsilon`, less where the model is unsure.
        top_h: Keep as many tokens as this share of the entropy allows.
        xtc: Probability of excluding all likely tokens but the least likely.
        xtc_threshold: Probability from which a token counts as likely for `xtc`.
        mirostat: Version of Mirostat, 1 or 2; 0 for none.
        mirostat_tau: Its target, in bits.
        mirostat_eta: Its learning rate.
        repetition_penalty: Factor for tokens that occurred.
        presence_penalty: Subtracted once from tokens of the output.
        frequency_penalty: Subtracted from tokens of the output each time they occurred.
        dry: Multiplier of the DRY penalty.
        dry_base: Its base.
        dry_allowed: Length of repetitions it leaves alone.
        dry_window: Number of last tokens it looks at.
        dry_breakers: Texts that end a repetition.
        no_repeat_ngram: Length of n-grams that may not repeat.
        logit_bias: Added to the logits of tokens, by id.
        order: Whose order of application, such as "llama.cpp".
        seed: Decides every random choice.
        max_new_tokens: Maximum number of tokens.
        min_new_tokens: The text cannot end before.
        stop: Texts that end the text and are cut from it.
        stop_token_ids: Tokens that end the text and are cut from it.
        ignore_eos: Go on after the model's end tokens.
        logprobs: Number of most likely tokens to report at each position.

    References:
        `LLM.request` describes all settings of a text.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical: float | None = None
    epsilon: float | None = None
    eta: float | None = None
    top_h: float | None = None
    xtc: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry: float | None = None
    dry_base: float | None = None
    dry_allowed: int | None = None
    dry_window: int | None = None
    dry_breakers: Ordered[str] | None = None
    no_repeat_ngram: int | None = None
    logit_bias: Mapping[int, float] | None = None
    order: str | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | Ordered[str] | None = None
    stop_token_ids: Ordered[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None

    def __new__(cls, **settings: Any) -> SamplingParams:
        known = [field.name for field in fields(cls)]
        for name in settings.keys() - known:
            raise SettingsError(f"there is no setting {name!r}; {advice(name, known, OTHER_NAMES)}")
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class RequestSettings(TypedDict, total=False):
    """The keyword arguments of `LLM.request`, which describes them."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical: float | None
    epsilon: float | None
    eta: float | None
    top_h: float | None
    xtc: float | None
    xtc_threshold: float | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry: float | None
    dry_base: float | None
    dry_allowed: int | None
    dry_window: int | None
    dry_breakers: Ordered[str] | None
    no_repeat_ngram: int | None
    logit_bias: Mapping[int, float] | None
    order: str | None
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop: str | Ordered[str]
    stop_token_ids: Ordered[int]
    ignore_eos: bool
    logprobs: int | None
    sampler: Sampler | LogitsProcessor | str | Ordered[Any] | None
    drafter: Drafter | str | None
    predicted_output: str | Ordered[int] | None
    acceptance_rule: AcceptanceRule | str
    draft_length: DraftLengthPolicy | str | None
    max_draft_tokens: int
    reuse: Output | Sequence | None
    logits_source: LogitsSource | str | None
    cache_policy: CachePolicy | str | None
    monitor: Monitor | str | Ordered[Monitor | str] | None
    return_draft_trees: bool
    fresh_memory: bool
    constraint: Any
    prompt_embeds: Any
    placeholder: str
    allow_special: bool


class GenerateSettings(RequestSettings, total=False):
    """The keyword arguments of `LLM.generate`."""

    apply_chat_template: bool
    return_cache: bool


class ChatSettings(RequestSettings, total=False):
    """The keyword arguments of `LLM.chat`."""

    tools: Ordered[Mapping[str, Any]] | None
    tool_choice: str
    thinking_token_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    return_cache: bool


def merged(params: SamplingParams | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments, and beside them what sampling parameters say.

    Raises:
        SettingsError: For parameters of another type.
    """
    if params is None:
        return dict(settings)
    if not isinstance(params, SamplingParams):
        raise SettingsError(
            f"the second argument of generate is decodery.SamplingParams(...), not {params!r:.80}: "
            "name other settings, as in temperature=0.7"
        )
    return {**params.given(), **settings}
