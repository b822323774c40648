"""Parallel verification on small machines: a few texts whose thinking has a budget, weighted by a head on the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.core.trace import Step, Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import share_prompt
from decodery.models.cache.cache import KVCache
from decodery.models.loaders.adapters import Adapter, tuned
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.logits_processor import require_number
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.step.forward_request import ForwardCoroutine, gather
from decodery.step.sequence import Sequence

from .answers import AnswerExtractor, Kind, Projection
from .base import require_written
from .handed import hand_over, read_prompt
from .judged import JudgedSearch
from .marks import force
from .pool import TextPool, require_count, scored
from .votes import elected, vote_weights


@register(
    "edge",
    paper="Efficient Reasoning on the Edge (2026)",
    guarantee="no text thinks for longer than its budget; most=none is weighted-vote or best-of-n, n=1 plain decoding",
    requirements=("a scorer of answers", "a model that marks the end of its thinking"),
    texts=("end", "cue", "pattern"),
)
@dataclass(frozen=True)
class Edge(JudgedSearch):
    """Draws n texts, ends their thinking after `most` tokens, and takes a vote weighted by a trained head.

    Passes with an adapter have no drafts. The trace counts the tokens that were "forced", and 1 as "reasoned" where
    texts think. Memory: a cache per text, and see the source adapter.

    Attributes:
        n: Texts drawn, no published number.
        most: Tokens of thinking, no published number, None for no bound; after them `end` and then `cue` are written in
            one pass, and the text goes on to its answer.
        end, cue: Texts or token ids; a mark that the model has begun is completed.
        choose: "vote" weights answers as weighted-vote does (answer, pattern), but that what a linear head finds worth
            less than nothing counts as nothing; "best" is best-of-n.
        answer, pattern: As for self-consistency.
        adapter: What texts are written with, a file of `decodery train lora --masked` or an `Adapter`. The prompt is
            read by the model as it is, but for its last token, and all texts share that.
        switch: A head on the model's states of the prompt, made by `decodery train value --switch`; where their mean
            says less than `threshold`, the text is one that the model writes by itself, without adapter, budget and
            vote.
        threshold: Score of the prompt below which the text is written without adapter, budget and vote.
        scorer: Of finished texts, as in value-head(head=FILE), which `decodery train value` makes: it reads the state
            that the model has of a text already, so that verifying costs a row per text and no second model.
    """

    n: int = 4
    most: int | None = 1024
    end: str | tuple[int, ...] = "</think>"
    cue: str | tuple[int, ...] = ""
    choose: Literal["vote", "best"] = "vote"
    answer: Kind | Projection = "auto"
    pattern: str = ""
    adapter: Adapter | str | None = None
    switch: LinearValue | str | None = None
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.switch, str):
            object.__setattr__(self, "switch", LinearValue.load(self.switch))
        require_number("the threshold of edge", self.threshold)
        require_count("edge", "n", self.n)
        if self.most is not None:
            require_count("edge", "most", self.most)
        if not self.end:
            raise SettingsError("edge needs the mark that ends thinking")
        if self.choose not in ("vote", "best"):
            raise SettingsError(f"edge chooses by vote or the best, not {self.choose!r}")
        if not self.judge.answers:
            raise SettingsError("edge judges whole texts: give a scorer of answers")
        AnswerExtractor(self.answer, self.pattern)

    @property
    def requirements(self) -> Requirements:
        own = () if self.switch is None else (self._switch.tap,)
        changed = self.adapter is not None or self.switch is not None
        return Requirements(rows=True, taps=tuple(dict.fromkeys((*self.judge.requirements.taps, *own))), alone=changed)

    @property
    def _switch(self) -> LinearValue:
        assert isinstance(self.switch, LinearValue)
        return self.switch

    def bind(self, tokenizer: Tokenizer) -> Edge:
        def ids(words: str | tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(words, str):
                return words
            require_written(tokenizer, words, "a text of edge")
            return tuple(tokenizer.encode(words, special=False))

        return replace(super().bind(tokenizer), end=ids(self.end), cue=ids(self.cue))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        if any(isinstance(words, str) and words for words in (self.end, self.cue)) and self.most is not None:
            raise SettingsError("edge has texts: give token ids, or search through `LLM`")
        pool = TextPool(engine, request, self, 1)
        self.fits(pool.texts[0].request.model)
        if (yield from self._opened(engine, pool)) and self.most is not None:
            yield from self._think(pool, self.most, progress)
        yield from pool.write(progress)
        scores = yield from scored(self.judge, pool.texts)
        judged = [(seq, score) for seq, score in zip(pool.texts, scores, strict=True) if score is not None]
        texts, worth = [seq for seq, _ in judged], [score for _, score in judged]
        if self.choose == "vote":
            answers = yield from AnswerExtractor(self.answer, self.pattern).of_texts(texts)
            sure = worth if self.judge.log else [max(each, 0.0) for each in worth]
            return pool.finish(elected(texts, answers, vote_weights(self.judge, sure)))
        for seq, score in judged:
            seq.score = score
        return pool.finish([texts[number] for number in sorted(range(len(texts)), key=lambda number: -worth[number])])

    def _opened(self, engine: Engine, pool: TextPool) -> ForwardCoroutine[bool]:
        """Open the texts; whether they are to think."""
        if self.adapter is None and self.switch is None:
            pool.open(self.n)
            return True
        (first,) = pool.texts
        if not isinstance(first.cache, KVCache) or not first.cache.plain or first.cache.prefix:
            raise UnsupportedModel("edge shares the keys and values of a prompt: leave cache policies out")
        if self.switch is not None:
            ValueHead(self._switch).fits(first.request.model)
            # It looks at all of the prompt, also at what earlier texts have read of it.
            first.cache.truncate(0)
        states = yield from read_prompt(first, engine.prefill_chunk, () if self.switch is None else (self._switch.tap,))
        if states and self._hard(states[self._switch.tap]) < self.threshold:
            return False
        count("reasoned")
        pool.open(self.n)
        for seq in pool.texts[1:]:
            share_prompt(seq, first)
        if self.adapter is not None:
            loaded = Adapter.load(self.adapter) if isinstance(self.adapter, str) else self.adapter
            for seq in pool.texts:
                hand_over(seq, tuned(seq.request.model, loaded))
        return True

    def _hard(self, states: torch.Tensor) -> float:
        """What the switch says of a prompt. states: [rows, hidden]."""
        head = self._switch
        return float(states.to(head.weight).mean(dim=0) @ head.weight + head.bias)

    def _think(self, pool: TextPool, most: int, progress: Progress) -> ForwardCoroutine[None]:
        """Let all texts think, up to the mark or `most` tokens, and write the mark where it did not come by itself."""
        end, cue = [int(token) for token in self.end], [int(token) for token in self.cue]
        for seq in pool.texts:
            seq.segment_end = _thought(end, most)
        yield from pool.write(
            progress, lambda seq: seq.segment_end is None or seq.position == 0 or not seq.segment_end(seq)
        )
        forced, aside = [], Trace()
        for seq in pool.texts:
            seq.segment_end = None
            if not seq.finished and not _ends_with(seq.generated, end):
                words = [*end[_begun(seq.generated, end) :], *cue]
                count("forced", len(words))
                forced.append(force(seq, words, aside))
        yield from gather(forced)
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
