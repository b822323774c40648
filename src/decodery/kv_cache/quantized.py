"""Quantized keys and values: all but the newest tokens are stored as integers of a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State

from .after_prompt import SPARE

BLOCK = 32
"""Groups per block of memory; adding a group copies at most one block."""


@register(
    "quantized",
    paper="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (2024)",
    guarantee="lossy: what is stored is rounded; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class Quantized(CachePolicy):
    """Stores the keys and values of all tokens but the newest as integers of 8 or 4 bits.

    Keys have one range per channel and group, values one per token; minimum and maximum are stored exactly. Prompts are
    read in full precision. Whether a row reads a group in integers or in full precision depends only on the row's
    position, so that drafts read the same values as single steps. Class A, with a separate store. Memory: bits / 8
    bytes per value, and two float32 per channel of a group of keys and per token of values.

    Attributes:
        bits: Bits per value, 8 or 4.
        group: Tokens per group; a group is quantized when none of its tokens is among the newest `residual`.
        residual: Newest tokens that stay in full precision.
    """

    bits: Literal[8, 4] = 8
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group < 1 or self.residual < 1:
            raise SettingsError("quantized needs bits 8 or 4, group >= 1 and residual >= 1")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        if self.bits == 4 and model.config.head_dim % 2:
            raise SettingsError("quantized needs heads of an even size for 4 bits: use bits=8")
        return Storing(self, model.config, prompt)

    def sealed(self, position: int) -> int:
        """Number of first tokens that a row at `position` reads in integers."""
        return max(position + 1 - self.residual, 0) // self.group * self.group


@dataclass(frozen=True, eq=False)
class Codes:
    """Values [kv_heads, groups, group, head_dim] as low + step * code, with two 4-bit codes per byte."""

    codes: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor
    bits: int

    @classmethod
    def of(cls, numbers: torch.Tensor, dim: int, bits: int) -> Codes:
        """Quantize with one range over `dim`: -2, the tokens, or -1, the channels."""
        low, high = numbers.amin(dim=dim, keepdim=True).float(), numbers.amax(dim=dim, keepdim=True).float()
        step = (high - low) / (2**bits - 1)
        divisor = torch.where(step > 0, step, torch.ones_like(step))
        codes = ((numbers.float() - low) / divisor).round().clamp(0, 2**bits - 1).to(torch.uint8)
        if bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return cls(codes, low, step, bits)

    def whole(self) -> torch.Tensor:
        """The codes without their ranges, as float64."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        return codes.double()

    def numbers(self) -> torch.Tensor:
        return (self.whole() * self.step + self.low).float()

    def joined(self, other: Codes) -> Codes:
        """These groups, then the other's."""
        codes = torch.cat((self.codes, other.codes), dim=1)
        low, step = torch.cat((self.low, other.low), dim=1), torch.cat((self.step, other.step), dim=1)
        return Codes(codes, low, step, self.bits)

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes


@dataclass(frozen=True, eq=False)
class Block:
    """Keys and values of up to `BLOCK` groups; attention over them decodes neither."""

    keys: Codes
    values: Codes

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, group: int, bits: int) -> Block:
        """Quantize keys and values [kv_heads, tokens, head_dim] of complete groups."""
        return cls(
            Codes.of(keys.unflatten(1, (-1, group)), -2, bits), Codes.of(values.unflatten(1, (-1, group)), -1, bits)
        )

    @property
    def groups(self) -> int:
        return self.keys.codes.shape[1]

    def joined(self, other: Block) -> Block:
        """These groups, then the other's."""
        return Block(self.keys.joined(other.keys), self.values.joined(other.values))

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """[kv_heads, heads, tokens] products of keys and queries [kv_heads, heads of each, head_dim]."""
        apart = queries[:, None]
        found = (apart * self.keys.step) @ self.keys.whole().mT + (apart * self.keys.low).sum(dim=-1, keepdim=True)
        return found.transpose(1, 2).flatten(2)

    def read(self, weights: torch.Tensor) -> torch.Tensor:
        """[kv_heads, heads, head_dim] values under weights [kv_heads, heads of each, tokens]."""
        low, step = (part.flatten(1)[:, None] for part in (self.values.low, self.values.step))
        return (weights * step) @ self.values.whole().flatten(1, 2) + (weights * low).sum(dim=-1, keepdim=True)


class Storing(State):
    """State of the policy: quantized keys and values.

    Attributes:
        groups: By layer, keys and values of the first `stored` tokens; forks share blocks.
    """

    def __init__(self, method: Quantized, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method = method
        self.groups: dict[int, list[Block]] = {}
        self.stored = 0

    @property
    def merges(self) -> bool:  # type: ignore[override]
        # Later rows of a block may read a group in integers that earlier rows read in full precision.
        return True

    @property
    def bytes(self) -> int:
        """Bytes of the quantized keys and values."""
        return sum(
            part.bytes for blocks in self.groups.values() for each in blocks for part in (each.keys, each.values)
        )

    def fork(self) -> Storing:
        clone = Storing(self.method, self.config, self.prompt)
        clone.groups, clone.stored = {layer: list(groups) for layer, groups in self.groups.items()}, self.stored
        return clone

    def select(self, attention: Attention) -> np.ndarray | None:
        ends = self._ends(attention)
        if not ends.any():
            return None
        return _places(attention) >= ends[:, None]

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.context is not None and attention.mass is not None
        ends = self._ends(attention)
        if not ends.any():
            return attention.context
        context, places = attention.context.clone(), _places(attention)
        seen = attention.seen if attention.seen.ndim == 2 else attention.seen[0]
        for row in np.flatnonzero(ends):
            slots = np.flatnonzero(seen[row] & (places < ends[row]))
            stored = self.groups.get(attention.layer, [])
            blocks = self._extended(stored, attention.keys, attention.values, slots) if len(slots) else stored
            heads, dim = attention.queries.shape[1:]
            queries = attention.queries[row].reshape(self.config.num_kv_heads, -1, dim).double()
            scores = torch.cat([block.scores(queries) for block in blocks], dim=-1)
            weights = scores.softmax(dim=-1).split([block.groups * self.method.group for block in blocks], dim=-1)
            parts = [block.read(own) for block, own in zip(blocks, weights, strict=True)]
            older = torch.stack(parts).sum(dim=0).reshape(heads, dim)
            mass = scores.logsumexp(dim=-1).reshape(heads)
            share = torch.sigmoid(attention.mass[row].double() - mass)[:, None]
            context[row] = (share * context[row].double() + (1 - share) * older).to(context.dtype)
        return context

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        end = self.method.sealed(cache.next_position)
        if not rows or cache.next_position < self.prompt or end <= self.stored:
            return
        first = self.stored == 0
        for layer in self.full_layers:
            slots = np.arange(end - self.stored)
            self.groups[layer] = self._extended(self.groups.get(layer, []), *cache.view(layer), slots)
            cache.evict(layer, slots.tolist())
        self.stored = end
        if first:
            cache.shrink(SPARE)

    def cut(self, cache: KVCache) -> None:
        if cache.next_position < self.stored:
            raise ValueError(f"the first {self.stored} tokens are stored as integers and cannot be cut")

    def _ends(self, attention: Attention) -> np.ndarray:
        """[n] number of first tokens that each row reads in integers."""
        positions = attention.segment.positions.tolist()
        return np.array([self.method.sealed(at) if at >= self.prompt else 0 for at in positions])

    def _extended(
        self, blocks: Sequence[Block], keys: torch.Tensor, values: torch.Tensor, slots: np.ndarray
    ) -> list[Block]:
        """Append complete groups of slots to these blocks, in the order of positions; only the last may be partial."""
        size, bits, found = self.method.group, self.method.bits, list(blocks)
        index = torch.from_numpy(slots).to(keys.device)
        room = (BLOCK - found[-1].groups) * size if found else 0
        if room:
            first, index = index[:room], index[room:]
            found[-1] = found[-1].joined(Block.of(keys[:, first], values[:, first], size, bits))
        parts = index.split(BLOCK * size) if len(index) else ()
        return found + [Block.of(keys[:, part], values[:, part], size, bits) for part in parts]


def _places(attention: Attention) -> np.ndarray:
    """[slots] positions."""
    cache = attention.segment.cache
    assert cache is not None
    return cache.positions[attention.layer, : attention.seen.shape[-1]]
