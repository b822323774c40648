"""Passes over few rows at fixed shapes, each of which a CUDA device replays as one graph.

Launching the kernels of a small pass one by one takes longer than running them. A graph launches them all at once, but
its shapes and addresses are those it was captured with. So rows are padded, inputs go through buffers that stay where
they are, and page tables are an input too. Off CUDA the same function runs without a graph.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ..batch import Batch, Cost, Scores
from ..cache.cache import KVCache
from ..cache.page_pool import SLOTS, TensorPool
from ..hooks import HookPoint, Hooks, Tap
from ..layer_plan import WHOLE, layer_steps
from ..torch.attention import capped, shares, visibility

if TYPE_CHECKING:
    from ..torch.transformer import Transformer

MOST_ROWS = 64
"""Padded rows of a pass, up to which it runs at a fixed shape; beyond, arithmetic hides the launches."""
_LEAST_CAPACITY = 256
_MOST_ARENAS = 16

Result = tuple[torch.Tensor, dict[HookPoint, torch.Tensor]]


class StaticPasses:
    """The fixed shapes one model runs at, and the memory they work in.

    A shape is (places, capacity, rows): so many caches side by side, room for so many tokens in each, so many rows of
    each; all are powers of two. Shapes of equal places and capacity share an arena.

    Args:
        budget: Bytes that all arenas of a thread work in, a layer's keys and values side by side; the least recently
            used arena is given up when a new one would exceed it, or when there are `_MOST_ARENAS`.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._of_thread = threading.local()
        self._lock = threading.Lock()

    @property
    def _arenas(self) -> OrderedDict[tuple[int, int], _Arena]:
        """Those of the calling thread: what one writes its inputs to, no other thread may run."""
        if not hasattr(self._of_thread, "arenas"):
            self._of_thread.arenas = OrderedDict()
        arenas: OrderedDict[tuple[int, int], _Arena] = self._of_thread.arenas
        return arenas

    def forward(self, model: Transformer, batch: Batch, hooks: Hooks) -> Scores | None:
        """What the model's own pass returns; None, and nothing done, where the batch does not fit.

        It fits if it has at most `MOST_ROWS` padded rows, all tokens with complete caches, in a causal model and
        without gradients, if nothing is read or changed but the residual stream is read, and if its arena is within
        the budget.
        """
        caches = _caches(model, batch)
        if not caches or hooks.changes() or any(place.name != "residual" for place in hooks.where.values()):
            return None
        places, rows = _power(len(caches)), _power(max(map(len, batch.segments)))
        if places * rows > MOST_ROWS:
            return None
        # Pages stay, so that a text does not go to and fro between arenas as the number of rows changes.
        needed = max(max(cache.length + rows, cache.capacity) for cache in caches)
        capacity = max(_LEAST_CAPACITY, _power(max(needed, int(batch.positions.max()) + 1)))
        with self._lock, torch.inference_mode(False), torch.no_grad():
            pool = caches[0].pages.pool
            if not isinstance(pool, TensorPool) or pool.dtype != model.dtype:
                return None
            arena = self._arena(model, pool, places, capacity)
            return None if arena is None else arena.forward(model, batch, caches, rows, hooks.where)

    def _arena(self, model: Transformer, pool: TensorPool, places: int, capacity: int) -> _Arena | None:
        key, config = (places, capacity), model.config
        if key in self._arenas:
            self._arenas.move_to_end(key)
            return self._arenas[key]
        free = self.budget - 2 * places * config.num_kv_heads * capacity * config.head_dim * model.dtype.itemsize
        if free < 0:
            return None
        while self._arenas and (self.bytes > free or len(self._arenas) >= _MOST_ARENAS):
            self._arenas.popitem(last=False)
        try:
            self._arenas[key] = _Arena(model, pool, places, capacity)
        except torch.OutOfMemoryError:
            self.budget = self.bytes
            return None
        return self._arenas[key]

    @property
    def bytes(self) -> int:
        """What all arenas of this thread work in."""
        return sum(arena.bytes for arena in self._arenas.values())


class _Arena:
    """So many caches of a pool side by side, and the passes over them, by rows and taps.

    Attributes:
        pool: Where the caches' pages are. All that a masked slot may hold is finite, because it counts zero times that.
        spare: A page that rows which are padding write to.
        bytes: A layer's keys and values, side by side.
    """

    def __init__(self, model: Transformer, pool: TensorPool, places: int, capacity: int) -> None:
        config = self.config = model.config
        self.pool, self.places, self.capacity = pool, places, capacity
        self.bytes = 2 * places * config.num_kv_heads * capacity * config.head_dim * pool.dtype.itemsize
        self.spare = pool.take(1)
        self._generation = pool.generation
        # Layers differ in their mask and their angles by nothing but whether they slide, and by which rotation.
        each = [(slides, config.turns_locally(layer)) for layer, slides in enumerate(config.sliding_layers)]
        kinds = {kind: layer for layer, kind in enumerate(each)}
        self.kinds = [list(kinds).index(kind) for kind in each]
        self.examples = list(kinds.values())
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in self.examples:
            cos, sin = model.angles(config.layer_rope(layer), np.arange(capacity))
            self.tables.append((cos[:, None].to(model.dtype), sin[:, None].to(model.dtype)))
        # Sharing a pool, graphs reuse each other's intermediate memory: they never run at the same time.
        self.graphs = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._passes: dict[tuple[int, tuple[HookPoint, ...]], _StaticPass] = {}

    def forward(
        self, model: Transformer, batch: Batch, caches: list[KVCache], rows: int, where: dict[Tap, HookPoint]
    ) -> Scores:
        taps = tuple(sorted(set(where.values())))
        for segment, cache in zip(batch.segments, caches, strict=True):
            cache.reserve(segment.positions)
        with self.pool.still():
            if self._generation != self.pool.generation:
                # Graphs were captured with the addresses of before.
                self._passes.clear()
                self._generation = self.pool.generation
            if (rows, taps) not in self._passes:
                self._passes[rows, taps] = _StaticPass(self, rows, taps)
            step = self._passes[rows, taps]
            step.fill(batch)
            logits, tapped = step.run(model) if self.graphs is None else step.replay(model)
        for cache in caches:
            cache.wrote(range(self.config.num_layers))
        wanted, bounds = batch.logit_rows
        # The next replay overwrites what this one returns, so the caller gets copies.
        hidden = {tap: tapped[place][: batch.rows].clone() for tap, place in where.items()}
        row_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * self.pool.dtype.itemsize
        costs = [Cost.of(segment, WHOLE, self.config.num_layers, row_bytes) for segment in batch.segments]
        return Scores(logits[: len(wanted)].clone(), bounds, hidden, batch.offsets, costs)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "spare") and not ending():
            self.pool.drop(self.spare)


class _StaticPass:
    """The passes of one shape: every place of an arena has `rows` rows, padded with rows that see only themselves.

    Row r of place p is row p * rows + r. Inputs lie one after another in one buffer of bytes, filled by one copy:
    tokens, positions, own (the rows that are no padding) and wanted (those whose logits are), each [places * rows]
    int64; lengths [places] int64, the first slot to write; pages [places, layers, kv_heads, capacity / SLOTS] int64;
    masks [kinds of layers, places, rows, capacity] bool.
    """

    def __init__(self, arena: _Arena, rows: int, taps: tuple[HookPoint, ...]) -> None:
        places, capacity, device, config = arena.places, arena.capacity, arena.pool.device, arena.config
        self._arena, self._rows, self._taps = arena, rows, taps
        self._masks = (len(arena.tables), places, rows, capacity)
        self._pages = (places, config.num_layers, config.num_kv_heads, capacity // SLOTS)
        self._ints = [places * rows] * 4 + [places, int(np.prod(self._pages))]
        size = 8 * sum(self._ints) + int(np.prod(self._masks))
        self._inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def fill(self, batch: Batch) -> None:
        """Write the inputs of `batch`, whose segments have reserved their tentative rows."""
        # Pinned memory is not handed out again before the copy from it is done, so no pass waits for another.
        host = torch.zeros(
            len(self._inputs), dtype=torch.uint8, pin_memory=self._arena.graphs is not None, device="cpu"
        )
        tokens, positions, own, wanted, lengths, pages, masks = (field.numpy() for field in self._fields(host))
        pages[:] = self._arena.spare
        counts = np.zeros(len(lengths), dtype=np.int64)
        parts = []
        for place, segment in enumerate(batch.segments):
            assert segment.cache is not None and segment.tokens is not None
            n, length = len(segment), segment.cache.length
            rows = place * self._rows + np.arange(n)
            tokens[rows], positions[rows] = segment.tokens, segment.positions
            counts[place], lengths[place] = n, length
            # Others may hold the pages after the rows, which padding must not write to.
            table = segment.cache.pages.table[:, :, : -(-(length + n) // SLOTS)]
            pages[place, :, :, : table.shape[2]] = np.where(table < 0, self._arena.spare, table)
            for kind, layer in enumerate(self._arena.examples):
                seen = visibility(segment, layer, self._arena.config.window(layer))
                masks[kind, place, :n, : length + n] = True if seen is None else seen
            parts.append(rows)
        for place, n in enumerate(counts.tolist()):
            padding = np.arange(n, self._rows)
            masks[:, place, padding, lengths[place] + padding] = True
        own[: batch.rows] = np.concatenate(parts)
        logit_rows, _ = batch.logit_rows
        wanted[: len(logit_rows)] = own[logit_rows]
        self._inputs.copy_(host, non_blocking=True)

    def run(self, model: Transformer) -> Result:
        """Logits [places * rows, vocab] of the wanted rows and tapped states of the own ones; what follows is void."""
        tokens, positions, own, wanted, lengths, pages, masks = self._fields(self._inputs)
        step = StaticStep(self._arena, model, positions, lengths, pages, masks)
        hooks = Hooks.reading(self._taps)
        hidden = hooks.visit(HookPoint("residual", 0), model.embed_tokens(tokens))
        hidden = model.blocks(hidden, step, layer_steps(WHOLE, self._arena.config.num_layers), hooks)
        return model.head(hidden[wanted]), {place: state[own] for place, state in hooks.states.items()}

    def replay(self, model: Transformer) -> Result:
        """The same by one launch; the first call captures it."""
        if self._graph is None:
            self._capture(model)
        assert self._graph is not None
        self._graph.replay()
        return self._result

    def _capture(self, model: Transformer) -> None:
        with torch.cuda.device(model.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Libraries set themselves up at their first call. Running twice does no harm: it writes the same.
                self.run(model)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._arena.graphs, stream=stream, capture_error_mode="thread_local"):
                self._result = self.run(model)
        self._graph = graph

    def _fields(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        ints, masks = buffer.tensor_split([8 * sum(self._ints)])
        *numbers, pages = ints.view(torch.int64).split(self._ints)
        return [*numbers, pages.view(self._pages), masks.view(torch.bool).view(self._masks)]


class StaticStep:
    """What all layers of one static pass share: rotation angles, masks and page tables."""

    def __init__(
        self,
        arena: _Arena,
        model: Transformer,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        masks: torch.Tensor,
    ) -> None:
        """Take what a pass begins with, see `_StaticPass`.

        Args:
            arena: The caches.
            model: The model.
            positions: [places * rows].
            lengths: [places].
            pages: Page tables.
            masks: [kinds, places, rows, capacity].
        """
        self._arena, self._model = arena, model
        rows = masks.shape[2]
        # Padding ends where the arena does.
        slots = (lengths[:, None] + torch.arange(rows, device=masks.device)).clamp(max=arena.capacity - 1)
        self._pages, self._columns, self._rows = pages, (slots // SLOTS)[:, None], (slots % SLOTS)[:, None]
        self._angles = [(cos[positions], sin[positions]) for cos, sin in arena.tables]
        if (grows := arena.config.temperature) is not None:
            steps = ((positions + grows.offset) // grows.length).double()
            self._tempers = (1.0 + grows.scale * steps.log1p()).to(model.dtype)[:, None, None]
        bias = arena.pool.data.new_zeros(masks.shape).masked_fill_(~masks, -torch.inf)
        group = arena.config.num_heads // arena.config.num_kv_heads
        self._biases = bias[:, :, None].repeat(1, 1, 1, group, 1)

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all rows, each [places * rows, 1, head_dim / 2]."""
        return self._angles[self._arena.kinds[layer]]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write the rows' keys and values [N, kv_heads, head_dim] and attend.

        [N, heads, head_dim] -> [N, hidden].
        """
        if self._arena.config.tempers(layer):
            queries = queries * self._tempers
        pages = self._pages[:, layer]
        (places, kv_heads, _), rows, dim = pages.shape, self._rows.shape[-1], keys.shape[-1]
        written = pages.gather(2, self._columns.expand(-1, kv_heads, -1))
        cached = []
        for held, new in zip(self._arena.pool.data, (keys, values), strict=True):
            held[written, self._rows] = new.view(places, rows, kv_heads, dim).transpose(1, 2)
            cached.append(held[pages].flatten(2, 3))
        # As in the ordinary pass: query heads that share a key-value head are rows of that head.
        grouped = queries.view(places, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        own, config = grouped.reshape(places, kv_heads, -1, dim), self._arena.config
        bias, (cached_keys, cached_values) = self._biases[self._arena.kinds[layer]], cached
        if config.unusual_softmax:
            scores = capped(own @ cached_keys.transpose(-1, -2) * config.attention_scale, config.attention_cap)
            sinks = self._model.weights.layers[layer].sinks
            result = shares(scores + bias, sinks) @ cached_values
        else:
            result = scaled_dot_product_attention(
                own, cached_keys, cached_values, attn_mask=bias, scale=config.attention_scale
            )
        return result.view(places, kv_heads, -1, rows, dim).permute(0, 3, 1, 2, 4).reshape(places * rows, -1)


def _caches(model: Transformer, batch: Batch) -> list[KVCache]:
    """The caches of all segments, or none where this batch needs the ordinary pass for what it is."""
    if torch.is_grad_enabled() or not model.config.causal or batch.rows == 0:
        return []
    caches = []
    for segment in batch.segments:
        if (
            segment.states is not None
            or segment.cache is None
            or segment.cache.evicted
            or segment.retained
            or segment.sparse
        ):
            return []
        caches.append(segment.cache)
    return caches


def _power(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(number - 1, 0).bit_length()
