"""A model behind a server: its texts are asked for over the network and grow as they come."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Condition, Thread, get_ident
from typing import Any

from decodery.core.errors import DecoderyError, ServerError, UnsupportedModel
from decodery.core.registry import method_of
from decodery.models.loaders.endpoint import CHAT, PLAIN, Endpoint, Offers, likely
from decodery.sampling.frequency_penalty import FrequencyPenalty
from decodery.sampling.presence_penalty import PresencePenalty
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature
from decodery.sampling.top_p import TopP
from decodery.step.sequence import FinishReason, Sequence, TokenLogprob

from .writing import WholeTexts, cut, end, keep, own

PLAIN_PROMPT = 1
"""The number that stands for a prompt that is to be continued as it is, without a chat template."""
_MOST_STOPS = 4
"""Stop strings that every server takes; further ones are watched for here."""
_REASONS: dict[str, FinishReason] = {"length": "length", "cancelled": "cancelled"}


@dataclass(frozen=True)
class Piece:
    """What came of a text.

    Attributes:
        tokens: Their texts, one by one where the server tells.
        logprobs: Log-probability and likely tokens of each.
        reason: Why it ended.
        error: Why it was cut.
    """

    tokens: tuple[str, ...] = ()
    logprobs: tuple[tuple[float, tuple[tuple[str, float], ...]], ...] = ()
    reason: FinishReason | None = None
    error: DecoderyError | None = None
    usage: dict[str, Any] | None = None
    retries: int = 0


@dataclass(eq=False)
class Call:
    """A text on its way.

    Attributes:
        thread: Who waits for it.
        begun: When.
        pieces: What has come and is not taken yet.
    """

    seq: weakref.ref[Sequence]
    thread: int = field(default_factory=get_ident)
    begun: float = field(default_factory=time.monotonic)
    pieces: deque[Piece] = field(default_factory=deque)

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        seq = self.seq()
        return seq is not None and not seq.finished


class RemoteModel(WholeTexts):
    """Writes texts by a server.

    Args:
        connections: Texts that it is asked for at a time; others wait.
    """

    def __init__(self, endpoint: Endpoint, offers: Offers, connections: int) -> None:
        super().__init__(f"the model {offers.model} behind a server", logprobs=any(offers.logprobs.values()))
        self.endpoint, self.offers, self.connections = endpoint, offers, connections
        self._news = Condition()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._jobs: deque[Callable[[], None]] = deque()
        self._workers = 0

    def advance(self, seq: Sequence) -> None:
        """See `Writer.advance`; streams are read by threads of their own."""
        call: Call | None = own(seq, self.name)
        if call is None:
            path, body = self.body(seq)
            call = Call(weakref.ref(seq))
            keep(seq, call)
            self._begin(call, path, body)
            return
        with self._news:
            if not call.pieces:
                mine = [each for each in self._calls if each.thread == call.thread and each.wanted]
                self._news.wait_for(lambda: any(each.pieces for each in mine))
            pieces = [call.pieces.popleft() for _ in range(len(call.pieces))]
        for piece in pieces:
            self._take(seq, call, piece)
        if seq.finished:
            self._calls.discard(call)

    def body(self, seq: Sequence) -> tuple[str, dict[str, Any]]:
        """Route and request for a text.

        Raises:
            UnsupportedModel: For what servers have no field for.
        """
        if seq.request.conversation is None:
            self.refuse("reads no token ids")
        prompt, plain = seq.request.conversation.prompt, seq.tokens[0] == PLAIN_PROMPT
        path = PLAIN if plain else CHAT
        if plain and not (self.offers.plain and isinstance(prompt, str)):
            self.refuse("continues no plain text: leave out apply_chat_template=False, or")
        if not plain and not self.offers.chat:
            self.refuse("takes no chat messages: give apply_chat_template=False, or")
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        stop = list(seq.text.stop[:_MOST_STOPS]) if seq.text is not None else []
        most = self.offers.logprobs.get(path)
        if seq.request.logprobs and most is None:
            self.refuse("returns no log-probabilities")
        # Where tokens are told of at all they are asked for: a piece of a stream may hold several.
        top = None if most is None else min(seq.request.logprobs or 0, most)
        return path, {
            "model": self.offers.model,
            **({"prompt": prompt} if plain else {"messages": turns}),
            "max_tokens": seq.request.max_new_tokens,
            **sampling(seq.request.sampler),
            "seed": seq.request.seed & (1 << 63) - 1,
            **({"stop": stop} if stop else {}),
            **likely(path, top),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _begin(self, call: Call, path: str, body: dict[str, Any]) -> None:
        with self._news:
            self._calls.add(call)
            self._jobs.append(lambda: self._read(call, path, body))
            if self._workers < self.connections:
                self._workers += 1
                # They do not keep the process from ending.
                Thread(target=self._work, daemon=True, name="remote text").start()

    def _work(self) -> None:
        """Read one text after the other until none is left."""
        while True:
            with self._news:
                if not self._jobs:
                    self._workers -= 1
                    return
                job = self._jobs.popleft()
            job()

    def _read(self, call: Call, path: str, body: dict[str, Any]) -> None:
        """One text, into its call; its connection is closed as soon as it is not wanted."""
        if not call.wanted:
            return
        events = self.endpoint.stream(path, body)
        try:
            for piece in pieces(events):
                self._leave(call, piece)
                if not call.wanted:
                    return
            self._leave(call, Piece(reason="stop"))
        except ServerError as error:
            self._leave(call, Piece(error=error))
        except Exception as error:
            self._leave(call, Piece(error=ServerError(f"a server sent what is no text: {error}")))
        finally:
            events.close()  # type: ignore[attr-defined]

    def _leave(self, call: Call, piece: Piece) -> None:
        with self._news:
            call.pieces.append(piece)
            self._news.notify_all()

    def _take(self, seq: Sequence, call: Call, piece: Piece) -> None:
        """Let a text grow by a piece; what the server says it took is entered in the ledger."""
        ledger = seq.trace.ledger
        if piece.retries:
            ledger.counts["retries"] = ledger.counts.get("retries", 0) + piece.retries
        if piece.usage is not None:
            read, cached = _number(piece.usage, "prompt_tokens"), 0
            if isinstance(details := piece.usage.get("prompt_tokens_details"), dict):
                cached = _number(details, "cached_tokens")
            rows = max(read - cached, 0) + _number(piece.usage, "completion_tokens")
            ledger.spend("server", rows, time.monotonic() - call.begun, first=True)
            ledger.counts["prompt_tokens"] = ledger.counts.get("prompt_tokens", 0) + read
            seq.scheduling.cached = cached
        if seq.finished:
            return
        if piece.error is not None:
            cut(seq, piece.error)
            return
        logprobs = []
        if seq.request.logprobs is not None:
            for text, (logprob, top) in zip(piece.tokens, piece.logprobs, strict=False):
                near = [(self.pieces.id_of(other), value) for other, value in top[: seq.request.logprobs]]
                logprobs.append(TokenLogprob(self.pieces.id_of(text), logprob, near))
        before = seq.position
        self.grow(seq, piece.tokens, logprobs)
        ledger.tokens += seq.position - before
        if piece.reason is not None:
            end(seq, piece.reason)


def pieces(events: Iterator[dict[str, Any]]) -> Iterator[Piece]:
    """What the events of a stream say of a text; its end comes last, with what the server counted."""
    reason: FinishReason | None = None
    usage: dict[str, Any] | None = None
    for event in events:
        if isinstance(event.get("usage"), dict):
            usage = event["usage"]
        for choice in (event.get("choices") or ())[:1]:
            delta = choice.get("delta")
            text = (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""
            tokens, logprobs = _tokens(str(text), choice.get("logprobs"))
            if tokens or event.get("retries"):
                yield Piece(tokens, logprobs, retries=event.get("retries", 0))
            if given := choice.get("finish_reason"):
                reason = _REASONS.get(str(given), "stop")
    yield Piece(reason=reason or "stop", usage=usage)


def _tokens(text: str, logprobs: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The tokens of a piece of text, and what is told of each: log-probability, and likely tokens with theirs."""
    if not isinstance(logprobs, dict):
        return ((text,) if text else ()), ()
    if isinstance(content := logprobs.get("content"), list):
        names = [str(each["token"]) for each in content]
        tops = [
            [(str(one["token"]), float(one["logprob"])) for one in each.get("top_logprobs") or ()] for each in content
        ]
        values = [float(each["logprob"]) for each in content]
    elif isinstance(listed := logprobs.get("tokens"), list):
        names = [str(each) for each in listed]
        likeliest = logprobs.get("top_logprobs") or [None] * len(names)
        tops = [[(str(name), float(value)) for name, value in (each or {}).items()] for each in likeliest]
        values = [float(each or 0.0) for each in logprobs.get("token_logprobs") or [0.0] * len(names)]
    else:
        return ((text,) if text else ()), ()
    facts = tuple((value, tuple(top)) for value, top in zip(values, tops, strict=False))
    if "".join(names) != text:
        # Parts of characters, and ends that are tokens without a text: the text stands with the first of them.
        names = [text, *[""] * (len(names) - 1)] if names else [text] if text else []
    return tuple(names), facts


def sampling(sampler: Sampler) -> dict[str, float]:
    """A sampler as the fields of a request.

    Raises:
        UnsupportedModel: For processors that servers do not have.
    """
    found: dict[str, float] = {"temperature": 1.0}
    for processor in sampler.processors:
        if isinstance(processor, Temperature):
            found["temperature"] = processor.t
        elif isinstance(processor, TopP):
            found["top_p"] = processor.p
        elif isinstance(processor, PresencePenalty):
            found["presence_penalty"] = processor.penalty
        elif isinstance(processor, FrequencyPenalty):
            found["frequency_penalty"] = processor.penalty
        else:
            method = method_of(processor)
            raise UnsupportedModel(
                f"a server samples by temperature, top_p, presence_penalty and frequency_penalty alone: leave out "
                f"{type(processor).__name__ if method is None else method.name}, or use decodery.load"
            )
    return found


def _number(given: dict[str, Any], name: str) -> int:
    value = given.get(name)
    return value if isinstance(value, int) and value > 0 else 0
