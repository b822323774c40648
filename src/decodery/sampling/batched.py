"""Processors of many texts, applied to all of their rows at once on the device where the logits lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch

from decodery.core.noise import keyed_argmax
from decodery.models.torch.tree_walk import walk

from .logits_processor import LogitsProcessor, Stage
from .min_p import MinP
from .sampler import Sampler
from .temperature import Temperature
from .top_k import TopK
from .top_p import TopP, keep_prefix

_FEW, _NUMBERS = 64, 1 << 23
"""Rows that are truncated and drawn at a time at least, and logits of more rows."""
_NAMES: dict[type[LogitsProcessor], str] = {Temperature: "t", TopK: "k", TopP: "p", MinP: "p"}


@dataclass(frozen=True)
class BatchedProcessors:
    """The processors of one text.

    Attributes:
        kinds: Their types, in order; none of greedy samplers, whose masks and edits are other processors.
        values: The setting of each.
        greedy: Whether the token is the argmax.
    """

    kinds: tuple[type[LogitsProcessor], ...]
    values: tuple[float, ...]
    greedy: bool

    @property
    def counts(self) -> bool:
        """Whether they use token counts: none of these does."""
        return False


def batched_processors(sampler: Sampler, vocab_size: int) -> BatchedProcessors | None:
    """A sampler's processors, None where it has one that is applied text by text.

    Args:
        sampler: The sampler.
        vocab_size: Size of the model's vocabulary.
    """
    kinds, values = [], []
    for processor in sampler.processors:
        if processor.neutral or (processor.stage > Stage.EDIT and sampler.greedy and not processor.stateful):
            continue
        if type(processor) not in _NAMES:
            return None
        if isinstance(processor, TopK) and processor.k >= vocab_size:
            continue
        kinds.append(type(processor))
        values.append(float(getattr(processor, _NAMES[type(processor)])))
    return BatchedProcessors(tuple(kinds), tuple(values), sampler.greedy)


@dataclass(frozen=True)
class Choice:
    """How rows choose their tokens, up to numbers that may differ from row to row and from step to step.

    Attributes:
        greedy, kinds: Of all rows, see `BatchedProcessors`.
        widths: For each kind a bound of what its settings are, 0 where none is needed.
        doublings: Of the walk over trees, see `tree_walk.walk`; -1 where no row is drafted.
        ranks: How many of the largest logits of each row are wanted with the tokens.
    """

    greedy: bool
    kinds: tuple[type[LogitsProcessor], ...]
    widths: tuple[int, ...]
    doublings: int = -1
    ranks: int = 0

    def walking(self, doublings: int) -> Self:
        """The same with other `doublings`."""
        return replace(self, doublings=doublings)

    def picks(self, logits: torch.Tensor, keys: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """[n] int64 tokens by logits [n, V], keys [n] and settings [kinds, n] float64."""
        if self.greedy:
            return logits.argmax(dim=-1)
        chosen, some = [], rows_together(logits.shape[1])
        for law, own, given in zip(logits.split(some), keys.split(some), settings.split(some, dim=1), strict=True):
            chosen.append(keyed_argmax(self.law(law, given), own))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def law(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """[n, V] what the tokens of rows are drawn from, -inf for excluded ones; of a few rows at a time.

        Args:
            logits: [n, V] float32.
            settings: [kinds, n] float64.
        """
        most: int | None = None
        for kind, width, values in zip(self.kinds, self.widths, settings, strict=True):
            # Of what top-k leaves, top-p sorts no more.
            logits, most = _through(kind, logits, values[:, None], width or most), width or most
        return logits

    def answer(self, logits: torch.Tensor, picks: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """All that a step is to know of its rows, one after another in one int64: see `Chosen`.

        Args:
            logits: [n, V] float32.
            picks: [n] tokens.
            nodes: [2, n], see `tree_walk.walk`; empty where no row is drafted.
        """
        parts = [torch.where(logits.amax(dim=-1).isfinite(), picks, -1)]
        if self.doublings >= 0:
            parts.append(walk(parts[0], nodes[0], nodes[1], self.doublings).long())
        if self.ranks:
            values, ids = logits.topk(self.ranks, dim=-1)
            parts += [ids.reshape(-1), values.double().view(torch.int64).reshape(-1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Chosen:
    """What `Choice.answer` says, on the host.

    Attributes:
        picks: [n] the token after each row, -1 where its largest logit is no finite number.
        reached: [n] whether what was chosen leads to a row.
        ids, values: [n, ranks] the largest logits of each row.
    """

    picks: np.ndarray
    reached: np.ndarray
    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, answer: np.ndarray, choice: Choice, rows: int) -> Self:
        """Of an answer that may have more rows, which stand for none."""
        drafted, ranks = choice.doublings >= 0, choice.ranks
        room = len(answer) // (1 + drafted + 2 * ranks)
        picks, reached, ids, values = np.split(answer, np.cumsum((room, room * drafted, room * ranks)))
        walked = reached[:rows] != 0 if drafted else np.ones(rows, dtype=bool)
        shape = room, ranks
        return cls(picks[:rows], walked, ids.reshape(shape)[:rows], values.view(np.float64).reshape(shape)[:rows])


def rows_together(vocab_size: int) -> int:
    """Rows that are truncated and drawn at a time: that takes several times the memory of their logits."""
    return max(_FEW, _NUMBERS // vocab_size)


class BatchedSampling:
    """How the rows of some texts choose their tokens; rows with the same processors are taken together.

    Args:
        texts: The processors of each text.
    """

    def __init__(self, texts: Sequence[BatchedProcessors]) -> None:
        alike: dict[tuple[bool, tuple[type[LogitsProcessor], ...]], list[int]] = {}
        for number, text in enumerate(texts):
            alike.setdefault((text.greedy, text.kinds), []).append(number)
        self._groups = [
            (Choice(greedy, kinds, _widths(kinds, values)), np.array(numbers), values)
            for (greedy, kinds), numbers in alike.items()
            for values in [np.array([texts[number].values for number in numbers])]
        ]

    @property
    def alone(self) -> Choice | None:
        """How all rows choose, where all texts have processors of the same kinds."""
        return self._groups[0][0] if len(self._groups) == 1 else None

    def settings(self, owners: np.ndarray) -> np.ndarray:
        """[kinds, n] float64 of the rows of these texts, where `alone`."""
        (_, _, values), *_ = self._groups
        return np.ascontiguousarray(values[owners].T)

    def choose(
        self, logits: torch.Tensor, owners: np.ndarray, keys: np.ndarray, nodes: np.ndarray, like: Choice
    ) -> torch.Tensor:
        """What the rows choose; all that they need comes by one copy, and nothing waits for the device.

        Args:
            logits: [n, V], the model's own.
            owners: [n] ascending, the text of each row.
            keys: [n] of its noise, see `noise.keys`.
            nodes: [2, n] or [2, 0], see `Choice.answer`.
            like: What is wanted beside tokens.

        Returns:
            `Choice.answer`.
        """
        logits, parts = logits.float(), [nodes.reshape(-1), keys]
        for _, numbers, values in self._groups:
            place = np.full(int(owners[-1]) + 1, -1)
            place[numbers] = np.arange(len(numbers))
            own = np.flatnonzero(place[owners] >= 0)
            parts += [own, np.ascontiguousarray(values[place[owners[own]]].T).view(np.int64).reshape(-1)]
        given = torch.from_numpy(np.concatenate(parts)).to(logits.device, non_blocking=True)
        trees, noise, *rest = given.split([len(part) for part in parts])
        picks = torch.zeros_like(noise)
        for number, (choice, _, _) in enumerate(self._groups):
            rows, settings = rest[2 * number], rest[2 * number + 1].view(torch.float64)
            settings = settings.view(len(choice.kinds), -1) if choice.kinds else settings.new_empty(0, len(rows))
            if self.alone is not None:
                picks = choice.picks(logits, noise, settings)
            else:
                picks[rows] = choice.picks(logits[rows], noise[rows], settings)
        return like.answer(logits, picks, trees.view(nodes.shape))


@lru_cache(maxsize=64)
def batched_sampling(texts: tuple[BatchedProcessors, ...]) -> BatchedSampling:
    """How the rows of these texts choose their tokens, made once for all passes over such texts."""
    return BatchedSampling(texts)


def _widths(kinds: tuple[type[LogitsProcessor], ...], values: np.ndarray) -> tuple[int, ...]:
    """Powers of two that bound the settings which say how many tokens are left."""
    return tuple(
        1 << (int(values[:, each].max()) - 1).bit_length() if kind is TopK else 0 for each, kind in enumerate(kinds)
    )


def _through(kind: type[LogitsProcessor], logits: torch.Tensor, values: torch.Tensor, most: int | None) -> torch.Tensor:
    """One processor with settings [n, 1] float64 of the rows' own.

    Args:
        kind: Of the processor.
        logits: [n, V].
        values: Its settings.
        most: What top-k leaves of each row at most, equals at the border left aside; None where it is not applied.
    """
    if kind is Temperature:
        return logits / values.float()
    if kind is TopK:
        assert most is not None
        best = logits.topk(min(most, logits.shape[1]), dim=-1).values
        return logits.masked_fill(logits < best.gather(1, values.long() - 1), -torch.inf)
    if kind is TopP:
        return keep_prefix(logits, values, most)
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < values.float() * probs.amax(dim=-1, keepdim=True), -torch.inf)
