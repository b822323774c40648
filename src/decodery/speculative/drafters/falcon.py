"""Falcon: two recurrent layers and a decoder layer that guess the next few states of the target in one pass."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.attention import attend
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer

from ..heads.copied import copied_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import Guess, TrainedHead
from ..heads.matching import LAST, disturbed, features_of, mismatch
from ..heads.parts import DecoderLayer, Held, LayerShape
from ..heads.unrolled import teacher_attention

_LAYERS = 2
"""Recurrent layers."""


@dataclass(slots=True)
class _Memory:
    """held: the layer's keys and values, of the text's items and of the tree's blocks. end: position of the last item.

    tail: [block, hidden], what the layer was given at the last items, zeros before the first one. features: [m, block,
    hidden] and states: [m, layers, 2, hidden], what was guessed and what is remembered after the text, then after
    every block of the tree. seen: [m - 1, m - 1], which of these blocks each sees. tokens: of every row; nodes: the
    row above each and its block; starts: how many blocks there were before it.
    """

    held: Held
    tail: torch.Tensor
    features: torch.Tensor
    states: torch.Tensor
    tokens: torch.Tensor
    end: int = -1
    seen: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    nodes: list[tuple[int, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, object]) -> _Memory:
        # Tentative rows do not follow a fork, and tensors are never written to.
        held = deepcopy(self.held, memo)
        clone = _Memory(held, self.tail, self.features[:1], self.states[:1], self.tokens[:0], self.end)
        clone.held.rows = 0
        return clone

    def cut(self, nodes: int) -> None:
        """Forget all nodes but the first."""
        self.tokens = self.tokens[:nodes]
        if nodes < len(self.nodes):
            blocks = self.starts[nodes]
            self.features, self.states = self.features[: blocks + 1], self.states[: blocks + 1]
            self.seen = self.seen[:blocks, :blocks]
            self.held.rows = blocks * self.features.shape[1]
            del self.nodes[nodes:], self.starts[nodes:]


class FalconHead(DraftHead):
    """An item is a state and the token that follows it.

    After the last `block` items stand guesses of as many states. Items of a block see each other, whichever comes
    first, and blocks end where the text ends. As the layer's keys and values hang on nothing but the recurrent layers,
    which read in order, what is kept of a text depends on no block.
    """

    kind = "falcon"
    block: ClassVar[int] = 2

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        self.layer = DecoderLayer(self.parts, "layer.", LayerShape(**trained.settings["layer"]))
        self.block_size: int = trained.settings["block"]

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (LAST,)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        # The layer was made for another stream: what it adds to this one is learned from nothing.
        shape, tensors = copied_layer(model, model.config.num_layers - 1, silent=True)
        like, hidden = tensors["layer.qkv.weight"], shape.hidden
        random = torch.Generator().manual_seed(seed)
        for layer in range(_LAYERS):
            for name, width in (("input", 2 * hidden if layer == 0 else hidden), ("hidden", hidden)):
                weight = (
                    2 * torch.rand(4 * hidden, width, generator=random, dtype=torch.float32, device="cpu") - 1
                ) / hidden**0.5
                tensors[f"lstm.{layer}.{name}.weight"] = weight.to(like)
            tensors[f"lstm.{layer}.input.bias"] = torch.zeros(4 * hidden, dtype=torch.float32, device="cpu").to(like)
        return tensors, {"layer": asdict(shape), "block": cls.block}

    @property
    def looks_ahead(self) -> bool:
        # Which blocks see each other is known on the host.
        return False

    def begin(self) -> _Memory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        nothing = like.new_zeros(self.block_size, like.shape[1])
        states, none = like.new_zeros(1, _LAYERS, 2, like.shape[1]), like.new_empty(0, dtype=torch.int64)
        return _Memory(self.layer.begin(like), nothing, nothing[None], states, none)

    def read(
        self, memory: _Memory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        items = torch.cat((self.embed(tokens), features_of(self.model, states, self.dtype)), dim=-1)
        rows, after = self.recur(items[None], memory.states[:1])
        memory.cut(0)
        _, keys, values = self.layer.heads(rows[0], torch.from_numpy(positions))
        memory.held.write(keys, values, text=True)
        memory.tail = torch.cat((memory.tail, rows[0]))[-self.block_size :]
        memory.end = int(positions[-1])
        queries, _, _ = self.layer.heads(
            memory.tail, torch.arange(memory.end - self.block_size, memory.end, device="cpu") + 1
        )
        memory.features = self._behind(memory.tail, self._attended(memory.held, queries, None))[None]
        memory.states = after[:, -1]
        return self.project(memory.features[0, :1])[0]

    def grow(
        self, memory: _Memory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        memory.cut(mask.shape[1] - len(tokens))
        blocks = [memory.nodes[row][1] if row >= 0 else 0 for row in above.tolist()]
        place = int(depths[0]) % self.block_size
        started = len(memory.seen)
        memory.tokens = torch.cat((memory.tokens, tokens))
        if place == 0:
            blocks = self._open(memory, above.tolist(), blocks, int(depths[0]))
        memory.nodes += zip(above.tolist(), blocks, strict=True)
        memory.starts += [started + number * (place == 0) for number in range(len(tokens))]
        # Nodes of one block are told the same: which token was chosen in between it does not know yet.
        told, which = np.unique(blocks, return_inverse=True)
        found = memory.features[:, place][to_device(told, tokens.device)]
        return self.project(found)[to_device(which, tokens.device)]

    def _open(self, memory: _Memory, above: list[int], blocks: list[int], depth: int) -> list[int]:
        """Read a block below each of these nodes' blocks, which ends with the node; returns the new ones.

        Args:
            above: The row above each of the nodes, which are the last ones.
            blocks: Theirs.
            depth: At which they stand.
        """
        size, known, new, device = self.block_size, len(memory.seen), len(above), memory.tokens.device
        paths = []
        for node, row in enumerate(above, start=len(memory.tokens) - new):
            path = [node]
            while len(path) < size:
                path.append(row)
                row = memory.nodes[row][0]
            paths.append(path[::-1])
        embedded = self.embed(memory.tokens[to_device(np.array(paths).flatten(), device)]).view(new, size, -1)
        begun = to_device(np.array(blocks), device)
        rows, after = self.recur(torch.cat((embedded, memory.features[begun]), dim=-1), memory.states[begun])
        rows = rows.flatten(0, 1)
        seen = np.zeros((known + new, known + new), dtype=bool)
        seen[:known, :known] = memory.seen
        for number, block in enumerate(blocks):
            if block:
                seen[known + number] = seen[block - 1]
        seen[known:, known:] = np.eye(new, dtype=bool)
        positions = np.tile(memory.end + np.arange(depth - size, depth) + 1, new)
        queries, keys, values = self.layer.heads(rows, torch.from_numpy(positions))
        memory.held.write(keys, values, text=False)
        mask = np.repeat(np.repeat(seen[known:], size, axis=0), size, axis=1)
        found = self._behind(rows, self._attended(memory.held, queries, mask))
        memory.features = torch.cat((memory.features, found.view(new, size, -1)))
        memory.states, memory.seen = torch.cat((memory.states, after[:, -1])), seen
        return list(range(known + 1, known + new + 1))

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        return self.unroll_glancing(states, tokens, steps, None)

    def unroll_glancing(
        self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int, shown: torch.Tensor | None
    ) -> list[Guess]:
        """`unroll`, where some items are those one block ahead, which their guesses are about.

        Args:
            states, tokens, steps: See `unroll`.
            shown: [b, n] bool, which items; the last block has none ahead, and None is for no item.
        """
        b, n, size = tokens.shape[0], tokens.shape[1] - steps + 1, self.block_size
        known = features = self._known(states)
        if self.learns:
            features = disturbed(features, tokens)
        embedded = self._embedded(tokens[:, :n])
        items = torch.cat((embedded, features), dim=-1)
        if shown is not None and n > size:
            ahead = torch.cat((embedded, known), dim=-1)[:, size:]
            items = torch.cat(
                (torch.where(shown[:, : n - size, None], ahead, items[:, : n - size]), items[:, n - size :]), dim=1
            )
        rows, memory = self.recur(items, items.new_zeros(b, _LAYERS, 2, features.shape[-1]))
        rows = torch.cat((rows.new_zeros(b, size - 1, rows.shape[-1]), rows), dim=1)
        queries, keys, values = self._heads(rows, torch.arange(1 - size, n, device="cpu"))
        seen, told = [keys[:, size - 1 :]], [values[:, size - 1 :]]
        found = [
            self._stepped(rows[:, first : first + n], queries[:, first : first + n], seen, told)
            for first in range(size)
        ]
        guesses = list(found)
        while len(guesses) < steps:
            first = len(guesses) - size + 1
            following = [self._embedded(tokens[:, each : each + n]) for each in range(first, first + size)]
            items = torch.stack([torch.cat(pair, dim=-1) for pair in zip(following, found, strict=True)], dim=2)
            rows, after = self.recur(items.flatten(0, 1), memory.flatten(0, 1))
            rows, memory = rows.view(b, n, size, -1), after[:, -1].view(b, n, *after.shape[2:])
            heads = [
                self._heads(rows[:, :, each], torch.arange(n, device="cpu") + first + each) for each in range(size)
            ]
            seen, told = seen + [keys for _, keys, _ in heads], told + [values for _, _, values in heads]
            found = [self._stepped(rows[:, :, each], heads[each][0], seen, told) for each in range(size)]
            guesses += found
        return [Guess(each, each) for each in guesses[:steps]]

    def regret(self, guesses: list[Guess], states: dict[Tap, torch.Tensor], known: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self._known(states)
        # The words weigh a tenth of it, and the rate at which both are learned knows no scale.
        return 10.0 * mismatch(guesses, features, known)

    def recur(self, items: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Items [b, n, 2 * hidden] in order, from states [b, layers, 2, hidden] on.

        Returns what the decoder layer is given [b, n, hidden], and the states after every item.
        """
        b, n, _ = items.shape
        rows, every = items, []
        for layer in range(_LAYERS):
            gates = self.parts.linear(f"lstm.{layer}.input")(rows.flatten(0, 1)).view(b, n, -1)
            output, cell = states[:, layer, 0], states[:, layer, 1]
            outputs, cells = [], []
            for place in range(n):
                both = gates[:, place] + self.parts.linear(f"lstm.{layer}.hidden")(output)
                take, keep, fresh, show = both.chunk(4, dim=-1)
                cell = keep.sigmoid() * cell + take.sigmoid() * fresh.tanh()
                output = show.sigmoid() * cell.tanh()
                outputs.append(output)
                cells.append(cell)
            rows = torch.stack(outputs, dim=1)
            every.append(torch.stack((rows, torch.stack(cells, dim=1)), dim=2))
        return rows, torch.stack(every, dim=2)

    def _attended(self, held: Held, queries: torch.Tensor, mask: np.ndarray | None) -> torch.Tensor:
        """What queries [n, heads, head_dim] read of the text and of the tree's blocks. mask: [n, tentative rows]."""
        end, seen = held.length + held.rows, None
        if mask is not None:
            seen = torch.from_numpy(np.concatenate((np.ones((len(mask), held.length), dtype=bool), mask), axis=1))
        keys, values = held.read(0, end)
        seen = None if seen is None else seen.to(queries.device, non_blocking=True)
        return attend(queries, keys, values, seen, self.layer.shape.head_dim**-0.5)

    def _behind(self, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """What leaves the layer [n, hidden], of its input and of what attention has read."""
        return self.layer.left(rows + self.parts.linear("layer.output")(context))

    def _known(self, states: dict[Tap, torch.Tensor]) -> torch.Tensor:
        """[b, n, hidden] the target's own features."""
        rows = states[LAST]
        return features_of(self.model, {LAST: rows.flatten(0, 1)}, self.dtype).view(rows.shape)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens.flatten()).view(*tokens.shape, -1)

    def _heads(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`DecoderLayer.heads` of texts side by side: rows [b, n, hidden] at positions [n]."""
        found = self.layer.heads(rows.flatten(0, 1), positions.repeat(len(rows)))
        return tuple(each.view(*rows.shape[:2], *each.shape[1:]) for each in found)

    def _stepped(
        self, rows: torch.Tensor, queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """[b, n, hidden] what leaves the layer at one place of a block."""
        context = teacher_attention(self.layer, queries, keys, values)
        return self._behind(rows.flatten(0, 1), context.flatten(0, 1)).view(rows.shape)


@register(
    "falcon",
    paper="Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive "
    "Drafting and Custom-Designed Decoding Tree (2024)",
    lossless=True,
    requirements=("a head made by decodery train head --kind falcon",),
)
@dataclass(frozen=True)
class Falcon(HeadDrafter):
    """Drafts two tokens per pass of the head: the target's next two states are guessed at once.

    Inside such a block guesses do not know each other's tokens; below it the head reads both, and guesses the next two.
    Of a tree only every second level costs a pass. Scope: the request; memory: keys and values of one layer.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head` or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = FalconHead
