"""LongSpec: a head of constant memory that looks up the long past among the target's own keys and values."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch

from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.cache.cache import KVCache
from decodery.models.cache.own_caches import OwnCaches
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.attention import attend, rotate
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from ..heads.copied import copied_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import Guess, TrainedHead
from ..heads.parts import DecoderLayer, Held, LayerShape
from ..heads.reading import HeadReading
from ..heads.unrolled import teacher_attention

_ENTERING: Tap = -2
"""The residual stream before the last layer, of which its keys and values are made."""
_ANCHORS = 4


@dataclass(slots=True)
class _Memory:
    """held: the head's own keys and values of the last tokens. end: position of the last one.

    cache: the target's, where a text is being decoded; past: the keys and values of the target's last layer otherwise.
    """

    held: Held
    past: Held
    cache: KVCache | None = None
    end: int = -1

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        # Tentative rows do not follow a fork, and the cache is the target's to fork.
        clone = _Memory(deepcopy(self.held, memo), deepcopy(self.past, memo), self.cache, self.end)
        clone.held.rows = 0
        return clone


class LongSpecHead(DraftHead):
    """One layer over embeddings, with attention to the last `window` tokens and the target's past.

    The keys and values of the target's last layer are read as they stand in its cache, which ends before the last
    token; later tokens are known by the head's own attention. Unrolled training has that lag in every step.
    """

    kind = "longspec"
    window: ClassVar[int] = 512

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        # Whoever opens its parts is one, or stands for one.
        self.target = cast(Transformer, model.bare if isinstance(model, OwnCaches) else model)
        shape = LayerShape(**trained.settings["layer"])
        self.layer = DecoderLayer(self.parts, "layer.", shape)
        self.cross = DecoderLayer(self.parts, "cross.", replace(shape, window=None))

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (_ENTERING,)

    @classmethod
    def watches(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return ()

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        last = model.config.num_layers - 1
        # It asks the target's last layer what that layer asks; what it adds to the stream is learned from nothing.
        shape, tensors = copied_layer(model, last, silent=True)
        queries = shape.heads * shape.head_dim
        qkv, norm = tensors["layer.qkv.weight"], copied(model.weights.layers[last].attention_norm)
        bias = tensors.get("layer.qkv.bias", torch.zeros_like(qkv[:, 0]))
        own = {
            "layer.qkv.bias": bias,
            "layer.self_norm.weight": norm,
            "cross.norm.weight": norm.clone(),
            "cross.query.weight": qkv[:queries].clone(),
            "cross.query.bias": bias[:queries].clone(),
            "cross.output.weight": torch.zeros_like(tensors["layer.output.weight"]),
        }
        return tensors | own, {"layer": asdict(replace(shape, window=cls.window))}

    @property
    def looks_ahead(self) -> bool:
        return self.layer.shape.sliding is None

    def begin(self) -> _Memory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return _Memory(self.layer.begin(like), self.layer.begin(like))

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        if states:
            memory.past.write(*self._target_past(states[_ENTERING], positions), text=True)
        window = self.layer.shape.window
        assert window is not None
        # What lies further back would never be looked at.
        tokens, places = tokens[-window - 1 :], positions[-window - 1 :] + 1
        rows = self.embed(tokens)
        if len(rows) > 1:
            _, keys, values = self.layer.heads(self.layer.norm("self_norm", rows[:-1]), torch.from_numpy(places[:-1]))
            memory.held.write(keys, values, text=True)
        spoken = self._run(memory, rows[-1:], places[-1:], None)
        memory.held.keep_last(window + 1)
        memory.end = int(places[-1])
        return self.project(spoken)[0]

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        memory.held.rows = mask.shape[1] - len(tokens)
        return self.project(self._run(memory, self.embed(tokens), memory.end + depths, mask))

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        b, n = tokens.shape[0], tokens.shape[1] - steps + 1
        positions = self._positions(n + steps, tokens) if self.learns else np.arange(n + steps)
        with torch.no_grad():
            past = self._target_past(states[_ENTERING].flatten(0, 1), np.tile(positions[:n], b))
        known, told = (each.view(b, n, *each.shape[1:]) for each in past)
        rows, places = self.embed(tokens.flatten()), np.tile(positions[1:], b)
        normed = self.layer.norm("self_norm", rows)
        heads = self.layer.heads(normed, torch.from_numpy(places))
        queries, keys, values = (each.view(b, n + steps - 1, *each.shape[1:]) for each in heads)
        stream = rows.view(b, n + steps - 1, -1)
        guesses = []
        for step in range(steps):
            spans = [slice(each, each + n) for each in range(step + 1)]
            seen, kept = [keys[:, span] for span in spans], [values[:, span] for span in spans]
            context = teacher_attention(self.layer, queries[:, spans[-1]], seen, kept).flatten(0, 1)
            here = stream[:, spans[-1]].flatten(0, 1) + self.parts.linear("layer.output")(context)
            asked = self._queries(here, np.tile(positions[1:][spans[-1]], b)).view(b, n, *queries.shape[2:])
            context = teacher_attention(self.cross, asked, [known], [told]).flatten(0, 1)
            spoken = self._spoken(here, context).view(b, n, -1)
            guesses.append(Guess(spoken, spoken))
        return guesses

    def _positions(self, places: int, tokens: torch.Tensor) -> np.ndarray:
        """Positions as in a long text: a few first ones stay, all others are moved by one random offset."""
        random = np.random.default_rng(int(tokens.sum()))
        positions = np.arange(places)
        room = max(self.target.config.max_positions - places, 0)
        positions[random.integers(_ANCHORS + 1) :] += random.integers(room + 1)
        return positions

    def _target_past(self, states: torch.Tensor, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, head_dim] of the target's last layer, which the states [n, hidden] enter."""
        last = self.target.config.num_layers - 1
        keys, values = self.target.keys_and_values(last, states.to(self.target.dtype), positions)
        return keys.to(self.dtype), values.to(self.dtype)

    def _run(self, memory: _Memory, rows: torch.Tensor, positions: np.ndarray, mask: np.ndarray | None) -> torch.Tensor:
        normed = self.layer.norm("self_norm", rows)
        stream = rows + self.layer.attention(normed, positions, memory.held, mask)
        if memory.cache is None:
            keys, values = memory.past.read(0, memory.past.length)
        else:
            last = self.target.config.num_layers - 1
            held = int(memory.cache.lengths[last])
            keys, values = (each[:, :held].to(self.dtype) for each in memory.cache.view(last))
        queries = self._queries(stream, positions)
        return self._spoken(stream, attend(queries, keys, values, None, self.layer.shape.head_dim**-0.5))

    def _queries(self, stream: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """[n, heads, head_dim] what is asked of the target's past, turned as its own queries are."""
        rope = self.target.config.layer_rope(self.target.config.num_layers - 1)
        cos, sin = (each[:, None].to(self.dtype) for each in self.target.angles(rope, positions))
        queries = self.parts.linear("cross.query")(self.cross.norm("norm", stream))
        return rotate(queries.view(len(stream), -1, self.layer.shape.head_dim), cos, sin)

    def _spoken(self, stream: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """[n, hidden] what leaves the head, of its stream and of what it found in the target's past."""
        stream = stream + self.parts.linear("cross.output")(context)
        return self.layer.left(stream)


@register(
    "longspec",
    paper="LongSpec: Long-Context Lossless Speculative Decoding with Efficient Drafting and Verification (2025)",
    lossless=True,
    requirements=("a head made by decodery train head --kind longspec",),
)
@dataclass(frozen=True)
class LongSpec(HeadDrafter):
    """Drafts by one layer over tokens alone that looks up what came long before in the target's own cache.

    Its own memory is that of the last 512 tokens; the target's last layer holds all others anyway. It is trained on
    short texts put at random positions, so that it drafts in long ones. Scope: the request; memory: keys and values of
    one layer, of 512 tokens.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head` or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = LongSpecHead

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, keys=True)

    def start(self, seq: Sequence) -> HeadReading:
        reading = super().start(seq)
        reading.memory.cache = seq.cache
        return reading

    def logits(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        # A fork has a cache of its own.
        seq.states[self].memory.cache = seq.cache
        return super().logits(seq, tree, nodes)
