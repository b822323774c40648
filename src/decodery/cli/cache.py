"""`decodery cache`: what is kept of models and measurements, and how it is bounded."""

from __future__ import annotations

import difflib
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .command import Entry, Group, command, option

if TYPE_CHECKING:
    from decodery.models.loaders.cache_folder import Kept

_UNITS = ("bytes", "KiB", "MiB", "GiB")


SECTIONS = {"Commands": {"clean": Entry("Remove stored models and measurements.", "cache")}}


@click.group(cls=Group, sections=SECTIONS, invoke_without_command=True, example="cache clean --older-than 30")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def cache(ctx: click.Context, as_json: bool) -> None:
    """List the stored models and measurements, with size, last use and source.

    Models of the Hugging Face Hub are in the folder of huggingface_hub: `hf cache` manages them.
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError("--json is for the list: leave out --json, or the command after it")
        return
    from decodery.models.loaders import cache_folder as kept
    from decodery.models.loaders import store

    found = kept.everything()
    if as_json:
        _print_json(found)
        return
    _print_table(found)
    click.echo(f"{_count(found)} in {store.home()}")


@command(example="cache clean --most 0.4")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Remove what was not used for DAYS days, too.")
@option(
    "--most",
    type=click.FloatRange(0),
    metavar="GIB",
    help="Remove what was used longest ago, until at most GIB GiB are left.",
)
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean(names: tuple[str, ...], older_than: float | None, most: float | None, yes: bool) -> None:
    """Remove stored models whose source no longer exists, and more with options.

    With a NAME, NAME:KIND or source, as `decodery cache` lists them, only these are removed. What is removed is made or
    downloaded again when it is needed. Files in use by another process stay.
    """
    from decodery.models.loaders import cache_folder as kept

    found = kept.everything()
    _check(names, found)
    before = None if older_than is None else time.time() - older_than * 86400
    bytes_left = None if most is None or math.isinf(most) else int(most * 2**30)
    goes = kept.superfluous(found, names=names, before=before, most=bytes_left)
    if goes and not yes and sys.stdin.isatty() and not _agreed(goes):
        click.echo("nothing was removed")
        return
    removed = []
    for each in goes:
        if kept.remove(each):
            removed.append(each)
            click.echo(f"removed {each.title}, {_size(each.size)}")
        else:
            click.echo(f"decodery: another process uses {each.title}: it stays", err=True)
    kept.remove_empty()
    click.echo(f"{_count(removed)} removed, {_count(kept.everything())} left")


def _check(names: Sequence[str], found: Sequence[Kept]) -> None:
    """Raise SettingsError for a name that nothing has."""
    known = {name for kept in found for name in (kept.name, kept.title, kept.source) if name is not None}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            advice = f"try {', '.join(near)}" if near else "`decodery cache` lists all entries"
            raise SettingsError(f"nothing in the cache is called {name!r}: {advice}")


def _agreed(goes: Sequence[Kept]) -> bool:
    _print_table(goes)
    return click.confirm(f"Remove {_count(goes)}?", err=True)


def _print_json(found: Sequence[Kept]) -> None:
    from decodery.models.loaders.store import home

    entries = [_facts(kept) for kept in found]
    whole = {"folder": str(home()), "bytes": sum(kept.size for kept in found), "entries": entries}
    click.echo(json.dumps(whole, indent=2, ensure_ascii=False))


def _facts(kept: Kept) -> dict[str, Any]:
    return {
        "name": kept.name,
        "kind": kept.kind,
        "bytes": kept.size,
        "last_used": datetime.fromtimestamp(kept.used, UTC).isoformat(timespec="seconds"),
        "source": kept.source,
        "source_exists": kept.there,
        "in_use": kept.held,
        "path": str(kept.path),
    }


def _print_table(found: Sequence[Kept]) -> None:
    rows = [("name", "kind", "size", "last used", "source"), *map(_row, found)]
    name, kind, size, used, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows if found else []:
        click.echo(f"{row[0]:<{name}}  {row[1]:<{kind}}  {row[2]:>{size}}  {row[3]:<{used}}  {row[4]}")


def _row(kept: Kept) -> tuple[str, str, str, str, str]:
    used = "now" if kept.held else datetime.fromtimestamp(kept.used).strftime("%Y-%m-%d %H:%M")
    source = (kept.source or "unknown") + (" (gone)" if kept.there is False else "")
    return kept.name, kept.kind, _size(kept.size), used, source


def _count(found: Sequence[Kept]) -> str:
    entries = "1 entry" if len(found) == 1 else f"{len(found)} entries"
    return f"{entries} ({_size(sum(kept.size for kept in found))})"


def _size(amount: float) -> str:
    unit = 0
    while amount >= 1024 and unit + 1 < len(_UNITS):
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{amount} bytes"
