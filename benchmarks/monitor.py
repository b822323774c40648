"""How many of the attributes a model writes exist, with the monitor and without.

    python benchmarks/monitor.py [--most 400] [--out benchmarks/results]

60 beginnings of functions over the package tests/support/parcels, without the chat template, continued by the embedded
model. An attribute counts where its object is known: a parameter, or an attribute of one; whether it exists is asked of
a real object. Nothing is timed, so that the machine's load does not matter. Every text is written into monitor.json
when it is done; the next call goes on from there. --most: how many texts this call may add.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import decodery as dc
from decodery.constraints import Monitor
from decodery.models.loaders.store import terminal_progress
from decodery_benchmarks.results import begun_result, write_result

PROJECT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(PROJECT))

from parcels.models import Address, Depot, Parcel  # noqa: E402
from parcels.pricing import Ledger, Quote, Tariff  # noqa: E402
from parcels.tracking import Beacon, Courier, Stage  # noqa: E402

ADDRESS = Address("Ann", "Elm Road", 7, "ab12")
PARCEL = Parcel("A1", 1200, ADDRESS)
OBJECTS: dict[str, Any] = {
    **{"address": ADDRESS, "parcel": PARCEL, "depot": Depot("Ulm", 4), "courier": Courier(3, "UL-X 1")},
    **{"beacon": Beacon(48.4, 10.0), "stage": Stage.BOOKED, "tariff": Tariff(300, 120), "ledger": Ledger()},
    **{"quote": Quote(420, PARCEL), "gift": PARCEL},
}
BEGINNINGS = (
    'def describe({name}: {kind}) -> str:\n    """Describe the {name} in one line."""\n    return "%s" % {name}.',
    'def log({name}: {kind}) -> None:\n    """Print what matters about the {name}."""\n    print({name}.',
    'def check({name}: {kind}) -> bool:\n    """Whether something is wrong with the {name}."""\n    if {name}.',
    'def key({name}: {kind}):\n    """A key to sort by."""\n    return ({name}.',
    'def update({name}: {kind}) -> None:\n    """Bring the {name} up to date."""\n    {name}.',
    'def test_it({name}: {kind}) -> None:\n    """What must hold for every {name}."""\n    assert {name}.',
)
SETTINGS: dict[str, dict[str, Any]] = {
    f"{name}, temperature {temperature:g}": {"constraint": monitor, "temperature": temperature}
    for temperature in (0.0, 0.8)
    for name, monitor in {
        "without": None,
        "monitor": Monitor(str(PROJECT), seconds=300.0),
        "monitor:policy=soft": Monitor(str(PROJECT), seconds=300.0, policy="soft"),
    }.items()
}


def prompts() -> list[tuple[str, str]]:
    """The name of the object and the text, 60 of them."""
    found = []
    for name, value in OBJECTS.items():
        kind, module = type(value).__name__, type(value).__module__
        head = f"from {module} import {kind}\n\n\n"
        found += [(name, head + beginning.format(name=name, kind=kind)) for beginning in BEGINNINGS]
    return found


def attributes(name: str, prompt: str, output: dc.Output) -> Counter[str]:
    """How many attributes of the generated text exist, are missing, or belong to an object that is not known."""
    counts: Counter[str] = Counter()
    whole = prompt + output.text
    tree, end = _parsed(whole)
    starts = [0]
    for line in whole[:end].splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        last = starts[node.end_lineno - 1] + node.end_col_offset
        # A name the limit of tokens cuts is none yet.
        if last <= len(prompt) or (last == len(whole) and output.finish_reason == "length"):
            continue
        base = _value(node.value, name)
        counts["unknown" if base is None else "exists" if hasattr(base, node.attr) else "missing"] += 1
    return counts


def _parsed(text: str) -> tuple[ast.AST, int]:
    """The longest beginning that is Python."""
    for end in range(len(text), 0, -1):
        try:
            return ast.parse(text[:end]), end
        except (SyntaxError, ValueError):
            continue
    return ast.Module([], []), 0


def _value(node: ast.expr, name: str) -> Any:
    if isinstance(node, ast.Name):
        return OBJECTS[name] if node.id == name else None
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, name), node.attr, None)
    return None


def figures(texts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        done = [text for key, text in texts.items() if key.startswith(setting + ": ")]
        total: Counter[str] = sum((Counter(text["attributes"]) for text in done), Counter())
        known = total["exists"] + total["missing"]
        share = round(total["exists"] / known, 3) if known else None
        found[setting] = {"texts": len(done), **total, "share": share}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=400, help="texts to add in this call")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.out / "monitor.json"
    texts = begun_result(path).get("texts", {})
    jobs = {
        f"{setting}: {number}": (setting, name, prompt)
        for number, (name, prompt) in enumerate(prompts())
        for setting in SETTINGS
    }
    missing = [key for key in jobs if key not in texts][: options.most]
    lm = dc.load("smollm2")
    with terminal_progress(counts=True) as progress:
        for count, key in enumerate(missing):
            setting, name, prompt = jobs[key]
            output = lm.generate(
                prompt,
                apply_chat_template=False,
                drafter=None,
                max_new_tokens=options.tokens,
                stop="\n\n",
                **SETTINGS[setting],
            )
            counts = attributes(name, prompt, output)
            texts[key] = {"text": output.text, "attributes": dict(counts)}
            result = {
                "command": "python benchmarks/monitor.py",
                "settings": {"model": lm.name, "new_tokens": options.tokens, "prompts": len(prompts())},
                "texts": texts,
            }
            options.out.mkdir(parents=True, exist_ok=True)
            write_result(path, result, summary=["texts"], figures=figures(texts))
            progress("texts", count + 1, len(missing))
    print(json.dumps(figures(texts), indent=1))


if __name__ == "__main__":
    main()
