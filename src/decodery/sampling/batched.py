"""Processors of many texts, applied to all of their rows at once on the device where the logits lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.noise import keyed_argmax

from .logits_processor import LogitsProcessor, Stage
from .min_p import MinP
from .sampler import Sampler
from .temperature import Temperature
from .top_k import TopK
from .top_p import TopP, keep_prefix

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
            (greedy, kinds, np.array(numbers), np.array([texts[number].values for number in numbers]))
            for (greedy, kinds), numbers in alike.items()
        ]

    def choose(self, logits: torch.Tensor, owners: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        """The token after each row, -1 where its largest logit is no finite number.

        All that the rows need comes by one copy, and nothing waits for the device.

        Args:
            logits: [n, V], the model's own.
            owners: [n] ascending, the text of each row.
            keys: [n] of its noise, see `noise.keys`.

        Returns:
            [n] int64 on the device.
        """
        logits, parts, sizes = logits.float(), [keys], [len(keys)]
        for _, kinds, numbers, values in self._groups:
            place = np.full(int(owners[-1]) + 1, -1)
            place[numbers] = np.arange(len(numbers))
            own = np.flatnonzero(place[owners] >= 0)
            settings = values[place[owners[own]]].T if kinds else np.empty((0, len(own)))
            parts += [own, np.ascontiguousarray(settings).view(np.int64).reshape(-1)]
            sizes += [len(own), settings.size]
        host = np.concatenate(parts)
        given, *rest = torch.from_numpy(host).to(logits.device, non_blocking=True).split(sizes)
        chosen = torch.empty(0, dtype=torch.int64, device=logits.device)
        for number, (greedy, kinds, _, values) in enumerate(self._groups):
            rows, settings = rest[2 * number], rest[2 * number + 1].view(torch.float64)
            alone = len(self._groups) == 1
            law, noise = (logits, given) if alone else (logits[rows], given[rows])
            for each, kind in enumerate(kinds):
                column = settings[each * len(rows) : (each + 1) * len(rows), None]
                law = _through(kind, law, column, int(values[:, each].max()))
            picked = law.argmax(dim=-1) if greedy else keyed_argmax(law, noise)
            if alone:
                chosen = picked
                break
            chosen = torch.zeros_like(given) if number == 0 else chosen
            chosen[rows] = picked
        return torch.where(logits.amax(dim=-1).isfinite(), chosen, -1)


def _through(kind: type[LogitsProcessor], logits: torch.Tensor, values: torch.Tensor, largest: int) -> torch.Tensor:
    """One processor with settings [n, 1] float64 of the rows' own; the largest of them is known here."""
    if kind is Temperature:
        return logits / values.float()
    if kind is TopK:
        best = logits.topk(largest, dim=-1).values
        return logits.masked_fill(logits < best.gather(1, values.long() - 1), -torch.inf)
    if kind is TopP:
        return keep_prefix(logits, values)
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < values.float() * probs.amax(dim=-1, keepdim=True), -torch.inf)
