"""The generated part of the documentation about writing while a source arrives, from what the benchmark recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, table_of


def listening() -> str:
    """How late and how wrong texts are, and what they cost."""
    found = load("listening")
    rows = {
        f"`{row['way']}`": {name: row[name] for name in row if name not in ("way", "chunk")} for row in found["rows"]
    }
    wrong, chunk = found["wrong with the whole source"], found["rows"][0]["chunk"]
    made = f"`{found['command']}`, {found['texts']} sources in chunks of {chunk} tokens. With all of the source there"
    return f"{made} at once {wrong:.0%} of the model's texts are wrong.\n\n{table_of(rows)}"


SECTIONS: dict[str, Callable[[], str]] = {"listening": listening}
