"""What texts have read, kept in the pages of their caches for later ones that begin alike."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np

from decodery.models.cache.cache import KVCache
from decodery.models.cache.own_caches import bare
from decodery.models.cache.page_pool import SLOTS, PagePool
from decodery.models.protocol import Reader


@dataclass(eq=False)
class _Entry:
    """A text that was read. chain: names of its whole pages, each of which stands for all that is before it, too."""

    tokens: np.ndarray
    cache: KVCache
    chain: list[bytes]


class PrefixCache:
    """Keys and values of texts that were read, found by what a new text begins with.

    A text that begins alike forks what is found, so that pages are shared and nothing is computed or copied. Texts are
    found by chains of hashes of their pages, page by page, and then compared token by token; those of another cache
    namespace are never found. What a model reads of a token does not depend on the reader, so a hit changes no text: to
    the bit for models whose rows do not depend on what shares a pass (`exact_rows`), within rounding for others.
    Source: PagedAttention (2023).

    Args:
        most: Bytes kept at most; what was used least recently goes first.
        asked, found: Tokens of the prompts that were looked up, and those of them that were there.
        states: Bytes of the recurrent states that are kept beside pages, by their ids.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked = self.found = self._pages = 0
        self._model: ref[Reader] | None = None
        self._holders: dict[PagePool, np.ndarray] = {}
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._stateful: dict[_Entry, list[int]] = {}
        self._state_holders = Counter[int]()
        self.states: dict[int, int] = {}
        self._by_chain: dict[bytes, dict[_Entry, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of pages and recurrent states; what several texts share counts once."""
        return self._pages + sum(self.states.values())

    @property
    def caches(self) -> list[KVCache]:
        """All that is kept."""
        return [entry.cache for entry in self._entries]

    def serves(self, model: Reader) -> bool:
        """Whether what is kept is this model's; an empty cache becomes that of the first one which asks.

        Args:
            model: the model; another load of the same files is another one.

        Returns:
            False where another model has read what is kept.
        """
        if self._model is None or not self._entries:
            self._model = ref(bare(model))
        return self._model() == model

    def find(self, tokens: Sequence[int], cache_namespace: str = "") -> KVCache | None:
        """What is known of the beginning of a text, None for nothing; its last token is always left to read."""
        self.asked += len(tokens)
        those: dict[_Entry, None] = {}
        for name in _chain(tokens, cache_namespace):
            if name not in self._by_chain:
                break
            those = self._by_chain[name]
        for best in reversed(those):
            most = min(len(best.tokens), len(tokens) - 1)
            parts = np.flatnonzero(best.tokens[:most] != np.asarray(tokens[:most]))
            alike = int(parts[0]) if len(parts) else most
            if alike and best.cache.begins(alike):
                self._entries.move_to_end(best)
                self.found += alike
                return best.cache.beginning(alike)
        return None

    def add(self, tokens: Sequence[int], cache: KVCache, cache_namespace: str = "") -> None:
        """Keep what `cache` holds of a text."""
        if not isinstance(cache, KVCache) or cache.prefix:
            return
        known = cache.untouched
        chain = list(_chain(tokens[:known], cache_namespace))
        longer = [each for each in self._by_chain.get(chain[-1], ()) if len(each.chain) > len(chain)] if chain else []
        if not chain or any(each.cache.begins(known) for each in longer):
            # Too short to be found, or a longer text has it all.
            return
        for name in chain:
            for covered in [each for each in self._by_chain.get(name, ()) if each.chain[-1] == name]:
                if cache.begins(len(covered.tokens)):
                    self._remove(covered)
        kept = cache.beginning(known)
        kept.shrink(0)
        entry = _Entry(np.asarray(tokens[:known]), kept, chain)
        self._entries[entry] = None
        if kept.states.known:
            # Spare memory of the model is counted with the texts in progress.
            kept.states.memory = None
            held = kept.states.held
            self._stateful[entry] = [*held]
            self._state_holders.update(held.keys())
            self.states |= held
        pool, pages = kept.pages.pool, kept.pages.held
        holders = self._holders.setdefault(pool, np.zeros(pool.most, dtype=np.int32))
        holders[pages] += 1
        self._pages += int((holders[pages] == 1).sum()) * pool.page_bytes
        for name in chain:
            self._by_chain.setdefault(name, {})[entry] = None
        while self.bytes > self.most and self.evict():
            pass

    def evict(self) -> bool:
        """Forget what was used least recently; False where nothing is kept."""
        if not self._entries:
            return False
        self._remove(next(iter(self._entries)))
        return True

    def clear(self) -> None:
        """Forget everything."""
        while self.evict():
            pass

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry]
        for state in self._stateful.pop(entry, ()):
            self._state_holders[state] -= 1
            if not self._state_holders[state]:
                del self._state_holders[state], self.states[state]
        for name in entry.chain:
            del self._by_chain[name][entry]
            if not self._by_chain[name]:
                del self._by_chain[name]
        pool, pages = entry.cache.pages.pool, entry.cache.pages.held
        held = self._holders[pool]
        held[pages] -= 1
        self._pages -= int((held[pages] == 0).sum()) * pool.page_bytes
        entry.cache.pages.release()


def _chain(tokens: Sequence[int], cache_namespace: str) -> Iterator[bytes]:
    """Names of the whole pages of a text, each made of that of the one before it, and of the cache namespace."""
    ids = np.asarray(tokens, dtype=np.int64)
    name = hashlib.blake2b(cache_namespace.encode(), digest_size=16).digest()
    for first in range(0, len(ids) - SLOTS + 1, SLOTS):
        name = hashlib.blake2b(name + ids[first : first + SLOTS].tobytes(), digest_size=16).digest()
        yield name
