"""Beam search: the most likely texts that a few branches at a time lead to."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Branches, Search, law
from .beams import BeamGroup, EarlyStopping, Ending


@register(
    "beam", paper="Sequence to Sequence Learning with Neural Networks (2014)", guarantee="width 1 is greedy decoding"
)
@dataclass(frozen=True)
class Beam(Search):
    """Follows the most likely `width` texts at a time and returns them, best first.

    All as in transformers, whose scores and texts it gives. Memory: a cache per beam.

    Attributes:
        width: Beams, all of them scored in one pass per token.
        length_penalty: A text's score is its summed log-probability divided by length ** length_penalty, the end token
            counted.
        early_stopping: True ends with `width` finished texts, false once the best running one would not be among them
            if it ended, never once none can get among them.
    """

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    requirements = Requirements(rows=True, alone=True, greedy=True, law=True)

    def __post_init__(self) -> None:
        self._ending()

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        group = BeamGroup(branches.root, self._ending())
        while group.running:
            beams = [beam.seq for beam in group.running]
            logits = yield from branches.score(beams)
            group.step(law(beams, logits), logits, {})
            progress("beam search", beams[0].position + 1, beams[0].request.max_new_tokens)
        for beam in group.finished:
            beam.seq.score = beam.normalised(beam.total, self.length_penalty)
        return branches.finish([beam.seq for beam in group.finished])

    def _ending(self) -> Ending:
        return Ending(self.width, self.length_penalty, self.early_stopping)
