"""Canvases of an engine, filled together, and what became of them as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..model.protocol import LanguageModel
from ..output import Output
from .base import Diffusion
from .canvas import Canvas
from .held import Hold
from .run import filled

if TYPE_CHECKING:
    from ..decode.engine import Engine


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


def written(canvas: Canvas, decode: Callable[[list[int], list[int]], str]) -> Output:
    """What a canvas became. decode: the text of tokens behind those of a prompt; it ends before the end token."""
    tokens, prompt = canvas.output, [int(token) for token in canvas.tokens[: canvas.prompt_length]]
    stopped = tokens[-1] if tokens and tokens[-1] in canvas.eos_ids else None
    return Output(
        text=decode(prompt, tokens if stopped is None else tokens[:-1]),
        tokens=tokens,
        prompt_tokens=prompt,
        finish_reason="length" if stopped is None else "stop",
        stopped_by=stopped,
        seed=canvas.seed,
        trace=canvas.trace,
        logprobs=None,
    )
