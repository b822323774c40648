"""Whole steps of many texts in one native call: the arrays that they are kept in, and the call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.native.kernels import ArrayStepStruct, SegmentStruct, address, check, library
from decodery.core.threads import one_thread

from ..cache.open_rows import OpenRows
from ..layer_plan import WHOLE, layer_steps
from ..torch_state import in_plain_state
from .stack import NativeStack

if TYPE_CHECKING:
    from ..tokenizers.vocabularies import Padding
    from ..torch.transformer import Transformer

_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""What embeddings are made of, by the number of `Numbers` in csrc/abi.h."""
_ROWS_OF_BLOCKS = 4
_OF_TEXTS: dict[str, type[np.generic]] = {
    "last": np.int64, "next": np.int64, "seeds": np.uint64, "drawn": np.int64, "processors": np.uint64,
    "processor_counts": np.int32, "greedy": np.uint8, "accepted": np.int32, "chosen": np.int64,
}  # fmt: skip
_OF_ROWS: dict[str, type[np.generic]] = {
    "tokens": np.int64, "parents": np.int32, "positions": np.int64, "depths": np.int32, "paths": np.int32,
}  # fmt: skip


class ArraySteps:
    """Texts in arrays, and their steps.

    Args:
        model: A transformer that runs on native kernels.
        texts, rows: How many texts there are, and rows of their trees.
        last: [texts] the last token of each text.
        next: [texts] the position it stands at.
        seeds, drawn: [texts] what hashes the noise of the next token: the text's seed and output position.
        processors, processor_counts, greedy: [texts] how tokens are chosen, see `Sampling` in csrc/abi.h.
        first: [texts + 1] the first row of each text.
        tokens, parents: [rows] the nodes of their trees; roots are written by the step.
        accepted, chosen, paths: What became of a step, see `Sampling`.
        logits: [rows, vocab] of the last step, the model's own.
    """

    last: np.ndarray
    next: np.ndarray
    seeds: np.ndarray
    drawn: np.ndarray
    processors: np.ndarray
    processor_counts: np.ndarray
    greedy: np.ndarray
    accepted: np.ndarray
    chosen: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    positions: np.ndarray
    depths: np.ndarray
    paths: np.ndarray

    def __init__(self, model: Transformer, stack: NativeStack, padding: Padding | None) -> None:
        self.texts = self.rows = 0
        self._model, self._stack, self._config = model, stack, model.config
        self._lib = library()
        assert self._lib is not None
        self._room = self._row_room = self._mask_room = 0
        self._struct = ArrayStepStruct()
        self._at = ctypes.addressof(self._struct)
        self._model_at = stack.address
        self.first = np.zeros(1, dtype=np.int32)
        self._segments: Any = None
        self._described: list[object] = []
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._known_positions = 0
        order, marks, taps = self._plan = stack.plan(layer_steps(WHOLE, self._config.num_layers))
        step = self._struct
        step.passed.run, step.passed.marks, step.passed.taps = (ctypes.addressof(each) for each in (order, marks, taps))
        step.passed.run_count = self._config.num_layers
        step.sampling.vocab = step.sampling.limit = self._config.vocab_size
        if padding is not None:
            self._padding = np.ascontiguousarray(padding.others, dtype=np.int64)
            step.sampling.limit = min(padding.first, self._config.vocab_size)
            step.sampling.padding, step.sampling.padding_count = (
                address(self._padding, np.int64, None),
                len(self._padding),
            )
        self._table = model.table
        step.scale = self._config.embedding_scale
        if isinstance(self._table, torch.Tensor):
            step.table = address(self._table, self._table.dtype, None, self._config.hidden_size)
            step.numbers = _NUMBERS[self._table.dtype]
        elif self._table is not None:
            self._places = self._table.addresses
            step.table, step.numbers = address(self._places, np.uint64, None), _ROWS_OF_BLOCKS
            step.blocks = self._table.number
        self.grow(1, 1, 1)

    def grow(self, texts: int, rows: int, squares: int) -> None:
        """Have room for so many texts, rows of their trees, and pairs of rows of one tree."""
        if texts > self._room:
            self._room = max(texts, 2 * self._room)
            for name, dtype in _OF_TEXTS.items():
                setattr(self, name, _longer(getattr(self, name, None), self._room, dtype))
            self.first = _longer(self.first, self._room + 1, np.int32)
            segments = (SegmentStruct * self._room)()
            if self._segments is not None:
                ctypes.memmove(segments, self._segments, ctypes.sizeof(self._segments))
            self._segments = segments
            self._described += [None] * (self._room - len(self._described))
        if rows > self._row_room:
            self._row_room = max(rows, self._row_room + self._row_room // 4)
            for name, dtype in _OF_ROWS.items():
                setattr(self, name, _longer(getattr(self, name, None), self._row_room, dtype))
            config, half = self._config, self._config.head_dim // 2
            self._hidden = np.empty((self._row_room, config.hidden_size), dtype=np.float32)
            self.logits = torch.empty(self._row_room, config.vocab_size, dtype=torch.float32, device="cpu")
            self._angles = np.empty((4, self._row_room, half), dtype=np.float32)
        if squares > self._mask_room:
            self._mask_room = 2 * squares
            self._masks = np.empty(self._mask_room, dtype=np.uint8)
        self._point()

    def _point(self) -> None:
        """Write into the struct where everything lies."""
        step, sampling, half = self._struct, self._struct.sampling, self._config.head_dim // 2
        places = {
            name: address(getattr(self, name), dtype, None) for name, dtype in (*_OF_TEXTS.items(), *_OF_ROWS.items())
        }
        for name in ("last", "next", "positions", "depths"):
            setattr(step, name, places[name])
        for name in (
            "tokens", "parents", "seeds", "processors", "processor_counts", "greedy", "paths", "accepted", "chosen",
        ):  # fmt: skip
            setattr(sampling, name, places[name])
        sampling.positions = places["drawn"]
        sampling.first = address(self.first, np.int32, None)
        sampling.logits = address(self.logits, torch.float32, None, self._config.vocab_size)
        step.masks = address(self._masks, np.uint8, None)
        step.passed.hidden = address(self._hidden, np.float32, None, self._config.hidden_size)
        step.passed.segments = self._segments
        for kind in range(2):
            step.passed.cos[kind] = address(self._angles[2 * kind], np.float32, None, half)
            step.passed.sin[kind] = address(self._angles[2 * kind + 1], np.float32, None, half)

    def turn_to(self, positions: int) -> None:
        """Know the angles of so many positions."""
        if positions <= self._known_positions:
            return
        ropes = [rope for rope in (self._config.rope, self._config.local_rope) if rope is not None]
        self._tables = [self._model.angle_table(rope, positions) for rope in ropes]
        for kind, (cos, sin) in enumerate(self._tables):
            half = self._config.head_dim // 2
            self._struct.cos[kind] = address(cos, torch.float32, None, half)
            self._struct.sin[kind] = address(sin, torch.float32, None, half)
        self._known_positions = min(len(cos) for cos, _ in self._tables)

    def describe(self, text: int, rows: OpenRows) -> None:
        """Write where the cache of a text lies."""
        self._described[text] = rows.describe(self._segments[text])

    def forget(self) -> None:
        """Let go of the caches: each text is described anew before the next step."""
        self._described = [None] * self._room

    def plain(self, texts: int) -> None:
        """Let each of so many texts have one row: its last token."""
        self.grow(texts, texts, texts)
        self.texts = self.rows = texts
        self.first[: texts + 1] = np.arange(texts + 1)
        self.parents[:texts] = -1
        self._count()

    def trees(self, sizes: list[int]) -> None:
        """Let texts have trees of so many nodes, which are written to `tokens` and `parents` next."""
        texts, rows = len(sizes), sum(sizes)
        self.grow(texts, rows, sum(size * size for size in sizes))
        self.texts, self.rows = texts, rows
        self.first[1 : texts + 1] = np.cumsum(sizes)
        self._count()

    def _count(self) -> None:
        passed, sampling = self._struct.passed, self._struct.sampling
        passed.rows, passed.segment_count, sampling.texts = self.rows, self.texts, self.texts

    def run(self) -> None:
        """One step of all texts: what their rows read, the pass, the choice of tokens, and the rows that stay.

        Raises:
            OutOfMemory: And then nothing has changed.
        """
        assert self._lib is not None
        if self._table is None:
            self._lib.decodery_prepare(self._model_at, self._at)
            self._embed()
        check(self._lib.decodery_step(self._model_at, self._at))

    def keep(self, text: int) -> None:
        """Keep the rows of one text, whose `accepted`, `paths` and `chosen` have been written."""
        assert self._lib is not None
        self._lib.decodery_keep(self._model_at, self._at, text)

    @in_plain_state
    @one_thread()
    def _embed(self) -> None:
        rows = self._model.embed_tokens(torch.from_numpy(self.tokens[: self.rows]))
        self._hidden[: self.rows] = rows.float().numpy()


def _longer(array: np.ndarray | None, size: int, dtype: type[np.generic]) -> np.ndarray:
    """An array of `size` numbers that begins with those of another."""
    longer = np.zeros(size, dtype=dtype)
    if array is not None:
        longer[: len(array)] = array
    return longer
