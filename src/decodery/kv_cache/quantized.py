"""Quantized keys and values: integers of a few bits in the place of all but the newest tokens."""

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


@register(
    "quantized",
    paper="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (2024)",
    guarantee="lossy: what is stored is rounded; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class Quantized(CachePolicy):
    """Stores the keys and values of all tokens but the newest as integers of 8 or 4 bits.

    Keys have a range for each channel of a group, values one for each token; both ends of it are met exactly. Prompts
    are read in full precision. A row reads a group in integers or as it was by its position alone, so that blocks of
    drafts read what single steps read. Class A, with a store of its own. Memory: bits / 8 bytes a number, and two
    float32 for a channel of a group of keys and for a token of values.

    Attributes:
        bits: Of one number.
        group: Tokens that are stored together, when all of them have left the newest `residual`.
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
        """How many of the first tokens a row at `position` reads in integers."""
        return max(position + 1 - self.residual, 0) // self.group * self.group


@dataclass(frozen=True, eq=False)
class Codes:
    """Numbers [kv_heads, tokens, head_dim] as whole ones: low + step * code, two of 4 bits in a byte."""

    codes: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor
    bits: int

    @classmethod
    def of(cls, numbers: torch.Tensor, dim: int, bits: int) -> Codes:
        """Ranges are taken over `dim`: 1, the tokens, or 2, the channels."""
        low, high = numbers.amin(dim=dim, keepdim=True).float(), numbers.amax(dim=dim, keepdim=True).float()
        step = (high - low) / (2**bits - 1)
        divisor = torch.where(step > 0, step, torch.ones_like(step))
        codes = ((numbers.float() - low) / divisor).round().clamp(0, 2**bits - 1).to(torch.uint8)
        if bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return cls(codes, low, step, bits)

    def numbers(self) -> torch.Tensor:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        return codes.float() * self.step + self.low

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes


class Storing(State):
    """State of the policy: quantized keys and values.

    Args:
        groups: By layer, keys and values of the first `stored` tokens.
    """

    def __init__(self, method: Quantized, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method = method
        self.groups: dict[int, list[tuple[Codes, Codes]]] = {}
        self.stored = 0

    @property
    def merges(self) -> bool:  # type: ignore[override]
        # Rows of a block may be the first to read something in integers.
        return True

    @property
    def bytes(self) -> int:
        """Of what is held beside the cache."""
        return sum(part.bytes for groups in self.groups.values() for group in groups for part in group)

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
        stored = self._numbers(self.groups.get(attention.layer, []))
        for row in np.flatnonzero(ends):
            slots = np.flatnonzero(seen[row] & (places < ends[row]))
            parts = [*stored, *self._numbers(self._coded(attention.keys, attention.values, slots))]
            keys, values = (torch.cat([pair[which] for pair in parts], dim=1).double() for which in (0, 1))
            heads, dim = attention.queries.shape[1:]
            queries = attention.queries[row].reshape(len(keys), -1, dim).double()
            scores = torch.einsum("kgd,kmd->kgm", queries, keys)
            older = torch.einsum("kgm,kmd->kgd", scores.softmax(dim=-1), values).reshape(heads, dim)
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
            self.groups.setdefault(layer, []).extend(self._coded(*cache.view(layer), slots))
            cache.evict(layer, slots.tolist())
        self.stored = end
        if first:
            cache.shrink(SPARE)

    def cut(self, cache: KVCache) -> None:
        if cache.next_position < self.stored:
            raise ValueError(f"the first {self.stored} tokens are stored as integers and cannot be cut")

    def _ends(self, attention: Attention) -> np.ndarray:
        """[n] how many of the first tokens each row reads in integers."""
        positions = attention.segment.positions.tolist()
        return np.array([self.method.sealed(at) if at >= self.prompt else 0 for at in positions])

    def _coded(self, keys: torch.Tensor, values: torch.Tensor, slots: np.ndarray) -> list[tuple[Codes, Codes]]:
        """Groups of these slots, in the order of positions and whole groups of them."""
        bits, size, index = self.method.bits, self.method.group, torch.from_numpy(slots).to(keys.device)
        return [
            (Codes.of(keys[:, part], 1, bits), Codes.of(values[:, part], 2, bits))
            for part in (index.split(size) if len(index) else ())
        ]

    def _numbers(self, groups: Sequence[tuple[Codes, Codes]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(keys.numbers(), values.numbers()) for keys, values in groups]


def _places(attention: Attention) -> np.ndarray:
    """[slots] positions."""
    cache = attention.segment.cache
    assert cache is not None
    return cache.positions[attention.layer, : attention.seen.shape[-1]]
