"""`decodery methods`: what is in the box."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import UnknownMethod, naming_model

from .options import import_option

if TYPE_CHECKING:
    from decodery.core.catalogue import Description
    from decodery.core.registry import Method

_OPTIONS = {
    "drafter": "--drafter",
    "acceptance-rule": "--acceptance-rule",
    "draft-length": "--draft-length",
    "logits-processor": "--sampler",
    "logits-source": "--logits-source",
    "cache-policy": "--cache-policy",
    "monitor": "--monitor",
    "search": "--search",
    "diffusion": "--diffuse",
}
"""The option of `generate` or `chat` that takes a method of a family."""
_CALLS = {
    "suggestion": "lm.drafts(prompt, k=3) in Python",
    "diffusion-cache": "a setting of --diffuse, as in --diffuse static:block=32,cache=dual",
    "expert-sharing": "a setting of --diffuse, as in --diffuse threshold:experts=des-vote",
    "compression": "--with of decodery transform, as in --with int8 --out DIR",
}
"""What uses a method of a family that has no option."""


@click.command(short_help="List the methods, or tell all about one.")
@click.argument("name", required=False)
@import_option
@click.option("-m", "--model", help="Group those that write one text by what they need on this model.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects; with NAME their settings too.")
def methods(name: str | None, model: str | None, as_json: bool) -> None:
    """List every method, or tell all about the one called NAME.

    With a model: which of the methods that decide how one text is written are ready on it, and what the others need.

    Methods of your own are among them where their modules are imported, or named by an installed distribution under
    the entry points decodery.methods.
    """
    from decodery.core import registry

    described = registry.descriptions()
    if model is not None:
        if name is not None:
            raise click.UsageError("name a method or a model, not both")
        _print_readiness(model, as_json)
        return
    if name is None:
        if as_json:
            _print_json([method.as_dict() for method in described])
        else:
            _print_list(described)
        return
    # What follows shows defaults, which only the module itself can tell, PyTorch and all.
    found = [registry.method(method) for method in described if method.name == name]
    if not found:
        known = [method.name for method in described]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        advice = f"try {', '.join(near)}" if near else "`decodery methods` lists them all"
        raise UnknownMethod(f"no method is called {name!r}; {advice}")
    if as_json:
        _print_json([method.as_dict() | {"settings": _settings(method)} for method in found])
    else:
        click.echo("\n\n".join(_page(method) for method in found))


def _print_readiness(model: str, as_json: bool) -> None:
    """By family: methods that are ready on a model, those that are slower there, and those that need something."""
    from decodery import load
    from decodery.core import registry
    from decodery.llm.readiness import readiness, slower

    found = [method for family in registry.FAMILIES for method in registry.methods(family)]
    target = load(model).model
    missing = {key: naming_model(requirements, model) for key, requirements in readiness(found, target).items()}
    slow = {(method.family, method.name) for method in found if slower(method, target)}
    if as_json:
        _print_json(
            [
                {"family": key[0], "name": key[1], "requirements": requirements or None, "slower": key in slow}
                for key, requirements in missing.items()
            ]
        )
        return
    for number, family in enumerate(dict.fromkeys(family for family, _ in missing)):
        own = {name: requirements for (of, name), requirements in missing.items() if of == family}
        ready = [name for name, requirements in own.items() if not requirements]
        late = [name for name in ready if (family, name) in slow]
        click.secho(f"{chr(10) if number else ''}{family}", bold=True)
        click.echo(f"  ready on this model: {', '.join(name for name in ready if name not in late) or 'none'}")
        if late:
            click.echo(f"  ready, but slower here than plain decoding: {', '.join(late)}")
        for name, requirements in own.items():
            if requirements:
                click.echo(f"  {name} needs more: {requirements}")


def _print_json(objects: list[dict[str, Any]]) -> None:
    click.echo(json.dumps(objects, indent=2, ensure_ascii=False, default=str))


def _settings(method: Method) -> list[dict[str, Any]]:
    """Name, type and default of every setting, as plain data; no default where one must be given."""
    described = []
    for field in dataclasses.fields(method.cls):
        if field.init:
            entry: dict[str, Any] = {"name": field.name, "type": str(field.type)}
            if field.default is not dataclasses.MISSING:
                entry["default"] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                entry["default"] = field.default_factory()
            described.append(entry)
    return described


def _print_list(found: list[Description]) -> None:
    """One line per method; on a terminal long summaries are wrapped to its width."""
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns
    width = max(len(method.name) for method in found)
    family = ""
    for method in found:
        if method.family != family:
            click.secho(f"{'' if not family else chr(10)}{method.family}", bold=True)
            family = method.family
        head = f"  {method.name:<{width}}  {method.year or '':<4}  {'lossless' if method.lossless else '':<8}  "
        room = columns - len(head)
        lines = textwrap.wrap(method.summary, room) if terminal and room >= 20 else [method.summary]
        click.echo(head + f"\n{' ' * len(head)}".join(lines))
    if terminal:
        click.echo("\n`decodery methods NAME` tells more about one.")


def _page(method: Method) -> str:
    facts = [
        f"{method.name}  ({method.family})",
        f"paper:      {method.paper or '-'}",
        f"guarantee:  {method.guarantee}",
        f"requires:   {', '.join(method.requirements) or '-'}",
        f"provides:   {', '.join(method.provides) or '-'}",
        "",
        inspect.getdoc(method.cls) or "",
    ]
    from decodery.core.method_spec import beyond_text

    settings = _settings(method)
    if settings:
        facts += ["", "settings:"]
        facts += [f"  {_setting(entry)}" for entry in settings]
    if method.family in _CALLS:
        facts += ["", f"use: {_CALLS[method.family]}"]
    if method.family in _OPTIONS and not beyond_text(method):
        example = "".join(f":{entry['name']}={_text(entry['default'])}" for entry in settings[:1] if "default" in entry)
        facts += ["", f"use: decodery generate {_OPTIONS[method.family]} {method.name}{example} ..."]
    return "\n".join(facts)


def _text(value: Any) -> str:
    """A default as `registry.resolve` reads it; tuples are joined, by "/" and within by ":"."""
    if isinstance(value, tuple):
        return "/".join(":".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
    return str(value)


def _setting(entry: dict[str, Any]) -> str:
    default = f" = {entry['default']!r}" if "default" in entry else "  (must be given)"
    return f"{entry['name']}: {entry['type']}{default}"
