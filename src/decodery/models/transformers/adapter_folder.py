"""Folders of models whose architecture only `transformers` knows. Imports transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel

from ..loaders.dtype import choose_dtype
from ..loaders.fields import read_json
from ..loaders.folder import read_facts, read_texts
from ..loaders.load import LoadedModel
from ..loaders.shards import COMPUTED
from ..tokenizers.chat import ChatTemplate
from ..tokenizers.tokenizer import TextFacts, Tokenizer
from .adapter import TransformersModel


def load_folder(folder: Path, name: str, dtype: str, device: torch.device) -> LoadedModel:
    """Load a folder whose architecture only transformers knows; one that reads images, too, reads texts.

    Its own code is never run, pickles never read.

    Args:
        folder: The folder.
        name: What the model is called.
        dtype, device: As `loaders.load.load` takes them.

    Returns:
        The model, with its tokenizer.

    Raises:
        UnsupportedModel: If transformers cannot load it, or it cannot be decoded.
        CorruptFile: If tensors or the tokenizer are missing or damaged.
    """
    if dtype in ("int8", "int4"):
        raise SettingsError(f"{name} runs through transformers, which has no {dtype} here: choose float32 or bfloat16")
    found: Any
    try:
        found = _class_of(folder).from_pretrained(
            folder,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModel(f"transformers cannot load {folder}: {_first_line(error)}") from error
    except Exception as error:  # safetensors and transformers raise errors of their own for damaged files
        raise CorruptFile(f"transformers cannot load {folder}: {_first_line(error)}") from error
    hf_model, loaded = found
    _refuse_rest(folder, type(hf_model).__name__, loaded)
    chosen = choose_dtype(dtype, str(hf_model.dtype).removeprefix("torch."), device)
    model = TransformersModel(hf_model.to(device=device, dtype=getattr(torch, chosen)))
    backend, facts = _texts(folder)
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(backend, bos_id=facts.bos_id, eos_ids=facts.eos_ids),
        chat_template=ChatTemplate(facts.chat_template, facts.special) if facts.chat_template else None,
        name=name,
        dtype=chosen,
    )


def _class_of(folder: Path) -> Any:
    """What makes the model that a folder names: of those that have a causal class and one with images, its own."""
    described: Any = read_json(folder / "config.json")
    named, kind = (described.get("architectures") or [""])[0], described.get("model_type")
    causal, images = (names.get(kind) for names in (CAUSAL, IMAGES))
    return AutoModelForImageTextToText if images and (named == images or not causal) else AutoModelForCausalLM


def _refuse_rest(folder: Path, name: str, loaded: Mapping[str, Collection[str]]) -> None:
    """A tensor that is missing has random numbers in the model; one that is left over is a part that would not run.

    loaded: what `from_pretrained` says of its tensors.
    """
    if missing := sorted(loaded["missing_keys"]):
        raise CorruptFile(f"{folder} has no tensor {missing[0]}, which {name} needs: the weights are incomplete")
    left = sorted(each for each in loaded["unexpected_keys"] if not each.endswith(COMPUTED))
    if left:
        raise UnsupportedModel(f"{folder}: the tensor {left[0]} belongs to a part that {name} does not have")


def _texts(folder: Path) -> tuple[tokenizers.Tokenizer, TextFacts]:
    """The tokenizer of a folder, which transformers makes where there is only what it would make one from."""
    # A tokenizer.json says all; some classes of transformers make another tokenizer of the same file.
    if (folder / "tokenizer.json").is_file():
        return read_texts(folder)
    try:
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        backend: tokenizers.Tokenizer = found.backend_tokenizer
    except Exception as error:  # as above
        raise CorruptFile(f"{folder} has no tokenizer that can be read: add the model's tokenizer.json") from error
    return backend, read_facts(folder, backend)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
