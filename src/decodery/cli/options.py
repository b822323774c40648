"""The options that several commands share, shown under headings."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .command import option


class OutPath(click.Path):
    """A path that is to be written: refused before the work where the file system has no room for it there."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        above = next(each for each in (*path.absolute().parents, Path("/")) if each.exists())
        if not above.is_dir():
            self.fail(f"{above} is a file, so {path} cannot be written: name another path", param, ctx)
        if not path.exists() and not os.access(above, os.W_OK | os.X_OK):
            self.fail(f"{above} may not be written to: name another path", param, ctx)
        return path


class FileOrText(click.Path):
    """A file, as a path, or what would stand in one, as a text.

    Args:
        begins: How such a text begins, as a pattern.
        advice: What may be given, for errors.
    """

    def __init__(self, begins: str, advice: str) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)
        self._text, self._advice = re.compile(rf"\s*(?:{begins})"), advice

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and self._text.match(value):
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}: {self._advice}", param, ctx)


OUT_FILE, OUT_FOLDER = OutPath(dir_okay=False), OutPath(file_okay=False)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, listed in the order given."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def option_under(heading: str, *names: str, **settings: Any) -> Decorator:
    """An option under a heading."""
    return option(*names, heading=heading, **settings)


def output_option(*names: str, **settings: Any) -> Decorator:
    """An option about what is printed."""
    return option_under("Output", *names, **settings)


def server_option(*names: str, **settings: Any) -> Decorator:
    """An option about how a model is served."""
    return option_under("Server", *names, **settings)


def chat_template_option(what: str, **settings: Any) -> Decorator:
    """The option --no-chat-template, handed on as `apply_chat_template`. what: its help."""
    settings = {"is_flag": True, "callback": lambda ctx, param, left_out: not left_out, "help": what, **settings}
    return option("--no-chat-template", "apply_chat_template", **settings)


def _import(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...] | None:
    if not ctx.resilient_parsing:
        from decodery.core.plugins import import_methods

        for name in names:
            import_methods(name)
    return names or None


def _importing(heading: str, **settings: Any) -> Decorator:
    # Eager: before the other options, whose values may name what it brings.
    what = "Import MODULE, a name or a .py file, whose methods you want to use. Repeatable."
    settings = {"multiple": True, "is_eager": True, "callback": _import, "metavar": "MODULE", "help": what, **settings}
    return option_under(heading, "--import", "imports", **settings)


import_option = _importing("Methods", expose_value=False)
recorded_import_option = _importing("Methods")
"""The same, handed on as `imports`."""


model_options = together(
    option_under(
        "Model",
        *("-m", "--model"),
        default="smollm2",
        show_default=True,
        help="A model: an embedded one, a folder, a .gguf file, a Hub id or the URL of a server.",
    ),
    option_under(
        "Model",
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
        default="auto",
        show_default=True,
        help="Precision of the weights. auto: that of the checkpoint.",
    ),
)

_kv_dtype = option_under(
    "Model",
    "--kv-dtype",
    type=click.Choice(["auto", "float16", "int8", "float8"]),
    default="auto",
    show_default=True,
    help="Precision of the KV cache. float16 takes half the memory of float32, int8 and (GPU) float8 a quarter.",
)
_masking = option_under(
    "Model",
    "--masking",
    metavar="mask=TOKEN[,shifted=true][,block=N]",
    help="Run an adapted diffusion model whose files do not name its mask token, for --diffuse.",
)
loading_options = together(_kv_dtype, _masking)
"""How a model is loaded, beside its precision."""
