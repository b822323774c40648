"""A draft head of one layer in one native call: from the target's states to the words it would say."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from ctypes import POINTER, Array, addressof, c_float, c_int32, c_int64, c_void_p, cast
from typing import Any, NamedTuple

import numpy as np
import torch

from decodery.core.errors import NumericalError
from decodery.core.native.kernels import address, check, library
from decodery.core.native.structs import (
    DraftStruct,
    GuessStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    PassStruct,
    SegmentStruct,
)
from decodery.core.threads import one_thread
from decodery.models.cache.page_pool import MappedPool
from decodery.models.native.packed import Arena, Packed, packed_size
from decodery.models.protocol import Reader
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import QUANTIZED, Linear

from .parts import DecoderLayer, Held

_LINEARS = ("qkv", "output", "gate_up", "down")
_ONLY = (c_int32 * 1)(0)
"""The layers of the pass, and what is left out of them: the first one, and nothing."""
_ANGLES = 512
"""Positions whose angles are worked out at first."""
_STRANGE = 2


class Guessed(NamedTuple):
    """Features [n, hidden], logits [n, outputs] and the most likely tokens of the requested rows.

    Tokens come with probabilities, row by row, as many as were requested.
    """

    features: torch.Tensor
    logits: torch.Tensor
    ids: list[int]
    chances: list[float]


class NativeRows(NamedTuple):
    """Rows of one text.

    Attributes:
        given: Where float32 numbers [hidden] lie, for every row its feature, or the states of every depth.
        tokens, positions: Of the rows.
        mask: [n, tentative rows + n], of a tree; None: the rows are text, in order.
    """

    held: Held
    given: list[int]
    tokens: Ordered[int]
    positions: Ordered[int]
    mask: np.ndarray | None = None


class NativeHead:
    """The layer of a head, what enters it and what leaves it, for the kernels.

    What attention reads is a token's embedding, normed by `token_norm`, beside a feature, normed by `feature_norm`;
    where `norm_first` is set the residual stream begins with the normed feature, else with the feature. Norms: [hidden]
    each.

    Args:
        enter: States side by side to features.
        words: Features, normed by `norm`, to logits.
        embed: Ids [n] to embeddings [n, hidden].
        table: [vocab, hidden], which has them all, None where they are made.
        vocabulary: [outputs] int32, the tokens that the words are; None: all of them.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        enter: Linear,
        words: Linear,
        norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        norm_first: bool,
        embed: Callable[[torch.Tensor], torch.Tensor],
        table: torch.Tensor | None,
        vocabulary: torch.Tensor | None,
    ) -> None:
        shape = self.shape = layer.shape
        self._layer, self._embed, self._table = layer, embed, table
        self._vocabulary = None if vocabulary is None else vocabulary.to(torch.int32).contiguous()
        self._tables = (
            torch.empty(0, 0, dtype=torch.float32, device="cpu"),
            torch.empty(0, 0, dtype=torch.float32, device="cpu"),
        )
        # In the order they are read in.
        linears: dict[str, Any] = {"enter": enter}
        linears |= {name: layer.parts.linear(f"{layer.prefix}{name}") for name in _LINEARS}
        linears["words"] = words
        sizes = [packed_size(each, gated=name == "gate_up") for name, each in linears.items()]
        arena = Arena(sum(sizes))
        packed = {name: Packed(each, arena, gated=name == "gate_up") for name, each in linears.items()}
        kept = [each.detach().float().contiguous() for each in (layer.parts[f"{layer.prefix}mlp_norm.weight"], *norms)]
        mlp_norm, token_norm, feature_norm, norm = (address(each, torch.float32, shape.hidden) for each in kept)
        made = LayerStruct(*(packed[name].struct for name in _LINEARS), None, mlp_norm)
        layers = (LayerStruct * 1)(made)
        self.outputs = packed["words"].outputs
        model = ModelStruct(
            layers, norm, packed["words"].struct, shape.hidden, shape.inner, shape.heads, shape.kv_heads,
            shape.head_dim, 0, shape.eps, shape.head_dim**-0.5,
        )  # fmt: skip
        entered: LinearStruct = packed["enter"].struct
        self._draft = DraftStruct(
            model, entered, token_norm, feature_norm, entered.inputs // shape.hidden, int(norm_first)
        )
        self._alive = [packed, kept, layers]

    @staticmethod
    def runs(layer: DecoderLayer, linears: Ordered[Linear]) -> bool:
        """Whether the kernels can run a head of this layer with these linear layers beside it."""
        own = [layer.parts.linear(f"{layer.prefix}{name}") for name in _LINEARS]
        whole = all(isinstance(each, QUANTIZED) for each in (*own, *linears))
        shape, others = layer.shape, ("q_norm", "out_gate")
        plain = shape.window is shape.sliding is None and not shape.rotated
        plain = plain and not any(f"{layer.prefix}{name}.weight" in layer.parts for name in others)
        return whole and plain and library() is not None

    def __call__(self, texts: Ordered[NativeRows], *, entering: bool, k: int = 0) -> Guessed:
        """Rows of several texts after what is held of each, in one pass.

        Args:
            entering: Whether states are given, one per depth; then the last row of every text answers, else all rows.
            k: Most likely tokens per answer.
        """
        lib = library()
        assert lib is not None
        tokens = [token for each in texts for token in each.tokens]
        rows, narrow, alive = self._embedded(tokens)
        cos, sin = self._angles(max(max(each.positions) for each in texts) + 1)
        segments, kept = (SegmentStruct * len(texts))(), []
        for number, each in enumerate(texts):
            segments[number], own = self._segment(each)
            kept.append(own)
        ends = np.cumsum([len(each.tokens) for each in texts], dtype=np.int32)
        said = ends - 1
        spoken = len(texts) if entering else len(tokens)
        passed = PassStruct(None, cast(segments, POINTER(SegmentStruct)), addressof(_ONLY), addressof(_ONLY))
        passed.rows, passed.segment_count, passed.run_count = len(tokens), len(texts), 1
        features, logits = (
            torch.empty(spoken, self.shape.hidden, dtype=torch.float32, device="cpu"),
            torch.empty(spoken, self.outputs, dtype=torch.float32, device="cpu"),
        )
        ids, chances = (c_int32 * (spoken * k))(), (c_float * (spoken * k))()
        given = [place for each in texts for place in each.given]
        states = (c_void_p * len(given))(*given)
        tables = (address(each, torch.float32, None, self.shape.head_dim // 2) for each in (cos, sin))
        made = (address(each, torch.float32, spoken, None) for each in (features, logits))
        words = None if self._vocabulary is None else address(self._vocabulary, torch.int32, self.outputs)
        guess = GuessStruct(
            passed, addressof(states), addressof(rows), *tables, *made, words,
            address(said, np.int32, len(texts)) if entering else None, addressof(ids), addressof(chances), entering,
            narrow, spoken, k,
        )  # fmt: skip
        code = lib.decodery_draft(addressof(self._draft), addressof(guess))
        del alive, kept
        if code == _STRANGE:
            raise NumericalError("a draft head's logits hold NaN: the model's states do, or train the head again")
        check(code)
        for each in texts:
            each.held.wrote(len(each.tokens), text=each.mask is None)
        return Guessed(features, logits, ids[:], chances[:])

    def _segment(self, rows: NativeRows) -> tuple[SegmentStruct, object]:
        """The rows of a text in the pass, with room for them, and what keeps their memory."""
        held, n = rows.held, len(rows.tokens)
        first = held.reserve(n, text=rows.mask is None)
        seen = None if rows.mask is None else np.ascontiguousarray(rows.mask)
        stays = first - held.length
        pool, table = held.pages.pool, held.pages.whole_table
        assert isinstance(pool, MappedPool) and pool.dtype == torch.float32
        length, places = c_int64(held.length), (c_int64 * n)(*rows.positions)
        segment = SegmentStruct(
            pool.base, address(table, np.int32, 1, self.shape.kv_heads, None), addressof(length), None,
            addressof(places), None if seen is None else address(seen, np.bool_, n, stays + n), pool.page_bytes,
            0, table.shape[2], 0, 0, 0, 0, n, stays, 0, table.shape[2],
        )  # fmt: skip
        return segment, (seen, table, length, places)

    def _embedded(self, tokens: Ordered[int]) -> tuple[Array[c_void_p], bool, object]:
        """Where the embeddings of tokens lie, whether they are in bfloat16, and what keeps them there."""
        table = self._table
        if table is None:
            with torch.no_grad(), one_thread():
                table = self._embed(torch.tensor(tokens, dtype=torch.int64, device="cpu")).float().contiguous()
            tokens = range(len(tokens))
        narrow = table.dtype == torch.bfloat16
        places = places_of(table, tokens, torch.bfloat16 if narrow else torch.float32)
        return (c_void_p * len(tokens))(*places), narrow, table

    def _angles(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [at least `end`, head_dim / 2]."""
        if end > len(self._tables[0]):
            positions = torch.arange(max(end, 2 * len(self._tables[0]), _ANGLES), device="cpu")
            cos, sin = self._layer.angles(positions)
            # Both change places at once: another thread may be about to read them.
            self._tables = cos.float(), sin.float()
        return self._tables


def places_of(rows: torch.Tensor, which: Ordered[int], dtype: torch.dtype = torch.float32) -> list[int]:
    """Where rows of [n, width] lie; each is contiguous.

    Raises:
        IndexError: For a row that is not there.
    """
    begin, apart = address(rows, dtype, None, None, apart=True), rows.stride(0) * rows.itemsize
    if which and not 0 <= min(which) <= max(which) < len(rows):
        raise IndexError(f"rows {list(which)} are not all among {len(rows)}")
    return [begin + apart * row for row in which]


def plain_embeddings(model: Reader) -> torch.Tensor | None:
    """[vocab, hidden], where a model takes its embeddings from one table as they are."""
    if not isinstance(model, Transformer) or model.weights.kept is not None or model.config.embedding_scale != 1.0:
        return None
    table = model.weights.embedding
    return table if table.dtype in (torch.float32, torch.bfloat16) and table.is_contiguous() else None
