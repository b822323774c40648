"""Options of `decodery train`, made from the dataclasses that a kind of training declares as its settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
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


@dataclass(frozen=True)
class Parameter:
    """An option or an argument of a command, in values that JSON has.

    Attributes:
        name: The field.
        type: "int", "float", "str", "bool", "integers" or "choice"; for a path "file", "folder", "any" or "new file".
        option: The option; "" for an argument.
        help: The help.
        default: The default; None where there is none.
        choices: The values of a "choice".
        several: Whether it is repeated.
        required: Whether it has to be given.
    """

    name: str
    type: str
    option: str = ""
    help: str = ""
    default: Any = None
    choices: tuple[Any, ...] = ()
    several: bool = False
    required: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The attributes that differ from their defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Parameter:
        """The parameter of such attributes, as they are read from JSON."""
        read: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
        return cls(**read)


def described(settings: tuple[Any, ...], without: tuple[str, ...]) -> list[Parameter]:
    """Arguments and options for the fields of dataclasses; a default is the value that the instance has.

    Args:
        settings: Frozen dataclasses. A field that several have is one option.
        without: Names of fields that are no options.
    """
    found: dict[str, Parameter] = {}
    for instance in settings:
        hints, texts = get_type_hints(type(instance)), descriptions(type(instance))
        for field in fields(instance):
            if field.name not in found and field.name not in without and not is_dataclass(hints[field.name]):
                text = field.metadata.get("help") or texts.get(field.name) or USUAL.get(field.name, "")
                found[field.name] = _described(field, hints[field.name], getattr(instance, field.name), text)
    return list(found.values())


def given(settings: tuple[Any, ...], values: dict[str, Any]) -> tuple[Any, ...]:
    """The same dataclasses with the values of options. A name belongs to the first that has it, `seed` to all."""
    found, taken = [], set[str]()
    for each in settings:
        own = {field.name for field in fields(each)} & set(values)
        found.append(replace(each, **{name: values[name] for name in own - taken}))
        taken |= own - {"seed"}
    return tuple(found)


def _described(field: Field[Any], hint: Any, default: Any, text: str) -> Parameter:
    kinds = [each for each in get_args(hint) if each is not NoneType]
    optional = get_origin(hint) in (Union, UnionType)
    kind, how = kinds[0] if optional else hint, field.metadata
    several = get_origin(kind) is tuple and get_args(kind)[0] is not int
    item = get_args(kind)[0] if several else kind
    choices = get_args(item) if get_origin(item) is Literal else ()
    plain = {int: "int", float: "float", str: "str", bool: "bool", Path: how.get("path", "file")}
    made = "choice" if choices else "integers" if get_origin(item) is tuple else plain[item]
    if how.get("argument"):
        return Parameter(field.name, made, several=several, required=not optional)
    return Parameter(
        field.name,
        made,
        how.get("option", f"--{field.name.replace('_', '-')}"),
        text,
        None if default == () or how.get("required") else default,
        choices,
        several,
        bool(how.get("required")),
    )


def parameter(of: Parameter) -> click.Parameter:
    """The argument or option of a command."""
    if of.type == "bool":
        off = of.option.startswith("--no-")
        switch = of.option if off or not of.default else f"{of.option}/{of.option.replace('--', '--no-', 1)}"
        inverted: dict[str, Any] = {"default": False, "callback": lambda ctx, param, value: not value}
        return Option([switch, of.name], is_flag=True, help=of.help, **(inverted if off else {"default": of.default}))
    made = _type(of)
    if not of.option:
        return click.Argument([of.name], type=made, nargs=-1 if of.several else 1, required=of.required)
    more: dict[str, Any] = {"required": True} if of.required else {}
    if of.default is not None:
        more = {"default": of.default, "show_default": _shown(of.default)}
    if of.name == "seed":
        more["callback"] = check_seed
    if of.several:
        more |= {"multiple": True, **({"callback": _words} if of.type == "str" else {})}
    if isinstance(made, Literals):
        more["metavar"] = f"[{'|'.join(made.values)}]"
    return Option([of.option, of.name], type=made, help=of.help, **more)


def _type(of: Parameter) -> click.ParamType:
    plain: dict[str, click.ParamType] = {"int": click.INT, "float": click.FLOAT, "str": click.STRING}
    plain["new file"] = OUT_FILE
    if of.type in plain:
        return plain[of.type]
    if of.type == "choice":
        return Literals(of.choices)
    if of.type == "integers":
        return Integers()
    # What may be a dataset of the Hub is checked by its settings.
    exists = of.type != "any"
    return click.Path(exists=exists, file_okay=of.type != "folder", dir_okay=of.type != "file", path_type=Path)


def _shown(default: Any) -> str | bool:
    if isinstance(default, tuple):
        return ("/" if isinstance(default[0], int) else ",").join(map(str, default))
    return "a blank line" if default == "\n\n" else True
