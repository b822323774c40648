"""Training text: written by the target model from prompts, or cut from text files, in a folder of token files.

A folder holds `corpus.json`, which says how it was made, and shards in safetensors. A shard is written whole or not at
all and depends on nothing but those settings, so an interrupted run goes on where it stopped and ends the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..budget.base import Budget
from ..core.sequence import Sequence as Decoded
from ..core.tree import TokenTree
from ..decode.engine import Engine
from ..decode.request import Request
from ..draft.base import Drafter, Observation
from ..errors import CorruptFile, PromptError, SettingsError
from ..model.folder import read_json
from ..model.load import LoadedModel
from ..model.store import Progress, replacing, silent, write_text
from ..model.tokenizer import Tokenizer
from ..sample.sampler import Sampler

FORMAT = 1
SHARD = 256
"""Texts per shard."""
_FACTS = "corpus.json"
_BLOCK = 1 << 20
_NOTHING = -float("inf")


@dataclass(frozen=True)
class Text:
    """One text to learn from.

    tokens: [n] int32. written: where what is to be learned begins: tokens before it are a prompt.
    likely, logprobs: [n, k] int32 and float16, the k likeliest tokens after each one according to the target at
    temperature 1, likeliest first; logprobs are -inf where it was not asked, as in prompts. None: never asked.
    """

    tokens: np.ndarray
    written: int
    likely: np.ndarray | None = None
    logprobs: np.ndarray | None = None


class Corpus:
    """The texts of a folder, in order; of an unfinished one those that are there. Shards are read as needed.

    facts: the settings the folder was made with.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / _FACTS).is_file():
            raise SettingsError(f"{folder} has no {_FACTS}: give a folder of training text, or make one")
        self.folder = folder
        self.facts: dict[str, Any] = read_json(folder / _FACTS)
        if not isinstance(self.facts, dict) or self.facts.get("format") != FORMAT:
            raise CorruptFile(f"{folder / _FACTS} is not of format {FORMAT}: make the training text anew")
        self._shards: list[Path] = []
        while (path := _shard(folder, len(self._shards))).is_file():
            self._shards.append(path)
        self._sizes = [_count(path) for path in self._shards]
        self._starts = np.cumsum([0, *self._sizes])
        self._read = lru_cache(maxsize=4)(_read)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> Text:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._read(self._shards[shard])[number - int(self._starts[shard])]

    def __iter__(self) -> Iterator[Text]:
        for path in self._shards:
            yield from self._read(path)

    def split(self, every: int = 20) -> tuple[list[int], list[int]]:
        """Numbers of the texts to train on, and of those held out: every `every`-th one."""
        held = list(range(every - 1, len(self), every))
        return [number for number in range(len(self)) if number % every != every - 1], held


def write_texts(
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    max_new_tokens: int = 192,
    temperatures: Sequence[float] = (0.0, 0.6, 0.8, 1.0),
    seed: int = 0,
    top: int = 0,
    batch: int = 64,
    progress: Progress = silent,
) -> Corpus:
    """Let `target` continue each of `prompts` (token ids) and keep what it writes in the folder `out`.

    Text i is drawn at temperatures[i % len(temperatures)] with the seed `seed + i`. top: how many of the likeliest
    tokens to keep beside each one but the first, see `Text`. batch: texts decoded at a time. progress: told how many
    texts of how many are written. A folder that was begun with the same settings is continued; with others refused.
    """
    if not prompts:
        raise PromptError("there are no prompts to write from: give at least one")
    if not 0 <= top <= target.model.vocab_size:
        raise SettingsError(f"top must lie between 0 and the vocabulary of {target.model.vocab_size}, not {top}")
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.array([len(prompt), *prompt], dtype="<i8").tobytes())
    facts = {
        "kind": "written by the target",
        "model": target.name,
        "dtype": target.dtype,
        "max_new_tokens": max_new_tokens,
        "temperatures": [float(temperature) for temperature in temperatures],
        "seed": seed,
        "top": top,
        "prompts": digest.hexdigest(),
        "texts": len(prompts),
    }
    _claim(out, facts, target.model.vocab_size)
    samplers = [Sampler.from_settings(temperature=temperature) for temperature in temperatures]
    requests = [
        Request(
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=samplers[number % len(samplers)],
            drafter=_Recorder(top),
            seed=seed + number,
            eos_ids=target.tokenizer.eos_ids,
        )
        for number, prompt in enumerate(prompts)
    ]
    for first in range(0, len(requests), SHARD):
        path = _shard(out, first // SHARD)
        if not path.is_file():
            part = requests[first : first + SHARD]
            texts = _decode(Engine(target.model), part, batch, first, len(requests), progress)
            _write(path, texts, top)
        progress("writing texts", min(first + SHARD, len(requests)), len(requests))
    return Corpus(out)


def cut_files(
    files: Sequence[Path],
    out: Path,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    length: int = 256,
    progress: Progress = silent,
) -> Corpus:
    """Cut UTF-8 text files, each a document, into texts of at most `length` tokens, kept in the folder `out`.

    progress: told how many bytes of how many are read.
    """
    if length < 2:
        raise SettingsError(f"a text to learn from needs at least 2 tokens, not length={length}")
    facts = {
        "kind": "cut from files",
        "files": [[str(path), path.stat().st_size] for path in files],
        "length": length,
    }
    _claim(out, facts, vocab_size)
    waiting: list[Text] = []
    number = 0
    for text in _windows(files, tokenizer, length, progress):
        waiting.append(text)
        if len(waiting) == SHARD:
            _write(_shard(out, number), waiting, 0)
            waiting, number = [], number + 1
    if waiting:
        _write(_shard(out, number), waiting, 0)
    if not number and not waiting:
        raise PromptError("the files hold no text: give files with something to learn from")
    return Corpus(out)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a UTF-8 file, one a line; empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from error
    if not any(line.strip() for line in lines):
        raise PromptError(f"{path} holds no prompts: write one a line")
    return [line for line in lines if line.strip()]


@dataclass(frozen=True)
class _Recorder(Drafter):
    """Drafts nothing and keeps the target's `top` likeliest tokens after each token of the text."""

    top: int

    def start(self, seq: Decoded) -> list[tuple[np.ndarray, np.ndarray]]:
        return []

    def propose(self, seq: Decoded, budget: Budget) -> TokenTree:
        return TokenTree.root(seq.pending)

    def observe(self, seq: Decoded, seen: Observation) -> None:
        if self.top:
            row = seen.logits[0].float()
            best = row.topk(self.top)
            seq.draft_state.append((best.indices.numpy(), (best.values - row.logsumexp(0)).numpy()))


def _decode(
    engine: Engine, requests: Sequence[Request], batch: int, first: int, total: int, progress: Progress
) -> list[Text]:
    """The texts of `requests`, of which `batch` are decoded at a time."""
    waiting, active, done = deque(enumerate(requests)), dict[int, Decoded](), dict[int, Text]()
    while waiting or active:
        while waiting and len(active) < batch:
            number, request = waiting.popleft()
            active[number] = engine.submit(request)
        engine.step()
        for number in [number for number, seq in active.items() if seq.finished]:
            done[number] = _text(active.pop(number))
            progress("writing texts", first + len(done), total)
    return [done[number] for number in range(len(requests))]


def _text(seq: Decoded) -> Text:
    if seq.error is not None:
        raise seq.error
    text = Text(np.asarray(seq.tokens, dtype=np.int32), seq.prompt_length)
    if not seq.draft_state:
        return text
    width = len(seq.draft_state[0][0])
    likely = np.zeros((len(text.tokens), width), dtype=np.int32)
    logprobs = np.full((len(text.tokens), width), _NOTHING, dtype=np.float16)
    # What follows the prompt itself was scored while it was read, which drafters are not shown.
    rows = slice(seq.prompt_length, seq.prompt_length + len(seq.draft_state))
    likely[rows] = np.stack([ids for ids, _ in seq.draft_state])
    logprobs[rows] = np.stack([values for _, values in seq.draft_state])
    return replace(text, likely=likely, logprobs=logprobs)


def _windows(files: Iterable[Path], tokenizer: Tokenizer, length: int, progress: Progress) -> Iterator[Text]:
    files = list(files)
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        held: list[int] = []
        try:
            with path.open(encoding="utf-8", newline="") as file:
                # A block ends with its line, so that no word is cut in two; endless lines are.
                while block := file.read(_BLOCK) + file.readline(_BLOCK):
                    held += tokenizer.encode(block, special=False)
                    while len(held) > length:
                        yield Text(np.asarray(held[:length], dtype=np.int32), 0)
                        del held[:length]
                    done += len(block.encode())
                    progress("reading texts", done, total)
        except UnicodeDecodeError as error:
            raise PromptError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from error
        held += tokenizer.eos_ids[:1]
        if len(held) > 1:
            yield Text(np.asarray(held, dtype=np.int32), 0)


def _claim(out: Path, facts: dict[str, Any], vocab_size: int) -> None:
    """Make the folder `out` for texts of these settings; one that is there must have the same."""
    facts = {"format": FORMAT, "vocab_size": vocab_size, **facts}
    path = out / _FACTS
    if path.is_file():
        found = read_json(path)
        if not isinstance(found, dict):
            raise CorruptFile(f"{path} is damaged: remove the folder {out} and begin anew")
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


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def _write(path: Path, texts: Sequence[Text], top: int) -> None:
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
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in names or file.keys()}
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"{path} is damaged: remove that file and make the training text again") from error


def _read(path: Path) -> list[Text]:
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
        Text(
            tokens[begin:end],
            int(first),
            None if likely is None else likely[begin:end],
            None if logprobs is None else logprobs[begin:end],
        )
        for begin, end, first in zip(bounds[:-1], bounds[1:], written, strict=True)
    ]


def padded(texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts side by side: ids [b, n] int64, zeros behind each end, and [b, n] bool: which token is to be learned."""
    size = max(len(text.tokens) for text in texts)
    ids = torch.zeros(len(texts), size, dtype=torch.int64)
    learned = torch.zeros(len(texts), size, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.from_numpy(text.tokens.astype(np.int64))
        learned[row, max(text.written, 1) : len(text.tokens)] = True
    return ids, learned
