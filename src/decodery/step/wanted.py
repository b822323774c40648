"""What texts want to know of a pass on the host: found on the device for all of them, and copied once."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import takewhile
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
        stay: Whether tokens stay on the device, and are not waited for.
        before: Tokens [1] of earlier passes that have stayed there, to be copied with these.
    """

    seq: Sequence
    keys: np.ndarray
    processors: BatchedProcessors | None
    ranks: int = 0
    stay: bool = False
    before: tuple[torch.Tensor, ...] = ()

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

    @classmethod
    def chain(cls, seq: Sequence, length: int) -> list[Self]:
        """Of a chain, what follows the text and each token but the last, chosen one after another.

        All but the last of them stay on the device. None where the text's sampler chooses on the host.

        Args:
            seq: The text.
            length: Tokens of the chain.
        """
        tree = DraftTree.chain(seq.last_token, [seq.last_token] * (length - 1))
        rows = [cls.after(seq, tree, [node]) for node in range(length)]
        return [replace(each, stay=node < length - 1) for node, each in enumerate(rows) if each is not None]


@dataclass(frozen=True, slots=True, eq=False)
class RowChoices:
    """What is known of rows on the host.

    Attributes:
        picks: [before + m] the token after each, -1 where its largest logit is no finite number, after those of
            earlier passes that have stayed on the device; of no rows where none are wanted.
        ids, chances: [m, ranks] the most likely tokens and their probabilities at temperature 1; of no rows where none
            are wanted.
        there: [m] `picks`, where they stay on the device.
    """

    picks: list[int]
    ids: np.ndarray
    chances: np.ndarray
    there: torch.Tensor | None = None


def up_to_end(seq: Sequence, tokens: list[int]) -> list[int]:
    """Tokens of a draft up to the first that is an end token, or before one that is -1."""
    kept, ends = list(takewhile(lambda token: token >= 0, tokens)), seq.request.eos_ids
    return kept[: next((n for n, token in enumerate(kept, start=1) if token in ends), len(kept))]


def row_choices_of(logits: torch.Tensor, bounds: list[int], wanted: Ordered[Wanted | None]) -> list[RowChoices | None]:
    """What segments want to know of the logits [m, vocab] of their pass.

    The host waits once, or not at all where all of it stays on the device.

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
    drawn = [len(each.keys) * (each.processors is not None) for each in asked.values()]
    ranked = [len(each.keys) * (each.ranks > 0) for each in asked.values()]
    known = [len(each.before) for each in asked.values()]
    there, ranks = _drawn(rows, list(asked.values()), drawn), max(each.ranks for each in asked.values())
    parts, ranks = [there.double()], min(ranks, rows.shape[1])
    parts += [token.double() for each in asked.values() for token in each.before]
    if ranks:
        own = _some(rows, np.repeat(np.array(ranked) > 0, sizes))
        # The largest is found by one look at each row, where several are sorted out.
        values, best = own.max(dim=-1, keepdim=True) if ranks == 1 else own.topk(ranks, dim=-1)
        shares = (values - own.logsumexp(dim=-1, keepdim=True)).exp()
        parts += [best.double().flatten(), shares.double().flatten()]
    waits = not all(each.stay for each in asked.values())
    found = torch.cat(parts).cpu().numpy() if waits else np.zeros(sum(drawn) + sum(known) + 2 * sum(ranked) * ranks)
    picks, before, ids, chances = np.split(found, np.cumsum((sum(drawn), sum(known), sum(ranked) * ranks)))
    answers: list[RowChoices | None] = [None] * len(wanted)
    ids, chances = ids.astype(np.int64).reshape(-1, ranks or 1), chances.astype(np.float32).reshape(-1, ranks or 1)
    given = _shared(picks.astype(np.int64), drawn), _shared(before.astype(np.int64), known)
    of_texts = zip(*given, _shared(ids, ranked), _shared(chances, ranked), there.split(drawn), strict=True)
    for (number, each), (picks, before, ids, chances, stays) in zip(asked.items(), of_texts, strict=True):
        told = [] if each.stay else [*before.tolist(), *picks.tolist()]
        answers[number] = RowChoices(told, ids, chances, stays if each.stay else None)
    return answers


def _drawn(rows: torch.Tensor, asked: Ordered[Wanted], drawn: Ordered[int]) -> torch.Tensor:
    """The tokens after those of the rows [n, vocab] of texts of which tokens are wanted, on their device."""
    if not any(drawn):
        return rows.new_empty(0, dtype=torch.int64)
    drawing = [each for each, count in zip(asked, drawn, strict=True) if count]
    draws = np.repeat([count > 0 for count in drawn], [len(each.keys) for each in asked])
    sampling = batched_sampling(tuple(each.processors for each in drawing if each.processors is not None))
    owners = np.repeat(np.arange(len(drawing)), [len(each.keys) for each in drawing])
    keys = np.concatenate([each.keys for each in drawing])
    return sampling.choose(_some(rows, draws), owners, keys, _ROOTS, Choice(False, (), ()))


def _shared(found: np.ndarray, counts: Ordered[int]) -> list[np.ndarray]:
    """What there is for each text, of what there is for all of them."""
    return np.split(found, np.cumsum(counts)[:-1])


def _some(rows: torch.Tensor, wanted: np.ndarray) -> torch.Tensor:
    """The rows [n, vocab] that are wanted [n]."""
    return rows if wanted.all() else rows[to_device(np.flatnonzero(wanted), rows.device)]
