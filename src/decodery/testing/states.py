"""The invariant of states: what a text's caches hold is what a fresh reading of its tokens would."""

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
    """After every step every cache equals a fresh prefill of the same tokens, positions included.

    The prompts run in one batch, each twice: the second one shares the first one's prefill by a fork and has a seed of
    its own.

    Args:
        model: The target.
        prompts: Token ids of each.
        drafter, draft_length, acceptance_rule, logits_source: The methods under test, instances or texts.
        sampler: By default greedy.
        max_new_tokens: Tokens of a text at most.
        tolerance: Largest absolute difference.

    Returns:
        The largest absolute difference seen.
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
    """Largest difference between a sequence's caches and ones that read their tokens in one chunk.

    Args:
        model: What it was decoded with; what a source made of it stands in the sequence.
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
    # What some layers do without, or hold in groups, they do without however the tokens were read.
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
