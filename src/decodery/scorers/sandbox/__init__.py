"""Runs generated Python programs in a process of their own, within limits."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from decodery.core.errors import SettingsError
from decodery.core.fair_slots import FairSlots
from decodery.core.worker_pool import end_process, start_process

_MOST_OUTPUT = 1 << 16
"""Bytes of what a program prints that are kept."""
_MOST_TEXT = 1 << 20
_MOST_REPORT = 1 << 12
"""Bytes of what is reported of one text."""
_REMEMBERED = 4096
_FILES = 16
_NO_LIMITS = "Windows cannot limit what a process takes, so generated programs are not run there: use Linux (WSL)"
"""As many files of the largest size find room, where the kernel gives a folder in memory."""
_GUARDED = ("network", "local services", "processes", "writing outside", "changing files outside", "signals")
"""What Python's own guard refuses where the kernel does not."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        passed: One entry per test.
        reason: Why the program itself, or the first test that failed, did not pass, None where all passed.
        output: The beginning of what was printed.
    """

    passed: tuple[bool, ...]
    reason: str | None
    output: str

    @property
    def share(self) -> float:
        """Of the tests that passed; 1 for a program that ran and has none."""
        return sum(self.passed) / len(self.passed) if self.passed else float(self.reason is None)


_slots = FairSlots((os.cpu_count() or 1) + 1)
"""Programs of all sandboxes that run at a time: one caller's on each core, and one more for another caller."""


class Sandbox:
    """Runs a program and its tests, and remembers the result by their text.

    Programs see the standard library, no environment variables and an empty folder that is deleted afterwards. Besides
    the limits they have no network and no processes, and neither write outside of that folder, nor read more than
    Python and the system's libraries, nor signal others: each held to by every means the kernel offers (namespaces,
    Landlock, seccomp, a user of its own where this one is root), and most of it by an audit hook of Python, which keeps
    accidents away and can be got around. `protection` tells what is held to here, and by whom. Tests run in the
    program's interpreter: results cannot be written by the program, but answers can be made that please any test.
    Untrusted code belongs into a container or a virtual machine of its own. On Windows there are no such limits, and
    making a sandbox raises SettingsError.

    Args:
        seconds: Wall time of the program and of each test; the whole has three times that, and `cpu_seconds` of
            processor time.
        memory_mib: Address space, which also bounds threads.
        file_mib: Of each file, what is printed included; of all files 16 times that, where the kernel gives a folder in
            memory.
    """

    def __init__(
        self, *, seconds: float = 3.0, cpu_seconds: int = 10, memory_mib: int = 512, file_mib: int = 1
    ) -> None:
        if sys.platform == "win32":
            raise SettingsError(_NO_LIMITS)
        if min(seconds, cpu_seconds, memory_mib, file_mib) <= 0:
            raise SettingsError("the limits of a sandbox must be above 0")
        self.seconds = seconds
        self._most_bytes = _FILES * file_mib << 20
        self._limits = {
            "RLIMIT_CPU": cpu_seconds,
            "RLIMIT_AS": memory_mib << 20,
            "RLIMIT_FSIZE": file_mib << 20,
            "RLIMIT_NPROC": 1,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        if sys.platform == "darwin":
            # It refuses the limit, or takes it and does not hold to it.
            warnings.warn("macOS does not bound the memory of the generated programs that are run", stacklevel=2)
            del self._limits["RLIMIT_AS"]
        self.runs = 0
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def protection(self) -> dict[str, str]:
        """By restriction, what enforces it here: "kernel", "guard" (Python's, accidents only) or "nothing".

        Tried out once, with a process of its own: see `decodery info`.
        """
        return protection()

    def run(self, program: str, tests: Sequence[str] = ()) -> Verdict:
        """Run `program`, then every test, with the program's variables.

        A test is a text of Python statements that raise on failure. The same program and tests are run once. What is
        longer than 2^20 characters fails unread.
        """
        job = json.dumps([program, *tests])
        key = hashlib.sha256(job.encode()).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        if len(job) > _MOST_TEXT:
            verdict = Verdict((False,) * len(tests), "the text is too long", "")
        else:
            with self._lock:
                self.runs += 1
            with _slots.taken():
                lines, ended, output = self._process([program, *tests])
            verdict = _verdict(lines, len(tests), ended, output)
        with self._lock:
            self._known[key] = verdict
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return verdict

    def _process(self, texts: list[str], probe: dict[str, Any] | None = None) -> tuple[list[Any], str, str]:
        """Run texts, or the probe. Returns what was reported, how it ended too early ("" if not), what was printed."""
        key = secrets.token_hex(16)
        job = {"texts": texts, "probe": probe, "seconds": self.seconds, "key": key}
        job |= {"limits": self._limits, "most_bytes": self._most_bytes}
        end = time.monotonic() + 3 * self.seconds
        # What is printed goes into a file, whose size the limits bound: no pipe has to be drained. Results go through a
        # pair of sockets, which unlike files and pipes cannot be opened anew to read what was written.
        ours, theirs = socket.socketpair()
        with _folder() as folder, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as asked, ours:
            with theirs:
                asked.write(json.dumps(job).encode())
                asked.seek(0)
                process = start_process(
                    # Isolated, without site-packages, and leaving no bytecode.
                    [sys.executable, "-I", "-S", "-B", str(Path(__file__).parent), str(theirs.fileno())],
                    stdin=asked,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={},
                    pass_fds=(theirs.fileno(),),
                )
            try:
                reported = _received(ours, _MOST_REPORT * (len(texts) + 1), end)
                process.wait(max(0.0, end - time.monotonic()))
                ended = "" if process.returncode == 0 else _death(process.returncode)
            except subprocess.TimeoutExpired:
                ended = "it took too long"
            finally:
                end_process(process)
            return _lines(reported, key.encode()), ended, _text(printed)


@functools.cache
def protection() -> dict[str, str]:
    """See `Sandbox.protection`."""
    if sys.platform == "win32":
        raise SettingsError(_NO_LIMITS)
    with (
        tempfile.TemporaryDirectory(prefix="decodery-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as service,
        warnings.catch_warnings(action="ignore"),
    ):
        outside, local = Path(folder, "outside"), Path(folder, "service")
        outside.touch()
        service.bind(str(local))
        service.listen()
        for path in (folder, outside, local):
            os.chmod(path, 0o777)
        probe = {"outside": str(outside), "port": server.getsockname()[1], "service": str(local), "others": os.getpid()}
        reported, ended, printed = Sandbox(seconds=10)._process([], probe)
    if not reported:
        raise SettingsError(
            f"generated programs cannot be run here, {ended or 'for unknown reasons'}: {printed[-300:]}"
        )
    return {
        name: "kernel" if refused else "guard" if name in _GUARDED else "nothing"
        for name, refused in reported[0].items()
    }


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder, deleted with whatever programs made in it."""
    folder = tempfile.mkdtemp(prefix="decodery-sandbox-")
    try:
        yield folder
    finally:
        try:
            _delete(folder)
        except OSError as error:
            warnings.warn(f"files that a program left cannot be deleted: {error}", stacklevel=2)


def _delete(folder: str) -> None:
    """Delete a folder of any depth, step by step from one to the next: no path gets long and nothing recurs."""
    place = _enter(folder)
    # The folders on the way to where we stand, each with those in it that are still there.
    inner = [_emptied(place)]
    names: list[str] = []
    try:
        while names or inner[-1]:
            if inner[-1]:
                names.append(inner[-1].pop())
                os.chmod(names[-1], 0o700, dir_fd=place)
                place = _enter(names[-1], place)
                inner.append(_emptied(place))
            else:
                inner.pop()
                place = _enter("..", place)
                os.rmdir(names.pop(), dir_fd=place)
    finally:
        os.close(place)
    os.rmdir(folder)


def _enter(name: str, place: int | None = None) -> int:
    """The folder `name`, opened; `place`, from where it is seen, is closed."""
    found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    if place is not None:
        os.close(place)
    return found


def _emptied(place: int) -> list[str]:
    """Delete the files of an open folder; the names of the folders in it."""
    with os.scandir(place) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=place)
    return [name for name, is_folder in found if is_folder]


def _received(ours: socket.socket, most: int, end: float) -> bytes:
    """What comes until the other side ends or the time does, and hardly more than `most` bytes."""
    found = b""
    with contextlib.suppress(TimeoutError):
        while len(found) < most:
            ours.settimeout(max(1e-3, end - time.monotonic()))
            piece = ours.recv(1 << 16)
            if not piece:
                break
            found += piece
    return found


def _death(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else "it ended before its time"


def _lines(reported: bytes, key: bytes) -> list[Any]:
    """What went wrong with the program and each test, None for nothing: the lines that are signed with the key."""
    *whole, _ = reported.split(b"\n")
    return [json.loads(line[len(key) :]) for line in whole if line.startswith(key)]


def _verdict(lines: list[str | None], tests: int, ended: str, output: str) -> Verdict:
    passed = tuple(line is None for line in lines[1 : tests + 1])
    missing = tests + 1 - len(lines)
    reasons = [line for line in lines if line is not None]
    reason = reasons[0] if reasons else ((ended or "it ended before its time") if missing else None)
    return Verdict(passed + (False,) * (tests - len(passed)), reason, output)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode("utf-8", "replace")
