"""A model's weights as one safetensors file in the fused form of `Weights`, read in place (`convert` writes it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile

from ..config import ModelConfig
from ..native.block_linear import BlockLinear
from ..native.floats import Float4Linear, Float8Linear, MXFP4Linear, NF4Linear
from ..native.int4 import Int4Linear
from ..native.int8 import Int8Linear
from ..native.packed import BITS, BLOCK, CODE_GROUP, FLOAT_GROUP, SUPER
from ..native.reordered import ReorderedLinear
from ..native.rounded_inputs import LEVELS, MOST_SHIFT, RoundedInputs
from ..native.super_blocks import SuperBlockLinear, has_least, super_form
from ..native.ternary import PER_BYTE, TernaryLinear
from ..torch.weights import Dense, Kept, Layer, Linear, TokenInputs, Use, Weights, holders
from ..trained.artifact import read_tensors
from .fused_slots import LINEARS, MORE_LINEARS, TABLES, Slot, slots
from .in_place import IN_PLACE, File, Plan, Rows, WeightsInPlace, in_place
from .store import replacing


def save(path: Path, weights: Weights) -> None:
    """Write weights as they are. Where the embedding is the head's table, that is written once."""
    from safetensors.torch import save_file

    tensors = {"norm.weight": weights.norm}
    linears: dict[str, Any] = {"head": weights.head}
    if isinstance(weights.head, Dense) and weights.head.weight is weights.embedding:
        linears.clear()
    if not (isinstance(weights.head, Int8Linear) and torch.equal(weights.embedding.float(), weights.head.dense())):
        tensors["embedding.weight"] = weights.embedding
    if weights.positions is not None:
        tensors["positions.weight"] = weights.positions
    if weights.kept is not None:
        tensors |= {"kept.ids": weights.kept.ids.int(), "kept.rows": weights.kept.rows.int()}
    for holding, each in holders(weights):
        for name, part in vars(each).items():
            if isinstance(part, torch.Tensor):
                tensors[f"{holding}.{name}.weight"] = part
            elif part is not None:
                linears[f"{holding}.{name}"] = part
    for stem, linear in linears.items():
        tensors |= {f"{stem}.{name}": tensor for name, tensor in linear.tensors().items()}
    with replacing(path) as temporary:
        # A file holds every tensor apart, also those that share memory here; what layers lack has no numbers.
        held = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items() if tensor.numel()}
        save_file(held, temporary)


def read(path: Path, config: ModelConfig, device: torch.device, file: Path | None = None) -> Weights:
    """The weights that `convert.write` or `save` wrote; on a CPU they are mapped, not copied.

    Args:
        file: Where what is not in `path` is read in place.
    """
    try:
        tensors, metadata = read_tensors(path, device=str(device))
    except CorruptFile as error:
        raise CorruptFile(f"the converted weights {path} are damaged: remove that file and load again") from error

    placed: dict[str, Rows] = {}
    if file is not None:
        plan = Plan.read(metadata.get(IN_PLACE, ""), path)
        mapped = File(file, plan)
        placed = {name: Rows(mapped, pieces) for name, pieces in plan.slots.items()}
    _check(path, config, tensors, placed)

    def linear(name: str) -> Linear:
        found = plain(name)
        if (order := tensors.get(f"{name}.order")) is not None:
            assert isinstance(found, Int4Linear | BlockLinear)
            return ReorderedLinear(found, order)
        return found

    def plain(name: str) -> Linear:
        if (rows := placed.get(f"{name}.weight")) is not None:
            return in_place(rows, tensors.get(f"{name}.bias"))
        weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        if weight.dtype == torch.int8:
            return Int8Linear(weight, tensors[f"{name}.scale"], bias)
        if f"{name}.integers" in tensors:
            names = ("weight", "super_scales", "integers", "bias")
            own = {each: tensors[f"{name}.{each}"] for each in names if f"{name}.{each}" in tensors}
            return SuperBlockLinear.from_tensors(own)
        if f"{name}.half_steps" in tensors:
            return Float4Linear(weight, tensors[f"{name}.half_steps"], tensors[f"{name}.scale"], bias)
        if f"{name}.exponents" in tensors:
            return MXFP4Linear(weight, tensors[f"{name}.exponents"], bias)
        if f"{name}.group_scales" in tensors:
            return Float8Linear(weight, tensors[f"{name}.group_scales"], bias)
        if f"{name}.code_scales" in tensors:
            return NF4Linear(weight, tensors[f"{name}.code_scales"], bias)
        if f"{name}.scales" in tensors:
            return BlockLinear(weight, tensors[f"{name}.scales"], bias)
        if f"{name}.scale" in tensors:
            return TernaryLinear(weight, tensors[f"{name}.scale"], bias)
        if weight.dtype == torch.uint8:
            return Int4Linear(weight, tensors[f"{name}.step"], tensors[f"{name}.least"], bias)
        if f"{name}.levels" in tensors:
            return RoundedInputs(weight, tensors[f"{name}.levels"], tensors[f"{name}.shifts"], bias)
        return Dense(weight, bias)

    def layer(prefix: str) -> Layer:
        every = (*LINEARS, *MORE_LINEARS)
        linears = {
            name: linear(prefix + name) for name in every if f"{prefix}{name}.weight" in tensors.keys() | placed.keys()
        }
        others = (field.name for field in fields(Layer) if field.name not in every)
        weights = {name: tensors.get(f"{prefix}{name}.weight") for name in others}
        if "gate_up" not in linears:
            nothing = tensors["norm.weight"].new_empty(0)
            weights["mlp_norm"] = nothing
            linears |= dict.fromkeys(("gate_up", "down"), Dense(nothing[None, :0]))
        if "qkv" not in linears:
            nothing = tensors["norm.weight"].new_empty(0)
            weights["attention_norm"] = nothing
            linears |= dict.fromkeys(("qkv", "output"), Dense(nothing[None, :0]))
        return Layer(**weights, **linears)  # type: ignore[arg-type]

    def token_inputs(prefix: str) -> TokenInputs:
        names = ("table", "projection", "stream_in", "stream_out")
        linears = {name: linear(prefix + name) for name in names if f"{prefix}{name}.weight" in tensors.keys() | placed}
        return TokenInputs(norm=tensors[f"{prefix}norm.weight"], **linears)

    def use(prefix: str) -> Use:
        names = (field.name for field in fields(Use) if f"{prefix}{field.name}.weight" in tensors)
        return Use(**{name: linear(prefix + name) for name in names})

    blocks = 0 if config.shared is None else config.shared.blocks
    made: Callable[..., Weights] = Weights
    embedding: torch.Tensor | None = None
    if (table := placed.get("embedding.weight")) is not None:
        made = partial(WeightsInPlace, table=table)
    elif "embedding.weight" in tensors:
        embedding = tensors["embedding.weight"]
    else:
        embedding = tensors["head.weight"].float() * tensors["head.scale"][:, None]
    if "head.weight" in tensors or "head.weight" in placed:
        head = linear("head")
    else:
        assert embedding is not None
        head = Dense(embedding)
    return made(
        embedding=embedding,
        layers=[layer(f"layers.{index}.") for index in range(config.num_layers)],
        norm=tensors["norm.weight"],
        head=head,
        kept=Kept(tensors["kept.ids"].long(), tensors["kept.rows"].long()) if config.kept_tokens else None,
        positions=tensors.get("positions.weight"),
        shared=[layer(f"shared.{block}.") for block in range(blocks)],
        uses=[use(f"uses.{number}.") for number in range(len(config.sharing))],
        inputs=[token_inputs("inputs.0.")] if config.layer_inputs else [],
    )


_BESIDE = (
    *("scale", "step", "least", "scales", "super_scales", "integers", "levels", "shifts", "half_steps", "group_scales"),
    *("code_scales", "exponents", "order"),
)
"""Tensors that may stand beside the weight of a linear layer."""


def _check(path: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], placed: dict[str, Rows]) -> None:
    """Refuse tensors of other names, shapes or types than the configuration's: kernels would read beyond them."""
    # Layers that are only promised end this at the first one: there are no more slots than tensors.
    fitting = all(_fits(slot, tensors, placed) for slot in slots(config)) and _keeps(config, tensors)
    known = {"kept.ids", "kept.rows"}
    for slot in slots(config) if fitting else ():
        stem = slot.name.removesuffix("weight")
        known |= {slot.name, *(stem + name for name in _BESIDE)}
    if not fitting or not known.issuperset(tensors):
        raise CorruptFile(f"the weights {path} do not fit their configuration: get or make that file again")


def _fits(slot: Slot, tensors: dict[str, torch.Tensor], placed: dict[str, Rows]) -> bool:
    if (rows := placed.get(slot.name)) is not None:
        return rows.shape == slot.shape and (slot.linear or slot.name in TABLES)
    found = tensors.get(slot.name)
    if found is None:
        # Where embedding and head are one table, one of them is enough.
        other = {"embedding.weight": "head.weight", "head.weight": "embedding.weight"}.get(slot.name)
        return other in tensors
    stem = slot.name.removesuffix("weight")
    if not _orders(tensors, stem, slot):
        return False
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if not slot.linear or found.dtype in floats:
        whole = tuple(found.shape) == slot.shape and found.dtype in floats
        return whole and (not slot.linear or _rounds(tensors, stem, slot.shape[1]))
    outputs, inputs = slot.shape
    fours, eights = f"{stem}half_steps" in tensors, f"{stem}group_scales" in tensors
    ternary = found.dtype == torch.uint8 and f"{stem}scale" in tensors and not fours
    if found.dtype == torch.uint8 and not eights and inputs % (PER_BYTE if ternary else BLOCK):
        return False
    if eights:
        wanted = {"weight": slot.shape, "group_scales": (outputs, -(-inputs // FLOAT_GROUP))}
    elif f"{stem}exponents" in tensors:
        wanted = {"weight": (outputs, inputs // 2), "exponents": (outputs, inputs // BLOCK)}
    elif f"{stem}code_scales" in tensors:
        wanted = {"weight": (outputs, inputs // 2), "code_scales": (outputs, -(-inputs // CODE_GROUP))}
    elif fours:
        wanted = {"weight": (outputs, inputs // 2), "half_steps": (outputs, inputs * 2 // BLOCK), "scale": (outputs,)}
    elif found.dtype == torch.int8 or ternary:
        wanted = {"weight": (outputs, inputs // PER_BYTE) if ternary else slot.shape, "scale": (outputs,)}
    elif (integers := tensors.get(f"{stem}integers")) is not None:
        form = super_form(found, tensors.get(f"{stem}super_scales"), inputs)
        if form is None or integers.dtype != (torch.uint8 if has_least(form) else torch.int8):
            return False
        scales = (outputs, inputs // SUPER, 1 + has_least(form))
        wanted = {
            "weight": (outputs, inputs * BITS[form] // 8),
            "super_scales": scales,
            "integers": (outputs, inputs // BLOCK, 2),
        }
    elif f"{stem}scales" in tensors:
        sizes = [(outputs, inputs * bits // 8) for bits in BITS.values()]
        fitting = tuple(found.shape) if tuple(found.shape) in sizes else sizes[0]
        wanted = {"weight": fitting, "scales": (outputs, inputs // BLOCK, 1 if fitting == slot.shape else 2)}
    else:
        blocks = (outputs, inputs // BLOCK)
        wanted = {"weight": (outputs, inputs // 2), "step": blocks, "least": blocks}
    halves = dict.fromkeys(("step", "least", "scales", "super_scales", "half_steps"), torch.float16)
    types = {
        "scale": torch.float32,
        "group_scales": torch.float32,
        "code_scales": torch.float32,
        "exponents": torch.uint8,
        **halves,
        "weight": found.dtype,
    }
    types |= {name: tensor.dtype for name in ("integers",) if (tensor := tensors.get(stem + name)) is not None}
    parts = {name: tensors.get(stem + name) for name in wanted}
    return found.dtype in (torch.int8, torch.uint8) and all(
        part is not None and tuple(part.shape) == wanted[name] and part.dtype == types[name]
        for name, part in parts.items()
    )


def _orders(tensors: dict[str, torch.Tensor], stem: str, slot: Slot) -> bool:
    """Whether columns of a layer of blocks stand in an order of all inputs, or in none of their own."""
    if (order := tensors.get(f"{stem}order")) is None:
        return True
    if order.dtype != torch.int32 or not slot.linear or tuple(order.shape) != slot.shape[1:]:
        return False
    blocks = f"{stem}scales" in tensors or f"{stem}step" in tensors
    return blocks and torch.equal(order.sort().values.long(), torch.arange(len(order), device=order.device))


def _rounds(tensors: dict[str, torch.Tensor], stem: str, inputs: int) -> bool:
    """Whether a layer in floating point rounds nothing that it reads, or says well how."""
    levels, shifts = tensors.get(f"{stem}levels"), tensors.get(f"{stem}shifts")
    if levels is None or shifts is None:
        return levels is shifts
    kinds = tuple(levels.shape), levels.dtype, tuple(shifts.shape), shifts.dtype
    if kinds != ((LEVELS,), torch.float32, (inputs,), torch.uint8) or int(shifts.max()) > MOST_SHIFT:
        return False
    return float(levels[0]) == 0.0 and bool((levels.diff() > 0).all()) and bool(levels.isfinite().all())


def _keeps(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> bool:
    if not config.kept_tokens:
        return True
    ids, rows = tensors.get("kept.ids"), tensors.get("kept.rows")
    if ids is None or rows is None or {ids.dtype, rows.dtype} != {torch.int32}:
        return False
    if tuple(ids.shape) != (config.kept_tokens,) or tuple(rows.shape) != (config.vocab_size,):
        return False
    inside = int(ids[0]) >= 0 and int(ids[-1]) < config.vocab_size and bool((ids.diff() > 0).all())
    return inside and int(rows.min()) >= 0 and int(rows.max()) < config.kept_tokens
