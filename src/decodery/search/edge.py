"""Parallel verification on small machines: a few texts whose thinking has a budget, weighted by a head on the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..core.ask import Asking, together
from ..core.ledger import count
from ..core.needs import Needs
from ..core.sequence import Sequence
from ..core.trace import Step, Trace
from ..errors import SettingsError
from ..model.store import Progress, silent
from ..registry import register
from .answers import Answers, Kind
from .base import require_written
from .judged import Judged
from .marks import force
from .pool import Pool, require_count, scored
from .votes import elected, vote_weights

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from ..decode.request import Request
    from ..model.tokenizer import Tokenizer


@register(
    "edge",
    paper="Efficient Reasoning on the Edge (2026)",
    guarantee="no text thinks for longer than its budget; most=none is weighted-vote or best-of-n, n=1 plain decoding",
    needs=("a scorer of answers", "a model that marks the end of its thinking"),
    texts=("end", "cue", "pattern"),
)
@dataclass(frozen=True)
class Edge(Judged):
    """Draws n texts together, ends their thinking after `most` tokens, and lets them vote by what a head says of them.

    scorer: of finished texts, as in value-head(head=FILE), which `decodery train value` makes: it reads the state that
    the model has of a text already, so that verifying costs a row per text and no second model. most: tokens of
    thinking, None for no bound; behind them `end` and then `cue` are written in one pass, and the text goes on to its
    answer. end, cue: texts or token ids; a mark that the model has begun is completed. choose: "vote" weights answers
    as weighted-vote does (answer, pattern), "best" is best-of-n. n, most: no numbers are published. The method is more
    than decoding: adapters that only what is written goes through, the switch that turns them on, and the training that
    makes thinking short are not here. The trace counts the tokens that were "forced". Memory: a cache per text.
    """

    n: int = 4
    most: int | None = 1024
    end: str | tuple[int, ...] = "</think>"
    cue: str | tuple[int, ...] = ""
    choose: Literal["vote", "best"] = "vote"
    answer: Kind = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("edge", "n", self.n)
        if self.most is not None:
            require_count("edge", "most", self.most)
        if not self.end:
            raise SettingsError("edge needs the mark that ends thinking")
        if self.choose not in ("vote", "best"):
            raise SettingsError(f"edge chooses by vote or the best, not {self.choose!r}")
        if not self.judge.answers:
            raise SettingsError("edge judges whole texts: give a scorer of answers")
        Answers(self.answer, self.pattern)

    @property
    def needs(self) -> Needs:
        return Needs(rows=True, taps=self.judge.needs.taps)

    def bind(self, tokenizer: Tokenizer) -> Edge:
        def ids(words: str | tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(words, str):
                return words
            require_written(tokenizer, words, "a text of edge")
            return tuple(tokenizer.encode(words, special=False))

        return replace(super().bind(tokenizer), end=ids(self.end), cue=ids(self.cue))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> Asking[list[Sequence]]:
        if any(isinstance(words, str) and words for words in (self.end, self.cue)) and self.most is not None:
            raise SettingsError("edge has texts: give token ids, or search through `LM`")
        pool = Pool(engine, request, self, self.n)
        self.fits(pool.texts[0].model)
        if self.most is not None:
            yield from self._think(pool, self.most, progress)
        yield from pool.write(progress)
        scores = yield from scored(self.judge, pool.texts)
        judged = [(seq, score) for seq, score in zip(pool.texts, scores, strict=True) if score is not None]
        texts, worth = [seq for seq, _ in judged], [score for _, score in judged]
        if self.choose == "vote":
            answers = Answers(self.answer, self.pattern).of_texts(texts)
            return pool.finish(elected(texts, answers, vote_weights(self.judge, worth)))
        for seq, score in judged:
            seq.score = score
        return pool.finish([texts[number] for number in sorted(range(len(texts)), key=lambda number: -worth[number])])

    def _think(self, pool: Pool, most: int, progress: Progress) -> Asking[None]:
        """Let all texts think, up to the mark or `most` tokens, and write the mark where it did not come by itself."""
        end, cue = [int(token) for token in self.end], [int(token) for token in self.cue]
        for seq in pool.texts:
            seq.held = _thought(end, most)
        yield from pool.write(progress, lambda seq: seq.held is None or seq.position == 0 or not seq.held(seq))
        forced, aside = [], Trace()
        for seq in pool.texts:
            seq.held = None
            if not seq.finished and not _ends_with(seq.generated, end):
                words = [*end[_begun(seq.generated, end) :], *cue]
                count("forced", len(words))
                forced.append(force(seq, words, aside))
        yield from together(forced)
        if forced:
            # They shared one pass.
            pool.trace.steps.append(Step(rows=sum(step.rows for step in aside.steps)))


def _thought(end: list[int], most: int) -> Callable[[Sequence], bool]:
    return lambda seq: seq.position >= most or _ends_with(seq.generated, end)


def _ends_with(written: list[int], end: list[int]) -> bool:
    return written[-len(end) :] == end


def _begun(written: list[int], end: list[int]) -> int:
    """How many tokens of the mark stand at the end of what is written."""
    return next(length for length in range(len(end) - 1, -1, -1) if not length or written[-length:] == end[:length])
