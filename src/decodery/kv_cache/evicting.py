"""Base class of policies that evict tokens at every step, by the attention that the tokens receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch

from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kernel_policy import KernelPolicy
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, State, best, entries

from .after_prompt import SPARE, retain
from .merges import Merges
from .worths import Worths

_SCORE = np.dtype(np.float64).itemsize


@dataclass(frozen=True)
class Scored(CachePolicy):
    """Class D: later rows update the scores of tokens, and the tokens with the lowest scores are evicted.

    The tokens that a row reads depend on the earlier rows of its path. They are computed row by row within a pass. So
    the state after a block of drafts is that of single steps, whichever drafts are accepted, and the text is that of
    plain decoding under the policy.

    Attributes:
        kernels: Whether kernels score and evict after the prompt: a row's attention is added to the scores, or replaces
            them where `newest`, and the slots with the lowest scores go, `protected` ones last.
    """

    kernels: ClassVar[bool] = False

    @property
    def provides(self) -> Provides:
        return Provides()

    @property
    def newest(self) -> bool:
        """Whether the scores of a prompt are computed only from its last row."""
        return False

    def read(self, scores: np.ndarray, paid: np.ndarray) -> np.ndarray:
        """Update the scores after more of the prompt was read.

        By default a score is the attention received from all rows so far, averaged over the heads of a group.

        Args:
            scores: [kv_heads, slots] so far.
            paid: [kv_heads, slots] attention received from the new rows, or from the last one where `newest`; the mean
                over the heads of a group.

        Returns:
            [kv_heads, slots] new scores.
        """
        found: np.ndarray = scores + paid
        return found

    def written(self, scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Update the scores after the row of the last slot.

        Args:
            scores: [kv_heads, slots] so far.
            weights: [kv_heads, group, slots] attention weights of the row.

        Returns:
            [kv_heads, slots] new scores.
        """
        found: np.ndarray = scores + weights.mean(axis=1)
        return found

    def protected(self, count: int) -> tuple[int, int]:
        """How many of the first and of the last of `count` slots are kept before all others."""
        return 0, 0

    def chosen(self, scores: np.ndarray, count: int) -> np.ndarray:
        """[kv_heads, slots] bool, true for the `count` slots to keep; slots are in the order of positions."""
        first, last = self.protected(count)
        worth = scores.copy()
        worth[:, :first] = worth[:, scores.shape[1] - last :] = np.inf
        return best(worth, count)

    def budgets(self, scores: dict[int, np.ndarray], layers: int) -> dict[int, float]:
        """The budget of each layer after the prompt was read.

        Args:
            scores: By layer, scores [kv_heads, prompt] of the prompt's tokens.
            layers: Number of layers.
        """
        return dict.fromkeys(scores, getattr(self, "budget"))  # noqa: B009

    def most(self, length: int) -> int:
        """How many slots of a head stay, at most, after a text of so many tokens."""
        return entries(getattr(self, "budget"), length)  # noqa: B009

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Evicting(self, model.config, prompt, by_kernel=model.capabilities.cache_kernels)


@dataclass(frozen=True, eq=False)
class Held:
    """The tokens that each key-value head of a layer has kept after some row, in the order of positions.

    Attributes:
        slots: [kv_heads, m] slots of the cache.
        scores: [kv_heads, m] their scores.
    """

    slots: np.ndarray
    scores: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What it holds in memory."""
        return self.slots, self.scores

    @property
    def beside(self) -> int:
        """Bytes of keys and values that it holds beside the cache."""
        return 0

    @classmethod
    def content(cls, scores: np.ndarray) -> Held:
        return cls(np.broadcast_to(np.arange(scores.shape[1]), scores.shape), scores)

    def joined(self, slot: int) -> Held:
        """Append a slot."""
        own = np.full((len(self.slots), 1), slot)
        slots = np.concatenate((self.slots, own), axis=1)
        return replace(self, slots=slots, scores=np.pad(self.scores, ((0, 0), (0, 1))))

    def picked(self, chosen: np.ndarray) -> Held:
        """Keep only the slots in [kv_heads, m] bool, the same number for every head."""
        slots, scores = (part[chosen].reshape(len(chosen), -1) for part in (self.slots, self.scores))
        return replace(self, slots=slots, scores=scores)

    def moved(self, content: int, rows: Sequence[int]) -> Held:
        """Renumber the slots after these tentative rows were moved to follow the first `content` slots."""
        places = np.full(max(rows) + 1, -1)
        places[list(rows)] = content + np.arange(len(rows))
        tentative = self.slots >= content
        return replace(
            self, slots=np.where(tentative, places[np.where(tentative, self.slots - content, 0)], self.slots)
        )


class Evicting(State):
    """The kept tokens with their scores, by layer, after the content and after every tentative row.

    Layers that keep all tokens need none after the prompt.

    Attributes:
        settled: Whether the prompt is read.
        kernels: Whether kernels score and evict after the prompt.
    """

    def __init__(self, method: Scored, config: ModelConfig, prompt: int, *, by_kernel: bool) -> None:
        super().__init__(config, prompt)
        self.method, self.kernels = method, by_kernel and method.kernels
        self.settled = False
        self._budgets: dict[int, float] = {}
        self._held: dict[int, Held] = {}
        self._behind: dict[int, tuple[int, list[Held]]] = {}
        self._read: dict[int, np.ndarray] = {}
        self._worths: Worths | None = None

    def fork(self) -> Self:
        clone = super().fork()
        clone._worths = None
        return clone

    def wanted(self, segment: Segment) -> bool:
        return not self.settled or bool(self._held)

    def summed_from(self, segment: Segment) -> int | None:
        """Attention sums are needed only for rows of the prompt; those of later rows are computed in `select`."""
        return None if self.settled else len(segment) - 1 if self.method.newest else 0

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        if not self.settled:
            return KernelPolicy(summed_from=self.summed_from(segment))
        if not self.method.kernels or not self._held or self._behind:
            return None
        worths = self._worths
        if worths is None:
            scores = {layer: held.scores for layer, held in self._held.items()}
            worths = Worths(scores, self.config.num_layers, self._merges(), newest=self.method.newest)
        known = None if self._worths is None else worths.held
        eviction, self._worths = worths.open(segment, *self._counts(segment)), worths
        if known is not worths.held:
            assert segment.cache is not None
            # Nothing holds the arrays before it any more.
            self._held = self._within(worths, segment.cache.lengths)
        return KernelPolicy(eviction=eviction)

    def _merges(self) -> Merges | None:
        """What becomes of evicted tokens, None where they are lost."""
        return None

    def _counts(self, segment: Segment) -> tuple[np.ndarray, int, np.ndarray]:
        """How many slots stay after each row [layers, rows], and which of them first: see `Eviction`."""
        shape, positions = (self.config.num_layers, len(segment)), segment.positions.tolist()
        keeps, last = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        known: dict[float, list[int]] = {}
        for layer in self._held:
            budget = self._budgets[layer]
            if budget not in known:
                known[budget] = [entries(budget, at + 1) for at in positions]
            keeps[layer] = known[budget]
            last[layer] = [self.method.protected(count)[1] for count in known[budget]]
        return keeps, self.method.protected(1)[0], last

    @property
    def bytes(self) -> int:
        """Bytes of the scores, and of what tentative rows hold beside the cache."""
        held = [*self._held.values(), *(each for _, states in self._behind.values() for each in states)]
        arrays = [*self._read.values(), *(part for each in held for part in each.arrays)]
        # Scores may be parts of larger arrays, and one row for all heads.
        owners = {id(each): each for each in (part if part.base is None else part.base for part in arrays)}
        if self._worths is not None:
            owners.pop(id(self._worths.held), None)
        rows = 0 if self._worths is None else self._worths.bytes
        return rows + sum(each.nbytes for each in owners.values()) + sum(each.beside for each in held)

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        wanted = 0
        length = cache.next_position + max(slots - cache.length, 0)
        if not self.settled:
            # Of the prompt, scores before a pass and after it, what its rows pay, and two copies of one layer.
            arrays = 2 * len(self.full_layers) + self.config.num_layers + 2
            wanted = arrays * self.config.num_kv_heads * min(slots, self.prompt) * _SCORE
        most = max((entries(each, length) for each in self._budgets.values()), default=self.method.most(length))
        evicting = len(self._held) if self.settled else len(self.full_layers)
        if evicting:
            wanted = max(wanted, self._after_prompt(cache, evicting, most + rows, rows))
        return max(wanted - self.bytes, 0)

    def _after_prompt(self, cache: KVCache, evicting: int, slots: int, rows: int) -> int:
        """Bytes, at most, where heads of so many layers hold so many slots, tentative rows included."""
        layers, kv_heads = self.config.num_layers, self.config.num_kv_heads
        if self.kernels:
            return Worths.most_bytes(layers, evicting, kv_heads, slots, rows, newest=self.method.newest)
        # By row a number and a score for each slot; one more set while a row is computed.
        return (evicting * (rows + 1) + 1) * kv_heads * (slots - rows + 1) * (_SCORE + np.dtype(np.int64).itemsize)

    def take_sums(self, layer: int, paid: np.ndarray) -> None:
        kv_heads, slots = paid.shape
        known = self._held[layer].scores if layer in self._held else np.zeros((kv_heads, 0))
        paid *= self.config.num_kv_heads / self.config.num_heads
        self._read[layer] = self.method.read(np.pad(known, ((0, 0), (0, slots - known.shape[1]))), paid)

    def select(self, attention: Attention) -> np.ndarray | None:
        layer, segment = attention.layer, attention.segment
        if not self.settled or layer not in self._held:
            return None
        n, retained, slots = len(segment), segment.retained, attention.seen.shape[-1]
        content = slots - retained - n
        seen = attention.seen if attention.seen.ndim == 2 else attention.seen[0]
        states = [*self._behind.get(layer, (content, []))[1][:retained]]
        read = np.zeros((len(attention.keys), n, slots), dtype=bool)
        for row in range(n):
            before = np.flatnonzero(seen[row, content : content + retained + row])
            held = states[before[-1]] if len(before) else self._held[layer]
            held = held.joined(content + retained + row)
            np.put_along_axis(read[:, row], held.slots, True, axis=1)
            states.append(self._after(attention, row, held))
        self._behind[layer] = content, states
        return read

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        if not self.settled:
            if rows:
                self._held.update({layer: Held.content(scores) for layer, scores in self._read.items()})
            self._read = {}
            if cache.next_position >= self.prompt:
                self._settle(cache)
            return
        if self._worths is not None and self._worths.added is not None:
            if rows:
                self._worths.keep(cache, rows)
                self._held = self._alike(self._worths, cache.lengths)
            self._worths.forget()
            return
        self._worths = None
        for layer, (content, states) in self._behind.items():
            if rows:
                self._keep(cache, layer, states[rows[-1]].moved(content, rows))
        self._behind = {}

    def cut(self, cache: KVCache) -> None:
        self._read, self._behind, self._worths = {}, {}, None
        for layer, held in self._held.items():
            content = Held.content(held.scores[:, : int(cache.lengths[layer])])
            self._held[layer] = replace(held, slots=content.slots, scores=content.scores)

    def _settle(self, cache: KVCache) -> None:
        self.settled = True
        scores = {layer: held.scores for layer, held in self._held.items()}
        self._budgets = self.method.budgets(scores, self.config.num_layers)
        for layer, held in self._held.items():
            self._keep(cache, layer, self._left(held, layer, cache.next_position, *cache.view(layer)))
        self._held = {layer: held for layer, held in self._held.items() if self._budgets[layer] != 1}
        cache.shrink(SPARE)

    def _left(self, held: Held, layer: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> Held:
        """Evict from `held` after a text of `length` tokens; `keys` and `values` are [kv_heads, m, head_dim]."""
        count = entries(self._budgets[layer], length)
        if count >= held.scores.shape[1]:
            return held
        return held.picked(self.method.chosen(held.scores, count))

    def _keep(self, cache: KVCache, layer: int, held: Held) -> None:
        """Keep only these slots in a layer of the cache."""
        length = int(cache.lengths[layer])
        if held.slots.shape[1] < length:
            chosen = np.zeros((len(held.slots), length), dtype=bool)
            np.put_along_axis(chosen, held.slots, True, axis=1)
            retain(cache, layer, chosen)
        self._held[layer] = Held.content(held.scores)

    def _alike(self, worths: Worths, lengths: np.ndarray) -> dict[int, Held]:
        """What layers hold after kernels."""
        return self._within(worths, lengths)

    def _within(self, worths: Worths, lengths: np.ndarray) -> dict[int, Held]:
        """What layers hold, by scores of all of them; numbers of slots are shared by layers that hold as many."""
        scores = worths.scores(lengths)
        shapes = {each.shape for each in scores.values()}
        slots = {shape: np.broadcast_to(np.arange(shape[1]), shape) for shape in shapes}
        return {
            layer: replace(self._held[layer], slots=slots[each.shape], scores=each) for layer, each in scores.items()
        }

    def _after(self, attention: Attention, row: int, held: Held) -> Held:
        """The kept tokens after a row that has read `held`, whose own slot is the last."""
        keys, values = (gathered(part, held.slots) for part in (attention.keys, attention.values))
        scores = self.method.written(held.scores, paid(attention.queries[row], keys))
        length = int(attention.segment.positions[row]) + 1
        return self._left(replace(held, scores=scores), attention.layer, length, keys, values)


def gathered(part: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """Each head's own slots [kv_heads, m] of [kv_heads, slots, head_dim]."""
    if slots.shape[1] == part.shape[1] and (slots == np.arange(slots.shape[1])).all():
        return part
    index = torch.from_numpy(slots).to(part.device)[..., None].expand(-1, -1, part.shape[-1])
    return part.gather(1, index)


def paid(queries: torch.Tensor, keys: torch.Tensor) -> np.ndarray:
    """[kv_heads, group, m] attention of one row's scaled queries [heads, head_dim] over keys."""
    grouped = queries.reshape(len(keys), -1, keys.shape[-1]).double()
    weights: np.ndarray = torch.einsum("kgd,kmd->kgm", grouped, keys.double()).softmax(dim=-1).cpu().numpy()
    return weights
