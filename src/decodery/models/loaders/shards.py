"""The tensors of a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from .fields import INDEX, shard_names

_SINGLE = "model.safetensors"
PRECISIONS = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating point types, by the names that safetensors has for types."""
KINDS = {precision: kind for kind, precision in reversed(PRECISIONS.items())}
"""The names that safetensors has for them."""
COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "attention.bias")
"""How the names of tensors end that old checkpoints hold, and that everyone computes anew."""


class Shards:
    """The tensors of one or several safetensors files; each is mapped when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._read: set[str] = set()
        self._known: dict[str, tuple[str, tuple[int, ...]]] = {}
        index = folder / INDEX
        if index.exists():
            self.names = shard_names(folder)
            for file in set(self.names.values()):
                if not (folder / file).exists():
                    raise CorruptFile(f"{folder} has no {file}, which its index names: download the missing shard")
        elif (folder / _SINGLE).exists():
            self.names = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        elif list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
            raise UnsupportedModel(
                f"{folder} has only pickled weights, which can run code: convert them to safetensors"
            )
        else:
            raise CorruptFile(f"{folder} has no {_SINGLE}: the model folder is incomplete")

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of floating point numbers."""
        tensor = self.any_tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise UnsupportedModel(f"{self.folder}: tensor {name} is of type {tensor.dtype}, which is not supported")
        return tensor

    def any_tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        if name not in self.names:
            raise CorruptFile(f"{self.folder} has no tensor {name}: the weights are incomplete")
        self._read.add(name)
        try:
            tensor: torch.Tensor = self._file(self.names[name]).get_tensor(name)
        except SafetensorError as error:
            raise CorruptFile(f"{self.folder / self.names[name]}: cannot read tensor {name}: {error}") from error
        return tensor

    def refuse_rest(self, family: str, skipped: tuple[str, ...] = ()) -> None:
        """Raise UnsupportedModel where a tensor was not read: it belongs to a part that would not run.

        Args:
            family: What errors call the model.
            skipped: Names of tensors that need not be read, or how they begin.
        """
        for name in sorted(self.names.keys() - self._read):
            if not name.startswith(skipped) and not name.endswith(COMPUTED):
                raise UnsupportedModel(
                    f"{self.folder}: the tensor {name} belongs to a part that {family} does not have here"
                )

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type of a tensor, as safetensors names it, and its shape.

        Raises:
            CorruptFile: If there is none.
        """
        if name not in self.names:
            raise CorruptFile(f"{self.folder} has no tensor {name}: the weights are incomplete")
        if name not in self._known:
            self._known |= self._infos(self.names[name])
        if name not in self._known:
            raise CorruptFile(f"{self.folder / self.names[name]} has no tensor {name}: the weights are incomplete")
        return self._known[name]

    def precision(self, kinds: Collection[str] | None = None) -> str:
        """The floating point type of most numbers.

        Args:
            kinds: Types that count, as safetensors names them; all by default.
        """
        sizes: Counter[str] = Counter()
        for file in sorted(set(self.names.values())):
            for kind, shape in self._infos(file).values():
                sizes[kind] += torch.Size(shape).numel() * (kinds is None or kind in kinds)
        if not sizes.total():
            raise CorruptFile(f"{self.folder} has no weights in its safetensors files")
        kind = sizes.most_common(1)[0][0]
        if kind not in PRECISIONS:
            raise UnsupportedModel(f"{self.folder}: weights of type {kind} are not supported")
        return PRECISIONS[kind]

    def _infos(self, file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The types and shapes of all tensors of one file."""
        opened, found = self._file(file), {}
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            part = opened.get_slice(name)
            found[name] = part.get_dtype(), tuple(part.get_shape())
        return found

    def close(self) -> None:
        self._open.clear()

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CorruptFile(
                    f"{self.folder / name} is truncated or no safetensors file: {error!s:.200}"
                ) from error
        return self._open[name]
