"""One text read by several members: models, or one model in several contexts, each as far as it was asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from decodery.core.errors import ContextFull, UnsupportedModel
from decodery.core.ledger import count
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.hooks import Tap
from decodery.models.protocol import Capabilities, LanguageModel
from decodery.models.tokenizers.vocabularies import fitted
from decodery.step.forward_request import Composed, ForwardCoroutine, ForwardResult, score

_CHUNK = 512


@dataclass(frozen=True)
class Member:
    """One who reads.

    Attributes:
        name: What its model goes by in the ledger, where it is another than the engine's.
        model: What reads.
        prefix: What it reads in the prompt's place, None: the prompt.
    """

    name: str
    model: LanguageModel
    prefix: tuple[int, ...] | None = field(default=None, compare=False)

    def shift(self, prompt_length: int) -> int:
        """What has to be added to a text position to get its own."""
        return 0 if self.prefix is None else len(self.prefix) - prompt_length


@dataclass(frozen=True)
class Rows:
    """What one member is asked about one segment.

    Attributes:
        fed: Rows it reads, ancestors included.
        wanted: Whose logits.
    """

    fed: np.ndarray
    wanted: np.ndarray


class MemberReading:
    """How far one member has read.

    Its cache may lag after the text; what it lacks goes ahead of the next rows.
    """

    def __init__(self, member: Member, cache: KVCache, prompt_length: int) -> None:
        self.member = member
        self.cache = cache
        self.shift = member.shift(prompt_length)
        self.prompt_length = prompt_length
        self.lag = 0
        self.fed: np.ndarray | None = None

    @property
    def first(self) -> int:
        """The first text position with a row; a prefix replaces all before the prompt's end."""
        return 0 if self.member.prefix is None else self.prompt_length - 1

    def tokens(self, text: Sequence[int], end: int) -> list[int]:
        """What it reads up to the text position `end`.

        Args:
            text: The tokens from the first position on.
        """
        prefix = self.member.prefix
        if prefix is None:
            return list(text[:end])
        return [*prefix, *text[self.prompt_length : end]][: max(end + self.shift, 0)]

    def read(
        self, segment: Segment, rows: Rows, text: list[int], taps: Sequence[Tap], role: str
    ) -> ForwardCoroutine[ForwardResult]:
        """Its own rows for a segment of the text: what it has not read yet, then `rows.fed`.

        The answer is of these.
        """
        assert segment.tokens is not None
        start = max(len(text), self.first)
        behind = self.cache.next_position < start + self.shift
        unread = self.tokens(text, start)[self.cache.next_position :] if behind else []
        while len(unread) > _CHUNK:
            yield from self._feed(unread[:_CHUNK], role)
            unread = unread[_CHUNK:]
        own = segment.tokens[rows.fed]
        if self.member.prefix is not None:
            own = np.where(segment.positions[rows.fed] == self.first, self.member.prefix[-1], own)
        self.lag, self.fed, n = len(unread), rows.fed, len(unread) + len(rows.fed)
        late = self.cache.next_position + np.arange(self.lag)
        mask = None
        if segment.mask is not None:
            mask = np.tri(n, dtype=bool)
            mask[self.lag :, self.lag :] = segment.mask[np.ix_(rows.fed, rows.fed)]
        whole = Segment(
            np.concatenate((late, segment.positions[rows.fed] + self.shift)),
            np.concatenate((np.asarray(unread, dtype=np.int64), own)),
            mask=mask,
            cache=self.cache,
            logit_rows=(self.lag + np.searchsorted(rows.fed, rows.wanted)).tolist(),
        )
        scored = yield from score(self.member.model, whole, taps, role)
        return ForwardResult(scored.logits, {tap: states[self.lag :] for tap, states in scored.hidden.items()})

    def catch_up(self, text: list[int], role: str) -> ForwardCoroutine[None]:
        """Read all of `text` that it has not read yet."""
        unread = self.tokens(text, max(len(text), self.first))[self.cache.next_position :]
        for first in range(0, len(unread), _CHUNK):
            yield from self._feed(unread[first : first + _CHUNK], role)

    def _feed(self, chunk: list[int], role: str) -> ForwardCoroutine[None]:
        yield from score(self.member.model, Segment.chunk(chunk, self.cache, logit_rows=[]), (), role)
        self.cache.keep(range(len(chunk)))

    def keep(self, rows: Sequence[int]) -> None:
        """Of the pass's rows these became text; what was read ahead of them is text in any case."""
        if self.fed is None:
            return
        places = np.searchsorted(self.fed, rows)
        known = [
            place for place, row in zip(places, rows, strict=True) if place < len(self.fed) and self.fed[place] == row
        ]
        self.cache.keep([*range(self.lag), *(self.lag + int(place) for place in known)])
        self.fed = None

    def truncate(self, n: int) -> None:
        self.fed = None
        if self.member.prefix is not None and n < self.prompt_length:
            n = self.prompt_length - 1
        self.cache.truncate(n + self.shift)

    def fork(self) -> MemberReading:
        return MemberReading(self.member, self.cache.fork(), self.prompt_length)


class MemberCaches:
    """The caches of all members of a source over one text, after the interface of one `KVCache`.

    Args:
        tokens: The text that counts as read, though a member may lag.
        states: What the source remembers at each of them, set for the rows of a pass by `note` and kept with them.
    """

    def __init__(self, readers: list[MemberReading], prompt_length: int) -> None:
        self.readers = readers
        self.prompt_length = prompt_length
        self.tokens: list[int] = []
        self.states: list[Any] = []
        self._scratch: Segment | None = None
        self._states: Sequence[Any] = ()
        self._events: Mapping[int, Sequence[str]] = {}

    @property
    def next_position(self) -> int:
        return len(self.tokens)

    def open(self, segment: Segment) -> Segment:
        """A pass over the rows of a segment begins.

        Members see those again: what each of them made of a row, and whether it read it at all, is not kept.

        Returns:
            It with the tentative rows that stay before its own.
        """
        for reader in self.readers:
            reader.fed = None
        assert segment.tokens is not None
        retained, before = segment.retained, self._scratch
        if retained:
            assert before is not None and before.tokens is not None
            own = np.arange(len(segment)) if segment.logit_rows is None else np.asarray(segment.logit_rows)
            mask = np.zeros((retained + len(segment),) * 2, dtype=bool)
            mask[:retained, :retained] = before.seen()[:retained, :retained]
            mask[retained:] = segment.seen()
            segment = Segment(
                np.concatenate((before.positions[:retained], segment.positions)),
                np.concatenate((before.tokens[:retained], segment.tokens)),
                mask=mask,
                cache=segment.cache,
                logit_rows=(retained + own).tolist(),
            )
        self._scratch, self._states, self._events = segment, [None] * len(segment), {}
        return segment

    def note(self, events: Mapping[int, Sequence[str]], states: Sequence[Any] | None = None) -> None:
        """What is to be counted of rows of this pass if they are kept, and the states after all of its rows."""
        self._events = events
        if states is not None:
            self._states = states

    def keep(self, rows: Sequence[int]) -> None:
        for reader in self.readers:
            reader.keep(rows)
        tokens = None if self._scratch is None else self._scratch.tokens
        for row in rows:
            assert tokens is not None
            self.tokens.append(int(tokens[row]))
            self.states.append(self._states[row])
            for event in self._events.get(row, ()):
                count(event)
        self._scratch = None

    def truncate(self, n: int) -> None:
        for reader in self.readers:
            reader.truncate(n)
        del self.tokens[n:], self.states[n:]
        self._scratch = None

    def fork(self) -> MemberCaches:
        clone = MemberCaches([reader.fork() for reader in self.readers], self.prompt_length)
        clone.tokens, clone.states = self.tokens.copy(), self.states.copy()
        return clone

    def readings(self) -> Iterator[tuple[LanguageModel, KVCache, list[int]]]:
        """Every member's model, cache, and the tokens that the cache should hold."""
        for reader in self.readers:
            text = reader.tokens(self.tokens, max(len(self.tokens), reader.first))
            yield reader.member.model, reader.cache, text[: reader.cache.next_position]


@dataclass(frozen=True)
class Blend(Composed):
    """What scores a text out of what its members say.

    Subclasses have settings, and `composed`, which asks members.

    Attributes:
        members: The contexts, each with its model.
        prompt_length: Tokens of the request's prompt.
    """

    members: tuple[Member, ...]
    prompt_length: int = field(compare=False)

    def __post_init__(self) -> None:
        first, *others = self.members
        alike = (replace(member, model=fitted(member.model, first.model)) for member in others)
        object.__setattr__(self, "members", (first, *alike))
        if self.config.max_positions <= self.prompt_length:
            raise ContextFull("the text in the prompt's place leaves no room in the model's context: shorten it")

    @cached_property
    def config(self) -> ModelConfig:
        """The first member's, with room for as many tokens as every member can read."""
        lengths = [member.model.config.max_positions - member.shift(self.prompt_length) for member in self.members]
        return replace(self.members[0].model.config, max_positions=min(lengths))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(trees=all(member.model.capabilities.trees for member in self.members))

    @property
    def device(self) -> torch.device:
        return self.members[0].model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].model.dtype

    @property
    def vocab_size(self) -> int:
        return self.members[0].model.vocab_size

    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        """See `Composed`; members are asked under their names, whatever the role."""
        if segment.tokens is None:
            raise UnsupportedModel("a source of several contexts reads tokens, not embeddings: use another drafter")
        if segment.interventions:
            raise UnsupportedModel("rows that a source of several contexts makes cannot be changed on their way")
        contexts, retained = cast(MemberCaches, segment.cache), segment.retained
        whole = contexts.open(segment)
        n = len(whole)
        wanted = np.arange(n) if whole.logit_rows is None else np.asarray(whole.logit_rows, dtype=np.int64)
        part = Part(whole, contexts, wanted, whole.positions[wanted] >= contexts.prompt_length - 1)
        scored = yield from self.composed(part, taps)
        return ForwardResult(scored.logits, {tap: states[retained:] for tap, states in scored.hidden.items()})

    @abstractmethod
    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        """Logits [wanted, vocab] of the rows that `part` wants, and the hidden states of all of its rows.

        Args:
            part: The segment and its members' readings.
            taps: Where hidden states are wanted.
        """

    def new_cache(self) -> KVCache:
        # Whoever looks for keys and values in it asks for `readings`; all else is the same.
        readers = [MemberReading(member, member.model.new_cache(), self.prompt_length) for member in self.members]
        return cast(KVCache, MemberCaches(readers, self.prompt_length))


@dataclass
class Part:
    """One segment in a pass.

    Attributes:
        segment: The rows.
        contexts: How far each member has read.
        wanted: [m] rows whose logits are wanted.
        output: [m] bool, which of these choose an output token; a row of the prompt before its last one has no
            counterpart in contexts that begin otherwise.
    """

    segment: Segment
    contexts: MemberCaches
    wanted: np.ndarray
    output: np.ndarray

    def read(self, number: int, rows: Rows | None, taps: Sequence[Tap] = ()) -> ForwardCoroutine[ForwardResult]:
        """Ask member `number` about rows: logits [wanted, vocab] and states of the rows it is fed.

        Of none for None.

        Args:
            number: Of the member.
            rows: What `only` or its like gave; None for no rows.
            taps: Where hidden states are wanted.
        """
        if rows is None:
            return ForwardResult(torch.empty(0, dtype=torch.float32, device="cpu"))
        reader = self.contexts.readers[number]
        return (yield from reader.read(self.segment, rows, self.contexts.tokens, taps, reader.member.name))

    def everything(self) -> Rows:
        """All rows are read."""
        return Rows(np.arange(len(self.segment)), self.wanted)

    def prefix(self, row: int) -> list[int]:
        """The text up to and with this row."""
        assert self.segment.tokens is not None
        seen = slice(row + 1) if self.segment.mask is None else self.segment.mask[row]
        return [*self.contexts.tokens, *self.segment.tokens[seen].tolist()]

    def only(self, number: int, wanted: np.ndarray) -> Rows | None:
        """The logits of these rows, and what member `number` has to read for them; None for no rows."""
        if not len(wanted):
            return None
        if self.segment.mask is None:
            fed = np.arange(int(wanted.max()) + 1)
        else:
            fed = np.flatnonzero(self.segment.mask[wanted].any(axis=0))
        return Rows(fed[self.segment.positions[fed] >= self.contexts.readers[number].first], wanted)
