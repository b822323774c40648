"""The invariants of searches: branches do not affect each other, and results are in the order of their scores."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Any

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.protocol import LanguageModel
from decodery.search.base import Search
from decodery.step.sequence import Sequence

from .running import LawBroken
from .states import distance_to_fresh


def check_search(
    model: LanguageModel,
    prompts: Ordered[Ordered[int]],
    search: Search,
    *,
    tolerance: float = 1e-9,
    **settings: Any,
) -> list[list[Sequence]]:
    """Check a search.

    - Every result is finished and ends where it should, and its cache equals a fresh prefill.
    - The best result comes first.
    - A second run gives the same results, with any prefill chunks.
    - A text that others continue is not changed.

    Args:
        model: The target.
        prompts: Token ids of each prompt.
        search: The search under test.
        tolerance: Maximum absolute difference.
        settings: Settings of the requests.

    Returns:
        The results of each prompt.

    Raises:
        LawBroken: If an invariant does not hold.
    """
    found = []
    for prompt in prompts:
        request = Request(prompt, **settings)
        results = search.run(Engine(model), request)
        for seq in results:
            _check_result(model, seq, request, tolerance)
        scores = [-float("inf") if seq.score is None else seq.score for seq in results]
        if scores != sorted(scores, reverse=True):
            raise LawBroken(f"the results are not in the order of their scores: {scores}")
        before = list(results[0].tokens)
        again = search.run(Engine(model, prefill_chunk=3), Request(prompt, **settings, reuse=results[0]))
        if [seq.tokens for seq in again] != [seq.tokens for seq in results]:
            raise LawBroken(f"going on from an earlier text, in chunks, gives other texts after the prompt {prompt}")
        if results[0].tokens != before or distance_to_fresh(model, results[0]) > tolerance:
            raise LawBroken("a text that a search went on from has changed")
        found.append(results)
    return found


def _check_result(model: LanguageModel, seq: Sequence, request: Request, tolerance: float) -> None:
    tokens = seq.generated
    if seq.tokens[: seq.request.prompt_length] != list(request.prompt) or not tokens:
        raise LawBroken(
            f"a result holds {len(tokens)} tokens after the prompt {seq.tokens[: seq.request.prompt_length]}"
        )
    ended = tokens[-1] in request.eos_ids
    if any(token in request.eos_ids for token in tokens[:-1]) or len(tokens) > request.max_new_tokens:
        raise LawBroken(f"a result goes on after its end: {tokens}")
    if seq.finish_reason != ("stop" if ended else "length"):
        raise LawBroken(f"a result that ends with {tokens[-1]} finished by {seq.finish_reason!r}")
    distance = distance_to_fresh(model, seq)
    if distance > tolerance:
        raise LawBroken(f"the cache of a result is {distance:.2e} away from a fresh prefill")
