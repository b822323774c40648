"""One pass at a fixed shape: its inputs in one buffer, and what a CUDA device captures of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch

from ..batch import Batch
from ..cache.page_pool import TensorPool
from ..hooks import HookPoint, Hooks
from ..layer_plan import WHOLE, layer_steps
from ..torch.paged_rows import PagedRows, rows_of_tile, windows_of
from ..torch.row_layout import BITS, Layout, TextRows
from .captured import Captured, Memory

if TYPE_CHECKING:
    from ..torch.transformer import Transformer

Result = tuple[torch.Tensor, dict[HookPoint, torch.Tensor], torch.Tensor | None]


class Choice(Protocol):
    """How rows choose their tokens, see `sampling.batched.Choice`; equal ones can share a graph."""

    @property
    def kinds(self) -> tuple[type, ...]:
        """Kinds of settings that each row has."""

    @property
    def doublings(self) -> int:
        """Of the walk over trees, -1 where no row is drafted."""

    def walking(self, doublings: int) -> Self:
        """The same with other `doublings`."""

    def picks(self, logits: torch.Tensor, keys: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """[n] int64 tokens by logits [n, V], keys [n] and settings [kinds, n] float64."""

    def answer(self, logits: torch.Tensor, picks: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """All that a step is to know of its rows, in one tensor."""


@dataclass(frozen=True)
class Shape:
    """What a graph is captured for.

    Attributes:
        texts, rows: Of the pass, rounded up.
        outputs: Rows whose logits are wanted, rounded up.
        taps: What is read on the way.
        choice: How all rows choose their tokens, None where logits alone are wanted.
        closed: Which tensor of ids is not to be chosen, by its address in Python.
        words: Of 32 tentative rows each that a text may have at least.
    """

    texts: int
    rows: int
    outputs: int
    taps: tuple[HookPoint, ...] = ()
    choice: Choice | None = None
    closed: int = 0
    words: int = 1

    @property
    def tentative(self) -> int:
        """Tentative rows that a text may have at most, those of earlier passes among them."""
        return max(self.rows // BITS, self.words) * BITS


@dataclass(frozen=True)
class Choosing:
    """How the rows of a step choose their tokens.

    Attributes:
        choice: What their graph is captured for.
        keys: [rows] int64 of their noise.
        settings: [kinds, rows] float64.
        nodes: [2, rows] int64, see `tree_walk.walk`; empty where no row is drafted.
        closed: [ids] on the device that no row chooses, None for none.
    """

    choice: Choice
    keys: np.ndarray
    settings: np.ndarray
    nodes: np.ndarray
    closed: torch.Tensor | None


@dataclass(frozen=True)
class Inputs:
    """What a pass reads.

    Attributes:
        rows: Where the rows of its texts lie.
        tokens: [rows].
        wanted: Rows whose logits are.
        choosing: How they choose their tokens, None where logits alone are wanted.
        batch: Whose segments may have tokens that the host does not know, None where it knows all.
    """

    rows: TextRows
    tokens: np.ndarray
    wanted: np.ndarray
    choosing: Choosing | None = None
    batch: Batch | None = None


class StaticPass:
    """The passes of one shape; rows beyond a pass's own belong to no text, and no text reads their page.

    Inputs lie one after another in one buffer of int32, filled by one copy: tokens and positions [rows], wanted
    [outputs], the rows whose logits are; and what attention goes by, see `Layout`.

    Args:
        model: The model.
        pool: Where the texts' pages are.
        shape: Sizes.
        angles: By rotation, see `angles`.
        memory: None where nothing is captured.
        logits: [outputs, vocab] that passes write to.

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
        memory: Memory | None,
        logits: torch.Tensor,
    ) -> None:
        config = model.config
        self.shape, self._pool, self._angles = shape, pool, angles
        self._captured: Captured[Result] = Captured(shape, model.device, memory)
        self._windows = windows_of(config)
        group = config.num_heads // config.num_kv_heads
        tile_rows = rows_of_tile(-(-shape.rows // shape.texts), group, model.dtype)
        words, kinds = shape.tentative // BITS, len(self._windows)
        self.layout = Layout(shape.rows, words, kinds, shape.texts + shape.rows // tile_rows, tile_rows)
        # What is of 64 bits lies first.
        self._wide = [shape.rows] * _wide_columns(shape.choice)
        self._sizes = [2 * sum(self._wide), shape.rows, shape.rows, shape.outputs, self.layout.size]
        self._inputs = torch.zeros(sum(self._sizes), dtype=torch.int32, device=pool.device)
        self._logits = logits
        self._closed: torch.Tensor | None = None

    def fill(self, inputs: Inputs) -> None:
        """Write the inputs of a pass, over pages with room for it."""
        # Pinned memory is not handed out again before the copy from it is done, so no pass waits for another.
        pinned = self._captured.memory is not None
        host = torch.zeros(len(self._inputs), dtype=torch.int32, pin_memory=pinned, device="cpu")
        wide, tokens, positions, wanted, rest = (field.numpy() for field in host.split(self._sizes))
        count, choosing = len(inputs.tokens), inputs.choosing
        tokens[:count], positions[:count] = inputs.tokens, inputs.rows.positions
        wanted[: len(inputs.wanted)] = inputs.wanted
        self.layout.fill(rest, inputs.rows, self.places, self._windows)
        if choosing is not None:
            self._closed = choosing.closed
            columns = wide.view(np.int64).reshape(len(self._wide), -1)
            own, kinds = columns[:, :count], len(choosing.settings)
            # Rows beyond the pass's own choose, too: 1 is a setting of every kind.
            columns[1 : 1 + kinds].view(np.float64)[:] = 1.0
            own[0], own[1 : 1 + kinds] = choosing.keys, choosing.settings.view(np.int64)
            if choosing.nodes.size:
                # Rows beyond the pass's own are roots.
                columns[-1] = np.arange(self.shape.rows)
                own[-2:] = choosing.nodes
        self._inputs.copy_(host, non_blocking=True)
        inputs.rows.see_there(self.layout.fields(self._inputs.split(self._sizes)[-1])[4])
        if inputs.batch is not None:
            first = self._sizes[0]
            known = self._inputs[first : first + count]
            if (tokens_here := inputs.batch.with_chosen(known)) is not known:
                known.copy_(tokens_here)

    def run(self, model: Transformer) -> Result:
        """Logits [outputs, vocab] of the wanted rows, tapped states [rows, hidden] and what rows choose.

        What follows what the pass has is void.
        """
        wide, tokens, positions, wanted, rest = self._inputs.split(self._sizes)
        tables = self._pool.tables(model.config.cache_layers, model.config.num_kv_heads)
        rows = PagedRows(self.layout, rest, self._pool, tables)
        step = StaticStep(model, rows, self._windows, positions.long(), self._angles)
        hooks = Hooks.reading(self.shape.taps)
        hidden = hooks.visit(HookPoint("residual", 0), model.embed_tokens(tokens.long()))
        hidden = model.blocks(hidden, step, layer_steps(WHOLE, model.config.num_layers), hooks)
        logits = self._logits.copy_(model.head(hidden[wanted.long()]))
        return logits, dict(hooks.states), self._chosen(logits, wide)

    def _chosen(self, logits: torch.Tensor, wide: torch.Tensor) -> torch.Tensor | None:
        """See `Choice.answer`; None where nothing is to be chosen."""
        if (choice := self.shape.choice) is None:
            return None
        if self._closed is not None:
            logits.index_fill_(1, self._closed, -torch.inf)
        columns, kinds = wide.view(torch.int64).view(len(self._wide), -1), len(choice.kinds)
        settings, nodes = columns[1 : 1 + kinds].view(torch.float64), columns[1 + kinds :]
        rows = logits.float()
        return choice.answer(rows, choice.picks(rows, columns[0], settings), nodes)

    def replay(self, model: Transformer) -> Result:
        """The same by one launch; the first call captures it."""
        return self._captured.replay(partial(self.run, model))


class StaticStep:
    """What all layers of one static pass share: rotation angles, and the rows.

    Args:
        model: The model.
        rows: The rows on the device.
        windows: By the number of their kind.
        positions: [rows] int64.
        angles: By rotation, see `angles`.
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


def angles(model: Transformer, positions: int) -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines [positions, 1, head_dim / 2], by whether layers turn as windowed ones do."""
    config, found = model.config, dict[bool, tuple[torch.Tensor, torch.Tensor]]()
    for layer in range(config.num_layers):
        if (local := config.turns_locally(layer)) not in found:
            cos, sin = model.angle_table(config.layer_rope(layer), positions)
            found[local] = cos[:, None].to(model.dtype), sin[:, None].to(model.dtype)
    return found


def _wide_columns(choice: Choice | None) -> int:
    """Numbers of 64 bits of each row: of its noise, settings, and its token and parent where rows are drafted."""
    return 0 if choice is None else 1 + len(choice.kinds) + 2 * (choice.doublings >= 0)
