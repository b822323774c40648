"""Fields for samplers and ends of texts, at the top level of a request as vLLM and llama.cpp have them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, StrictBool, StrictStr


def _whole(value: Any) -> Any:
    """5.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Bounds stand before it: those after are checked, and not published as bounds.
WHOLE = BeforeValidator(_whole)
Token = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1), WHOLE]
Share = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1), WHOLE]


def _count_or_all(value: Any) -> Any:
    """-1 is "all" for vLLM, where others write 0."""
    return 0 if value == -1 and not isinstance(value, bool) else value


def _unlimited(value: Any) -> Any:
    """-1 is "no limit" for llama.cpp."""
    return None if value == -1 and not isinstance(value, bool) else value


def _texts(value: Any) -> Any:
    """Stop strings without empty ones, which several clients send for "none"."""
    if isinstance(value, str):
        return value or None
    return [text for text in value if text != ""] or None if isinstance(value, list) else value


MaxTokens = Annotated[Annotated[int, Field(strict=True, ge=0), WHOLE] | None, BeforeValidator(_unlimited)]
_Stop = Annotated[StrictStr, Field(min_length=1, max_length=256)]


def _named(*names: str) -> Any:
    return Field(default=None, validation_alias=AliasChoices(*names))


class SamplerFields(BaseModel):
    """What decides how tokens are sampled and where a text ends. Names of other servers are taken as well.

    Without a temperature texts are greedy; without a seed it is 0. `sampler` of `Methods` takes the place of all
    settings of the sampler.
    """

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[Count, BeforeValidator(_count_or_all)] | None = None
    min_p: Share | None = None
    typical: Share | None = _named("typical", "typical_p")
    xtc: Share | None = _named("xtc", "xtc_probability")
    xtc_threshold: Share | None = None
    mirostat: Annotated[Count, Field(le=2)] | None = None
    mirostat_tau: Annotated[Number, Field(ge=0)] | None = None
    mirostat_eta: Annotated[Number, Field(ge=0)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = _named("repetition_penalty", "repeat_penalty")
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    dry: Annotated[Number, Field(ge=0)] | None = _named("dry", "dry_multiplier")
    dry_base: Annotated[Number, Field(ge=1)] | None = None
    dry_allowed: Count | None = _named("dry_allowed", "dry_allowed_length")
    dry_breakers: Annotated[list[_Stop], Field(max_length=64)] | None = _named("dry_breakers", "dry_sequence_breakers")
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), le=2**64 - 1), WHOLE] | None = None
    min_new_tokens: Count | None = _named("min_tokens", "min_new_tokens")
    stop: Annotated[_Stop | Annotated[list[_Stop], Field(max_length=16)] | None, BeforeValidator(_texts)] = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: StrictBool | None = None

    def settings(self) -> dict[str, Any]:
        """The settings by the names that `LLM.request` has for them, but for `logit_bias`."""
        found = {name: getattr(self, name) for name in SamplerFields.model_fields if name != "logit_bias"}
        if self.top_p == 0:
            # The most likely token always stays.
            found["top_p"] = None
            found["top_k"] = 1
        if self.seed is not None:
            # 64 bits of whatever integer it is.
            found["seed"] = self.seed % (1 << 64)
        if isinstance(self.stop, str):
            found["stop"] = (self.stop,)
        return found
