"""Page tables of texts on the device of their pages: what was uploaded stays until it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
import torch

if TYPE_CHECKING:
    from .pages import PageTable

_FIRST = {"cpu": (8, 16)}
_FIRST_ELSEWHERE = 64, 256
"""Places and columns at first: graphs are captured anew when there are more, and the CPU captures none."""


@dataclass(slots=True)
class _Known:
    text: ref[PageTable]
    place: int
    changes: int


class DeviceTables:
    """The page tables of all texts of one shape, side by side in one tensor.

    A text keeps its place in it as long as it lives. Place 0 belongs to no text: all of its pages are the spare one.

    Args:
        layers, kv_heads: Of the texts.
        device: Where the tensor lies.
        spare: The page that stands where a text has none; nothing but fillers reads it.

    Attributes:
        held: [places, layers, kv_heads, columns] int32.
        generation: Grows whenever `held` is another tensor.
        uploads: How many copies to the device there have been.
    """

    def __init__(self, layers: int, kv_heads: int, device: torch.device, spare: int) -> None:
        self.spare, self.generation, self.uploads = spare, 0, 0
        places, columns = _FIRST.get(device.type, _FIRST_ELSEWHERE)
        self.held = torch.full((places, layers, kv_heads, columns), spare, dtype=torch.int32, device=device)
        self._known: dict[int, _Known] = {}
        self._free = list(range(places - 1, 0, -1))

    def places(self, texts: Sequence[PageTable]) -> np.ndarray:
        """[texts] int32, where the tables of these texts are found in `held`, as they are now.

        To be called within `TensorPool.still`. A text may stand twice.
        """
        # A text may have the id of one that is gone.
        fresh = {id(text) for text in texts if (known := self._known.get(id(text))) is None or known.text() is not text}
        self._make_room(len(fresh), max(text.table.shape[2] for text in texts))
        held = [self._place(text) for text in texts]
        stale = {
            each.place: (text, each) for text, each in zip(texts, held, strict=True) if each.changes != text.changes
        }
        if stale:
            self._upload([*stale.values()])
        return np.array([each.place for each in held], dtype=np.int32)

    def _place(self, text: PageTable) -> _Known:
        known = self._known.get(id(text))
        if known is None or known.text() is not text:
            place = self._free.pop() if known is None else known.place
            known = self._known[id(text)] = _Known(ref(text), place, -1)
        return known

    def _upload(self, stale: list[tuple[PageTable, _Known]]) -> None:
        """Bring changed tables to the device, all of them by one copy."""
        fresh = np.full((len(stale), *self.held.shape[1:]), self.spare, dtype=np.int32)
        for own, (text, known) in zip(fresh, stale, strict=True):
            table = text.table
            own[:, :, : table.shape[2]] = np.where(table < 0, self.spare, table)
            known.changes = text.changes
        self.uploads += 1
        places = torch.tensor([known.place for _, known in stale], device="cpu")
        device = self.held.device
        self.held[places.to(device, non_blocking=True)] = torch.from_numpy(fresh).to(device, non_blocking=True)

    def _make_room(self, texts: int, columns: int) -> None:
        if len(self._free) < texts:
            for key in [key for key, known in self._known.items() if known.text() is None]:
                self._free.append(self._known.pop(key).place)
        places, _, _, held = self.held.shape
        if len(self._free) >= texts and columns <= held:
            return
        more = 0 if len(self._free) >= texts else max(places, texts)
        wide = held if columns <= held else max(columns, 2 * held)
        wider = self.held.new_full((places + more, *self.held.shape[1:3], wide), self.spare)
        wider[:places, :, :, :held] = self.held
        self._free += range(places + more - 1, places - 1, -1)
        self.held = wider
        self.generation += 1
