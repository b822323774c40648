"""The cost of right and wrong drafts: the invariants of algorithms with predictions.

With perfect drafts decoding needs the fewest possible passes, and with arbitrary drafts no more passes than without
them. In between, each error costs at most one pass. The Predicted-Updates Dynamic Model (2023) states the same for
graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from typing import Any

from decodery.models.protocol import LanguageModel
from decodery.step.sequence import Sequence

from .drafters import OracleChain
from .running import LawBroken, decode


def check_predictions(
    model: LanguageModel, prompt: Ordered[int], *, length: int = 4, max_new_tokens: int = 41, **settings: Any
) -> None:
    """Check the number of passes with drafted chains that have errors at given positions.

    Without errors, one pass gives length + 1 tokens. Each error adds at most one pass. If all tokens are wrong, one
    pass gives one token.

    Args:
        model: The target.
        prompt: Token ids.
        length: Number of tokens of a draft.
        max_new_tokens: Number of tokens of the text.
        settings: Settings of the request, as in `decode`.

    Raises:
        LawBroken: If the text differs from plain decoding, or the number of passes is wrong.
    """
    (plain,) = decode(model, [prompt], max_new_tokens=max_new_tokens, **settings)
    places = range(len(prompt), len(plain.tokens))
    for wrong in (frozenset[int](), frozenset(places[3::7]), frozenset(places[1::2]), frozenset(places)):
        drafter = OracleChain(tuple(plain.tokens), length, wrong)
        (run,) = decode(model, [prompt], drafter=drafter, max_new_tokens=max_new_tokens, **settings)
        if run.generated != plain.generated:
            raise LawBroken(f"with drafts that have {len(wrong)} errors, the text differs from plain decoding")
        _require_cost(run, length, wrong)


def _require_cost(run: Sequence, length: int, wrong: frozenset[int]) -> None:
    # The pass that reads the prompt gives the first token.
    tokens, passes = len(run.generated) - 1, len(run.trace.decoding)
    errors = sum(place > run.request.prompt_length for place in wrong)
    most = min(tokens, errors + math.ceil(tokens / (length + 1)))
    if passes > most or (not wrong and passes != most):
        raise LawBroken(f"{tokens} tokens with drafts of {length} and {errors} errors took {passes} passes, not {most}")
