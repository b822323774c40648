"""What a layer keeps of its rows beside keys and values: in slots of a cache, where other layers have theirs.

So it is cut, marked, kept and forked with the text as everything in a cache is, tentative rows of a tree included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from .cache import KVCache


class KeptRows:
    """Rows of `width` numbers in the layers `slots` of a cache.

    Each layer has room for 2 * kv_heads * head_dim of them.
    """

    def __init__(self, slots: Sequence[int], width: int, room: int) -> None:
        self.slots, self._width, self._room = list(slots), width, room

    def write(self, cache: KVCache, rows: torch.Tensor) -> None:
        """Put what is kept of the rows of a pass [n, width] into the cache, tentatively."""
        wide = pad(rows, (0, len(self.slots) * self._room - rows.shape[1])).chunk(len(self.slots), dim=1)
        shape = (2, *cache.pages.nothing.shape[2::2])
        for layer, part in zip(self.slots, wide, strict=True):
            keys, values = part.to(cache.pages.nothing.dtype).unflatten(1, shape).unbind(1)
            cache.write(layer, keys, values)

    def read(self, cache: KVCache, start: int, stop: int) -> torch.Tensor:
        """What is kept of rows [start, stop) of content and tentative ones: [m, width]."""
        parts = [cache.pages.read(start, stop, layer).permute(2, 0, 1, 3).flatten(1) for layer in self.slots]
        return torch.cat(parts, dim=1)[:, : self._width]


def parents(seen: torch.Tensor) -> torch.Tensor:
    """[T] the tentative row right before each of T tentative rows, -1 for none.

    Args:
        seen: [n, T] bool, which tentative rows each of the last n sees. Those of earlier passes stand where a row that
            sees them has them; of those that none sees nothing is asked.
    """
    n, rows = seen.shape
    whole = torch.zeros(rows, rows, dtype=torch.bool, device=seen.device)
    whole[rows - n :] = seen
    before = torch.arange(rows, device=seen.device)
    # A row of an earlier pass has the ancestors that its first reader sees before it.
    whole[: rows - n] = seen[seen.to(torch.int8).argmax(dim=0)][: rows - n] & (before <= before[: rows - n, None])
    earlier = whole & (before < before[:, None])
    return torch.where(earlier, before, -1).amax(dim=1)


def behind(line: torch.Tensor, reach: int) -> torch.Tensor:
    """[reach + T] the row right before each of `reach` rows of content and the tentative ones after them.

    Args:
        line: [T] what `parents` says of those.
    """
    return torch.cat((torch.arange(-1, reach - 1, device=line.device), torch.where(line < 0, reach - 1, line + reach)))
