"""What heads are built of: named tensors, and a decoder layer with keys and values of its own."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from decodery.models.cache.pages import PageTable
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.attention import attend, rotate
from decodery.models.torch.one_pass import to_device
from decodery.models.torch.weights import QUANTIZED, Dense, Linear

from .experts import mixture

_WHOLE = ("router.weight", "heads_up.weight", "confidence.weight")
"""How the names end of matrices that are never quantized."""
_STEPS = (".scale", ".step", ".least")
"""How the names end of what the weights of an integer layer are multiplied by."""


class Parts:
    """The tensors of a head by name.

    Linear layers are in floating point while they learn, in int8 while they draft.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self._linears: dict[str, Linear] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def linear(self, name: str) -> Linear:
        """The layer of `name`.weight, `name`.bias and `name`.scale (int8) or `name`.step, `name`.least (int4)."""
        if name not in self._linears:
            weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
            if weight.dtype == torch.int8:
                self._linears[name] = Int8Linear(weight, self.tensors[f"{name}.scale"], bias)
            elif weight.dtype == torch.uint8:
                step, least = (self.tensors[f"{name}.{part}"].half() for part in ("step", "least"))
                self._linears[name] = Int4Linear(weight, step, least, bias)
            else:
                self._linears[name] = Dense(weight, bias)
        return self._linears[name]

    def inputs(self, name: str) -> int:
        """How wide rows are that the layer `name` takes."""
        weight = self.tensors[f"{name}.weight"]
        # Two weights of an int4 layer share a byte.
        return weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids` [n] of the table `name`.weight, in floating point."""
        found, scale = self.tensors[f"{name}.weight"][ids], self.tensors.get(f"{name}.scale")
        return found if scale is None else found.to(scale.dtype) * scale[ids, None]

    def block(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., d] plus SiLU of what the layer `name` makes of them."""
        return rows + silu(self.linear(name)(rows))

    def norm(self, name: str, rows: torch.Tensor, eps: float) -> torch.Tensor:
        """Rows [..., d] over their root mean square, times the tensor `name`.weight [d]."""
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(rows.to(weight.dtype), rows.shape[-1:], weight, eps)

    def quantized(self) -> dict[str, torch.Tensor]:
        """The same tensors with int8 linear layers; vectors stay as they are."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and tensor.ndim == 2 and not name.endswith(_WHOLE):
                layer = Int8Linear.quantize(tensor)
                found |= {name: layer.weight, f"{name.removesuffix('weight')}scale": layer.scale}
            else:
                found[name] = tensor.detach().float() if tensor.is_floating_point() else tensor
        return found

    def floating(self) -> dict[str, torch.Tensor]:
        """The same tensors with linear layers in floating point, as they are while they learn."""
        found = {name: tensor for name, tensor in self.tensors.items() if not name.endswith(_STEPS)}
        for name in [name.removesuffix(".weight") for name in found if name.endswith(".weight")]:
            if isinstance(layer := self.linear(name), QUANTIZED):
                found[f"{name}.weight"] = layer.dense()
        return found


@dataclass(slots=True)
class Held:
    """Keys and values of one text in one layer of a head.

    Attributes:
        pages: Where they are.
        length: Slots of the text.
        rows: Tentative ones of a tree after them.
    """

    pages: PageTable
    length: int = 0
    rows: int = 0

    @classmethod
    def begin(cls, kv_heads: int, head_dim: int, like: torch.Tensor) -> Held:
        return cls(PageTable((1, kv_heads, head_dim), like.dtype, like.device))

    def __deepcopy__(self, memo: dict[int, object]) -> Held:
        return replace(self, pages=self.pages.fork(np.array([self.length + self.rows])))

    def read(self, first: int, end: int) -> torch.Tensor:
        """A copy of the keys and values of slots [first, end): [2, kv_heads, n, head_dim]."""
        return self.pages.read(first, end, 0)

    def write(self, keys: torch.Tensor, values: torch.Tensor, *, text: bool) -> None:
        """[n, kv_heads, head_dim] each, after what is there; `text` overwrites what is tentative."""
        first = self.reserve(len(keys), text=text)
        self.pages.put(first, torch.stack((keys, values)).transpose(1, 2)[None])
        self.wrote(len(keys), text=text)

    def reserve(self, rows: int, *, text: bool) -> int:
        """Make room for so many rows, `text` of them instead of the tentative ones; gives the first slot."""
        first = self.length if text else self.length + self.rows
        self.pages.own(np.array([first]), np.array([first + rows]))
        return first

    def wrote(self, rows: int, *, text: bool) -> None:
        """So many rows lie where there was room for them."""
        if text:
            self.length, self.rows = self.length + rows, 0
        else:
            self.rows += rows

    def keep_last(self, slots: int) -> None:
        """Forget the text but its last slots, and what is tentative."""
        first = max(0, self.length - slots)
        if first:
            left = self.pages.read(first, self.length)
            self.pages.own(np.array([0]), np.array([self.length - first]))
            self.pages.put(0, left)
        self.length, self.rows = self.length - first, 0


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer.

    Attributes:
        hidden: Width.
        inner: Units of its MLP.
        theta: Base of the rotary positions.
        window: How many tokens of the text before the last one a row sees; None: all.
        stretch: What each of their frequencies is divided by, nothing where it is empty.
        factor: What cosines and sines are multiplied by, as YaRN does.
        sliding: How many positions a row attends to, its own and those before it; None: all. Counted from every row,
            where `window` is counted from the end of the text.
        rotated: How many dimensions of a head are turned, the first ones; 0: all.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float = 10_000.0
    eps: float = 1e-5
    window: int | None = None
    stretch: tuple[float, ...] = ()
    factor: float = 1.0
    sliding: int | None = None
    rotated: int = 0


class DecoderLayer:
    """Attention and MLP of a head, made of `parts` whose names begin with `prefix`.

    What attention reads is the caller's: heads differ in what they feed it and in the norms before it. What it finds is
    multiplied by the sigmoid of `out_gate` where there is such a part.

    Args:
        experts: How rows choose experts, see `experts.expert_settings`; None where the layer has one MLP.
    """

    def __init__(self, parts: Parts, prefix: str, shape: LayerShape, experts: Mapping[str, Any] | None = None) -> None:
        self.parts, self.prefix, self.shape = parts, prefix, shape
        self.scale = shape.head_dim**-0.5
        self._mixture = None if experts is None else mixture(parts, prefix, shape, experts)
        self._turned = shape.rotated or shape.head_dim
        exponents = torch.arange(0, self._turned, 2, dtype=torch.float64, device="cpu") / self._turned
        inverse = 1.0 / shape.theta**exponents
        if shape.stretch:
            inverse = inverse / torch.tensor(shape.stretch, dtype=torch.float64, device="cpu")
        # Nothing is copied to a device while a graph is captured.
        self._inverse = inverse.to(parts[f"{prefix}output.weight"].device)

    def begin(self, like: torch.Tensor) -> Held:
        return Held.begin(self.shape.kv_heads, self.shape.head_dim, like)

    def read_of(self, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What attention reads [n, width].

        Args:
            stream: [n, hidden].
            attended: What a head has for its first layer to read.
        """
        return attended

    def norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.parts.norm(f"{self.prefix}{name}", rows, self.shape.eps)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the angles at positions [n]: [n, turned dimensions / 2] float64 each."""
        angles = positions.double()[:, None] * self._inverse
        return angles.cos() * self.shape.factor, angles.sin() * self.shape.factor

    def heads(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [n, heads, head_dim], rotated by positions [n], which may be on the host."""
        shape = self.shape
        sizes = shape.heads, shape.kv_heads, shape.kv_heads
        fused = self.parts.linear(f"{self.prefix}qkv")(rows).view(len(rows), -1, shape.head_dim)
        queries, keys, values = fused.split(sizes, dim=1)
        if f"{self.prefix}q_norm.weight" in self.parts:
            queries, keys = self.norm("q_norm", queries), self.norm("k_norm", keys)
        cos, sin = (each[:, None].to(rows.dtype) for each in self.angles(positions.to(rows.device, non_blocking=True)))
        return self._rotated(queries, cos, sin), self._rotated(keys, cos, sin), values

    def _rotated(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self._turned == self.shape.head_dim:
            return rotate(rows, cos, sin)
        return torch.cat((rotate(rows[..., : self._turned], cos, sin), rows[..., self._turned :]), dim=-1)

    def attention(
        self, rows: torch.Tensor, positions: np.ndarray, held: Held, mask: np.ndarray | torch.Tensor | None
    ) -> torch.Tensor:
        """[n, width] -> [n, hidden].

        Args:
            mask: [n, tentative rows + n], of a tree; None: the rows are text, in order.
        """
        return self.attention_of(rows, positions, [(held, mask, len(rows))])

    def attention_of(
        self,
        rows: torch.Tensor,
        positions: np.ndarray,
        texts: Ordered[tuple[Held, np.ndarray | torch.Tensor | None, int]],
    ) -> torch.Tensor:
        """`attention` of texts side by side: what is held of each, its mask and its number of rows."""
        sizes = [count for _, _, count in texts]
        found = zip(*(each.split(sizes) for each in self.heads(rows, torch.from_numpy(positions))), strict=True)
        context = [self._attended(held, mask, *own) for (held, mask, _), own in zip(texts, found, strict=True)]
        return self.output(rows, context[0] if len(context) == 1 else torch.cat(context))

    def output(self, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """What attention adds to the stream: [n, hidden].

        Args:
            rows: [n, width] that it read.
            context: [n, heads * head_dim] that it found.
        """
        if f"{self.prefix}out_gate.weight" in self.parts:
            context = context * self.parts.linear(f"{self.prefix}out_gate")(rows).sigmoid()
        return self.parts.linear(f"{self.prefix}output")(context)

    def _attended(
        self,
        held: Held,
        mask: np.ndarray | torch.Tensor | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """What the rows of one text read [n, heads * head_dim], after their keys and values were written."""
        rows, before = len(queries), held.length
        held.write(keys, values, text=mask is None)
        begins, own = self.visible(rows, before, mask)
        first, seen = 0 if self.shape.sliding is not None else int(begins[0]), None
        if isinstance(own, torch.Tensor):
            seen = torch.cat((own.new_ones(rows, before - first), own), dim=1)
        elif self.shape.sliding is not None or not own.all():
            text = np.arange(first, before) >= begins[:, None]
            seen = to_device(np.concatenate((text, own), axis=1), queries.device)
        keys, values = held.read(first, held.length + held.rows)
        return attend(queries, keys, values, seen, self.scale)

    def visible(
        self, rows: int, before: int, mask: np.ndarray | torch.Tensor | None
    ) -> tuple[np.ndarray, np.ndarray | torch.Tensor]:
        """What rows of one text see: from which slot of the text each [n], and which rows after it [n, m].

        Args:
            rows: How many they are.
            before: Slots of the text before them.
            mask: [n, m], of a tree, on a device only where no layer slides; None: the rows are text, in order.
        """
        own, shape = np.tri(rows, dtype=bool) if mask is None else mask, self.shape
        if shape.sliding is None or isinstance(own, torch.Tensor):
            end = before if mask is None else before - 1
            return np.full(rows, 0 if shape.window is None else max(0, end - shape.window)), own
        # Of the rows that one sees, each stands one position after the one before it: a row of a tree stands as deep as
        # the rows it may see are many.
        depths = own.cumsum(axis=1)
        last: np.ndarray = np.arange(1, rows + 1)[:, None] if mask is None else depths[:, -1:]
        begins = (before + last[:, 0] - shape.sliding).clip(0, before)
        return begins, own & (depths > last - shape.sliding)

    def left(self, stream: torch.Tensor) -> torch.Tensor:
        """The residual stream [n, hidden] after attention -> after the layer, through its MLP."""
        rows = self.norm("mlp_norm", stream)
        if self._mixture is not None:
            return stream + self._mixture(rows)[0]
        gate, up = self.parts.linear(f"{self.prefix}gate_up")(rows).chunk(2, dim=-1)
        return stream + self.parts.linear(f"{self.prefix}down")(silu(gate) * up)
