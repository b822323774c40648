"""The options that several commands share, shown under headings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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


OUT_FILE, OUT_FOLDER = OutPath(dir_okay=False), OutPath(file_okay=False)


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, listed in the order given."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def _option(heading: str, *names: str, **settings: Any) -> Decorator:
    return option(*names, heading=heading, **settings)


def output_option(*names: str, **settings: Any) -> Decorator:
    """An option about what is printed."""
    return _option("Output", *names, **settings)


def server_option(*names: str, **settings: Any) -> Decorator:
    """An option about how a model is served."""
    return _option("Server", *names, **settings)


def chat_template_option(what: str, **settings: Any) -> Decorator:
    """The option --no-chat-template, handed on as `apply_chat_template`. what: its help."""
    settings = {"is_flag": True, "callback": lambda ctx, param, left_out: not left_out, "help": what, **settings}
    return option("--no-chat-template", "apply_chat_template", **settings)


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
    what = "Import MODULE, a name or a .py file, whose methods you want to use. Repeatable."
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
        help="A model: an embedded one, a folder, a .gguf file, a Hub id or the URL of a server.",
    ),
    _option(
        "Model",
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
        default="auto",
        show_default=True,
        help="Precision of the weights. auto: that of the checkpoint.",
    ),
)

kv_dtype_option = _option(
    "Model",
    "--kv-dtype",
    type=click.Choice(["auto", "float16", "int8"]),
    default="auto",
    show_default=True,
    help="Precision of the KV cache. float16 takes half the memory of float32, int8 a quarter.",
)

decoding_options = together(
    import_option,
    _option("Length", "--max-new-tokens", type=int, metavar="N", show_default="256", help="Stop after N tokens."),
    _option("Length", "--min-new-tokens", type=int, metavar="N", help="Do not stop before N tokens."),
    _option("Length", "--stop", multiple=True, metavar="TEXT", help="Stop before TEXT. Repeatable."),
    _option(
        "Length",
        *("--stop-token-id", "stop_token_ids"),
        multiple=True,
        type=int,
        metavar="ID",
        help="Stop before the token ID. Repeatable.",
    ),
    _option("Length", "--ignore-eos", is_flag=True, default=None, help="Continue after the model's end token."),
    _option(
        "Sampling",
        "--temperature",
        type=float,
        metavar="T",
        show_default="0",
        help="Sampling temperature. 0: greedy decoding.",
    ),
    _option(
        "Sampling",
        "--seed",
        type=int,
        metavar="N",
        show_default="0",
        help="Random seed. The same seed gives the same text.",
    ),
    _option("Sampling", "--top-k", type=int, metavar="K", help="Keep the K most likely tokens."),
    _option(
        "Sampling", "--top-p", type=float, metavar="P", help="Keep the most likely tokens whose probabilities sum to P."
    ),
    _option(
        "Sampling", "--min-p", type=float, metavar="M", help="Keep tokens of at least M times the top probability."
    ),
    _option(
        "Sampling",
        "--typical",
        type=float,
        metavar="P",
        help="Keep the most typical tokens whose probabilities sum to P.",
    ),
    _option("Sampling", "--epsilon", type=float, metavar="E", help="Keep tokens of at least probability E."),
    _option(
        "Sampling", "--eta", type=float, metavar="E", help="Like --epsilon, with a bound that depends on the entropy."
    ),
    _option("Sampling", "--top-h", type=float, metavar="A", help="Keep tokens up to the share A of the entropy."),
    _option(
        "Sampling",
        "--xtc",
        type=float,
        metavar="P",
        help="With probability P, remove all likely tokens but the least likely one.",
    ),
    _option(
        "Sampling",
        "--xtc-threshold",
        type=float,
        metavar="P",
        show_default="0.1",
        help="Probability from which --xtc calls a token likely.",
    ),
    _option("Sampling", "--mirostat", type=int, metavar="VERSION", help="Mirostat version 1 or 2."),
    _option(
        "Sampling",
        "--mirostat-tau",
        type=float,
        metavar="T",
        show_default="5",
        help="Target of --mirostat, in bits per token.",
    ),
    _option(
        "Sampling", "--mirostat-eta", type=float, metavar="E", show_default="0.1", help="Learning rate of --mirostat."
    ),
    _option(
        "Sampling",
        "--repetition-penalty",
        type=float,
        metavar="R",
        show_default="1",
        help="Divide the logits of seen tokens by R.",
    ),
    _option(
        "Sampling", "--presence-penalty", type=float, metavar="A", help="Subtract A from the logits of used tokens."
    ),
    _option(
        "Sampling", "--frequency-penalty", type=float, metavar="A", help="Subtract A from a token's logit for each use."
    ),
    _option(
        "Sampling",
        "--dry",
        type=float,
        metavar="M",
        help="DRY: penalise tokens that continue a repetition, by M or more.",
    ),
    _option(
        "Sampling",
        "--dry-base",
        type=float,
        metavar="B",
        show_default="1.75",
        help="DRY: factor of the penalty per repeated token.",
    ),
    _option(
        "Sampling",
        "--dry-allowed",
        type=int,
        metavar="N",
        show_default="2",
        help="DRY: repeated tokens without a penalty.",
    ),
    _option(
        "Sampling",
        "--dry-window",
        type=int,
        metavar="N",
        show_default="all",
        help="DRY: number of last tokens to search.",
    ),
    _option(
        "Sampling",
        "--dry-breakers",
        multiple=True,
        metavar="TEXT",
        show_default='newline : " *',
        help="DRY: texts that end a repetition. Repeatable.",
    ),
    _option("Sampling", "--no-repeat-ngram", type=int, metavar="N", help="Write no sequence of N tokens twice."),
    _option(
        "Sampling",
        "--logit-bias",
        multiple=True,
        callback=_bias,
        metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID. Repeatable.",
    ),
    _option(
        "Sampling",
        "--order",
        metavar="NAME",
        show_default="default",
        help="Order of the options above: default, hf, vllm or llamacpp.",
    ),
    _option(
        "Sampling",
        "--sampler",
        multiple=True,
        metavar="SPEC",
        help="A logits processor in place of the options above, such as top-p:p=0.9. Repeatable; applied in the "
        "order given.",
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
        help="A monitor of the text, such as los:head=DIR,action=stop. Repeatable.",
    ),
    _option(
        "Speculation",
        "--drafter",
        metavar="SPEC",
        show_default="auto",
        help="A drafter: auto, none or a name with settings, such as prompt-lookup:length=5. The default acceptance "
        "rule keeps the text the same with any drafter.",
    ),
    _option(
        "Speculation",
        "--predicted-output",
        metavar="FILE_OR_TEXT",
        help="A text, or a file with a text, that the output is expected to repeat for the most part. It is drafted.",
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
    _option("Constraint", "--json-schema", type=_FILE, metavar="FILE", help="JSON schema that the output must follow."),
    _option("Constraint", "--regex", metavar="PATTERN", help="Regular expression that the whole output must match."),
    _option("Constraint", "--grammar", type=_FILE, metavar="FILE", help="Lark grammar that the output must follow."),
    _option(
        "Constraint",
        "--choice",
        multiple=True,
        metavar="TEXT",
        help="One of the texts that the output may be. Repeatable.",
    ),
    _option(
        "Constraint",
        "--constrain",
        metavar="SPEC",
        help="A constraint by name, such as monitor:project=src (Python code with existing attributes only).",
    ),
)

diffuse_option = together(
    _option(
        "Diffusion",
        "--diffuse",
        metavar="SPEC",
        help="Decoder of a masked diffusion model, such as threshold:tau=0.9 or static:block=32,cache=dual. The "
        "canvas has --max-new-tokens positions.",
    ),
)

search_option = together(
    _option(
        "Search",
        "--search",
        metavar="SPEC",
        help="A search over several texts, such as beam:width=4, smc:particles=8 (needs a temperature above 0) or "
        "iad:scorer=llm-judge. No drafter is used.",
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
