"""The formats of quantized weights that folders are read in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodery.core.errors import UnsupportedModel

from ..fields import Anything, Fields, Kind, Record, Text, read_json
from ..shards import KINDS, PRECISIONS, Shards
from .awq import AWQ
from .bitsandbytes import BitsAndBytes
from .compressed import Compressed
from .fp8 import ScaledFP8
from .gptq import GPTQ
from .modelopt import ModelOpt
from .mxfp4 import MXFP4
from .weight import Format

FORMATS: tuple[type[Format], ...] = (GPTQ, AWQ, ScaledFP8, Compressed, ModelOpt, MXFP4, BitsAndBytes)
_BY_METHOD = {method: each for each in FORMATS for method in each.methods}
_METHOD: dict[str, Kind] = {"quant_method": Text(64)}
_DTYPES: dict[str, Kind] = {"dtype": Text(32), "torch_dtype": Text(32)}
_MODELOPT = "hf_quant_config.json"
"""Where NVIDIA's Model Optimizer also writes how weights are quantized."""


def read_format(config: Any, origin: str) -> Format | None:
    """How the weights that go with a config.json are kept; None where they are floating point.

    Args:
        config: The content of the config.json.
        origin: What errors call it.

    Raises:
        UnsupportedModel: For a format that is not read.
    """
    raw = Fields(config, origin, {"quantization_config": Anything()}).get("quantization_config")
    if not raw:
        return None
    return _format(raw, f"{origin}: quantization_config")


def folder_format(config: Any, folder: Path) -> Format | None:
    """The same for a folder, which may say it in a file of its own."""
    found, path = read_format(config, str(folder / "config.json")), folder / _MODELOPT
    if found is not None or not path.is_file():
        return found
    raw = Fields(read_json(path), str(path), {"quantization": Record({})}).get("quantization", {})
    return _format({"quant_method": "modelopt", **raw}, str(path))


def folder_floats(config: Any, folder: Path, shards: Shards) -> str:
    """The floating point type of a quantized folder: its configuration's, or that of most of its tensors."""
    fields = Fields(config, str(folder / "config.json"), _DTYPES)
    named: str = (fields.get("dtype") or fields.get("torch_dtype", "")).removeprefix("torch.")
    return named if named in KINDS else shards.precision(PRECISIONS)


def _format(raw: Any, origin: str) -> Format:
    method = Fields(raw, origin, _METHOD).get("quant_method", "")
    if method not in _BY_METHOD:
        named = method or "an unnamed method"
        raise UnsupportedModel(
            f"{origin}: weights quantized by {named} are not read here: {', '.join(_BY_METHOD)} are; give one of "
            "these, a GGUF file, or the model that it was made from"
        )
    return _BY_METHOD[method].read(raw, origin)
