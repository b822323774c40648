"""Early pruning: texts are judged after their first tokens, and only those that promise most are written to the end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from decodery.core.errors import ContextFull, ServerError, SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .judged import JudgedSearch
from .pool import TextPool, require_count, scored


@register(
    "early-pruning",
    paper="Adaptive Inference-Time Compute: LLMs Can Predict if They Can Do Better, Even Mid-Generation (2024)",
    guarantee="keep=1 is best-of-n; none on quality",
    requirements=("a scorer of beginnings and answers: benchmarks/train.py prm --labels restart",),
)
@dataclass(frozen=True)
class EarlyPruning(JudgedSearch):
    """Draws n texts, judges them after `after` tokens, lets the share `keep` of them go on.

    Texts are returned by score. n=16 is that of the paper's experiments, which prunes after 64 to 128 tokens and keeps
    a quarter to a half. A text whose score fails is left. The trace counts the texts that were "pruned", and what they
    had written among the "discarded" tokens. Memory: a cache per text.

    Attributes:
        n: Texts drawn.
        after: Tokens after which texts are judged.
        keep: The share that goes on of the texts that have not ended by then, rounded up; those that have ended stay.
            Of equal scores the text drawn first goes on.
        scorer: Of beginnings and of answers; published is the chance that a fresh text of the same model would not be
            better, see adaptive-sampling.
    """

    n: int = 16
    after: int = 64
    keep: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("early-pruning", "n", self.n)
        require_count("early-pruning", "after", self.after)
        require_number("keep of early-pruning", self.keep, above=0.0, most=1.0)
        if not (self.judge.answers and self.judge.prefixes):
            raise SettingsError("early-pruning judges texts early and at their ends: give a scorer of both")

    @property
    def requirements(self) -> Requirements:
        return Requirements(rows=True, taps=self.judge.requirements.taps)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        pool = TextPool(engine, request, self, self.n)
        self.judge.fits(pool.texts[0].request.model)
        if self.keep < 1:
            yield from pool.write(progress, lambda seq: seq.position < self.after)
        try:
            if self.keep < 1:
                yield from self._prune([seq for seq in pool.texts if not seq.finished])
            yield from pool.write(progress)
            kept = [seq for seq in pool.texts if seq.finish_reason != "cancelled"]
            scores = yield from scored(self.judge, kept)
        except (ContextFull, ServerError) as error:
            return pool.finish(pool.unjudged(error))
        for seq, score in zip(kept, scores, strict=True):
            seq.score = score
        ranked = [seq for seq in kept if seq.score is not None]
        return pool.finish(sorted(ranked, key=lambda seq: -(seq.score or 0.0)))

    def _prune(self, going: list[Sequence]) -> ForwardCoroutine[None]:
        """Cancel those of these texts that do not go on."""
        if len(going) < 2:
            return
        scores = yield from scored(self.judge, going)
        order = sorted(range(len(going)), key=lambda n: math.inf if (score := scores[n]) is None else -score)
        for number in order[math.ceil(self.keep * len(going)) :]:
            going[number].cancel()
            count("pruned")
