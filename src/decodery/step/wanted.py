"""What texts want to know of a pass on the host: found on the device for all of them, and copied once."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from decodery.core import noise
from decodery.models.torch.one_pass import to_device
from decodery.sampling.batched import BatchedProcessors, BatchedSampling, Choice, batched_processors

from .draft_tree import MASK_TOKEN, DraftTree

if TYPE_CHECKING:
    from .sequence import Sequence

_ROOTS = np.empty((2, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a text wants to know of the last rows of a pass whose logits it asks for.

    Attributes:
        seq: The text.
        keys: [m] int64 of the noise of the rows' tokens, see `noise.keys`.
        processors: How they choose their tokens; None where no tokens are wanted.
        ranks: How many of the most likely tokens are wanted, 0 for none.
    """

    seq: Sequence
    keys: np.ndarray
    processors: BatchedProcessors | None
    ranks: int = 0

    @classmethod
    def after(
        cls, seq: Sequence, tree: DraftTree, nodes: Ordered[int], *, ranks: int = 0, draws: bool = True
    ) -> Self | None:
        """What follows nodes of a tree below the end of a text; None where no more than logits is.

        Args:
            seq: The text.
            tree: Below its end.
            nodes: Of it.
            ranks: How many of the most likely tokens after each.
            draws: Whether the tokens that the text's own noise draws are wanted, too.
        """
        request, depths = seq.request, tree.depths[list(nodes)]
        draws = draws and not (tree.tokens == MASK_TOKEN).any()
        processors = batched_processors(request.sampler, request.vocab_size) if draws else None
        if processors is None and not ranks:
            return None
        seeds = np.full(len(depths), request.seed, dtype=np.uint64)
        return cls(seq, noise.keys(seeds, seq.position + depths), processors, ranks)


@dataclass(frozen=True, slots=True, eq=False)
class RowChoices:
    """What is known of rows on the host.

    Attributes:
        picks: [m] the token after each, -1 where its largest logit is no finite number; of no rows where none are
            wanted.
        ids, chances: [m, ranks] the most likely tokens and their probabilities at temperature 1.
    """

    picks: list[int]
    ids: np.ndarray
    chances: np.ndarray


def row_choices_of(logits: torch.Tensor, bounds: list[int], wanted: Ordered[Wanted | None]) -> list[RowChoices | None]:
    """What segments want to know of the logits [m, vocab] of their pass; the host waits once.

    Args:
        logits: Of the rows of all segments in order, on a device.
        bounds: Where those of each segment begin, and the end.
        wanted: Of each segment.
    """
    asked = {
        number: each
        for number, (each, first, last) in enumerate(zip(wanted, bounds, bounds[1:], strict=False))
        if each is not None and len(each.keys) <= last - first
    }
    if not asked:
        return [None] * len(wanted)
    places = np.concatenate([np.arange(bounds[n + 1] - len(each.keys), bounds[n + 1]) for n, each in asked.items()])
    # A copy: what no text is to choose is excluded in it.
    rows = logits[to_device(places, logits.device)].float()
    sizes = [len(each.keys) for each in asked.values()]
    for each, own in zip(asked.values(), rows.split(sizes), strict=True):
        each.seq.writable(own)
    most, parts = max(each.ranks for each in asked.values()), list[torch.Tensor]()
    drawing = [each.processors for each in asked.values()]
    draws = np.repeat([each is not None for each in drawing], sizes)
    if draws.any():
        processors = [each for each in drawing if each is not None]
        owners = np.repeat(np.arange(len(processors)), [n for n, each in zip(sizes, drawing, strict=True) if each])
        keys = np.concatenate([each.keys for each in asked.values()])
        own = rows if draws.all() else rows[to_device(np.flatnonzero(draws), rows.device)]
        sampling = BatchedSampling(processors)
        parts.append(sampling.choose(own, owners, keys[draws], _ROOTS, Choice(False, (), ())).double())
    if most:
        values, places_of = rows.topk(min(most, rows.shape[1]), dim=-1)
        shares = (values - rows.logsumexp(dim=-1, keepdim=True)).exp()
        parts += [places_of.double().flatten(), shares.double().flatten()]
    found = torch.cat(parts).cpu().numpy()
    drawn = int(draws.sum())
    picks, best, said = np.split(found, np.cumsum([drawn, (len(found) - drawn) // 2]))
    ids, chances = (each.reshape(len(rows), -1) for each in (best.astype(np.int64), said.astype(np.float32)))
    answers: list[RowChoices | None] = [None] * len(wanted)
    row = pick = 0
    for (number, each), size in zip(asked.items(), sizes, strict=True):
        own_picks = [] if each.processors is None else picks[pick : pick + size].astype(np.int64).tolist()
        answers[number] = RowChoices(own_picks, ids[row : row + size], chances[row : row + size])
        row, pick = row + size, pick + len(own_picks)
    return answers
