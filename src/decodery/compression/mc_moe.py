"""MC-MoE: one, two or three bits for each expert of a mixture, and rows that do without an unlikely expert."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.models.loaders.store import Progress
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.packed import BLOCK
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer

from .base import LINEARS, Change, ModelCompression, Part, Size, Texts, sizes
from .each_linear import dense, joined, lost, with_linears
from .int4 import rounded
from .stream import Stream, floats

BITS = (1, 2, 3)
_ATTENTION_BITS = 4


@register(
    "mc-moe",
    paper="Mixture Compressor for Mixture-of-Experts LLMs Gains More (2024)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class MCMoE(ModelCompression):
    """Gives each expert of a mixture 1, 2 or 3 bits by its importance, and skips unlikely experts.

    No rows are protected from that: the paper protects rows by what a whole chunk attends to, and a row's logits would
    hang on what shares its pass. Weights are rounded without GPTQ. Reads a text.

    Attributes:
        bits: Of an expert's weight, on average at most, in blocks of 32, see int4 (1 bit: a sign, and a magnitude per
            block); attention has 4, routers stay. 0 leaves all weights as they are. An expert's price at b bits is the
            product of how often it is taken, how much it then weighs and how far the layer's output moves when it alone
            has b bits, to the powers alpha, beta and gamma; the sum of prices is the lowest there is, with one expert
            of 3 bits and one of 2 at least where the bits allow it.
        pruned: Share of the layers in which a row does without an expert whose weight, as a share of its most likely
            one's, is below the median on the calibration text: the layers whose output that moves least.
        alpha, beta, gamma: Exponents of an expert's frequency, weight and error in its price.
    """

    bits: float = 2.5
    pruned: float = 0.0
    alpha: float = 1.0
    beta: float = 1.5
    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not (self.bits == 0 or 1 <= self.bits <= 3) or not 0 <= self.pruned <= 1:
            raise SettingsError("mc-moe gives experts 1 to 3 bits, or 0 for as they are, and prunes a share of layers")

    @property
    def reads(self) -> bool:
        return True

    @property
    def mixes(self) -> bool:
        return True

    @torch.no_grad()
    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        config = model.config
        plain = config.experts and not (config.summed_experts or any(config.dense_layers) or config.shared_inner)
        if not plain or config.experts_per_token < 2 or config.experts_floor:
            raise UnsupportedModel("mc-moe changes mixtures of which each row takes two experts or more, as Mixtral's")
        stream = Stream(model, list(texts))
        layers, parts, blocks = list[Layer](), list[Part](), list[_Block]()
        moved = list[float]()
        for index, layer in enumerate(model.weights.layers):
            whole = floats(layer, stream.dtype)
            block = _Block(whole, model, stream.entering(index, whole))
            blocks.append(block)
            moved.append(block.moved(block.floor))
            seen, made = whole, layer
            if self.bits:
                bits = self._bits(block)
                made, found = block.made(bits)
                parts += [replace(part, name=f"layers.{index}.{part.name}") for part in found]
                linears = {name: getattr(made, name) for name in LINEARS}
                seen = with_linears(
                    whole, {name: Dense(dense(each).to(stream.dtype), each.bias) for name, each in linears.items()}
                )
            layers.append(made)
            stream.rows = stream.through(index, seen)
            progress("rounding experts", index + 1, config.num_layers)
        change = joined(model, layers, parts, whole_numbers=True) if self.bits else Change(model, ())
        calm = np.argsort(moved, kind="stable")[: round(self.pruned * len(moved))].tolist()
        if not calm:
            return change
        floors = tuple(block.floor if index in calm else 0.0 for index, block in enumerate(blocks))
        shape = replace(change.model.config, experts_floor=floors)
        known = {part.name: part for part in change.parts}
        whole_sizes = sizes(change.model)
        for index in calm:
            for name in (f"layers.{index}.gate_up", f"layers.{index}.down"):
                part = known.get(name, Part(name, moved[index], whole_sizes[name]))
                size = replace(part.size, macs=part.size.macs * blocks[index].kept)
                known[name] = replace(part, error=max(part.error, moved[index]), size=size)
        return Change(Transformer(shape, change.model.weights), tuple(known.values()))

    def _bits(self, block: _Block) -> list[int]:
        taken = (block.often / block.often.sum()) ** self.alpha * (block.heavy / block.heavy.sum()) ** self.beta
        prices = taken[:, None] * block.shifts() ** self.gamma
        # 2.3 bits of 10 experts are 23 bits, though their product is a little less in floating point.
        return allotted(prices.numpy(), math.floor(self.bits * len(prices) + 1e-9))


def allotted(prices: np.ndarray, budget: int) -> list[int]:
    """Bits of each of n experts, at most `budget` together, at the lowest sum of prices [n, 3].

    One gets 3 and one 2 at least, where the budget allows it.

    Raises:
        SettingsError: For less than a bit each.
    """
    count = len(prices)
    if budget < count:
        raise SettingsError(f"{budget} bits are too few for {count} experts, which need one each at least")
    # By bits spent, and whether one of 2 and one of 3 was among them: the lowest sum so far, and who got what.
    states: dict[tuple[int, bool, bool], tuple[float, tuple[int, ...]]] = {(0, False, False): (0.0, ())}
    for row in prices:
        following: dict[tuple[int, bool, bool], tuple[float, tuple[int, ...]]] = {}
        for (spent, two, three), (total, given) in states.items():
            for bits, price in zip(BITS, row, strict=True):
                state = spent + bits, two or bits == 2, three or bits == 3
                found = total + float(price), (*given, bits)
                if state[0] <= budget and (state not in following or found < following[state]):
                    following[state] = found
        states = following
    both = [found for (_, two, three), found in states.items() if two and three]
    return list(min(both or states.values())[1])


class _Expert(NamedTuple):
    """gate_up: [2 inner, hidden]; down: [hidden, inner]."""

    gate_up: torch.Tensor
    down: torch.Tensor


class _Block:
    """The mixture of one layer and the rows that enter it.

    often, heavy: [experts] float64, how often each is taken, and how much it weighs then. floor: the median share that
    a row's second expert has of its first one's weight; kept: how many of the experts that rows take are not below it.
    """

    def __init__(self, layer: Layer, model: Transformer, rows: torch.Tensor) -> None:
        config = model.config
        assert layer.router is not None
        self._layer, self._rows, self._activation = layer, rows, model._activation
        self._count = config.experts
        said = (rows.double() @ layer.router.double().T).softmax(dim=-1)
        self._weights, self._chosen = said.topk(config.experts_per_token, dim=-1)
        self._normed, self._scale = config.normed_experts, config.experts_scale
        self.floor = float((self._weights[:, 1] / self._weights[:, 0]).median())
        self.kept = float((self._weights >= self.floor * self._weights[:, :1]).double().mean())
        ones = torch.ones_like(self._weights).flatten()
        nothing, chosen = ones.new_zeros(self._count), self._chosen.flatten()
        self.often = nothing.index_add(0, chosen, ones)
        # One that is never taken costs nothing, whatever it gets.
        self.heavy = nothing.index_add(0, chosen, self._shares(self._weights).flatten()) / self.often.clamp(min=1)

    def _shares(self, weights: torch.Tensor) -> torch.Tensor:
        return self._scale * (weights / weights.sum(dim=-1, keepdim=True) if self._normed else weights)

    def _expert(self, number: int) -> _Expert:
        gate_up, down = self._layer.gate_up, self._layer.down
        assert isinstance(gate_up, Dense) and isinstance(down, Dense)
        return _Expert(gate_up.weight.chunk(self._count)[number], down.weight.chunk(self._count)[number])

    def _says(self, expert: _Expert, rows: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ expert.gate_up.T).chunk(2, dim=-1)
        return (self._activation(gate) * up) @ expert.down.T

    def _adds(self, weights: torch.Tensor) -> torch.Tensor:
        """[n, hidden] float64, what experts of such weights [n, k] add to the rows."""
        total = torch.zeros(len(self._rows), self._rows.shape[1], dtype=torch.float64, device="cpu")
        for number in range(self._count):
            row, place = torch.where(self._chosen == number)
            said = self._says(self._expert(number), self._rows[row]).double()
            total.index_add_(0, row, said * weights[row, place, None])
        return total

    def moved(self, floor: float) -> float:
        """Share of the output's energy by which it moves where rows do without experts below a floor."""
        whole = self._adds(self._shares(self._weights))
        kept = self._weights.masked_fill(self._weights < floor * self._weights[:, :1], 0.0)
        return float((self._adds(self._shares(kept)) - whole).square().sum() / whole.square().sum())

    def shifts(self) -> torch.Tensor:
        """[experts, 3] float64, how far the output moves when one expert alone has so many bits."""
        found = torch.zeros(self._count, len(BITS), dtype=torch.float64, device="cpu")
        shares = self._shares(self._weights)
        for number in range(self._count):
            expert = self._expert(number)
            row, place = torch.where(self._chosen == number)
            for level, bits in enumerate(BITS):
                coarse = _Expert(*(few(each, bits).dense().to(each.dtype) for each in expert))
                change = self._says(coarse, self._rows[row]) - self._says(expert, self._rows[row])
                found[number, level] = (change.double() * shares[row, place, None]).norm()
        return found

    def made(self, bits: list[int]) -> tuple[Layer, list[Part]]:
        """The layer with so many bits for each expert, and its parts; errors are those of the weights."""
        layers: dict[str, Int4Linear] = {}
        parts = []
        for name in ("qkv", "output"):
            whole = getattr(self._layer, name)
            layers[name], size = rounded(whole, _ATTENTION_BITS)
            parts.append(Part(name, lost(whole.weight, layers[name].dense(), None), size))
        taken = self._chosen.shape[1] / self._count
        for name in ("gate_up", "down"):
            whole = getattr(self._layer, name).weight
            each = [few(expert, own) for expert, own in zip(whole.chunk(self._count), bits, strict=True)]
            weight, step, least = (
                torch.cat([getattr(part, key) for part in each]) for key in ("weight", "step", "least")
            )
            layers[name] = Int4Linear(weight, step, least)
            weights = whole.numel() // self._count
            # A block of 1 bit has a magnitude alone, others a step and a least value.
            size = sum(weights * (own + (16 if own == 1 else 32) / BLOCK) / 8 for own in bits)
            error = lost(whole, layers[name].dense(), None)
            parts.append(Part(name, error, Size(size, taken * whole.numel())))
        return with_linears(self._layer, layers), parts


def few(weight: torch.Tensor, bits: int) -> Int4Linear:
    """A matrix [out, in] in blocks of 32 inputs of so many bits.

    1: signs times the mean magnitude of the block.
    """
    if bits > 1:
        return Int4Linear.quantize(weight, bits=bits)
    outputs, inputs = weight.shape
    if inputs % BLOCK:
        raise UnsupportedModel(f"mc-moe needs experts whose inputs come in blocks of {BLOCK}, not {inputs}")
    size = weight.view(outputs, -1, BLOCK).abs().mean(dim=-1).half()
    pairs = (weight > 0).to(torch.uint8).view(outputs, inputs // 2, 2)
    return Int4Linear(pairs[..., 0] | pairs[..., 1] << 4, 2 * size, -size)
