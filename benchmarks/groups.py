"""What benchmarks of several groups share: which groups are wanted, and a result file for each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from decodery_benchmarks.results import write_result

B = TypeVar("B")


def parser(doc: str | None, groups: Mapping[str, object]) -> argparse.ArgumentParser:
    """The names of groups, none for all of them, and `--out`; a benchmark adds options of its own."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("groups", nargs="*", choices=[[], *groups], metavar="GROUP", help=", ".join(groups))
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return made


def record(
    prefix: str,
    groups: Mapping[str, Callable[[B], dict[str, Any]]],
    options: argparse.Namespace,
    bench: B,
    settings: dict[str, Any],
) -> None:
    """Measure the groups asked for, and write PREFIX-GROUP.json for each: settings, what it is about, and figures."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.groups or groups:
        about = " ".join((groups[name].__doc__ or "").split())
        figures = groups[name](bench)
        write_result(options.out / f"{prefix}-{name}.json", {"settings": settings, "about": about}, figures=figures)
        print(name, json.dumps(figures)[:2000], flush=True)
