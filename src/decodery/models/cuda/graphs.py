"""Passes at fixed shapes, each of which a CUDA device replays as one graph.

Launching the kernels of a small pass one by one takes longer than running them. A graph launches them all at once, but
its shapes and addresses are those it was captured with. So rows are padded, inputs go through a buffer that stays where
it is, and page tables are read from where they lie. Off CUDA the same function runs without a graph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..batch import Batch, Cost, Scores, Segment
from ..cache import coded
from ..cache.cache import KVCache
from ..cache.page_pool import TensorPool
from ..hooks import HookPoint, Hooks
from ..layer_plan import WHOLE, layer_steps
from ..torch.paged_rows import Layout, PagedRows, kernel_for, rows_of_tile, serves, windows_of

if TYPE_CHECKING:
    from ..torch.transformer import Transformer

MOST_ROWS = 512
"""Padded rows of a pass, up to which it runs at a fixed shape; beyond, arithmetic hides the launches."""
MOST_APART = 64
"""The same where PyTorch attends, row by row: each row's keys and values are then copied."""
_STEP = 64
"""Beyond so many rows, shapes are multiples of it, and no powers of two."""
_MOST_SHAPES = 48
_FEW_POSITIONS = 4096

Result = tuple[torch.Tensor, dict[HookPoint, torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """What a graph is captured for.

    Attributes:
        texts, rows: Of the pass, rounded up.
        outputs: Rows whose logits are wanted, rounded up.
        taps: What is read on the way.
    """

    texts: int
    rows: int
    outputs: int
    taps: tuple[HookPoint, ...] = ()


class Capture(Protocol):
    """Work that a device has recorded."""

    def replay(self) -> None:
        """Do it once more, at the same addresses."""


class StaticPasses:
    """The fixed shapes that one model runs at.

    Shapes of the calling thread are its own: what one thread writes its inputs to, no other may run.

    Attributes:
        shapes: What has been captured, or would be on a CUDA device.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._too_large: set[Shape] = set()

    @property
    def _passes(self) -> OrderedDict[Shape, StaticPass]:
        if not hasattr(self._of_thread, "passes"):
            self._of_thread.passes = OrderedDict()
            self._of_thread.fixed = ()
        passes: OrderedDict[Shape, StaticPass] = self._of_thread.passes
        return passes

    @property
    def shapes(self) -> list[Shape]:
        """What passes of the calling thread have been captured for, the least recently used first."""
        return list(self._passes)

    def forward(self, model: Transformer, batch: Batch, hooks: Hooks) -> Scores | None:
        """What the model's own pass returns; None, and nothing done, where the batch does not fit.

        It fits if it has at most `MOST_ROWS` padded rows, or `MOST_APART` without a kernel for attention, all tokens
        with complete caches, in a causal model and without gradients, and if nothing is changed, and nothing read but
        the residual stream.
        """
        caches = _caches(model, batch)
        if not caches or hooks.changes() or any(place.name != "residual" for place in hooks.where.values()):
            return None
        pool, last = caches[0].pages.pool, int(batch.positions.max())
        wanted, bounds = batch.logit_rows
        taps = tuple(sorted(set(hooks.where.values())))
        shape = Shape(_bucket(len(caches)), _bucket(batch.rows), _bucket(max(len(wanted), 1)), taps)
        if not isinstance(pool, TensorPool) or last >= model.config.max_positions:
            return None
        if pool.dtype != model.dtype and not pool.beside:
            return None
        if shape.rows > (MOST_APART if kernel_for(pool) is None else MOST_ROWS) or shape in self._too_large:
            return None
        with self._lock, torch.inference_mode(False), torch.no_grad():
            for segment, cache in zip(batch.segments, caches, strict=True):
                cache.reserve(segment.positions)
            step = self._step(model, pool, caches, shape, last)
            with pool.still():
                step.fill(batch)
                try:
                    logits, tapped = step.replay(model)
                except torch.OutOfMemoryError:
                    self._too_large.add(shape)
                    del self._passes[shape]
                    return None
        for cache in caches:
            cache.wrote(range(model.config.num_layers))
        # The next replay overwrites what this one returns, so the caller gets copies.
        hidden = {tap: tapped[place][: batch.rows].clone() for tap, place in hooks.where.items()}
        row_bytes = 2 * model.config.num_kv_heads * coded.row_bytes(model.config.head_dim, pool.dtype)
        costs = [Cost.of(segment, WHOLE, model.config.num_layers, row_bytes) for segment in batch.segments]
        return Scores(logits[: len(wanted)].clone(), bounds, hidden, batch.offsets, costs)

    def _step(self, model: Transformer, pool: TensorPool, caches: list[KVCache], shape: Shape, last: int) -> StaticPass:
        """The pass of a shape, captured anew where what it reads has moved. last: the last position of the rows."""
        passes = self._passes
        tables = pool.tables(*caches[0].pages.table.shape[:2])
        places = tables.places([cache.pages for cache in caches])
        turns = min(max(_FEW_POSITIONS, 1 << last.bit_length()), model.config.max_positions)
        fixed = (id(pool), pool.generation, tables.generation)
        known_fixed, known_turns = self._of_thread.fixed or ((), 0)
        if fixed != known_fixed or turns > known_turns:
            passes.clear()
            self._of_thread.fixed = fixed, turns
            self._of_thread.angles = _angles(model, turns)
            # Sharing memory, graphs reuse each other's intermediate results: they never run at the same time.
            self._of_thread.memory = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        if shape not in passes:
            while len(passes) >= _MOST_SHAPES:
                passes.popitem(last=False)
            passes[shape] = StaticPass(model, pool, shape, self._of_thread.angles, self._of_thread.memory)
        passes.move_to_end(shape)
        passes[shape].places = places
        return passes[shape]


class StaticPass:
    """The passes of one shape; rows beyond a pass's own belong to no text, and no text reads their page.

    Inputs lie one after another in one buffer of int32, filled by one copy: tokens and positions [rows], wanted
    [outputs], the rows whose logits are; and what attention goes by, see `Layout`.

    Args:
        model: The model.
        pool: Where the texts' pages are.
        shape: Sizes.
        angles: By rotation, see `_angles`.
        memory: That graphs share, None where nothing is captured.

    Attributes:
        places: [texts] where the tables of the texts lie.
    """

    places: np.ndarray

    def __init__(
        self,
        model: Transformer,
        pool: TensorPool,
        shape: Shape,
        angles: dict[bool, tuple[torch.Tensor, torch.Tensor]],
        memory: Any,
    ) -> None:
        config = model.config
        self.shape, self._pool, self._angles, self._memory = shape, pool, angles, memory
        self._windows = windows_of(config)
        tile_rows = rows_of_tile(-(-shape.rows // shape.texts), config)
        words, kinds = max(shape.rows // 32, 1), len(self._windows)
        self.layout = Layout(shape.rows, words, kinds, shape.texts + shape.rows // tile_rows, tile_rows)
        self._sizes = [shape.rows, shape.rows, shape.outputs, self.layout.size]
        self._inputs = torch.zeros(sum(self._sizes), dtype=torch.int32, device=pool.device)
        self._capture: Capture | None = None

    def fill(self, batch: Batch) -> None:
        """Write the inputs of a batch, whose caches have made room."""
        # Pinned memory is not handed out again before the copy from it is done, so no pass waits for another.
        host = torch.zeros(len(self._inputs), dtype=torch.int32, pin_memory=self._memory is not None, device="cpu")
        tokens, positions, wanted, rest = (field.numpy() for field in host.split(self._sizes))
        tokens[: batch.rows] = np.concatenate([_tokens(segment) for segment in batch.segments])
        positions[: batch.rows] = batch.positions
        logit_rows, _ = batch.logit_rows
        wanted[: len(logit_rows)] = logit_rows
        self.layout.fill(rest, batch.segments, self.places, self._windows)
        self._inputs.copy_(host, non_blocking=True)

    def run(self, model: Transformer) -> Result:
        """Logits [outputs, vocab] of the wanted rows and tapped states [rows, hidden]; what follows is void."""
        tokens, positions, wanted, rest = self._inputs.split(self._sizes)
        tables = self._pool.tables(model.config.cache_layers, model.config.num_kv_heads)
        rows = PagedRows(self.layout, rest, self._pool, tables)
        step = StaticStep(model, rows, self._windows, positions.long(), self._angles)
        hooks = Hooks.reading(self.shape.taps)
        hidden = hooks.visit(HookPoint("residual", 0), model.embed_tokens(tokens.long()))
        hidden = model.blocks(hidden, step, layer_steps(WHOLE, model.config.num_layers), hooks)
        return model.head(hidden[wanted.long()]), dict(hooks.states)

    def replay(self, model: Transformer) -> Result:
        """The same by one launch; the first call captures it."""
        if self._memory is None:
            return self.run(model)
        if self._capture is None:
            self._capture = self._captured(model)
        self._capture.replay()
        return self._result

    def _captured(self, model: Transformer) -> Capture:
        with torch.cuda.device(model.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Libraries set themselves up at their first call. Running twice does no harm: it writes the same.
                self.run(model)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
                self._result = self.run(model)
        return graph


class StaticStep:
    """What all layers of one static pass share: rotation angles, and the rows.

    Args:
        model: The model.
        rows: The rows on the device.
        windows: By the number of their kind.
        positions: [rows] int64.
        angles: By rotation, see `_angles`.
    """

    def __init__(
        self,
        model: Transformer,
        rows: PagedRows,
        windows: list[int | None],
        positions: torch.Tensor,
        angles: dict[bool, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._model, self._rows, self._windows = model, rows, windows
        self._angles = {local: (cos[positions], sin[positions]) for local, (cos, sin) in angles.items()}
        if (grows := model.config.temperature) is not None:
            steps = ((positions + grows.offset) // grows.length).double()
            self._tempers = (1.0 + grows.scale * steps.log1p()).to(model.dtype)[:, None, None]

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all rows, each [rows, 1, head_dim / 2]."""
        return self._angles[self._model.config.turns_locally(layer)]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write the rows' keys and values [N, kv_heads, head_dim] and attend.

        [N, heads, head_dim] -> [N, hidden].
        """
        config = self._model.config
        if config.tempers(layer):
            queries = queries * self._tempers
        kind, sinks = self._windows.index(config.window(layer)), self._model.weights.layers[layer].sinks
        scale, cap = config.attention_scale, config.attention_cap
        return self._rows.attend(layer, kind, queries, keys, values, scale, cap, sinks)


def _angles(model: Transformer, positions: int) -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines [positions, 1, head_dim / 2], by whether layers turn as windowed ones do."""
    config, found = model.config, dict[bool, tuple[torch.Tensor, torch.Tensor]]()
    for layer in range(config.num_layers):
        if (local := config.turns_locally(layer)) not in found:
            cos, sin = model.angle_table(config.layer_rope(layer), positions)
            found[local] = cos[:, None].to(model.dtype), sin[:, None].to(model.dtype)
    return found


def _caches(model: Transformer, batch: Batch) -> list[KVCache]:
    """The caches of all segments, or none where this batch needs the ordinary pass for what it is."""
    if torch.is_grad_enabled() or not model.config.causal or batch.rows == 0:
        return []
    caches = []
    for segment in batch.segments:
        if segment.states is not None or segment.retained or not serves(segment, model.config):
            return []
        assert segment.cache is not None
        caches.append(segment.cache)
    return caches


def _tokens(segment: Segment) -> np.ndarray:
    assert segment.tokens is not None
    return segment.tokens


def _bucket(number: int) -> int:
    """So many rows or texts as a shape has room for, where there are `number`."""
    return 1 << (number - 1).bit_length() if number <= _STEP else -(-number // _STEP) * _STEP
