"""What judges, critics and curators say, in a form that can be read: asked for, held to where possible, asked again."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TypeVar

from decodery.core.ledger import count
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.sampling.sampler import Sampler
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

TRIES = 10
"""How often something is asked at most, the first time included, as in Archon's published code."""
_THOUGHT = "</think>"
_CHARACTERS = 2
"""Of a free text in a form, for each token that may be written: less than a token has on average."""

Read = TypeVar("Read")


def verdicts(
    calls: Calls,
    prompts: Ordered[str],
    read: Callable[[str], Read | None],
    form: str,
    *,
    tries: int = TRIES,
    sampler: Sampler | None = None,
    most: int | None = None,
    progress: Progress = silent,
    writer: LanguageModel | None = None,
) -> ForwardCoroutine[list[Read | None]]:
    """What the model says to prompts of their own, read by a function.

    What cannot be read is counted as `malformed` and asked for again at another seed, as far as the sampler draws.

    Args:
        calls: Writes the texts.
        prompts: One for each verdict.
        read: The verdict of a text without its thinking part; None where it holds none.
        form: A regular expression that a model which is run here is held to.
        tries: How often each prompt is asked at most.
        sampler: The request's own by default.
        most: Tokens of each text; those of the request by default.
        progress: Told of the tokens written.
        writer: A model in place of the request's.

    Returns:
        A verdict for each prompt, None where none could be read.
    """
    from decodery.constraints.regex import Regex

    sampler = sampler or calls.request.sampler
    constraint = None if writes(calls.engine.model) else Regex(form)
    found: list[Read | None] = [None] * len(prompts)
    for _ in range(1 if sampler.greedy else tries):
        left = [number for number, verdict in enumerate(found) if verdict is None]
        if not left:
            break
        asked = [calls.conversation.apart(prompts[number]) for number in left]
        said = yield from calls.judge(
            asked, sampler=sampler, constraint=constraint, most=most, progress=progress, writer=writer
        )
        for number, seq in zip(left, said, strict=True):
            found[number] = read(spoken(seq))
            if found[number] is None:
                count("malformed")
    return found


def spoken(seq: Sequence) -> str:
    """A text without its thinking part and the space around it."""
    assert seq.text is not None
    return seq.text.text.rpartition(_THOUGHT)[2].strip()


def characters(tokens: int, parts: int = 1) -> int:
    """How long each part of a form is at most, so that so many tokens hold all of them."""
    return max(16, _CHARACTERS * tokens // parts)
