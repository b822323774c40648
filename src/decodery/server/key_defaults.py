"""Fields of requests that a key has where its requests leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import invalid
from .fields import ChatRequest, CompletionRequest, Methods, Shared
from .sampler_fields import SamplerFields
from .wire import checked

_OWN = {"messages", "prompt", "model", "stream", "stream_options"}
"""What only a request can say."""
_SAMPLER = SamplerFields.model_fields.keys() - {"stop", "stop_token_ids", "ignore_eos", "min_new_tokens", "seed"}
"""Fields that a sampler takes the place of."""
_GUIDED = {f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}
_TOGETHER = (
    {"max_tokens", "max_completion_tokens"},
    {"thinking", "thinking_token_budget", "reasoning_effort"},
    {"response_format", "structured_outputs", "json_schema", "decodery.constraint"} | _GUIDED,
    {"tools", "functions"},
    {"tool_choice", "function_call"},
)
"""Fields of which one takes the place of the others."""


class KeyDefaults:
    """The defaults of one key.

    Args:
        given: Fields of a chat; a completion has those that it knows.

    Raises:
        ApiError: For what no request could have.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        message = {"messages": [{"role": "user", "content": "x"}]}
        if not isinstance(given, Mapping):
            raise invalid("defaults are a JSON object")
        if own := sorted(_OWN & given.keys()):
            raise invalid(f"{own[0]!r} has no default")
        self._values = checked({**given, **message}, ChatRequest, strict=True)
        self._names = self._values.model_fields_set - _OWN

    def fill(self, body: Shared) -> None:
        """Set what a request leaves out."""
        said = {name for name in type(body).model_fields if getattr(body, name, None) is not None}
        own = set() if body.decodery is None else body.decodery.model_fields_set
        said |= {f"decodery.{name}" for name in own if getattr(body.decodery, name) is not None}
        for group in _TOGETHER:
            said |= group if group & said else set()
        if "decodery.sampler" in said:
            said |= _SAMPLER
        elif _SAMPLER & said:
            said.add("decodery.sampler")
        # A chat says whether there are log-probabilities, a completion how many.
        other = {"logprobs"} if isinstance(body, CompletionRequest) else set()
        for name in (self._names & type(body).model_fields.keys()) - other:
            if name == "decodery":
                body.decodery = _filled(body.decodery, self._values.decodery, said)
            elif name not in said:
                setattr(body, name, getattr(self._values, name))


def _filled(given: Methods | None, default: Methods | None, said: set[str]) -> Methods | None:
    if default is None:
        return given
    known = set() if given is None else given.model_fields_set
    left = {name for name in default.model_fields_set - known if f"decodery.{name}" not in said}
    return (given or Methods()).model_copy(update={name: getattr(default, name) for name in left}) if left else given
