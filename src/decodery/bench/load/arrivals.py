"""Who asks what, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decodery.core.errors import CorruptFile

from ..workloads import documents, questions, read_rows
from .settings import SHAREGPT, LoadSettings

CHARACTERS = 4.4
"""Of a token, in English: no tokenizer of a server that may be anywhere is at hand."""
_PROMPT, _ANSWER = (78.0, 1.2), (225.0, 0.9)
"""Median and spread of the logarithm of lengths in tokens. Their means, 161 and 338, are those that "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023) gives for ShareGPT."""
_PROMPTS = 40
_LONGEST, _MOST_TOKENS = 3000, 1 << 20


@dataclass(frozen=True)
class Arrival:
    """A request. at: seconds after the first one may come."""

    at: float
    prompt: str
    max_tokens: int


def arrivals(settings: LoadSettings, rate: float | None, stage: int) -> list[Arrival]:
    """The requests of a stage, the same for every server. rate: per second, or of a trace how many times its speed;
    None: all at once, for clients that wait for each other's turn. stage: its number; each asks something else, as long
    as there is something else.

    Raises SettingsError where a workload's data is missing, CorruptFile for a trace that is none.
    """
    if settings.trace is not None:
        found = read_trace(Path(settings.trace))[: settings.prompts]
        return [Arrival(0.0 if rate is None else each.at / rate, each.prompt, each.max_tokens) for each in found]
    rng = np.random.default_rng((settings.seed, stage))
    asked = _asked(settings, stage, rng)
    times = np.zeros(len(asked)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(asked)))
    return [Arrival(float(at), *each) for at, each in zip(times, asked, strict=True)]


def _asked(settings: LoadSettings, stage: int, rng: np.random.Generator) -> list[tuple[str, int]]:
    count = _PROMPTS if settings.prompts is None else settings.prompts
    if settings.workload == SHAREGPT:
        return sharegpt_like(count, settings.max_new_tokens, rng)
    known = questions(settings.workload, settings.folder)
    # Every question before any comes again: one whose prompt is remembered is less of a load.
    order, begin = np.random.default_rng(settings.seed).permutation(len(known)), stage * count
    places = [order[place % len(known)] for place in range(begin, begin + count)]
    return [(known[place].turns[0], settings.max_new_tokens) for place in places]


def seen_before(settings: LoadSettings, stage: int, warm: int) -> int:
    """How many requests of a stage have prompts that the same server was sent before.

    warm: requests of stage 0 that were sent, to warm up; of all stages between, all were.
    """
    known = {each.prompt for each in arrivals(settings, None, 0)[:warm]}
    for earlier in range(1, stage):
        known |= {each.prompt for each in arrivals(settings, None, earlier)}
    again = 0
    for each in arrivals(settings, None, stage):
        again += each.prompt in known
        known.add(each.prompt)
    return again


def sharegpt_like(count: int, most: int, rng: np.random.Generator) -> list[tuple[str, int]]:
    """Prompts and limits of their answers, both log-normal; prompts of at most 3,000 tokens, answers of at most `most`.

    A prompt is a stretch of a text from anywhere in it, so that hardly two begin alike.
    """
    text = "\n".join(documents().values())
    # The longest stretch may begin at the end.
    text += text * (1 + int(_LONGEST * CHARACTERS) // len(text))
    whole = len(text) - int(_LONGEST * CHARACTERS)
    found = []
    for _ in range(count):
        read, written = (median * np.exp(spread * rng.standard_normal()) for median, spread in (_PROMPT, _ANSWER))
        begin = int(rng.integers(whole))
        prompt = text[begin : begin + int(np.clip(read, 4, _LONGEST) * CHARACTERS)]
        found.append((f"Go on: {prompt}", int(np.clip(written, 1, most))))
    return found


def read_trace(path: Path) -> list[Arrival]:
    """A recorded trace: JSON lines with `at` in seconds, `prompt` and `max_tokens`. Raises CorruptFile."""
    found = []
    for number, row in enumerate(read_rows(path), start=1):
        at, prompt, limit = row.get("at"), row.get("prompt"), row.get("max_tokens")
        if not (
            isinstance(at, int | float)
            and 0 <= at < float("inf")
            and isinstance(prompt, str)
            and isinstance(limit, int)
            and 0 < limit <= _MOST_TOKENS
        ):
            raise CorruptFile(
                f'line {number} of {path} is no arrival: write {{"at": SECONDS, "prompt": TEXT, "max_tokens": N}}'
            )
        found.append(Arrival(float(at), prompt, limit))
    if not found:
        raise CorruptFile(f"{path} has no arrival: write one per line")
    return sorted(found, key=lambda each: each.at)
