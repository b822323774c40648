"""Whole steps of many texts in one native call: the arrays that they are kept in, and the call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.native.kernels import address, check, library
from decodery.core.native.structs import ArrayStepStruct, SegmentStruct
from decodery.core.threads import one_thread

from ..cache.open_rows import OpenRows
from ..layer_plan import WHOLE, layer_steps
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
_STOPPED = 2
"""What a step returns where experts are to be laid out."""
_FEW = 16
"""Rows that there is room for at least: drafts of one text come and go."""
_OF_TEXTS: dict[str, type[np.generic]] = {
    "last": np.int64, "next": np.int64, "ends": np.int64, "seeds": np.uint64, "drawn": np.int64,
    "processors": np.uint64, "processor_counts": np.int32, "greedy": np.uint8, "accepted": np.int32,
    "chosen": np.int64, "sizes": np.int32, "kept": np.int32, "choice_counts": np.int32,
}  # fmt: skip
_OF_ROWS: dict[str, type[np.generic]] = {
    "tokens": np.int64, "parents": np.int32, "positions": np.int64, "depths": np.int32, "paths": np.int32,
    "emitted": np.int64,
}  # fmt: skip
_OF_SAMPLING = (
    "tokens", "parents", "seeds", "processors", "processor_counts", "greedy", "paths", "accepted", "chosen",
)  # fmt: skip
_OF_STEP = ("last", "next", "ends", "positions", "depths", "sizes", "emitted", "kept", "choice_counts")


class ArraySteps:
    """Texts in arrays, and their steps.

    Args:
        model: A transformer that runs on native kernels.
        texts, rows: How many texts there are, and rows of their trees.
        last: [texts] the last token of each text.
        next: [texts] the position it stands at.
        ends: [texts] the last such position from which there is room for another step.
        seeds, drawn: [texts] what hashes the noise of the next token: the text's seed and output position.
        processors, processor_counts, greedy: [texts] how tokens are chosen, see `Sampling` in csrc/abi.h.
        sizes: [texts] the nodes of each text's tree, its root included; 1 for its last token alone.
        drafts: [2 (tokens, parents), texts, stride] those of trees with more; roots need not be written.
        first: [texts + 1] the first row of each text in the last step.
        tokens, parents: [rows] the nodes of the trees.
        accepted, chosen, paths: What became of a step, see `Sampling`.
        emitted, kept, choices, choice_counts: What each text goes on by, see `ArrayStep`.
        logits: [rows, vocab] of the last step, the model's own.
    """

    last: np.ndarray
    next: np.ndarray
    ends: np.ndarray
    seeds: np.ndarray
    drawn: np.ndarray
    processors: np.ndarray
    processor_counts: np.ndarray
    greedy: np.ndarray
    accepted: np.ndarray
    chosen: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    choice_counts: np.ndarray
    emitted: np.ndarray
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
        self.drafts = np.zeros((2, 1, 1), dtype=np.int64)
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
        """Have room for so many texts, rows of their trees, and pairs of rows of one tree."""
        if texts <= self._room and rows <= self._row_room and squares <= self._mask_room:
            return
        if texts > self._room:
            self._room = max(texts, 2 * self._room)
            for name, dtype in _OF_TEXTS.items():
                setattr(self, name, _longer(getattr(self, name, None), self._room, dtype))
            # A list of these is made in half the time that numpy takes.
            self._chosen = (ctypes.c_int64 * self._room).from_address(address(self.chosen, np.int64, None))
            self.first = _longer(self.first, self._room + 1, np.int32)
            segments = (SegmentStruct * self._room)()
            if self._segments is not None:
                ctypes.memmove(segments, self._segments, ctypes.sizeof(self._segments))
            self._segments = segments
            self._described += [None] * (self._room - len(self._described))
        if rows > self._row_room:
            self._row_room = max(rows, 2 * self._row_room, _FEW)
            for name, dtype in _OF_ROWS.items():
                setattr(self, name, _longer(getattr(self, name, None), self._row_room, dtype))
            config, half = self._config, self._config.head_dim // 2
            self.choices = np.zeros((self._row_room, 2), dtype=np.int32)
            taken = config.num_layers * self._row_room * config.experts_per_token
            self._took = np.empty(taken, dtype=np.int32)
            self._hidden = np.empty((self._row_room, config.hidden_size), dtype=np.float32)
            self._logits = torch.empty(self._row_room, config.vocab_size, dtype=torch.float32, device="cpu")
            self._angles = np.empty((4, self._row_room, half), dtype=np.float32)
        if squares > self._mask_room:
            self._mask_room = 2 * squares
            self._masks = np.empty(self._mask_room, dtype=np.uint8)
        self.widen(self.drafts.shape[2])
        self._point()

    def widen(self, nodes: int) -> None:
        """Have room for trees of so many nodes, roots included; what was drafted is gone."""
        if nodes > self.drafts.shape[2] or self._room > self.drafts.shape[1]:
            self.drafts = np.zeros((2, self._room, max(nodes, self.drafts.shape[2])), dtype=np.int64)
        self._struct.drafts = address(self.drafts, np.int64, 2, None, None)
        _, self._struct.room, self._struct.stride = self.drafts.shape

    def _point(self) -> None:
        """Write into the struct where everything lies."""
        step, sampling, half = self._struct, self._struct.sampling, self._config.head_dim // 2
        places = {
            name: address(getattr(self, name), dtype, None) for name, dtype in (*_OF_TEXTS.items(), *_OF_ROWS.items())
        }
        for name in _OF_STEP:
            setattr(step, name, places[name])
        for name in _OF_SAMPLING:
            setattr(sampling, name, places[name])
        sampling.positions = places["drawn"]
        sampling.first = address(self.first, np.int32, None)
        step.choices = address(self.choices, np.int32, None, 2)
        self._choose_by(self._logits)
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

    def hold(self, texts: int, places: Ordered[int] = ()) -> None:
        """Have so many texts, each with one row: its last token.

        Args:
            texts: How many.
            places: [texts] the number that each of them has had so far, -1 where it is new and is to be written; by
                default all are new.
        """
        self.grow(texts, texts, texts)
        self.texts = texts
        places = places or [-1] * texts
        if places != list(range(texts)):
            for name in _OF_TEXTS:
                array = getattr(self, name)
                array[:texts] = array[places]
            segments = np.frombuffer(self._segments, dtype=np.uint8).reshape(self._room, -1)
            segments[:texts] = segments[places]
            described = [None if place < 0 else self._described[place] for place in places]
            self._described = described + [None] * (self._room - texts)
        self.sizes[:texts] = 1
        self.count()

    def draft(self, text: int, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Let one text have a tree: its tokens and parents [nodes], the root's first."""
        nodes = len(tokens)
        self.sizes[text], self.drafts[0, text, :nodes], self.drafts[1, text, :nodes] = nodes, tokens, parents

    def count(self, drafted: int = 0) -> None:
        """Have room for all rows of the step.

        Args:
            drafted: How many rows all texts have beyond one each.
        """
        self.rows = self.texts + drafted
        if drafted:
            # No trees of so many nodes have more pairs than one of them all.
            self.grow(self.texts, self.rows, self.texts + (drafted + 1) ** 2)
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
        if self.logits is not self._logits:
            self._choose_by(self._logits)
        passed = self._struct.passed
        passed.stopped = 0
        while (code := self._lib.decodery_step(self._model_at, self._at)) == _STOPPED:
            self._stack.experts[passed.next].lay_out(np.unique(self._taken()[passed.next]).tolist())
        check(code)

    def _taken(self) -> np.ndarray:
        """[layers, rows, experts per token] the experts that rows took in the last step."""
        shape = self._config.num_layers, self.rows, self._config.experts_per_token
        return self._took[: math.prod(shape)].reshape(shape)

    @property
    def experts(self) -> np.ndarray | None:
        """[texts] of all layers together, how many experts the rows of each text had read in the last step.

        None where layers have no experts.
        """
        if not self._config.experts:
            return None
        taken = self._taken()[self._mixing]
        if self.rows == self.texts:
            return np.full(self.texts, taken.shape[0] * taken.shape[2])
        bounds = zip(self.first[: self.texts], self.first[1 : self.texts + 1], strict=True)
        return np.array([distinct(taken[:, first:end].reshape(len(taken), -1)) for first, end in bounds])

    def segment(self) -> NativeRows:
        """The rows of all texts, for a pass that they share with others: to be its last segment.

        `choose` ends the step.
        """
        assert self._lib is not None
        self._lib.decodery_prepare(self._model_at, self._at)
        return NativeRows(
            self.positions[: self.rows],
            self.tokens[: self.rows],
            structs=self._segments[: self.texts],
            took=self._taken(),
        )

    def choose(self, logits: torch.Tensor) -> None:
        """Choose tokens by the logits [rows, vocab] of a pass over `segment`, and keep the rows that stay.

        Raises:
            OutOfMemory: And then nothing has changed.
        """
        assert self._lib is not None
        self._choose_by(logits)
        check(self._lib.decodery_choose_tokens(self._model_at, self._at))

    def keep(self, text: int) -> None:
        """Keep the rows of one text, whose `accepted`, `paths` and `chosen` Python has written."""
        assert self._lib is not None
        self._lib.decodery_keep(self._model_at, self._at, text)

    @property
    def has_room(self) -> bool:
        """Whether there is room for another step of every text, as the last step left them."""
        return not self._struct.full

    def stand(self) -> None:
        """Count where texts stand after `next` was written."""
        self._struct.reach = int(self.next[: self.texts].sum())

    def without_room(self) -> list[int]:
        """The numbers of the texts without room for another step, which the caller gives some."""
        self._struct.full = 0
        return np.flatnonzero(self.next[: self.texts] > self.ends[: self.texts]).tolist()

    def chosen_tokens(self) -> list[int]:
        """What `chosen` holds."""
        return self._chosen[: self.texts]

    @property
    def reach(self) -> int:
        """The sum of the positions at which the texts' last tokens stand, after the last step."""
        reach: int = self._struct.reach
        return reach

    @property
    def plain(self) -> bool:
        """Whether the last step gave one token to each text, without any drafts."""
        return bool(self._struct.plain)

    @property
    def address(self) -> int:
        """Where the `ArrayStep` of csrc/abi.h stands, as long as this object lives."""
        return self._at

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
