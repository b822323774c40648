"""Nodes of a tree that a drafter reads level by level without waiting for its device."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from decodery.core.requirements import Origin
from decodery.models.tokenizers.vocabularies import Padding
from decodery.sampling.batched import BatchedProcessors, batched_processors

if TYPE_CHECKING:
    from .sequence import Sequence

UNSAID = -1e30
"""The logit, for masks, of tokens that a drafter lacks: a constraint may allow only these, which is not an error."""
_NO_NODE = -2


class Level(NamedTuple):
    """What is read ahead of a level of a tree.

    Attributes:
        children: Of each of its nodes that are read, the first tokens.
        read: How many of all of these are read in the next level, those with the most likely paths; or which, in order.
    """

    children: int
    read: int | tuple[int, ...]


class Rows(NamedTuple):
    """The rows of a text that are read next, on the device.

    Attributes:
        tokens: [n] int64.
        above: [n] the row above each among those of the level before.
        seen: [n, m] bool which rows below the text each sees, itself included.
        scores: [n] float64 log-probabilities of the paths to them.
        values: [n] float64, the same with noise, see `level_choice.perturbed`; 0 where nothing is drawn.
        places: [n] int64 hashes of their paths, from which independent draws have their noise; 0 elsewhere.
    """

    tokens: torch.Tensor
    above: torch.Tensor
    seen: torch.Tensor
    scores: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor


@dataclass(slots=True, eq=False)
class Look:
    """How a drafter looks ahead below one text.

    Attributes:
        seq: The text.
        plan: What is read, level by level, see `TreeDrafter.read_ahead`.
        origin: Whether children are the most likely tokens, or how they are drawn, see `DraftTree`.
        processors: What rows go through first; None where they are taken as they are.
        padding: Ids that are none of the children.
        words: [outputs] the tokens that rows are about, on the device; None: all of them.
        rows: What is read next, None before anything is.
        levels: Of each level that was read, on the device, its children, their log-probabilities or, of rows that are
            taken as they are, probabilities, their log-probabilities with noise where they are drawn without
            replacement, and which of all of them are read next, in one tensor.
        found: Of each level on the host, once all are known, children, log-probabilities, and as above.
    """

    seq: Sequence
    plan: tuple[Level, ...]
    origin: Origin
    processors: BatchedProcessors | None
    padding: Padding | None = None
    words: torch.Tensor | None = None
    rows: Rows | None = None
    levels: list[torch.Tensor] = field(default_factory=list)
    found: list[list[np.ndarray]] = field(default_factory=list)

    @classmethod
    def below(cls, seq: Sequence, plan: tuple[Level, ...], origin: Origin, *, shaped: bool) -> Self | None:
        """How to look ahead, None where that saves nothing or the text's processors have to be asked.

        Args:
            seq: See `TreeDrafter.read_ahead`.
            plan: See `TreeDrafter.read_ahead`.
            origin: See `TreeDrafter.read_ahead`.
            shaped: See `TreeDrafter.expand`.
        """
        request = seq.request
        if not plan or max(level.children for level in plan) > request.vocab_size:
            return None
        if origin == "deterministic" and request.sampler.keeps(shaped=shaped):
            return cls(seq, plan, origin, None)
        processors = batched_processors(request.sampler, request.vocab_size) if shaped else None
        return None if processors is None else cls(seq, plan, origin, processors, request.padding)

    @property
    def last(self) -> bool:
        """Whether nothing is read after the rows that were read last."""
        return len(self.levels) == len(self.plan)

    @property
    def level(self) -> Level:
        """What is planned of the rows that are read now."""
        return self.plan[len(self.levels)]

    @property
    def seed(self) -> int:
        """Of the text's noise."""
        return self.seq.request.seed

    def alike(self, rows: torch.Tensor) -> Hashable:
        """Equal for those that go on in the same way from logits of so many rows."""
        kinds = None if self.processors is None else (self.processors.greedy, self.processors.kinds)
        ends = len(self.seq.request.eos_ids)
        return self.plan, len(self.levels), rows.shape, ends, self.origin, kinds, self.padding

    def ahead(self) -> Ahead:
        """What was read, once that is known."""
        rows, answers, above = dict[tuple[int, int], int](), list[tuple[np.ndarray, ...]](), [-1]
        for tokens, *values, chosen in self.found:
            answers += zip(tokens, *values, strict=True)
            k, named, following = tokens.shape[1], tokens.reshape(-1).tolist(), []
            for place in chosen.tolist():
                row = len(rows)
                key = above[place // k], named[place]
                # Of equal draws one is a node, and the others' rows stand for none.
                rows[(_NO_NODE, row) if key in rows else key] = row
                following.append(row)
            above = following
        return Ahead(rows, answers)


@dataclass(eq=False)
class Ahead:
    """What was read ahead of a tree.

    Attributes:
        rows: By the row above (-1: the text's end) and token.
        answers: Of the text's end and of all rows: the children [k], and what is known of each, see `Look.levels`.
    """

    rows: dict[tuple[int, int], int]
    answers: list[tuple[np.ndarray, ...]]
    _placed: list[int] = field(default_factory=lambda: [-1])

    def of(
        self, tokens: np.ndarray, parents: np.ndarray, nodes: Ordered[int], children: int
    ) -> list[np.ndarray] | None:
        """The first children of nodes and what is known of each; None where some of it was not read.

        Args:
            tokens: [n] of a tree, to which nodes are added between calls.
            parents: [n].
            nodes: Some of them.
            children: How many.

        Returns:
            Arrays [nodes, children], see `answers`.
        """
        placed = self._placed
        for token, parent in zip(tokens[len(placed) :].tolist(), parents[len(placed) :].tolist(), strict=True):
            above = placed[parent]
            placed.append(_NO_NODE if above == _NO_NODE else self.rows.get((above, token), _NO_NODE))
        if any(placed[node] == _NO_NODE for node in nodes):
            return None
        known = [self.answers[placed[node] + 1] for node in nodes]
        if any(len(each[0]) < children or not np.isfinite(each[1][0]) for each in known):
            return None
        return [np.stack([values[:children] for values in each]) for each in zip(*known, strict=True)]


def logged(found: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and the logarithms of their probabilities, float64 and -inf for 0."""
    with np.errstate(divide="ignore"):
        return found[0], np.log(found[1].astype(np.float64))
