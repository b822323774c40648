"""What right and wrong predictions cost: the invariants of algorithms that act on predictions, for drafts.

Perfect ones make decoding as cheap as it can be, arbitrary ones no dearer than it was without them, and between the two
the cost grows by no more than what was wrong. The Predicted-Updates Dynamic Model (2023) states the same of graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from typing import Any

from decodery.models.protocol import LanguageModel
from decodery.step.sequence import Sequence

from .drafters import Foretold
from .running import LawBroken, decode


def check_predictions(
    model: LanguageModel, prompt: Ordered[int], *, length: int = 4, max_new_tokens: int = 41, **settings: Any
) -> None:
    """Chains of `length` tokens, right but at given places, cost the number of passes they must.

    No place: one pass for length + 1 tokens. Some: at most a pass more for each of them. All: one for each token.

    Args:
        model: The target.
        prompt: Token ids.
        length: Tokens of a draft.
        max_new_tokens: Tokens of the text.
        settings: Of the request, as in `decode`.
    """
    (plain,) = decode(model, [prompt], max_new_tokens=max_new_tokens, **settings)
    places = range(len(prompt), len(plain.tokens))
    for wrong in (frozenset[int](), frozenset(places[3::7]), frozenset(places[1::2]), frozenset(places)):
        drafter = Foretold(tuple(plain.tokens), length, wrong)
        (run,) = decode(model, [prompt], drafter=drafter, max_new_tokens=max_new_tokens, **settings)
        if run.generated != plain.generated:
            raise LawBroken(f"foretold with {len(wrong)} errors, the text is another one")
        _require_cost(run, length, wrong)


def _require_cost(run: Sequence, length: int, wrong: frozenset[int]) -> None:
    # The pass that reads the prompt gives the first token.
    tokens, passes = len(run.generated) - 1, len(run.trace.decoding)
    errors = sum(place > run.request.prompt_length for place in wrong)
    most = min(tokens, errors + math.ceil(tokens / (length + 1)))
    if passes > most or (not wrong and passes != most):
        raise LawBroken(
            f"{tokens} tokens, foretold {length} at a time with {errors} errors, took {passes} passes, not {most}"
        )
