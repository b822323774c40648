"""Texts of a search that is recorded: taken from the record as far as they stand there, and kept as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from typing import cast

from decodery.core.errors import CorruptFile
from decodery.core.ledger import count
from decodery.models.cache.cache import KVCache
from decodery.step.search_record import SearchRecord, TextPart, described, digest
from decodery.step.sequence import FinishReason, Sequence, TokenLogprob
from decodery.step.writer import writes

from .commit import end_of
from .writing import WholeTexts

_TOKENS = 64
"""Tokens after which a part of a text that goes on is kept."""


class RecordedTexts:
    """Texts that one loop writes, where their request has a record; else nothing is done.

    What the record says of them is appended at once, unread: the next turn reads it.

    Args:
        texts: Where they stand before the loop.

    Attributes:
        ended: Ids of the texts that stand where the loop had left them.
    """

    def __init__(self, texts: Ordered[Sequence]) -> None:
        texts = [seq for seq in texts if _kept(seq)]
        self.ended = {id(seq) for seq in texts if _restore(seq)}
        _share_anew(texts)
        self._begun = {id(seq): (len(seq.tokens), _key(seq)) for seq in texts if id(seq) not in self.ended}

    def growing(self, texts: Ordered[Sequence]) -> Iterator[Sequence]:
        """Those of the texts that are kept as they grow, each until it has ended."""
        return (seq for seq in texts if id(seq) in self._begun)

    def note(self, seq: Sequence, *, ended: bool = False) -> None:
        """Keep what is new of a text that is `growing`.

        Args:
            ended: The loop writes no more of it.
        """
        begin, key = self._begun[id(seq)]
        tokens, remote = seq.tokens[begin:], writes(seq.request.model)
        ended = ended or seq.finished
        # A server draws a text's next tokens anew: a part of it is worth nothing.
        wait = not ended and (remote or len(tokens) < _TOKENS)
        if not tokens or wait or not seq.complete or seq.finish_reason in ("cancelled", "error"):
            return
        part = TextPart(_said(seq, tokens), _logprobs(seq, len(tokens)), ended, seq.finish_reason)
        # In each part the file would grow with the square of a text's length.
        _record(seq).keep_part(key, part, seq.text.text if ended and seq.text is not None else None)
        if ended:
            del self._begun[id(seq)]
        else:
            self._begun[id(seq)] = len(seq.tokens), _key(seq)


def _record(seq: Sequence) -> SearchRecord:
    assert seq.request.record is not None
    return seq.request.record


def _kept(seq: Sequence) -> bool:
    """Whether a text is the same when its tokens are taken from a record."""
    request = seq.request
    # What remembers more of a text than its tokens writes it again.
    whole = request.sampler.stateful or request.monitors or request.prompt_embeds is not None
    return request.record is not None and not whole and request.prompt_logprobs is None


def _key(seq: Sequence) -> str:
    """What a text is to become, from where it stands."""
    request = seq.request
    said = _said(seq, seq.generated)
    prompt = seq.tokens[: request.prompt_length]
    if writes(request.model) and request.conversation is not None:
        prompt = described(request.conversation.prompt)
    sampled = [described(processor) for processor in request.sampler.processors]
    limits = [request.max_new_tokens, seq.segment_end is None, request.logprobs]
    return digest([request.role, request.model.fingerprint, request.seed, sampled, limits, prompt, said])


def _said(seq: Sequence, tokens: Ordered[int]) -> tuple[int | str, ...]:
    """Tokens as they are kept."""
    model = seq.request.model
    return tuple(model.pieces.decode([token]) for token in tokens) if isinstance(model, WholeTexts) else tuple(tokens)


def _logprobs(seq: Sequence, tokens: int) -> tuple[tuple[float, tuple[tuple[int | str, float], ...]], ...]:
    last = seq.token_logprobs[-tokens:]
    if len(last) < tokens:
        return ()
    return tuple(
        (
            each.logprob,
            tuple(zip(_said(seq, [token for token, _ in each.top]), [near for _, near in each.top], strict=True)),
        )
        for each in last
    )


def _restore(seq: Sequence) -> bool:
    """Let a text stand where the record leaves it; whether that was the end of its part."""
    restored, record = 0, _record(seq)
    while not seq.finished and (part := record.part(_key(seq))) is not None:
        before = seq.position
        _append(seq, part)
        restored += seq.position - before
        if seq.position - before != len(part.tokens) or seq.finish_reason != part.reason:
            raise CorruptFile(f"{record.path} does not fit this search: give another file")
        if part.ended:
            break
    else:
        part = None
    seq.trace.ledger.tokens += restored
    count("restored", restored)
    return seq.finished or (part is not None and part.ended)


def _append(seq: Sequence, part: TextPart) -> None:
    model = seq.request.model
    pieces = model.pieces if isinstance(model, WholeTexts) else None
    for number, said in enumerate(part.tokens):
        token = said if pieces is None else pieces.id_of(str(said))
        if not isinstance(token, int) or not 0 <= token < seq.request.vocab_size or seq.finished:
            return
        if number < len(part.logprobs):
            value, top = part.logprobs[number]
            near = [(int(name) if pieces is None else pieces.id_of(str(name)), each) for name, each in top]
            seq.token_logprobs.append(TokenLogprob(token, value, near))
        seq.tokens.append(token)
        if pieces is None:
            end_of(seq, token)
        elif seq.text is not None and (found := seq.text.push(token)) is not None:
            seq.finish_reason, seq.stopped_by = "stop", found
    if pieces is not None and part.reason is not None and not seq.finished:
        seq.finish_reason = cast(FinishReason, part.reason)


def _share_anew(texts: Ordered[Sequence]) -> None:
    """Let texts that waited for a prompt that is no longer read wait for one of themselves."""
    firsts: dict[int, Sequence] = {}
    for seq in texts:
        owner = seq.scheduling.prompt_owner
        if owner is None:
            continue
        if seq.position:
            # It reads its prompt with the rest.
            seq.scheduling.prompt_owner = None
        elif owner.position and isinstance(owner.cache, KVCache) and owner.cache.next_position == 0:
            first = firsts.setdefault(id(owner), seq)
            seq.scheduling.prompt_owner = None if first is seq else first
