"""Small draft models that come with the package, what `auto` begins with, and how a trained draft is written.

A draft is a folder: `int8.safetensors` in the form of `fused`, `model.json` with its configuration and a README.md that
says how it was made. One that stands alone has its `tokenizer.json` too; a shipped one uses its target's.
"""

from __future__ import annotations

from pathlib import Path

DESCRIPTION, TOKENIZER, WEIGHTS = "model.json", "tokenizer.json", "int8.safetensors"
CONTEXTS, NGRAMS, UNITS = "contexts.safetensors", "ngrams.safetensors", "units.safetensors"
PROMPTS, TRANSFER = "prompts.safetensors", "transfer.safetensors"

HEAD = "eagle-3"
"""The kind of head that comes along."""
SHIPPED = {"smollm2-draft": Path(__file__).with_name("smollm2")}
"""By name: the folder of a shipped draft."""


def shipped_for(vocabulary: str) -> str | None:
    """The shipped draft whose target has this vocabulary (`ModelConfig.vocabulary`), or None."""
    return next((name for name in SHIPPED if _is_for(name, vocabulary)), None)


def shipped(file: str, vocabulary: str) -> Path | None:
    """A file that comes along for models with this vocabulary, such as `CONTEXTS`, or None."""
    found = (folder / file for name, folder in SHIPPED.items() if _is_for(name, vocabulary))
    return next((path for path in found if path.is_file()), None)


def given_or_shipped(given: str | None, file: str, vocabulary: str) -> Path | None:
    """The file that a setting names, itself or by its folder.

    Where it names none the one that comes along, or None.
    """
    if given is None:
        return shipped(file, vocabulary)
    path = Path(given).expanduser()
    return path / file if path.is_dir() else path


def shipped_head(kind: str, vocabulary: str) -> Path | None:
    """The file of the shipped head of a kind, such as "eagle-3", for this vocabulary, or None."""
    found = (SHIPPED[name] / f"{kind}.safetensors" for name in SHIPPED if _is_for(name, vocabulary))
    return next((path for path in found if path.is_file()), None)


def _is_for(name: str, vocabulary: str) -> bool:
    from ..fields import read_json

    return bool(vocabulary) and read_json(SHIPPED[name] / DESCRIPTION)["config"]["vocabulary"] == vocabulary
