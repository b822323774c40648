"""The generated parts of the documentation about diffusion, from what the benchmark recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, table_of


def diffusion() -> str:
    """What ways of filling a canvas get right and cost."""
    found = load("diffusion")
    rows = {f"`{name}`": run for name, run in found["results"].items()}
    facts = found["facts"]
    made = f"Model: `{facts['model']}`. Figures: `{found['command']}`, {facts['prompts']} prompts held out."
    return f"{made}\n\n{table_of(rows)}"


SECTIONS: dict[str, Callable[[], str]] = {"diffusion": diffusion}
