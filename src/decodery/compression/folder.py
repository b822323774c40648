"""A changed model as a folder that `load` reads, as it reads a trained draft."""

from __future__ import annotations

import json
from pathlib import Path

from decodery.core.errors import SettingsError
from decodery.models.loaders import fused
from decodery.models.loaders.description import Description
from decodery.models.loaders.drafts import DESCRIPTION, TOKENIZER
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import replacing, write_text
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.floats import Float4Linear, Float8Linear, MXFP4Linear, NF4Linear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import BITS
from decodery.models.native.super_blocks import SuperBlockLinear
from decodery.models.native.ternary import TernaryLinear
from decodery.models.torch.transformer import Transformer

from .base import Report

REPORT = "report.json"


def check_folder(out: Path) -> None:
    """Raise SettingsError where a copy would be mixed with something else."""
    if out.exists() and not (out / REPORT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"{out} exists and is not a compressed model: name a new folder")


def save(out: Path, model: Transformer, report: Report, original: LoadedModel) -> None:
    """Write a copy of `original` to the folder `out`, which holds nothing else.

    Raises:
        SettingsError: If it does.
    """
    check_folder(out)
    write(out, model, report, original)


def write(out: Path, model: Transformer, report: Report, original: LoadedModel) -> None:
    """Write a copy of `original` to `out`, with weights, tokenizer, description and report.

    The weights come last, so that a folder that was not finished is not read.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept = precision(model)
    for other in out.glob("*.safetensors"):
        other.unlink()
    special, template = (
        ({}, None)
        if original.chat_template is None
        else (original.chat_template.special, original.chat_template.source)
    )
    with replacing(out / TOKENIZER) as temporary:
        original.tokenizer.backend.save(str(temporary), pretty=False)
    write_text(out / DESCRIPTION, Description(model.config, kept, special, template).text())
    write_text(out / REPORT, json.dumps({"of": original.name, **report.as_dict()}, indent=1) + "\n")
    fused.save(out / f"{kept}.safetensors", model.weights)


def precision(model: Transformer) -> str:
    """What `load` calls the precision of such weights."""
    first = model.weights.layers[0].qkv
    if isinstance(first, SuperBlockLinear):
        return "int4" if BITS[first.form] == 4 else "int8"
    if isinstance(first, (Int4Linear, TernaryLinear, Float4Linear, MXFP4Linear, NF4Linear)):
        return "int4"
    if isinstance(first, (Int8Linear, BlockLinear, Float8Linear)):
        return "int8"
    return str(model.weights.dtype).removeprefix("torch.")
