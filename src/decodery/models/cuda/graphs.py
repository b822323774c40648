"""Passes at fixed shapes, each of which a CUDA device replays as one graph.

Launching the kernels of a small pass one by one takes longer than running them. A graph launches them all at once, but
its shapes and addresses are those it was captured with. So rows are padded, inputs go through a buffer that stays where
it is, and page tables are read from where they lie. Off CUDA the same function runs without a graph.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..batch import Batch, Cost, Scores
from ..cache import coded
from ..cache.cache import KVCache
from ..cache.device_tables import DeviceTables
from ..cache.page_pool import TensorPool
from ..cache.pages import PageTable
from ..hooks import HookPoint, Hooks
from ..layer_plan import WHOLE
from ..torch.paged_rows import kernel_for, serves, windows_of
from ..torch.row_layout import BITS, DraftRows, SegmentRows, TextRows
from .captured import Shapes, bucket
from .static_pass import Choosing, Inputs, Result, Shape, StaticPass, angles

if TYPE_CHECKING:
    from ..torch.transformer import Transformer

MOST_ROWS = 512
"""Padded rows of a pass, up to which it runs at a fixed shape; beyond, arithmetic hides the launches."""
MOST_APART = 64
"""The same where PyTorch attends, row by row: each row's keys and values are then copied."""
_FEW_POSITIONS = 4096


class _Passes(Shapes[Shape, StaticPass]):
    """Attributes: angles of the first positions, so many `turns`."""

    def __init__(self) -> None:
        super().__init__()
        self.angles: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
        self.turns = 0


class StaticPasses:
    """The fixed shapes that one model runs at.

    Shapes of the calling thread are its own: what one thread writes its inputs to, no other may run.

    Attributes:
        shapes: What has been captured, or would be on a CUDA device.
    """

    def __init__(self) -> None:
        self._passes = _Passes()
        self._lock = threading.Lock()
        self._too_large: set[Shape] = set()

    @property
    def shapes(self) -> list[Shape]:
        """What passes of the calling thread have been captured for, the least recently used first."""
        return list(self._passes.held)

    def forward(self, model: Transformer, batch: Batch, hooks: Hooks) -> Scores | None:
        """What the model's own pass returns; None, and nothing done, where the batch does not fit.

        It fits if it has at most `MOST_ROWS` padded rows, or `MOST_APART` without a kernel for attention, all tokens
        with complete caches and few rows of earlier passes, in a causal model and without gradients, and if nothing is
        changed, and nothing read but the residual stream.
        """
        if hooks.changes() or any(place.name != "residual" for place in hooks.where.values()):
            return None
        caches = _caches(model, batch)
        if not caches:
            return None
        wanted, bounds = batch.logit_rows
        taps = tuple(sorted(set(hooks.where.values())))
        rows, pages = SegmentRows.of(batch.segments), [cache.pages for cache in caches]
        shape = self._shape(model, pages[0], rows, len(wanted), taps)
        if shape is None:
            return None
        words = bucket(-(-int((rows.counts + rows.retained).max()) // BITS))
        if words > shape.tentative // BITS:
            # Trees that grow from pass to pass, whose levels are fewer rows than they see.
            shape = replace(shape, words=words)
        for segment, cache in zip(batch.segments, caches, strict=True):
            cache.reserve(segment.positions, segment.retained)
        tokens = np.concatenate([segment.tokens for segment in batch.segments if segment.tokens is not None])
        found = self._run(model, pages, Inputs(rows, tokens, wanted, batch=batch), shape)
        if found is None:
            return None
        for cache in caches:
            cache.wrote(range(model.config.num_layers))
        logits, tapped, _ = found
        # The next replay overwrites what this one returns, so the caller gets copies.
        hidden = {tap: tapped[place][: batch.rows].clone() for tap, place in hooks.where.items()}
        row_bytes = 2 * model.config.num_kv_heads * coded.row_bytes(model.config.head_dim, model.cache_dtype)
        costs = [Cost.of(segment, WHOLE, model.config.num_layers, row_bytes) for segment in batch.segments]
        return Scores(logits[: len(wanted)].clone(), bounds, hidden, batch.offsets, costs)

    def choose(
        self, model: Transformer, pages: list[PageTable], rows: DraftRows, tokens: np.ndarray, choosing: Choosing
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits of all rows, valid until the next pass, and what they choose, see `Choice.answer`.

        None, and nothing done, where the rows do not fit, see `forward`.

        Args:
            model: The model.
            pages: [texts] with room for the rows of each.
            rows: Of the texts.
            tokens: [rows].
            choosing: How they choose.
        """
        count = len(tokens)
        shape = self._shape(model, pages[0], rows, count, ())
        if shape is None or not rows.fit(windows_of(model.config)):
            return None
        # Shapes do not differ in how deep trees are.
        doublings = (shape.rows - 1).bit_length() if choosing.nodes.size else -1
        choice = choosing.choice.walking(doublings)
        shape = replace(shape, outputs=shape.rows, choice=choice, closed=id(choosing.closed))
        found = self._run(model, pages, Inputs(rows, tokens, np.arange(count), choosing), shape)
        if found is None:
            return None
        logits, _, answer = found
        assert answer is not None
        return logits[:count], answer

    def _shape(
        self, model: Transformer, first: PageTable, rows: TextRows, wanted: int, taps: tuple[HookPoint, ...]
    ) -> Shape | None:
        """The shape of a pass with so many logits; None where no pass of fixed shape is for its rows."""
        pool, count = first.pool, len(rows.positions)
        if not isinstance(pool, TensorPool) or int(rows.positions.max()) >= model.config.max_positions:
            return None
        if pool.dtype != model.dtype and not pool.beside:
            return None
        if bucket(count) > (MOST_APART if kernel_for(pool) is None else MOST_ROWS):
            return None
        return Shape(bucket(len(rows.counts)), bucket(count), bucket(max(wanted, 1)), taps)

    def _run(self, model: Transformer, pages: list[PageTable], inputs: Inputs, shape: Shape) -> Result | None:
        """A pass at a shape, over pages with room for its rows; None where the device has none for the shape."""
        pool = pages[0].pool
        assert isinstance(pool, TensorPool)
        if shape in self._too_large:
            return None
        tables, last = pool.tables(*pages[0].table.shape[:2]), int(inputs.rows.positions.max())
        # Another thread could move what a graph reads between the look for it and its launch.
        with self._lock, torch.inference_mode(False), torch.no_grad(), pool.still():
            try:
                step = self._step(model, tables, pages, shape, last)
                step.fill(inputs)
                return step.replay(model)
            except torch.OutOfMemoryError:
                self._too_large.add(shape)
                self._passes.held.pop(shape, None)
                return None

    def _step(
        self, model: Transformer, tables: DeviceTables, pages: list[PageTable], shape: Shape, last: int
    ) -> StaticPass:
        """The pass of a shape, captured anew where what it reads has moved.

        Args:
            model: The model.
            tables: Of the pages' pool; both stand still.
            pages: Of all texts.
            shape: Of the pass.
            last: The last position of its rows.
        """
        passes, pool = self._passes, pages[0].pool
        assert isinstance(pool, TensorPool)
        places = tables.places(pages)
        turns = min(max(_FEW_POSITIONS, 1 << last.bit_length()), model.config.max_positions)
        fixed = (id(pool), pool.generation, tables.generation)
        if fixed != passes.fixed or turns > passes.turns:
            passes.held.clear()
            passes.angles = angles(model, turns)
            # The last of these: a device without room for the angles has them made anew in the next pass.
            passes.turns = turns
            passes.renew(fixed, model.device)

        def made() -> StaticPass:
            wide = torch.promote_types(model.dtype, torch.float32)
            logits = passes.result(shape.outputs, model.vocab_size, wide, model.device)
            return StaticPass(model, pool, shape, passes.angles, passes.memory, logits)

        step = passes.at(shape, made)
        step.places = places
        return step


def _caches(model: Transformer, batch: Batch) -> list[KVCache]:
    """The caches of all segments, or none where this batch needs the ordinary pass for what it is."""
    if torch.is_grad_enabled() or not model.config.causal or batch.rows == 0:
        return []
    caches = []
    for segment in batch.segments:
        if segment.states is not None or not serves(segment, model.config):
            return []
        assert segment.cache is not None
        caches.append(segment.cache)
    return caches
