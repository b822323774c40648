"""`decodery bench --try`: options of `decodery generate` as a method under test."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from .command import command
from .given import given
from .text_options import constraint_options, decoding_options, search_option

if TYPE_CHECKING:
    from decodery.bench.subject import Requests
    from decodery.search.base import Search

_NAME = "decodery bench --try"
_BENCH_SETS = ("max_new_tokens", "seed", "import_names", "imports")


@command("request", example="")
@decoding_options
@constraint_options
@search_option
def _request(**settings: Any) -> None:
    """The options of one request."""


def requests_of(texts: Sequence[str]) -> Requests:
    """Options of `decodery generate`, as settings of requests.

    Raises:
        UsageError: For options that do not exist, or that the benchmark sets for all methods.
        DecoderyError: For methods that do not exist and values out of range.
    """
    from decodery.core.registry import resolve

    found: dict[str, tuple[Mapping[str, Any], Search | None]] = {}
    for text in texts:
        try:
            # Its help is that of the command whose options these are.
            context = _request.make_context(_NAME, shlex.split(text), help_option_names=[])
        except ValueError as error:
            raise click.UsageError(f"--try {text!r} cannot be split into options ({error}): mind the quotes") from None
        except click.UsageError as error:
            said = error.format_message().replace(f"{_NAME} --help", "decodery generate --help")
            raise click.UsageError(f"--try {text!r}: {said}") from None
        params = {name: value for name, value in context.params.items() if value not in (None, ())}
        if common := [name for name in _BENCH_SETS if name in params]:
            option = common[0].replace("_", "-")
            raise click.UsageError(f"--{option} is the same for all methods: give it to bench, not in --try")
        search = params.pop("search", None)
        found[text] = given(params), None if search is None else resolve("search", search)
    return found
