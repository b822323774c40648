"""Diverse Beam Search: groups of beams, each pushed away from what the groups before it chose."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Branches, Search, law
from .beams import BeamGroup, EarlyStopping, Ending


@register(
    "diverse-beam",
    paper="Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models (2016)",
    guarantee="the first group is a beam search of width / groups beams",
)
@dataclass(frozen=True)
class DiverseBeam(Search):
    """Beam search in groups; a token costs more the more earlier beams chose it at the same step.

    Source: ashwinkalyan/dbs (2016), which staggers the groups in time.

    Attributes:
        width: Beams of all groups together, scored in one pass per token; groups must divide it.
        groups: Groups of beams.
        diversity: What a token loses in the selection for every earlier choice (Hamming dissimilarity). Within a group
            the penalised sums select and end; the list returned is ranked by the model's own sums, where transformers
            takes the penalised ones. A group that has ended no longer penalises.
        length_penalty, early_stopping: See `beam`.
    """

    width: int = 4
    groups: int = 4
    diversity: float = 0.5
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    requirements = Requirements(rows=True, alone=True, greedy=True, law=True)

    def __post_init__(self) -> None:
        require_number("the diversity of diverse-beam", self.diversity, least=0.0)
        if not isinstance(self.groups, int) or self.groups < 1 or self.width % self.groups:
            raise SettingsError(f"groups must divide the width of {self.width} evenly, which {self.groups!r} does not")
        self._ending()

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        groups = [BeamGroup(branches.root, self._ending()) for _ in range(self.groups)]
        # All groups begin with the same text, which is read once.
        logits = (yield from branches.score([branches.root])).expand(self.groups, -1)
        while True:
            beams = [beam.seq for group in groups for beam in group.running]
            logprobs, first = law(beams, logits), 0
            chosen: dict[int, float] = {}
            for group in groups:
                rows = slice(first, first + len(group.running))
                first = rows.stop
                tokens = group.step(logprobs[rows], logits[rows], chosen) if group.running else []
                for token in tokens:
                    chosen[token] = chosen.get(token, 0.0) + self.diversity
            progress("diverse beam search", beams[0].position + 1, beams[0].request.max_new_tokens)
            running = [beam.seq for group in groups for beam in group.running]
            if not running:
                break
            logits = yield from branches.score(running)
        found = [beam for group in groups for beam in group.finished]
        for beam in found:
            beam.seq.score = beam.normalised(beam.logprob, self.length_penalty)
        return branches.finish(sorted((beam.seq for beam in found), key=lambda seq: -(seq.score or 0.0)))

    def _ending(self) -> Ending:
        return Ending(self.width // self.groups, self.length_penalty, self.early_stopping)
