"""What a kind of `decodery train` declares: its settings, which are the options of its command, and how it learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.llm.remote import remote
from decodery.models.loaders import load as loading
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel

Settings = TypeVar("Settings")
Learn = TypeVar("Learn", bound=Callable[..., Any])
ARGUMENT: dict[str, Any] = {"argument": True}
"""Metadata of a field that is an argument of the command, not an option."""
PLAIN: dict[str, Any] = {"option": "--no-chat-template"}
"""Metadata of the field `apply_chat_template`."""
COUNT, POSITIVE, NON_NEGATIVE, SHARE = "[1, inf)", "(0, inf)", "[0, inf)", "(0, 1)"
_USUAL = {"steps": COUNT, "batch": COUNT, "epochs": POSITIVE, "lr": POSITIVE}
"""Of settings of these names, unless they have others."""


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of settings.

    Args:
        default: Its default.
        help: The help of its option.
        how: What else `cli.train_options` knows of a field, such as the name of its option.
    """
    return field(default=default, metadata={"help": help, **how})


def bounded(default: Any, bounds: str, help: str = "") -> Any:
    """A field of settings.

    Args:
        default: Its default.
        bounds: The interval of its values, such as "[0, 1)" for 0 and all up to 1, but for 1.
        help: The help of its option.
    """
    return option(default, help, bounds=bounds)


class Bounded:
    """Base of settings, dataclasses, whose values are refused outside of their bounds."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            bounds, value = each.metadata.get("bounds", _USUAL.get(each.name)), getattr(self, each.name)
            if bounds is not None and not _inside(value, bounds):
                raise SettingsError(f"{each.name} is {value}: give one in {bounds}")


def _inside(value: float, bounds: str) -> bool:
    low, high = map(float, bounds[1:-1].split(","))
    return low < value < high or (bounds[0] == "[" and value == low) or (bounds[-1] == "]" and value == high)


class Data:
    """Base of settings that say what is learned from.

    Attributes:
        NOTE: What the help of every kind with this data ends with.
    """

    NOTE: ClassVar[str] = ""

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded."""


@dataclass(frozen=True)
class Kind:
    """A kind of training, as `decodery train` runs it.

    Attributes:
        about: The help of its command.
        learn: Trains in a run, and returns figures of data that nothing was learned from.
        ready: Printed at the end, with `{out}`, `{model}` and the settings by name; or what makes it of the run.
        settings: Frozen dataclasses. Their fields are the options, their values the defaults.
        example: Arguments of the command.
        model: What the model is, for the help of `-m`; "" for a kind without one.
        default: The model that is taken by default; None where one has to be named.
        file: What stands beside the card of its folder; a folder with another one's card is refused. "" for any.
        out: What it writes: "folder", "file", "folder or nothing" or "".
        without: Fields of the settings that are no options.
    """

    about: str
    learn: Callable[[Run], Mapping[str, Any] | None]
    ready: str | Callable[[Run], str]
    settings: tuple[Any, ...]
    example: str
    model: str = ""
    default: str | None = "smollm2"
    file: str = ""
    out: str = "folder"
    without: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {}
"""The kinds of the modules that are imported, by name."""


def kind(
    ready: str | Callable[[Run], str], settings: tuple[Any, ...], example: str, **more: Any
) -> Callable[[Learn], Learn]:
    """Make a function that learns in a run a `Kind` of its name, whose help is the docstring.

    Args:
        ready: See `Kind`, as the others.
        settings: Of the kind.
        example: Of the kind.
        more: Other attributes of the kind.
    """

    def register(learn: Learn) -> Learn:
        name = learn.__name__.strip("_").replace("_", "-")
        if name in KINDS:
            raise ValueError(
                f"{name} is a kind already, of {KINDS[name].learn.__module__}: name the function otherwise"
            )
        KINDS[name] = Kind(learn.__doc__ or "", learn, ready, settings, example, **more)
        return learn

    return register


class Run:
    """One run of a kind.

    Args:
        model: The model, with what encodes prompts or without it, or its name.
        out: What is written. An interrupted run goes on from its last checkpoint there.
        settings: Those of the kind, as they were given; of others the defaults are taken.
        progress: Called with what is done.
        command: The command, for the facts about what it makes.
        say: Called with remarks to the user.
        single: Whether what is written is one file.
        learning: What runs passes in floating point; by default it is loaded, or the given model.

    Attributes:
        made: What `Kind.learn` leaves for `Kind.ready`.
    """

    made: Any = None

    def __init__(
        self,
        model: str | LoadedModel | LLM,
        out: Path,
        settings: tuple[Any, ...] = (),
        progress: Progress = silent,
        command: str = "",
        say: Callable[[str], None] = lambda text: None,
        single: bool = False,
        learning: LanguageModel | None = None,
    ) -> None:
        self.model, self.out, self.settings = model if isinstance(model, str) else model.name, out, settings
        if isinstance(model, LoadedModel):
            self.loaded = self.floating = model
        elif isinstance(model, LLM):
            self.lm = model
        if learning is not None:
            self.learning = learning
        self.progress, self.command, self.say, self.single = progress, command, say, single

    def of(self, kind: type[Settings]) -> Settings:
        """The settings of a class, those that it has by default where none were given."""
        found = next((each for each in self.settings if isinstance(each, kind)), None)
        return kind() if found is None else found

    @property
    def training(self) -> Path:
        """The folder of checkpoints: in the output, or beside a file."""
        return self.out.with_name(f"{self.out.name}.training") if self.single else self.out / "training"

    @property
    def seed(self) -> int:
        """The seed, of the first settings that have one."""
        return int(next(each.seed for each in self.settings if hasattr(each, "seed")))

    @property
    def kept(self) -> dict[str, Any]:
        """What a training is given that is not told the command."""
        return {"out": self.training, "progress": self.progress}

    @property
    def facts(self) -> dict[str, str]:
        """What a file says of where it comes from."""
        return {"model": self.loaded.name, "command": self.command}

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model as it is used."""
        return self.load("auto")

    @cached_property
    def floating(self) -> LoadedModel:
        """The model in floating point, as gradients need it: kernels of a CPU's own have none."""
        cuda = torch.cuda.is_available()
        return self.load(choose_dtype("auto", "bfloat16", torch.device("cuda")) if cuda else "float32")

    @cached_property
    def learning(self) -> LanguageModel:
        """What runs passes of the model in floating point."""
        return self.floating.model

    @cached_property
    def lm(self) -> LLM:
        """The model as it is used, with what encodes prompts; or one at the URL of a server."""
        if self.model.startswith(("http://", "https://")):
            return remote(self.model)
        return LLM(self.loaded)

    def load(self, dtype: str) -> LoadedModel:
        """The model in a precision."""
        return loading.load(self.model, dtype=dtype)
