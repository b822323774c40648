"""The model card beside what was trained, which says whose folder it is, how it was made and what it is worth."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decodery.core.errors import SettingsError
from decodery.models.loaders.store import write_text

CARD = "README.md"
EXPLAINED = {
    "acceptance": "the mean probability at temperature 1 that a drafted token is accepted, a lower bound",
    "accepted": "tokens that are right before the first wrong one",
    "agreement": "how often the most likely token is the right one",
    "auroc": "the chance that what is looked for scores above what is not",
    "cross_entropy": "in nats, against what is to be learned",
    "divergence": "from the whole model, in nats per token",
    "entropy": "of predictions, in nats per token",
    "known": "nats per token of the texts that were learned",
    "matchness": "the share of places at which the model finds the same token most likely",
    "passes": "of the decoder for a text",
    "right": "how often what is predicted is right",
    "sparsity": "the share of layers that tokens skip",
    "spearman": "the correlation of ranks with what is predicted",
    "ttr": "distinct tokens as a share of the last ones of greedy continuations",
}
"""What figures are, by the first word of their name."""


def check_folder(out: Path, made: str) -> None:
    """Raise SettingsError where a folder has a card and not the file `made` that stands beside ours."""
    if (out / CARD).exists() and not (out / made).exists():
        raise SettingsError(f"{out} has a {CARD} and no {made}: name a new folder")


def write_card(
    out: Path,
    kind: str,
    *,
    about: str,
    use: str,
    settings: Sequence[Any],
    command: str,
    figures: Mapping[str, Any],
    hours: float,
) -> None:
    """Write the model card of what was trained; one that something else has written stays as it is."""
    path, title = out / CARD, "# Made by decodery train"
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(title):
        return
    nested = dict(figures.get("baselines") or {})
    nested |= {name: each for name, each in figures.items() if isinstance(each, Mapping) and name != "baselines"}
    found = {name: each for name, each in figures.items() if not isinstance(each, Mapping) and name != "baselines"}
    where = str(found.pop("tested on", "what the command printed"))
    columns = {name: each if isinstance(each, Mapping) else {"value": each} for name, each in nested.items()}
    columns = {"trained": found, **columns}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    rows += [f"| {name} | {' | '.join(_shown(each.get(name)) for each in columns.values())} |" for name in names]
    known = dict.fromkeys(re.split(r"[.\W]", name)[0] for name in names)
    explained = [f"{name}: {EXPLAINED[name]}." for name in known if name in EXPLAINED]
    parts = [f"{title} {kind}", about, f'    decodery generate "..." {use}', "## How it was made", f"    {command}"]
    parts += [*(f"`{each}`" for each in settings), f"On {machine()}, in {hours:.3f} hours."]
    parts += ["## What it is worth", f"Of {where}:", "\n".join(rows), " ".join(explained)]
    write_text(path, "\n\n".join(parts).strip() + "\n")


def machine() -> str:
    """What something was made on."""
    import torch

    return f"{platform.machine()} with {os.cpu_count()} cores, PyTorch {torch.__version__}"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " to ".join(map(_shown, value)) if len(value) == 2 else ", ".join(map(_shown, value))
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
