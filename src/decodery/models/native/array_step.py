"""Whole steps of many texts in one native call: the arrays that they are kept in, and the call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.native.kernels import address, check, library
from decodery.core.native.structs import SegmentStruct
from decodery.core.threads import one_thread

from ..batch import Segment
from ..cache.open_rows import OpenRows
from ..layer_plan import WHOLE, layer_steps
from ..step_arrays import StepArrays
from ..torch_state import in_plain_state
from .experts import distinct
from .stack import NativeStack
from .walk import NativeRows

if TYPE_CHECKING:
    from ..tokenizers.vocabularies import Padding
    from ..torch.transformer import Transformer

_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""What embeddings are made of, by the number of `Numbers` in csrc/abi.h."""
_ROWS_OF_BLOCKS = 4
_STOPPED, _WAITING = 2, 3
"""What a step returns where experts are to be laid out, and where texts wait for masks."""


class ArraySteps(StepArrays):
    """Texts in arrays, and their steps by native kernels.

    Args:
        model: A transformer that runs on native kernels.
        stack: Its layers.
        padding: Ids that no text is to choose.
    """

    def __init__(self, model: Transformer, stack: NativeStack, padding: Padding | None) -> None:
        super().__init__(model.config.vocab_size, padding)
        self._model, self._stack, self._config = model, stack, model.config
        self._lib = library()
        assert self._lib is not None
        self._mask_room = 0
        self._model_at = stack.address
        self._segments: Any = None
        self._described: list[object] = []
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._known_positions = 0
        order, marks, _ = self._plan = stack.plan(layer_steps(WHOLE, self._config.num_layers))
        step = self._struct
        self._states: dict[int, torch.Tensor] = {}
        self._taps = (ctypes.c_void_p * self._config.num_layers)()
        step.passed.run, step.passed.marks = ctypes.addressof(order), ctypes.addressof(marks)
        step.passed.taps = ctypes.addressof(self._taps)
        step.passed.run_count = self._config.num_layers
        step.sampling.limit = self._config.vocab_size
        if padding is not None:
            self._others = np.ascontiguousarray(padding.others, dtype=np.int64)
            step.sampling.limit = min(padding.first, self._config.vocab_size)
            step.sampling.padding, step.sampling.padding_count = (
                address(self._others, np.int64, None),
                len(self._others),
            )
        self._mixing = [layer for layer in range(self._config.num_layers) if self._config.mixes(layer)]
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
        if texts <= self._room and rows <= self._row_room and squares <= self._mask_room:
            return
        if texts > self._room:
            segments = (SegmentStruct * max(texts, 2 * self._room))()
            if self._segments is not None:
                ctypes.memmove(segments, self._segments, ctypes.sizeof(self._segments))
            self._segments = segments
            self._described += [None] * (len(segments) - len(self._described))
        if squares > self._mask_room:
            self._mask_room = 2 * squares
            self._masks = np.empty(self._mask_room, dtype=np.uint8)
        super().grow(texts, rows, squares)

    def _widen_rows(self) -> None:
        config, half = self._config, self._config.head_dim // 2
        taken = config.num_layers * self._row_room * config.experts_per_token
        self._took = np.empty(taken, dtype=np.int32)
        self._hidden = np.empty((self._row_room, config.hidden_size), dtype=np.float32)
        self._logits = torch.empty(self._row_room, config.vocab_size, dtype=torch.float32, device="cpu")
        self._angles = np.empty((4, self._row_room, half), dtype=np.float32)
        self._states = {depth: self._like_rows() for depth in self._states}

    def _like_rows(self) -> torch.Tensor:
        return torch.empty(self._row_room, self._config.hidden_size, dtype=torch.float32, device="cpu")

    def tap(self, depths: Collection[int]) -> None:
        if set(depths) != set(self._states):
            self._states = {depth: self._like_rows() for depth in sorted(depths)}
            self._keep_states()

    def _keep_states(self) -> None:
        """Let the layers write what is kept of the residual stream."""
        self.hidden = dict(self._states)
        for layer in range(self._config.num_layers):
            kept = self._states.get(layer + 1)
            self._taps[layer] = None if kept is None else address(kept, torch.float32, None, self._config.hidden_size)

    def _point(self) -> None:
        super()._point()
        step, half = self._struct, self._config.head_dim // 2
        self._choose_by(self._logits)
        self._keep_states()
        step.masks = address(self._masks, np.uint8, None)
        step.passed.hidden = address(self._hidden, np.float32, None, self._config.hidden_size)
        step.passed.segments = self._segments
        if self._config.experts:
            step.passed.took = address(self._took, np.int32, None)
        for kind in range(2):
            step.passed.cos[kind] = address(self._angles[2 * kind], np.float32, None, half)
            step.passed.sin[kind] = address(self._angles[2 * kind + 1], np.float32, None, half)

    def _choose_by(self, logits: torch.Tensor) -> None:
        """Choose tokens by these logits [rows, vocab]."""
        self.logits = logits
        self._struct.sampling.logits = address(logits, torch.float32, None, self._config.vocab_size)

    def turn_to(self, positions: int) -> None:
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
        self._described[text] = rows.describe(self._segments[text])

    def forget(self) -> None:
        self._described = [None] * self._room

    def _move(self, places: Ordered[int]) -> None:
        texts = len(places)
        segments = np.frombuffer(self._segments, dtype=np.uint8).reshape(self._room, -1)
        segments[:texts] = segments[places]
        described = [None if place < 0 else self._described[place] for place in places]
        self._described = described + [None] * (self._room - texts)

    def run(self) -> None:
        assert self._lib is not None
        if self._table is None:
            self._lib.decodery_prepare(self._model_at, self._at)
            self._embed()
        if self.logits is not self._logits:
            self._choose_by(self._logits)
            self.hidden = dict(self._states)
        passed = self._struct.passed
        passed.stopped = 0
        while (code := self._lib.decodery_step(self._model_at, self._at)) == _STOPPED:
            self._stack.experts[passed.next].lay_out(np.unique(self._taken()[passed.next]).tolist())
        self.awaits_masks = code == _WAITING
        check(code if code != _WAITING else 0)

    def _taken(self) -> np.ndarray:
        """[layers, rows, experts per token] the experts that rows took in the last step."""
        shape = self._config.num_layers, self.rows, self._config.experts_per_token
        return self._took[: math.prod(shape)].reshape(shape)

    @property
    def experts(self) -> np.ndarray | None:
        if not self._config.experts:
            return None
        taken = self._taken()[self._mixing]
        if self.rows == self.texts:
            return np.full(self.texts, taken.shape[0] * taken.shape[2])
        bounds = zip(self.first[: self.texts], self.first[1 : self.texts + 1], strict=True)
        return np.array([distinct(taken[:, first:end].reshape(len(taken), -1)) for first, end in bounds])

    def segments(self) -> list[Segment]:
        assert self._lib is not None
        self._lib.decodery_prepare(self._model_at, self._at)
        structs = self._segments[: self.texts]
        rows = NativeRows(self.positions[: self.rows], self.tokens[: self.rows], structs=structs, took=self._taken())
        return [rows]

    def choose(self, logits: torch.Tensor) -> None:
        assert self._lib is not None
        self._choose_by(logits)
        self._struct.sampling.waiting = 0
        self.go_on()

    def go_on(self) -> None:
        assert self._lib is not None
        code = self._lib.decodery_choose_tokens(self._model_at, self._at)
        self.awaits_masks = code == _WAITING
        check(code if code != _WAITING else 0)

    def keep(self, text: int) -> None:
        assert self._lib is not None
        self._lib.decodery_keep(self._model_at, self._at, text)

    @in_plain_state
    @one_thread()
    def _embed(self) -> None:
        rows = self._model.embed_tokens(torch.from_numpy(self.tokens[: self.rows]))
        self._hidden[: self.rows] = rows.float().numpy()
