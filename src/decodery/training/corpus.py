"""Training text on disk: a folder of `corpus.json`, which says how it was made, and shards in safetensors.

A shard is written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.loaders.fields import read_json
from decodery.models.loaders.store import replacing, write_text
from decodery.models.trained.artifact import read_tensors

from .held_out import hold_out

FORMAT = 2
"""Another one where texts are split in another way: checkpoints go on only with the same."""
SHARD = 256
"""Texts per shard."""
BYTES = 6
"""Of one of the most likely tokens in a file: its id and its log-probability."""
_FACTS = "corpus.json"


@dataclass(frozen=True)
class TrainingText:
    """One text to learn from.

    Attributes:
        tokens: [n] int32.
        written: Where what is to be learned begins: tokens before it are a prompt.
        likely, logprobs: [n, k] int32 and float16, the k most likely tokens after each one according to the target at
            temperature 1, most likely first; logprobs are -inf where it was not asked, as in prompts. None: never
            asked.
    """

    tokens: np.ndarray
    written: int
    likely: np.ndarray | None = None
    logprobs: np.ndarray | None = None

    @property
    def taught(self) -> int:
        """How many of its tokens are to be learned."""
        return len(self.tokens) - max(self.written, 1)


class Corpus:
    """The texts of a folder, in order; of an unfinished one those that are there.

    Shards are read as needed.

    Args:
        facts: The settings the folder was made with.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / _FACTS).is_file():
            raise SettingsError(f"{folder} has no {_FACTS}: give a folder of training text, or make one")
        self.folder = folder
        self.facts: dict[str, Any] = read_json(folder / _FACTS)
        if not isinstance(self.facts, dict) or self.facts.get("format") != FORMAT:
            raise CorruptFile(f"{folder / _FACTS} is not of format {FORMAT}: make the training text again")
        self._shards: list[Path] = []
        while (path := shard_path(folder, len(self._shards))).is_file():
            self._shards.append(path)
        self._sizes = [_count(path) for path in self._shards]
        self._starts = np.cumsum([0, *self._sizes])
        self._read = lru_cache(maxsize=32)(_read)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> TrainingText:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._read(self._shards[shard])[number - int(self._starts[shard])]

    def __iter__(self) -> Iterator[TrainingText]:
        for path in self._shards:
            yield from self._read(path)

    def split(self, every: int = 20, images: Sequence[str] = ()) -> tuple[list[int], list[int]]:
        """Numbers of the training texts, and of held-out texts, of one prompt in `every`.

        None are held out of fewer texts. They stand at random places: always at the same place they would all be of
        one temperature, which texts take in turns.

        Args:
            every: How many prompts one is held out of, see `hold_out`. A text without a prompt is one of its own.
            images: What tells prompts with images apart, which have their tokens in common.

        Raises:
            SettingsError: All texts are of one prompt.
        """
        if len(self) < every:
            return list(range(len(self))), []
        prompts: Sequence[Hashable] = images or self.prompts(range(len(self)))
        if len(set(prompts)) == 1:
            raise SettingsError(f"{self.folder} holds texts of one prompt: give two, one of which is held out")
        return hold_out(prompts, every)

    def prompts(self, numbers: Iterable[int]) -> list[Hashable]:
        """What tells the prompts of these texts apart."""
        texts = ((number, self[number]) for number in numbers)
        return [prompt_key(text.tokens[: text.written].tolist(), number) for number, text in texts]

    def split_for(self, vocab_size: int, name: str) -> tuple[list[int], list[int]]:
        """`split`, for a model.

        Args:
            vocab_size: The vocabulary of the model.
            name: Its name.

        Raises:
            SettingsError: The texts are of another vocabulary, or too few.
        """
        self.of_vocabulary(vocab_size, name)
        learned, held = self.split()
        if not held:
            raise SettingsError(f"{self.folder} holds {len(self)} texts, too few to hold some out: write at least 20")
        return learned, held

    def of_vocabulary(self, vocab_size: int, name: str) -> None:
        """Raise SettingsError where the texts are of another vocabulary than that of a model."""
        if self.facts.get("vocab_size") != vocab_size:
            raise SettingsError(f"{self.folder} holds text of another vocabulary than that of {name}")


def prompt_key(prompt: Sequence[int], number: int) -> Hashable:
    """What tells the prompts of texts apart."""
    return tuple(prompt) if len(prompt) > 1 else number


def turns_of(prompts: Iterable[Hashable]) -> Iterator[int]:
    """Of each text, the number of its prompt's first one plus how many that prompt had before."""
    last: dict[Hashable, int] = {}
    for number, key in enumerate(prompts):
        last[key] = last.get(key, number - 1) + 1
        yield last[key]


def claim(out: Path, facts: dict[str, Any], vocab_size: int) -> None:
    """Make the folder `out` for texts of these settings; one that is there must have the same."""
    facts = {"format": FORMAT, "vocab_size": vocab_size, **facts}
    path = out / _FACTS
    if path.is_file():
        found = read_json(path)
        if not isinstance(found, dict):
            raise CorruptFile(f"{path} is damaged: remove the folder {out} and start again")
        if found.get("format") != FORMAT:
            raise SettingsError(f"{path} was made by another version: make the training text again in another folder")
        other = [name for name in facts if found.get(name) != facts[name]]
        if other:
            raise SettingsError(
                f"{out} holds training text made with another setting of {', '.join(other)}: name another folder, or "
                "repeat the settings it was begun with"
            )
        return
    if out.exists() and (not out.is_dir() or any(not each.name.startswith(".") for each in out.iterdir())):
        raise SettingsError(f"{out} exists and holds no training text: name a new folder")
    write_text(path, json.dumps(facts, indent=1) + "\n")


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def write_shard(path: Path, texts: Sequence[TrainingText], top: int) -> None:
    from safetensors.numpy import save_file

    tensors = {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "bounds": np.cumsum([0, *(len(text.tokens) for text in texts)]),
        "written": np.array([text.written for text in texts]),
    }
    if top:
        tensors["likely"] = np.concatenate([text.likely for text in texts if text.likely is not None])
        tensors["logprobs"] = np.concatenate([text.logprobs for text in texts if text.logprobs is not None])
    with replacing(path) as temporary:
        save_file(tensors, temporary)


def _count(path: Path) -> int:
    """How many texts a shard holds."""
    return len(_tensors(path, "written")["written"])


def _tensors(path: Path, *names: str) -> dict[str, np.ndarray]:
    try:
        tensors, _ = read_tensors(path)
        return {name: tensors[name].numpy() for name in names or tensors}
    except (CorruptFile, KeyError, TypeError) as error:
        raise CorruptFile(f"{path} is damaged: remove that file and make the training text again") from error


def _read(path: Path) -> list[TrainingText]:
    found = _tensors(path)
    try:
        tokens, bounds, written = found["tokens"], found["bounds"], found["written"]
        likely, logprobs = found.get("likely"), found.get("logprobs")
        sound = bounds[0] == 0 and bounds[-1] == len(tokens) and len(bounds) == len(written) + 1
        sound = sound and bool((np.diff(bounds) > 0).all())
        sound = sound and all(rows is None or len(rows) == len(tokens) for rows in (likely, logprobs))
    except (KeyError, IndexError) as error:
        raise CorruptFile(f"{path} lacks {error}: remove that file and make the training text again") from error
    if not sound:
        raise CorruptFile(f"{path} does not fit together: remove that file and make the training text again")
    return [
        TrainingText(
            tokens[begin:end],
            int(first),
            None if likely is None else likely[begin:end],
            None if logprobs is None else logprobs[begin:end],
        )
        for begin, end, first in zip(bounds[:-1], bounds[1:], written, strict=True)
    ]


def check_texts(count: int) -> None:
    """Raise SettingsError for a number of texts of which none would be held out."""
    if count < 20:
        raise SettingsError(f"{count} texts are too few to learn from and to hold some out: write at least 20")
