"""The most likely nodes of a tree, which a head reads level by level without waiting for its device."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from decodery.models.torch.one_pass import to_device
from decodery.step.tree_drafter import Level

from .grown import DraftHead, Nodes


@dataclass(slots=True, eq=False)
class Look:
    """How a head looks ahead below one text.

    Attributes:
        plan: What is read, level by level, see `TreeDrafter.read_ahead`.
        ends: Tokens [ends] after which nothing is read, on the device.
        logits: Of the rows of all levels so far [n, outputs], the first of which is the text's end.
        levels: Of each, in one tensor, the outputs [n, k] that are most likely after its rows, their probabilities [n,
            k], and which of all of them the next level reads, in order.
        scores: [n] float64 log-probabilities of the paths to the rows that are read next.
        tokens, above: [n] theirs, and the rows above them among those of the level before.
        seen: [n, m] which rows below the text they see.
        found: `levels` on the host, once all are known.
    """

    plan: tuple[Level, ...]
    ends: torch.Tensor
    logits: list[torch.Tensor] = field(default_factory=list)
    levels: list[torch.Tensor] = field(default_factory=list)
    scores: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    above: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def nodes(self, memory: Any) -> Nodes:
        """What is read next."""
        assert self.tokens is not None and self.above is not None and self.seen is not None
        depths = np.full(len(self.tokens), len(self.levels))
        before = sum(len(each) for each in self.logits[1:-1])
        # The text's end is no row.
        above = self.above + before if len(self.levels) > 1 else self.above - 1
        return Nodes(memory, self.tokens, above, depths, self.seen)

    @property
    def alike(self) -> Hashable:
        """Equal for those that go on in the same way."""
        return self.plan, len(self.levels), len(self.logits[-1]), len(self.ends)

    @property
    def last(self) -> bool:
        """Whether nothing is read after the rows that were read last."""
        return len(self.levels) == len(self.plan)


def look(head: DraftHead, looks: Ordered[Look]) -> None:
    """Let texts go on by the logits of the rows that were read last.

    The host waits once for all that have looked far enough.
    """
    groups: dict[Hashable, list[Look]] = {}
    for each in looks:
        groups.setdefault(each.alike, []).append(each)
    for group in groups.values():
        _go_on(head, group)
    if done := [each for each in looks if each.last]:
        # Float64 holds ids, too.
        host = torch.cat([level for each in done for level in each.levels]).cpu().numpy()
        for each in done:
            for level, logits, planned in zip(each.levels, each.logits, each.plan, strict=True):
                own, host = host[: len(level)], host[len(level) :]
                n, k = len(logits), min(planned.children, logits.shape[1])
                ids, chances, chosen = np.split(own, (n * k, 2 * n * k))
                known = ids.astype(np.int64).reshape(n, k), chances.astype(np.float32).reshape(n, k)
                each.found.append((*known, chosen.astype(np.int64)))


def _go_on(head: DraftHead, group: Ordered[Look]) -> None:
    """Choose what texts that are alike read next."""
    first = group[0]
    rows = torch.stack([each.logits[-1] for each in group]).float()
    planned = first.plan[len(first.levels)]
    texts, k = len(rows), min(planned.children, rows.shape[2])
    most, best = rows.topk(k, dim=-1)
    chances = (most - rows.logsumexp(dim=-1, keepdim=True)).exp()
    known = best.double().flatten(1), chances.double().flatten(1)
    if len(first.levels) + 1 == len(first.plan):
        for each, level in zip(group, torch.cat(known, dim=1), strict=True):
            each.levels.append(level)
        return
    tokens = (best if head.vocabulary is None else head.vocabulary[best]).flatten(1)
    reached = chances.log().double()
    if first.scores is not None:
        reached = torch.stack([each.scores for each in group if each.scores is not None])[..., None] + reached
    ended = (tokens[..., None] == torch.stack([each.ends for each in group])[:, None]).any(dim=-1)
    reached = reached.flatten(1).masked_fill(ended, -torch.inf)
    if isinstance(planned.read, int):
        # Of equals the first ones, and all of them in order, as policies choose on the host.
        chosen = reached.sort(dim=-1, descending=True, stable=True).indices[:, : planned.read].sort(dim=-1).values
    else:
        chosen = to_device(np.array(planned.read), rows.device).expand(texts, -1)
    above, size = chosen // k, chosen.shape[1]
    own = torch.eye(size, dtype=torch.bool, device=rows.device).expand(texts, size, size)
    if first.seen is not None:
        seen = torch.stack([each.seen for each in group if each.seen is not None])
        own = torch.cat((seen.gather(1, above[..., None].expand(texts, size, seen.shape[2])), own), dim=2)
    scores, tokens = reached.gather(1, chosen), tokens.gather(1, chosen)
    levels = torch.cat((*known, chosen.double()), dim=1)
    for text, each in enumerate(group):
        each.levels.append(levels[text])
        each.scores, each.tokens, each.above, each.seen = scores[text], tokens[text], above[text], own[text]


def rows_of(look: Look, words: np.ndarray | None) -> tuple[dict[tuple[int, int], int], list[tuple[np.ndarray, ...]]]:
    """Which rows were read, and what is most likely after the text and each of them.

    Args:
        look: That has come to its end.
        words: [outputs] the head's own tokens, None for all of the target's.

    Returns:
        Rows by the row above (-1: the text's end) and token; and tokens and probabilities, in order.
    """
    rows, opinions, fresh = dict[tuple[int, int], int](), list[tuple[np.ndarray, ...]](), count()
    above = [-1]
    for ids, chances, chosen in look.found:
        tokens = ids if words is None else words[ids]
        opinions += zip(tokens, chances, strict=True)
        k, named = ids.shape[1], tokens.reshape(-1)
        following = []
        for place in chosen.tolist():
            rows[above[place // k], int(named[place])] = row = next(fresh)
            following.append(row)
        above = following
    return rows, opinions
