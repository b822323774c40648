"""Candidates read by a model, for scorers that need to hear what it says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from decodery.core.errors import ContextFull, SettingsError
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.step.forward_request import ForwardCoroutine, score_all
from decodery.step.scorer import Candidates

_CHUNK = 64
_LEAST_SHARED = 16
"""Rows that are worth a pass of their own, so that texts share them."""
"""Rows of one text in a pass, of which each may have the logits of a whole vocabulary."""


def reader(candidates: Candidates, name: str) -> Reader:
    """The model that reads.

    Raises:
        SettingsError: If there is none.
    """
    if candidates.model is None:
        raise SettingsError(f"the scorer {name} needs a model: use it in a search of an `LLM`")
    return candidates.model


def read(
    candidates: Candidates,
    model: Reader,
    texts: Sequence[Sequence[int]],
    rows: Sequence[int],
    take: Callable[[int, int, torch.Tensor], None],
    tap: Tap | None = None,
) -> ForwardCoroutine[None]:
    """Read `texts`, all together; each begins as its candidate does, or as long as that is read already.

    Where nothing is read yet, what all texts begin with is read once.

    Args:
        rows: How many of the last rows of each are wanted.
        take: Called with the number of a text, of a row, counted from its beginning, and logits [n, vocab] of that row
            and those after it, or, where there is a `tap`, the hidden states [n, hidden] read there.

    Raises:
        ContextFull: For what is too long.
    """
    caches, open_ = list[KVCache](), []
    shared = None if candidates.states is not None else (yield from _shared(candidates, model, texts, rows))
    for number, (text, wanted) in enumerate(zip(texts, rows, strict=True)):
        if len(text) > model.config.max_positions:
            raise ContextFull(f"a candidate of {len(text)} tokens does not fit the model that scores it: shorten it")
        cache = model.new_cache() if shared is None else shared.fork()
        if candidates.states is not None:
            cache = candidates.states[number].fork()
            known = len(candidates.prompt) + len(candidates.outputs[number])
            cache.truncate(min(known, len(text) - wanted))
        caches.append(cache)
        if wanted:
            open_.append(number)
    while open_:
        segments = []
        for number in open_:
            start, first = caches[number].next_position, len(texts[number]) - rows[number]
            chunk = texts[number][start : start + _CHUNK]
            wanted_rows = range(max(first - start, 0), len(chunk))
            segments.append(Segment.chunk(chunk, caches[number], logit_rows=list(wanted_rows)))
        found = yield from score_all(model, segments, () if tap is None else (tap,), candidates.role)
        for number, segment, scored in zip(open_, segments, found, strict=True):
            start = caches[number].next_position
            caches[number].keep(range(len(segment)))
            if segment.logit_rows:
                rows_of = scored.logits if tap is None else scored.hidden[tap][list(segment.logit_rows)]
                take(number, start + segment.logit_rows[0], rows_of)
        open_ = [number for number in open_ if caches[number].next_position < len(texts[number])]


def _shared(
    candidates: Candidates, model: Reader, texts: Sequence[Sequence[int]], rows: Sequence[int]
) -> ForwardCoroutine[KVCache | None]:
    """What all of several texts begin with, read once as far as no row of it is wanted; None for nothing."""
    most = min((len(text) - wanted for text, wanted in zip(texts, rows, strict=True)), default=0)
    ids = [tuple(text) for text in texts]
    first, last = min(ids, default=()), max(ids, default=())
    # What the first and the last one in order share is what all share.
    pairs = enumerate(zip(first, last, strict=False))
    length = min(most, next((at for at, (one, other) in pairs if one != other), min(len(first), len(last))))
    if len(texts) < 2 or length < _LEAST_SHARED or length > model.config.max_positions:
        return None
    cache = model.new_cache()
    for start in range(0, length, _CHUNK):
        segment = Segment.chunk(first[start : min(start + _CHUNK, length)], cache, logit_rows=[])
        yield from score_all(model, [segment], (), candidates.role)
        cache.keep(range(len(segment)))
    return cache
