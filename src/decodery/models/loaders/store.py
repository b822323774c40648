"""The user's cache directory: where files lie, how they are written whole or not at all, how they are recognised."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from decodery.core.errors import DecoderyError

_FULL = {getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG")}
"""Errors that say that there is no room for what is written."""
_SAID = re.compile(r"\[Errno (?P<c>\d+)\]|\(os error (?P<rust>\d+)\)")
"""How Python and Rust write the number of a system's error in a text."""

FORMAT = 11
"""Version of what models are converted to; another number makes everything be converted anew."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is to do: bytes, texts, steps."""


def home() -> Path:
    """The cache directory: DECODERY_HOME where it is set, else the platform's place for caches."""
    if chosen := os.environ.get("DECODERY_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        return base / "decodery" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "decodery"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decodery"


def converted() -> Path:
    """The folder of the converted models: a folder for each state of each source, with a lock beside it."""
    return home() / "converted" / f"v{FORMAT}"


def lock_of(entry: Path) -> Path:
    """The lock of the folder of a converted model: whoever changes the folder holds it."""
    return entry.parent / f"{entry.name}.lock"


def make_directory(path: Path) -> Path:
    """Create `path` and its parents; one sentence where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def is_full(error: OSError) -> bool:
    """Whether there was no room for what was written."""
    return error.errno in _FULL


def check_room(folder: Path, size: int) -> None:
    """Refuse what a disk has no room for before any of it is made.

    Args:
        folder: Where it is to be written; it need not be there yet.
        size: About how many bytes.

    Raises:
        DecoderyError: The disk has less.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if (free := shutil.disk_usage(there).free) < size:
        raise DecoderyError(
            f"{folder} takes about {size / 1e9:,.1f} GB and its disk has {free / 1e9:,.1f}: free some space, name "
            "another folder, or ask for less"
        )


def unwritable(path: Path, error: OSError) -> DecoderyError:
    """The sentence for a file or folder that cannot be written."""
    cache = _in_cache(path)
    if is_full(error):
        advice = "free some space or " + ("set DECODERY_HOME to another directory" if cache else "name another folder")
    elif cache:
        advice = "set DECODERY_HOME to a directory you may write to"
    else:
        advice = "name a folder that you may write to"
    return DecoderyError(f"cannot write {path} ({error.strerror or error}): {advice}")


def system_error(text: str) -> OSError | None:
    """The system's error that a text of another program, or of a library in Rust, tells of."""
    *_, last = [None, *_SAID.finditer(text)]
    if last is None:
        return None
    number = int(last["c"] or last["rust"])
    if last["rust"] and sys.platform == "win32":
        # There Rust gives the number of Windows, from which the error finds that of C.
        return OSError(0, f"system error {number}", None, number)
    return OSError(number, os.strerror(number))


def _in_cache(path: Path) -> bool:
    return path.is_relative_to(home())


@contextmanager
def workspace() -> Iterator[Path]:
    """A directory inside the cache for something unfinished.

    It is gone when the block ends, however it ends. What a killed process left after is removed by the next one that
    needs a workspace.
    """
    from filelock import FileLock

    parent = make_directory(home() / "unfinished")
    path = parent / uuid.uuid4().hex
    # Held as long as its process lives, whatever ends that: so others know what is abandoned.
    lock = FileLock(path.with_suffix(".lock"))
    with locked(home() / "unfinished.lock"):
        _remove_abandoned(parent)
        try:
            lock.acquire()
            path.mkdir()
        except OSError as error:
            raise unwritable(path, error) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()
        with suppress(OSError):
            path.with_suffix(".lock").unlink()


def _remove_abandoned(parent: Path) -> None:
    """Remove the workspaces in `parent` whose processes have gone."""
    from filelock import FileLock, Timeout

    for name in {left.stem for left in parent.iterdir()}:
        mark = parent / f"{name}.lock"
        with suppress(Timeout, OSError), FileLock(mark, timeout=0):
            shutil.rmtree(parent / name, ignore_errors=True)
            mark.unlink()


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder next to `target`, gone when the block ends; what a killed process left in it is overwritten.

    It is of that target alone: other files are written into the same folder at the same time.
    """
    path = target.parent / f".{target.name}.unfinished"
    path.mkdir(exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def contents(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """A fingerprint that changes when a file, or a file of a folder, is replaced.

    Args:
        path: the file or folder; folders within it do not count.

    Returns:
        Name, size, time and number of each file: one that replaces another one has a number of its own, even within
        the clock's grain.

    Raises:
        OSError: there is no such file or folder.
    """
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    found = [(each.name, each.stat()) for each in files]
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path whose file takes the place of `target` when the block ends well.

    Otherwise nothing changes.
    """
    make_directory(target.parent)
    try:
        # A file can only take a name on its own file system.
        with workspace() if _in_cache(target) else _beside(target) as directory:
            temporary = directory / target.name
            yield temporary
            # On disk before it gets its name: a crash of the machine must not leave an empty file under it.
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
    except OSError as error:
        raise unwritable(target, error) from error
    except Exception as error:
        # Tokenizers and safetensors are written by libraries whose errors are of a kind of their own.
        if isinstance(error, DecoderyError) or (found := system_error(str(error))) is None:
            raise
        raise unwritable(target, found) from error


def write_text(target: Path, text: str) -> None:
    """Write a small file whole."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock `path`, so that no other process builds the same thing at the same time."""
    from filelock import FileLock

    make_directory(path.parent)
    lock = FileLock(path)
    try:
        lock.acquire()
    except OSError as error:
        raise unwritable(path, error) from error
    except NotImplementedError as error:
        raise DecoderyError(
            f"the file system of {path} has no locks: set DECODERY_HOME to another directory"
        ) from error
    try:
        yield
    finally:
        lock.release()


def sha256(path: Path, what: str, progress: Progress) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            progress(what, done, size)
    return digest.hexdigest()


def fingerprint(files: Sequence[Path]) -> str:
    """A key from names, sizes and times that changes when one of these files is replaced."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def remove_others(kept: Path) -> None:
    """Remove the directories beside `kept`, earlier states of the same source that nothing uses."""
    for sibling in kept.parent.iterdir():
        if sibling != kept and sibling.is_dir():
            with suppress(OSError):
                shutil.rmtree(sibling)


def bytes_under(path: Path) -> int:
    """The size of a file, or of all files in a folder; what goes meanwhile does not count."""
    paths = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names] or [str(path)]
    total = 0
    for each in paths:
        with suppress(OSError):
            status = os.stat(each)
            total += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return total


def silent(what: str, done: int, total: int) -> None:
    """Report no progress."""


@contextmanager
def terminal_progress(*, counts: bool = False) -> Iterator[Progress]:
    """A progress bar on standard error where a person is watching, else silence.

    Args:
        counts: Not of bytes.
    """
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    amount = MofNCompleteColumn() if counts else DownloadColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    tasks: dict[str, int] = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield report
