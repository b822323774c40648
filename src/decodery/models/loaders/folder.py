"""A Hugging Face checkpoint folder: config.json, safetensors (one file or shards), tokenizer and chat template."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form

from ..config import ModelConfig
from ..families import switched
from ..families.arranged import rows
from ..families.config_json import TOKEN_IDS, read_config, token_ids
from ..families.falcon_h1 import factors
from ..families.gemma import unused
from ..families.layouts import SIGHT, other_names
from ..families.mixed import STACKED, STACKS, of_stack, of_whole_stack, stack_rows, stacked_experts
from ..families.switched import SWITCHED
from ..families.tensor_names import is_mtp, stores_less_one, tensor_name
from ..families.zamba2 import is_copy
from ..tokenizers.tokenizer import TextFacts, Tokenizer, add_beginning
from .fields import Either, Fields, Flag, Kind, Listed, Record, Text, read_json
from .fused_slots import LINEARS, slots
from .quantized.formats import folder_floats, folder_format
from .quantized.parts import FLOATS, QuantizedParts, most_bits
from .quantized.weight import Native
from .shards import COMPUTED, KINDS, Shards

if TYPE_CHECKING:
    import tokenizers

_MOST_TEMPLATE = 1 << 20
_IDS: dict[str, Kind] = {"bos_token_id": TOKEN_IDS, "eos_token_id": TOKEN_IDS}
_TEMPLATE = Text(_MOST_TEMPLATE)
_SETTINGS: dict[str, Kind] = {
    "add_bos_token": Flag(),
    "chat_template": Either(_TEMPLATE, Listed(Record({"name": Text(), "template": _TEMPLATE}), 64)),
}
_TURNED = ("gpt2", "zamba2")
"""Families of which no quantized folders are read: their layers are stored as [in, out], or named anew."""
_FLOATS = tuple(FLOATS.values())
_MOST_COMPARED = 1 << 12
"""Rows of a head that are compared with the embedding at a time."""


def model_files(folder: Path) -> list[Path]:
    """The files that decide what is loaded from `folder`, by name."""
    wanted = [*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")]
    return sorted(path for path in wanted if path.is_file())


class FolderCheckpoint:
    """A folder as a source of weights.

    Args:
        precision: The floating point type that most of the weights have, or of quantized weights, where most of them
            stay as they are in layers of integers, "int4" for four bits and "quantized" for more.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config, origin = read_json(folder / "config.json"), str(folder / "config.json")
        self.config: ModelConfig = read_config(config, origin)
        self._shards, form = Shards(folder), folder_format(config, folder)
        if form is not None and self.config.family in _TURNED:
            raise UnsupportedModel(f"{origin}: quantized weights of {self.config.family} are not read")
        self._floats = self._shards.precision() if form is None else folder_floats(config, folder, self._shards)
        self._quantized = QuantizedParts(form, self._shards, KINDS[self._floats])
        self._described = config
        self.precision = self._floats if form is None else self._quantized_precision()
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
        weight = self._quantized.weight(self._names(name))
        whole = tuple(self._tensor(name).shape) if weight is None else weight.shape
        own = self._own_rows(name, None if weight is None else whole[0])
        return whole if own is None else (len(own), *whole[1:])

    def part(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of the part `name` (see `fused_slots`) as the file has them; a norm's weight ready to multiply."""
        if (weight := self._quantized.weight(self._names(name))) is not None:
            tensor = weight.dense(self._rows(name, weight.shape[0], kept=True)[begin:end])
        else:
            tensor = self._tensor(name)
            ordered = rows(name, self.config) is not None
            tensor = tensor[self._rows(name, len(tensor))[begin:end]] if ordered else tensor[begin:end]
        if name.endswith("norm.weight") and stores_less_one(name, self.config):
            return tensor.float() + 1.0
        factor = self._factor(name)
        if isinstance(factor, torch.Tensor):
            return tensor.float() * factor[begin:end, None]
        return tensor if factor == 1.0 else tensor.float() * factor

    def _has_own_head(self) -> bool:
        """Whether the head that a file holds differs from the embedding that it should be."""
        head, embedding = (self._name(f"{part}.weight") for part in ("head", "embedding"))
        if self._quantized and self._quantized.weight(self._names("head.weight")) is not None:
            return True
        if head not in self._shards.names or embedding not in self._shards.names:
            return False
        first, second = self._shards.tensor(head), self._shards.tensor(embedding)
        pairs = zip(first.split(_MOST_COMPARED), second.split(_MOST_COMPARED), strict=False)
        return first.shape != second.shape or not all(torch.equal(one, other) for one, other in pairs)

    def _name(self, part: str) -> str:
        """What this checkpoint calls a part."""
        names = self._names(part)
        return next((name for name in names if name in self._shards.names), names[0])

    def _names(self, part: str) -> list[str]:
        """What checkpoints call a part, the usual name first."""
        name = tensor_name(part, self.config)
        stacked = stacked_experts(part, name, self.config)
        return [other for each in (name, *stacked) for other in (each, *other_names(each))]

    def _tensor(self, part: str) -> torch.Tensor:
        """A part as [out, in], or [size]."""
        name = self._name(part)
        if self.config.family in STACKED and ".experts." in part:
            return of_stack(part, self._shards.tensor(name), self.config.family)
        if name.endswith(STACKS):
            return of_whole_stack(part, self._shards.tensor(name))
        tensor = self._shards.tensor(name)
        if part.endswith(".conv.weight") and tensor.ndim == 3:
            return tensor[:, 0]
        # GPT-2 keeps linear layers as [in, out].
        return tensor.T if self.config.family == "gpt2" and part.startswith("layers.") and tensor.ndim == 2 else tensor

    def forms(self, name: str) -> tuple[Form, ...]:
        """The forms of native layers that hold a part as it is; none of a folder that is not quantized."""
        if not isinstance(factor := self._factor(name), float) or factor != 1.0:
            return ()
        found = self._quantized.forms(self._names(name), self._name(name))
        return tuple(form for form in found if form in _FLOATS) if name in self._columns[1] else found

    def blocks(self, name: str, begin: int, end: int, form: Form) -> Native:
        """Rows of a part in one of its forms of integers."""
        weight = self._quantized.weight(self._names(name))
        assert weight is not None
        return weight.layer(self._rows(name, weight.shape[0], kept=True)[begin:end], form)

    def columns(self, slot: str) -> torch.Tensor | None:
        """See `convert.Parts`."""
        return self._columns[0].get(slot)

    @cached_property
    def _columns(self) -> tuple[dict[str, torch.Tensor], set[str]]:
        """The orders of columns by slots, and the parts that have one that their slot cannot have.

        Parts of a slot are read together, and kernels put rows into an order for one matrix at a time.
        """
        every = [slot for slot in slots(self.config) if self._quantized and slot.linear]
        alone = {slot.name.split(".")[-2] for slot in every if slot.name.startswith("layers.")} <= {*LINEARS}
        found: dict[str, torch.Tensor] = {}
        others: set[str] = set()
        for slot in every:
            orders = {part: self._quantized.columns(self._names(part)) for part in slot.parts}
            first, *rest = orders.values()
            same = first is not None and all(each is not None and torch.equal(first, each) for each in rest)
            if first is not None and same and alone and not self.config.experts and slot.name.startswith("layers."):
                found[slot.name] = first
            else:
                others |= {part for part, order in orders.items() if order is not None}
        return found, others

    def _own_rows(self, part: str, count: int | None) -> torch.Tensor | None:
        """Which rows of its tensor a part is, None for all. count: how many a quantized one has."""
        if count is not None and self.config.family in STACKED and ".experts." in part:
            return stack_rows(part, count // self.config.experts)
        return rows(part, self.config)

    def _rows(self, part: str, count: int, *, kept: bool = False) -> torch.Tensor:
        """[n] int64 which of `count` rows of its tensor a part is.

        Args:
            part: Its name.
            count: Of all rows.
            kept: Whether the tensor is quantized.
        """
        own = self._own_rows(part, count if kept else None)
        if own is not None and int(own.max()) >= count:
            raise CorruptFile(f"{self.folder}: tensor {tensor_name(part, self.config)} has too few rows")
        return torch.arange(count, device="cpu") if own is None else own

    def _factor(self, part: str) -> float | torch.Tensor:
        return self._factors.get(part.split(".")[-2], 1.0)

    def _quantized_precision(self) -> str:
        layers = [slot for slot in slots(self.config) if slot.linear and slot.name.startswith("layers.")]
        found = most_bits(
            (math.prod(slot.shape), [self.forms(part) for part in slot.parts])
            for slot in layers
            if any(self._quantized.weight(self._names(part)) is not None for part in slot.parts)
        )
        return self._floats if found == "float" else found

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
        return said and later and self.config.family in ("glm4_moe", "deepseek_v3", "glm4_moe_lite")

    def _refuse_unread(self) -> None:
        """A tensor of the model that would not be used means a part that would not be run."""
        parts = [part for slot in slots(self.config) for part in slot.parts]
        # One table may be written once for each of its uses.
        parts += ["head.weight"] if self.config.tie_embeddings else []
        used = {self._name(part) for part in parts}
        for part in parts:
            used |= self._quantized.tensors(self._names(part))
        for name in self._shards.names:
            further = is_mtp(name, self.config.num_layers) or self._further(name)
            if name.startswith(SIGHT) or is_copy(name, self.config) or further or unused(name, self.config):
                continue
            if name not in used and not name.endswith(COMPUTED) and not self._quantized.is_beside(name):
                # Those who quantize write biases of zeros for layers that have none.
                if self._quantized and name.endswith(".bias") and not self._shards.tensor(name).any():
                    continue
                raise UnsupportedModel(
                    f"{self.folder}: the tensor {name} belongs to a part that {self.config.family} does not have here"
                )


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
