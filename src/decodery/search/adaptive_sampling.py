"""Adaptive sampling: texts are drawn until another one is unlikely to beat them, and the best is returned."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Literal

from decodery.core.errors import ContextFull, OutOfMemory, ServerError, SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.store import Progress, silent
from decodery.sampling.logits_processor import Stage, require_number
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .judged import JudgedSearch
from .pool import TextPool, leave_out, require_count, same_tokens, scored


@register(
    "adaptive-sampling",
    paper="Adaptive Inference-Time Compute: LLMs Can Predict if They Can Do Better, Even Mid-Generation (2024)",
    guarantee="a threshold that no score reaches is best-of-n where schedule=constant, one that every score reaches a "
    "single text; none on quality",
    requirements=(
        "a scorer that predicts whether another text would be better: benchmarks/train.py prm --labels restart",
    ),
)
@dataclass(frozen=True)
class AdaptiveSampling(JudgedSearch):
    """Draws up to n texts, and stops as soon as a scorer holds one for good enough.

    Returned are all of them, the best one first. The seeds count up from the request's, and equal texts are scored
    once. Without chance one text is all there is. A text whose score fails is left out. Of equal scores the text drawn
    first wins. The trace counts the texts "drawn". n and thresholds of 0.9 to 0.99 are those of the paper's
    experiments; width is no published setting. Memory: a cache per text.

    Attributes:
        n: Most texts drawn.
        threshold: On the scorer's scale.
        schedule: "rising" draws the first text greedily and number i at 1 - 2^-i, i from 0, of the request's
            temperature, as the first one should be the best single guess (a reading of the paper's exponential
            schedule); "constant" draws all at that temperature.
        width: Texts drawn side by side before it is asked again, which waits less and draws more.
        scorer: Of finished texts. Published is the chance that a fresh text of the same model would not be better,
            which asks what is to be gained here and not what is right: learned by a head, process-reward(head=FILE) of
            `python benchmarks/train.py prm --labels restart`, or value-head(head=FILE) of
            `decodery train value --restart`. Other scorers stop where they are satisfied.
    """

    n: int = 16
    threshold: float = 0.9
    schedule: Literal["rising", "constant"] = "rising"
    width: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("adaptive-sampling", "n", self.n)
        require_count("adaptive-sampling", "width", self.width)
        require_number("the threshold of adaptive-sampling", self.threshold)
        if self.schedule not in ("rising", "constant"):
            raise SettingsError(f"the schedule of adaptive-sampling is rising or constant, not {self.schedule!r}")
        if not self.judge.answers:
            raise SettingsError("adaptive-sampling judges whole texts: give a scorer of answers")

    @property
    def resumable(self) -> bool:
        return True

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        pool = TextPool(engine, request, self, 1 if request.sampler.greedy else self.n, self._warmed)
        self.judge.fits(pool.texts[0].request.model)
        drawn, errors = 0, list[Exception]()
        while pool.complete and drawn < len(pool.texts) and not self._satisfied(pool.texts[:drawn]):
            turn = set(map(id, pool.texts[drawn : drawn + self.width]))

            def takes_part(seq: Sequence, turn: set[int] = turn) -> bool:
                return id(seq) in turn

            yield from pool.write(progress, takes_part)
            begun, drawn = drawn, min(drawn + self.width, len(pool.texts))
            try:
                yield from self.score_from(pool.texts[:drawn], begun)
            except OutOfMemory:
                raise
            except Exception as error:
                errors += [error] * (drawn - begun)
                if isinstance(error, ServerError):
                    pool.complete = False
                    count("cut")
        count("drawn", drawn)
        ranked = [seq for seq in pool.texts[:drawn] if seq.score is not None]
        if not ranked and isinstance(errors[0], ContextFull | ServerError):
            return pool.finish(pool.unjudged(errors[0])[:drawn])
        if not ranked:
            raise errors[0]
        leave_out(errors, drawn)
        return pool.finish(sorted(ranked, key=lambda seq: -(seq.score or 0.0)))

    def _satisfied(self, texts: list[Sequence]) -> bool:
        return any(seq.score is not None and seq.score >= self.threshold for seq in texts)

    def score_from(self, texts: list[Sequence], begun: int) -> ForwardCoroutine[None]:
        """Give the texts from number `begun` on a score, asking only about what no earlier text says already."""
        first = same_tokens(texts)
        fresh = [number for number in range(begun, len(texts)) if first[number] == number]
        if fresh:
            scores = yield from scored(self.judge, [texts[number] for number in fresh])
            for number, score in zip(fresh, scores, strict=True):
                texts[number].score = score
        for number in range(begun, len(texts)):
            texts[number].score = texts[first[number]].score

    def _warmed(self, request: Request, number: int) -> Request:
        if self.schedule == "constant":
            return request
        found = copy(request)
        found.sampler = at_share(request.sampler, 1 - 0.5**number)
        return found


def at_share(sampler: Sampler, share: float) -> Sampler:
    """The same processors, but for a temperature that is this share of what it was."""
    if any(isinstance(processor, Temperature) for processor in sampler.processors):
        return Sampler(
            Temperature(processor.t * share) if isinstance(processor, Temperature) else processor
            for processor in sampler.processors
        )
    at = next(
        (n for n, processor in enumerate(sampler.processors) if processor.stage > Stage.TEMPERATURE),
        len(sampler.processors),
    )
    return Sampler([*sampler.processors[:at], Temperature(share), *sampler.processors[at:]])
