"""Options of `decodery train`, made from the dataclasses that a kind of training declares as its settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from .command import Option
from .options import OUT_FILE
from .train_common import check_seed

USUAL = {
    "steps": "Training steps.",
    "epochs": "Training epochs.",
    "batch": "Batch size in texts.",
    "lr": "Peak learning rate.",
    "seed": "Random seed.",
}
"""The help of settings that many kinds have, where their dataclass says nothing of them."""
_NAMED = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")


def descriptions(cls: type) -> dict[str, str]:
    """What docstrings of a class and of its bases say of attributes, under "Attributes:"."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        section = (inspect.cleandoc(each.__doc__ or "")).partition("\nAttributes:\n")[2]
        names: list[str] = []
        for line in section.splitlines():
            if named := _NAMED.match(line):
                names = named[1].split(", ")
                found |= dict.fromkeys(names, named[2])
            elif line.startswith("        "):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            elif line.strip():
                break
    return found


class Integers(click.ParamType):
    """Integers with a slash between."""

    name = "N/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The integers of a text."""
        if isinstance(value, tuple):
            return value
        if not all(each.isdecimal() for each in value.split("/")):
            self.fail(f"{value} is not a list of integers, such as 4/8/12", param, ctx)
        return tuple(map(int, value.split("/")))


class Literals(click.ParamType):
    """One of some texts or integers."""

    name = "choice"

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = {str(each): each for each in values}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The one that is named."""
        if str(value) not in self.values:
            self.fail(f"{value} is not one of {', '.join(self.values)}", param, ctx)
        return self.values[str(value)]


def _words(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Words of an option that is repeated, or that has commas between them."""
    return tuple(word for each in value for word in each.split(",") if word)


def parameters(settings: tuple[Any, ...], without: tuple[str, ...]) -> list[click.Parameter]:
    """Arguments and options for the fields of dataclasses; a default is the value that the instance has.

    Args:
        settings: Frozen dataclasses. A field that several have is one option.
        without: Names of fields that are no options.
    """
    found: dict[str, click.Parameter] = {}
    for instance in settings:
        hints, told = get_type_hints(type(instance)), descriptions(type(instance))
        for field in fields(instance):
            if field.name not in found and field.name not in without and not is_dataclass(hints[field.name]):
                text = told.get(field.name) or USUAL.get(field.name, "")
                found[field.name] = _parameter(field, hints[field.name], getattr(instance, field.name), text)
    return list(found.values())


def given(settings: tuple[Any, ...], values: dict[str, Any]) -> tuple[Any, ...]:
    """The same dataclasses with the values of options. A name belongs to the first that has it, `seed` to all."""
    found, taken = [], set[str]()
    for each in settings:
        own = {field.name for field in fields(each)} & set(values)
        found.append(replace(each, **{name: values[name] for name in own - taken}))
        taken |= own - {"seed"}
    return tuple(found)


def _parameter(field: Field[Any], hint: Any, default: Any, text: str) -> click.Parameter:
    kinds = [each for each in get_args(hint) if each is not NoneType]
    optional = get_origin(hint) in (Union, UnionType)
    kind, how = kinds[0] if optional else hint, field.metadata
    several = get_origin(kind) is tuple
    if how.get("argument"):
        return click.Argument([field.name], type=_path(how), nargs=-1 if several else 1, required=not optional)
    name = how.get("option", f"--{field.name.replace('_', '-')}")
    if kind is bool:
        off = name if name.startswith("--no-") else ""
        switch = off or (f"{name}/{name.replace('--', '--no-', 1)}" if default else name)
        more: dict[str, Any] = {"default": False, "callback": lambda ctx, param, value: not value} if off else {}
        return Option([switch, field.name], is_flag=True, help=text, **({"default": default} | more))
    more = {"callback": check_seed} if field.name == "seed" else {}
    if how.get("required"):
        more |= {"required": True}
    elif default not in (None, ()):
        more |= {"default": default, "show_default": _shown(default)}
    if several and get_args(kind)[0] is not int:
        item = get_args(kind)[0]
        more |= {"multiple": True, **({"callback": _words} if item is str else {})}
        kind = item
    made = _type(kind, how)
    if isinstance(made, Literals):
        more["metavar"] = f"[{'|'.join(made.values)}]"
    return Option([name, field.name], type=made, help=text, **more)


def _type(kind: Any, how: Mapping[str, Any]) -> click.ParamType:
    if get_origin(kind) is Literal:
        return Literals(get_args(kind))
    if get_origin(kind) is tuple:
        return Integers()
    plain: dict[type, click.ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING}
    return _path(how) if kind is Path else plain[kind]


def _path(how: Mapping[str, Any]) -> click.Path:
    """The type of a path: a file, a folder, or either."""
    wanted = how.get("path", "file")
    if wanted == "new file":
        return OUT_FILE
    return click.Path(exists=True, file_okay=wanted != "folder", dir_okay=wanted != "file", path_type=Path)


def _shown(default: Any) -> str | bool:
    if isinstance(default, tuple):
        return ("/" if isinstance(default[0], int) else ",").join(map(str, default))
    return "a blank line" if default == "\n\n" else True
