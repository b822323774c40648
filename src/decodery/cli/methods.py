"""`decodery methods`: the methods by family, and all about one."""

from __future__ import annotations

import dataclasses
import difflib
import json
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

import click

from decodery.core.docstrings import field_texts, split
from decodery.core.errors import UnknownMethod, naming_model

from .command import command, option
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
    "suggestion": "lm.suggestions(prompt, k=3) in Python",
    "diffusion-cache": "a setting of --diffuse, as in --diffuse static:block=32,cache=dual",
    "expert-sharing": "a setting of --diffuse, as in --diffuse threshold:experts=des-vote",
    "compression": "--with of decodery compress-model, as in --with int8 --out DIR",
}
"""What uses a method of a family that has no option."""


ABOUT = {
    "speculative.drafters": "propose the next tokens",
    "speculative.trees": "shape the proposals of a drafter into a tree",
    "speculative.acceptance": "decide which drafted tokens are accepted",
    "speculative.acceptance.continuous": "decide which drafted vectors are accepted",
    "sampling": "change the distribution of the next token",
    "logits_sources": "combine models, layers or contexts into logits",
    "speculative.draft_length": "decide how many tokens are drafted",
    "constraints": "restrict what may be written",
    "search": "follow several texts to find a better one",
    "scorers": "rate texts, for searches and sources",
    "extras.superposed": "suggest several short continuations at once",
    "extras.simultaneous": "write while the source still arrives",
    "diffusion": "decide which masked tokens are written next",
    "diffusion.cache": "reuse rows of a diffusion canvas",
    "diffusion.experts": "share experts between the rows of a canvas",
    "kv_cache": "decide which keys and values are kept",
    "monitors": "watch a text while it is decoded",
    "compression": "make a model smaller",
}
"""What the methods of a family do, by the family's package (`core.catalogue.FAMILIES`)."""
_LEGEND = """\
{count} methods in {families} families. On any model, a method is

  ready   with its default settings
  slower  ready, but slower than plain decoding on a CPU
  needs   a trained part, a second model or a setting first

* marks methods that leave the distribution of the output unchanged (lossless).
"""
_NEXT = """\
decodery methods NAME             settings, paper and use of one method
decodery methods --family FAMILY  one line for each method of a family
decodery methods -m MODEL         what is ready on your model"""
_WIDTH = 80
_GROUPS = ("ready", "slower", "needs")


@command(example="methods prompt-lookup\nmethods --family search\nmethods -m model.gguf")
@click.argument("name", required=False)
@import_option
@option("-f", "--family", metavar="FAMILY", help="List the methods of one family, one line each.")
@option("-m", "--model", metavar="MODEL", help="List what is ready on this model, and what the rest needs.")
@option("--json", "as_json", is_flag=True, help="Print a JSON list. With NAME it includes the settings.")
def methods(name: str | None, family: str | None, model: str | None, as_json: bool) -> None:
    """List all decoding methods by family, or describe the one called NAME.

    Without NAME, each family lists its methods in three groups: ready on any model, slower than plain decoding on a
    CPU, and those that need a trained part, a second model or a setting.

    Your own methods are listed too if --import names their module, or if an installed distribution names it under the
    entry point group decodery.methods.
    """
    from decodery.core import registry

    if sum(each is not None for each in (name, family, model)) > 1:
        raise click.UsageError("NAME, --family and --model exclude each other: give one of them")
    if model is not None:
        _print_readiness(model, as_json)
        return
    described = registry.descriptions()
    if name is not None:
        _print_one(name, described, as_json)
        return
    if family is not None:
        described = _of_family(family, described)
    if as_json:
        _print_json([method.as_dict() for method in described])
    elif family is not None:
        _print_family(family, described)
    else:
        _print_overview(described)


def _print_one(name: str, described: list[Description], as_json: bool) -> None:
    """All about the methods of a name. Raises UnknownMethod where there is none."""
    from decodery.core import registry
    from decodery.core.catalogue import FAMILIES

    # Defaults are known to the module of a method alone, which may import PyTorch.
    found = [registry.method(method) for method in described if method.name == name]
    if not found:
        known = [method.name for method in described]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}?" if near else "`decodery methods` lists all"
        if name in FAMILIES:
            advice = f"it is a family, which `decodery methods --family {name}` lists"
        raise UnknownMethod(f"no method is called {name!r}: {advice}")
    if as_json:
        _print_json([method.as_dict() | {"settings": _settings(method)} for method in found])
    else:
        click.echo("\n\n".join(_page(method) for method in found))


def _of_family(family: str, described: list[Description]) -> list[Description]:
    """The methods of a family. Raises UnknownMethod where there is no such family."""
    from decodery.core.catalogue import FAMILIES

    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=3, cutoff=0.5) or list(FAMILIES)
        raise UnknownMethod(f"no family is called {family!r}: try {', '.join(near)}")
    return [method for method in described if method.family == family]


def _group(method: Description) -> str:
    """Whether a method is ready, slower or needs something, on any model."""
    return "needs" if not method.ready else "slower" if method.slower else "ready"


def _marked(method: Description) -> str:
    return method.name + ("*" if method.lossless else "")


def _title(family: str) -> str:
    """The heading of a family: its name, what it does, and the option that takes its methods."""
    from decodery.core.catalogue import FAMILIES

    option = f"  [{_OPTIONS[family]}]" if family in _OPTIONS else ""
    return f"{click.style(family, bold=True)}: {ABOUT.get(FAMILIES[family], '')}{option}"


def _print_overview(described: list[Description]) -> None:
    """Legend, then the names of every family by group."""
    families = list(dict.fromkeys(method.family for method in described))
    click.echo(_LEGEND.format(count=len(described), families=len(families)))
    for family in families:
        click.echo(_title(family))
        own = [method for method in described if method.family == family]
        for group in _GROUPS:
            if names := [_marked(method) for method in own if _group(method) == group]:
                click.echo(_wrapped(f"  {group:<8}", ", ".join(names)))
        click.echo()
    click.echo(_NEXT)


def _print_family(family: str, found: list[Description]) -> None:
    """One method per entry: name, group, year and summary."""
    click.echo(_title(family) + "\n")
    width = max((len(_marked(method)) for method in found), default=0)
    for method in found:
        click.echo(
            _wrapped(f"  {_marked(method):<{width}}  {_group(method):<6}  {method.year or '':<4}  ", method.summary)
        )
    click.echo("\n*: lossless. `decodery methods NAME` describes one method, `decodery methods` the groups.")


def _wrapped(head: str, text: str) -> str:
    """A text after a head, wrapped to the width of a terminal, at most 80 columns."""
    room = max(min(shutil.get_terminal_size().columns, _WIDTH) - len(head), 20)
    lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    return head + f"\n{' ' * len(head)}".join(lines)


def _print_readiness(model: str, as_json: bool) -> None:
    """By family: the methods that are ready on a model, the slower ones, and what the others need."""
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
    for family in dict.fromkeys(family for family, _ in missing):
        own = {name: requirements for (of, name), requirements in missing.items() if of == family}
        ready = [name for name, requirements in own.items() if not requirements]
        groups = {
            "ready": [name for name in ready if (family, name) not in slow],
            "slower": [name for name in ready if (family, name) in slow],
        }
        click.echo(_title(family))
        for group, names in groups.items():
            if names:
                click.echo(_wrapped(f"  {group:<8}", ", ".join(names)))
        for name, requirements in own.items():
            if requirements:
                click.echo(_wrapped(f"  {'needs':<8}", f"{name}: {requirements}"))
        click.echo()
    click.echo("ready: with default settings. slower: ready, but slower than plain decoding on this device.")


def _print_json(objects: list[dict[str, Any]]) -> None:
    click.echo(json.dumps(objects, indent=2, ensure_ascii=False, default=str))


def _settings(method: Method) -> list[dict[str, Any]]:
    """Name, type, default and description of every setting, as plain data; no default where one must be given."""
    described, texts = [], field_texts(method.cls)
    for field in dataclasses.fields(method.cls):
        if field.init:
            entry: dict[str, Any] = {"name": field.name, "type": getattr(field.type, "__name__", str(field.type))}
            if field.default is not dataclasses.MISSING:
                entry["default"] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                entry["default"] = field.default_factory()
            if field.name in texts:
                entry["description"] = texts[field.name]
            described.append(entry)
    return described


def _page(method: Method) -> str:
    from decodery.core.method_spec import beyond_text

    ready = {"ready": "on any model", "slower": "on any model, but slower than plain decoding on a CPU"}
    facts = [
        f"{method.name}  ({method.family})",
        f"paper:      {method.paper or '-'}",
        f"guarantee:  {method.guarantee}",
        f"ready:      {ready.get(_group(method), 'needs a trained part, a second model or a setting')}",
        f"requires:   {', '.join(method.requirements) or '-'}",
        f"provides:   {', '.join(method.provides) or '-'}",
    ]
    facts = [textwrap.fill(each, _WIDTH, subsequent_indent=" " * 12, break_on_hyphens=False) for each in facts]
    text, sections = split(method.cls.__doc__)
    facts += ["", *_paragraphs(text)]
    if "References" in sections:
        facts += ["", "references:", *(f"  {line}" for line in sections["References"].splitlines())]
    settings = _settings(method)
    if settings:
        facts += ["", "settings:"]
        for entry in settings:
            facts += [f"  {_setting(entry)}", *_indented(entry.get("description", ""))]
    if method.family in _CALLS:
        facts += ["", f"use: {_CALLS[method.family]}"]
    if method.family in _OPTIONS and not beyond_text(method):
        example = "".join(f":{entry['name']}={_text(entry['default'])}" for entry in settings[:1] if "default" in entry)
        facts += ["", f"use: decodery generate {_OPTIONS[method.family]} {method.name}{example} ..."]
    return "\n".join(facts)


def _paragraphs(doc: str) -> list[str]:
    """The lines of a docstring at a width of 80; what is indented stays as it is."""
    found: list[str] = []
    for paragraph in doc.split("\n\n"):
        plain = not any(line.startswith(" ") for line in paragraph.splitlines())
        lines = textwrap.wrap(paragraph, _WIDTH, break_on_hyphens=False) if plain else paragraph.splitlines()
        found += [*lines, ""]
    return found[:-1]


def _indented(text: str) -> list[str]:
    margin = " " * 6
    return textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _text(value: Any) -> str:
    """A default as `registry.resolve` reads it; tuples are joined, by "/" and within by ":"."""
    if isinstance(value, tuple):
        return "/".join(":".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
    return str(value)


def _setting(entry: dict[str, Any]) -> str:
    default = f" = {entry['default']!r}" if "default" in entry else "  (required)"
    return f"{entry['name']}: {entry['type']}{default}"
