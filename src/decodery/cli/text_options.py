"""The options about how one text is decoded, shown under headings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from .options import FileOrText, import_option, option_under, together

_length, _sampling = partial(option_under, "Length"), partial(option_under, "Sampling")
_speculation, _constraint = partial(option_under, "Speculation"), partial(option_under, "Constraint")


def _bias(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float] | None:
    pairs: dict[int, float] = {}
    for value in values:
        token, equals, amount = value.partition("=")
        try:
            pairs[int(token)] = float(amount if equals else "")
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=VALUE, such as 42=-100", ctx, param) from None
    return pairs or None


decoding_options = together(
    import_option,
    _length("--max-new-tokens", type=int, metavar="N", show_default="256", help="Stop after N tokens."),
    _length("--min-new-tokens", type=int, metavar="N", help="Do not stop before N tokens."),
    _length("--stop", multiple=True, metavar="TEXT", help="Stop before TEXT. Repeatable."),
    _length(
        *("--stop-token-id", "stop_token_ids"),
        multiple=True,
        type=int,
        metavar="ID",
        help="Stop before the token ID. Repeatable.",
    ),
    _length("--ignore-eos", is_flag=True, default=None, help="Continue after the model's end token."),
    _sampling(
        "--temperature",
        type=float,
        metavar="T",
        show_default="0",
        help="Sampling temperature. 0: greedy decoding.",
    ),
    _sampling(
        "--seed",
        type=int,
        metavar="N",
        show_default="0",
        help="Random seed. The same seed gives the same text.",
    ),
    _sampling("--top-k", type=int, metavar="K", help="Keep the K most likely tokens."),
    _sampling("--top-p", type=float, metavar="P", help="Keep the most likely tokens whose probabilities sum to P."),
    _sampling("--min-p", type=float, metavar="M", help="Keep tokens of at least M times the top probability."),
    _sampling(
        "--typical",
        type=float,
        metavar="P",
        help="Keep the most typical tokens whose probabilities sum to P.",
    ),
    _sampling("--epsilon", type=float, metavar="E", help="Keep tokens of at least probability E."),
    _sampling("--eta", type=float, metavar="E", help="Like --epsilon, with a bound that depends on the entropy."),
    _sampling("--top-h", type=float, metavar="A", help="Keep tokens up to the share A of the entropy."),
    _sampling(
        "--xtc",
        type=float,
        metavar="P",
        help="With probability P, remove all likely tokens but the least likely one.",
    ),
    _sampling(
        "--xtc-threshold",
        type=float,
        metavar="P",
        show_default="0.1",
        help="Probability from which --xtc calls a token likely.",
    ),
    _sampling("--mirostat", type=int, metavar="VERSION", help="Mirostat version 1 or 2."),
    _sampling(
        "--mirostat-tau",
        type=float,
        metavar="T",
        show_default="5",
        help="Target of --mirostat, in bits per token.",
    ),
    _sampling("--mirostat-eta", type=float, metavar="E", show_default="0.1", help="Learning rate of --mirostat."),
    _sampling(
        "--repetition-penalty",
        type=float,
        metavar="R",
        show_default="1",
        help="Divide the logits of seen tokens by R.",
    ),
    _sampling("--presence-penalty", type=float, metavar="A", help="Subtract A from the logits of used tokens."),
    _sampling("--frequency-penalty", type=float, metavar="A", help="Subtract A from a token's logit for each use."),
    _sampling(
        "--dry",
        type=float,
        metavar="M",
        help="DRY: penalise tokens that continue a repetition, by M or more.",
    ),
    _sampling(
        "--dry-base",
        type=float,
        metavar="B",
        show_default="1.75",
        help="DRY: factor of the penalty per repeated token.",
    ),
    _sampling(
        "--dry-allowed",
        type=int,
        metavar="N",
        show_default="2",
        help="DRY: repeated tokens without a penalty.",
    ),
    _sampling(
        "--dry-window",
        type=int,
        metavar="N",
        show_default="all",
        help="DRY: number of last tokens to search.",
    ),
    _sampling(
        "--dry-breakers",
        multiple=True,
        metavar="TEXT",
        show_default='newline : " *',
        help="DRY: texts that end a repetition. Repeatable.",
    ),
    _sampling("--no-repeat-ngram", type=int, metavar="N", help="Write no sequence of N tokens twice."),
    _sampling(
        "--logit-bias",
        multiple=True,
        callback=_bias,
        metavar="ID=VALUE",
        help="Add VALUE to the logit of token ID. Repeatable.",
    ),
    _sampling(
        "--order",
        metavar="NAME",
        show_default="default",
        help="Order of the options above: default, hf, vllm or llamacpp.",
    ),
    _sampling(
        "--sampler",
        multiple=True,
        metavar="SPEC",
        help="A logits processor in place of the options above, such as top-p:p=0.9. Repeatable; applied in the "
        "order given.",
    ),
    _sampling(
        "--logits-source",
        metavar="SPEC",
        show_default="none",
        help="What the logits come from: none or a name with settings, such as guidance:scale=1.5.",
    ),
    _sampling(
        "--cache-policy",
        metavar="SPEC",
        show_default="none",
        help="What of the text's keys and values is kept and read: none or a name with settings, such as "
        "snapkv:budget=0.25.",
    ),
    _sampling(
        "--monitor",
        multiple=True,
        metavar="SPEC",
        help="A monitor of the text, such as los:head=DIR,action=stop. Repeatable.",
    ),
    _speculation(
        "--drafter",
        metavar="SPEC",
        show_default="auto",
        help="A drafter: auto, none or a name with settings, such as prompt-lookup:length=5. The default acceptance "
        "rule keeps the text the same with any drafter.",
    ),
    _speculation(
        "--predicted-output",
        metavar="FILE_OR_TEXT",
        help="A text, or a file with a text, that the output is expected to repeat for the most part. It is drafted.",
    ),
    _speculation("--acceptance-rule", metavar="SPEC", show_default="coupled", help="How drafts are verified."),
    _speculation(
        "--draft-length",
        metavar="SPEC",
        show_default="the drafter decides",
        help="How much to draft, such as fixed:nodes=8.",
    ),
    _speculation(
        "--max-draft-tokens", type=int, metavar="N", show_default="80", help="Draft at most N tokens per step."
    ),
)

_SCHEMA = FileOrText("{", 'give a file, or the schema itself, such as \'{"type": "object"}\'')
_GRAMMAR = FileOrText(
    r"[?!]*[a-z_]\w+(\.\d+)?\s*:|%|//", "give a file, or the grammar itself, such as 'start: /[a-z]+/'"
)

constraint_options = together(
    _constraint(
        "--json-schema",
        type=_SCHEMA,
        metavar="FILE_OR_JSON",
        help="JSON schema that the output must follow: a file, or the schema itself.",
    ),
    _constraint("--regex", metavar="PATTERN", help="Regular expression that the whole output must match."),
    _constraint(
        "--grammar",
        type=_GRAMMAR,
        metavar="FILE_OR_TEXT",
        help="Lark grammar that the output must follow: a file, or the grammar itself.",
    ),
    _constraint(
        "--choice",
        multiple=True,
        metavar="TEXT",
        help="One of the texts that the output may be. Repeatable.",
    ),
    _constraint(
        "--constrain",
        metavar="SPEC",
        help="A constraint by name, such as monitor:project=src (Python code with existing attributes only).",
    ),
)

diffuse_option = together(
    option_under(
        "Diffusion",
        "--diffuse",
        metavar="SPEC",
        help="Decoder of a masked diffusion model, such as threshold:tau=0.9 or static:block=32,cache=dual. The "
        "canvas has --max-new-tokens positions.",
    ),
)

search_option = together(
    option_under(
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
