"""Random weights in every published layout of quantized folders, beside what their formulas say that they are.

Formulas are those of the formats' own code, in float32: AutoGPTQ and GPTQModel, AutoAWQ, `transformers`, vLLM,
compressed-tensors, Model Optimizer and bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from decodery.core.native.kernels import Form

Random = np.random.Generator
Made = tuple[dict[str, torch.Tensor], np.ndarray]
"""Tensors by the last parts of their names, and the weights [out, in] float32."""

GROUP = 32


@dataclass(frozen=True)
class Layout:
    """A layout.

    Attributes:
        make: From a generator, outputs and inputs.
        config: The `quantization_config`.
        forms: The native forms that hold such weights as they are, the first of which is taken.
        dtype: Of the folder's other weights.
    """

    make: Callable[[Random, int, int], Made]
    config: dict[str, Any]
    forms: tuple[Form, ...] = ()
    dtype: torch.dtype = torch.bfloat16


def strings(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """[n, m] -> [n, words] int32: the lowest bits of the first number first."""
    each = (numbers[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(numbers), -1)
    each = np.pad(each, ((0, 0), (0, -each.shape[1] % 32)))
    return torch.from_numpy(np.packbits(each, axis=1, bitorder="little").view(np.int32).copy())


def halves(numbers: np.ndarray, *, high_first: bool = False) -> torch.Tensor:
    """[n, 2 m] of four bits -> [n, m] uint8."""
    first, second = numbers[:, 0::2], numbers[:, 1::2]
    low, high = (second, first) if high_first else (first, second)
    return torch.from_numpy((low | high << 4).astype(np.uint8))


def shuffled_groups(order: np.ndarray) -> np.ndarray:
    """Groups of inputs in another order, the same for all matrices that read as many inputs."""
    return np.random.default_rng(len(order)).permutation(order)


def steps(random: Random, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(random.uniform(0.005, 0.02, shape).astype(np.float32)).to(dtype)


def plain(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


# --- integers -------------------------------------------------------------------------------------------------------


def gptq(
    bits: int, *, zero: int | None = None, less: int = 1, shuffled: bool = False, dtype: Any = torch.float16
) -> Any:
    """weight = scale * (number - zero), groups by `g_idx`; zeros are stored less one in the first version."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        groups, most = -(-inputs // GROUP), 1 << bits
        numbers, zeros = random.integers(0, most, (inputs, outputs)), random.integers(0, most, (groups, outputs))
        if zero is not None:
            zeros[:] = zero
        stored = zeros - less & most - 1
        # AutoGPTQ cuts the sum to the bits of a number, but for numbers of three.
        zeros = stored + less if bits == 3 else zeros
        order, scales = np.arange(inputs) // GROUP, steps(random, groups, outputs, dtype=dtype)
        if shuffled:
            order = shuffled_groups(order)
        exact = plain(scales)[order] * (numbers - zeros[order]).astype(np.float32)
        tensors = {
            "qweight": strings(numbers.T, bits).T.contiguous(),
            "qzeros": strings(stored, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(order).int(),
            "bias": torch.zeros(outputs).half(),
        }
        return tensors, exact.T

    return make


def awq(*, zero: int | None = None, gemv: bool = False) -> Any:
    """weight = scale * (number - zero); eight outputs a word in the order 0, 2, 4, 6, 1, 3, 5, 7, or inputs in gemv."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        groups = inputs // GROUP
        numbers, zeros = random.integers(0, 16, (inputs, outputs)), random.integers(0, 16, (groups, outputs))
        if zero is not None:
            zeros[:] = zero
        scales = steps(random, groups, outputs)
        order = np.arange(inputs) // GROUP
        exact = (plain(scales)[order] * (numbers - zeros[order]).astype(np.float32)).T
        if gemv:
            # Rows of groups of 32 are as wide as 32 groups need.
            wide = np.zeros((outputs, 32), np.int64)
            wide[:, :groups] = zeros.T
            scale = torch.zeros(outputs, 32, dtype=torch.float16)
            scale[:, :groups] = scales.T
            return {"qweight": strings(numbers.T, 4), "qzeros": strings(wide, 4), "scales": scale}, exact

        def mixed(rows: np.ndarray) -> torch.Tensor:
            return strings(rows.reshape(len(rows), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(rows.shape), 4)

        return {"qweight": mixed(numbers), "qzeros": mixed(zeros), "scales": scales}, exact

    return make


def packed(
    bits: int, group: int | None = GROUP, *, zeros: bool = False, dtype: Any = torch.bfloat16, shuffled: bool = False
) -> Any:
    """pack-quantized: signed numbers plus 2^(bits - 1) in strings, zeros along outputs; (number - zero) * scale."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        middle, width = 1 << bits - 1, group or inputs
        groups = inputs // width
        numbers = random.integers(-middle, middle, (outputs, inputs))
        zero = random.integers(-middle, middle, (outputs, groups)) if zeros else np.zeros((outputs, groups), np.int64)
        scale, order = steps(random, outputs, groups, dtype=dtype), np.arange(inputs) // width
        if shuffled:
            order = shuffled_groups(order)
        exact = (numbers - zero[:, order]).astype(np.float32) * plain(scale)[:, order]
        tensors = {
            "weight_packed": strings(numbers + middle, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if zeros:
            tensors["weight_zero_point"] = strings((zero + middle).T, bits).T.contiguous()
        if shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(order).int()
        return tensors, exact

    return make


def eight(kind: str, *, zeros: bool = False, dtype: Any = torch.bfloat16) -> Any:
    """int-quantized: int8 weights, a scale for a tensor, each output or each group."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        numbers = random.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        # The least number, too, is one.
        numbers[:, 0] = -128
        shape = {"tensor": (1,), "channel": (outputs, 1), "group": (outputs, inputs // GROUP)}[kind]
        scale = steps(random, *shape, dtype=dtype)
        zero = random.integers(-8, 8, shape).astype(np.int8) if zeros else np.zeros(shape, np.int8)
        width = inputs // shape[-1]
        less = zero.astype(np.int64).repeat(width, axis=-1)
        exact = (numbers - less).astype(np.float32) * plain(scale).repeat(width, axis=-1)
        tensors = {"weight": torch.from_numpy(numbers), "weight_scale": scale}
        if zeros:
            tensors["weight_zero_point"] = torch.from_numpy(zero)
        return tensors, exact

    return make


# --- floating point -------------------------------------------------------------------------------------------------


def e4m3(codes: np.ndarray) -> np.ndarray:
    """A sign, four bits of exponent and three of mantissa."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(np.int64), codes & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(sign, -value, value).astype(np.float32)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """A sign, two bits of exponent and one of mantissa."""
    exponent, mantissa = (codes >> 1 & 3).astype(np.int64), codes & 1
    value = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return np.where(codes & 8, -value, value).astype(np.float32)


def random_e4m3(random: Random, *shape: int, positive: bool = False) -> tuple[torch.Tensor, np.ndarray]:
    """Numbers that are no NaN, and what they stand for."""
    codes = random.integers(0, 127, shape).astype(np.uint8)
    codes |= np.uint8(0 if positive else 128) * random.integers(0, 2, shape).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), e4m3(codes)


def fp8(kind: str, name: str = "weight_scale", *, dtype: Any = torch.float32, extra: tuple[str, ...] = ()) -> Any:
    """E4M3 weights times a scale of a tensor, an output, a group or a block, which may be cut off."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        weight, values = random_e4m3(random, outputs, inputs)
        height, width = {
            "tensor": (outputs, inputs), "channel": (1, inputs), "group": (1, GROUP), "block": (48, 40),
            "block of 128": (128, 128),
        }[kind]  # fmt: skip
        grid = -(-outputs // height), -(-inputs // width)
        if dtype == torch.uint8:
            exponents = random.integers(110, 118, grid).astype(np.uint8)
            scale, factors = torch.from_numpy(exponents), np.float32(2.0) ** (exponents.astype(np.float32) - 127)
        else:
            scale = steps(random, *grid, dtype=dtype) / 64
            factors = plain(scale)
        rows, columns = np.arange(outputs)[:, None] // height, np.arange(inputs) // width
        shape = () if kind == "tensor" else grid
        beside = {last: torch.ones(()) for last in extra}
        return {"weight": weight, name: scale.reshape(shape), **beside}, values * factors[rows, columns]

    return make


def nvfp4(*, optimizer: bool) -> Any:
    """E2M1 numbers times E4M3 scales of 16 inputs, times a global one, or over it in compressed-tensors."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        codes = random.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        scale, scales = random_e4m3(random, outputs, inputs // 16, positive=True)
        if optimizer:
            factor = np.float32(random.uniform(1e-5, 1e-4))
            whole = scales * factor
            tensors = {
                "weight": halves(codes), "weight_scale": scale, "weight_scale_2": torch.tensor(factor),
                "input_scale": torch.ones(()),
            }  # fmt: skip
        else:
            factor = np.float32(random.uniform(1e4, 1e5))
            whole = scales / factor
            tensors = {
                "weight_packed": halves(codes), "weight_scale": scale, "weight_global_scale": torch.tensor([factor]),
                "input_global_scale": torch.ones(1),
            }  # fmt: skip
        return tensors, e2m1(codes) * whole.repeat(16, axis=1)

    return make


def mxfp4(random: Random, outputs: int, inputs: int) -> Made:
    """E2M1 numbers times powers of two of 32 inputs."""
    codes = random.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    exponents = random.integers(119, 123, (outputs, inputs // 32)).astype(np.uint8)
    factors = (2.0 ** (exponents.astype(np.float32) - 127)).astype(np.float32)
    tensors = {"weight_packed": halves(codes), "weight_scale": torch.from_numpy(exponents)}
    return tensors, e2m1(codes) * factors.repeat(32, axis=1)


# --- bitsandbytes ---------------------------------------------------------------------------------------------------

_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
_FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
TABLES = {"nf4": np.array(_NF4, np.float32), "fp4": np.array(_FP4 + [-n for n in _FP4], np.float32) / np.float32(12)}


def four_bits(kind: str, *, nested: bool = False) -> Any:
    """table[code] * absmax of 64 codes of the whole matrix; nested: map[absmax] * absmax of 256 of them + offset."""

    def make(random: Random, outputs: int, inputs: int) -> Made:
        codes, block = random.integers(0, 16, (1, outputs * inputs)).astype(np.uint8), 64
        blocks = -(-outputs * inputs // block)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs],
        }  # fmt: skip
        largest = random.uniform(0.1, 0.4, blocks).astype(np.float32)
        stem = "weight."
        tensors = {
            "weight": halves(codes, high_first=True).reshape(-1, 1),
            f"{stem}absmax": torch.from_numpy(largest),
            f"{stem}quant_map": torch.from_numpy(TABLES[kind]),
        }
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            small = random.integers(0, 256, blocks).astype(np.uint8)
            values = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
            outer = random.uniform(0.1, 0.2, -(-blocks // 256)).astype(np.float32)
            largest = values[small] * outer.repeat(256)[:blocks] + np.float32(0.25)
            tensors |= {
                f"{stem}absmax": torch.from_numpy(small),
                f"{stem}nested_absmax": torch.from_numpy(outer),
                f"{stem}nested_quant_map": torch.from_numpy(values),
            }
        text = json.dumps(state).encode()
        tensors[f"{stem}quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        exact = TABLES[kind][codes[0]] * largest.repeat(block)[: codes.size]
        return tensors, exact.reshape(outputs, inputs)

    return make


def rows_of_int8(random: Random, outputs: int, inputs: int) -> Made:
    """number * absmax of an output * 1/127, in this order."""
    numbers = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    largest = random.uniform(0.5, 1.5, outputs).astype(np.float32)
    exact = numbers.astype(np.float32) * largest[:, None] * np.float32(7.874015718698502e-3)
    tensors = {
        "weight": torch.from_numpy(numbers), "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip
    return tensors, exact


# --- all of them ----------------------------------------------------------------------------------------------------


def _compressed(layout: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    group = {"targets": ["re:.*_proj$"], "weights": {"symmetric": True, "dynamic": False, **weights}, **others}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None, "version": "0.12.2",
    }  # fmt: skip


def _integer(bits: int, strategy: str = "group", **others: Any) -> dict[str, Any]:
    size = {"group_size": GROUP} if strategy == "group" else {}
    return {"num_bits": bits, "type": "int", "strategy": strategy, **size, **others}


def _float(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **others}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_INPUTS = {"input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}
_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29"}, "ignore": ["lm_head"]}
_BNB = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True, "llm_int8_threshold": 6.0}
_FOUR = (Form.BLOCKS4, Form.BLOCKS5, Form.BLOCKS8)
_FIVE = (Form.BLOCKS5, Form.BLOCKS8)
_E2M1, _MXFP4, _E4M3, _CODES = (Form.FLOAT4,), (Form.MXFP4,), (Form.FLOAT8,), (Form.CODES4,)
_HALF = torch.float16

LAYOUTS: dict[str, Layout] = {
    "GPTQ 4 bits": Layout(gptq(4, zero=8), _GPTQ | {"bits": 4}, _FOUR, _HALF),
    "GPTQ 4 bits, v2, any zeros": Layout(
        gptq(4, less=0), _GPTQ | {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}, _FIVE, _HALF
    ),
    "GPTQ 4 bits, act-order": Layout(
        gptq(4, zero=8, shuffled=True), _GPTQ | {"bits": 4, "desc_act": True}, _FOUR, _HALF
    ),
    "GPTQ 4 bits, steps in float32": Layout(gptq(4, zero=8, dtype=torch.float32), _GPTQ | {"bits": 4}, dtype=_HALF),
    "GPTQ 8 bits": Layout(gptq(8, zero=128), _GPTQ | {"bits": 8}, (Form.BLOCKS8,), _HALF),
    "GPTQ 8 bits, act-order": Layout(
        gptq(8, zero=128, shuffled=True), _GPTQ | {"bits": 8, "desc_act": True}, (Form.BLOCKS8,), _HALF
    ),
    "GPTQ 8 bits, any zeros": Layout(gptq(8), _GPTQ | {"bits": 8, "sym": False}, dtype=_HALF),
    "GPTQ 3 bits": Layout(gptq(3), _GPTQ | {"bits": 3}, _FIVE, _HALF),
    "GPTQ 2 bits": Layout(gptq(2, zero=2), _GPTQ | {"bits": 2}, _FOUR, _HALF),
    "AWQ gemm": Layout(awq(), _AWQ, _FIVE, _HALF),
    "AWQ gemm, zeros of 8": Layout(awq(zero=8), _AWQ, _FOUR, _HALF),
    "AWQ gemv": Layout(awq(gemv=True), _AWQ | {"version": "gemv"}, _FIVE, _HALF),
    "FP8, a tensor's scale": Layout(
        fp8("tensor", extra=("input_scale",)), {"quant_method": "fp8", "activation_scheme": "static"}, _E4M3
    ),
    "FP8, blocks": Layout(
        fp8("block of 128", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head"]},
        _E4M3,
    ),
    "FP8, blocks of 48 by 40": Layout(
        fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 40]},
    ),
    "FP8, blocks, powers of two": Layout(
        fp8("block of 128", "weight_scale_inv", dtype=torch.uint8),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        _E4M3,
    ),
    "FBGEMM FP8": Layout(
        fp8("channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
        _E4M3,
    ),
    "compressed-tensors W4A16": Layout(packed(4), _compressed("pack-quantized", _integer(4)), _FOUR),
    "compressed-tensors W4A16, any zeros": Layout(
        packed(4, zeros=True), _compressed("pack-quantized", _integer(4, symmetric=False)), _FIVE
    ),
    "compressed-tensors W4A16, channels": Layout(
        packed(4, None, dtype=torch.float32), _compressed("pack-quantized", _integer(4, "channel")), (Form.ROWS8,)
    ),
    "compressed-tensors W4A16, act-order": Layout(
        packed(4, shuffled=True), _compressed("pack-quantized", _integer(4, actorder="group")), _FOUR
    ),
    "compressed-tensors W8A16": Layout(packed(8), _compressed("pack-quantized", _integer(8)), (Form.BLOCKS8,)),
    "compressed-tensors 3 bits": Layout(packed(3), _compressed("pack-quantized", _integer(3)), _FOUR),
    "compressed-tensors W8A8": Layout(
        eight("channel"), _compressed("int-quantized", _integer(8, "channel"), **_INPUTS),
        (Form.ROWS8, Form.BLOCKS8),
    ),
    "compressed-tensors W8A8, a tensor's scale": Layout(
        eight("tensor", dtype=torch.float32), _compressed("int-quantized", _integer(8, "tensor"), **_INPUTS),
        (Form.ROWS8,),
    ),
    "compressed-tensors W8A8, any zeros": Layout(
        eight("channel", zeros=True), _compressed("int-quantized", _integer(8, "channel", symmetric=False), **_INPUTS)
    ),
    "compressed-tensors W8A8, groups": Layout(
        eight("group"), _compressed("int-quantized", _integer(8), **_INPUTS), (Form.BLOCKS8,)
    ),
    "compressed-tensors FP8, channels": Layout(
        fp8("channel", dtype=torch.bfloat16), _compressed("float-quantized", _float(8, "channel"), **_INPUTS), _E4M3
    ),
    "compressed-tensors FP8, a tensor's scale": Layout(
        fp8("tensor", extra=("input_scale",)), _compressed("float-quantized", _float(8, "tensor"), **_INPUTS), _E4M3
    ),
    "compressed-tensors FP8, blocks": Layout(
        fp8("block of 128", dtype=torch.bfloat16),
        _compressed("float-quantized", _float(8, "block", block_structure=[128, 128]), **_INPUTS), _E4M3,
    ),
    "compressed-tensors NVFP4": Layout(
        nvfp4(optimizer=False),
        _compressed("nvfp4-pack-quantized", _float(4, "tensor_group", group_size=16), **_INPUTS), _E2M1,
    ),
    "compressed-tensors MXFP4": Layout(
        mxfp4, _compressed("mxfp4-pack-quantized", _float(4, "group", group_size=32), **_INPUTS), _MXFP4
    ),
    "compressed-tensors MXFP8": Layout(
        fp8("group", dtype=torch.uint8), _compressed("mxfp8-quantized", _float(8, "group", group_size=32), **_INPUTS)
    ),
    "Model Optimizer FP8": Layout(fp8("tensor", extra=("input_scale",)), _MODELOPT | {"quant_algo": "FP8"}, _E4M3
    ),
    "Model Optimizer FP8, channels": Layout(
        fp8("channel"), _MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, _E4M3
    ),
    "Model Optimizer FP8, blocks": Layout(fp8("block of 128"), _MODELOPT | {"quant_algo": "FP8_PB_WO"}, _E4M3
    ),
    "Model Optimizer NVFP4": Layout(nvfp4(optimizer=True), _MODELOPT | {"quant_algo": "NVFP4"}, _E2M1
    ),
    "bitsandbytes NF4": Layout(four_bits("nf4"), _BNB | {"bnb_4bit_quant_type": "nf4"}, _CODES),
    "bitsandbytes NF4, double": Layout(
        four_bits("nf4", nested=True), _BNB | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, _CODES
    ),
    "bitsandbytes FP4": Layout(four_bits("fp4"), _BNB | {"bnb_4bit_quant_type": "fp4"}),
    "bitsandbytes int8": Layout(rows_of_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, (Form.ROWS8,)),
}  # fmt: skip
"""By what the documentation calls them."""


ENDS = tuple(f"{name}.weight" for name in ("_proj", "w1", "w2", "w3", "kv_a_proj_with_mqa"))


def quantize_folder(
    folder: Path, layout: Layout, *, ends: tuple[str, ...] = ENDS, kept: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Replace weights of a saved model by random ones in a layout, and return these weights in floating point.

    Args:
        folder: Of a Hugging Face model.
        layout: The layout.
        ends: How the names of the weights end that are replaced.
        kept: Parts of names that are not replaced all the same.
    """
    random = np.random.default_rng(0)
    path, exact = folder / "model.safetensors", {}
    # What is not replaced is rounded to the folder's type.
    state = load_file(path)
    state |= {name: each.to(layout.dtype) for name, each in state.items() if each.dtype == torch.float32}
    exact = {name: tensor.float() for name, tensor in state.items()}
    for name in [name for name in state if name.endswith(ends) and not any(part in name for part in kept)]:
        tensors, weight = layout.make(random, *state.pop(name).shape)
        # A layer that has a bias keeps it.
        state = {name.removesuffix("weight") + last: tensor for last, tensor in tensors.items()} | state
        exact[name] = torch.from_numpy(weight.copy())
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"quantization_config": layout.config, "dtype": str(layout.dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(raw))
    return exact
