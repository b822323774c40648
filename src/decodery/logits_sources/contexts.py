"""Logits sources with several members: models, or one model in several contexts, that read the same text."""

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
    """A model with its context.

    Attributes:
        name: Name of the model in the ledger, where it is not the engine's.
        model: The model.
        prefix: Tokens that it reads in place of the prompt, None for the prompt.
    """

    name: str
    model: LanguageModel
    prefix: tuple[int, ...] | None = field(default=None, compare=False)

    def shift(self, prompt_length: int) -> int:
        """The offset from positions of the text to positions of this member."""
        return 0 if self.prefix is None else len(self.prefix) - prompt_length


@dataclass(frozen=True)
class Rows:
    """The rows of a segment that one member computes.

    Attributes:
        fed: Rows that it reads, ancestors included.
        wanted: Rows whose logits are needed.
    """

    fed: np.ndarray
    wanted: np.ndarray


class MemberReading:
    """The cache of one member.

    It may lag behind the text; the missing tokens are read before the next rows.
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
        """The tokens that the member reads up to the text position `end`.

        Args:
            text: The tokens of the text from the first position on.
            end: A position of the text.
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
        """Keep these rows of the pass; tokens that were read before them are part of the text already."""
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
    """The caches of all members of a source over one text, with the interface of one `KVCache`.

    Attributes:
        tokens: The text that counts as read, though a member may lag.
        states: The source's state at each token; `note` sets those of a pass, and they are kept with its rows.
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
        """Begin a pass over the rows of a segment.

        Members read retained tentative rows again, because their earlier results are not stored.

        Returns:
            The segment, with the retained tentative rows before its own.
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
        """Record the events of this pass, which count for rows that are kept, and the states after its rows."""
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
    """Computes the logits of a text from those of its members.

    Subclasses have settings, and `composed`, which runs the members and combines their logits.

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
            raise ContextFull("the text that replaces the prompt fills the model's context: shorten it")

    @cached_property
    def config(self) -> ModelConfig:
        """The first member's configuration, with the smallest context of all members."""
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
        """See `Composed`; the passes of members are recorded under their own names."""
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
            part: The segment, with the caches of its members.
            taps: Layers whose hidden states are needed.
        """

    def new_cache(self) -> KVCache:
        # It has the interface of a cache, except that keys and values are found through `readings`.
        readers = [MemberReading(member, member.model.new_cache(), self.prompt_length) for member in self.members]
        return cast(KVCache, MemberCaches(readers, self.prompt_length))


@dataclass
class Part:
    """One segment in a pass.

    Attributes:
        segment: The rows.
        contexts: The cache of each member.
        wanted: [m] rows whose logits are needed.
        output: [m] bool, true for those that choose an output token. Rows of the prompt before its last one have no
            counterpart in contexts with another prefix.
    """

    segment: Segment
    contexts: MemberCaches
    wanted: np.ndarray
    output: np.ndarray

    def read(self, number: int, rows: Rows | None, taps: Sequence[Tap] = ()) -> ForwardCoroutine[ForwardResult]:
        """Run one member: logits [wanted, vocab], and hidden states of the rows that it reads.

        Args:
            number: Index of the member.
            rows: The rows, from `only` or `everything`; None for no rows.
            taps: Layers whose hidden states are needed.
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
        """These rows, with the rows that member `number` must read before them; None for no rows."""
        if not len(wanted):
            return None
        if self.segment.mask is None:
            fed = np.arange(int(wanted.max()) + 1)
        else:
            fed = np.flatnonzero(self.segment.mask[wanted].any(axis=0))
        return Rows(fed[self.segment.positions[fed] >= self.contexts.readers[number].first], wanted)
