"""The invariant of states: the caches of a text equal those of a fresh prefill of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from decodery.engine.request import Request
from decodery.logits_sources.contexts import MemberCaches
from decodery.logits_sources.ftp import PrunedCache
from decodery.logits_sources.hamburger import GroupCache
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.forward_request import run_sync, score
from decodery.step.logits_source import LogitsSource
from decodery.step.sequence import Sequence

from .running import LawBroken, law_engine, submit


def check_state(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | str | None,
    draft_length: DraftLengthPolicy | str | None = None,
    acceptance_rule: AcceptanceRule | str | None = None,
    sampler: Sampler | None = None,
    logits_source: LogitsSource | str | None = None,
    max_new_tokens: int = 24,
    tolerance: float = 1e-9,
) -> float:
    """Check that after every step every cache equals a fresh prefill of the same tokens.

    The prompts run in one batch, each twice: the second text forks the first one's prefill and has another seed.

    Args:
        model: The target.
        prompts: Token ids of each prompt.
        drafter: The drafter under test, an instance or a text.
        draft_length: The draft length policy under test, an instance or a text.
        acceptance_rule: The acceptance rule under test, an instance or a text.
        sampler: The sampler, by default greedy.
        logits_source: The logits source under test, an instance or a text.
        max_new_tokens: Maximum number of tokens of a text.
        tolerance: Maximum absolute difference.

    Returns:
        The largest absolute difference.

    Raises:
        LawBroken: If a difference is above `tolerance`.
    """
    engine = law_engine(model, 7)
    sampler, acceptance_rule = sampler or Sampler.from_settings(), acceptance_rule or Coupled()
    running: list[Sequence] = []
    for prompt in prompts:
        settings = {
            "sampler": sampler,
            "logits_source": logits_source,
            "drafter": drafter,
            "draft_length": draft_length,
            "acceptance_rule": acceptance_rule,
        }
        settings["max_new_tokens"] = max_new_tokens
        first = submit(engine, Request(prompt, seed=0, **settings))  # type: ignore[arg-type]
        running += [first, submit(engine, Request(prompt, seed=1, **settings), like=first)]  # type: ignore[arg-type]
    worst = 0.0
    while any(not seq.finished for seq in running):
        for seq in engine.step():
            assert isinstance(seq, Sequence)
            worst = max(worst, distance_to_fresh(model, seq))
            if worst > tolerance:
                raise LawBroken(f"after {len(seq.tokens)} tokens the cache is {worst:.2e} away from a fresh prefill")
    return worst


def distance_to_fresh(model: LanguageModel, seq: Sequence) -> float:
    """Largest difference between a sequence's caches and new ones that read the tokens in one chunk.

    Args:
        model: The model that decoded it, without its logits source.
        seq: The sequence.
    """
    n = seq.cache.next_position
    if seq.generated and n != len(seq.tokens) - 1:
        raise LawBroken(f"the cache holds {n} of {len(seq.tokens)} tokens; all but the last one belong there")
    if not isinstance(seq.cache, MemberCaches):
        return _distance(model if seq.request.logits_source is None else seq.request.model, seq.cache, seq.tokens[:n])
    if seq.cache.tokens != seq.tokens[:n]:
        raise LawBroken(f"after {n} tokens the contexts hold {seq.cache.tokens} instead of {seq.tokens[:n]}")
    return max(_distance(model, cache, tokens) for model, cache, tokens in seq.cache.readings())


def _distance(model: Reader, cache: KVCache, tokens: Ordered[int]) -> float:
    """Largest difference between `cache` and a fresh one that read `tokens`."""
    n, stop = len(tokens), cache.prefix + len(tokens)
    fresh = model.new_cache()
    if n:
        run_sync(score(model, Segment.chunk(tokens, fresh, logit_rows=[])))
        fresh.keep(range(n))
    # Layers that skip tokens or store groups do so in any order of reading.
    lengths = fresh.lengths if isinstance(cache, (PrunedCache, GroupCache)) else np.full_like(cache.lengths, stop)
    if (cache.lengths != lengths).any() or cache.next_position != n:
        raise LawBroken(f"after {n} tokens the cache holds {cache.lengths} slots or wrong positions")
    worst, every, held = 0.0, np.arange(-cache.prefix, n), (cache.data, fresh.data)
    for layer, length in enumerate(lengths.tolist()):
        places = fresh.positions[layer, :length] if length < stop else every
        if (cache.positions[layer, :length] != places).any():
            raise LawBroken(f"after {n} tokens the cache holds {cache.lengths} slots or wrong positions")
        if length:
            own, expected = (data[layer, :, :, :length] for data in held)
            worst = max(worst, float((own - expected).abs().max()))
    return worst
