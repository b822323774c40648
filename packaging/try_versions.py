"""Runs the tests with other versions of what this package needs, in an environment of the wheel and its extra "test".

`python packaging/try_versions.py dist/decodery-*.whl torch==2.6.0 transformers==5.23.0` adds a row to
benchmarks/results/versions.json. `--tests` names tests, by default those of all methods on tiny models, of models, and
of the use with transformers. It needs the package with its extra "benchmarks" in the Python that runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from decodery_benchmarks.results import RESULTS, begun_result, write_result  # noqa: E402

TESTS = ("tests/conformance", "tests/unit/models", "tests/unit/sampling", "tests/unit/integrations")
SHOWN = ("python", "torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "gguf")


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pins", nargs="*", help="Requirements, such as torch==2.6.0.")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--work", type=Path, help="A folder to keep the environment in.")
    asked = parser.parse_args()
    path = RESULTS / "versions.json"
    rows = begun_result(path)["rows"]
    with tempfile.TemporaryDirectory() as name:
        folder = asked.work.resolve() if asked.work else Path(name)
        env = folder / "-".join(re.sub(r"\W+", "-", pin) for pin in asked.pins)
        if not env.is_dir():
            venv.create(env, with_pip=True)
            python = env / "bin" / "python"
            wheel = f"{asked.wheel.resolve()}[test]"
            subprocess.run([python, "-m", "pip", "install", "--quiet", wheel, *asked.pins], check=True)
        code = f"import sys, importlib.metadata as m; print(sys.version.split()[0], *map(m.version, {SHOWN[1:]}))"
        versions = dict(zip(SHOWN, run(env, folder, "-c", code).stdout.split(), strict=True))
        # The tests of this checkout, the package of the wheel.
        pytest = ["-m", "pytest", "-n", "0", "-m", "not integration", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        done = run(env, ROOT, *pytest, "-c", str(ROOT / "pyproject.toml"), *asked.tests)
        print(done.stdout[-4000:], done.stderr[-2000:])
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    row = {"versions": versions, "tests": asked.tests, "counts": counts, "works": done.returncode == 0}
    rows[", ".join(asked.pins)] = row
    command = "python packaging/try_versions.py dist/decodery-*.whl VERSIONS"
    write_result(path, {"command": command, "rows": rows})
    return done.returncode


def run(env: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A process of an environment: nothing of this checkout's own environment, no compiler."""
    around = {"PATH": f"{env / 'bin'}:/usr/bin:/bin", "HOME": str(env.parent), "CC": "false", "CXX": "false"}
    around |= {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "OMP_", "DECODERY_"))}
    return subprocess.run([env / "bin" / "python", *command], env=around, cwd=folder, text=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
