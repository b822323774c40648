"""The options that several commands share, shown under headings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click


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


OUT_FILE, OUT_FOLDER = OutPath(dir_okay=False), OutPath(file_okay=False)


class Option(click.Option):
    """An option that is listed under a heading."""

    def __init__(self, *args: Any, heading: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Command(click.Command):
    """A command whose help lists the options by heading, and whose errors name the model that was given to it."""

    def invoke(self, ctx: click.Context) -> Any:
        from decodery.core.errors import DecoderyError

        try:
            return super().invoke(ctx)
        except DecoderyError as error:
            error.name_model(ctx.params.get("model") or "")
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "heading", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, listed in the order given."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _option(heading: str, *names: str, **settings: Any) -> Decorator:
    return click.option(*names, cls=Option, heading=heading, **settings)


def output_option(*names: str, **settings: Any) -> Decorator:
    """An option about what is printed."""
    return _option("Output", *names, **settings)


def server_option(*names: str, **settings: Any) -> Decorator:
    """An option about how a model is served."""
    return _option("Server", *names, **settings)


def _bias(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float] | None:
    pairs: dict[int, float] = {}
    for value in values:
        token, equals, amount = value.partition("=")
        try:
            pairs[int(token)] = float(amount if equals else "")
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 42=-100", ctx, param) from None
    return pairs or None


def _import(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...] | None:
    if not ctx.resilient_parsing:
        from decodery.core.plugins import import_methods

        for name in names:
            import_methods(name)
    return names or None


def _importing(heading: str, **settings: Any) -> Decorator:
    # Eager: before the other options, whose values may name what it brings.
    what = "Know the methods that MODULE, a name or a .py file, registers; may be repeated."
    settings = {"multiple": True, "is_eager": True, "callback": _import, "metavar": "MODULE", "help": what, **settings}
    return _option(heading, "--import", "imports", **settings)


import_option = _importing("Methods", expose_value=False)
recorded_import_option = _importing("Methods")
"""The same, handed on as `imports`."""


model_options = together(
    _option(
        "Model",
        *("-m", "--model"),
        default="smollm2",
        show_default=True,
        help="An embedded model, a folder, a .gguf file, a Hub id or the URL of a server.",
    ),
    _option(
        "Model",
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
        default="auto",
        show_default=True,
        help="Precision of the weights; auto is the checkpoint's own.",
    ),
)

kv_dtype_option = _option(
    "Model",
    "--kv-dtype",
    type=click.Choice(["auto", "float16", "int8"]),
    default="auto",
    show_default=True,
    help="Precision of what a text keeps in memory; float16 is half of it, int8 a quarter.",
)

decoding_options = together(
    import_option,
    _option("Length", "--max-new-tokens", type=int, metavar="N", help="Stop after N tokens (256)."),
    _option("Length", "--min-new-tokens", type=int, metavar="N", help="Do not end before N tokens."),
    _option("Length", "--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be repeated."),
    _option(
        "Length",
        *("--stop-token-id", "stop_token_ids"),
        multiple=True,
        type=int,
        metavar="ID",
        help="End before the token ID; may be repeated.",
    ),
    _option("Length", "--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token."),
    _option("Sampling", "--temperature", type=float, metavar="T", help="0 is greedy (0)."),
    _option("Sampling", "--seed", type=int, metavar="N", help="Decides the text, alone (0)."),
    _option("Sampling", "--top-k", type=int, metavar="K", help="Keep the K likeliest tokens."),
    _option("Sampling", "--top-p", type=float, metavar="P", help="Keep the likeliest tokens that hold P."),
    _option("Sampling", "--min-p", type=float, metavar="M", help="Keep tokens of at least M times the top."),
    _option("Sampling", "--typical", type=float, metavar="P", help="Keep the most typical tokens that hold P."),
    _option("Sampling", "--epsilon", type=float, metavar="E", help="Keep tokens of at least probability E."),
    _option("Sampling", "--eta", type=float, metavar="E", help="Like epsilon, scaled by the entropy."),
    _option("Sampling", "--top-h", type=float, metavar="A", help="Keep A of the entropy."),
    _option("Sampling", "--xtc", type=float, metavar="P", help="With chance P drop all likely tokens but one."),
    _option("Sampling", "--xtc-threshold", type=float, metavar="P", help="What counts as likely (0.1)."),
    _option("Sampling", "--mirostat", type=int, metavar="1|2", help="Steer the surprise, by this version."),
    _option("Sampling", "--mirostat-tau", type=float, metavar="T", help="To T bits per token (5)."),
    _option("Sampling", "--mirostat-eta", type=float, metavar="E", help="At this rate (0.1)."),
    _option("Sampling", "--repetition-penalty", type=float, metavar="R", help="Divide seen tokens by R (1)."),
    _option("Sampling", "--presence-penalty", type=float, metavar="A", help="Subtract A from used tokens."),
    _option("Sampling", "--frequency-penalty", type=float, metavar="A", help="Subtract A per use of a token."),
    _option("Sampling", "--dry", type=float, metavar="M", help="Penalise going on with a repetition by M and more."),
    _option("Sampling", "--dry-base", type=float, metavar="B", help="Times B per repeated token (1.75)."),
    _option("Sampling", "--dry-allowed", type=int, metavar="N", help="From N repeated tokens on (2)."),
    _option("Sampling", "--dry-window", type=int, metavar="N", help="Look at the last N tokens (all)."),
    _option(
        "Sampling",
        "--dry-breakers",
        multiple=True,
        metavar="TEXT",
        help='What ends a repetition (newline : " *); may be repeated.',
    ),
    _option("Sampling", "--no-repeat-ngram", type=int, metavar="N", help="Never write N tokens twice."),
    _option(
        "Sampling",
        "--logit-bias",
        multiple=True,
        callback=_bias,
        metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID; may be repeated.",
    ),
    _option("Sampling", "--order", metavar="NAME", help="Order of these: default, hf, vllm or llamacpp."),
    _option(
        "Sampling",
        "--sampler",
        multiple=True,
        metavar="SPEC",
        help="In place of all these: one processor, such as top-p:p=0.9; repeated, they apply in the order given.",
    ),
    _option(
        "Sampling",
        "--logits-source",
        metavar="SPEC",
        help="What the logits come from: none or a name with settings, such as guidance:scale=1.5 (none).",
    ),
    _option(
        "Sampling",
        "--cache-policy",
        metavar="SPEC",
        help="What of the text's keys and values is kept and read: none or a name with settings, such as "
        "snapkv:budget=0.25 (none).",
    ),
    _option(
        "Sampling",
        "--monitor",
        multiple=True,
        metavar="SPEC",
        help="What watches the text, such as los:head=DIR,action=stop; may be repeated.",
    ),
    _option(
        "Speculation",
        "--drafter",
        metavar="SPEC",
        help="auto, none or a name with settings, such as prompt-lookup:length=5 (auto). "
        "Under the default rule it never changes the text.",
    ),
    _option("Speculation", "--acceptance-rule", metavar="SPEC", help="How drafts are verified (coupled)."),
    _option(
        "Speculation",
        "--draft-length",
        metavar="SPEC",
        help="How much to draft, such as fixed:nodes=8; without one the drafter decides.",
    ),
    _option("Speculation", "--max-draft-tokens", type=int, metavar="N", help="Draft at most N tokens per step (80)."),
)

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

constraint_options = together(
    _option("Constraint", "--json-schema", type=_FILE, metavar="FILE", help="Write JSON that is valid under a schema."),
    _option("Constraint", "--regex", metavar="PATTERN", help="Write a text that the pattern matches from end to end."),
    _option("Constraint", "--grammar", type=_FILE, metavar="FILE", help="Write a sentence of a Lark grammar."),
    _option("Constraint", "--choice", multiple=True, metavar="TEXT", help="Write one of several texts; repeated."),
    _option(
        "Constraint",
        "--constrain",
        metavar="SPEC",
        help="Any constraint by name, such as monitor:project=src: Python code that names existing attributes only.",
    ),
)

diffuse_option = together(
    _option(
        "Diffusion",
        "--diffuse",
        metavar="SPEC",
        help="How a masked diffusion model fills its canvas of --max-new-tokens, such as threshold:tau=0.9 or "
        '"static:block=32,cache=dual".',
    ),
)

search_option = together(
    _option(
        "Search",
        "--search",
        metavar="SPEC",
        help="Follow several texts at once, such as beam:width=4 at temperature 0, or smc:particles=8 at a higher one; "
        "or ask several times, such as archon, or iad:scorer=llm-judge; without a drafter.",
    ),
)


_DIFFUSED = ("max_new_tokens", "temperature", "seed", "constraint")
"""Settings of a text that a canvas has too."""


def check_diffuse(settings: Mapping[str, Any]) -> None:
    """Raise SettingsError for settings of a text that mean nothing where places are filled out of order."""
    from decodery.core.errors import SettingsError

    if others := [name for name, value in settings.items() if value is not None and name not in _DIFFUSED]:
        raise SettingsError(
            "--diffuse goes with --max-new-tokens, --temperature, --seed and constraints: leave out "
            f"--{others[0].replace('_', '-')}"
        )
