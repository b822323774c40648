"""A prompt that one model has read, and another one goes on with."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch

from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.step.embedded import reading
from decodery.step.forward_request import ForwardCoroutine, score_all
from decodery.step.sequence import Sequence


def read_prompt(seq: Sequence, chunk: int, taps: Ordered[Tap] = ()) -> ForwardCoroutine[dict[Tap, torch.Tensor]]:
    """Have the text's own model read all of its prompt but the last token.

    [rows, hidden] of what was read, by tap.
    """
    found: list[dict[Tap, torch.Tensor]] = []
    while (start := seq.cache.next_position) < len(seq.tokens) - 1:
        rows = seq.tokens[start : min(start + chunk, len(seq.tokens) - 1)]
        (scored,) = yield from score_all(seq.request.model, [reading(seq, rows, [])], taps)
        seq.cache.keep(range(len(rows)))
        found.append({tap: scored.hidden[tap] for tap in taps})
    return {tap: torch.cat([each[tap] for each in found]) for tap in taps} if found else {}


def hand_over(seq: Sequence, model: Reader) -> None:
    """Let another model go on with a text, whose keys and values stay."""
    if seq.scheduling.branches is not None:
        # What is read so far is the first model's, so the other model must not read it again.
        seq.scheduling.branches.pop(id(seq), None)
    seq.rebind(model=model)
