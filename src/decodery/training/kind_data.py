"""What kinds of `decodery train` learn from: texts that the model writes, text files, or files of labelled lines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.errors import PromptError, SettingsError
from decodery.llm.llm import LLM
from decodery.models.loaders import hub
from decodery.models.loaders.load import LoadedModel

from .corpus import Corpus, TrainingText, check_texts
from .data import built_in_prompts, cut_files, read_prompts, write_texts
from .kind import ARGUMENT, Data, Run, option
from .labelled import as_chat, written_tokens
from .lines import MOST_BYTES, each_object

_CHAT = '{"messages": [{"role": ..., "content": text}, ...]} that ends with an answer'


@dataclass(frozen=True)
class Seed:
    """What hangs on chance."""

    seed: int = option(0, "Random seed of the texts.")


@dataclass(frozen=True)
class OwnTexts(Data):
    """Texts that the model writes first."""

    NOTE = """MODEL first writes the training texts, which takes most of the time; a folder of another kind with the
    same settings of texts has them already."""

    texts: int = option(2000, "Number of texts that the model writes.")
    prompts: Path | None = option(None, "File of prompts, one a line; built-in instructions by default.")
    max_new_tokens: int = option(160, "Maximum tokens of a text.")

    def check(self) -> None:
        check_texts(self.texts)
        if self.prompts and len(set(self.lines()[: self.texts])) == 1:
            raise SettingsError(f"{self.prompts} holds one prompt: give two, one of which is held out")

    def lines(self) -> list[str]:
        """The given prompts; none for the built-in ones."""
        return read_prompts(self.prompts) if self.prompts else []

    def encoded(self, run: Run, count: int) -> list[list[int]]:
        """Prompts in tokens, `count` of them. Given ones are repeated: their texts have other seeds."""
        if lines := self.lines():
            found = [run.lm.encode(line) for line in lines[:count]]
            return [found[number % len(found)] for number in range(count)]
        return built_in_prompts(run.loaded, count, run.seed)


def own_texts(run: Run, folder: str = "text/written", top: int = 20) -> Corpus:
    """The texts of a run, written into a folder of its output; those that are there are read."""
    own = run.of(OwnTexts)
    run.say(f"{run.loaded.name} writes {own.texts:,} texts of at most {own.max_new_tokens} tokens")
    wanted = own.encoded(run, own.texts)
    return write_texts(
        run.loaded,
        wanted,
        run.out / folder,
        max_new_tokens=own.max_new_tokens,
        seed=run.seed,
        top=top,
        progress=run.progress,
    )


def validation(found: Any) -> Mapping[str, Any]:
    """The figures of held-out data in the facts of a trained part."""
    figures: Mapping[str, Any] = found.facts["validation"]
    return figures


@dataclass(frozen=True)
class TextFiles(Data):
    """Pieces of text files and of chats, all of one length.

    Attributes:
        files: Text files, or `.jsonl` files of chats.
        texts: Maximum number of text pieces to read.
        length: Tokens of a text piece.
    """

    files: tuple[Path, ...] = field(default=(), metadata=ARGUMENT)
    texts: int = 64
    length: int = 256

    def check(self) -> None:
        if self.texts < 1 or self.length < 2:
            raise SettingsError(f"--texts is at least 1 and --length at least 2, not {self.texts} and {self.length}")

    def pieces(self, loaded: LoadedModel, needed: int = 1) -> list[list[int]]:
        """Token ids of the first pieces.

        Args:
            loaded: The model.
            needed: How many at least.

        Raises:
            PromptError: A file is no text in UTF-8, or there is no piece.
            CorruptFile: A line of a `.jsonl` file is no chat.
            SettingsError: There are fewer than `needed`, or the model has no chat template for chats.
        """
        tokens, length = list[list[int]](), self.length
        for file in self.files:
            if file.suffix == ".jsonl":
                # Most chats are shorter than a piece.
                chats = read_chats(LLM(loaded), file)
                tokens.append([token for chat in chats for part in chat for token in part])
                continue
            try:
                tokens.append(loaded.tokenizer.encode(file.read_text(encoding="utf-8-sig"), special=False))
            except UnicodeDecodeError as error:
                raise PromptError(f"{file} is not UTF-8 text: name text files") from error
        found = [each[first : first + length] for each in tokens for first in range(0, len(each) - length + 1, length)]
        if not found:
            raise PromptError(f"the files have no piece of {length} tokens: give longer files, or a smaller --length")
        if len(found[: self.texts]) < needed:
            hold = "--texts takes" if len(found) > self.texts else "the files hold"
            raise SettingsError(
                f"{hold} {len(found[: self.texts])} pieces of {length} tokens, and {needed} are needed: give longer "
                "files, a larger --texts or a smaller --length"
            )
        return found[: self.texts]


def shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a trained part that its command prints."""
    more = {name: value for name, value in facts.items() if name not in ("model", "command", "recipe", "validation")}
    return {**facts["validation"], **more}


@dataclass(frozen=True)
class CutFiles(Data):
    """Text files, cut into texts of at most a length; chats; or one folder of texts that a model wrote.

    Attributes:
        files: Text files; `.jsonl` files of chats; datasets of the Hub, OWNER/NAME; or one folder of texts, such as
            DIR/text/written of `decodery train draft`.
    """

    NOTE = """FILES are text, `.jsonl` of chats, {"messages": [{"role": ..., "content": text}, ...]} a line, or datasets
    OWNER/NAME of the Hub that hold such files. Of a chat, the last answer is learned."""

    files: tuple[Path, ...] = field(default=(), metadata={**ARGUMENT, "path": "any"})
    length: int = option(256, "Tokens of a text piece.")

    def check(self) -> None:
        for file in self.files:
            if file.is_dir() and len(self.files) > 1:
                raise SettingsError(f"{file} is a folder: give it alone, or files")
            # What is likely a mistyped path is not asked for on the Hub.
            local = file.suffix in (".txt", ".jsonl") or Path(file.parts[0]).is_dir()
            if not file.exists() and (local or not hub.is_hub_id(str(file))):
                raise SettingsError(f"{file} does not exist: give text files, .jsonl files of chats, or OWNER/NAME")


def cut_texts(run: Run, files: tuple[Path, ...] | None = None, folder: str = "text") -> Corpus:
    """The texts of a run, cut into a folder of its output.

    Args:
        run: The run, whose settings hold `CutFiles` unless files are given.

    Raises:
        SettingsError: A folder of texts is not finished.
    """
    given = CutFiles(files) if files is not None else run.of(CutFiles)
    if len(given.files) == 1 and given.files[0].is_dir():
        found = Corpus(given.files[0])
        if len(found) < (whole := found.facts.get("texts", 0)):
            raise SettingsError(
                f"{found.folder} holds {len(found)} of {whole} texts: finish the command that writes it"
            )
        return found
    parts = [part for file in given.files for part in ([file] if file.exists() else dataset_files(run, str(file)))]
    return cut_files(
        parts,
        run.out / folder,
        tokenizer=run.loaded.tokenizer,
        vocab_size=run.loaded.model.vocab_size,
        length=given.length,
        chats=lambda file: chat_texts(run, file, given.length),
        progress=run.progress,
    )


def dataset_files(run: Run, name: str) -> list[Path]:
    """The files of a Hub dataset, of which the run says which they are."""
    found = hub.dataset(name)
    run.say(f"of {name} are read: {', '.join(path.name for path in found)}")
    return found


def chat_texts(run: Run, file: Path, length: int) -> list[TrainingText]:
    """The chats of a `.jsonl` file by the chat template, of which the last answer is to be learned.

    Args:
        file: See `read_chats`.
        length: Maximum tokens of a text. Longer answers are cut; chats whose prompt takes as many are left out.
    """
    chats = read_chats(run.lm, file)
    found = [
        TrainingText(np.asarray([*prompt, *answer][:length], dtype=np.int32), len(prompt))
        for prompt, answer in chats
        if len(prompt) < length
    ]
    if left_out := len(chats) - len(found):
        run.say(f"{file}: {left_out:,} of {len(chats):,} chats are left out, as no answer begins in {length} tokens")
    return found


def read_chats(lm: LLM, file: Path) -> list[tuple[list[int], list[int]]]:
    """The chats of a `.jsonl` file, see `each_chat`."""
    return list(each_chat(lm, file, MOST_BYTES))


def check_chats(files: Iterable[Path]) -> None:
    """Raise CorruptFile if a line of the `.jsonl` files among these is no chat that ends with an answer."""
    for file in files:
        if file.suffix == ".jsonl":
            deque(each_object(file, _CHAT, as_chat), maxlen=0)


def require_template(lm: LLM, file: Path) -> None:
    """Raise SettingsError if a model has no chat template for the chats of a file."""
    if lm.chat_template is None:
        raise SettingsError(f"{lm.name} has no chat template, which the chats of {file} need: use a chat model")


def each_chat(lm: LLM, file: Path, most: float = math.inf) -> Iterator[tuple[list[int], list[int]]]:
    """The prompt and the last answer of the chats of a `.jsonl` file, in tokens by the chat template.

    Args:
        lm: The model that reads them.
        file: Its lines are {"messages": [...]}, which end with an answer; other names are passed over.
        most: Bytes that it may have.

    Raises:
        CorruptFile: A line is something else.
        PromptError: The chat template does not accept a chat.
        SettingsError: The model has no chat template.
    """
    require_template(lm, file)

    def read(entry: dict[str, Any]) -> tuple[list[int], list[int]] | None:
        chat = as_chat(entry)
        return None if chat is None else (lm.encode(chat.prompt), written_tokens(lm, chat))

    return each_object(file, _CHAT, read, most)
