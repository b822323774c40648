"""DFlash: a few layers over the target's states fill in a whole block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.models.torch.attention import attend
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied
from decodery.step.tree_policy import TreePolicy

from ..heads.block import BlockMemory, BlockRows, BlockWindows
from ..heads.context import ContextLayer
from ..heads.copied import copied_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead, Nodes
from ..heads.head import Guess, TextItems, TrainedHead
from ..heads.layered import Attention, HeadRows, LayeredHead
from ..heads.parts import DecoderLayer, LayerShape
from ..heads.unrolled import block_attention

_BLOCK = 8
_TEXT = -1
"""Stands in place of a token in rows that read the text's features."""


class DFlashHead(LayeredHead):
    """A block holds the last token and mask tokens; every row attends to the whole block and to the text.

    What the layers know of the text are keys and values of context features, made of the target's states. They are
    written once for every token of the text; those of a block are dropped after its pass.
    """

    kind = "dflash"
    joint = True
    # A block costs as much as `block` rows of another head, and its neighbours teach nearly the same.
    anchored = 0.15

    def __init__(self, trained: TrainedHead, model: Reader) -> None:
        super().__init__(trained, model)
        settings = trained.settings
        shapes = [settings["layer"], *settings.get("further", ())]
        self.layers = [
            ContextLayer(self.parts, f"layer_{number}.", LayerShape(**shape)) for number, shape in enumerate(shapes)
        ]
        self.shape = self.layers[0].shape
        self.block: int = settings["block"]
        self.windows = BlockWindows(self.block, settings["window_from_anchor"], settings["bidirectional"])
        self.first = 0 if settings["from_anchor"] else 1
        self.fits(self.parts.inputs("fc") // len(self.taps))
        made_for = settings.get("target_layers")
        if made_for is not None and made_for != model.config.num_layers:
            raise SettingsError(
                f"this head for {self.kind} is for a model of {made_for} layers, and this one has "
                f"{model.config.num_layers}: use the model it was made for"
            )

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return tuple(trained.settings["taps"])

    @classmethod
    def untrained(
        cls, model: Transformer, seed: int, *, layers: int = 1, block: int = _BLOCK
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        depth, hidden = model.config.num_layers, model.config.hidden_size
        tensors: dict[str, torch.Tensor] = {}
        shapes = []
        for number in range(layers):
            source = depth - layers + number
            shape, found = copied_layer(model, max(source, 0))
            shapes.append(asdict(shape))
            tensors |= {f"layer_{number}.{name.removeprefix('layer.')}": each for name, each in found.items()}
            norm = model.weights.layers[max(source, 0)].attention_norm
            tensors[f"layer_{number}.attention_norm.weight"] = copied(norm)
        like = tensors["layer_0.qkv.weight"]
        taps = sorted({min(max(depth - 3, 0), 2), depth // 2, max(depth - 2, 0)})
        # The deepest states go in as they are; what the others add is learned.
        eye = torch.eye(hidden, dtype=torch.float32, device="cpu")
        others = torch.zeros(hidden, (len(taps) - 1) * hidden, dtype=torch.float32, device="cpu")
        tensors["fc.weight"] = torch.cat([others, eye], dim=1).to(like)
        tensors["hidden_norm.weight"] = copied(model.weights.layers[-1].attention_norm)
        tensors["norm.weight"] = copied(model.weights.norm)
        mask = model.config.eos_ids[0] if model.config.eos_ids else 0
        settings = {"taps": taps, "mask_token": mask, "block": block, "heads": block - 1, "from_anchor": False}
        settings |= {"window_from_anchor": True, "bidirectional": False}
        return tensors, settings | {"layer": shapes[0], "further": shapes[1:]}

    def unrolled(self, along: float) -> int:
        # All rows of a block are run at once.
        return self.block - self.first

    @property
    def stack(self) -> Ordered[DecoderLayer]:
        return self.layers

    def begin(self) -> BlockMemory:
        like = self.embed(torch.zeros(1, dtype=torch.int64, device="cpu"))
        return BlockMemory([each.begin(like) for each in self.layers], np.zeros(0, dtype=np.int64), like[:0], like)

    def read(
        self, memory: BlockMemory, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, positions: np.ndarray
    ) -> torch.Tensor:
        return self.read_all([(memory, states, tokens, positions)])[0]

    def read_all(self, texts: Ordered[TextItems]) -> torch.Tensor:
        lengths = [len(memory.positions) for memory, _, _, _ in texts]
        try:
            return self._read(texts)
        except Exception:
            # Each is served alone then.
            for (memory, _, _, _), length in zip(texts, lengths, strict=True):
                memory.cut(length)
            raise

    def _read(self, texts: Ordered[TextItems]) -> torch.Tensor:
        memories = [memory for memory, _, _, _ in texts]
        features = torch.cat([torch.cat([states[tap] for tap in self.taps], dim=-1) for _, states, _, _ in texts])
        anchors = torch.stack([tokens[-1] for _, _, tokens, _ in texts])
        known = [np.concatenate((memory.positions, positions)) for memory, _, _, positions in texts]
        found = self._fixed(texts, known, features, anchors)
        if found is None or found[1] is None:
            anchors = anchors.to(features.device, non_blocking=True)
        if found is None:
            self._write(texts, features)
        for memory, positions in zip(memories, known, strict=True):
            memory.positions = positions
        blocks, logits = found or (self._predicted(memories, anchors), None)
        for number, (memory, rows) in enumerate(zip(memories, blocks, strict=True)):
            memory.guessed, memory.opened = rows[self.first :], rows[:1]
            memory.logits = None if logits is None else logits[number]
        return self.project(self.roots(memories, anchors)) if logits is None else logits[:, 0]

    def _fixed(
        self, texts: Ordered[TextItems], known: Ordered[np.ndarray], features: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[Ordered[torch.Tensor], torch.Tensor | None] | None:
        """Read texts and predict their blocks in one pass at fixed shapes; None where that cannot be.

        Args:
            texts: What is read.
            known: Positions of all of each text.
            features: [rows, width] of what is read.
            anchors: [texts] the last tokens.

        Returns:
            By text, the normed rows [block, hidden], and the logits of those that predict where they can be projected.
        """
        if (fixed := self.passes) is None:
            return None
        size, read = self.block, [HeadRows(memory.held, positions) for memory, _, _, positions in texts]
        blocks = [
            BlockRows(own.held, at[-1] + 1 + np.arange(size), fresh=len(own.positions), text=at, windows=self.windows)
            for own, at in zip(read, known, strict=True)
        ]
        count, n = len(features), len(texts)
        tokens = anchors.new_full((count + n * size,), self.trained.settings["mask_token"])
        tokens[:count], tokens[count::size] = _TEXT, anchors
        wanted = count + np.arange(n * size).reshape(n, size)[:, self.first :].ravel()
        found = fixed.run(self, [*read, *blocks], features, tokens, wanted if self.by_depth else wanted[:0])
        if found is None:
            return None
        rows, logits = found[0][count:].split(size), found[1]
        return rows, logits.unflatten(0, (n, -1)) if self.by_depth else None

    def through(
        self, features: torch.Tensor, tokens: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context, text = self._context(features), (tokens == _TEXT)[:, None]
        stream = self.embed(tokens.clamp(min=0))
        for number, layer in enumerate(self.layers):
            # Of the text, all layers read the same; what leaves them is of no use.
            read = torch.where(text, context, layer.entered(stream))
            stream = layer.left(stream + attention(number, read))
        rows = self.parts.norm("norm", stream, self.shape.eps)
        return rows, rows

    def _write(self, texts: Ordered[TextItems], features: torch.Tensor) -> None:
        """Keep keys and values of what is read of texts, of features [n, width] all together."""
        context, lengths = self._context(features), [len(tokens) for _, _, tokens, _ in texts]
        places = torch.from_numpy(np.concatenate([positions for _, _, _, positions in texts]))
        for number, layer in enumerate(self.layers):
            _, keys, values = layer.heads(context, places)
            for (memory, _, _, _), own, seen in zip(texts, keys.split(lengths), values.split(lengths), strict=True):
                memory.held[number].write(own, seen, text=True)

    def roots(self, memories: Ordered[BlockMemory], anchors: torch.Tensor) -> torch.Tensor:
        """What `project` takes of the next tokens of texts [n, width], after last tokens `anchors` [n]."""
        return torch.cat([memory.guessed[:1] for memory in memories])

    @property
    def by_depth(self) -> bool:
        return True

    def computed(self, memory: BlockMemory) -> bool:
        return memory.logits is not None

    def grow(
        self, memory: BlockMemory, tokens: torch.Tensor, above: np.ndarray, depths: np.ndarray, mask: np.ndarray
    ) -> torch.Tensor:
        return self.grow_all([Nodes(memory, tokens, above, depths, mask)])[0]

    def grow_all(self, nodes: Ordered[Nodes]) -> list[torch.Tensor]:
        self._project([each.memory for each in nodes])
        return [each.memory.logits[to_device(each.depths, each.memory.logits.device)] for each in nodes]

    def ahead(self, memories: Ordered[BlockMemory]) -> list[torch.Tensor] | None:
        self._project(memories)
        return [each.logits for each in memories if each.logits is not None]

    def unroll(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int) -> list[Guess]:
        return self.unroll_at(states, tokens, steps, torch.arange(tokens.shape[1] - steps + 1, device=tokens.device))

    def unroll_at(
        self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, steps: int, anchors: torch.Tensor
    ) -> list[Guess]:
        spoken = self.blocks(states, tokens, anchors)[:, :, self.first :]
        return [Guess(each, each) for each in spoken[:, :, :steps].unbind(dim=2)]

    def _project(self, memories: Ordered[BlockMemory]) -> None:
        if unknown := [memory for memory in memories if memory.logits is None]:
            logits = self.project(torch.cat([memory.guessed for memory in unknown]))
            for memory, own in zip(unknown, logits.split([len(each.guessed) for each in unknown]), strict=True):
                memory.logits = own

    def _context(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states, those of all taps side by side [n, width] -> context features [n, hidden]."""
        return self.parts.norm("hidden_norm", self.parts.linear("fc")(states), self.shape.eps)

    def _block_of(self, anchors: torch.Tensor) -> torch.Tensor:
        """Last tokens [n] -> the embeddings of their blocks [n * block, hidden]."""
        rows = anchors.new_full((len(anchors), self.block), self.trained.settings["mask_token"])
        rows[:, 0] = anchors
        return self.embed(rows.flatten())

    def _predicted(self, memories: Ordered[BlockMemory], anchors: torch.Tensor) -> Ordered[torch.Tensor]:
        """The normed rows [block, hidden] of the block after each text, whose last tokens are `anchors` [n]."""
        stream, size = self._block_of(anchors), self.block
        starts = [int(memory.positions[-1]) + 1 for memory in memories]
        places = torch.cat([torch.arange(start, start + size, device="cpu") for start in starts])
        for number, layer in enumerate(self.layers):
            found = []
            heads = zip(*(each.split(size) for each in layer.heads(layer.entered(stream), places)), strict=True)
            for memory, start, (queries, keys, values) in zip(memories, starts, heads, strict=True):
                held, seen = memory.held[number], None
                held.write(keys, values, text=False)
                end = held.length + held.rows
                if layer.shape.sliding is not None:
                    near, own = self.windows.near(layer.shape.sliding, torch.from_numpy(memory.positions), start)
                    seen = torch.cat((near, own), dim=1).to(queries.device, non_blocking=True)
                scale = layer.shape.head_dim**-0.5
                keys, values = held.read(0, end)
                found.append(attend(queries, keys, values, seen, scale))
                # The text is all that stays.
                held.rows = 0
            stream = layer.left(stream + self.parts.linear(f"{layer.prefix}output")(torch.cat(found)))
        return self.parts.norm("norm", stream, self.shape.eps).split(size)

    def blocks(self, states: dict[Tap, torch.Tensor], tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """The normed rows [b, m, block, hidden] of blocks in known texts.

        Args:
            states: {tap: [b, n, width]} of the target.
            tokens: [b, n or more], of which token i follows state i.
            anchors: [m] the states after which blocks begin.
        """
        b, m, size = tokens.shape[0], len(anchors), self.block
        context = self._context(torch.cat([states[tap].flatten(0, 1) for tap in self.taps], dim=-1))
        n = len(context) // b
        stream = self._block_of(tokens[:, anchors].flatten())
        text, starts = torch.arange(n, device="cpu"), anchors.cpu()
        places = (starts[:, None] + 1 + torch.arange(size, device="cpu")).flatten()
        for layer in self.layers:
            _, keys, values = (each.view(b, n, *each.shape[1:]) for each in layer.heads(context, text.repeat(b)))
            found = layer.heads(layer.entered(stream), places.repeat(b))
            queries, *own = (each.view(b, m, size, *each.shape[1:]) for each in found)
            hidden, seen = (text[None, :] > starts[:, None])[:, None].expand(-1, size, -1), None
            if layer.shape.sliding is not None:
                windows = [self.windows.near(layer.shape.sliding, text, start + 1) for start in starts.tolist()]
                hidden, seen = hidden | ~torch.stack([each for each, _ in windows]), windows[0][1]
            attended = block_attention(layer, queries, (keys, values), own, ~hidden, seen)
            output = self.parts.linear(f"{layer.prefix}output")(attended.flatten(0, 2))
            stream = layer.left(stream + output)
        return self.parts.norm("norm", stream, self.shape.eps).view(b, m, size, -1)


@register(
    "dflash",
    paper="DFlash: Block Diffusion for Flash Speculative Decoding (2026)",
    lossless=True,
    requirements=("hidden states of every token", "a head made by decodery train head --kind dflash"),
)
@dataclass(frozen=True)
class DFlash(HeadDrafter):
    """Drafts a block of tokens in one pass of a few layers over the target's states.

    Every row answers for its own position, whatever is drafted before it; a tree takes each row's best tokens by the
    product of their probabilities. Scope: the request; memory: keys and values of the head's layers.

    Attributes:
        length: Tokens of a chain, at most as many as a block predicts.
        tree_policy: How a tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head`, a folder or Hub id as z-lab, SpecForge or vLLM's
            `speculators` publish them or a `TrainedHead`.
    """

    kind: ClassVar[type[DraftHead]] = DFlashHead

    length: int = field(default=15, kw_only=True)
    tree_policy: TreePolicy | str | None = field(default=None, kw_only=True)
