"""What kinds of `decodery train` learn from: texts that the model writes, text files, or files of labelled lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decodery.core.errors import PromptError, SettingsError
from decodery.models.loaders.load import LoadedModel

from .corpus import Corpus, check_texts
from .data import built_in_prompts, cut_files, read_prompts, write_texts
from .kind import Data, Run

ARGUMENT: dict[str, Any] = {"argument": True}
"""Metadata of a field that is an argument of the command, not an option."""
PLAIN: dict[str, Any] = {"option": "--no-chat-template"}
"""Metadata of the field `apply_chat_template`."""


@dataclass(frozen=True)
class Seed:
    """What hangs on chance.

    Attributes:
        seed: Random seed of the texts.
    """

    seed: int = 0


@dataclass(frozen=True)
class OwnTexts(Data):
    """Texts that the model writes first.

    Attributes:
        texts: Number of texts that the model writes.
        prompts: File of prompts, one a line; built-in instructions by default.
        max_new_tokens: Maximum tokens of a text.
    """

    NOTE = """MODEL first writes the training texts, which takes most of the time; a folder of another kind with the
    same settings of texts has them already. Interrupt it with Ctrl-C: the same command continues."""

    texts: int = 2000
    prompts: Path | None = None
    max_new_tokens: int = 160

    def check(self) -> None:
        check_texts(self.texts)
        self.lines()

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
    """The texts of a run, written into a folder of its output; those that are there are read.

    Args:
        run: The run, whose settings hold `OwnTexts`.
        folder: Where.
        top: Most likely tokens that are kept beside each token.
    """
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


def from_own_texts(train: Callable[[Run, Corpus], Any]) -> Callable[[Run], Mapping[str, Any]]:
    """How a kind learns from texts that the model writes.

    Args:
        train: Called with the run and the texts.
    """
    return lambda run: validation(train(run, own_texts(run)))


def validation(found: Any) -> Mapping[str, Any]:
    """The figures of held-out data in the facts of a trained part, or of the first part of a tuple."""
    part = found[0] if isinstance(found, tuple) else found
    figures: Mapping[str, Any] = part.facts["validation"]
    return figures


@dataclass(frozen=True)
class TextFiles(Data):
    """Pieces of text files, all of one length.

    Attributes:
        files: Text files.
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
            SettingsError: There are fewer than `needed`.
        """
        tokens, length = [], self.length
        for file in self.files:
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
    """Text files, cut into texts of at most a length; or one folder of texts that a model wrote.

    Attributes:
        files: Text files, or one folder of texts, such as DIR/text/written of `decodery train draft`.
        length: Tokens of a text piece.
    """

    NOTE = "Interrupt it with Ctrl-C: the same command continues."

    files: tuple[Path, ...] = field(default=(), metadata={**ARGUMENT, "path": "any"})
    length: int = 256


def cut_texts(run: Run, files: tuple[Path, ...] | None = None, folder: str = "text") -> Corpus:
    """The texts of a run, cut into a folder of its output.

    Args:
        run: The run, whose settings hold `CutFiles` unless files are given.
        files: Other files, each cut into texts of 256 tokens.
        folder: Where.
    """
    given = CutFiles(files) if files is not None else run.of(CutFiles)
    if len(given.files) == 1 and given.files[0].is_dir():
        return Corpus(given.files[0])
    tokenizer, size = run.loaded.tokenizer, run.loaded.model.vocab_size
    return cut_files(
        given.files,
        run.out / folder,
        tokenizer=tokenizer,
        vocab_size=size,
        length=given.length,
        progress=run.progress,
    )
