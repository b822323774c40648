"""What a file from elsewhere may say: kinds of values with their bounds, checked once where the file is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decodery.core.errors import CorruptFile, UnsupportedModel

INDEX = "model.safetensors.index.json"
_MOST_JSON = 1 << 24
_SHOWN = 60


class Kind:
    """A kind of value.

    Args:
        wanted: What there should be, in words that follow "should be".
    """

    @property
    def wanted(self) -> str:
        raise NotImplementedError

    def fits(self, value: Any) -> bool:
        """Whether `value` is one, what it is made of left aside."""
        raise NotImplementedError

    def check(self, value: Any, where: str) -> None:
        """Raise CorruptFile, which names `where`, unless `value` and all it is made of fit."""
        if not self.fits(value):
            raise CorruptFile(f"{where} should be {self.wanted}, not {shown(value)}")


@dataclass(frozen=True)
class Whole(Kind):
    """A integer within bounds, both included."""

    least: int
    most: int

    @property
    def wanted(self) -> str:
        return f"an integer from {self.least} to {self.most}"

    def fits(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most


@dataclass(frozen=True)
class Number(Kind):
    """A finite number within bounds, both included."""

    least: float
    most: float

    @property
    def wanted(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def fits(self, value: Any) -> bool:
        # A integer may be too large for a float; comparing it is exact all the same. NaN fails both comparisons.
        return isinstance(value, int | float) and not isinstance(value, bool) and self.least <= value <= self.most


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    wanted = "true or false"

    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Text(Kind):
    """A text of bounded length that can be written as UTF-8."""

    longest: int = 1 << 12

    @property
    def wanted(self) -> str:
        return f"a text of at most {self.longest} characters"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= self.longest and _is_unicode(value)


@dataclass(frozen=True)
class Anything(Kind):
    """A value that is only compared as a whole: empty, zero, false or one of a few."""

    wanted = "a plain value"

    def fits(self, value: Any) -> bool:
        return value is None or isinstance(value, bool | int | float | str | list | dict)


@dataclass(frozen=True)
class Listed(Kind):
    """A list of bounded length of one kind."""

    kind: Kind
    most: int

    @property
    def wanted(self) -> str:
        return f"a list of at most {self.most} values"

    def fits(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) <= self.most

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        # Vocabularies are long: their tokens get a name only where there is something to say of them.
        simple = type(self.kind).check is Kind.check
        for number, item in enumerate(value):
            if not simple or not self.kind.fits(item):
                self.kind.check(item, f"{where}[{number}]")


@dataclass(frozen=True)
class Array(Kind):
    """An array [n] of numbers, of bounded length.

    Attributes:
        finite: Whether none of them may be infinite; none is ever NaN.
    """

    most: int
    finite: bool = True

    @property
    def wanted(self) -> str:
        return f"a list of at most {self.most} {'finite ' if self.finite else ''}numbers"

    def fits(self, value: Any) -> bool:
        if not isinstance(value, np.ndarray) or len(value) > self.most:
            return False
        return bool(np.isfinite(value).all() if self.finite else not np.isnan(value).any())


@dataclass(frozen=True)
class Named(Kind):
    """An object of named values of one kind."""

    kind: Kind
    most: int

    @property
    def wanted(self) -> str:
        return f"an object of at most {self.most} named values"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict) and len(value) <= self.most

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        for name, item in value.items():
            if not _is_unicode(name):
                raise CorruptFile(f"{where} has a name that is no Unicode text")
            self.kind.check(item, f"{where}: {name[:_SHOWN]}")


@dataclass(frozen=True)
class Record(Kind):
    """An object whose values have kinds by their names.

    A null is a value that is missing; other names may be there.
    """

    kinds: Mapping[str, Kind]

    wanted = "an object of named values"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        for name, kind in self.kinds.items():
            if value.get(name) is not None:
                kind.check(value[name], f"{where}: {name}")


@dataclass(frozen=True, init=False)
class Either(Kind):
    """One of several kinds."""

    kinds: tuple[Kind, ...]

    def __init__(self, *kinds: Kind) -> None:
        object.__setattr__(self, "kinds", kinds)

    @property
    def wanted(self) -> str:
        return " or ".join(kind.wanted for kind in self.kinds)

    def fits(self, value: Any) -> bool:
        return any(kind.fits(value) for kind in self.kinds)

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        next(kind for kind in self.kinds if kind.fits(value)).check(value, where)


class Fields:
    """The named values of a file, of the kinds that `kinds` says; other names are not looked at.

    Attributes:
        read: Names that were asked for.

    Args:
        origin: What errors call the file.

    Raises:
        CorruptFile: For a value of another kind.
    """

    def __init__(self, raw: Any, origin: str, kinds: Mapping[str, Kind]) -> None:
        Record(kinds).check(raw, origin)
        self.raw, self.origin, self.kinds, self.read = raw, origin, kinds, set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where it is missing or null."""
        assert name in self.kinds, f"{name} would be read unchecked"
        self.read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The value.

        Raises:
            CorruptFile: If it is missing.
        """
        value = self.get(name)
        if value is None:
            raise CorruptFile(f"{self.origin} has no field {name}: the file is incomplete")
        return value

    def unsupported(self, name: str) -> UnsupportedModel:
        """The error for a value that is sound, but cannot be run."""
        return UnsupportedModel(f"{self.origin}: {name} = {shown(self.raw.get(name))} is not supported")


def read_json(path: Path) -> Any:
    """The content of a JSON file of bounded size."""
    try:
        if path.stat().st_size > _MOST_JSON:
            raise CorruptFile(f"{path} is too large for what it should hold")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorruptFile(f"{path.parent} has no {path.name}: the model folder is incomplete") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not a JSON file: {error}") from error


def shard_names(folder: Path) -> dict[str, str]:
    """In which safetensors file of a Hugging Face folder each tensor lies, as the folder's index says."""
    path = folder / INDEX
    fields = Fields(read_json(path), str(path), {"weight_map": Named(Text(), 1 << 18)})
    names: dict[str, str] = fields.need("weight_map")
    for file in set(names.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CorruptFile(f"{path} names the shard {file[:_SHOWN]!r}, which is not a safetensors file beside it")
    return names


def parse_json(text: str, where: str) -> Any:
    """The JSON in a text that is at hand. Raises CorruptFile."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{where} is not JSON: {error}") from error


def _is_unicode(text: str) -> bool:
    """Whether it can be written: JSON can hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A value as errors show it: short, and of what it is made of nothing."""
    if value is None:
        return "null"
    if not isinstance(value, bool | int | float | str):
        return f"a value of type {type(value).__name__}"
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return f"a number of {int(math.log10(abs(value)))} digits"
    shown = repr(value[:_SHOWN] if isinstance(value, str) else value)
    return f"{shown[:-1]}...{shown[-1]}" if isinstance(value, str) and len(value) > _SHOWN else shown
