"""JLCM: weights as numbers of a few learned values, both of which are learned together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.torch.weights import Dense

from .base import Size
from .each_linear import EachLinear, Made

_LLOYD = 25
_NEAR = 0.1
"""Added to a distance, in mean steps between neighbouring values, before what is nearer counts more."""
_PATIENCE = 60
"""Steps without a new best after which learning ends."""


@register(
    "jlcm",
    paper="Network Memory Footprint Compression Through Jointly Learnable Codebooks and Mappings (2023)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class JLCM(EachLinear):
    """Keeps every weight as one of 2^bits values that rows of a group share.

    Values and choices learn together. The best state counts. No code is public: `steps`, `lr` and `choice_lr` are this
    package's. Rows are not re-ordered: which group a row is in is kept, of log2(groups) bits. While it learns, a matrix
    takes about 12 * 2^bits bytes per weight. The copy holds the weights in floating point, and nothing becomes faster.

    Attributes:
        bits: Bits of a weight's choice.
        groups: Of a matrix's rows, distinguished by their largest and their mean magnitude. Values and choices begin as
            k-means has them and learn what comes out of the layer on the calibration text: values by the gradients of
            all weights that chose them, choices by scores, of which those of near values move first.
        steps: Training steps, this package's choice as no code is public.
        lr: Learning rate of values, in steps between them.
        choice_lr: Learning rate of the scores of choices.
        proximal: False for the plain gradient, which prefers far ones.
    """

    bits: int = 3
    groups: int = 4
    steps: int = 200
    lr: float = 0.02
    choice_lr: float = 0.05
    proximal: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 5 or self.groups < 1 or self.steps < 0 or not min(self.lr, self.choice_lr) > 0:
            raise SettingsError(
                "jlcm needs 1 to 5 bits (learning keeps a score per weight and value; int8 has more bits), at least "
                "one group, steps of 0 or more and rates above 0"
            )

    @property
    def reads(self) -> bool:
        return True

    @property
    def whole_numbers(self) -> bool:
        return False

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        assert gram is not None
        outputs, inputs = whole.shape
        group = grouped(whole.weight, min(self.groups, outputs))
        found = self.learned(whole.weight, gram, Coded.begun(whole.weight, group, self.bits))
        count = len(found.values)
        bits = self.bits * outputs * inputs + 32 * count * 2**self.bits + math.ceil(math.log2(count)) * outputs
        return Made(Dense(found.weight, whole.bias), Size(bits / 8, outputs * inputs))

    def learned(self, weight: torch.Tensor, gram: torch.Tensor, begun: Coded) -> Coded:
        """What `begun` becomes by learning, or itself where that brings nothing.

        Args:
            gram: [in, in], see `EachLinear`.
        """
        gram = gram.to(weight.dtype)
        gram = gram / (weight @ gram * weight).sum().clamp(min=1e-30) * weight.numel()
        values = begun.values.clone()
        step = (values[:, -1] - values[:, 0]).clamp(min=1e-12) / max(1, values.shape[1] - 1)
        scores = -(values[begun.group][:, None] - begun.weight[..., None]).abs() / step[begun.group][:, None, None]
        best, least, since = begun, math.inf, 0
        moments = torch.zeros_like(values), torch.zeros_like(values)
        for turn in range(self.steps + 1):
            now = Coded(values.clone(), begun.group, scores.argmax(dim=-1)) if turn else begun
            missing = now.weight - weight
            slope = missing @ gram
            loss = float((slope * missing).sum())
            best, least, since = (now, loss, 0) if loss < least else (best, least, since + 1)
            if turn == self.steps or since > _PATIENCE:
                break
            values = values - self.lr * step[:, None] * _adam(now.gathered(slope), moments, turn + 1)
            far = (now.values[now.group][:, None] - now.weight[..., None]) / step[now.group][:, None, None]
            moves = far.sign() / (far.abs() + _NEAR) if self.proximal else far
            slope = slope / slope.square().mean().sqrt().clamp(min=1e-30)
            scores = scores - self.choice_lr * slope[..., None] * moves
        return best


class Coded(NamedTuple):
    """A matrix as choices among values.

    Attributes:
        values: [groups, 2^bits], ascending to begin with.
        group: [out] of each row.
        choice: [out, in] int64, which of its group's values each weight is.
    """

    values: torch.Tensor
    group: torch.Tensor
    choice: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] the weights that these choices stand for."""
        return self.values[self.group].gather(1, self.choice)

    def gathered(self, slope: torch.Tensor) -> torch.Tensor:
        """[groups, 2^bits] sums of what [out, in] says of the weights that chose each value."""
        count = self.values.shape[1]
        place = (self.group[:, None] * count + self.choice).flatten()
        return slope.new_zeros(self.values.numel()).index_add_(0, place, slope.flatten()).view_as(self.values)

    @classmethod
    def begun(cls, weight: torch.Tensor, group: torch.Tensor, bits: int) -> Coded:
        """k-means of every group's weights, from their quantiles on."""
        values = []
        choice = torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
        for number in range(int(group.max()) + 1):
            rows = weight[group == number]
            values.append(_means(rows.flatten(), 2**bits))
            choice[group == number] = _nearest(rows, values[-1])
        return cls(torch.stack(values), group, choice)


def grouped(weight: torch.Tensor, count: int) -> torch.Tensor:
    """[out] int64, which of at most `count` groups each row of [out, in] is in, none of them empty."""
    traits = torch.stack((weight.abs().amax(dim=1), weight.square().mean(dim=1).sqrt()), dim=1)
    traits = traits / traits.mean(dim=0).clamp(min=1e-30)
    order = traits.sum(dim=1).argsort()
    centres = traits[order[torch.linspace(0, len(order) - 1, count, dtype=torch.float32, device="cpu").long()]]
    for _ in range(_LLOYD):
        place = torch.cdist(traits, centres).argmin(dim=1)
        centres = torch.stack(
            [traits[place == each].mean(dim=0) if (place == each).any() else centres[each] for each in range(count)]
        )
    return torch.unique(place, return_inverse=True)[1]


def _means(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """[count] ascending, what k-means makes of numbers [n], from their quantiles on."""
    order = numbers.sort().values
    places = ((torch.arange(count, device=numbers.device) + 0.5) / count * len(order)).long()
    values = order[places]
    for _ in range(_LLOYD):
        place = _nearest(numbers, values)
        sums, counts = torch.zeros_like(values), torch.zeros_like(values)
        sums.index_add_(0, place, numbers)
        counts.index_add_(0, place, torch.ones_like(numbers))
        values = torch.where(counts > 0, sums / counts.clamp(min=1), values).sort().values
    return values


def _nearest(numbers: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of ascending values, the nearest one to each number."""
    return torch.bucketize(numbers, (values[1:] + values[:-1]) / 2)


def _adam(slope: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor], turn: int) -> torch.Tensor:
    """The direction of a step of Adam, whose moments are changed in place; turn: from 1 on."""
    first, second = moments
    first.mul_(0.9).add_(slope, alpha=0.1)
    second.mul_(0.999).addcmul_(slope, slope, value=0.001)
    return first / (1 - 0.9**turn) / ((second / (1 - 0.999**turn)).sqrt() + 1e-12)
