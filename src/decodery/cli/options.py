"""The options that several commands share, shown under headings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import PromptError, SettingsError

_MOST_INPUT = 1 << 24
_CHANCE = {
    **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical": 1.0, "epsilon": 0.0, "eta": 0.0},
    **{"top_h": None, "xtc": 0.0, "mirostat": 0},
}
"""Settings that only shape chance, and their neutral values."""
_NOT_WARPING = {
    "max_new_tokens",
    "seed",
    "stop",
    "ignore_eos",
    "drafter",
    "rule",
    "budget",
    "max_nodes",
    "source",
    "constraint",
}


class Option(click.Option):
    """An option that is listed under a heading."""

    def __init__(self, *args: Any, heading: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Command(click.Command):
    """A command whose help lists the options by heading."""

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


def _options(*options: Decorator) -> Decorator:
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


def _bias(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float] | None:
    pairs: dict[int, float] = {}
    for value in values:
        token, equals, amount = value.partition("=")
        try:
            pairs[int(token)] = float(amount if equals else "")
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 42=-100", ctx, param) from None
    return pairs or None


def _import(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> None:
    if not ctx.resilient_parsing:
        from ..plugins import import_methods

        for name in names:
            import_methods(name)


import_option = _option(
    "Methods",
    "--import",
    multiple=True,
    # Before the other options, whose values may name what it brings.
    is_eager=True,
    expose_value=False,
    callback=_import,
    metavar="MODULE",
    help="Know the methods that MODULE, a name or a .py file, registers; may be repeated.",
)


model_options = _options(
    _option(
        "Model",
        *("-m", "--model"),
        default="smollm2",
        show_default=True,
        help="An embedded model, a folder, a .gguf file or a Hub id.",
    ),
    _option(
        "Model",
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "int8", "int4"]),
        default="auto",
        show_default=True,
        help="Precision of the weights; auto is the checkpoint's own.",
    ),
)

decoding_options = _options(
    import_option,
    _option("Length", "--max-new-tokens", type=int, metavar="N", help="Stop after N tokens (256)."),
    _option("Length", "--min-new-tokens", type=int, metavar="N", help="Do not end before N tokens."),
    _option("Length", "--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be repeated."),
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
        help="In place of all these: one warp, such as top-p:p=0.9; repeated, they apply in the order given.",
    ),
    _option(
        "Sampling",
        "--source",
        metavar="SPEC",
        help="What the logits come from: none or a name with settings, such as guidance:scale=1.5 (none).",
    ),
    _option(
        "Speculation",
        "--drafter",
        metavar="SPEC",
        help="auto, none or a name with settings, such as prompt-lookup:length=5 (auto). "
        "Under the default rule it never changes the text.",
    ),
    _option("Speculation", "--rule", metavar="SPEC", help="How drafts are verified (coupled)."),
    _option(
        "Speculation",
        "--budget",
        metavar="SPEC",
        help="How much to draft, such as fixed:nodes=8; without one the drafter decides.",
    ),
    _option("Speculation", "--max-nodes", type=int, metavar="N", help="Draft at most N tokens per step (64)."),
)

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

constraint_options = _options(
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

search_option = _options(
    _option(
        "Search",
        "--search",
        metavar="SPEC",
        help="Follow several texts at once, such as beam:width=4 at temperature 0, or smc:particles=8 at a higher one; "
        "without a drafter.",
    ),
)


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The decoding options that were given, as keyword arguments of `LM.request`, before a model is fetched for them.

    Raises a DecoderyError for names that do not exist, values out of range and options that could have no effect.
    """
    from ..lm import build_sampler, resolve_drafter
    from ..registry import resolve

    chosen = {name: value for name, value in settings.items() if value is not None and value != ()}
    if constraints := [name for name in _CONSTRAINTS if name in chosen]:
        if len(constraints) > 1:
            names = " and ".join("--" + name.replace("_", "-") for name in constraints)
            raise SettingsError(f"a text has one constraint: {names} contradict each other")
        chosen["constraint"] = _constraint(constraints[0], chosen.pop(constraints[0]))
    idle = [name for name, neutral in _CHANCE.items() if chosen.get(name, neutral) != neutral]
    if idle and not chosen.get("temperature") and "sampler" not in chosen:
        names = " and ".join("--" + name.replace("_", "-") for name in idle)
        raise SettingsError(
            f"{names} would have no effect, because temperature 0 always takes the likeliest token: "
            "add --temperature 0.7, say"
        )
    if chosen.get("drafter", "auto") != "auto":
        chosen["drafter"] = resolve_drafter(chosen["drafter"])
    if chosen.get("source", "none") != "none":
        chosen["source"] = resolve("source", chosen["source"])
    if "rule" in chosen:
        rule = chosen["rule"]
        chosen["rule"] = resolve("verify", rule)
        if chosen["rule"].draws and not chosen.get("temperature") and "sampler" not in chosen:
            raise SettingsError(f"--rule {rule} would have no effect at temperature 0: add --temperature 0.8, say")
    if "budget" in chosen:
        chosen["budget"] = resolve("budget", chosen["budget"])
    warping = {name: value for name, value in chosen.items() if name not in _NOT_WARPING}
    if "dry_breakers" in warping:
        # Only a model's tokenizer knows which tokens hold these texts.
        warping["dry_breakers"] = ()
    temperature, least = warping.pop("temperature", None), warping.pop("min_new_tokens", 0)
    build_sampler(warping.pop("sampler", None), temperature, least, (), warping)
    return chosen


_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice", "constrain")


def _constraint(name: str, value: Any) -> Any:
    """What the user wants written, from one of the options under "Constraint"."""
    from ..constrain import Choice, Grammar, JSONSchema, Regex
    from ..registry import resolve

    if name == "constrain":
        return resolve("constrain", value)
    if isinstance(value, Path):
        if value.stat().st_size > _MOST_INPUT:
            raise SettingsError(f"{value} is larger than 16 MiB: give a smaller file")
        try:
            value = value.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read {value} as text: {error}") from error
    languages = {"json_schema": JSONSchema, "regex": Regex, "grammar": Grammar, "choice": Choice}
    return languages[name](value)


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or standard input where that is "-" or missing. One final newline is dropped."""
    if argument not in (None, "-"):
        return str(argument)
    if argument is None and sys.stdin.isatty():
        raise click.UsageError('a prompt is missing: give one, as in: decodery generate "Explain tides."')
    data = sys.stdin.buffer.read(_MOST_INPUT + 1)
    if len(data) > _MOST_INPUT:
        raise PromptError("standard input is longer than 16 MiB, more than any model reads: give a shorter prompt")
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from error
