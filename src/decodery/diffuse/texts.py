"""Canvases of an engine, filled together, and what became of them as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..model.protocol import LanguageModel
from ..output import Output
from .base import Diffusion
from .canvas import Canvas
from .held import Hold
from .run import Run, filled, finished

if TYPE_CHECKING:
    from ..decode.engine import Engine

Decode = Callable[[list[int], list[int]], str]
"""The text of tokens behind those of a prompt."""


@dataclass
class Fill:
    """A canvas that is wanted. prompt: token ids; length: of the canvas; salt: whose request it is."""

    prompt: list[int]
    length: int
    method: Diffusion
    temperature: float = 0.0
    seed: int = 0
    hold: Hold | None = None
    salt: str = ""


class Filling:
    """A canvas in progress. work: its part in the engine."""

    def __init__(
        self, engine: Engine, model: LanguageModel, fill: Fill, eos_ids: Sequence[int], decode: Decode
    ) -> None:
        self.canvas = Canvas.of(model, fill.prompt, fill.length, eos_ids=eos_ids, seed=fill.seed)
        run = Run(model, self.canvas, fill.method, fill.temperature, fill.hold)
        self.work = engine.enter(finished(run), self.canvas.trace, memory=run, owner=fill.salt)
        self._decode, self._revises, self._told = decode, fill.method.revises, 0

    @property
    def settled(self) -> list[int]:
        """Tokens that cannot change any more: those before the first open place, none where methods take some back."""
        canvas = self.canvas
        if self.work.finished or canvas.ended:
            return canvas.output
        if self._revises:
            return []
        open_places = canvas.open(canvas.prompt_length, len(canvas))
        end = int(open_places[0]) if len(open_places) else len(canvas)
        return [int(token) for token in canvas.tokens[canvas.prompt_length : end]][: canvas.limit]

    def release(self) -> str:
        """Text that is settled and was not given out before; half a character waits for its other half."""
        text = self._text(self.settled)
        if not self.work.finished:
            text = text.rstrip("\ufffd")
        told, self._told = self._told, max(self._told, len(text))
        return text[told:]

    def output(self) -> Output:
        """What became of it: all that is settled, where it was stopped."""
        canvas, tokens = self.canvas, self.settled
        ended = bool(tokens) and tokens[-1] in canvas.eos_ids
        return Output(
            text=self._text(tokens),
            tokens=tokens,
            prompt_tokens=self._prompt,
            finish_reason="stop" if ended else "cancelled" if self.work.result is None else "length",
            stopped_by=tokens[-1] if ended else None,
            seed=canvas.seed,
            trace=canvas.trace,
            logprobs=None,
        )

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
    method: Diffusion,
    temperature: float,
    hold: Hold | None = None,
) -> None:
    """Fill canvases to the end, each as it would be alone, in passes that they share."""
    runs = [filled(model, canvas, method, temperature, hold) for canvas in canvases]
    engine.run([engine.enter(run, canvas.trace) for run, canvas in zip(runs, canvases, strict=True)])
