"""What the commands of `decodery train` share: options, texts that the model writes, and an end that is a pause."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from .command import option
from .options import OUT_FOLDER, Decorator, together

if TYPE_CHECKING:
    from decodery.models.loaders.load import LoadedModel
    from decodery.models.loaders.store import Progress
    from decodery.monitors.threshold import Threshold
    from decodery.training.corpus import Corpus

_MEASURED_SECONDS, _MEASURED_PARTS = 10.0, 20
"""How long something must have gone on before anything is said of its end, and into how many such parts it falls."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

texts_options = together(
    option(
        "--texts", default=64, show_default=True, type=click.IntRange(1), help="Maximum number of text pieces to read."
    ),
    option("--length", default=256, show_default=True, type=click.IntRange(2), help="Tokens of a text piece."),
)


def pieces(loaded: LoadedModel, files: Sequence[Path], texts: int, length: int, needed: int = 1) -> list[list[int]]:
    """Token ids of the first `texts` pieces of text files, each of `length` tokens.

    Raises PromptError for a file that is no text in UTF-8, and where there is no piece; SettingsError for fewer than
    `needed`.
    """
    from decodery.core.errors import PromptError, SettingsError

    tokens = []
    for file in files:
        try:
            tokens.append(loaded.tokenizer.encode(file.read_text(encoding="utf-8-sig"), special=False))
        except UnicodeDecodeError as error:
            raise PromptError(f"{file} is not UTF-8 text: name text files") from error
    found = [each[first : first + length] for each in tokens for first in range(0, len(each) - length + 1, length)]
    if not found:
        raise PromptError(f"the files have no piece of {length} tokens: give longer files, or a smaller --length")
    if len(found[:texts]) < needed:
        hold = "--texts takes" if len(found) > texts else "the files hold"
        raise SettingsError(
            f"{hold} {len(found[:texts])} pieces of {length} tokens, and {needed} are needed: give longer files, a "
            "larger --texts or a smaller --length"
        )
    return found[:texts]


out_option = option("--out", required=True, type=OUT_FOLDER, help="Output folder.")


def lists_options(known: str, of_step: str, *, steps: int, lr: float) -> Decorator:
    """The options of training on tasks about lists. known: what the tasks are; of_step: what `--batch` counts."""
    return together(
        option("--tasks", default="copy,reverse,shuffle,replace-random", show_default=True, help=known),
        option("--letters", default=6, show_default=True, help="Letters of the longest list."),
        option("--steps", default=steps, show_default=True, help="Training steps."),
        option("--batch", default=64, show_default=True, help=of_step),
        option("--lr", default=lr, show_default=True, help="Peak learning rate."),
    )


def model_option(what: str) -> Decorator:
    """`-m`. what: what is done with the model."""
    return option("-m", "--model", default="smollm2", show_default=True, help=f"The model {what}.")


def seed_option(what: str, default: int = 0) -> Decorator:
    """`--seed`. what: what hangs on it."""
    return option("--seed", default=default, show_default=True, callback=_seed, help=f"Random seed of {what}.")


def _seed(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if not 0 <= value < 1 << 64:
        raise click.BadParameter(f"{value} is not an integer from 0 to 2^64 - 1", ctx, param)
    return value


@dataclass(frozen=True)
class OwnTexts:
    """Texts that a model is to write for its own parts to learn from. prompts: a file of them, None: built-in ones."""

    count: int
    prompts: Path | None
    max_new_tokens: int

    def lines(self) -> list[str]:
        """What is written from, none for built-in prompts. Raises a DecoderyError for what cannot be learned from."""
        from decodery.training.corpus import check_texts
        from decodery.training.data import read_prompts

        check_texts(self.count)
        return read_prompts(self.prompts) if self.prompts else []

    def write(
        self, loaded: LoadedModel, folder: Path, lines: list[str], seed: int, progress: Progress, top: int = 20
    ) -> Corpus:
        """The texts, in `folder`; those that are there already are read. top: tokens whose probabilities are kept."""
        from decodery.llm.llm import LLM
        from decodery.training.data import built_in_prompts, write_texts

        if lines:
            # They are used again, with other seeds, until there are enough texts.
            encoded = [LLM(loaded).encode(line) for line in lines[: self.count]]
            wanted = [encoded[number % len(encoded)] for number in range(self.count)]
        else:
            wanted = built_in_prompts(loaded, self.count, seed)
        return write_texts(
            loaded, wanted, folder, max_new_tokens=self.max_new_tokens, seed=seed, top=top, progress=progress
        )


def own_texts(count: int = 2000, length: int = 160) -> Decorator:
    """The options of the texts that the model writes first, handed on as `own`."""
    options = together(
        option("--texts", default=count, show_default=True, metavar="N", help="Number of texts that the model writes."),
        option("--prompts", type=FILE, show_default="built-in instructions", help="File of prompts, one a line."),
        option("--max-new-tokens", default=length, show_default=True, metavar="N", help="Maximum tokens of a text."),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(texts: int, prompts: Path | None, max_new_tokens: int, **others: Any) -> Any:
            return command(own=OwnTexts(texts, prompts, max_new_tokens), **others)

        return options(call)

    return decorate


@contextmanager
def resumable(out: Path) -> Iterator[Progress]:
    """Shows progress and says how long it takes; after Ctrl-C it says that the same command goes on from `out`."""
    from decodery.models.loaders.store import terminal_progress

    try:
        with terminal_progress(counts=True) as progress:
            yield with_time_left(progress)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command continues from {out}", err=True)
        raise


@dataclass(frozen=True)
class Learning:
    """What a part beside a model learns from, and where it goes."""

    files: tuple[Path, ...]
    out: Path
    model: str
    texts: int
    length: int

    def learn(self, check_folder: Callable[[Path], None], train: Callable[..., object]) -> None:
        """Train the part. train: called with the model, pieces of the files, the folder, and a command and progress."""
        from decodery.models.loaders.load import load

        check_folder(self.out)
        loaded = load(self.model, dtype=learning_dtype())
        read = pieces(loaded, self.files, self.texts, self.length)
        with resumable(self.out) as progress:
            train(loaded, read, self.out, command=command_line(), progress=progress)


def files_of_text(what: str) -> Decorator:
    """The arguments of commands that read text files. what: what is done with the model."""
    files = click.argument("files", nargs=-1, required=True, type=FILE)
    return together(files, out_option, model_option(what), texts_options)


def learning(what: str) -> Decorator:
    """The arguments of commands that train a part beside a model, handed on as `given`; see `files_of_text`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(files: tuple[Path, ...], out: Path, model: str, texts: int, length: int, **others: Any) -> Any:
            return command(given=Learning(files, out, model, texts, length), **others)

        return files_of_text(what)(call)

    return decorate


def with_time_left(progress: Progress) -> Progress:
    """`progress` that says once of everything that takes minutes how many, by how long what is done took."""
    begun: dict[str, tuple[int, float]] = {}
    told = set()

    def report(what: str, done: int, total: int) -> None:
        progress(what, done, total)
        first, start = begun.setdefault(what, (done, monotonic()))
        spent = monotonic() - start
        # The first steps of some are slower than the rest, and tell too little.
        if what in told or spent < _MEASURED_SECONDS or _MEASURED_PARTS * (done - first) < total:
            return
        told.add(what)
        minutes = round(spent / (done - first) * (total - done) / 60)
        if minutes:
            click.echo(f"{what}: {done:,} of {total:,} done, about {minutes:,} min more", err=True)

    return report


def print_report(report: Mapping[str, Any], threshold: Threshold | None = None, **more: Any) -> None:
    """Print what is known of a trained monitor: how well it does on what chose nothing of it, and where it flags."""
    limit = {} if threshold is None else {"threshold": threshold.facts()}
    click.echo(json.dumps({**more, **report, **limit}, indent=1))


def command_line() -> str:
    """The command as it was given, for the facts about what it makes."""
    program = Path(sys.argv[0])
    is_script = program.suffix == ".py" and program.stem != "__main__"
    return shlex.join([*(["python", sys.argv[0]] if is_script else ["decodery"]), *sys.argv[1:]])


def learning_dtype() -> str:
    """The precision to learn in: gradients need floating point, and kernels of a CPU's own have none."""
    import torch

    from decodery.models.loaders.dtype import choose_dtype

    if not torch.cuda.is_available():
        return "float32"
    return choose_dtype("auto", "bfloat16", torch.device("cuda"))
