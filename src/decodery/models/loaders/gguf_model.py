"""A GGUF file as a source of weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form

from ..families import switched
from ..families.gated_rows import Span, gate_span, steps_span
from ..families.switched import SWITCHED
from ..native.super_blocks import BlockKind, block_layer
from ..tokenizers.tokenizer import TextFacts
from ..torch import latent
from ..torch.rope import head_order
from .fused_slots import slots
from .gguf_architecture import Architecture
from .gguf_architectures import architecture_of
from .gguf_blocks import FOUR_BITS, READ
from .gguf_config import read_gguf_config
from .gguf_file import EXPERTS, GGUFFile
from .gguf_gemma import STREAMS, WHOLE, unused
from .gguf_rope import FACTORS
from .gguf_states import FAMILIES, flat_part, held_shape, state_name, vector
from .gguf_tokenizer import read_texts
from .in_place import Piece

if TYPE_CHECKING:
    import tokenizers

_PAIRED = ("llama", "llada")
"""Families whose files have the two numbers that are turned together side by side."""
_QKV, _HALVES = ("q", "k", "v"), ("gate", "up")
"""Parts that some files have in one tensor."""
_HEAD = {"embedding": "token_embd", "norm": "output_norm", "head": "output", **WHOLE}
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
    "sinks": "attn_sinks",
    "router": "ffn_gate_inp",
    "shared_router": "ffn_gate_inp_shexp",
    **{f"shared_{half}": f"ffn_{half}_shexp" for half in ("gate", "up", "down")},
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
        self._architecture = architecture_of(self.file) or Architecture("")
        self.precision = self._read_precision()
        self._refuse_unread()

    @cached_property
    def _factors(self) -> dict[str, float]:
        """What parts are multiplied by as they are read."""
        if self.config.family not in SWITCHED:
            return {}
        prefix = self.file.metadata["general.architecture"]
        return switched.factors({"logits_scaling": self.file.metadata.get(f"{prefix}.logit_scale")}, self.config)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the part `name`.

        Raises:
            CorruptFile: If the file has none.
        """
        if (halves := self._halves(name)) is not None:
            keys, values = (self.file.info(each).shape for each in halves)
            if len(keys) != 3 or len(values) != 3 or keys[:2] != (values[0], values[2]):
                raise CorruptFile(f"{self.origin}: {' and '.join(halves)} do not fit each other")
            return (keys[0] * (keys[2] + values[1]), keys[1])
        tensor, _, rows = self._span(name)
        shape = self.file.info(tensor).shape
        if flat_part(name):
            return held_shape(name, shape, self.config)
        return (rows, shape[-1]) if len(shape) > 1 and name.endswith(".weight") else (rows,)

    def part(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of the part `name` (see `fused_slots`) in float32."""
        if flat_part(name):
            return vector(name, torch.from_numpy(self.file.rows(self._name(name))), self.config)[begin:end]
        if (halves := self._halves(name)) is not None:
            of_keys, of_values = (torch.from_numpy(self.file.rows(each)) for each in halves)
            return torch.cat((of_keys.transpose(1, 2), of_values), dim=1).flatten(0, 1)[begin:end]
        if ".experts." in name and name.endswith(".bias"):
            tensor, first, count = self._span(name)
            return torch.from_numpy(self.file.rows(tensor, first // count, first // count + 1))[0, begin:end]
        factor = self._factors.get(name.split(".")[-2], 1.0)
        if factor != 1.0:
            return torch.from_numpy(self.file.rows(self._name(name), begin, end)) * factor
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

    def columns(self, slot: str) -> torch.Tensor | None:
        """See `convert.Parts`: no file has them in another order."""
        return None

    @property
    def size(self) -> int:
        """Of the file in bytes."""
        return self.file.size

    def piece(self, name: str) -> Piece | None:
        """Where a part lies, if it consists of blocks that can be read in place."""
        if self._order(name) is not None or self._halves(name) is not None:
            return None
        tensor, first, rows = self._span(name)
        info, kind = self.file.info(tensor), self.file.kind_name(tensor)
        if kind not in READ or (len(info.shape) != 2 and not tensor.endswith(EXPERTS)):
            return None
        dim = self.config.head_dim
        own = Piece(kind, info.offset, rows, info.shape[-1])
        own = replace(own, begin=info.offset + first * own.row_bytes)
        if (apart := self._apart(name)) is not None:
            own = replace(own, size=apart.size, apart=apart.apart)
        if not self._reordered(name) or rows % dim:
            return own
        return replace(own, turned=dim, rotated=self.config.rope.rotated, paired=self._paired)

    @property
    def _paired(self) -> bool:
        """Whether rotated pairs lie side by side."""
        return self.config.family in _PAIRED or self._architecture.paired

    def _reordered(self, name: str) -> bool:
        """Whether the rows of a part stand in another order in each head here."""
        if self.config.latent is not None:
            return False
        turned = self._paired or self.config.rope.rotated not in (0, self.config.head_dim)
        return turned and name.startswith("layers.") and name.split(".")[2] in ("q", "k", "q_norm", "k_norm")

    def _rows(
        self, name: str, begin: int, end: int | None, read: Callable[[str, int, int], Iterable[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What `read` gives of rows of a part, in our order."""
        (tensor, start, rows), dim = self._span(name), self.config.head_dim
        end = rows if end is None else min(end, rows)
        if (order := self._order(name)) is not None:
            return [each[order][begin:end] for each in read(tensor, start, start + rows)]
        if (apart := self._apart(name)) is not None:
            return self._turns(name, tensor, apart, begin, end, read)
        if not self._reordered(name) or rows % dim:
            return list(read(tensor, start + begin, start + end))
        # Rows move within their heads: whole heads are read.
        first = begin // dim * dim
        found = read(tensor, start + first, start + -(-end // dim) * dim)
        order = head_order(dim, self.config.rope.rotated or dim, paired=self._paired)
        return [each.unflatten(0, (-1, dim))[:, order].flatten(0, 1)[begin - first : end - first] for each in found]

    def _turns(
        self,
        name: str,
        tensor: str,
        apart: Span,
        begin: int,
        end: int,
        read: Callable[[str, int, int], Iterable[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """`_rows`, of a tensor in which others lie between."""
        dim, own = self.config.head_dim, apart.rows()
        if self._reordered(name):
            order = head_order(dim, self.config.rope.rotated or dim, paired=self._paired)
            own = own.unflatten(0, (-1, dim))[:, order].flatten()
        if begin >= end:
            return list(read(tensor, 0, 0))
        own = own[begin:end]
        first, last = int(own.min()), int(own.max()) + 1
        return [each[own - first] for each in read(tensor, first, last)]

    def _apart(self, part: str) -> Span | None:
        """Which rows of its tensor a part is where others lie between; None where it is all or one run of them."""
        name = part.split(".")[2] if part.startswith("layers.") else ""
        return gate_span(name, self.config) or steps_span(name, self.config)

    def _order(self, name: str) -> torch.Tensor | None:
        """Which rows a part of a layer takes, one after another; None for all as they are."""
        states = self.config.selective
        if states is not None and name.endswith(".qkv.weight") and self.config.recurrent(int(name.split(".")[1])):
            # Files have the rows before their gates, as checkpoints do.
            return torch.arange(2 * states.inner, device="cpu").roll(-states.inner)
        if self.config.latent is None or not name.startswith("layers."):
            return None
        return latent.rows(name.split(".")[2], self.config)

    def _halves(self, part: str) -> tuple[str, str] | None:
        """The tensors of what makes keys and values of latents, None where they are one or it is another part."""
        if not part.endswith(".heads_up.weight") or self._plain_name(part) in self.file.tensors:
            return None
        stem = f"blk.{part.split('.')[1]}.attn"
        return f"{stem}_k_b.weight", f"{stem}_v_b.weight"

    def _span(self, part: str) -> tuple[str, int, int]:
        """The tensor that holds a part, which of its rows is the first one, and how many there are."""
        name = self._name(part)
        path, kind = part.rsplit(".", 1)
        inner = path.split(".")[2] if path.startswith("layers.") else path
        if inner == "experts" or name in STREAMS.values():
            number, shape = int(path.split(".")[3] if inner == "experts" else path[-1]), self.file.info(name).shape
            if number >= shape[0] or len(shape) != (3 if kind == "weight" else 2):
                raise CorruptFile(f"{self.origin}: {name} has the shape {list(shape)}, and should have more experts")
            if inner == "experts" and name.endswith("ffn_gate_up_exps.weight"):
                # What gates open follows the gates.
                half = shape[1] // 2
                return name, number * shape[1] + half * path.endswith(".up"), half
            return name, number * shape[1], shape[1]
        whole = self.file.info(name).shape[0]
        if (apart := self._apart(part)) is not None:
            if whole != apart.apart * apart.turns:
                raise CorruptFile(
                    f"{self.origin}: {name} has {whole} rows, and should have {apart.apart * apart.turns}"
                )
            return name, apart.first, apart.size * apart.turns
        if self._fused(part) is not None:
            sizes = [self.config.intermediate_size] * 2 if inner in _HALVES else self._heads()
            place = (_HALVES if inner in _HALVES else _QKV).index(inner)
            if whole != sum(sizes):
                raise CorruptFile(f"{self.origin}: {name} has {whole} rows, and should have {sum(sizes)}")
            return name, sum(sizes[:place]), sizes[place]
        return name, 0, whole

    def _heads(self) -> list[int]:
        """Rows of queries, keys and values."""
        keys = self.config.num_kv_heads * self.config.head_dim
        return [self.config.num_heads * self.config.head_dim, keys, keys]

    def _name(self, part: str) -> str:
        """What the file calls the tensor that holds `part`."""
        return self._fused(part) or self._plain_name(part)

    def _fused(self, part: str) -> str | None:
        """The tensor that holds `part` together with others, None where it has one of its own."""
        inner = part.split(".")[2] if part.startswith("layers.") else ""
        if inner == "experts" and not part.endswith(".down.weight"):
            own = self._plain_name(part)
            other = own.replace("ffn_gate_exps", "ffn_gate_up_exps").replace("ffn_up_exps", "ffn_gate_up_exps")
            return other if own not in self.file.tensors and other in self.file.tensors else None
        if inner not in (*_QKV, *_HALVES) or (inner in _HALVES and not self.config.gated):
            return None
        own = self._plain_name(part)
        lead = own.replace(f"ffn_{inner}", "ffn_gate") if inner in _HALVES else own
        other = own.replace(f"ffn_{inner}", "ffn_up") if inner in _HALVES else own.replace(f"attn_{inner}", "attn_qkv")
        return other if lead not in self.file.tensors and other in self.file.tensors else None

    def _plain_name(self, part: str) -> str:
        """What a file calls `part` where it has a tensor of its own."""
        if self.config.family in FAMILIES and part.startswith("layers."):
            _, layer, name = part.split(".", 2)
            if (own := state_name(name, self.config.family)) is not None:
                return f"blk.{layer}.{own}"
        read = self._architecture
        if part.startswith("layers."):
            _, layer, inner = part.split(".", 2)
            name, _, kind = inner.rpartition(".")
            if name in read.convolving and self.config.convolves(int(layer)):
                return f"blk.{layer}.{read.convolving[name]}.{kind}"
            if name in read.recurrent and self.config.recurrent(int(layer)):
                return f"blk.{layer}.{read.recurrent[name]}"
        if (stacked := STREAMS.get(part[: part.rfind("_")])) is not None:
            return stacked
        return f"{read.norm}.weight" if part == "norm.weight" else _tensor_name(part, read)

    def texts(self) -> tuple[tokenizers.Tokenizer, TextFacts]:
        """The tokenizer and what goes with it."""
        return read_texts(self.file.metadata, self.origin)

    def close(self) -> None:
        self.file.close()

    def _read_precision(self) -> str:
        sizes: Counter[str] = Counter()
        for name, info in self.file.tensors.items():
            # Small models are mostly vocabulary, which says nothing of the rest.
            if len(info.shape) > 1 and name.startswith("blk."):
                sizes[self.file.kind_name(name)] += math.prod(info.shape)
        if 2 * sum(sizes[kind] for kind in FOUR_BITS) > sizes.total():
            return "int4"
        kind = sizes.most_common(1)[0][0] if sizes else "F32"
        return {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, "quantized")

    def _further(self, layer: int) -> bool:
        """Whether a layer is one of those that predict further tokens, which follow the others."""
        prefix = self.file.metadata["general.architecture"]
        return layer >= self.config.num_layers and bool(self.file.metadata.get(f"{prefix}.nextn_predict_layers"))

    def _refuse_unread(self) -> None:
        """A tensor that would not be used means a part of the model that would not be run."""
        parts = [part for slot in slots(self.config) for part in slot.parts]
        used = {name for part in parts for name in self._halves(part) or (self._name(part),)}
        for name in self.file.tensors:
            if name.startswith("blk.") and name.split(".")[1].isdigit() and self._further(int(name.split(".")[1])):
                continue
            known = name in used or name in FACTORS or name.endswith("attn_rot_embd") or unused(name, self.config)
            if not known:
                raise UnsupportedModel(f"{self.origin}: the tensor {name} belongs to a part that is not supported")


def _tensor_name(part: str, architecture: Architecture) -> str:
    """What a GGUF file calls `part`, such as "layers.3.q.weight" -> "blk.3.attn_q.weight"."""
    path, kind = part.rsplit(".", 1)
    if path in _HEAD:
        return f"{_HEAD[path]}.{kind}"
    _, layer, name = path.split(".", 2)
    if name in architecture.exact:
        return f"blk.{layer}.{architecture.exact[name]}"
    if name.startswith("experts."):
        return f"blk.{layer}.ffn_{name.split('.')[2]}_exps.{kind}"
    return f"blk.{layer}.{architecture.parts.get(name) or _LAYER[name]}.{kind}"
