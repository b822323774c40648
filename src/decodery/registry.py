"""Every method by name: which paper it is from, what it promises, what it needs, and how a text names it.

A method is a frozen dataclass whose fields are its hyper-parameters. The same text,
`name:key=value,key=value`, works in Python, on the command line, in requests to the server and in the
benchmark. Where a setting is itself a method, its own settings stand in parentheses:
`draft-model:growth=eagle-2(nodes=32,depth=6)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .catalogue import Description, catalogue, facts
from .errors import SettingsError, UnknownMethod

FAMILIES = (
    "draft",
    "draft.growth",
    "verify",
    "verify.continuous",
    "sample",
    "source",
    "budget",
    "constrain",
    "search",
    "search.scorers",
    "suggest",
    "diffuse",
    "kv",
    "monitor",
    "transform",
    "train",
)
"""The packages that hold methods, below this one."""

_PACKAGE = __name__.rpartition(".")[0]
_registered: dict[str, dict[str, Method]] = {}
_discovered: set[str] = set()

C = TypeVar("C", bound=type)


@dataclasses.dataclass(frozen=True)
class Method(Description):
    """One registered method: what it says of itself, and its dataclass."""

    cls: type


def register(
    name: str, *, paper: str = "", guarantee: str = "", lossless: bool = False, needs: Sequence[str] = ()
) -> Callable[[C], C]:
    """Class decorator that makes a frozen dataclass known under `name`.

    paper: "Title (year)" or "". guarantee: what holds, in a few words. lossless: True where the method leaves
    the law of the output as it is. needs: capabilities it asks for, such as "hidden states". The family is
    the package the class lives in or, for a class outside this project, the package of the base class it
    derives from.

    Raises TypeError for a class that is no frozen dataclass, ValueError for a name taken by another class.
    """

    def add(cls: C) -> C:
        params = getattr(cls, "__dataclass_params__", None)
        if params is None or not params.frozen or "__dataclass_params__" not in vars(cls):
            raise TypeError(f"{cls.__name__} must be a frozen dataclass; put @register above @dataclass(frozen=True)")
        family = family_of(cls)
        if family is None:
            raise TypeError(f"{cls.__name__} derives from no base type of this package, so it has no family")
        known = _registered.setdefault(family, {})
        if name in known and _origin(known[name].cls) != _origin(cls):
            raise ValueError(f"the {family} method {name!r} is already registered by {known[name].cls.__name__}")
        said = facts(name, paper=paper, guarantee=guarantee, lossless=lossless, needs=needs, doc=cls.__doc__)
        known[name] = Method(family=family, **said, cls=cls)
        return cls

    return add


def methods(family: str | None = None) -> list[Method]:
    """All registered methods, or those of one family, ordered by family and name."""
    found: list[Method] = []
    for each in FAMILIES if family is None else (family,):
        _discover(each)
        found += sorted(_registered.get(each, {}).values(), key=lambda method: method.name)
    return found


def descriptions() -> list[Description]:
    """What all methods of this package say of themselves, as `methods` orders them, without importing any of them."""
    return [said for family in FAMILIES for said, _ in catalogue(family).values()]


def method(described: Description) -> Method:
    """The method of a description, whose module alone is imported."""
    _, module = catalogue(described.family)[described.name]
    importlib.import_module(module)
    return _registered[described.family][described.name]


def method_of(value: object) -> Method | None:
    """The registered method that `value` (a class or an instance) is, or None."""
    cls = value if isinstance(value, type) else type(value)
    family = family_of(cls)
    candidates = _registered.get(family, {}).values() if family else ()
    return next((method for method in candidates if method.cls is cls), None)


def family_of(cls: type) -> str | None:
    """The package below this one that `cls`, or the nearest of its bases, lives in."""
    for base in cls.__mro__:
        package = base.__module__.rpartition(".")[0]
        if package.startswith(_PACKAGE + "."):
            return package[len(_PACKAGE) + 1 :]
    return None


def resolve(family: str, spec: Any) -> Any:
    """The method that `spec` names, as "name", "name:key=value,key=value" or "name(key=value,key=value)"; an instance
    is returned as is.

    Values take the type of the field: int, float, bool, str, None; the members of a tuple are separated by
    "/", those of a tuple within a tuple by ":". What stands in parentheses belongs to the method before them; a text
    with commas or parentheses of its own stands in double quotes.

    Raises UnknownMethod for a name that is not registered, SettingsError for a bad setting.
    """
    if not isinstance(spec, str):
        actual = family_of(type(spec))
        if isinstance(spec, type) or actual != family:
            raise SettingsError(f"{spec!r} is not an instance of a {family} method; pass an instance or a name")
        return spec
    name, settings = _parts(spec)
    _discover(family)
    known = _registered.get(family, {})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
        homes = [other for other in FAMILIES if name in catalogue(other)]
        elsewhere = f": {name} is a {homes[0]} method" if homes else ""
        raise UnknownMethod(f"no {family} method is called {name!r}{elsewhere}; try {_listing(near)}")
    return _build(known[name], settings)


def split(text: str, separator: str) -> list[str]:
    """The pieces of `text` between the separators that stand outside all parentheses and double quotes.

    Raises SettingsError where parentheses do not match.
    """
    pieces, depth = [""], 0
    for sign in _SIGN.findall(text):
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            break
        if sign == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += sign
    if depth != 0:
        raise SettingsError(_UNMATCHED.format(text))
    return pieces


def _parts(spec: str) -> tuple[str, str]:
    """Name and settings of "name:settings" or "name(settings)"."""
    found = re.fullmatch(r"([^:(]*)(?:\((.*)\)|:(.*))?", spec.strip(), re.DOTALL)
    if found is None:
        raise SettingsError(_UNMATCHED.format(spec))
    return found[1].strip(), found[2] or found[3] or ""


def _build(method: Method, settings: str) -> Any:
    """An instance of `method` from the text "key=value,key=value"."""
    kinds = typing.get_type_hints(method.cls)
    names = [field.name for field in dataclasses.fields(method.cls) if field.init]
    known = f"its settings are {_listing(names)}" if names else "it has no settings"
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in split(settings, ","))):
        key, equals, text = (piece.strip() for piece in item.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise SettingsError(f"{method.name}: {item!r} is not key=value; {known}")
        if key not in names:
            raise SettingsError(f"{method.name} has no setting {key!r}; {known}")
        if key in values:
            raise SettingsError(f"{method.name}: {key} is given twice")
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]
        try:
            values[key] = _parse(text, kinds[key], "/:")
        except ValueError:
            raise SettingsError(f"{method.name}: {key}={text} is not {_kind_name(kinds[key])}") from None
    if objects := beyond_text(method):
        raise SettingsError(
            f"{method.name} needs {_listing(objects)}, which no text can give: build the method in Python"
        )
    if missing := [name for name in _required(method) if name not in values]:
        raise SettingsError(f"{method.name} needs {_listing(missing)}, as in {method.name}:{missing[0]}=...")
    return method.cls(**values)


def beyond_text(method: Method) -> list[str]:
    """The settings that must be given and that no text can give, as a function: such a method is built in Python."""
    kinds = typing.get_type_hints(method.cls)
    return [name for name in _required(method) if _kind_name(kinds[name]) == _NO_TEXT]


def _required(method: Method) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(method.cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _parse(text: str, kind: Any, separators: str) -> Any:
    """`text` as a value of type `kind`; raises ValueError. separators: one per level of nested tuples."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in sorted(arguments, key=lambda each: each is str):
            try:
                return _parse(text, member, separators)
            except ValueError:
                continue
        raise ValueError(text)
    if origin is typing.Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
        raise ValueError(text)
    if origin is tuple and separators:
        parts = split(text, separators[0]) if text else []
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(parts)
        if len(arguments) != len(parts):
            raise ValueError(text)
        return tuple(_parse(part, member, separators[1:]) for part, member in zip(parts, arguments, strict=True))
    if kind in (None, type(None)) and text.lower() == "none":
        return None
    if kind is bool and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if kind is int or kind is float or kind is str:
        return kind(text)
    raise ValueError(text)


_SIGN = re.compile(r'"[^"]*"|.', re.DOTALL)
"""One sign of a method's settings; what stands between double quotes is one."""

_UNMATCHED = "the parentheses in {!r} do not match: write name(key=value), or a text that holds them in double quotes"

_NO_TEXT = "something a text can give; build the method in Python"

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _kind_name(kind: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_kind_name(member) for member in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return _listing([str(choice) for choice in typing.get_args(kind)], "or")
    if typing.get_origin(kind) is tuple:
        return (
            "a list like a/b/c" if typing.get_origin(typing.get_args(kind)[0]) is not tuple else "a list like a:b/c:d"
        )
    return names.get(kind, _NO_TEXT)


def _listing(names: Sequence[str], last: str = "and") -> str:
    return ", ".join(names[:-1]) + f" {last} {names[-1]}" if len(names) > 1 else "".join(names)


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _discover(family: str) -> None:
    """Import the modules of a family's package once, so that its methods are registered."""
    if family in _discovered:
        return
    if family not in FAMILIES:
        raise UnknownMethod(f"there is no family {family!r} of methods; the families are {_listing(FAMILIES)}")
    # Marked first: a module that resolves a method of its own family while it is imported must not come back
    # here.
    _discovered.add(family)
    name = f"{_PACKAGE}.{family}"
    if not _exists(name):
        return
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            importlib.import_module(f"{name}.{module.name}")


def _exists(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (parent == _PACKAGE or _exists(parent)) and importlib.util.find_spec(name) is not None
