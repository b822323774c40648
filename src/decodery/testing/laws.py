"""The invariants of texts: neither drafts nor other texts of a batch change a text; if they do, LawBroken is raised.

They hold for any model with the interface `LanguageModel`. To check your own method, pass it in:

    from decodery.testing import check_identical, tiny_transformer
    check_identical(tiny_transformer(), [[1, 2, 3]], drafter=MyDrafter())
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from decodery.core.noise import gumbel
from decodery.models.batch import Segment
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.logits_processor import Context
from decodery.sampling.sampler import Sampler
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.cache_policy import CachePolicy
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.forward_request import ForwardResult, run_sync
from decodery.step.forward_request import score as scored_by
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.sequence import Sequence

from .drafters import Garbage
from .running import LawBroken, decode

Tested = Literal["accepted", "drafted", "nothing"]
"""What must have happened for a check to count: a draft was accepted; a draft was verified, for drafts that are wrong
on purpose; nothing, where a budget allows no draft. None is the second for Garbage, and the first for others."""

_UNTESTED = "nothing was put to the test"
_COUNTED = ("nodes", "accepted")


def check_identical(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | str | None,
    draft_length: DraftLengthPolicy | str | None = None,
    acceptance_rule: AcceptanceRule | str | None = None,
    sampler: Sampler | None = None,
    logits_source: LogitsSource | str | None = None,
    cache_policy: CachePolicy | str | None = None,
    monitors: Ordered[Monitor | str] = (),
    seeds: Ordered[int] = (0, 1),
    max_new_tokens: int = 24,
    eos_ids: Ordered[int] = (),
    near_tie: float = 0.0,
    excuses: int = 0,
    tested: Tested | None = None,
    plain: Ordered[Sequence] | None = None,
) -> list[Sequence]:
    """Check that a method is greedy- and seed-identical: its tokens are those of plain decoding.

    Where kernels round a pass over several rows differently, at most `excuses` texts may differ, each first at a
    position where plain decoding preferred its token by less than `near_tie`. The check also fails if less than
    `tested` happened, or if a processor changes its input logits in place.

    Args:
        model: The target.
        prompts: Token ids of each prompt.
        drafter: The drafter under test, an instance or a text; None for plain decoding with another rule.
        draft_length: The draft length policy under test, an instance or a text.
        acceptance_rule: The acceptance rule under test, an instance or a text.
        sampler: The sampler, by default greedy.
        logits_source: The logits source under test, an instance or a text.
        cache_policy: The KV cache policy under test, an instance or a text.
        monitors: The monitors under test, instances or texts.
        seeds: Seeds of the texts of each prompt.
        max_new_tokens: Maximum number of tokens of a text.
        eos_ids: End tokens.
        near_tie: Score difference in nats that counts as a tie.
        excuses: Number of texts that may differ at a tie.
        tested: What must have happened for the check to count.
        plain: The texts of plain decoding. By default they are decoded, once for all drafters with the same texts and
            model, unless `excuses` or a logits source is given.

    Returns:
        The speculative runs, whose traces have the numbers of accepted tokens.

    Raises:
        LawBroken: If a text differs from plain decoding, or drafts were not tested.
    """
    if drafter is None and acceptance_rule is None:
        raise LawBroken("plain decoding was compared with itself: give a drafter or a rule")
    common = {
        "sampler": sampler,
        "logits_source": logits_source,
        "cache_policy": cache_policy,
        "monitors": tuple(monitors),
        "seeds": seeds,
        "max_new_tokens": max_new_tokens,
        "eos_ids": eos_ids,
    }
    if plain is None:
        # Where a text may depart, what plain decoding preferred is asked of its own sequence; sources hold models.
        plain = _plain(model, prompts, common, remember=not excuses and logits_source is None)
    if sampler is not None:
        common["sampler"] = _Guarded(sampler.processors)
    parts: dict[str, Any] = {"drafter": drafter, "draft_length": draft_length, "acceptance_rule": acceptance_rule}
    drafted = decode(model, prompts, **parts, **common)  # type: ignore[arg-type]
    for expected, got in zip(plain, drafted, strict=True):
        if (got.generated, got.finish_reason) != (expected.generated, expected.finish_reason):
            at = first_difference(expected.generated, got.generated)
            if excuses > 0 and margin(expected.request.model, expected, got, at) < near_tie:
                excuses -= 1
                continue
            raise LawBroken(
                f"with {drafter} and {acceptance_rule} the text departs from plain decoding at output position {at}: "
                f"{got.generated[at : at + 4]} instead of {expected.generated[at : at + 4]} (seed {got.request.seed})"
            )
    _require_tested(drafted, drafter, tested)
    return drafted


class _Guarded(Sampler):
    """Raises LawBroken where a processor changes the logits that it is given, which others may still read."""

    def _through(self, index: int, logits: torch.Tensor, contexts: Ordered[Context]) -> torch.Tensor:
        before = logits.clone()
        found = super()._through(index, logits, contexts)
        if not torch.equal(before, logits):
            raise LawBroken(f"{self.processors[index]} changes the logits it is given in place: make a new tensor")
        return found


_remembered: WeakKeyDictionary[LanguageModel, dict[Any, list[Any]]] = WeakKeyDictionary()
"""By model, prompts and settings: what plain decoding gave, with which every further drafter is compared."""


@dataclass(frozen=True, slots=True)
class _Text:
    """What the law compares of a text; a `Sequence` would keep its cache and its model alive."""

    generated: list[int]
    finish_reason: str | None


def _plain(model: LanguageModel, prompts: Ordered[Ordered[int]], common: dict[str, Any], remember: bool) -> list[Any]:
    """What plain decoding makes of every prompt and seed."""
    sampler, seeds = common["sampler"], common["seeds"]
    # Whatever drafts draw, greedy texts of all seeds are one.
    greedy = common["logits_source"] is None and (sampler is None or sampler.greedy)
    settings = {**common, "seeds": tuple(seeds[:1] if greedy else seeds), "eos_ids": tuple(common["eos_ids"])}
    key = (tuple(tuple(prompt) for prompt in prompts), *settings.values())
    try:
        texts = _remembered.setdefault(model, {}).get(key) if remember else None
    except TypeError:  # models and processors of one's own need no hash
        texts, remember = None, False
    if texts is None:
        texts = decode(model, prompts, **settings)
        if remember:
            texts = _remembered[model][key] = [_Text(text.generated, text.finish_reason) for text in texts]
    return [text for text in texts for _ in seeds] if greedy else texts


def _require_tested(runs: Ordered[Sequence], drafter: Drafter | str | None, tested: Tested | None) -> None:
    """Raise LawBroken where these runs say nothing of drafts, or nothing at all."""
    passes = sum(run.trace.passes for run in runs)
    if not passes:
        raise LawBroken(f"no text is longer than its first token, which no draft precedes: {_UNTESTED}")
    if drafter is None or tested == "nothing":
        return
    nodes, accepted = (sum(getattr(step, what) for run in runs for step in run.trace.steps) for what in _COUNTED)
    if not nodes:
        raise LawBroken(f"{drafter} drafted nothing in {passes} passes: {_UNTESTED}")
    if not accepted and (tested or ("drafted" if isinstance(drafter, Garbage) else "accepted")) == "accepted":
        raise LawBroken(
            f"none of {nodes} drafted tokens of {drafter} was accepted: {_UNTESTED} (longer texts, or tested='drafted' "
            "where drafts are wrong on purpose)"
        )


def first_difference(expected: Ordered[int], got: Ordered[int]) -> int:
    """Index of the first differing token; where one text continues the other, the shorter one's length."""
    pairs = enumerate(zip(expected, got, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(expected), len(got)))


def margin(model: Reader, expected: Sequence, got: Sequence, at: int) -> float:
    """Score difference in nats between the expected and the actual token at output position `at`.

    The score is what the token is the argmax of: warped logits, and the request's noise where it samples. Infinite
    where one of the texts has no such position. Warps that hear log-probabilities are not replayed.

    Args:
        model: The target.
        expected, got: The two texts.
        at: The output position.
    """
    if at >= min(len(expected.generated), len(got.generated)):
        return float("inf")
    tokens = expected.tokens[: expected.request.prompt_length + at]
    scored: ForwardResult = run_sync(
        scored_by(model, Segment.chunk(tokens, model.new_cache(), logit_rows=[len(tokens) - 1]))
    )
    sampler = expected.request.sampler
    prompt, written = tokens[: expected.request.prompt_length], tokens[expected.request.prompt_length :]
    start = sampler.context(prompt, len(prompt), sampler.init(prompt), expected.request.seed)
    law = sampler.law(scored.logits, [sampler.ahead(start, written)])[0]
    pair = torch.tensor([expected.generated[at], got.generated[at]], dtype=torch.int64, device="cpu")
    score = law[pair].double()
    if not sampler.greedy:
        score = score + gumbel(expected.request.seed, at, pair)
    return float((score[0] - score[1]).abs())


def check_batch(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    *,
    drafter: Drafter | str | None = None,
    draft_length: DraftLengthPolicy | str | None = None,
    acceptance_rule: AcceptanceRule | str | None = None,
    sampler: Sampler | None = None,
    logits_source: LogitsSource | str | None = None,
    cache_policy: CachePolicy | str | None = None,
    seeds: Ordered[int] = (0, 1),
    max_new_tokens: int = 16,
    tested: Tested | None = None,
) -> None:
    """Check that a text in a ragged batch equals the text on its own, with and without chunked prefill.

    Args:
        model: The target.
        prompts: Token ids of each prompt.
        drafter: The drafter under test, an instance or a text.
        draft_length: The draft length policy under test, an instance or a text.
        acceptance_rule: The acceptance rule under test, an instance or a text.
        logits_source: The logits source under test, an instance or a text.
        cache_policy: The KV cache policy under test, an instance or a text.
        sampler: The sampler, by default greedy.
        seeds: Seeds of the texts of each prompt.
        max_new_tokens: Maximum number of tokens of a text.
        tested: What must have happened for the check to count.

    Raises:
        LawBroken: If a text differs, or less than `tested` happened.
    """
    if len(prompts) * len(seeds) < 2:
        raise LawBroken(f"a batch of one is no batch: {_UNTESTED}")
    parts = {
        "drafter": drafter,
        "draft_length": draft_length,
        "acceptance_rule": acceptance_rule,
        "sampler": sampler,
        "logits_source": logits_source,
        "cache_policy": cache_policy,
    }
    common = {**parts, "seeds": seeds}
    alone = decode(model, prompts, together=False, max_new_tokens=max_new_tokens, **common)  # type: ignore[arg-type]
    for chunk in (512, 3):
        batch = decode(model, prompts, prefill_chunk=chunk, max_new_tokens=max_new_tokens, **common)  # type: ignore[arg-type]
        for single, member in zip(alone, batch, strict=True):
            if single.generated != member.generated:
                raise LawBroken(
                    f"in a batch with prefill chunks of {chunk}: {member.generated}, alone {single.generated}"
                )
    _require_tested(alone, drafter, tested)
