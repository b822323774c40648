"""Canvases that an engine fills together, and their output as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decodery.engine.engine import Engine
from decodery.engine.output import Output
from decodery.models.protocol import LanguageModel
from decodery.step.sequence import FinishReason

from .base import DiffusionDecoder
from .canvas import Canvas
from .held import Hold
from .run import Run, finished

Decode = Callable[[list[int], list[int]], str]
"""The text of tokens after those of a prompt."""


@dataclass
class Fill:
    """A request for a canvas.

    Attributes:
        prompt: Token ids.
        length: Length of the canvas, in tokens.
        cache_namespace: Cache namespace of the request.
    """

    prompt: list[int]
    length: int
    method: DiffusionDecoder
    temperature: float = 0.0
    seed: int = 0
    hold: Hold | None = None
    cache_namespace: str = ""


class Filling:
    """A canvas in progress.

    Args:
        work: Its part in the engine.
    """

    def __init__(
        self, engine: Engine, model: LanguageModel, fill: Fill, eos_ids: Sequence[int], decode: Decode
    ) -> None:
        self.canvas = Canvas.of(model, fill.prompt, fill.length, eos_ids=eos_ids, seed=fill.seed)
        run = Run(model, self.canvas, fill.method, fill.temperature, fill.hold)
        self.work = engine.enter(finished(run), self.canvas.trace, memory=run, owner=fill.cache_namespace)
        self._decode, self._revises, self._told, self._hold = decode, fill.method.revises, 0, fill.hold

    @property
    def settled(self) -> list[int]:
        """Final tokens: those before the first open position, none if the method revises tokens.

        This holds for stopped canvases too; all tokens are final only in a canvas that was filled to the end.
        """
        canvas, work = self.canvas, self.work
        if canvas.ended or (work.finished and not work.stopped and work.error is None):
            return canvas.output
        if self._revises:
            return []
        open_places = canvas.open(canvas.prompt_length, len(canvas))
        end = int(open_places[0]) if len(open_places) else len(canvas)
        return [int(token) for token in canvas.tokens[canvas.prompt_length : end]][: canvas.limit]

    def release(self) -> str:
        """Final text that was not returned before; an incomplete character is held back."""
        text = self._text(self.settled)
        if not self.work.finished:
            text = text.rstrip("\ufffd")
        told, self._told = self._told, max(self._told, len(text))
        return text[told:]

    def output(self) -> Output:
        """The output; for a stopped canvas its final tokens, with finish_reason "cancelled".

        Under a constraint, "stop" means that the text is complete, even if no position was left for an end token.
        """
        canvas, tokens = self.canvas, self.settled
        ended = bool(tokens) and tokens[-1] in canvas.eos_ids
        return Output(
            text=self._text(tokens),
            tokens=tokens,
            prompt_tokens=self._prompt,
            finish_reason=self._reason(tokens, ended),
            stopped_by=tokens[-1] if ended else None,
            seed=canvas.seed,
            trace=canvas.trace,
            logprobs=None,
        )

    def _reason(self, tokens: list[int], ended: bool) -> FinishReason:
        if ended:
            return "stop"
        if self.work.stopped:
            return "cancelled"
        if self._hold is None:
            return "length"
        constraint = self._hold.constraint
        state = constraint.init(self._prompt)
        for token in tokens:
            state = constraint.advance(state, token)
        return "stop" if constraint.is_complete(state) else "length"

    @property
    def _prompt(self) -> list[int]:
        return [int(token) for token in self.canvas.tokens[: self.canvas.prompt_length]]

    def _text(self, tokens: list[int]) -> str:
        ended = bool(tokens) and tokens[-1] in self.canvas.eos_ids
        return self._decode(self._prompt, tokens[:-1] if ended else tokens)


def fill_all(
    engine: Engine,
    model: LanguageModel,
    canvases: Sequence[Canvas],
    method: DiffusionDecoder,
    temperature: float,
    hold: Hold | None = None,
) -> None:
    """Fill canvases in shared passes; each gets the same result as on its own."""
    runs = [Run(model, canvas, method, temperature, hold) for canvas in canvases]
    engine.run([engine.enter(finished(run), run.canvas.trace, memory=run) for run in runs])
