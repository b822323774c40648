"""The model card beside what was trained, which says whose folder it is, how it was made and what it is worth."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decodery.core.errors import SettingsError
from decodery.models.loaders.store import write_text

CARD = "README.md"
PER_TOKEN = (
    "cross_entropy: in nats, against what is to be learned. acceptance: the mean of sum min(p, q) at temperature 1 "
    "over "
    "the most likely tokens, a lower bound. agreement: how often the most likely token is the right one."
)
"""What `training_batch.judged` measures."""
LOSSLESS = "Drafts never change what the model writes; better ones only make it faster."


def check_of(made: str, what: str) -> Callable[[Path], None]:
    """A check of folders: it raises SettingsError where training would overwrite something else.

    Args:
        made: The file that stands beside the card of what is trained.
        what: What a card without that file says of the folder, such as "is no draft".
    """

    def check(out: Path) -> None:
        if (out / CARD).exists() and not (out / made).exists():
            raise SettingsError(f"{out} has a {CARD} and {what}: name a new folder")

    return check


@dataclass(frozen=True)
class Card:
    """The model card of what was trained.

    Attributes:
        title: The heading.
        use: What follows `decodery generate "..."`.
        about: What it is, and what it changes.
        how: How it was made.
        command: The command that made it, "" where it is not known.
        where: What the figures are of.
        columns: Figures by name, by the heading of their column.
        explained: What the names of figures mean.
    """

    title: str
    use: str
    about: str = ""
    how: str = ""
    command: str = ""
    where: str = ""
    columns: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    explained: str = ""

    def text(self) -> str:
        """The card in Markdown."""
        made = [f"    {self.command}" if self.command else "", self.how, f"On {machine()}."]
        parts = [f"# {self.title}", self.about, f'    decodery generate "..." {self.use}', "## How it was made", *made]
        if self.columns:
            names = dict.fromkeys(name for column in self.columns.values() for name in column)
            rows = [f"| | {' | '.join(self.columns)} |", f"|---|{'---:|' * len(self.columns)}"]
            rows += [
                f"| {name} | {' | '.join(_shown(each.get(name)) for each in self.columns.values())} |" for name in names
            ]
            parts += ["## What it is worth", f"{self.where}:", "\n".join(rows), self.explained]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, out: Path) -> None:
        """Write the card last: without what was made beside it, the folder would be taken for another one."""
        write_card(out, self.text())


def carded(out: Path, title: str, use: str, command: str, figures: Mapping[str, Any]) -> None:
    """Write the card of a kind that writes none of its own; a card of another title stays as it is.

    Args:
        out: The folder.
        title: The heading.
        use: What follows `decodery generate "..."`.
        command: The command that made it.
        figures: What it printed; a mapping of numbers becomes a column.
    """
    path = out / CARD
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(f"# {title}\n"):
        return
    nested = dict(figures.get("baselines") or {})
    nested |= {name: each for name, each in figures.items() if isinstance(each, Mapping) and name != "baselines"}
    plain = {name: each for name, each in figures.items() if not isinstance(each, Mapping)}
    compared = {name: each if isinstance(each, Mapping) else {"value": each} for name, each in nested.items()}
    where = str(plain.pop("tested on", "What the command printed"))
    Card(title, use, command=command, where=where, columns={"found": plain, **compared}).write(out)


def add_hours(out: Path, hours: float) -> None:
    """Say on the card in a folder how long it took to make."""
    path = out / CARD
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        write_text(path, text.replace(f"On {machine()}.", f"On {machine()}, in {hours:.3f} hours."))


def write_card(out: Path, text: str) -> None:
    """Write a card into a folder."""
    write_text(out / CARD, text)


def machine() -> str:
    """What something was made on."""
    import torch

    return f"{platform.machine()} with {os.cpu_count()} cores, PyTorch {torch.__version__}"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " to ".join(map(_shown, value)) if len(value) == 2 else ", ".join(map(_shown, value))
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
