"""The invariant of KV cache policies: a text's cache does not depend on drafts, other texts or prefill chunks."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy
from decodery.step.sequence import Sequence

from .drafters import Garbage, Oracle
from .running import LawBroken, decode, law_engine, submit

_MOST = 9


def check_cache_policy(
    model: LanguageModel, prompts: Ordered[Ordered[int]], cache_policy: CachePolicy | str, *, tolerance: float = 1e-9
) -> None:
    """Check that a policy gives the same results with any drafts, prompt chunks, batches and forks.

    The tokens must equal those of plain decoding under the policy. So must the caches at the end: slots, positions,
    keys, values, and the logits of further rows, including a tree.

    Args:
        model: The target.
        prompts: Token ids of each prompt.
        cache_policy: The policy under test, an instance or a text.
        tolerance: Maximum absolute difference.

    Raises:
        LawBroken: At the first difference.
    """
    settings = {"cache_policy": cache_policy, "max_new_tokens": _MOST}
    plain = decode(model, prompts, together=False, **settings)  # type: ignore[arg-type]
    for expected, prompt in zip(plain, prompts, strict=True):
        oracle = Oracle(tuple(expected.tokens))
        for drafter in (oracle, Garbage()):
            found = decode(model, [prompt], drafter=drafter, prefill_chunk=7, **settings)  # type: ignore[arg-type]
            _compare(model, expected, found[0], f"with {type(drafter).__name__} and a prompt in chunks", tolerance)
        _compare(model, expected, _forked(model, prompt, cache_policy), "after a fork", tolerance)
    batch = decode(model, prompts, **settings)  # type: ignore[arg-type]
    for expected, member in zip(plain, batch, strict=True):
        _compare(model, expected, member, "in a batch", tolerance)


def _forked(model: LanguageModel, prompt: Ordered[int], cache_policy: CachePolicy | str) -> Sequence:
    """A text that was forked after some tokens, while the original continued."""
    from decodery.engine.request import Request

    engine = law_engine(model, 512)
    first = submit(engine, Request(prompt, max_new_tokens=_MOST, cache_policy=cache_policy))  # type: ignore[arg-type]
    while first.position < _MOST // 2:
        engine.step()
    clone = engine.fork(first)
    engine.run([first])
    engine.run([clone])
    return clone


def _compare(model: LanguageModel, expected: Sequence, found: Sequence, how: str, tolerance: float) -> None:
    if found.generated != expected.generated:
        raise LawBroken(f"{how} the text is {found.generated}, in plain decoding {expected.generated}")
    ours, theirs = found.cache, expected.cache
    for layer, length in enumerate(theirs.lengths.tolist()):
        mine, wanted = (cache.positions[layer, : int(cache.lengths[layer])] for cache in (ours, theirs))
        if not np.array_equal(mine, wanted) or not np.array_equal(ours.head_lengths[layer], theirs.head_lengths[layer]):
            raise LawBroken(f"{how} layer {layer} holds other slots than in plain decoding")
        apart = max(
            (float((a - b).abs().max()) for a, b in zip(ours.view(layer), theirs.view(layer), strict=True) if length),
            default=0.0,
        )
        if not apart <= tolerance:
            raise LawBroken(
                f"{how} layer {layer} holds keys and values that are {apart:.2e} away from plain decoding's"
            )
    # A policy's own memory shows in what later rows read.
    rows = [_following(model, cache.fork(), expected.last_token) for cache in (ours, theirs)]
    if not (apart := float((rows[0] - rows[1]).abs().max())) <= tolerance:
        raise LawBroken(f"{how} the rows that come next are {apart:.2e} away from plain decoding's")


def _following(model: LanguageModel, cache: KVCache, token: int) -> torch.Tensor:
    """Logits of a tree of which some rows are kept, and of a token after them."""
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
    tree = Segment(cache.next_position + mask.sum(axis=1) - 1, np.array([token, 1, 2, 3]), mask=mask, cache=cache)
    first = model.forward(Batch([tree])).logits
    cache.keep([0, 2])
    return torch.cat((first, model.forward(Batch([Segment.chunk([5], cache)])).logits))
