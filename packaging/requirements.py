"""Print what this package needs, or what extras of it do, a line each: to install that without building the package.

python packaging/requirements.py test lint
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needed(extra: str) -> Iterator[str]:
    """The requirements of one extra, those of the extras it names among them."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        if own := re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement):
            for each in own[1].split(","):
                yield from needed(each)
        else:
            yield requirement


if __name__ == "__main__":
    named = [each for extra in sys.argv[1:] for each in needed(extra)]
    print(*dict.fromkeys(named if sys.argv[1:] else PROJECT["dependencies"]), sep="\n")
