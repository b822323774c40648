"""From a name to a model that is ready to run."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel, VocabularyMismatch
from decodery.core.mapped_memory import trim
from decodery.core.native.kernels import library
from decodery.core.settings import checked

from ..config import ModelConfig
from ..families.config_json import read_config, refuse_other_heads, refuse_unknown_fields
from ..families.masked import TURN_ENDS
from ..families.unixcoder import is_unixcoder, load_unixcoder
from ..protocol import LanguageModel
from ..tokenizers.chat import ChatTemplate
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.vocabularies import speaks
from ..torch.packed_linear import packed_weights, packs
from ..torch.rope import stretched
from ..torch.transformer import Transformer, runs_natively
from ..torch.weights import Weights
from ..torch_state import in_plain_state
from ..transformers.live import is_live
from . import convert, drafts, fused
from .cache_use import use
from .config_check import check_config
from .description import Description
from .dtype import choose_device, choose_own, computes_bfloat16
from .fields import read_json
from .masking import Masking
from .named import Precision
from .origins import loaded_from
from .quantized.dequantize import dequantize, quantized_for
from .source import Source, find
from .store import (
    converted,
    lock_of,
    locked,
    remove_others,
    replacing,
    terminal_progress,
    write_text,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DTYPES = tuple(each for each in get_args(Precision) if each != "auto")
KV_DTYPES = ("auto", "float16", "int8", "float8")
"""What keys and values are kept in."""

_BESIDE = ".beside.safetensors"
"""How the name of a copy ends that has only what is not read in place."""
_OTHER_HEADS = ("ForConditionalGeneration", "WithLMHead", "GenerationDecoder")
"""How the names of some causal language models of `transformers` end, beside the usual ones."""
_TOKENIZER, _DESCRIPTION = drafts.TOKENIZER, drafts.DESCRIPTION


@dataclass
class LoadedModel:
    """A model, its tokenizer, its chat template where it has one, and what it is called.

    Attributes:
        origin: What it was loaded as, "" where it was made in another way.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    name: str
    dtype: str
    origin: str = ""

    def __post_init__(self) -> None:
        speaks(self.model, self.tokenizer)
        loaded_from(self.model, self.origin or self.name)


_OTHER_NAMES = {
    "torch_dtype": "give dtype",
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization", "quantization_config"), 'give dtype="int8" or "int4"'
    ),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v", "type_k", "type_v"), "give kv_dtype"),
    **dict.fromkeys(("device_map", "n_gpu_layers"), "give device"),
    **dict.fromkeys(("model_name", "model_path", "pretrained_model_name_or_path"), "give it as the first argument"),
    **dict.fromkeys(
        ("max_model_len", "n_ctx", "gpu_memory_utilization"), "leave it out: memory is taken as texts grow"
    ),
    "tp_plan": "give tensor_parallel_size",
    "trust_remote_code": "leave it out: code of a model folder is never run",
}
"""What to do with the words that other tools have for these settings."""


@checked(elsewhere=_OTHER_NAMES)
def load(
    name: str | Path = "smollm2",
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    masking: str | None = None,
    tensor_parallel_size: int = 1,
) -> LoadedModel:
    """Load an embedded model, a Hugging Face folder, a .gguf file or a Hub id, also owner/name:QUANT.

    Where a person is watching, a context that RoPE scaling stretches beyond what was trained is announced. Raises
    ModelNotFound, CorruptFile or UnsupportedModel, each with a sentence that says what to do.

    Args:
        dtype: "float32", "bfloat16" and "float16" (on a CPU the weights alone), "int8" (weights and activations of
            linear layers; quantized weights of five to eight bits as they are), "int4" (4-bit weights in blocks of 32,
            int8 activations and head; all quantized weights as they are where some have four bits) or "auto", the
            checkpoint's own precision: of a quantized one int4 where most of its weights have four bits, int8 where
            they have more, and 16 bits where no layer holds them; 16 bits for a checkpoint in 16 bits where that is
            fast; float32 elsewhere.
        kv_dtype: "float16" keeps the keys and values of texts in half the memory, "int8" in a quarter of it, in which
            long texts are read faster; "auto" keeps them as they were computed. On a GPU "int8" or "float8".
        device: "auto" is a GPU where PyTorch has one, else the CPU.
        revision: Of a Hub id.
        masking: Of an adapted diffusion model whose files do not say so: "mask=<|mask|>,shifted=true,block=32".
        tensor_parallel_size: How many processes share the model, which `torchrun` has begun; each has a device.
    """
    if not isinstance(name, str | Path):
        instead = (
            "call decodery.integrations.transformers.generate(model, input_ids, ...)"
            if is_live(name)
            else "give its name or its folder"
        )
        raise SettingsError(
            f"load takes a model's name or path, not an object of type {type(name).__name__}: {instead}"
        )
    if dtype not in (*DTYPES, "auto"):
        raise SettingsError(f"unknown dtype {dtype!r}: choose auto, {', '.join(DTYPES)}")
    if kv_dtype not in KV_DTYPES:
        raise SettingsError(f"unknown kv_dtype {kv_dtype!r}: choose {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}")
    filling = None if masking is None else Masking.parse(masking)
    target, mesh = choose_device(device), None
    if tensor_parallel_size != 1:
        # What few need is not imported for all.
        from ..torch.tensor_parallel import processes

        mesh, target = processes(tensor_parallel_size, target)
    found = _load(find(str(name), revision), dtype, target, filling, mesh)
    loaded = dataclasses.replace(found, origin=str(name))
    if sys.stderr.isatty() and (said := stretched(loaded.model.config)) is not None:
        print(f"decodery: {loaded.name}: {said}", file=sys.stderr)
    if kv_dtype != "auto":
        if not isinstance(loaded.model, Transformer):
            raise SettingsError(f"{name} keeps its keys and values as it computes them: leave kv_dtype at auto")
        loaded.model.narrow_caches(torch.float8_e4m3fn if kv_dtype == "float8" else getattr(torch, kv_dtype))
        loaded = dataclasses.replace(loaded, dtype=f"{loaded.dtype}/{kv_dtype}")
    return loaded


def described(name: str) -> Description:
    """What there is to know of a model that runs natively but its weights, which are not read.

    Args:
        name: As `load` takes it.

    Raises:
        ModelNotFound, CorruptFile, UnsupportedModel: As `load`, where the model does not run natively too.
    """
    return _description(find(name, None))


@in_plain_state
def _load(
    source: Source, dtype: str, target: torch.device, masking: Masking | None, mesh: DeviceMesh | None
) -> LoadedModel:
    if source.folder is not None and mesh is None:
        described = read_json(source.folder / "config.json")
        if isinstance(described, dict) and described.get("model_type") == "t5":
            from ..families.t5 import load_t5

            return load_t5(source.folder, source.name, dtype, target)
        if is_unixcoder(described):
            return load_unixcoder(source.folder, source.name, dtype, target)
        if isinstance(described, dict) and described.get("model_type") == "pldrllm":
            raise UnsupportedModel(
                f"{source.folder}: rows of a PLDR-LLM hang on later tokens until its operators are kept: read it with "
                "decodery.models.families.pldrllm.read_pldr, and keep those of a text"
            )
        refuse_unknown_fields(described, str(source.folder / "config.json"))
        try:
            read_config(described)
        except UnsupportedModel as error:
            if masking is not None:
                raise
            return _through_transformers(source, source.folder, dtype, target, error)
    return _open(source, dtype, target, masking, mesh)


def _through_transformers(
    source: Source, folder: Path, dtype: str, device: torch.device, reason: UnsupportedModel
) -> LoadedModel:
    described, origin = read_json(folder / "config.json"), str(folder / "config.json")
    # Other heads would get random weights.
    refuse_other_heads(described, origin, _OTHER_HEADS)
    quantized = quantized_for(described, folder)
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(
            f"{reason}; with transformers installed (pip install 'decodery[transformers]') it can run"
        ) from reason
    from ..transformers.adapter_folder import load_folder

    if quantized and dtype not in ("int8", "int4"):
        folder = _dequantized(source, folder, quantized if dtype == "auto" else dtype)
    return load_folder(folder, source.name, dtype, device)


def _dequantized(source: Source, folder: Path, dtype: str) -> Path:
    """The folder of a model in floating point, which is written where it is missing."""
    target = source.entry / f"dequantized-{dtype}"
    with locked(lock_of(source.entry)):
        if not (target / "config.json").exists():
            with terminal_progress() as progress:
                dequantize(folder, target, dtype, progress)
    return target


def _open(
    source: Source, dtype: str, device: torch.device, masking: Masking | None, mesh: DeviceMesh | None
) -> LoadedModel:
    """Open the converted form of `source`, making first what of it is missing."""
    entry = source.entry
    description = _description(source)
    config = description.config
    # What is no copy of ours is kept in the one form it was made in.
    whole = dtype == "auto" and not entry.is_relative_to(converted())
    packed = packs(config)
    chosen = description.precision if whole else choose_own(dtype, description.precision, device, packed=packed)
    # Its process begins while all else is read.
    template = ChatTemplate(description.chat_template, description.special) if description.chat_template else None
    tokenizer = entry / _TOKENIZER
    if not tokenizer.exists() and description.tokenizer_of is not None:
        tokenizer = _tokenizer_of(description.tokenizer_of, config)
    # Before the weights are in memory: reading a tokenizer takes several times what it holds.
    texts = Tokenizer.from_file(
        tokenizer, bos_id=config.bos_id, eos_ids=config.eos_ids, tried=tokenizer.is_relative_to(converted())
    )
    trim()
    config = config if masking is None else masking.applied(config, texts)
    try:
        model = _model(source, config, chosen, device, mesh)
    except UnsupportedModel as error:
        if mesh is None or dtype != "auto" or chosen == (plain := choose_own(dtype, description.precision, device)):
            raise
        warnings.warn(f"weights are split in {plain}, not packed: {error}", stacklevel=2)
        chosen, model = plain, _model(source, config, plain, device, mesh)
    return LoadedModel(
        model=model,
        tokenizer=texts,
        chat_template=template,
        name=source.name,
        dtype=chosen,
    )


def _model(
    source: Source, config: ModelConfig, dtype: str, device: torch.device, mesh: DeviceMesh | None
) -> Transformer:
    """The model over its converted weights, made where they are missing; while it lives they are not removed."""
    weights = source.entry / f"{dtype}.safetensors"
    if mesh is None and source.file is not None and _in_place(config, dtype, device):
        weights = weights.with_suffix(_BESIDE)
        if not source.file.exists():
            _ = source.checkpoint
    with ExitStack() as uses:
        # Before the first look at them: from here on they stay.
        if weights.is_relative_to(converted()):
            uses.callback(use(weights))
        if not weights.exists():
            # What has nothing to be converted from says so before a lock is made beside it.
            _ = source.checkpoint
            with locked(lock_of(source.entry)):
                if not weights.exists():
                    _convert(source, config, dtype, weights)
        packed = (mesh is not None or device.type != "cpu") and dtype in ("int4", "int8") and packs(config)
        # Each process takes its part from the mapped file.
        read = _read(source, config, dtype, torch.device("cpu") if packed or mesh is not None else device, weights)
        if packed:
            rows = torch.bfloat16 if device.type != "cpu" and computes_bfloat16(device) else torch.float32
            read = packed_weights(read, rows, device if mesh is None else torch.device("cpu"))
        if mesh is None:
            model = Transformer(config, read)
        else:
            from ..torch.tensor_parallel import SplitTransformer

            model = SplitTransformer(config, read, mesh)
        weakref.finalize(model, uses.pop_all().close)
    return model


def _in_place(config: ModelConfig, dtype: str, device: torch.device) -> bool:
    """Whether the blocks of a GGUF file are read where they lie: native kernels run them."""
    kernels = runs_natively(config) or ((config.keeps_order or config.unit_values) and library() is not None)
    return dtype in ("int4", "int8") and device.type == "cpu" and kernels


def _read(source: Source, config: ModelConfig, dtype: str, device: torch.device, path: Path) -> Weights:
    """The converted weights, made anew where they are damaged."""
    file = source.file if path.name.endswith(_BESIDE) else None
    try:
        return fused.read(path, config, device, file)
    except CorruptFile:
        made_now, kept_by_us = "checkpoint" in vars(source), path.is_relative_to(converted())
        if made_now or not kept_by_us:
            raise
    with locked(lock_of(source.entry)):
        _convert(source, config, dtype, path)
    return fused.read(path, config, device, file)


def _tokenizer_of(name: str, config: ModelConfig) -> Path:
    """The tokenizer file of another model, whose vocabulary must be the one that `config` was made for."""
    source = find(name, None)
    if _description(source).config.vocabulary != config.vocabulary:
        raise VocabularyMismatch(f"the tokenizer of {name} is not the one this draft was trained with")
    return source.entry / _TOKENIZER


def _description(source: Source) -> Description:
    """What there is to know of a model but its weights, written first where it is missing."""
    path = source.entry / _DESCRIPTION
    if not path.exists():
        with locked(lock_of(source.entry)):
            if not path.exists():
                _describe(source)
    return Description.read(path)


def _describe(source: Source) -> None:
    """Write what there is to know of a model but its weights."""
    checkpoint, entry = source.checkpoint, source.entry
    tokenizer, facts = checkpoint.texts()
    config, ends = checkpoint.config, facts.eos_ids
    if not config.causal:
        known = map(tokenizer.token_to_id, TURN_ENDS)
        ends = tuple(dict.fromkeys((*ends, *(each for each in known if each is not None))))
    if not config.causal and config.mask_id is None:
        # Adapted models name their mask with the tokenizer alone.
        config = dataclasses.replace(config, mask_id=tokenizer.token_to_id(facts.special.get("mask_token", "")))
    config = dataclasses.replace(
        config,
        bos_id=facts.bos_id,
        eos_ids=ends,
        vocabulary=Tokenizer(tokenizer).fingerprint(),
    )
    with replacing(entry / _TOKENIZER) as temporary:
        tokenizer.save(str(temporary), pretty=False)
    check_config(config, source.name)
    description = Description(config, checkpoint.precision, facts.special, facts.chat_template, source=source.origin)
    write_text(entry / _DESCRIPTION, description.text())


def _convert(source: Source, config: ModelConfig, dtype: str, target: Path) -> None:
    checkpoint = source.checkpoint
    with terminal_progress() as progress:
        beside = checkpoint if source.file is not None and target.name.endswith(_BESIDE) else None
        convert.write(target, config, dtype, checkpoint, progress=progress, beside=beside)  # type: ignore[arg-type]
    checkpoint.close()
    if source.entry.parent != converted():
        remove_others(source.entry)
