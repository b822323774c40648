"""From a request's fields to the settings of `LLM.request`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from decodery.constraints.base import ConstraintSpec
from decodery.core.method_spec import from_network
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.texts import Fill
from decodery.llm.llm import LLM
from decodery.sampling.constraint import Constraint
from decodery.search.base import Search
from decodery.step.monitor import Monitor

from .errors import invalid
from .fields import Methods, Shared

_COMPILED = 32
"""Constraints that a server keeps compiled, for requests that ask for the same one again."""


def untrusted(trust: bool) -> AbstractContextManager[None]:
    """Within it requests may name methods, and files only where they are trusted."""
    return nullcontext() if trust else from_network()


def cache_policy_of(body: Shared) -> str | None:
    """The cache policy that a request names."""
    return None if body.decodery is None else body.decodery.cache_policy


def settings_of(body: Shared, vocab_size: int, guards: Sequence[Monitor] = ()) -> dict[str, Any]:
    """What of a request decides how one text is decoded, by the names `LLM.request` has for it.

    Args:
        body: The request.
        vocab_size: Tokens of the model.
        guards: Monitors of the server, which watch every text.
    """
    own = body.decodery or Methods()
    settings: dict[str, Any] = {
        **body.settings(),
        "logit_bias": _bias(body.logit_bias, vocab_size),
        "sampler": own.sampler,
        "drafter": own.drafter,
        "acceptance_rule": own.acceptance_rule,
        "draft_length": own.draft_length,
        "max_draft_tokens": own.max_draft_tokens,
        "logits_source": own.logits_source,
        "cache_policy": own.cache_policy,
        "monitor": _watching(guards, own.monitor),
        "fresh_memory": own.fresh_memory or None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def check_lengths(body: Shared, most: int) -> None:
    """Refuse a text that has to be longer than it may be. Raises ApiError.

    Args:
        body: The request.
        most: Tokens that the text may have.
    """
    if (body.min_new_tokens or 0) > most:
        least = body.min_new_tokens
        raise invalid(
            f"min_tokens is {least} and the text may have {most} tokens: give a larger max_tokens", "min_tokens"
        )


def _watching(guards: Sequence[Monitor], asked: str | list[str] | None) -> Any:
    """The monitors of a text: those of the server, and those that the request names."""
    return [*guards, *([asked] if isinstance(asked, str) else asked or ())] if guards else asked


def search_of(body: Shared, lm: LLM, given: Search | None) -> Search | None:
    """The search that answers a request: that of the server, or the one that the request asks for.

    Args:
        body: The request.
        lm: What writes.
        given: The search that answers all requests of the server, None where they name their own.
    """
    named = None if body.decodery is None else body.decodery.search
    if given is not None and named is not None:
        raise invalid("this server has a search of its own: leave search out", "decodery.search")
    search: Search | None = given if named is None else resolve("search", named)
    return None if search is None else search.bind(lm.tokenizer)


def searched(settings: dict[str, Any], search: Search, given: Search | None) -> None:
    """Add to the settings of texts what a search needs that the request does not say.

    Args:
        settings: Of a request, changed.
        search: What answers it.
        given: The search of the server, whose clients need not know of it: their texts have OpenAI's temperature.
    """
    settings.setdefault("drafter", "none")
    if given is not None and "sampler" not in settings and not search.requirements.greedy:
        settings.setdefault("temperature", 1.0)


def fill_of(body: Shared, lm: LLM, tokens: list[int], settings: dict[str, Any], own: Search | None) -> Fill | None:
    """The canvas that a request asks for.

    Args:
        settings: Those of a text, with `max_new_tokens`.
        own: The search of the server, which answers every request.
    """
    if body.decodery is None or body.decodery.diffuse is None:
        return None
    if own is not None:
        raise invalid("this server answers by a search of its own: leave diffuse out", "decodery.diffuse")
    others = {name: value for name, value in settings.items() if name not in _DIFFUSED}
    if body.decodery.search is not None or others:
        named = next(iter(others), "search")
        raise invalid(f"diffuse goes with max_tokens, temperature, seed and a constraint: leave out {named}", named)
    given = {name: settings[name] for name in ("temperature", "seed", "constraint") if name in settings}
    fill = lm.fill(tokens, body.decodery.diffuse, settings["max_new_tokens"], **given)
    # What cannot be filled is refused here, before anything waits for it.
    Canvas.of(lm.model, tokens, fill.length)
    return fill


CANVAS_TOKENS = 256
"""Of a canvas, where a request does not say: all of it is read in every pass, so it is not all that would fit."""
_DIFFUSED = ("max_new_tokens", "temperature", "seed", "constraint")
"""Settings of a text that a canvas has too."""


def _bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not given:
        return None
    found = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocab_size):
            raise invalid(f"logit_bias: {name[:20]!r} is no token of this model, which has {vocab_size}", "logit_bias")
        found[int(name)] = value
    return found


class Compiled:
    """Constraints compiled for a model's tokens, those used last kept.

    Safe to share between threads.
    """

    def __init__(self, lm: LLM) -> None:
        self._lm = lm
        self._lock = threading.Lock()
        self._kept: OrderedDict[ConstraintSpec, Constraint] = OrderedDict()

    def get(self, language: ConstraintSpec) -> Constraint:
        """The constraint of a language. Nobody waits for one that another request has compiled."""
        with self._lock:
            found = self._kept.get(language)
        if found is None:
            found = language.compile(self._lm.vocabulary)
        with self._lock:
            self._kept[language] = found
            self._kept.move_to_end(language)
            if len(self._kept) > _COMPILED:
                self._kept.popitem(last=False)
        return found
