"""Budget forcing: a model that thinks is made to think longer, or to come to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.writing import WholeTexts, keep
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.pieces import Pieces
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.step.detokenizer import TextStream
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .base import Search, require_written
from .marks import TextSnapshot, force
from .pool import TextPool


@register(
    "budget-forcing",
    paper="s1: Simple test-time scaling (2025)",
    guarantee="thinking of the given number of tokens; ignore=0 and most=none is plain decoding",
    requirements=("a model that marks the end of its thinking",),
    texts=("end", "wait", "cue"),
)
@dataclass(frozen=True)
class BudgetForcing(Search):
    """Writes one text; forces its thinking to go on a few times and to end at a limit.

    The trace counts "ignored" ends and the tokens that were "forced". After a server the mark is looked for in what
    the text says, and tokens are the pieces that the server sends.

    Attributes:
        end: What marks the end of thinking, begun at the start of the text.
        wait: What is written where an end of thinking is taken back, a text or token ids.
        cue: What is written after `end` when thinking is ended, a text or token ids.
        ignore: How often the mark, or an end of the text in its place, is taken back and `wait` is written there.
        most: Tokens of thinking, those of `wait` included, after which `end` and then `cue` are written; None leaves
            that to the model. end, wait and cue are texts or token ids; a mark that the model spells with other tokens
            is not seen.
    """

    end: str | tuple[int, ...] = "</think>"
    wait: str | tuple[int, ...] = "Wait"
    cue: str | tuple[int, ...] = ""
    ignore: int = 1
    most: int | None = None

    requirements = Requirements(continues=True)

    def __post_init__(self) -> None:
        if not isinstance(self.ignore, int) or self.ignore < 0:
            raise SettingsError(f"budget-forcing ignores an end 0 times or more, not {self.ignore!r}")
        if self.most is not None and self.most < 1:
            raise SettingsError(f"budget-forcing lets a model think for at least 1 token, not {self.most!r}")
        if not self.end or (self.ignore and not self.wait):
            raise SettingsError("budget-forcing needs the end of thinking, and what is written in its place")

    def bind(self, tokenizer: Tokenizer) -> BudgetForcing:
        def ids(words: str | tuple[int, ...]) -> tuple[int, ...]:
            if not isinstance(words, str):
                if isinstance(tokenizer, Pieces):
                    raise SettingsError("a server's token ids are not known here: give end, wait and cue as texts")
                return words
            require_written(tokenizer, words, "a text of budget-forcing")
            return tuple(tokenizer.encode(words, special=False))

        # What is never written need not be in the alphabet of a small model.
        return replace(self, end=ids(self.end), wait=ids(self.wait) if self.ignore else (), cue=ids(self.cue))

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        words = (self.end, self.wait, self.cue)
        if any(isinstance(each, str) and each for each in words):
            raise SettingsError("budget-forcing has texts: give token ids, or search through `LLM`")
        end, wait, cue = (list(map(int, each)) for each in words)
        pool, ignored, marks = TextPool(engine, request, self, 1), 0, deque[TextSnapshot](maxlen=len(end) + 1)
        (text,) = pool.texts
        if isinstance(text.request.model, WholeTexts):
            return (yield from self._after_a_server(pool, text.request.model, progress))
        thinking = True
        while not text.finished:
            marks.append(TextSnapshot.of(text))
            yield from engine.write([text], pool.trace)
            progress("budget-forcing", text.position, text.request.max_new_tokens)
            if not thinking:
                continue
            ended = _ended(text, end, marks[0].length)
            # A mark that began in time may still be on its way.
            spent = text.position - len(end) + 1 if ended is None else ended
            if self.most is not None and spent >= self.most:
                yield from self._write_instead(pool, marks, self.most, [*end, *cue])
                thinking = False
            elif ended is not None and ignored < self.ignore:
                ignored += 1
                yield from self._write_instead(pool, marks, ended, wait)
            elif ended is not None:
                thinking = False
        count("ignored", ignored)
        return pool.finish([text])

    def _after_a_server(
        self, pool: TextPool, model: WholeTexts, progress: Progress
    ) -> ForwardCoroutine[list[Sequence]]:
        """The same by what the text says: the mark is looked for in it, and the server goes on after other words."""
        (text,), mark = pool.texts, model.pieces.decode(map(int, self.end))
        if text.request.logprobs is not None:
            raise SettingsError(
                "a server tells no log-probabilities of the words that budget-forcing writes: leave out logprobs"
            )
        assert text.text is not None
        blank, ignored, thinking, since = text.text.fork(), 0, True, 0

        def stands(seq: Sequence) -> bool:
            assert seq.text is not None
            spent = self.most is not None and seq.position >= self.most
            return thinking and (spent or mark in seq.text.text[since:])

        def goes_on(seq: Sequence) -> bool:
            return seq.position == begun or not stands(seq)

        while not text.finished:
            begun, text.segment_end = text.position, stands
            yield from pool.write(progress, goes_on)
            if not thinking or not text.complete:
                continue
            said = text.text.text
            at = said.find(mark, since)
            if at < 0 and text.finish_reason != "stop":
                instead, thinking, at = [*self.end, *self.cue], text.finished, len(said)
            elif ignored < self.ignore:
                ignored += 1
                instead = [*self.wait]
            else:
                thinking = False
                continue
            if text.finish_reason == "length":
                break
            _say_instead(text, model, blank, at if at >= 0 else len(said), [int(token) for token in instead])
            pool.trace.ledger.tokens += len(instead)
            since = len(text.text.text)
        count("ignored", ignored)
        text.segment_end = None
        return pool.finish([text])

    def _write_instead(
        self, pool: TextPool, marks: deque[TextSnapshot], place: int, tokens: list[int]
    ) -> ForwardCoroutine[None]:
        """Write `tokens` in place of all that stands after the first `place` tokens of the text."""
        (text,) = pool.texts
        first = text.request.prompt_length + place
        while marks[-1].length > first:
            marks.pop()
        again = text.tokens[marks[-1].length : first]
        marks[-1].restore(text)
        text.cache.truncate(len(text.tokens) - 1)
        yield from force(text, [*again, *tokens], pool.trace)
        # What is written a second time is nothing new.
        pool.trace.ledger.tokens -= len(again)
        count("forced", len(tokens))


def _say_instead(text: Sequence, model: WholeTexts, blank: TextStream, at: int, tokens: list[int]) -> None:
    """Let a text stand as if `tokens` had been written after its first `at` characters."""
    kept, left = list[int](), at
    for token in text.generated:
        piece = model.pieces.decode([token])
        if len(piece) > left:
            kept += [model.pieces.id_of(piece[:left])] if left else []
            break
        kept.append(token)
        left -= len(piece)
    text.tokens[text.request.prompt_length :] = [*kept, *tokens]
    text.text, text.token_logprobs = blank.fork(), []
    for token in text.generated:
        text.text.push(token)
    text.finish_reason = "length" if text.remaining <= 0 else None
    text.stopped_by = None
    keep(text, None)
    count("forced", len(tokens))


def _ended(text: Sequence, end: list[int], since: int) -> int | None:
    """Where thinking ended, counted in generated tokens: before the mark, or before the end of the text.

    since: the length, prompt included, up to which no end has been found.
    """
    first = max(since - len(end) + 1, text.request.prompt_length)
    for start in range(first, len(text.tokens) - len(end) + 1):
        if text.tokens[start : start + len(end)] == end:
            return start - text.request.prompt_length
    # Before the first token the last one is the prompt's.
    return text.position - 1 if text.position and text.last_token in text.request.eos_ids else None
