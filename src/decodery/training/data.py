"""Training text: written by the target model from prompts, or cut from text files, in a folder (see `corpus`).

Every file depends on nothing but the settings, so an interrupted run goes on where it stopped and ends the same.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from decodery.core.errors import PromptError, SettingsError
from decodery.core.noise import nth_seed
from decodery.core.topk import logsumexp, topk
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, check_room, sha256, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.sampling.sampler import Sampler
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.embedded import Embeddings
from decodery.step.sequence import Sequence as Decoded

from .corpus import BYTES, SHARD, Corpus, TrainingText, claim, prompt_key, shard_path, turns_of, write_shard
from .lines import read_lines
from .prompts import instructions

__all__ = ["Corpus", "TrainingText", "built_in_prompts", "cut_files", "read_prompts", "write_texts"]

_BLOCK = 1 << 20
_NOTHING = -float("inf")


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
    embeddings: Sequence[Embeddings] = (),
    progress: Progress = silent,
) -> Corpus:
    """Let `target` continue each of `prompts` (token ids) and keep what it writes in the folder `out`.

    Text i is drawn with the seed `seed + i`, at the temperature with the number of the first text of its prompt, plus
    how many that prompt had before it: a prompt that is repeated takes all in turns. A folder that was begun with the
    same settings is continued; with others refused.

    Args:
        top: How many of the most likely tokens to keep beside each one but the first, see `TrainingText`.
        batch: Texts decoded at a time.
        embeddings: What each of the prompts holds beside tokens, where they hold any.
        progress: Told how many texts of how many are written, halves of two counting as one.
    """
    if not prompts:
        raise PromptError("there are no prompts to write from: give at least one")
    if not 0 <= top <= target.model.vocab_size:
        raise SettingsError(f"top must lie between 0 and the vocabulary of {target.model.vocab_size}, not {top}")
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.array([len(prompt), *prompt], dtype="<i8").tobytes())
    for each in embeddings:
        digest.update(each.digest.encode())
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
    claim(out, facts, target.model.vocab_size)
    samplers = [Sampler.from_settings(temperature=temperature) for temperature in temperatures]
    images = [each.digest for each in embeddings] or [""] * len(prompts)
    turns = list(turns_of((prompt_key(each, n), images[n]) for n, each in enumerate(prompts)))
    requests = [
        Request(
            prompt,
            max_new_tokens=max_new_tokens,
            sampler=samplers[turns[number] % len(samplers)],
            drafter=_Recorder(top) if top else None,
            seed=nth_seed(seed, number),
            eos_ids=target.tokenizer.eos_ids,
            prompt_embeds=embeddings[number] if embeddings else None,
        )
        for number, prompt in enumerate(prompts)
    ]
    missing = [n for n in range(len(prompts)) if not shard_path(out, n // SHARD).is_file()]
    check_room(out, sum(len(prompts[n]) + max_new_tokens for n in missing) * (4 + BYTES * top))
    for first in range(0, len(requests), SHARD):
        path = shard_path(out, first // SHARD)
        if not path.is_file():
            part = requests[first : first + SHARD]
            texts = _decode(Engine(target.model), part, top, batch, first, len(requests), progress)
            write_shard(path, texts, top)
        progress("writing texts", min(first + SHARD, len(requests)), len(requests))
    return Corpus(out)


def cut_files(
    files: Sequence[Path],
    out: Path,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    length: int = 256,
    chats: Callable[[Path], Iterable[TrainingText]] | None = None,
    progress: Progress = silent,
) -> Corpus:
    """Cut UTF-8 text files, each a document, into texts of at most `length` tokens, kept in `out`.

    Args:
        chats: Reads the texts of `.jsonl` files, which come last; without it they are text as others are.
        progress: Told how many bytes of how many are read.
    """
    if length < 2:
        raise SettingsError(f"a text to learn from needs at least 2 tokens, not length={length}")
    facts = {
        "kind": "cut from files",
        "files": [[path.name, sha256(path, "checking files", progress)] for path in files],
        "length": length,
    }
    claim(out, facts, vocab_size)
    waiting: list[TrainingText] = []
    number = 0
    plain = [path for path in files if chats is None or path.suffix != ".jsonl"]
    of_chats = (text for path in files if chats and path not in plain for text in chats(path))
    for text in chain(_windows(plain, tokenizer, length, progress), of_chats):
        waiting.append(text)
        if len(waiting) == SHARD:
            write_shard(shard_path(out, number), waiting, 0)
            waiting, number = [], number + 1
    if waiting:
        write_shard(shard_path(out, number), waiting, 0)
    if not number and not waiting:
        raise PromptError("the files hold no text: give files with something to learn from")
    return Corpus(out)


def built_in_prompts(target: LoadedModel, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts for `write_texts`: instructions, and every 32nd time nothing but what begins a text."""
    encode, begins = LLM(target).encode, target.tokenizer.bos_id
    prompts = [encode(instruction) for instruction in instructions(count, seed)]
    return [[begins] if number % 32 == 31 and begins is not None else each for number, each in enumerate(prompts)]


def read_prompts(path: Path) -> list[str]:
    """The prompts of a UTF-8 file, one a line; empty lines are left out."""
    lines = read_lines(path)
    if not lines:
        raise PromptError(f"{path} holds no prompts: write one a line")
    return lines


@dataclass(frozen=True)
class _Recorder(Drafter):
    """Drafts nothing and keeps the target's `top` most likely tokens after each token of the text."""

    top: int

    def start(self, seq: Decoded) -> list[tuple[np.ndarray, np.ndarray]]:
        return []

    def propose(self, seq: Decoded, budget: Budget) -> DraftTree:
        return DraftTree.root(seq.last_token)

    def observe(self, seq: Decoded, seen: VerificationFeedback) -> None:
        if self.top:
            row = seen.logits[:1].float()
            ids, values = topk(row, self.top)
            seq.states[self].append((ids[0], values[0] - logsumexp(row, values[:, 0])))


def _decode(
    engine: Engine, requests: Sequence[Request], top: int, batch: int, first: int, total: int, progress: Progress
) -> list[TrainingText]:
    """The texts of `requests`, of which `batch` are decoded at a time."""
    waiting, active, done = deque(enumerate(requests)), dict[int, Decoded](), dict[int, TrainingText]()
    while waiting or active:
        while waiting and len(active) < batch:
            number, request = waiting.popleft()
            active[number] = engine.submit(request)
        engine.step()
        for number in [number for number, seq in active.items() if seq.finished]:
            done[number] = _text(active.pop(number), top)
        # Texts that are begun together end together: until then what is written of each counts as a part of it.
        parts = sum(len(seq.generated) / seq.request.max_new_tokens for seq in active.values())
        progress("writing texts", first + len(done) + int(parts), total)
    return [done[number] for number in range(len(requests))]


def _text(seq: Decoded, top: int) -> TrainingText:
    if seq.error is not None:
        raise seq.error
    text = TrainingText(np.asarray(seq.tokens, dtype=np.int32), seq.request.prompt_length)
    if not top:
        return text
    likely = np.zeros((len(text.tokens), top), dtype=np.int32)
    logprobs = np.full((len(text.tokens), top), _NOTHING, dtype=np.float16)
    # What follows the prompt itself was scored while it was read, which drafters are not shown.
    for row, (ids, values) in enumerate(seq.states[seq.request.drafter], start=seq.request.prompt_length):
        likely[row], logprobs[row] = ids, values
    return replace(text, likely=likely, logprobs=logprobs)


def _windows(files: Iterable[Path], tokenizer: Tokenizer, length: int, progress: Progress) -> Iterator[TrainingText]:
    held: list[int] = []
    for ids in token_blocks(files, tokenizer, progress, "reading texts"):
        if ids is not None:
            held += ids
            while len(held) > length:
                yield TrainingText(np.asarray(held[:length], dtype=np.int32), 0)
                del held[:length]
            continue
        held += tokenizer.eos_ids[:1]
        if len(held) > 1:
            yield TrainingText(np.asarray(held, dtype=np.int32), 0)
        held = []


def token_blocks(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    progress: Progress,
    what: str,
    chats: Callable[[Path], Iterable[list[int]]] | None = None,
) -> Iterator[list[int] | None]:
    """The token ids of UTF-8 text files, block by block, and None at the end of each.

    Args:
        chats: Reads the chats of a `.jsonl` file, each of which ends with None, too.
    """
    files = list(files)
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        if chats is not None and path.suffix == ".jsonl":
            for chat in chats(path):
                yield from (chat, None)
            done += path.stat().st_size
            progress(what, done, total)
            continue
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                # A block ends with its line, so that no word is cut in two; endless lines are.
                while block := file.read(_BLOCK) + file.readline(_BLOCK):
                    yield tokenizer.encode(block, special=False)
                    done += len(block.encode())
                    progress(what, done, total)
        except UnicodeDecodeError as error:
            raise PromptError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from error
        yield None
