"""Texts that a model writes for puzzles, many at once."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from functools import partial

from decodery.core.noise import nth_seed
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.sampling.sampler import Sampler
from decodery.step.sequence import Sequence
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded, tokenizer

_TOGETHER = 64


def solved(
    model: LanguageModel,
    prompts: Ordered[str],
    length: int,
    *,
    each: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[list[Sequence]]:
    """By prompt, `each` finished texts of up to `length` tokens.

    Text i of prompt p has seed + p * each + i. A prompt may end with the beginning of a solution.
    """
    engine = Engine(model, detokenizer=tokenizer().stream, limits=Limits(texts=_TOGETHER))
    request = partial(Request, sampler=Sampler.from_settings(temperature=temperature), eos_ids=(END_ID,))
    found: list[list[Sequence]] = []
    for number, prompt in enumerate(prompts):
        texts: list[Sequence] = []
        for at in range(each):
            asked = request(encoded(prompt), length, seed=nth_seed(seed, number * each + at))
            texts.append(engine.submit(asked, like=texts[0] if texts else None))
        found.append(texts)
    for number in range(0, len(found), _TOGETHER):
        engine.run([text for texts in found[number : number + _TOGETHER] for text in texts])
        progress("writing solutions", min(number + _TOGETHER, len(found)), len(found))
    return found


def text_of(seq: Sequence) -> str | None:
    """The text of a finished sequence; None where it was cut by its length, and so is no answer."""
    assert seq.text is not None
    return seq.text.text if seq.finish_reason == "stop" else None
