"""A tokenizer.json that may be damaged or hostile, handed to the tokenizers library with care."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodery.core.errors import CorruptFile, DecoderyError, UnsupportedModel
from decodery.core.worker_pool import NotStarted, Unanswered, WorkerPool

from ..config import TOKENS
from ..loaders.fields import Either, Fields, Kind, Listed, Named, Number, Record, Text, Whole, parse_json
from .tokenizer import library_errors

if TYPE_CHECKING:
    import tokenizers

_MOST_BYTES = 1 << 27
_MOST_ADDED, _MOST_STEPS, _MOST_GROWTH = 1 << 20, 256, 1 << 12
_TRIAL_SECONDS, _TRIAL_BYTES = 120.0, 3 << 30

_PIECE = Text(1 << 14)
_LISTED_VOCABULARY = Listed(Listed(Either(_PIECE, Number(-1e9, 1e9)), 2), TOKENS.most)
_FILE: dict[str, Kind] = {
    "added_tokens": Listed(Record({"id": Whole(0, TOKENS.most), "content": _PIECE}), TOKENS.most),
    "normalizer": Record({}),
    "pre_tokenizer": Record({}),
    "post_processor": Record({}),
    "decoder": Record({}),
    "model": Record(
        {
            "type": Text(64),
            "vocab": Either(Named(Whole(0, TOKENS.most), TOKENS.most), _LISTED_VOCABULARY),
            "merges": Listed(Either(_PIECE, Listed(_PIECE, 2)), TOKENS.most),
            "continuing_subword_prefix": Text(64),
            "end_of_word_suffix": Text(64),
            "unk_token": _PIECE,
            "max_input_chars_per_word": Whole(0, 1 << 20),
        }
    ),
}
# How texts are cut and filled up, which this package does not do, and what is left out by chance in training.
_UNUSED, _CHANCE = ("truncation", "padding"), "dropout"
# What a step puts in the place of something, by the names of its settings.
_PUT = ("content", "prepend", "replacement")


def read_tokenizer(path: Path, *, tried: bool = False) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json.

    Anything else is bounded first, and then read once in a process of its own that has little memory.

    Args:
        tried: It was written by this package, from one that was read so before.

    Raises:
        CorruptFile: For what is no tokenizer and for one that cannot encode.
    """
    import tokenizers

    wrong = f"{path} is not a tokenizer"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CorruptFile(f"{path} is larger than any tokenizer")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CorruptFile(f"there is no tokenizer at {path}: add the model's tokenizer.json") from error
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{wrong}: {error}") from error
    if not tried:
        raw = parse_json(text, wrong.removesuffix(" is not a tokenizer"))
        text = _bounded(raw, str(path))
        _refuse_unknown_words(raw["model"], path)
        _try(text, wrong)
    with library_errors(wrong):
        return tokenizers.Tokenizer.from_str(text)


def _bounded(raw: Any, origin: str) -> str:
    """The content of a tokenizer.json as a text again, checked, and without what is not used."""
    fields = Fields(raw, f"{origin} is not a tokenizer", _FILE)
    if sum(len(token.get("content") or "") for token in fields.get("added_tokens", [])) > _MOST_ADDED:
        raise CorruptFile(f"{origin}: the added tokens are longer than any tokenizer's: the file is damaged")
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(_steps(fields.get(name, {})))
        # Every step may make of each character as many as it puts in its place, and the next one sees all of them.
        growth = math.prod(max(1, len(text)) for step in steps for key, text in step.items() if key in _PUT)
        if len(steps) > _MOST_STEPS or growth > _MOST_GROWTH:
            raise CorruptFile(f"{origin}: the {name} makes texts longer than any tokenizer's: the file is damaged")
    kept = {name: value for name, value in raw.items() if name not in _UNUSED}
    kept["model"] = {name: value for name, value in fields.need("model").items() if name != _CHANCE}
    return json.dumps(kept)


def _refuse_unknown_words(model: dict[str, Any], path: Path) -> None:
    """A tokenizer of words needs a token for all others."""
    if model.get("type") == "WordLevel" and model.get("unk_token") not in model.get("vocab", {}):
        raise UnsupportedModel(
            f"{path} has whole words and no token for others: name one of its vocabulary as unk_token"
        )


def _steps(part: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The texts, by their names, of each of the steps that a part of a tokenizer is made of."""
    open_parts = [part]
    while open_parts:
        step = open_parts.pop()
        yield {name: value for name, value in step.items() if isinstance(value, str)}
        for inner in step.values():
            open_parts += [each for each in (inner if isinstance(inner, list) else [inner]) if isinstance(each, dict)]


def _try(text: str, wrong: str) -> None:
    """Raise CorruptFile unless another process can read the tokenizer and encode with it."""
    pool = WorkerPool(Path(__file__).with_name("tokenizer_worker.py"), memory=_TRIAL_BYTES)
    try:
        said = pool.ask(text, _TRIAL_SECONDS)
    except NotStarted as error:
        raise DecoderyError(f"cannot start {sys.executable} to try a tokenizer in it: {error}") from error
    except Unanswered as error:
        raise CorruptFile(f"{wrong}: reading it was stopped: {error}") from error
    finally:
        # What is not trusted leaves nothing for the next file.
        pool.close()
    if said:
        raise CorruptFile(f"{wrong}: {said}")
