"""What every command is made of: options under headings, an example at the end of the help, commands in groups."""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import click

_HEADINGS = {
    **dict.fromkeys(("model", "dtype", "kv_dtype", "masking", "draft", "second", "teacher"), "Model"),
    **dict.fromkeys(
        ("texts", "prompts", "max_new_tokens", "length", "count", "apply_chat_template", "chat", "pretrain"), "Data"
    ),
    **dict.fromkeys(("images", "tasks", "letters", "delimiter", "problems", "solutions", "labels", "puzzle"), "Data"),
    **dict.fromkeys(("trajectories", "alternatives", "places", "step_tokens", "temperature", "reward"), "Data"),
    **dict.fromkeys(("steps", "epochs", "batch", "lr", "base_lr", "seed", "iterations", "generations"), "Training"),
    **dict.fromkeys(("population", "proposals", "read", "refining", "control", "ridge", "echo"), "Training"),
    **dict.fromkeys(("out", "as_json"), "Output"),
}
"""The heading of an option that names none, by the option's name; `_SETTINGS` for all others."""
_SETTINGS = "Settings"
_ORDER = ("Model", "Data", _SETTINGS)
_LAST = ("Training", "Output", "Other")
_METAVARS = {"directory": "DIR", "integer": "N", "integer range": "N", "float": "X", "float range": "X", "file": "FILE"}
"""What stands for a value in the help, by the name of its type."""


class Option(click.Option):
    """An option that is listed under a heading.

    Args:
        heading: The heading; without one, that of `_HEADINGS`.
    """

    def __init__(self, *args: Any, heading: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading or _HEADINGS.get(self.name or "", _SETTINGS)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value in its type. NaN, which no range excludes, is refused."""
        found = super().type_cast_value(ctx, value)
        if isinstance(found, float) and math.isnan(found):
            raise click.BadParameter(f"{value!r} is not a number", ctx, self)
        return found

    def make_metavar(self, ctx: click.Context) -> str:
        """A short word for the value."""
        if self.metavar is None and self.nargs == 1:
            if self.name == "model":
                return "MODEL"
            if self.type.name in _METAVARS:
                return _METAVARS[self.type.name]
        return super().make_metavar(ctx)

    def get_help_extra(self, ctx: click.Context) -> Any:
        """What stands in brackets after the help: the default, and whether a value is required."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        if "default" in extra:
            extra["default"] = extra["default"].removeprefix("(").removesuffix(")")
        return extra


option = partial(click.option, cls=Option)
"""`click.option` for an option under a heading."""


class Formatter(click.HelpFormatter):
    """Writes help without breaking lines at hyphens, so that options and names of methods stay whole."""

    def write_text(self, text: str) -> None:
        """Write paragraphs; one that begins with \\b keeps its lines."""
        indent = " " * self.current_indent
        for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
            lines = [line.strip() for line in paragraph.strip("\n").splitlines()]
            if lines[0] == "\b":
                lines = lines[1:]
            else:
                lines = _wrap(" ".join(lines), self.width - len(indent))
            self.write(("\n" if number else "") + "".join(f"{indent}{line}\n" for line in lines))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 26, col_spacing: int = 2) -> None:
        """Write names with their help; the help of a long name begins in the next line."""
        rows, indent = list(rows), " " * self.current_indent
        first = min(max(len(name) for name, _ in rows), col_max) + col_spacing
        for name, text in rows:
            lines = _wrap(text, self.width - len(indent) - first) or [""]
            if len(name) > first - col_spacing:
                self.write(f"{indent}{name}\n{indent}{'':<{first}}{lines[0]}\n")
            else:
                self.write(f"{indent}{name:<{first}}{lines[0]}\n".rstrip() + "\n")
            self.write("".join(f"{indent}{'':<{first}}{line}\n" for line in lines[1:]))


def _wrap(text: str, width: int) -> list[str]:
    whole = re.sub(r"\[default: [^\]]{1,24}\]", lambda found: found[0].replace(" ", "\xa0"), text)
    return [line.replace("\xa0", " ") for line in textwrap.wrap(whole, max(width, 20), break_on_hyphens=False)]


def _help(command: click.Command, ctx: click.Context) -> str:
    formatter = Formatter(width=ctx.terminal_width, max_width=ctx.max_content_width)
    command.format_help(ctx, formatter)
    return formatter.getvalue().rstrip("\n")


class Command(click.Command):
    """A command whose options stand under headings, whose help ends with an example, and whose errors name its model.

    Args:
        example: Arguments after `decodery`, one or several lines of them.
    """

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments. What is no option, or one argument too many, is refused with what was meant."""
        ctx.allow_extra_args = True
        try:
            left = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"no option is called {error.option_name!r}: {self._meant(error.option_name, ctx)}"
            raise click.UsageError(message, ctx) from None
        if left and not ctx.resilient_parsing:
            raise click.UsageError(f"{left[0]!r} is one argument too many: {self._takes(ctx, left[0])}", ctx)
        return left

    def _meant(self, given: str, ctx: click.Context) -> str:
        """What to do about an option that does not exist: its name in another tool, or misspelt."""
        from decodery.llm.other_names import OTHER_NAMES

        name = given.lstrip("-").replace("-", "_")
        known = {param.name: max(param.opts, key=len) for param in self.params if isinstance(param, click.Option)}
        words = [name, *re.findall(r"\w+", OTHER_NAMES.get(name, ""))]
        if here := next((known[word] for word in words if word in known), None):
            return f"give {here}"
        if name in (param.name for param in self.params):
            return f"{self._takes(ctx)}"
        near = difflib.get_close_matches(given, known.values(), n=2, cutoff=0.7)
        return f"did you mean {' or '.join(near)}?" if near else f"`{ctx.command_path} --help` lists them"

    def _takes(self, ctx: click.Context, given: str = "NAME") -> str:
        """Which arguments there are. given: one that is none of them, which may be meant as a model."""
        names = [param.make_metavar(ctx) for param in self.params if isinstance(param, click.Argument)]
        if "[PROMPT]" in names or "PROMPT" in names:
            return f'give the prompt as one argument, in quotes, as in {ctx.command_path} "Explain tides."'
        if not names and "model" in (param.name for param in self.params):
            return f"a model is an option, as in {ctx.command_path} -m {given}"
        return f"`{ctx.command_path}` takes {' '.join(names) or 'options alone'}"

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Errors of the package name the model that was given."""
        from decodery.core.errors import DecoderyError

        try:
            return super().invoke(ctx)
        except DecoderyError as error:
            error.name_model(ctx.params.get("model") or "")
            raise

    def get_help(self, ctx: click.Context) -> str:
        """The help, as `Formatter` writes it."""
        return _help(self, ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        _write_example(self.example, formatter)


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _ORDER}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and isinstance(param, click.Option):
            heading = param.heading if isinstance(param, Option) else "Other"
            groups.setdefault(heading, []).append(record)
    for heading in sorted(groups, key=lambda name: _LAST.index(name) if name in _LAST else -1):
        if groups[heading]:
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


def _write_example(example: str, formatter: click.HelpFormatter) -> None:
    """Write an example under a heading; nothing for an empty one."""
    if example:
        with formatter.section("Example"):
            for line in example.splitlines():
                formatter.write(f"{' ' * formatter.current_indent}decodery {line}\n")


class Entry(NamedTuple):
    """A command as its group lists it.

    Args:
        summary: One line, at most 55 characters.
        module: The module of `decodery.cli` that has the command; by default the one of the command's name.
        example: Arguments after `decodery`, shown below the summary.
    """

    summary: str
    module: str = ""
    example: str = ""


class Group(click.Group):
    """A group that lists its commands under headings, and imports the module of a command when it runs.

    A command `a-b` is the attribute `a_b` of its module, or `a_b_` where Python reserves the name.

    Args:
        sections: By heading: the commands, by name.
        example: Arguments after `decodery`, shown at the end of the help.
    """

    def __init__(
        self, *args: Any, sections: Mapping[str, Mapping[str, Entry]], example: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.example = example
        self.sections = sections
        self.entries = {name: entry for section in sections.values() for name, entry in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, in the order of the help."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of a name, whose module is imported now."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        attribute = name.replace("-", "_")
        module = import_module(f".{entry.module or attribute}", __package__)
        found: click.Command = getattr(module, attribute, None) or getattr(module, attribute + "_")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names. Raises UsageError with the nearest names where there is none."""
        if args[0] not in self.entries and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.entries, n=2)
            advice = f"did you mean {' or '.join(near)}?" if near else f"`{ctx.command_path} --help` lists them"
            raise click.UsageError(f"no command is called {args[0]!r}: {advice}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; without any, the help is printed."""
        if not args and not ctx.resilient_parsing and not self.invoke_without_command:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """The help, as `Formatter` writes it."""
        return _help(self, ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, then the options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        _write_example(self.example, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section; one with an example has it in the line below."""
        width = max(map(len, self.entries))
        for heading, section in self.sections.items():
            with formatter.section(heading):
                for name, entry in section.items():
                    formatter.write(f"  {name:<{width}}  {entry.summary}\n")
                    if entry.example:
                        formatter.write(f"  {'':<{width}}    decodery {entry.example}\n")


def command(name: str | None = None, *, example: str) -> Callable[[Callable[..., Any]], Command]:
    """Decorator that makes a `Command` of a function. name: by default the function's, with dashes."""
    return click.command(name, cls=Command, example=example)
