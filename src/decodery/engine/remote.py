"""A model on a server: its texts are asked for over the network and grow as they come."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Condition, Thread, get_ident
from typing import Any

from decodery.core.errors import DecoderyError, ServerError, UnsupportedModel
from decodery.core.noise import PARTICLE, mix
from decodery.core.registry import method_of
from decodery.models.loaders.endpoint import CHAT, NEUTRAL, PLAIN, Endpoint, Offers, Prefill, likely
from decodery.models.tokenizers.pieces import Pieces
from decodery.sampling.frequency_penalty import FrequencyPenalty
from decodery.sampling.min_p import MinP
from decodery.sampling.presence_penalty import PresencePenalty
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature
from decodery.sampling.top_k import TopK
from decodery.sampling.top_p import TopP
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import FinishReason, Sequence, TokenLogprob

from .writing import WholeTexts, cut, end, keep, own

PLAIN_PROMPT = 1
"""The number that stands for a prompt that is to be continued as it is, without a chat template."""
_MOST_STOPS = 4
"""Stop strings that every server takes; further ones are watched for here."""
_THOUGHTS = ("reasoning", "reasoning_content")
"""What servers call the part of a message in which a model thinks: vLLM, llama.cpp and SGLang."""
_REASONS: dict[str, FinishReason] = {"length": "length", "cancelled": "cancelled"}


@dataclass(frozen=True)
class Piece:
    """What came of a text.

    Attributes:
        tokens: Their texts, one by one where the server tells.
        logprobs: Log-probability and likely tokens of each.
        reason: Why it ended.
        error: Why it was cut.
        thought: It is of what the model thinks, which the server keeps apart and does not go on from.
    """

    tokens: tuple[str, ...] = ()
    logprobs: tuple[tuple[float, tuple[tuple[str, float], ...]], ...] = ()
    reason: FinishReason | None = None
    error: DecoderyError | None = None
    usage: dict[str, Any] | None = None
    retries: int = 0
    thought: bool = False


@dataclass(eq=False)
class Call:
    """A text on its way.

    Attributes:
        thread: Who waits for it.
        begun: When.
        pieces: What has come and is not taken yet.
        closed: Nothing more of it is wanted.
        spaces: Whether the server left out the spaces at the end of what it goes on from, and may write them again.
        retries: How often the text was broken off and begun again from where it stood.
    """

    seq: weakref.ref[Sequence]
    thread: int = field(default_factory=get_ident)
    begun: float = field(default_factory=time.monotonic)
    pieces: deque[Piece] = field(default_factory=deque)
    closed: bool = False
    spaces: bool = False
    retries: int = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        seq = self.seq()
        return seq is not None and not seq.finished and not self.closed


class RemoteModel(WholeTexts):
    """Writes texts by a server.

    Args:
        connections: Texts that it is asked for at a time; others wait.
        pieces: The pieces of another such model, whose texts this one goes on from.
    """

    def __init__(self, endpoint: Endpoint, offers: Offers, connections: int, pieces: Pieces | None = None) -> None:
        super().__init__(
            f"the model {offers.model} on a server",
            logprobs=any(offers.logprobs.values()),
            continues=True,
            pieces=pieces,
        )
        self.endpoint, self.offers, self.connections = endpoint, offers, connections
        self._news = Condition()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._jobs: deque[Callable[[], None]] = deque()
        self._workers = 0
        self._beside: dict[str, RemoteModel] = {}

    def beside(self, address: str) -> RemoteModel:
        """A model on another server that goes on from texts of this one.

        Args:
            address: Its URL, with `#NAME` after it where the server has several models.
        """
        if address not in self._beside:
            url, _, name = address.partition("#")
            endpoint = Endpoint(replace(self.endpoint.settings, url=url))
            self._beside[address] = RemoteModel(endpoint, endpoint.probe(name or None), self.connections, self.pieces)
        return self._beside[address]

    def advance(self, seq: Sequence) -> ForwardCoroutine[None]:
        """See `Writer.advance`; streams are read by threads of their own."""
        call: Call | None = own(seq, self.name)
        if call is None or call.closed:
            path, body = self.body(seq)
            spaces = path == CHAT and seq.position > 0 and self._prefill.trims
            call = Call(weakref.ref(seq), spaces=spaces, retries=0 if call is None else call.retries)
            keep(seq, call)
            self._begin(call, path, body)
            return
        with self._news:
            if not call.pieces:
                mine = [each for each in self._calls if each.thread == call.thread and each.wanted]
                self._news.wait_for(lambda: any(each.pieces for each in mine))
            pieces = [call.pieces.popleft() for _ in range(len(call.pieces))]
        for piece in pieces:
            if not call.closed:
                yield from self._take(seq, call, piece)
        if seq.finished or call.closed:
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
        written, goes_on = self.pieces.decode(seq.generated), dict[str, bool]()
        if written and plain:
            prompt = f"{prompt}{written}"
        elif written:
            turns.append({"role": "assistant", "content": written})
            goes_on = self._prefill.fields
        stop = list(seq.text.stop[:_MOST_STOPS]) if seq.text is not None else []
        most = self.offers.logprobs.get(path)
        if seq.request.logprobs and most is None:
            self.refuse("returns no log-probabilities")
        # Where tokens are told of at all they are asked for: a piece of a stream may hold several. llama.cpp tells of
        # none where 0 likely ones are wanted.
        top = None if most is None else min(seq.request.logprobs or 1, most)
        return path, {
            "model": self.offers.model,
            **({"prompt": prompt} if plain else {"messages": turns}),
            **goes_on,
            "max_tokens": seq.remaining,
            **sampling(seq.request.sampler, cuts=self.offers.cuts),
            "seed": _seed(seq.request.seed, written),
            **({"stop": stop} if stop else {}),
            **likely(path, top),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @cached_property
    def _prefill(self) -> Prefill:
        """How the server goes on with a message; found out when it is first needed.

        Raises:
            UnsupportedModel: If it does not.
        """
        found = self.endpoint.prefill(self.offers.model)
        if found is None:
            self.refuse(
                "does not go on with the last message of a chat (continue_final_message, or a message of the assistant "
                "at the end): give apply_chat_template=False where it has /v1/completions, or"
            )
        return found

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
        events: Iterator[dict[str, Any]] | None = None
        try:
            events = self.endpoint.stream(path, body)
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
            if events is not None:
                events.close()  # type: ignore[attr-defined]

    def _leave(self, call: Call, piece: Piece) -> None:
        with self._news:
            call.pieces.append(piece)
            self._news.notify_all()

    def _take(self, seq: Sequence, call: Call, piece: Piece) -> ForwardCoroutine[None]:
        """Let a text grow by a piece; what the server says it took is entered in the ledger."""
        ledger = seq.trace.ledger
        if piece.retries:
            ledger.counts["retries"] = ledger.counts.get("retries", 0) + piece.retries
        if piece.usage is not None:
            read, cached = _number(piece.usage, "prompt_tokens"), 0
            if isinstance(details := piece.usage.get("prompt_tokens_details"), dict):
                cached = _number(details, "cached_tokens")
            rows = max(read - cached, 0) + _number(piece.usage, "completion_tokens")
            ledger.spend(seq.request.role or "server", rows, time.monotonic() - call.begun, first=True)
            ledger.counts["prompt_tokens"] = ledger.counts.get("prompt_tokens", 0) + read
            seq.scheduling.cached = cached
        if seq.finished:
            return
        if piece.thought and seq.segment_end is not None:
            raise ServerError(
                f"{self.endpoint.base} keeps what the model thinks apart, and continues no text from there: start it "
                "without its reasoning parser, or give apply_chat_template=False"
            )
        if piece.error is not None and seq.segment_end is not None and call.retries < self.endpoint.settings.retries:
            # What has come stays, and the server goes on from there.
            call.closed = True
            call.retries += 1
            ledger.counts["retries"] = ledger.counts.get("retries", 0) + 1
            return
        if piece.error is not None:
            cut(seq, piece.error)
            return
        tokens = piece.tokens
        if call.spaces and tokens:
            tokens = tuple(_after_spaces(tokens))
            call.spaces = not any(tokens)
        logprobs = []
        for text, (logprob, top) in zip(tokens, piece.logprobs, strict=False):
            near = [(self.pieces.id_of(other), value) for other, value in top[: seq.request.logprobs or 0]]
            logprobs.append(TokenLogprob(self.pieces.id_of(text), logprob, near))
        before = seq.position
        yield from self.grow(seq, tokens, logprobs)
        ledger.tokens += seq.position - before
        if seq.segment_end is not None and not seq.finished and seq.position > before and seq.segment_end(seq):
            # The stream is closed, and a later step is asked for anew.
            call.closed = True
            if piece.usage is None:
                ledger.spend(
                    seq.request.role or "server", seq.position - before, time.monotonic() - call.begun, first=True
                )
                ledger.counts["unreported"] = ledger.counts.get("unreported", 0) + 1
            return
        if piece.reason is not None:
            end(seq, piece.reason)


def _seed(seed: int, written: str) -> int:
    """What a request's text is drawn by: a server draws each request from its beginning, so what follows differs."""
    return (mix(seed, PARTICLE, len(written)) if written else seed) & (1 << 63) - 1


def _after_spaces(tokens: tuple[str, ...]) -> Iterator[str]:
    """Pieces without the spaces that they begin with."""
    begun = False
    for token in tokens:
        rest = token if begun else token.lstrip()
        begun = begun or bool(rest)
        yield rest


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
            thought = isinstance(delta, dict) and any(delta.get(name) for name in _THOUGHTS)
            if tokens or thought or event.get("retries"):
                yield Piece(tokens, logprobs, retries=event.get("retries", 0), thought=thought)
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
        most_likely = logprobs.get("top_logprobs") or [None] * len(names)
        tops = [[(str(name), float(value)) for name, value in (each or {}).items()] for each in most_likely]
        values = [float(each or 0.0) for each in logprobs.get("token_logprobs") or [0.0] * len(names)]
    else:
        return ((text,) if text else ()), ()
    facts = tuple((value, tuple(top)) for value, top in zip(values, tops, strict=False))
    if "".join(names) != text:
        # Parts of characters, and ends that are tokens without a text: the text stands with the first of them.
        names = [text, *[""] * (len(names) - 1)] if names else [text] if text else []
    return tuple(names), facts


def sampling(sampler: Sampler, *, cuts: bool) -> dict[str, float]:
    """A sampler as the fields of a request, all of them, as servers have other defaults.

    Args:
        cuts: Whether the server has the fields of `NEUTRAL`.

    Raises:
        UnsupportedModel: For processors that servers do not have.
    """
    found: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, **(NEUTRAL if cuts else {})}
    for processor in sampler.processors:
        if isinstance(processor, Temperature):
            found["temperature"] = processor.t
        elif isinstance(processor, TopP):
            found["top_p"] = processor.p
        elif isinstance(processor, TopK) and cuts:
            found["top_k"] = processor.k or -1
        elif isinstance(processor, MinP) and cuts:
            found["min_p"] = processor.p
        elif isinstance(processor, PresencePenalty):
            found["presence_penalty"] = processor.penalty
        elif isinstance(processor, FrequencyPenalty):
            found["frequency_penalty"] = processor.penalty
        else:
            method = method_of(processor)
            raise UnsupportedModel(
                f"this server samples by temperature, top_p,{' top_k, min_p,' if cuts else ''} presence_penalty and "
                "frequency_penalty alone: leave out "
                f"{type(processor).__name__ if method is None else method.name}, or use decodery.load"
            )
    return found


def _number(given: dict[str, Any], name: str) -> int:
    value = given.get(name)
    return value if isinstance(value, int) and value > 0 else 0
