"""Make a bare machine ready for the kit: the source tree on the path, wheels that were brought, the model's parts."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def paths(*more: Path) -> None:
    """Put the source tree and the tests on the path, of this process and of those it starts."""
    for folder in (ROOT / "tests" / "support", ROOT / "src", ROOT / "benchmarks", *more):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    # The tests find their own folder; on the path of a process their names could hide others.
    known = [
        str(ROOT / "src"),
        str(ROOT / "benchmarks"),
        *map(str, more),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(known))


def install(wheels: Path) -> tuple[list[str], str]:
    """Install all wheels of a folder into a temporary one, and put that on the path.

    Args:
        wheels: The folder; one that is missing holds none.

    Returns:
        The names of the wheels, and what went wrong, "" for nothing.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        return [], ""
    target = Path(tempfile.mkdtemp(prefix="decodery-wheels-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--target", str(target), *map(str, found)]
    done = subprocess.run(command, capture_output=True, text=True)
    paths(target)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return [], f"pip could not install the wheels of {wheels}: {lines[-1] if lines else done.returncode}"
    return [path.name for path in found], ""


def missing() -> list[str]:
    """Packages that decodery requires and this Python lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lacking = []
    for requirement in project["dependencies"]:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        try:
            version(name)
        except PackageNotFoundError:
            lacking.append(name)
    return lacking
