"""Every method by name: which paper it is from, what it promises, and what it needs.

A method is a frozen dataclass whose fields are its hyper-parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from inspect import isfunction
from threading import RLock
from typing import Any, TypeVar

from .abstract import require_complete
from .catalogue import FAMILIES, FAMILY_OF, Description, catalogue, facts
from .errors import SettingsError, UnknownMethod
from .method_spec import build, listing, parts
from .plugins import import_entry_points
from .requirements import Provides, Requirements, said
from .settings import plain

_PACKAGE = __name__.partition(".")[0]
_registered: dict[str, dict[str, Method]] = {}
_discovered: set[str] = set()
_beginning: set[str] = set()
_discovery = RLock()

C = TypeVar("C", bound=type)


@dataclasses.dataclass(frozen=True)
class Method(Description):
    """One registered method: what it says of itself, and its dataclass.

    Attributes:
        texts: Settings that are text and nothing else.
        local: Whether it is for this machine's own user alone.
    """

    cls: type
    texts: tuple[str, ...] = ()
    local: bool = False


def _take_plain(cls: type[Any]) -> None:
    """Let a method's settings be numpy's scalars, too."""
    own = cls.__init__

    @functools.wraps(own)
    def init(self: Any, *arguments: Any, **settings: Any) -> None:
        own(self, *map(plain, arguments), **{name: plain(value) for name, value in settings.items()})

    cls.__init__ = init


def register(
    name: str,
    *,
    paper: str = "",
    guarantee: str = "",
    lossless: bool = False,
    slower: bool = False,
    requirements: Sequence[str] = (),
    texts: Sequence[str] = (),
    local: bool = False,
) -> Callable[[C], C]:
    """Class decorator that makes a frozen dataclass known under `name`.

    The family is the package the class lives in or, for a class outside this project, that of its base class. Settings
    of other kinds of text are for the owner of the process, and so is a `local` method, which reads files or
    runs programs whatever its settings are.

    Args:
        paper: "Title (year)" or "".
        guarantee: What holds, in a few words.
        lossless: True where the method leaves the distribution of the output as it is.
        slower: Whether it was measured slower than plain decoding on a CPU, as it is by default (see docs/results).
        requirements: What it needs beyond its table (`cls.requirements`), such as "a trained head".
        texts: Settings that untrusted requests may give because they are text and nothing else: no path, model or
            program.

    Raises:
        TypeError: For a class that is no frozen dataclass, has no family or lacks a method of its base.
        ValueError: For a name taken by another class.
    """

    def add(cls: C) -> C:
        params = getattr(cls, "__dataclass_params__", None)
        if params is None or not params.frozen or "__dataclass_params__" not in vars(cls):
            raise TypeError(f"{cls.__name__} must be a frozen dataclass; put @register above @dataclass(frozen=True)")
        family = family_of(cls)
        if family not in FAMILIES:
            raise TypeError(
                f"{cls.__name__} has no family: derive it from a base class of decodery.extend, such as Drafter"
            )
        require_complete(cls)
        _take_plain(cls)
        known = _registered.setdefault(family, {})
        # Those of this package count whether they are imported yet or not.
        entry = catalogue(family).get(name)
        taken = _origin(known[name].cls) if name in known else entry and (entry.module, entry.cls)
        if taken and taken != _origin(cls):
            raise ValueError(f"the {family} method {name!r} is already registered by {taken[1]}: choose another name")
        if entry and taken == (entry.module, entry.cls):
            known[name] = Method(**vars(entry.described), cls=cls, texts=tuple(texts), local=local)
            return cls
        own, given = getattr(cls, "requirements", None), getattr(cls, "provides", None)
        tables = said(own) if isinstance(own, Requirements) else (), said(given) if isinstance(given, Provides) else ()
        found = facts(
            name,
            paper=paper,
            guarantee=guarantee,
            lossless=lossless,
            slower=slower,
            lacking=any(_required(field) for field in dataclasses.fields(cls)),
            requirements=requirements,
            doc=cls.__doc__,
            tables=tables,
        )
        known[name] = Method(family=family, **found, cls=cls, texts=tuple(texts), local=local)
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
    """What all methods say of themselves, as `methods` orders them.

    Of those of this package none is imported.
    """
    import_entry_points()
    found: list[Description] = []
    for family in FAMILIES:
        # What is registered says the same of this package's methods, and tells of those of other projects.
        known: dict[str, Description] = {name: entry.described for name, entry in catalogue(family).items()}
        known |= _registered.get(family, {})
        found += [known[name] for name in sorted(known)]
    return found


def method(described: Description) -> Method:
    """The method of a description, whose module alone is imported."""
    entry = catalogue(described.family).get(described.name)
    if entry is not None:
        importlib.import_module(entry.module)
    return _registered[described.family][described.name]


def method_of(value: object) -> Method | None:
    """The registered method that `value` (a class or an instance) is, or None."""
    cls = value if isinstance(value, type) else type(value)
    family = family_of(cls)
    candidates = _registered.get(family, {}).values() if family else ()
    return next((method for method in candidates if method.cls is cls), None)


def family_of(cls: type) -> str | None:
    """The family whose package `cls`, or the nearest of its bases that is in one, lives in."""
    for base in cls.__mro__:
        module = base.__module__.removeprefix(_PACKAGE + ".")
        for home in (module, module.rpartition(".")[0]):
            if home in FAMILY_OF:
                return FAMILY_OF[home]
    return None


def resolve(family: str, spec: Any, **further: Any) -> Any:
    """The method that `spec` names, as "name", "name:key=value,key=value" or "name(key=value,key=value)".

    An instance is returned as is. Values take the type of the field: int, float, bool, str, None; the members of a
    tuple are separated by "/", those of a tuple within a tuple by ":". What stands in parentheses belongs to the method
    before them; a text with commas or parentheses of its own stands in double quotes.

    Args:
        further: Settings that are given as they are.

    Raises:
        UnknownMethod: For a name that is not registered.
        SettingsError: For a bad setting.
    """
    if not isinstance(spec, str):
        actual = family_of(type(spec))
        if isinstance(spec, type) or actual != family:
            # What newcomers pass as a scorer, and what makes one of it.
            wrapped = (
                " (dc.scorers.TextScore makes one of a function)" if family == "scorer" and isfunction(spec) else ""
            )
            raise SettingsError(
                f"{spec!r} is not an instance of a {family} method; pass an instance{wrapped} or a name"
            )
        if further:
            raise SettingsError(f"this {type(spec).__name__} is built already: give {listing(list(further))} to it")
        return spec
    name, settings = parts(spec)
    found = _named(family, name)
    if found is None:
        _discover(family)
        known = _registered.get(family, {})
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
        homes = [other for other in FAMILIES if name in catalogue(other)]
        elsewhere = f": {name} is a {homes[0]} method" if homes else ""
        raise UnknownMethod(f"no {family} method is called {name!r}{elsewhere}; try {listing(near)}")
    return build(found, settings, further)


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.init and field.default is missing and field.default_factory is missing


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _require_family(family: str) -> None:
    if family not in FAMILIES:
        raise UnknownMethod(f"there is no family {family!r} of methods; the families are {listing(list(FAMILIES))}")


def _named(family: str, name: str) -> Method | None:
    """The method of a name, or None. Only its own module is imported, or the modules of other projects."""
    _require_family(family)
    entry = catalogue(family).get(name)
    if entry is not None:
        importlib.import_module(entry.module)
    elif name not in _registered.get(family, {}):
        import_entry_points()
    return _registered.get(family, {}).get(name)


def _discover(family: str) -> None:
    """Import once the modules that register a family's methods, and those of other projects.

    A module that fails is left out with a warning: it breaks its own methods only.
    """
    _require_family(family)
    if family in _discovered:
        return
    with _discovery:
        if family in _beginning:
            # A module that resolves a method of its own family while it is imported must not come back here.
            return
        _beginning.add(family)
        for module in dict.fromkeys(entry.module for entry in catalogue(family).values()):
            try:
                importlib.import_module(module)
            except Exception as error:
                warnings.warn(f"the methods of {module} are left out: {type(error).__name__}: {error}", stacklevel=2)
        import_entry_points()
        # Not before: other threads would miss what is not imported yet.
        _discovered.add(family)
