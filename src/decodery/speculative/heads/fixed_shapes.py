"""Passes of a head over all texts at fixed shapes, each of which a CUDA device replays as one graph."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Ordered
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.models.cache.page_pool import TensorPool
from decodery.models.cuda.captured import Captured, Memory, Shapes, bucket
from decodery.models.cuda.graphs import MOST_APART, MOST_ROWS
from decodery.models.torch.paged_rows import PagedRows, kernel_for, rows_of_tile
from decodery.models.torch.row_layout import BITS, Layout, TextRows, packed

from .parts import DecoderLayer, Held

if TYPE_CHECKING:
    from decodery.models.cache.device_tables import DeviceTables

    from .layered import HeadRows, LayeredHead

Passed = tuple[torch.Tensor, torch.Tensor]
"""Features after all rows [rows, hidden], and the logits of those that are wanted [outputs, outputs of the head]."""


@dataclass(frozen=True)
class HeadShape:
    """What a graph is captured for, all of it rounded up.

    Attributes:
        texts, rows: Of the pass; one that is read together with a block after it counts as two texts.
        outputs: Rows whose logits are wanted.
        words: Of 32 tentative rows each that a text may have.
    """

    texts: int
    rows: int
    outputs: int
    words: int


@dataclass(frozen=True)
class LayerRows(TextRows):
    """Rows as one layer of a head sees them.

    Attributes:
        seen: Of each text, which tentative rows each of its rows sees [n, m], on the host or on the device.
    """

    seen: Ordered[np.ndarray | torch.Tensor]

    def see(self, bits: np.ndarray, windows: list[int | None]) -> None:
        for first, seen in zip(self.firsts.tolist(), self.seen, strict=True):
            if isinstance(seen, np.ndarray):
                bits[:, first : first + len(seen)] = packed(seen, bits.shape[2])

    def known_there(self) -> Ordered[torch.Tensor | None]:
        return [seen if isinstance(seen, torch.Tensor) else None for seen in self.seen]


class HeadPasses:
    """The fixed shapes that one head runs at.

    Attributes:
        shapes: What has been captured, or would be on a CUDA device, by shape.
    """

    def __init__(self) -> None:
        self.shapes: Shapes[HeadShape, HeadStep] = Shapes()
        self._lock = threading.Lock()
        self._too_large: set[HeadShape] = set()

    def run(
        self,
        head: LayeredHead,
        texts: Ordered[HeadRows],
        features: torch.Tensor,
        tokens: torch.Tensor,
        wanted: np.ndarray,
    ) -> Passed | None:
        """A pass whose keys and values are written; None, and nothing done, where it does not fit.

        Args:
            head: The head.
            texts: Their rows, in order.
            features: [n, width] that the first of them read, on the device.
            tokens: [rows] likewise, here or there.
            wanted: Rows whose logits are.
        """
        layers = head.stack
        held = [[each.held[number] for each in texts] for number in range(len(layers))]
        pools = [of_layer[0].pages.pool for of_layer in held]
        counts = np.array([len(each.positions) for each in texts])
        before = np.array([0 if each.mask is None else each.mask.shape[1] - len(each.positions) for each in texts])
        most = bucket(-(-int((counts + before).max()) // BITS))
        outputs = bucket(len(wanted)) if len(wanted) else 0
        shape = HeadShape(bucket(len(texts)), bucket(int(counts.sum())), outputs, most)
        if shape in self._too_large:
            return None
        for pool in pools:
            if not isinstance(pool, TensorPool) or shape.rows > (MOST_APART if kernel_for(pool) is None else MOST_ROWS):
                return None
        for each in texts:
            each.reserve()
        laid = [_laid(layer, own, texts, counts, before) for layer, own in zip(layers, held, strict=True)]
        with self._lock, torch.inference_mode(False), torch.no_grad(), ExitStack() as still:
            tables = [
                pool.tables(1, layer.shape.kv_heads)
                for pool, layer in zip(pools, layers, strict=True)
                if isinstance(pool, TensorPool)
            ]
            # Another thread could move what a graph reads between the look for it and its launch. Pools of one limit
            # have one lock.
            for pool in {id(pool.lock): pool for pool in pools}.values():
                if isinstance(pool, TensorPool):
                    still.enter_context(pool.still())
            places = [table.places([each.pages for each in own]) for table, own in zip(tables, held, strict=True)]
            fixed = tuple(
                (id(pool), pool.generation, id(table), table.generation)
                for pool, table in zip(pools, tables, strict=True)
            )
            try:
                if fixed != self.shapes.fixed:
                    self.shapes.renew(fixed, head.model.device)
                make = partial(self._made, head, pools, tables, shape, features.shape[1])
                step = self.shapes.at(shape, make)
                step.fill(laid, places, features, tokens, wanted)
                found, logits = step.replay()
            except torch.OutOfMemoryError:
                self._too_large.add(shape)
                self.shapes.held.pop(shape, None)
                return None
            # The next replay overwrites what this one returns.
            found, logits = found[: len(tokens)].clone(), logits[: len(wanted)].clone()
        for each in texts:
            each.wrote()
        return found, logits

    def _made(
        self, head: LayeredHead, pools: Ordered[Any], tables: Ordered[DeviceTables], shape: HeadShape, width: int
    ) -> HeadStep:
        words = head.model.vocab_size if head.vocabulary is None else len(head.vocabulary)
        logits = self.shapes.result(shape.outputs, words, head.dtype, head.model.device)
        return HeadStep(head, pools, tables, shape, width, logits, self.shapes.memory)


class HeadStep:
    """The passes of one shape; rows beyond a pass's own belong to no text, and no text reads their page.

    Integers lie one after another in one buffer of int32, filled by one copy: tokens and positions [rows], wanted
    [outputs], and what attention of each layer goes by, see `Layout`. Features lie in another.

    Args:
        head: The head.
        pools: By layer, where the texts' pages are.
        tables: By layer, their tables.
        shape: Sizes.
        width: Of a feature.
        logits: [outputs, outputs of the head] that passes write to.
        memory: None where nothing is captured.
    """

    def __init__(
        self,
        head: LayeredHead,
        pools: Ordered[Any],
        tables: Ordered[DeviceTables],
        shape: HeadShape,
        width: int,
        logits: torch.Tensor,
        memory: Memory | None,
    ) -> None:
        device = head.model.device
        self._head, self._pools, self._tables, self._logits = head, pools, tables, logits
        self._captured: Captured[Passed] = Captured(shape, device, memory)
        self._layouts = []
        for layer in head.stack:
            group = layer.shape.heads // layer.shape.kv_heads
            tile_rows = rows_of_tile(-(-shape.rows // shape.texts), group, head.dtype)
            tiles = shape.texts + shape.rows // tile_rows
            self._layouts.append(Layout(shape.rows, shape.words, 1, tiles, tile_rows))
        self._sizes = [shape.rows, shape.rows, shape.outputs, *(layout.size for layout in self._layouts)]
        self._inputs = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self._features = torch.zeros(shape.rows, width, dtype=head.dtype, device=device)

    def fill(
        self,
        laid: Ordered[tuple[LayerRows, np.ndarray]],
        places: Ordered[np.ndarray],
        features: torch.Tensor,
        tokens: torch.Tensor,
        wanted: np.ndarray,
    ) -> None:
        """Write the inputs of a pass.

        Args:
            laid: By layer its rows, and the slot of the text from which on each sees it.
            places: By layer, where the tables of the texts lie.
            features, tokens, wanted: See `HeadPasses.run`.
        """
        # Pinned memory is not handed out again before the copy from it is done, so no pass waits for another.
        pinned = self._captured.memory is not None
        host = torch.zeros(len(self._inputs), dtype=torch.int32, pin_memory=pinned, device="cpu")
        own, positions, outputs, *rest = (field.numpy() for field in host.split(self._sizes))
        count, here = len(tokens), tokens.device.type == "cpu"
        if here:
            own[:count] = tokens.numpy()
        positions[:count], outputs[: len(wanted)] = laid[0][0].positions, wanted
        for layout, buffer, (rows, begins), found in zip(self._layouts, rest, laid, places, strict=True):
            layout.fill(buffer, rows, found, [None])
            layout.fields(buffer)[3][0, :count] = begins
        self._inputs.copy_(host, non_blocking=True)
        if not here:
            self._inputs[:count].copy_(tokens)
        self._features[: len(features)].copy_(features)
        for layout, buffer, (rows, _) in zip(self._layouts, self._inputs.split(self._sizes)[3:], laid, strict=True):
            rows.see_there(layout.fields(buffer)[4])

    def run(self) -> Passed:
        """What follows what the pass has is void."""
        head = self._head
        tokens, positions, wanted, *rest = self._inputs.split(self._sizes)
        each = zip(head.stack, self._layouts, rest, self._pools, self._tables, strict=True)
        rows = [(layer, PagedRows(layout, *where)) for layer, layout, *where in each]

        def attention(number: int, read: torch.Tensor) -> torch.Tensor:
            layer, own = rows[number]
            return layer.output(read, own.attend(0, 0, *layer.heads(read, positions), layer.scale))

        features, spoken = head.through(self._features, tokens.long(), attention)
        if len(wanted):
            self._logits.copy_(head.project(spoken[wanted.long()]))
        return features, self._logits

    def replay(self) -> Passed:
        """The same by one launch; the first call captures it."""
        return self._captured.replay(self.run)


def _laid(
    layer: DecoderLayer, held: Ordered[Held], texts: Ordered[HeadRows], counts: np.ndarray, before: np.ndarray
) -> tuple[LayerRows, np.ndarray]:
    """The rows of texts as a layer sees them, and from which slot of its text on each does."""
    lengths = np.array([own.length + each.fresh for own, each in zip(held, texts, strict=True)])
    visible = [each.visible(layer, length) for each, length in zip(texts, lengths.tolist(), strict=True)]
    begins, seen = zip(*visible, strict=True)
    positions = np.concatenate([each.positions for each in texts])
    rows = LayerRows(counts, lengths, np.zeros_like(counts), before, positions, seen)
    return rows, np.concatenate(begins)
