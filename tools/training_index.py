"""Writes `src/decodery/cli/training.json`, the static index of what `decodery train` trains, from what kinds declare.

`python tools/training_index.py` writes it, `--check` only says whether it is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from decodery.cli.train import INDEX, described_kind, kv, train

FILE = Path(__file__).parents[1] / "src" / "decodery" / "cli" / INDEX


def index() -> str:
    """The index, as JSON: by command, what its kind declares."""
    found = {
        f"{group.path} {name}": described_kind(group.kind(name))
        for group in (train, kv)
        for name in group.entries
        if name != kv.name
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    text, check = index(), "--check" in sys.argv
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{FILE} is out of date: run python tools/training_index.py")
    else:
        FILE.write_text(text, encoding="utf-8")
        print(f"wrote {FILE}")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
