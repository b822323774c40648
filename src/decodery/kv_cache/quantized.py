"""Quantized keys and values: all but the newest tokens are stored as integers of a few bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import pad

from decodery.core.errors import SettingsError
from decodery.core.native.kernels import address
from decodery.core.native.structs import SealedGroupsStruct
from decodery.core.registry import register
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kernel_policy import KernelPolicy, Sealed
from decodery.models.cache.page_pool import SLOTS
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State

from .after_prompt import SPARE

BLOCK = 32
"""Groups per block of memory; adding a group copies at most one block."""
_MOST_TOKENS = 256
"""Of a group that kernels read: `key_chunk` in csrc/state.h."""


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
        return Storing(self, model.config, prompt)

    def group_bytes(self, dim: int) -> int:
        """Bytes of one head's integers for a group, with their ranges."""
        keys, values = (-(-count * self.bits // 8) + 2 * torch.float32.itemsize for count in (self.group, dim))
        return dim * keys + self.group * values

    def sealed(self, position: int) -> int:
        """Number of first tokens that a row at `position` reads in integers."""
        return max(position + 1 - self.residual, 0) // self.group * self.group


@dataclass(frozen=True, eq=False)
class Codes:
    """Rows [kv_heads, groups, rows, count] as low + step * code, as csrc/abi.h lays them out.

    Attributes:
        codes: [kv_heads, groups, rows, bytes] uint8; of 4 bits the first half of a row in the low halves of its bytes.
        low, step: [kv_heads, groups, rows, 1] float32.
        bits: 8 or 4.
        count: Codes of a row.
    """

    codes: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor
    bits: int
    count: int

    @classmethod
    def of(cls, rows: torch.Tensor, bits: int) -> Codes:
        """Quantize rows [kv_heads, groups, rows, count], each with a range of its own."""
        numbers = rows.float().contiguous()
        low, high = numbers.amin(dim=-1, keepdim=True), numbers.amax(dim=-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        divisor = torch.where(step > 0, step, torch.ones_like(step))
        codes = ((numbers - low) / divisor).round().clamp(0, 2**bits - 1).to(torch.uint8)
        count = codes.shape[-1]
        if bits == 4:
            half = (count + 1) // 2
            codes = codes[..., :half] | pad(codes[..., half:], (0, count % 2)) << 4
        return cls(codes, low, step, bits, count)

    def whole(self) -> torch.Tensor:
        """The codes without their ranges, as float64."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)[..., : self.count]
        return codes.double()

    def numbers(self) -> torch.Tensor:
        return (self.whole() * self.step + self.low).float()

    def joined(self, other: Codes) -> Codes:
        """These groups, then the other's."""
        codes = torch.cat((self.codes, other.codes), dim=1)
        low, step = torch.cat((self.low, other.low), dim=1), torch.cat((self.step, other.step), dim=1)
        return Codes(codes, low, step, self.bits, self.count)

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes


@dataclass(frozen=True, eq=False)
class Block:
    """Keys and values of up to `BLOCK` groups; attention over them decodes neither.

    Attributes:
        keys: A row per channel of a group.
        values: A row per token of a group.
    """

    keys: Codes
    values: Codes

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, group: int, bits: int) -> Block:
        """Quantize keys and values [kv_heads, tokens, head_dim] of complete groups."""
        return cls(Codes.of(keys.unflatten(1, (-1, group)).mT, bits), Codes.of(values.unflatten(1, (-1, group)), bits))

    @property
    def groups(self) -> int:
        return self.keys.codes.shape[1]

    def joined(self, other: Block) -> Block:
        """These groups, then the other's."""
        return Block(self.keys.joined(other.keys), self.values.joined(other.values))

    def describe(self, struct: SealedGroupsStruct) -> None:
        """Write where kernels find it."""
        struct.groups = self.groups
        for kind, part in enumerate((self.keys, self.values)):
            rows = part.codes.shape[:3]
            struct.codes[kind] = address(part.codes, torch.uint8, *rows, None)
            struct.low[kind], struct.step[kind] = (
                address(each, torch.float32, *rows, 1) for each in (part.low, part.step)
            )

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """[kv_heads, heads, tokens] products of keys and queries [kv_heads, heads of each, head_dim]."""
        apart = queries[:, None]
        found = (apart * self.keys.step.mT) @ self.keys.whole() + apart.double() @ self.keys.low.double()
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
        self.method, self.untouched = method, prompt
        self.groups: dict[int, list[Block]] = {}
        self.stored = 0
        self._structs: ctypes.Array[SealedGroupsStruct] | None = None

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

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        sealed = self.method.sealed(self.stored + slots - 1)
        tokens = max(sealed - self.stored, 0) if self.stored + slots >= self.prompt else 0
        layers, heads = len(self.full_layers), self.config.num_kv_heads
        if not tokens or not layers:
            return 0
        codes = heads * (tokens // self.method.group) * self.method.group_bytes(self.config.head_dim)
        # Whole pages of a layer go once its codes are there; those of layers with a window are not the policy's.
        pages = heads * (tokens // SLOTS) * cache.pages.pool.page_bytes
        return layers * max(codes - pages, 0) + codes

    def fork(self) -> Storing:
        clone = Storing(self.method, self.config, self.prompt)
        clone.groups, clone.stored = {layer: list(groups) for layer, groups in self.groups.items()}, self.stored
        return clone

    def wanted(self, segment: Segment) -> bool:
        return bool(self._ends(segment).any())

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        cache, method = segment.cache, self.method
        assert cache is not None
        if method.group > _MOST_TOKENS or cache.prefix:
            return None
        if self._structs is None:
            self._structs = self._described()
        sealed = Sealed(self._ends(segment), self._structs, self.stored, method.group, method.bits, BLOCK)
        return KernelPolicy(sealed=sealed)

    def select(self, attention: Attention) -> np.ndarray | None:
        ends = self._ends(attention.segment)
        if not ends.any():
            return None
        return _places(attention) >= ends[:, None]

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.context is not None and attention.mass is not None
        ends = self._ends(attention.segment)
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
        self.stored, self._structs = end, None
        if first:
            cache.shrink(SPARE)

    def cut(self, cache: KVCache) -> None:
        if cache.next_position < self.stored:
            raise ValueError(f"the first {self.stored} tokens are stored as integers and cannot be cut")

    def _ends(self, segment: Segment) -> np.ndarray:
        """[n] int32, number of first tokens that each row reads in integers."""
        sealed = [self.method.sealed(at) if at >= self.prompt else 0 for at in segment.positions.tolist()]
        return np.maximum(np.array(sealed, dtype=np.int32), np.int32(self.stored))

    def _described(self) -> ctypes.Array[SealedGroupsStruct]:
        """What kernels read of all blocks: [layers, blocks of a layer]."""
        blocks = max((len(each) for each in self.groups.values()), default=0)
        found = (SealedGroupsStruct * (self.config.num_layers * blocks))()
        for layer, groups in self.groups.items():
            for place, block in enumerate(groups):
                block.describe(found[layer * blocks + place])
        return found

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
