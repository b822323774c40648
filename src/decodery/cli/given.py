"""What was given to a command: decoding options as settings, and the prompt."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from decodery.core.errors import DecoderyError, PromptError, SettingsError

_MOST_INPUT = 1 << 24
_NOT_WARPING = {
    "max_new_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "drafter",
    "predicted_output",
    "acceptance_rule",
    "draft_length",
    "max_draft_tokens",
    "logits_source",
    "cache_policy",
    "monitor",
    "constraint",
}
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice", "constrain")


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The decoding options that were given, as keyword arguments of `LLM.request`, before a model is fetched for them.

    Raises a DecoderyError for names that do not exist and values out of range.
    """
    from decodery.core.registry import resolve
    from decodery.engine.request import Request
    from decodery.llm.resolve_settings import (
        build_sampler,
        check_lengths,
        resolve_drafter,
        resolve_monitors,
        with_predicted_output,
    )
    from decodery.step.draft_length_policy import LARGEST

    chosen = {name: value for name, value in settings.items() if value is not None and value != ()}
    if constraints := [name for name in _CONSTRAINTS if name in chosen]:
        if len(constraints) > 1:
            names = " and ".join("--" + name.replace("_", "-") for name in constraints)
            raise SettingsError(f"a text has one constraint: {names} contradict each other")
        chosen["constraint"] = _constraint(constraints[0], chosen.pop(constraints[0]))
    if chosen.get("drafter", "auto") != "auto":
        chosen["drafter"] = resolve_drafter(chosen["drafter"])
    if "predicted_output" in chosen:
        chosen["predicted_output"] = _text_or_file(chosen["predicted_output"])
        with_predicted_output(chosen.get("drafter", "auto"), tuple)
    if chosen.get("logits_source", "none") != "none":
        chosen["logits_source"] = resolve("logits-source", chosen["logits_source"])
    if chosen.get("cache_policy", "none") != "none":
        chosen["cache_policy"] = resolve("cache-policy", chosen["cache_policy"])
    if "monitor" in chosen:
        chosen["monitor"] = resolve_monitors(chosen["monitor"])
    if "acceptance_rule" in chosen:
        chosen["acceptance_rule"] = resolve("acceptance-rule", chosen["acceptance_rule"])
    if "draft_length" in chosen:
        chosen["draft_length"] = resolve("draft-length", chosen["draft_length"])
    warping = {name: value for name, value in chosen.items() if name not in _NOT_WARPING}
    if "dry_breakers" in warping:
        # Only a model's tokenizer knows which tokens hold these texts.
        warping["dry_breakers"] = ()
    temperature, least = warping.pop("temperature", None), warping.pop("min_new_tokens", 0)
    check_lengths(least, chosen.get("max_new_tokens", 256))
    sampler = build_sampler(warping.pop("sampler", None), temperature, least, (), warping)
    # A request for nothing says what does not go together; what only a model knows is left out of it.
    parts = {
        name: chosen[name]
        for name in ("drafter", "acceptance_rule", "draft_length", "logits_source", "cache_policy")
        if name in chosen
    }
    parts = {name: part for name, part in parts.items() if not isinstance(part, str)}
    bounds = {name: chosen[name] for name in ("max_new_tokens", "seed", "stop") if name in chosen}
    Request([0], sampler=sampler, max_draft_tokens=LARGEST, monitors=chosen.get("monitor", ()), **parts, **bounds)
    return chosen


def _constraint(name: str, value: Any) -> Any:
    """What the user wants written, from one of the options under "Constraint"."""
    from decodery.constraints import Choice, Grammar, JSONSchema, Regex
    from decodery.core.registry import resolve

    if name == "constrain":
        return resolve("constraint", value)
    languages = {"json_schema": JSONSchema, "regex": Regex, "grammar": Grammar, "choice": Choice}
    if not isinstance(value, Path):
        return languages[name](value)
    text = _read(value)
    if not text.strip():
        raise SettingsError(f"{value} is empty: give another file to --{name.replace('_', '-')}")
    try:
        return languages[name](text)
    except DecoderyError as error:
        raise SettingsError(f"{value}: {error}") from error


def _text_or_file(value: str) -> str:
    """The text of a file where one has this name, else the value itself. What looks like a name has to be one."""
    try:
        if (path := Path(value)).is_file():
            return _read(path)
    except (OSError, ValueError):
        # A text that is too long to be a name, or holds characters that no name has.
        return value
    if re.fullmatch(r"[\w./~-]+\.(txt|md|json|jsonl|py|c|cpp|h|js|ts|html|csv|yaml|yml|toml|rs|go|java)", value):
        raise SettingsError(f"there is no file {value!r}: correct the path, or give a text of several words")
    return value


def _read(path: Path) -> str:
    if path.stat().st_size > _MOST_INPUT:
        raise SettingsError(f"{path} is larger than 16 MiB: give a smaller file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path} as text: {error}") from error


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or standard input where that is "-" or missing. One final newline is dropped."""
    text = str(argument) if argument not in (None, "-") else _standard_input(argument)
    if not text:
        raise PromptError("the prompt is empty: give the model something to read")
    return text


def _standard_input(argument: str | None) -> str:
    """The text on standard input. argument: what was given as the prompt."""
    if argument is None and sys.stdin.isatty():
        raise click.UsageError('a prompt is missing: give one, as in: decodery generate "Explain tides."')
    data = sys.stdin.buffer.read(_MOST_INPUT + 1)
    if len(data) > _MOST_INPUT:
        raise PromptError("standard input is longer than 16 MiB, more than any model reads: give a shorter prompt")
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from error
