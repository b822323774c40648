"""A quantized folder as one in floating point, for models that run through `transformers`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..convert import FLOATS, Layout, write_header
from ..fields import INDEX, read_json
from ..shards import PRECISIONS, Shards
from ..store import Progress, replacing, write_text
from .formats import folder_floats, folder_format
from .mxfp4 import MXFP4
from .weight import Format, Tensors, Weight

_CHUNK = 1 << 22
"""Numbers that are converted at a time."""
_BESIDE = (".json", ".jinja", ".txt", ".model")
"""How files end that say something of texts."""
_WEIGHTS = "model.safetensors"


def quantized_for(config: Any, folder: Path) -> str:
    """The floating point type of a quantized folder that `transformers` alone cannot read, "" for others.

    Raises:
        UnsupportedModel: For a format that is not read.
    """
    form = folder_format(config, folder)
    # transformers makes these floating point itself.
    return "" if form is None or isinstance(form, MXFP4) else folder_floats(config, folder, Shards(folder))


def dequantize(folder: Path, target: Path, dtype: str, progress: Progress) -> None:
    """Write a folder with the weights of another one in floating point.

    Args:
        folder: A quantized folder.
        target: Where to write; the configuration, which makes the folder whole, comes last.
        dtype: What quantized weights become, "float32", "bfloat16" or "float16".
        progress: Told of the bytes written.

    Raises:
        UnsupportedModel: For a format that is not read.
    """
    config: dict[str, Any] = dict(read_json(folder / "config.json"))
    form, shards = folder_format(config, folder), Shards(folder)
    assert form is not None
    weights = dict(_weights(form, shards))
    used = {stem + last for stem, weight in weights.items() for last in weight.names}
    left = [name for name in shards.names if name not in used and not name.endswith(form.beside)]
    plan: Layout = {f"{stem}weight": (FLOATS[dtype], weight.shape) for stem, weight in weights.items()}
    plan |= {name: (_kept(shards, name, dtype), shards.info(name)[1]) for name in left}
    with replacing(target / _WEIGHTS) as temporary, temporary.open("wb") as file:
        offsets, done = write_header(file, plan, {"format": "pt"}), 0
        total = sum(math.prod(shape) * kind.itemsize for kind, shape in plan.values())
        for name, (kind, shape) in plan.items():
            file.seek(offsets[name])
            for some in _rows(weights.get(name.removesuffix("weight")), shards, name, shape):
                data = some.to(kind).contiguous()
                file.write(data.view(-1).view(torch.uint8).numpy().data)
                done += data.nbytes
                progress("converting", done, total)
    for path in folder.iterdir():
        if path.is_file() and path.suffix in _BESIDE and path.name not in (INDEX, "config.json"):
            shutil.copyfile(path, target / path.name)
    config.pop("quantization_config", None)
    write_text(target / "config.json", json.dumps(config | {"dtype": dtype}))


def _weights(form: Format, shards: Shards) -> Iterator[tuple[str, Weight]]:
    """All quantized weights, by what the names of their tensors begin with."""
    seen = set()
    for name in shards.names:
        # "layer.weight", and "layer.weight.absmax".
        layer = name.rpartition(".")[0]
        for stem in (f"{layer}.", f"{layer.removesuffix('.weight')}."):
            if stem not in seen and (weight := form.weight(Tensors(shards, stem))) is not None:
                yield stem, weight
            seen.add(stem)


def _kept(shards: Shards, name: str, dtype: str) -> torch.dtype:
    """What a tensor becomes that is not quantized: floating point of the folder's type, as all else."""
    return FLOATS[dtype] if shards.info(name)[0] in PRECISIONS else shards.any_tensor(name).dtype


def _rows(weight: Weight | None, shards: Shards, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    if weight is None:
        yield shards.any_tensor(name)
        return
    step = max(1, _CHUNK // max(shape[1], 1))
    for begin in range(0, shape[0], step):
        yield weight.dense(torch.arange(begin, min(begin + step, shape[0]), device="cpu"))
