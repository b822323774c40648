"""A Hugging Face checkpoint folder: config.json, safetensors (one file or shards), tokenizer and chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form

from ..config import ModelConfig
from ..families import switched
from ..families.arranged import ARRANGED, rows
from ..families.config_json import TOKEN_IDS, read_config, token_ids
from ..families.falcon_h1 import factors
from ..families.layouts import SIGHT, other_names
from ..families.mixed import of_stack
from ..families.switched import SWITCHED
from ..families.tensor_names import stores_norms_less_one, tensor_name
from ..families.zamba2 import is_copy
from ..native.super_blocks import BlockKind
from ..tokenizers.tokenizer import TextFacts, Tokenizer, add_beginning
from .fields import INDEX, Either, Fields, Flag, Kind, Listed, Record, Text, read_json, shard_names
from .four_bit import read_four_bits
from .fused_slots import slots

if TYPE_CHECKING:
    import tokenizers

_MOST_TEMPLATE = 1 << 20
_SINGLE = "model.safetensors"
_PRECISIONS = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
_IDS: dict[str, Kind] = {"bos_token_id": TOKEN_IDS, "eos_token_id": TOKEN_IDS}
_TEMPLATE = Text(_MOST_TEMPLATE)
_SETTINGS: dict[str, Kind] = {
    "add_bos_token": Flag(),
    "chat_template": Either(_TEMPLATE, Listed(Record({"name": Text(), "template": _TEMPLATE}), 64)),
}
COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias", "attention.bias")
"""How the names of tensors end that old checkpoints hold, and that everyone computes anew."""
_MOST_COMPARED = 1 << 12
"""Rows of a head that are compared with the embedding at a time."""


def model_files(folder: Path) -> list[Path]:
    """The files that decide what is loaded from `folder`, by name."""
    wanted = [*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")]
    return sorted(path for path in wanted if path.is_file())


class FolderCheckpoint:
    """A folder as a source of weights.

    Args:
        precision: The floating point type that most of the weights have, or for those of GPTQ and AWQ "int4", or
            "quantized" where they need a fifth bit to stay as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config, origin = read_json(folder / "config.json"), str(folder / "config.json")
        self.config: ModelConfig = read_config(config, origin)
        self._four_bits = read_four_bits(config, origin)
        if self._four_bits is not None and self.config.family in (*ARRANGED, "zamba2", "falcon_h1"):
            raise UnsupportedModel(f"{origin}: 4-bit weights of {self.config.family} are not supported")
        self._shards = Shards(folder)
        self._described = config
        self.precision = self._shards.precision() if self._four_bits is None else self._four_bit_precision()
        if self.config.tie_embeddings and self._has_own_head():
            self.config = replace(self.config, tie_embeddings=False)
        self._refuse_unread()

    @cached_property
    def _factors(self) -> dict[str, float | torch.Tensor]:
        """What weights are multiplied by as they are read, once their shapes are known to be the configuration's."""
        if self.config.family in SWITCHED:
            return {**switched.factors(self._described, self.config)}
        return factors(self._described, self.config, str(self.folder)) if self.config.family == "falcon_h1" else {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the part `name`.

        Raises:
            CorruptFile: If there is none.
        """
        if self.form(name) is not None:
            assert self._four_bits is not None
            return self._four_bits.shape(self._beside(name))
        whole = tuple(self._tensor(name).shape)
        own = rows(name, self.config)
        return whole if own is None else (len(own), *whole[1:])

    def part(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of the part `name` (see `fused_slots`) as the file has them; a norm's weight ready to multiply."""
        if self.form(name) is not None:
            assert self._four_bits is not None
            return self._four_bits.dense(self._beside(name), begin, self.shape(name)[0] if end is None else end)
        tensor, own = self._tensor(name), rows(name, self.config)
        if own is not None and int(own.max()) >= len(tensor):
            raise CorruptFile(f"{self.folder}: tensor {tensor_name(name, self.config)} has too few rows")
        tensor = tensor[begin:end] if own is None else tensor[own[begin:end]]
        if stores_norms_less_one(self.config) and name.endswith("norm.weight"):
            return tensor.float() + 1.0
        factor = self._factors.get(name.split(".")[-2], 1.0)
        if isinstance(factor, torch.Tensor):
            return tensor.float() * factor[begin:end, None]
        return tensor if factor == 1.0 else tensor.float() * factor

    def _has_own_head(self) -> bool:
        """Whether the head that a file holds differs from the embedding that it should be."""
        head, embedding = (self._name(f"{part}.weight") for part in ("head", "embedding"))
        if head not in self._shards.names or embedding not in self._shards.names:
            return False
        first, second = self._shards.tensor(head), self._shards.tensor(embedding)
        pairs = zip(first.split(_MOST_COMPARED), second.split(_MOST_COMPARED), strict=False)
        return first.shape != second.shape or not all(torch.equal(one, other) for one, other in pairs)

    def _name(self, part: str) -> str:
        """What this checkpoint calls a part."""
        name = tensor_name(part, self.config)
        others = [other for other in other_names(name) if other in self._shards.names]
        return others[0] if others and name not in self._shards.names else name

    def _tensor(self, part: str) -> torch.Tensor:
        """A part as [out, in], or [size]."""
        if self.config.family == "gpt_oss" and ".experts." in part:
            return of_stack(part, self._shards.tensor(self._name(part)))
        tensor = self._shards.tensor(self._name(part))
        if part.endswith(".conv.weight") and tensor.ndim == 3:
            return tensor[:, 0]
        # GPT-2 keeps linear layers as [in, out].
        return tensor.T if self.config.family == "gpt2" and part.startswith("layers.") and tensor.ndim == 2 else tensor

    def form(self, name: str) -> Form | None:
        """The form of blocks in which a part's numbers stay as they are; None where they do not."""
        if self._four_bits is None or f"{self._stem(name)}qweight" not in self._shards.names:
            return None
        return Form.BLOCKS4 if self.precision == "int4" else Form.BLOCKS5

    def blocks(self, name: str, begin: int, end: int) -> BlockKind:
        """Rows of a part that has such a form."""
        assert self._four_bits is not None
        form = self.form(name)
        assert form is not None
        return self._four_bits.blocks(self._beside(name), begin, end, form)

    def _four_bit_precision(self) -> str:
        """Whether all 4-bit weights stay exact in blocks of four bits: "int4", or "quantized"."""
        four_bits, last = self._four_bits, "qzeros"
        assert four_bits is not None
        stems = [name.removesuffix(last) for name in self._shards.names if name.endswith(f".{last}")]
        exact = all(four_bits.is_exact(self._among(stem)) for stem in stems)
        return "int4" if exact else "quantized"

    def _stem(self, name: str) -> str:
        """What the names of all tensors of a part begin with."""
        return tensor_name(name, self.config).removesuffix("weight")

    def _beside(self, name: str) -> Callable[[str], torch.Tensor]:
        """Gives the tensors that stand for a part's 4-bit weights."""
        return self._among(self._stem(name))

    def _among(self, stem: str) -> Callable[[str], torch.Tensor]:
        """Gives tensors by the last part of names that begin with `stem`."""
        return lambda last: self._shards.any_tensor(stem + last)

    def texts(self) -> tuple[tokenizers.Tokenizer, TextFacts]:
        """The tokenizer and what goes with it."""
        return read_texts(self.folder)

    def close(self) -> None:
        self._shards.close()

    def _further(self, name: str) -> bool:
        """Whether a tensor is of layers that predict further tokens, which follow the others in a file."""
        names = name.split(".")
        said = any(self._described.get(each) for each in ("num_nextn_predict_layers", "num_mtp_layers"))
        later = names[:2] == ["model", "layers"] and names[2].isdigit() and int(names[2]) >= self.config.num_layers
        return said and later and self.config.family in ("glm4_moe", "deepseek_v3")

    def _refuse_unread(self) -> None:
        """A tensor of the model that would not be used means a part that would not be run."""
        parts = [part for slot in slots(self.config) for part in slot.parts]
        # One table may be written once for each of its uses.
        parts += ["head.weight"] if self.config.tie_embeddings else []
        used = {self._name(part) for part in parts}
        for part in parts:
            if self._four_bits is not None and self.form(part) is not None:
                stem = self._stem(part)
                used |= {stem + last for last in ("qweight", "qzeros", "scales", "g_idx")}
                self._four_bits.check_order(self._beside(part), named=f"{stem}g_idx" in self._shards.names)
        for name in self._shards.names:
            if name.startswith(SIGHT) or is_copy(name, self.config) or self._further(name):
                continue
            if name not in used and not name.endswith(COMPUTED):
                # Those who quantize write biases of zeros for layers that have none.
                if self._four_bits and name.endswith(".bias") and not self._shards.tensor(name).any():
                    continue
                raise UnsupportedModel(
                    f"{self.folder}: the tensor {name} belongs to a part that {self.config.family} does not have here"
                )


class Shards:
    """The tensors of one or several safetensors files; each is mapped when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._read: set[str] = set()
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

    def precision(self) -> str:
        sizes: Counter[str] = Counter()
        for file in sorted(set(self.names.values())):
            opened = self._file(file)
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                sizes[part.get_dtype()] += torch.Size(part.get_shape()).numel()
        if not sizes:
            raise CorruptFile(f"{self.folder} has no weights in its safetensors files")
        kind = sizes.most_common(1)[0][0]
        if kind not in _PRECISIONS:
            raise UnsupportedModel(f"{self.folder}: weights of type {kind} are not supported")
        return _PRECISIONS[kind]

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


def read_texts(folder: Path) -> tuple[tokenizers.Tokenizer, TextFacts]:
    """The tokenizer in the tokenizer.json of `folder`, and what goes with it."""
    backend = Tokenizer.from_file(folder / "tokenizer.json").backend
    facts = read_facts(folder, backend)
    wanted = _optional(folder / "tokenizer_config.json", _SETTINGS).get("add_bos_token")
    if wanted is not None:
        add_beginning(backend, facts.bos_id if wanted else None)
    return backend, facts


def read_facts(folder: Path, backend: tokenizers.Tokenizer) -> TextFacts:
    """What the configuration files of `folder` say of texts; `backend` is its tokenizer."""
    config = _optional(folder / "config.json", _IDS)
    generation = _optional(folder / "generation_config.json", _IDS)
    settings = _optional(folder / "tokenizer_config.json", _SETTINGS)
    special = {}
    for name, token in settings.raw.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            Text().check(text, f"{settings.origin}: {name[:64]!r}")
            special[name] = text
    ends = [*(token_ids(generation.get("eos_token_id")) or token_ids(config.get("eos_token_id")))]
    begins = token_ids(generation.get("bos_token_id")) or token_ids(config.get("bos_token_id"))
    end, begin = (backend.token_to_id(special.get(name, "")) for name in ("eos_token", "bos_token"))
    if end is not None and end not in ends:
        ends.append(end)
    bos = begin if begin is not None else begins[0] if begins else None
    return TextFacts(bos, tuple(ends), special, _chat_template(folder, settings))


def _chat_template(folder: Path, settings: Fields) -> str | None:
    """The default chat template's source, from chat_template.jinja or tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        if file.stat().st_size > _MOST_TEMPLATE:
            raise CorruptFile(f"{file} is too large for a chat template")
        return file.read_text(encoding="utf-8", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def _optional(path: Path, kinds: dict[str, Kind]) -> Fields:
    return Fields(read_json(path) if path.exists() else {}, str(path), kinds)
