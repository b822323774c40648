"""Checks of finished texts whose constraint leaves something open; texts that fail are written anew."""

from __future__ import annotations

from dataclasses import replace

from decodery.core.noise import nth_seed
from decodery.engine.output import Output, TextCheck
from decodery.sampling.constraint import AfterCheck, constrained
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature

_NEXT_TRY = 1 << 32
"""From the seed of one try to the next one's, so that the texts of one call, whose seeds count up, stay apart."""


def checked(output: Output, sampler: Sampler, tries: int = 1) -> Output:
    """The text and what it violates of the constraint parts that could not be enforced.

    Args:
        output: a finished text.
        sampler: what it was written with.
        tries: texts written so far, this one included.
    """
    after = _after(sampler)
    if after is None:
        return output
    # A text that was cut is no instance, whatever else is wrong with it.
    whole = output.finish_reason == "stop" and bool(after.unenforced)
    found = after.violation(output.text) if whole else None
    return replace(
        output, check=TextCheck(after.unenforced, after.ignored, tries, found, (found is None) if whole else None)
    )


def another(output: Output, sampler: Sampler) -> tuple[int, Sampler] | None:
    """What a further try is written with, where a checked text fails and may be written anew.

    Args:
        output: a checked text.
        sampler: what it was written with.

    Returns:
        The seed and the sampler of the next try; None where the text passed, or was the last that is allowed.
    """
    after = _after(sampler)
    if after is None or output.check is None or output.check.violation is None or output.check.tries >= after.max_tries:
        return None
    return nth_seed(output.seed, _NEXT_TRY), _drawing(sampler)


def _drawing(sampler: Sampler) -> Sampler:
    """The sampler of a further try: greedy decoding would write the same text, so its temperature becomes 1."""
    if not sampler.greedy:
        return sampler
    processors = (processor for processor in sampler.processors if not isinstance(processor, Temperature))
    return Sampler((*processors, Temperature(1.0)))


def _after(sampler: Sampler) -> AfterCheck | None:
    """What the constraint of a sampler leaves to a check; None where there is none, or it enforces everything."""
    found = constrained(sampler.processors)
    return None if found is None else found[1].after
