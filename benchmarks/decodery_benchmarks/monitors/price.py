"""What acted texts cost in likelihood, and what acting did to answers that were right and wrong."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import torch

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment

from .figures import Row, mcnemar


@torch.no_grad()
def price(lm: LLM, texts: Iterable[tuple[Ordered[int], Ordered[int]]]) -> float:
    """The mean over tokens of -log p under the model itself, in nats: what it finds of texts (prompt, tokens)."""
    total = count = 0.0
    for prompt, tokens in texts:
        if not tokens:
            continue
        wanted = list(range(len(prompt) - 1, len(prompt) + len(tokens) - 1))
        segment = Segment.chunk([*prompt, *tokens[:-1]], lm.model.new_cache(), logit_rows=wanted)
        rows = torch.log_softmax(lm.model.forward(Batch([segment])).logits.float(), dim=-1)
        total -= float(
            rows[
                torch.arange(len(tokens), device="cpu"), torch.tensor(list(tokens), dtype=torch.int64, device="cpu")
            ].sum()
        )
        count += len(tokens)
    return total / max(count, 1)


def both_ways(before: Ordered[bool], after: Ordered[bool]) -> Row:
    """How many answers became right, and wrong, and the exact p of as uneven a split."""
    mended = sum(now and not was for was, now in zip(before, after, strict=True))
    broken = sum(was and not now for was, now in zip(before, after, strict=True))
    return {
        "wrong to right": mended,
        "right to wrong": broken,
        "mcnemar p": round(mcnemar(mended, broken), 4),
    }
