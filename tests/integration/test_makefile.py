"""Which PyTorch `make` installs, with a pip that only writes down what it is asked for."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("make") is None, reason="the choice is made on Linux alone"
)


@pytest.fixture
def index() -> Iterator[str]:
    """A package index that answers, and nothing more."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/cpu"
        server.shutdown()


def install(folder: Path, *settings: str, torch: bool = False) -> tuple[list[str], str]:
    """What pip was asked for, and what was said."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "src" / "decodery" / "model" / "csrc").mkdir(parents=True)
    for name in ("setup.py", "constraints.txt", "asked"):
        (folder / name).touch()
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "packaging").mkdir()
    shutil.copy(ROOT / "packaging" / "requirements.py", folder / "packaging")
    (folder / "modules").mkdir()
    if torch:
        (folder / "modules" / "torch.py").touch()
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Without the site packages of this environment, which has a torch.
    python.write_text(
        '#!/bin/sh\nif [ "$1" = -m ]; then echo "$*" >> asked\n'
        f'else PYTHONPATH=modules exec {sys.executable} -S "$@"; fi\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", ".venv/installed", "CONSTRAINTS=", *settings], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "torch>=2.6" in (folder / ".venv" / "packages.txt").read_text().splitlines()
    return [line.partition("check ")[2].strip() for line in (folder / "asked").read_text().splitlines()], done.stdout


USUAL = ["--no-compile -r .venv/packages.txt", "--no-compile --no-deps -e ."]
"""The packages, and then this one."""


def test_without_a_gpu_the_cpu_build_comes_first(tmp_path: Path, index: str) -> None:
    asked, said = install(tmp_path, "GPU=", f"TORCH_INDEX={index}")
    assert asked == [f"--no-compile --no-deps --index-url {index} torch>=2.6", *USUAL]
    assert "cannot be reached" not in said


@pytest.mark.parametrize("beside", ["", "s"], ids=["closed", "missing"])
def test_an_index_that_does_not_answer_is_done_without(tmp_path: Path, index: str, beside: str) -> None:
    unreachable = f"{index}{beside}" if beside else "http://127.0.0.1:9/cpu"
    asked, said = install(tmp_path, "GPU=", f"TORCH_INDEX={unreachable}")
    assert asked == USUAL
    assert f"{unreachable} cannot be reached: torch comes from pip's own index" in said


@pytest.mark.parametrize("settings", [("GPU=/dev/nvidia0",), ("GPU=", "TORCH_INDEX="), ("GPU=",)])
def test_otherwise_the_choice_is_pips(tmp_path: Path, index: str, settings: tuple[str, ...]) -> None:
    torch = settings == ("GPU=",)
    named = () if len(settings) == 2 else (f"TORCH_INDEX={index}",)
    asked, _ = install(tmp_path, *settings, *named, torch=torch)
    assert asked == USUAL


def test_the_kit_needs_no_environment_of_its_own(tmp_path: Path) -> None:
    """On a bare machine nothing can be installed."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", "--no-print-directory", "-n", "gpu", "PYTHON=python3.12", "ARGS=--parts A", "TORCH_INDEX="]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["python3.12 benchmarks/gpu/run.py --parts A"], done.stderr
