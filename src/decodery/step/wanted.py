"""What texts want to know of a pass on the host: found on the device for all of them, and copied once."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from decodery.core import noise
from decodery.models.torch.one_pass import to_device
from decodery.sampling.batched import BatchedProcessors, Choice, batched_processors, batched_sampling

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
        ids, chances: [m, ranks] the most likely tokens and their probabilities at temperature 1; of no rows where none
            are wanted.
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
    parts, drawing = list[torch.Tensor](), [each.processors for each in asked.values()]
    draws = np.repeat([each is not None for each in drawing], sizes)
    if draws.any():
        processors = tuple(each for each in drawing if each is not None)
        owners = np.repeat(np.arange(len(processors)), [n for n, each in zip(sizes, drawing, strict=True) if each])
        keys = np.concatenate([each.keys for each in asked.values()])
        own, sampling = _some(rows, draws), batched_sampling(processors)
        parts.append(sampling.choose(own, owners, keys[draws], _ROOTS, Choice(False, (), ())).double())
    most = min(max(each.ranks for each in asked.values()), rows.shape[1])
    ranked = np.repeat([each.ranks > 0 for each in asked.values()], sizes)
    if most:
        own = _some(rows, ranked)
        # The largest is found by one look at each row, where several are sorted out.
        values, best = own.max(dim=-1, keepdim=True) if most == 1 else own.topk(most, dim=-1)
        shares = (values - own.logsumexp(dim=-1, keepdim=True)).exp()
        parts += [best.double().flatten(), shares.double().flatten()]
    found, drawn, count = torch.cat(parts).cpu().numpy(), int(draws.sum()), int(ranked.sum())
    picks, ids, chances = np.split(found, (drawn, drawn + count * most))
    picks, ids = picks.astype(np.int64), ids.astype(np.int64).reshape(count, most)
    chances = chances.astype(np.float32).reshape(count, most)
    answers: list[RowChoices | None] = [None] * len(wanted)
    rank = pick = 0
    for (number, each), size in zip(asked.items(), sizes, strict=True):
        drawn, count = size * (each.processors is not None), size * (each.ranks > 0)
        own, own_picks = np.s_[rank : rank + count, : most * (count > 0)], picks[pick : pick + drawn].tolist()
        answers[number] = RowChoices(own_picks, ids[own], chances[own])
        rank, pick = rank + count, pick + drawn
    return answers


def _some(rows: torch.Tensor, wanted: np.ndarray) -> torch.Tensor:
    """The rows [n, vocab] that are wanted [n]."""
    return rows if wanted.all() else rows[to_device(np.flatnonzero(wanted), rows.device)]
