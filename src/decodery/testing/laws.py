"""The laws of exact decoding as executable checks; each raises LawBroken with what was seen.

They hold for any model behind `LanguageModel`. A method of your own is checked by passing it in:

    from decodery.testing import check_identical, tiny_transformer
    check_identical(tiny_transformer(), [[1, 2, 3]], drafter=MyDrafter())
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from ..budget.base import Policy
from ..core.ask import Scored, drive
from ..core.ask import score as scored_by
from ..core.noise import gumbel
from ..core.sequence import Sequence
from ..decode.engine import Engine
from ..decode.request import Request
from ..decode.schedule import Limits
from ..draft.base import Drafter
from ..model.batch import Segment
from ..model.cache import KVCache
from ..model.protocol import LanguageModel, Reader
from ..sample.base import Context
from ..sample.sampler import Sampler
from ..source.base import Source
from ..source.contexts import Contexts
from ..verify.base import Rule
from ..verify.coupled import Coupled
from .models import TableModel
from .statistics import chi_square

_UNLIMITED = Limits(rows=1 << 20)
"""Drafts of hundreds of texts at a time are not trimmed."""


class LawBroken(AssertionError):
    """A law of exact decoding does not hold."""


def decode(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | None = None,
    budget: Policy | None = None,
    rule: Rule | None = None,
    sampler: Sampler | None = None,
    source: Source | None = None,
    seeds: Ordered[int] = (0,),
    max_new_tokens: int = 24,
    eos_ids: Ordered[int] = (),
    prefill_chunk: int = 512,
    together: bool = True,
) -> list[Sequence]:
    """Finished sequences for every prompt and seed; all in one batch, or one after another."""
    engine = Engine(model, prefill_chunk=prefill_chunk, pass_seconds=_even_passes, limits=_UNLIMITED)
    finished: list[Sequence] = []
    for prompt, seed in itertools.product(prompts, seeds):
        request = Request(
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler or Sampler.from_settings(),
            drafter=drafter,
            budget=budget,
            rule=rule or Coupled(),
            seed=seed,
            eos_ids=eos_ids,
            source=source,
        )
        finished.append(engine.submit(request))
        if not together:
            engine.run(finished[-1:])
    engine.run(finished)
    return finished


def _even_passes(context: int) -> np.ndarray:
    """Every pass costs the same: drafters that weigh costs draft all they can, on any machine."""
    return np.ones(1024)


def check_identical(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | None,
    budget: Policy | None = None,
    rule: Rule | None = None,
    sampler: Sampler | None = None,
    source: Source | None = None,
    seeds: Ordered[int] = (0, 1),
    max_new_tokens: int = 24,
    eos_ids: Ordered[int] = (),
    near_tie: float = 0.0,
    excuses: int = 0,
) -> list[Sequence]:
    """Greedy-identical and seed-identical: speculation gives exactly the tokens of plain decoding.

    Where kernels may round a pass over several rows differently, a text may depart at a position where plain decoding
    preferred its token by less than `near_tie`, in at most `excuses` texts. Returns the speculative runs, whose traces
    tell how much was accepted.
    """
    common = {
        "sampler": sampler,
        "source": source,
        "seeds": seeds,
        "max_new_tokens": max_new_tokens,
        "eos_ids": eos_ids,
    }
    plain = decode(model, prompts, **common)  # type: ignore[arg-type]
    drafted = decode(model, prompts, drafter=drafter, budget=budget, rule=rule, **common)  # type: ignore[arg-type]
    for expected, got in zip(plain, drafted, strict=True):
        if (got.generated, got.finish_reason) != (expected.generated, expected.finish_reason):
            at = first_difference(expected.generated, got.generated)
            if excuses > 0 and margin(expected.model, expected, got, at) < near_tie:
                excuses -= 1
                continue
            raise LawBroken(
                f"with {drafter} and {rule} the text departs from plain decoding at output position {at}: "
                f"{got.generated[at : at + 4]} instead of {expected.generated[at : at + 4]} (seed {got.seed})"
            )
    return drafted


def first_difference(expected: Ordered[int], got: Ordered[int]) -> int:
    """Index of the first differing token; where one text continues the other, the shorter one's length."""
    pairs = enumerate(zip(expected, got, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(expected), len(got)))


def margin(model: Reader, expected: Sequence, got: Sequence, at: int) -> float:
    """By how much `expected` preferred its token at output position `at` over `got`'s: a score difference in nats.

    The score is what the token is the argmax of: warped logits, and the request's noise where it samples. Infinite
    where one of the texts has no such position. Warps that hear log-probabilities are not replayed.
    """
    if at >= min(len(expected.generated), len(got.generated)):
        return float("inf")
    tokens = expected.tokens[: expected.prompt_length + at]
    scored: Scored = drive(scored_by(model, Segment.chunk(tokens, model.new_cache(), logit_rows=[len(tokens) - 1])))
    sampler = expected.sampler
    prompt, written = tokens[: expected.prompt_length], tokens[expected.prompt_length :]
    start = sampler.context(prompt, len(prompt), sampler.init(prompt), expected.seed)
    law = sampler.law(scored.logits, [sampler.ahead(start, written)])[0]
    pair = torch.tensor([expected.generated[at], got.generated[at]])
    score = law[pair].double()
    if not sampler.greedy:
        score = score + gumbel(expected.seed, at, pair)
    return float((score[0] - score[1]).abs())


def check_batch(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | None = None,
    budget: Policy | None = None,
    rule: Rule | None = None,
    sampler: Sampler | None = None,
    source: Source | None = None,
    seeds: Ordered[int] = (0, 1),
    max_new_tokens: int = 16,
) -> None:
    """A sequence in a batch with ragged prompts and ragged trees is what it is alone, chunked prefill or not."""
    common = {"drafter": drafter, "budget": budget, "rule": rule, "sampler": sampler, "source": source, "seeds": seeds}
    alone = decode(model, prompts, together=False, max_new_tokens=max_new_tokens, **common)  # type: ignore[arg-type]
    for chunk in (512, 3):
        batch = decode(model, prompts, prefill_chunk=chunk, max_new_tokens=max_new_tokens, **common)  # type: ignore[arg-type]
        for single, member in zip(alone, batch, strict=True):
            if single.generated != member.generated:
                raise LawBroken(
                    f"in a batch with prefill chunks of {chunk}: {member.generated}, alone {single.generated}"
                )


def check_state(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | None,
    budget: Policy | None = None,
    rule: Rule | None = None,
    sampler: Sampler | None = None,
    source: Source | None = None,
    max_new_tokens: int = 24,
    tolerance: float = 1e-9,
) -> float:
    """State-identical: after every step every cache equals a fresh prefill of the same tokens, positions included.

    The prompts run in one batch, each twice: the second one shares the first one's prefill by a fork and has a seed of
    its own. Returns the largest absolute difference seen.
    """
    engine = Engine(model, prefill_chunk=7, pass_seconds=_even_passes, limits=_UNLIMITED)
    sampler, rule = sampler or Sampler.from_settings(), rule or Coupled()
    running: list[Sequence] = []
    for prompt in prompts:
        settings = {"sampler": sampler, "source": source, "drafter": drafter, "budget": budget, "rule": rule}
        settings["max_new_tokens"] = max_new_tokens  # type: ignore[assignment]
        first = engine.submit(Request(prompt, seed=0, **settings))  # type: ignore[arg-type]
        running += [first, engine.submit(Request(prompt, seed=1, **settings), like=first)]  # type: ignore[arg-type]
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

    model: what it was decoded with; what a source made of it stands in the sequence.
    """
    n = seq.cache.next_position
    if seq.generated and n != len(seq.tokens) - 1:
        raise LawBroken(f"the cache holds {n} of {len(seq.tokens)} tokens; all but the pending one belong there")
    if not isinstance(seq.cache, Contexts):
        return _distance(model if seq.source is None else seq.model, seq.cache, seq.tokens[:n])
    if seq.cache.tokens != seq.tokens[:n]:
        raise LawBroken(f"after {n} tokens the contexts hold {seq.cache.tokens} instead of {seq.tokens[:n]}")
    return max(_distance(model, cache, tokens) for model, cache, tokens in seq.cache.readings())


def _distance(model: Reader, cache: KVCache, tokens: Ordered[int]) -> float:
    """Largest difference between `cache` and a fresh one that read `tokens`."""
    n, stop = len(tokens), cache.prefix + len(tokens)
    places = np.arange(-cache.prefix, n)
    if (cache.lengths != stop).any() or (cache.positions[:, :stop] != places).any() or cache.next_position != n:
        raise LawBroken(f"after {n} tokens the cache holds {cache.lengths} slots or wrong positions")
    if n == 0:
        return 0.0
    fresh = model.new_cache()
    drive(scored_by(model, Segment.chunk(tokens, fresh, logit_rows=[])))
    fresh.keep(range(n))
    return float((cache.data[:, :, :, :stop] - fresh.data[:, :, :, :stop]).abs().max())


def enumerate_law(model: TableModel, prompt: Ordered[int], sampler: Sampler, length: int) -> np.ndarray:
    """Probabilities [vocab ** length] of all continuations of `length` tokens, first token slowest."""
    size = model.vocab_size
    law = np.zeros(size**length)

    def visit(context: Context, mass: float, code: int, left: int) -> None:
        if left == 0:
            law[code] = mass
            return
        logits = model.logits(context.tokens)
        row = sampler.probabilities(sampler.law(logits[None], [context]))[0]
        for token in torch.nonzero(row).flatten().tolist():
            after = sampler.extend(context, token, logits)
            visit(after, mass * float(row[token]), code * size + token, left - 1)

    start = sampler.context(list(prompt), len(prompt), sampler.init(list(prompt)), 0)
    visit(start, 1.0, 0, length)
    return law


def check_distribution(
    model: TableModel,
    prompt: Ordered[int],
    *,
    drafter: Drafter | None,
    budget: Policy | None = None,
    rule: Rule | None = None,
    sampler: Sampler | None = None,
    length: int = 5,
    draws: int = 20_000,
    first_seed: int = 0,
    least: float = 1e-4,
) -> float:
    """Distribution-identical: the joint law of the first tokens over many seeds is the enumerated one.

    Returns the p-value of a chi-square test; raises where it is below `least`, or where no draft was accepted below
    its first token, so that the test would say nothing about drafts.
    """
    sampler = sampler or Sampler.from_settings(temperature=1.0)
    law = enumerate_law(model, prompt, sampler, length)
    counts, deep = np.zeros_like(law), 0
    for start in range(0, draws, 500):
        seeds = range(first_seed + start, first_seed + min(start + 500, draws))
        for seq in decode(
            model,
            [prompt],
            drafter=drafter,
            budget=budget,
            rule=rule,
            sampler=sampler,
            seeds=seeds,
            max_new_tokens=length,
        ):
            code = 0
            for token in seq.generated:
                code = code * model.vocab_size + token
            counts[code] += 1
            deep += sum(step.accepted > 1 for step in seq.trace.steps)
    if drafter is not None and deep == 0:
        raise LawBroken(f"none of {draws} runs accepted a draft of two tokens: nothing was put to the test")
    p = chi_square(counts, law)
    if p < least:
        raise LawBroken(f"the first {length} tokens of {draws} runs do not follow the enumerated law (p = {p:.1e})")
    return p
