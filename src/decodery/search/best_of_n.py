"""Best of N: of several texts the one that a scorer values most."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import ContextFull, ServerError, SettingsError
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .judged import JudgedSearch
from .pool import Sampled, TextPool, require_count, scored


@register(
    "best-of-n",
    paper="Training Verifiers to Solve Math Word Problems (2021)",
    guarantee="the best of n draws from the model's distribution; n=1 is plain decoding",
    requirements=("a scorer of answers",),
)
@dataclass(frozen=True)
class BestOfN(Sampled, JudgedSearch):
    """Draws n texts and returns them, the one that the scorer values most first.

    Of equals the one drawn first. Equal texts are scored once. A text whose score fails is left out, which the trace
    tells as "unscored". Memory: a cache per text.

    Attributes:
        n: Texts, by the request's own sampler, drafter and rule at seeds that count up from its seed, all in the same
            passes.
        scorer: Of finished texts, as in log-probability(of=sum) or program-tests(file=tests.py).
    """

    n: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("best-of-n", "n", self.n)
        if not self.judge.answers:
            raise SettingsError("best-of-n judges whole texts: give a scorer of answers")

    def decide(self, pool: TextPool) -> ForwardCoroutine[list[Sequence]]:
        try:
            scores = yield from scored(self.judge, pool.texts)
        except (ContextFull, ServerError) as error:
            return pool.finish(pool.unjudged(error))
        for seq, score in zip(pool.texts, scores, strict=True):
            seq.score = score
        ranked = [seq for seq in pool.texts if seq.score is not None]
        return pool.finish(sorted(ranked, key=lambda seq: -(seq.score or 0.0)))
