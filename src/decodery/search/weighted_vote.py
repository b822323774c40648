"""Weighted vote: several texts vote for their answers, each with what a scorer says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..core.ask import Asking
from ..core.needs import Needs
from ..core.sequence import Sequence
from ..errors import ServerError, SettingsError
from ..model.store import Progress, silent
from ..registry import register, resolve
from ..score.base import Scorer, log_scores
from .answers import Answers, Kind
from .base import Search
from .pool import Pool, require_count, scored
from .votes import elected, no_answer

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from ..decode.request import Request
    from ..model.tokenizer import Tokenizer


@register(
    "weighted-vote",
    paper="Making Language Models Better Reasoners with Step-Aware Verifier (2023)",
    guarantee="self-consistency where all scores are equal",
    needs=("a scorer of answers",),
    texts=("pattern",),
)
@dataclass(frozen=True)
class WeightedVote(Search):
    """Draws n texts, and returns one for each of their answers, that of the answer with most weight first.

    scorer: of finished texts; a vote counts by its score, or by exp(score) where scores are logarithms. Scores are
    summed as they are. n, answer, pattern: as for self-consistency. Of an answer the text of most weight is returned;
    the score is the answer's share of all weight. A text whose score fails has no vote. Memory: a cache per text.
    """

    scorer: Scorer | str
    n: int = 16
    answer: Kind = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        require_count("weighted-vote", "n", self.n)
        object.__setattr__(self, "scorer", resolve("score", self.scorer))
        if not self.judge.answers:
            raise SettingsError("weighted-vote judges whole texts: give a scorer of answers")
        self._answers()

    @property
    def judge(self) -> Scorer:
        assert isinstance(self.scorer, Scorer)
        return self.scorer

    @property
    def needs(self) -> Needs:
        return self.judge.needs

    def bind(self, tokenizer: Tokenizer) -> WeightedVote:
        return replace(self, scorer=self.judge.bind(tokenizer))

    def _answers(self) -> Answers:
        return Answers(self.answer, self.pattern)

    def shortcoming(self, score: float) -> str | None:
        return no_answer(score, self.n)

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> Asking[list[Sequence]]:
        pool = Pool(engine, request, self, self.n)
        self.judge.fits(pool.texts[0].model)
        yield from pool.write(progress)
        try:
            scores = yield from scored(self.judge, pool.texts)
        except ServerError as error:
            texts = pool.unjudged(error)
            return pool.finish(elected(texts, self._answers().of_texts(texts)))
        voting = [(seq, score) for seq, score in zip(pool.texts, scores, strict=True) if score is not None]
        logs = log_scores(self.judge, torch.tensor([score for _, score in voting], dtype=torch.float64))
        # What all have in common changes no vote, and what is left does not vanish.
        weights = (logs - logs.max().clamp(min=-1e300)).exp().tolist()
        texts = [seq for seq, _ in voting]
        return pool.finish(elected(texts, self._answers().of_texts(texts), weights))
