"""A text that is written while its source arrives, and what a way of doing so decides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from decodery.core.abstract import Contract
from decodery.core.errors import PromptError, SettingsError
from decodery.core.trace import Step, Trace
from decodery.engine.engine import Engine
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.tokenizers.vocabularies import excluded
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.step.encoded import ENCODER
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, score

__all__ = ["SimultaneousPolicy", "SourceStream", "StreamOutput"]


@dataclass(frozen=True)
class StreamOutput:
    """What there is after a chunk of the source.

    Attributes:
        committed: Tokens that never change again.
        guess: Those after them.
        read: Tokens of the source that the encoder has read.
        text, guessed: The texts of both, where there is a tokenizer.
    """

    committed: tuple[int, ...]
    guess: tuple[int, ...]
    read: int
    text: str = ""
    guessed: str = ""


@dataclass
class SourceStream:
    """One source on its way, and the text so far.

    Attributes:
        eos_ids: Tokens that mean "wait for more", and are never written.
        reading: The encoder's cache.
        cache: The decoder's, whose memory grows.
        source: Tokens read.
        ahead: Those that have come and are no whole block yet.
        written: The hypothesis, of which `committed` tokens stand.
        reads: Of each of these, how much of the source had been read.
        ended: The source is complete.
        state: The method's own.
    """

    model: EncoderDecoder
    eos_ids: frozenset[int]
    reading: KVCache
    cache: KVCache
    source: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    committed: int = 0
    reads: list[int] = field(default_factory=list)
    chunks: int = 0
    ended: bool = False
    state: Any = None
    trace: Trace = field(default_factory=Trace)
    _stands: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: LanguageModel, eos_ids: Sequence[int]) -> SourceStream:
        """A stream of which nothing has come.

        Raises:
            SettingsError: For a model that cannot read a source in blocks.
        """
        if not isinstance(model, EncoderDecoder) or model.config.block is None:
            raise SettingsError(
                "only an encoder that reads its source in blocks can be listened to: make a model that does with "
                "`python benchmarks/train.py seq2seq reorder --block 2 --out DIR`"
            )
        return cls(model, frozenset(eos_ids), model.encoder.new_cache(), model.new_cache())

    @property
    def heard(self) -> StreamOutput:
        return StreamOutput(
            tuple(self.written[: self.committed]), tuple(self.written[self.committed :]), len(self.source)
        )

    @property
    def limit(self) -> int:
        """How many tokens the text may have."""
        return self.model.config.max_positions - 1

    def arrive(self, tokens: Sequence[int], ended: bool) -> ForwardCoroutine[bool]:
        """Let the encoder read what has come, whole blocks of it until the last.

        Whether there was anything to read.
        """
        if self.ended:
            raise ValueError("the source of this stream has ended: begin another one")
        self.ended = ended
        self.ahead += tokens
        if self.ahead and not 0 <= min(self.ahead) <= max(self.ahead) < self.model.vocab_size:
            raise PromptError(f"the source has token ids outside the model's vocabulary of {self.model.vocab_size}")
        block = self.model.config.block
        assert block is not None
        ready = len(self.ahead) if ended else len(self.ahead) // block * block
        if not ready:
            return False
        encoder, some = self.model.encoder, self.ahead[:ready]
        (read,) = yield [ForwardRequest(encoder, encoder.segment(some, self.reading), (-1,), ENCODER)]
        self.reading.keep(range(ready))
        self.source, self.ahead = self.source + some, self.ahead[ready:]
        more = self.model.remembered(read.hidden[-1])
        self.cache.memory = more if self.cache.memory is None else self.cache.memory.extended(more)
        self.chunks += 1
        return True

    def reread(self, first: int) -> ForwardCoroutine[torch.Tensor]:
        """Read the text again from place `first` on, with all of the source that has come in view.

        Rows before `first` stay as they were read, with less of the source in view.

        Returns:
            Logits [len(written) - first + 1, vocab]: row i of what is written at place first + i, the last one of what
            follows.
        """
        rows = [self.model.config.start_id, *self.written][first:]
        self.cache.truncate(first)
        scored = yield from score(self.model, Segment.chunk(rows, self.cache))
        self.cache.keep(range(len(rows)))
        self.trace.steps.append(Step(rows=len(rows)))
        return excluded(self.model, scored.logits)

    def cut(self, place: int) -> None:
        """Forget what is written from a place on."""
        if place < self.committed:
            raise ValueError(f"{self.committed} tokens are committed, and place {place} is one of them")
        del self.written[place:]
        self.cache.truncate(place + 1)

    def step(self, logits: torch.Tensor) -> ForwardCoroutine[torch.Tensor | None]:
        """Write the most likely token of logits [vocab]; returns those after it, None where the model waits."""
        token = int(logits.argmax())
        if token in self.eos_ids or len(self.written) >= self.limit:
            return None
        self.written.append(token)
        return (yield from self.reread(len(self.written)))[-1]

    def extend(self, logits: torch.Tensor | None, most: int) -> ForwardCoroutine[None]:
        """Write on greedily after logits [vocab] until the model waits, up to `most` tokens in all."""
        while logits is not None and len(self.written) < most:
            logits = yield from self.step(logits)

    def verify(self, floor: int) -> ForwardCoroutine[torch.Tensor]:
        """Cut the text where the model, with all of the source in view, would write something else.

        One pass over all of it, as over a draft; what stands is what greedy decoding writes after the first `floor`
        tokens, which are taken as they are.

        Returns:
            Logits [vocab] of what follows.
        """
        logits = yield from self.reread(0)
        best = logits.argmax(dim=-1).tolist()
        for place in range(floor, len(self.written)):
            if best[place] != self.written[place]:
                self.cut(place)
                break
        return logits[len(self.written)]

    def commit(self, length: int) -> None:
        """Let the first `length` tokens stand for good.

        Args:
            length: Tokens of `written`; fewer than stand already change nothing.

        Raises:
            ValueError: What stood before is not what `written` begins with, so a method has taken it back.
        """
        if self.written[: self.committed] != self._stands:
            raise ValueError(f"{self.committed} tokens are committed, and the text does not begin with them any more")
        self._stands = self.written[: max(length, self.committed)]
        self.reads += [len(self.source)] * (length - self.committed)
        self.committed = max(length, self.committed)


@dataclass(frozen=True)
class SimultaneousPolicy(Contract):
    """How a text is written while its source arrives. Fields are settings."""

    @abstractmethod
    def hear(self, stream: SourceStream) -> ForwardCoroutine[None]:
        """More of the source has been read: bring the text up to it, and commit what stands.

        All of it is committed by `listening` where the source has ended. What stands stays: `SourceStream.cut` and
        `SourceStream.commit` refuse a text that does not begin with it.
        """


def listening(
    method: SimultaneousPolicy, stream: SourceStream, tokens: Sequence[int], ended: bool = False
) -> ForwardCoroutine[StreamOutput]:
    """A chunk of the source has come.

    Args:
        ended: It was the last one.
    """
    came = yield from stream.arrive(tokens, ended)
    if came or (ended and stream.source):
        yield from method.hear(stream)
    stream.commit(len(stream.written) if ended else stream.committed)
    return stream.heard


def stream_outputs(
    engine: Engine,
    tokenizer: Tokenizer,
    method: SimultaneousPolicy,
    stream: SourceStream,
    chunks: Iterable[str | Sequence[int]],
) -> Iterator[StreamOutput]:
    """The text after each chunk of a source, texts or token ids; the last chunk ends the source."""
    coming = iter(chunks)
    chunk = next(coming, None)
    while chunk is not None:
        following = next(coming, None)
        tokens = tokenizer.encode(chunk, special=False) if isinstance(chunk, str) else list(chunk)
        engine.run([engine.enter(listening(method, stream, tokens, following is None), stream.trace)])
        heard = stream.heard
        text = tokenizer.decode(heard.committed)
        yield replace(heard, text=text, guessed=tokenizer.decode([*heard.committed, *heard.guess]).removeprefix(text))
        chunk = following


def agreed(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    place = 0
    while place < min(len(first), len(second)) and first[place] == second[place]:
        place += 1
    return place
