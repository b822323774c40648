"""What lies in the package beside Python: a wheel has all of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "decodery"
OWN = {".py", ".pyc", ".so"}
"""What setuptools takes along, or makes, by itself."""


def left_out(patterns: list[str]) -> list[str]:
    """Files of the package that no pattern takes along."""
    taken = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    every = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in OWN)
    return sorted(str(path.relative_to(PACKAGE)) for path in every if path not in taken)


def test_a_wheel_has_all_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["decodery"]
    assert left_out(patterns) == []
    assert left_out([each for each in patterns if not each.startswith("training/")]) == ["training/built_in.json"]
