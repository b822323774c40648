"""A GGUF file as a source of weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import Form

from ..native.super_blocks import BlockKind, block_layer
from ..tokenizers.tokenizer import TextFacts
from .fused_slots import slots
from .gguf_blocks import FOUR_BITS, READ
from .gguf_config import FREQUENCIES, read_gguf_config
from .gguf_file import GGUFFile
from .gguf_states import flat_part, state_name, vector
from .gguf_tokenizer import read_texts
from .in_place import Piece

if TYPE_CHECKING:
    import tokenizers

_PAIRED = ("llama", "llada")
"""Families whose files have the two numbers that are turned together side by side."""
_HEAD = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
}


class GGUFCheckpoint:
    """A GGUF file as a source of weights.

    Args:
        precision: Of most of the layers' weights: a floating point type, "int4" for blocks of four bits that stay as
            they are, or "quantized".
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile.whole(path)
        self.origin = str(path)
        self.config = read_gguf_config(self.file, self.origin)
        self.precision = self._read_precision()
        self._refuse_unread()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the part `name`.

        Raises:
            CorruptFile: If the file has none.
        """
        shape = self.file.info(self._name(name)).shape
        return (math.prod(shape),) if flat_part(name) else shape

    def part(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of the part `name` (see `fused_slots`) in float32."""
        if flat_part(name):
            return vector(name, torch.from_numpy(self.file.rows(self._name(name))))[begin:end]
        return self._rows(name, begin, end, lambda *span: (torch.from_numpy(self.file.rows(*span)),))[0]

    def forms(self, name: str) -> tuple[Form, ...]:
        """The form of blocks in which a part's numbers stay as they are, if there is one."""
        reader = READ.get(self.file.kind_name(self._name(name)))
        return () if reader is None else (reader.form,)

    def blocks(self, name: str, begin: int, end: int, form: Form) -> BlockKind:
        """Rows of a part that has such a form."""
        read = self.file.blocks
        weight, first, second = self._rows(name, begin, end, lambda *span: map(torch.from_numpy, read(*span)))
        return block_layer(form, weight, first, second)

    @property
    def size(self) -> int:
        """Of the file in bytes."""
        return self.file.size

    def piece(self, name: str) -> Piece | None:
        """Where a part lies, if it consists of blocks that can be read in place."""
        tensor = self._name(name)
        info, kind = self.file.info(tensor), self.file.kind_name(tensor)
        if kind not in READ or len(info.shape) != 2:
            return None
        rows, dim = info.shape[0], self.config.head_dim
        turned = dim if self._pairs(name) and rows % dim == 0 else 0
        return Piece(kind, info.offset, rows, info.shape[1], turned)

    def _pairs(self, name: str) -> bool:
        """Whether rotated pairs of a part lie side by side."""
        return self.config.family in _PAIRED and name.startswith("layers.") and name.split(".")[2] in ("q", "k")

    def _rows(
        self, name: str, begin: int, end: int | None, read: Callable[[str, int, int], Iterable[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What `read` gives of rows of a part, in our order."""
        tensor, rows, dim = self._name(name), self.shape(name)[0], self.config.head_dim
        end = rows if end is None else end
        if not self._pairs(name) or rows % dim:
            return list(read(tensor, begin, end))
        # Rows move within their heads: whole heads are read.
        first = begin // dim * dim
        found = read(tensor, first, -(-end // dim) * dim)
        return [_pairs_to_halves(each, dim)[begin - first : end - first] for each in found]

    def _name(self, part: str) -> str:
        """What the file calls `part`."""
        if self.config.mamba is not None and part.startswith("layers."):
            _, layer, name = part.split(".", 2)
            if (own := state_name(name, self.config.family)) is not None:
                return f"blk.{layer}.{own}"
        return _tensor_name(part)

    def texts(self) -> tuple[tokenizers.Tokenizer, TextFacts]:
        """The tokenizer and what goes with it."""
        return read_texts(self.file.metadata, self.origin)

    def close(self) -> None:
        self.file.close()

    def _read_precision(self) -> str:
        sizes: Counter[str] = Counter()
        for name, info in self.file.tensors.items():
            # Small models are mostly vocabulary, which says nothing of the rest.
            if len(info.shape) == 2 and name.startswith("blk."):
                sizes[self.file.kind_name(name)] += info.shape[0] * info.shape[1]
        if 2 * sum(sizes[kind] for kind in FOUR_BITS) > sizes.total():
            return "int4"
        kind = sizes.most_common(1)[0][0] if sizes else "F32"
        return {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, "quantized")

    def _refuse_unread(self) -> None:
        """A tensor that would not be used means a part of the model that would not be run."""
        used = {self._name(part) for slot in slots(self.config) for part in slot.parts}
        for name in self.file.tensors:
            if name not in used and name != FREQUENCIES and not name.endswith("attn_rot_embd"):
                raise UnsupportedModel(f"{self.origin}: the tensor {name} belongs to a part that is not supported")


def _tensor_name(part: str) -> str:
    """What a GGUF file calls `part`, such as "layers.3.q.weight" -> "blk.3.attn_q.weight"."""
    path, kind = part.rsplit(".", 1)
    if path in _HEAD:
        return f"{_HEAD[path]}.{kind}"
    _, layer, name = path.split(".")
    return f"blk.{layer}.{_LAYER[name]}.{kind}"


def _pairs_to_halves(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from rotation pairs side by side, as Llama's GGUF files have them, to halves."""
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
