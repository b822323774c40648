"""The texts of one call: submitted prompt by prompt, decoded together, returned in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

from decodery.core.errors import SettingsError
from decodery.core.ledger import Ledger
from decodery.core.mapped_memory import trim
from decodery.core.noise import nth_seed
from decodery.engine.engine import Engine
from decodery.engine.output import Output
from decodery.engine.request import Request
from decodery.step.sequence import Sequence

from .checked import another
from .prompt_request import PromptRequests, naming

MOST_TEXTS = 32
"""Texts of one call in progress at a time; more of them share passes no better, and each holds keys and values."""
_AHEAD = 8 * MOST_TEXTS
"""Outputs that wait at most for one before them that is longer."""


class Text(NamedTuple):
    """A text in progress.

    Args:
        request: What was requested.
        seq: Its state in the engine.
        tries: Texts written for it, this one included.
        failed: What earlier tries spent.
    """

    request: Request
    seq: Sequence
    tries: int = 1
    failed: Ledger | None = None


@naming
def submit(
    lm: PromptRequests, engine: Engine, prompt: Any, n: int, form: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Text]:
    """Begin n texts after one prompt.

    Args:
        lm: The model.
        engine: The engine that decodes them.
        prompt: One prompt.
        n: Number of texts; text i has seed `seed + i`.
        form: How the prompt is read, as arguments of `LLM.encode`.
        settings: Of the request, as `LLM.request` takes them.

    Returns:
        The texts, which share the KV cache of the prompt.
    """
    if n < 1:
        raise SettingsError(f"n must be at least 1, not {n}")
    allowed = {"allow_special": settings["allow_special"]} if "allow_special" in settings else {}
    tokens = lm.encode(prompt, **form, **allowed)
    given = {"apply_chat_template": form.get("apply_chat_template", True), "tokens": tokens, **settings}
    first = lm.request_for(prompt, **given)
    seeds = [nth_seed(first.seed, number) for number in range(1, n)]
    others = [lm.request_for(prompt, **given | {"seed": seed}) for seed in seeds]
    begun = engine.submit(first)
    return [Text(first, begun), *(Text(each, engine.submit(each, like=begun)) for each in others)]


def outputs(engine: Engine, texts: Iterator[list[Text]], finish: Callable[..., Output]) -> Iterator[Output]:
    """The outputs of texts in the order in which these are submitted.

    Args:
        engine: The engine that decodes them.
        texts: The texts, prompt by prompt; they are taken as earlier ones end.
        finish: Makes the output of a finished sequence, as `LLM.output`.
    """
    found, taken, more = deque[Text | Output](), 0, True
    try:
        while more or found:
            while more and len(found) < _AHEAD and sum(_runs(each) for each in found) < MOST_TEXTS:
                following = next(texts, None)
                more = following is not None
                found += following or ()
                taken += len(following or ())
            engine.step()
            for place, each in enumerate(found):
                if not isinstance(each, Output) and each.seq.finished and each.seq.error is None:
                    found[place] = _ended(engine, each, finish)
            while found and not _runs(first := found[0]):
                del found[0]
                yield first if isinstance(first, Output) else finish(first.seq)
    finally:
        if taken > 1:
            # Else what many texts have held stays with the process.
            trim()


def all_outputs(engine: Engine, texts: Iterator[list[Text]], finish: Callable[..., Output]) -> list[Output]:
    """As `outputs`, of texts that are all submitted before the first is decoded."""
    waiting = deque(texts)
    return list(outputs(engine, (waiting.popleft() for _ in range(len(waiting))), finish))


def _ended(engine: Engine, text: Text, finish: Callable[..., Output]) -> Text | Output:
    """The output of a text that has ended, or another try where the check of its constraint fails."""
    output = finish(text.seq, tries=text.tries)
    if text.failed is not None:
        output.trace.ledger.add(text.failed)
        output.trace.ledger.counts["discarded"] = text.tries - 1
    further = another(output, text.seq.request.sampler)
    if further is None:
        return output
    request = copy(text.request)
    request.seed, request.sampler = further
    return Text(request, engine.submit(request), text.tries + 1, output.trace.ledger)


def _runs(text: Text | Output) -> bool:
    """Whether a text is still being decoded."""
    return not isinstance(text, Output) and not text.seq.finished
