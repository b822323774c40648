"""Tries a wheel as somebody gets it who has Python and nothing else: no compiler, no checkout, no other packages.

`python packaging/try_wheel.py dist/decodery-*.whl` makes an environment of its own in a temporary folder, installs the
wheel there, and compares what came with it and what it writes. `--torch` names a requirement for PyTorch. `--sbom`
names a file for the packages of that environment, with versions and licences (CycloneDX).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = ["generate", "Name a river.", "--max-new-tokens", "16", "--json"]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--sbom", type=Path)
    asked = parser.parse_args()
    wheel = asked.wheel.resolve()
    complete(wheel)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        # Nothing of this checkout, and no compiler even where the machine has one.
        around = {"PATH": f"{python.parent}:/bin", "HOME": str(folder), "CC": "false", "CXX": "false"}
        around |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}

        def run(*command: str) -> str:
            return subprocess.run(
                [str(python), *command], env=around, cwd=folder, check=True, text=True, stdout=subprocess.PIPE
            ).stdout

        run("-m", "pip", "install", "--quiet", asked.torch, str(wheel))
        where = run("-c", "import decodery; print(decodery.__file__)").strip()
        assert str(folder) in where, where
        kernels = run("-c", "from decodery.core.native.kernels import kernel_sets; print(*kernel_sets())").split()
        assert kernels, "the wheel brought no native kernels"
        print("kernels:", *kernels)
        drafted, plain = (
            json.loads(run("-m", "decodery", *PROMPT, "--drafter", drafter)) for drafter in ("auto", "none")
        )
        assert drafted["text"] == plain["text"] and drafted["text"], (drafted, plain)
        print("text:", drafted["text"])
        if asked.sbom is not None:
            listed = [sys.executable, "-m", "cyclonedx_py", "environment", str(python), "--output-reproducible"]
            listed += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(asked.sbom)]
            subprocess.run(listed, check=True)
            print(f"{asked.sbom}: {len(json.loads(asked.sbom.read_text('utf-8'))['components'])} packages")


def complete(wheel: Path) -> None:
    """Every file of the package but its compiled ones must be in the wheel, and a library that any Python opens."""
    kept = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    wanted = {line.removeprefix("src/") for line in kept.stdout.splitlines()}
    with zipfile.ZipFile(wheel) as opened:
        found = set(opened.namelist())
    assert not wanted - found, f"not in the wheel: {sorted(wanted - found)}"
    assert "decodery/core/native/_native.so" in found and "-py3-none-" in wheel.name, wheel.name
    print(f"{wheel.name}: {len(found)} files, {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
