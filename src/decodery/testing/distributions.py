"""The invariant of distributions: draws over many seeds follow the computed distribution."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import torch

from decodery.models.batch import Segment
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.logits_processor import Context
from decodery.sampling.sampler import Sampler
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.forward_request import run_sync, score
from decodery.step.logits_source import LogitsSource

from .running import LawBroken, decode
from .statistics import chi_square


def enumerate_law(model: Reader, prompt: Ordered[int], sampler: Sampler, length: int) -> np.ndarray:
    """Probabilities [vocab ** length] of all continuations of `length` tokens, first token slowest.

    Args:
        model: The model.
        prompt: Token ids.
        sampler: The sampler.
        length: Number of tokens of a continuation.
    """
    size = model.vocab_size
    law = np.zeros(size**length)

    def visit(context: Context, mass: float, code: int, left: int) -> None:
        if left == 0:
            law[code] = mass
            return
        segment = Segment.chunk(context.tokens, model.new_cache(), logit_rows=[len(context.tokens) - 1])
        logits = run_sync(score(model, segment)).logits[0]
        row = sampler.probabilities(sampler.law(logits[None], [context]))[0]
        for token in torch.nonzero(row).flatten().tolist():
            after = sampler.extend(context, token, logits)
            visit(after, mass * float(row[token]), code * size + token, left - 1)

    start = sampler.context(list(prompt), len(prompt), sampler.init(list(prompt)), 0)
    visit(start, 1.0, 0, length)
    return law


def check_distribution(
    model: LanguageModel,
    prompt: Ordered[int],
    *,
    drafter: Drafter | str | None,
    draft_length: DraftLengthPolicy | str | None = None,
    acceptance_rule: AcceptanceRule | str | None = None,
    sampler: Sampler | None = None,
    logits_source: LogitsSource | None = None,
    length: int = 5,
    draws: int = 20_000,
    first_seed: int = 0,
    least: float = 1e-4,
) -> float:
    """Check that a method is distribution-identical: first tokens over many seeds follow enumeration.

    Args:
        model: A model with a small vocabulary.
        prompt: Token ids.
        drafter: The drafter under test, an instance or a text.
        draft_length: The draft length policy under test, an instance or a text.
        acceptance_rule: The acceptance rule under test, an instance or a text.
        logits_source: The logits source under test, an instance or a text.
        sampler: The sampler, by default with temperature 1.
        length: Number of tokens of a text.
        draws: Number of texts.
        first_seed: Seed of the first text; the others have the seeds after it.
        least: Minimum p-value that passes.

    Returns:
        The p-value of a chi-square test.

    Raises:
        LawBroken: If the p-value is below `least`, or no draft of two or more tokens was accepted, so that drafts were
            not tested.
    """
    sampler = sampler or Sampler.from_settings(temperature=1.0)
    scored_by = model if logits_source is None else logits_source.over(model, prompt)
    law = enumerate_law(scored_by, prompt, sampler, length)
    counts, deep = np.zeros_like(law), 0
    for start in range(0, draws, 500):
        seeds = range(first_seed + start, first_seed + min(start + 500, draws))
        for seq in decode(
            model,
            [prompt],
            drafter=drafter,
            draft_length=draft_length,
            acceptance_rule=acceptance_rule,
            sampler=sampler,
            logits_source=logits_source,
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
