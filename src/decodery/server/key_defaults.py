"""Fields of requests that a key has where its requests leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import invalid
from .fields import ChatRequest, Methods, Shared
from .sampler_fields import SamplerFields
from .wire import checked

_OWN = {"messages", "prompt", "model", "stream", "stream_options"}
"""What only a request can say."""
_TOGETHER = ({"max_tokens", "max_completion_tokens"}, {"thinking", "thinking_token_budget", "reasoning_effort"})
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
        sampled = body.decodery is not None and body.decodery.sampler is not None
        for name in self._names & type(body).model_fields.keys():
            others = next((each for each in _TOGETHER if name in each), {name})
            if name == "decodery":
                body.decodery = _filled(body.decodery, self._values.decodery)
            elif all(getattr(body, other, None) is None for other in others) and not (sampled and name in _SAMPLER):
                setattr(body, name, getattr(self._values, name))


def _filled(given: Methods | None, default: Methods | None) -> Methods | None:
    if given is None or default is None:
        return given or default
    left = default.model_fields_set - given.model_fields_set
    return given.model_copy(update={name: getattr(default, name) for name in left})


_SAMPLER = SamplerFields.model_fields.keys() - {"stop", "stop_token_ids", "ignore_eos", "min_new_tokens", "seed"}
"""Fields that a sampler of the request takes the place of."""
