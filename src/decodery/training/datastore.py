"""From text files to a datastore that drafters search."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from decodery.core.errors import PromptError, SettingsError
from decodery.models.loaders.store import Progress, silent
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.speculative.stores.datastore import FORMAT, SuffixArray

from .data import token_blocks
from .kind import ARGUMENT, Data, Run, kind
from .kind_data import check_chats, each_chat, require_template

SHARD = 1 << 22
"""Tokens per shard: sorting one takes about 200 MB."""


def build_datastore(
    files: Sequence[Path],
    out: Path,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    chats: Callable[[Path], Iterable[list[int]]] | None = None,
    progress: Progress = silent,
    shard_tokens: int = SHARD,
) -> int:
    """Write the suffix arrays of UTF-8 text files, each a document, into the folder `out`.

    Memory is bounded by one shard. Everything goes into `out`.partial first, which takes the name `out` when it is
    whole: a run that was interrupted leaves nothing that looks finished, and the next one begins anew.

    Args:
        chats: Reads the tokens of the chats of a `.jsonl` file, each a document; without it they are text as others.
    """
    if out.exists():
        raise SettingsError(f"{out} exists already: name a new folder, or remove it first")
    if shard_tokens < 1:
        raise SettingsError(f"shard_tokens must be at least 1, not {shard_tokens}")
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    # Where no token ends a text, an id that is no token separates documents.
    separator = tokenizer.eos_ids[0] if tokenizer.eos_ids else vocab_size
    sizes: list[int] = []
    waiting: list[np.ndarray] = []
    held = documents = 0
    for ids in token_blocks(files, tokenizer, progress, "indexing", chats):
        documents += ids is None
        waiting.append(np.asarray([separator] if ids is None else ids, dtype=np.int64))
        held += len(waiting[-1])
        while held >= shard_tokens:
            every = np.concatenate(waiting)
            _write_shard(partial, len(sizes), every[:shard_tokens])
            sizes.append(shard_tokens)
            waiting, held = [every[shard_tokens:]], held - shard_tokens
    if held:
        _write_shard(partial, len(sizes), np.concatenate(waiting))
        sizes.append(held)
    total = sum(sizes)
    if total == documents:
        shutil.rmtree(partial)
        raise PromptError("the files hold no text: a datastore needs some")
    facts = {"format": FORMAT, "vocab_size": vocab_size, "separator": separator, "shards": sizes}
    (partial / "datastore.json").write_text(json.dumps(facts, indent=1), "utf-8")
    os.replace(partial, out)
    return total


def _write_shard(folder: Path, number: int, tokens: np.ndarray) -> None:
    array = SuffixArray.build(tokens)
    np.save(folder / f"{number:05d}.tokens.npy", array.tokens, allow_pickle=False)
    np.save(folder / f"{number:05d}.order.npy", array.order.astype("<u4"), allow_pickle=False)


@dataclass(frozen=True)
class Documents(Data):
    """Text files, one document each."""

    NOTE = """FILES are text, or `.jsonl` of chats, {"messages": [{"role": ..., "content": text}, ...]} a line, each a
    document by the chat template of MODEL. A chat ends with an answer."""

    files: tuple[Path, ...] = field(default=(), metadata=ARGUMENT)

    def check(self) -> None:
        check_chats(self.files)


@kind(
    "The datastore is ready: --drafter rest:datastore={out}",
    (Documents(),),
    "notes.txt --out datastore",
    model="whose tokens are indexed",
)
def _datastore(run: Run) -> dict[str, int]:
    """Index FILES in a folder for --drafter rest:datastore=DIR.

    Memory use is bounded. An interrupted run starts again.
    """
    files, lm = run.of(Documents).files, run.lm
    for file in files:
        if file.suffix == ".jsonl":
            require_template(lm, file)
    found = build_datastore(
        files,
        run.out,
        tokenizer=run.loaded.tokenizer,
        vocab_size=run.loaded.model.vocab_size,
        chats=lambda file: ([*prompt, *answer] for prompt, answer in each_chat(lm, file)),
        progress=run.progress,
    )
    return {"tokens": found}
