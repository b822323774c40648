"""Scores by a function of the text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from inspect import iscoroutinefunction
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar, cast

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.sampling.logits_processor import require_number
from decodery.step.scorer import Candidates, Scorer

T = TypeVar("T")
Score = Callable[[str], float | bool] | Callable[[str], Awaitable[float | bool]]


@register("text", guarantee="as good as the function", requirements=("a function of the text",))
@dataclass(frozen=True)
class TextScore(Scorer):
    """Scores texts by functions of the text: a verifier, a rule of thumb, a program, a service.

    Functions are called on a thread beside the engine's loop, one after the other. Those that are `async def` wait side
    by side, for all texts that are scored together.

    Attributes:
        whole: Of a finished text, a number or whether it is right (1 or 0).
        beginning: Of a text that will go on; None where nothing is known of it.
        logarithmic: The numbers are logarithms of weights, of which -inf rules a text out; right is then 0 and wrong
            -inf.
        decode: Ids to text, for who has no tokenizer at hand.
        seconds: Of a call at most; None for any time. A text whose call takes longer has no score, and is left out. An
            ordinary function goes on beside it, as Python ends no thread.
    """

    whole: Score
    beginning: Score | None = None
    logarithmic: bool = False
    decode: Callable[[Sequence[int]], str] | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None:
            require_number("seconds of the scorer text", self.seconds, above=0.0)

    @property
    def prefixes(self) -> bool:
        return self.beginning is not None

    @property
    def log(self) -> bool:
        return self.logarithmic

    def score(self, candidates: Candidates) -> torch.Tensor:
        functions = [
            self.whole if finished or self.beginning is None else self.beginning for finished in candidates.finished
        ]
        calls = list(zip(functions, texts(candidates, self.decode, "text"), strict=True))
        found = {number: self._called(*call) for number, call in enumerate(calls) if not iscoroutinefunction(call[0])}
        if waiting := {number: call for number, call in enumerate(calls) if number not in found}:
            # A thread of its own, as the caller's may have an event loop already.
            values = _apart(lambda: asyncio.run(self._awaited(list(waiting.values()))), None)
            found |= dict(zip(waiting, values, strict=True))
        scores = [self._number(found[number]) for number in range(len(calls))]
        return torch.tensor(scores, dtype=torch.float64, device="cpu")

    def _called(self, function: Score, text: str) -> object:
        if self.seconds is None:
            return function(text)
        try:
            return _apart(lambda: function(text), self.seconds)
        except Empty:
            raise self._late() from None

    async def _awaited(self, calls: Sequence[tuple[Score, str]]) -> list[object]:
        """What functions that wait return, all of them at a time."""
        begun = [
            asyncio.wait_for(cast(Coroutine[Any, Any, object], function(text)), self.seconds)
            for function, text in calls
        ]
        try:
            return list(await asyncio.gather(*begun))
        except TimeoutError:
            if self.seconds is None:
                raise
            raise self._late() from None

    def _late(self) -> SettingsError:
        return SettingsError(f"the function of the scorer text took more than {self.seconds:g} s: raise its `seconds`")

    def _number(self, value: Any) -> float:
        return self._of(value) if isinstance(value, bool | np.bool_) else float(value)

    def _of(self, right: bool | np.bool_) -> float:
        return (0.0 if right else -torch.inf) if self.logarithmic else float(right)


def _apart(function: Callable[[], T], seconds: float | None) -> T:
    """The result of a function that runs on a thread of its own.

    Raises:
        Empty: If it takes longer.
        Exception: The function's exception.
    """
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=copy_context().run, args=(run,), name="scorer", daemon=True).start()
    found, error = results.get(timeout=seconds)
    if error is not None:
        raise error
    return cast(T, found)


def texts(candidates: Candidates, decode: Callable[[Sequence[int]], str] | None, name: str) -> Sequence[str]:
    """The outputs as text.

    Raises:
        SettingsError: If there is no decoder.
    """
    decode = decode or candidates.decode
    if candidates.texts is not None:
        return candidates.texts
    if decode is None:
        raise SettingsError(f"the scorer {name} reads text: search through `LLM`, or give it decode")
    return [decode(output) for output in candidates.outputs]
