"""The record that a search keeps of itself in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decodery.core.errors import SettingsError
from decodery.engine.request import Request
from decodery.search.base import Search
from decodery.step.search_record import SearchRecord, described, digest

if TYPE_CHECKING:
    from .llm import LLM

_SETTINGS = ("sampler", "seed", "max_new_tokens", "stop", "eos_ids", "logprobs", "acceptance_rule", "logits_source")
"""What texts depend on beside model, prompt and search."""


def search_record(path: str | Path, lm: LLM, search: Search, request: Request) -> SearchRecord:
    """The record of a search, in a file that may hold a part of it.

    Raises:
        SettingsError: For searches that keep none, and for the record of another one.
        CorruptFile: For a file that is no record.
    """
    if not search.resumable or request.cache_policy is not None:
        raise SettingsError(
            f"{type(search).__name__} cannot go on from a record: those over samples, over steps without step_seconds "
            "and of several prompts can, where the whole cache is kept: leave record out, or use one of these"
        )
    said = None if request.conversation is None else described(request.conversation.prompt)
    subject = {
        "model": [lm.name, lm.dtype, lm.model.fingerprint],
        "search": digest(described(search)),
        "prompt": digest([said, [int(token) for token in request.prompt]]),
    }
    return SearchRecord(path, subject | {name: described(getattr(request, name)) for name in _SETTINGS})
