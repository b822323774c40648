"""4-bit weights of GPTQ and AWQ checkpoints: step * (number - zero), by groups of inputs.

GPTQ (2022) packs eight inputs of an output into one word, AWQ (2023) eight outputs of an input, in an order of its own.
Where each zero is a power of two, or 0, its product with a step is exact in half precision, and weights become an
`Int4Linear`. Elsewhere they become a `BlockLinear` of five bits, which holds number - zero + 16 without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form

from ..native.block_linear import BlockLinear
from ..native.int4 import Int4Linear
from ..native.packed import BLOCK
from .fields import Anything, Fields, Flag, Kind, Text, Whole
from .gguf_blocks import planes

Read = Callable[[str], torch.Tensor]
"""Gives a tensor by the last part of its name, such as "qweight"."""

_PER_WORD = 8
_MIDDLE = 16
"""What is added to numbers less their zeros, which lie between -15 and 15."""
_METHODS = ("gptq", "awq")
_PLAIN = ("mxfp4",)
"""Methods whose weights `transformers` itself makes floating point."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ has each of eight outputs."""
_MOST_GROUP = 1 << 20
_CONFIG: dict[str, Kind] = {
    "quant_method": Text(64),
    "bits": Whole(1, 32),
    "group_size": Whole(-1, _MOST_GROUP),
    "desc_act": Flag(),
    "checkpoint_format": Text(64),
    "version": Text(64),
    **dict.fromkeys(("dynamic", "is_marlin_format", "lm_head", "pack_dtype"), Anything()),
}
_OFF: dict[str, tuple[Any, ...]] = {
    "dynamic": (None, {}, False),
    "is_marlin_format": (None, False),
    "lm_head": (None, False),
    "pack_dtype": (None, "int32"),
}
"""Fields that change how weights are kept, and the values that do not."""
_UNREAD = (
    # How the numbers were found, which the tensors do not depend on.
    *("sym", "zero_point", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset"),
    *("tokenizer", "batch_size", "block_name_to_quantize", "cache_block_outputs", "modules_in_block_to_quantize"),
    *("module_name_preceding_first_block", "modules_to_not_convert", "model_seqlen", "model_name_or_path"),
    *("model_file_base_name", "pad_token_id", "meta", "hyb_act", "act_group_aware", "mse", "offload_to_disk"),
    # Which kernels others run.
    *("backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "use_exllama", "use_cuda_fp16"),
    *("disable_exllama", "max_input_length"),
)
"""Fields that say nothing of the weights. Tensors say which layers are quantized."""
READ = (
    "read are 4-bit GPTQ and AWQ folders of Llama-like families, GGUF files, and folders in float32, float16 or "
    "bfloat16: give one of these, such as the model that it was made from"
)


@dataclass(frozen=True)
class FourBits:
    """How a checkpoint keeps its 4-bit weights.

    Attributes:
        group: Inputs that share a step, -1: all.
        added: To a stored zero.
        reordered: Whether inputs were quantized in another order than they have, so that tensors must say which group
            each belongs to.
    """

    awq: bool
    group: int
    added: int
    reordered: bool = False

    @classmethod
    def read(cls, raw: Any, origin: str) -> FourBits:
        """From a `quantization_config`.

        Raises:
            UnsupportedModel: For what is not read here.
        """
        fields = Fields(raw, f"{origin}: quantization_config", _CONFIG)
        method, bits = fields.get("quant_method", ""), fields.get("bits", 4)
        if method not in _METHODS or bits != 4:
            raise refused(fields)
        if unknown := sorted(fields.raw.keys() - fields.kinds.keys() - {*_UNREAD}):
            raise UnsupportedModel(
                f"{fields.origin}: the field {unknown[0]} is not known here, so the weights might be read wrongly: "
                "remove it if they do not depend on it"
            )
        for name, plain in _OFF.items():
            if fields.get(name) not in plain:
                raise fields.unsupported(name)
        layout = fields.get("version" if method == "awq" else "checkpoint_format", "")
        if layout.lower() not in ("", "gemm", "gptq", "gptq_v2"):
            raise UnsupportedModel(f"{origin}: {method} weights laid out as {layout!r} are not supported")
        group = fields.get("group_size", 128)
        if group == 0 or (group > 0 and group % BLOCK):
            raise UnsupportedModel(f"{origin}: groups of {group} inputs are not supported, multiples of {BLOCK} are")
        # The first version of GPTQ's files has zeros less one.
        added = int(method == "gptq" and layout != "gptq_v2")
        return cls(method == "awq", group, added, method == "gptq" and fields.get("desc_act", False))

    def shape(self, read: Read) -> tuple[int, int]:
        """(out, in) of a layer.

        Raises:
            CorruptFile: If its tensors do not fit together.
        """
        weight, zeros, scales = read("qweight"), read("qzeros"), read("scales")
        if weight.dim() != 2 or scales.dim() != 2 or {weight.dtype, zeros.dtype} != {torch.int32}:
            raise CorruptFile(
                "4-bit weights should be 32-bit words in two dimensions, and so their zeros: the file is damaged"
            )
        packed, other = weight.shape
        outputs, inputs = (other * _PER_WORD, packed) if self.awq else (other, packed * _PER_WORD)
        group = inputs if self.group == -1 else self.group
        groups = -(-inputs // group)
        if inputs % BLOCK or scales.shape != (groups, outputs) or zeros.shape != (groups, outputs // _PER_WORD):
            raise CorruptFile(
                f"4-bit weights [{outputs}, {inputs}] should have steps for {groups} groups of inputs, not "
                f"{list(scales.shape)}: the file is damaged"
            )
        return outputs, inputs

    def is_exact(self, read: Read) -> bool:
        """Whether products of steps and zeros are exact in half precision, whatever the steps."""
        zeros = self._zeros(read, 0, self.shape(read)[0])
        return bool((zeros & (zeros - 1) == 0).all())

    def blocks(self, read: Read, begin: int, end: int, form: Form) -> Int4Linear | BlockLinear:
        """Outputs of a layer, in blocks of four bits or of five."""
        scales, zeros, numbers, each = self._parts(read, begin, end)
        inputs, steps = len(numbers), scales[each[::BLOCK]].T.contiguous()
        if form == Form.BLOCKS4:
            least = (-(scales.float() * zeros)).half()
            pairs = numbers.to(torch.uint8).T.reshape(end - begin, inputs // 2, 2)
            return Int4Linear(pairs[..., 0] | pairs[..., 1] << 4, steps, least[each[::BLOCK]].T.contiguous())
        values = (numbers - zeros[each] + _MIDDLE).to(torch.uint8).T.contiguous()
        weight = torch.from_numpy(planes(values.numpy(), 5))
        return BlockLinear(weight, torch.stack((steps, steps * -_MIDDLE), dim=-1))

    def dense(self, read: Read, begin: int, end: int) -> torch.Tensor:
        """[outputs, in] float32: the weights of a layer."""
        scales, zeros, numbers, each = self._parts(read, begin, end)
        return (scales.float()[each] * (numbers - zeros[each])).T.contiguous()

    def _parts(self, read: Read, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Steps and zeros [groups, outputs], numbers [in, outputs], and the group of each input [in]."""
        _, inputs = self.shape(read)
        numbers, scales = self._numbers(read("qweight"), begin, end), read("scales")[:, begin:end].half()
        return scales, self._zeros(read, begin, end), numbers, self._groups(inputs)

    def _groups(self, inputs: int) -> torch.Tensor:
        return torch.arange(inputs, device="cpu") // (inputs if self.group == -1 else self.group)

    def _zeros(self, read: Read, begin: int, end: int) -> torch.Tensor:
        """[groups, outputs]"""
        if self.awq:
            return _outputs(read("qzeros"), begin, end)
        return _bits(read("qzeros")).flatten(1)[:, begin:end] + self.added & 15

    def _numbers(self, weight: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[in, outputs]"""
        if self.awq:
            return _outputs(weight, begin, end)
        return _bits(weight[:, begin:end]).transpose(1, 2).flatten(0, 1)

    def check_order(self, read: Read, *, named: bool) -> None:
        """Refuse inputs that are not in the order of their groups.

        Args:
            named: Whether a tensor says the groups.
        """
        if named:
            inputs = self.shape(read)[1]
            apart = not torch.equal(read("g_idx").long(), self._groups(inputs))
        else:
            apart = self.reordered and self.group != -1
        if apart:
            raise UnsupportedModel(
                "GPTQ weights with reordered inputs (desc_act) are not supported: get the file made without"
            )


def refused(fields: Fields) -> UnsupportedModel:
    """The error for weights that are quantized in a way that is not read, by their `quantization_config`."""
    bits = fields.get("bits")
    method = fields.get("quant_method", "an unnamed method") + ("" if bits is None else f" with {bits} bits")
    return UnsupportedModel(f"{fields.origin}: weights quantized by {method} are not read here: {READ}")


def refuse_quantized(config: Any, origin: str, reason: UnsupportedModel) -> None:
    """Raise UnsupportedModel if `transformers` needs other packages to read the weights.

    Args:
        config: The content of the config.json.
        origin: What errors call the file.
        reason: Why this package does not run the model itself, which is all there is to say of weights that it reads.
    """
    raw = Fields(config, origin, {"quantization_config": Anything()}).get("quantization_config")
    if not raw:
        return
    fields = Fields(raw, f"{origin}: quantization_config", _CONFIG)
    method = fields.get("quant_method")
    if method in _METHODS and fields.get("bits", 4) == 4:
        raise reason
    if method not in _PLAIN:
        raise refused(fields)


def read_four_bits(config: Any, origin: str) -> FourBits | None:
    """How the weights that go with a config.json are kept; None where they are floating point."""
    raw = config.get("quantization_config")
    return FourBits.read(raw, origin) if raw else None


def _bits(words: torch.Tensor) -> torch.Tensor:
    """[n, m] int32 -> the eight numbers of each word [n, m, 8], lowest bits first."""
    return words[..., None] >> (4 * torch.arange(_PER_WORD, dtype=torch.int32, device="cpu")) & 15


def _outputs(words: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """[n, outputs / 8] int32 of AWQ -> some of its outputs [n, end - begin]."""
    first = begin // _PER_WORD
    some = _bits(words[:, first : -(-end // _PER_WORD)])[..., list(_AWQ_ORDER)].flatten(1)
    return some[:, begin - first * _PER_WORD : end - first * _PER_WORD]
