"""Runs generated Python programs in a process of their own, within limits."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import SettingsError

_MOST_OUTPUT = 1 << 16
"""Bytes of what a program prints that are kept."""
_MOST_TEXT = 1 << 20
_REMEMBERED = 4096


@dataclass(frozen=True)
class Verdict:
    """What became of a program. passed: one entry per test. reason: why the program itself, or the first test that
    failed, did not pass, None where all passed. output: the beginning of what was printed.
    """

    passed: tuple[bool, ...]
    reason: str | None
    output: str

    @property
    def share(self) -> float:
        """Of the tests that passed; 1 for a program that ran and has none."""
        return sum(self.passed) / len(self.passed) if self.passed else float(self.reason is None)


class Sandbox:
    """Runs a program and its tests, and remembers the result by their text.

    seconds: wall time of the program and of each test; the whole has three times that, and `cpu_seconds` of processor
    time. memory_mib: address space. file_mib: of each file, what is printed included.

    Guaranteed on Linux, by the kernel: processor time, memory, the size of every file, no core dumps, the end of the
    process after its time; where user namespaces are permitted, also no network and no further processes or threads.
    Beyond that Python's audit hook refuses sockets, processes, signals to others, ctypes and writing outside of an
    empty folder that is deleted afterwards. The program sees the standard library and no environment variables. It can
    read whatever the user can read, and who means to can get around the hook: this is protection from accidents and
    runaway programs, not from attackers. Untrusted code belongs into a container or a virtual machine. On macOS memory
    is not bounded (a warning says so); on Windows there are no such limits, and making a sandbox raises SettingsError.
    """

    def __init__(
        self, *, seconds: float = 3.0, cpu_seconds: int = 10, memory_mib: int = 512, file_mib: int = 1
    ) -> None:
        if sys.platform == "win32":
            raise SettingsError(
                "Windows cannot limit what a process takes, so generated programs are not run there: use Linux (WSL)"
            )
        if min(seconds, cpu_seconds, memory_mib, file_mib) <= 0:
            raise SettingsError("the limits of a sandbox must be above 0")
        self.seconds = seconds
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

    def run(self, program: str, tests: Sequence[str] = ()) -> Verdict:
        """Run `program`, then every test, a text of Python statements that raise where it fails, in its variables.

        The same program and tests are run once. What is longer than 2^20 characters fails unread.
        """
        job = json.dumps([program, *tests])
        key = hashlib.sha256(job.encode()).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        too_long = len(job) > _MOST_TEXT
        verdict = Verdict((False,) * len(tests), "the text is too long", "") if too_long else self._run(program, tests)
        with self._lock:
            self._known[key] = verdict
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return verdict

    def _run(self, program: str, tests: Sequence[str]) -> Verdict:
        self.runs += 1
        job = {"program": program, "tests": list(tests), "limits": self._limits, "seconds": self.seconds}
        child = Path(__file__).with_name("sandbox_child.py")
        # What is printed goes into files, whose size the limits bound; nobody has to read along.
        with (
            tempfile.TemporaryDirectory(prefix="decodery-sandbox-") as folder,
            tempfile.TemporaryFile() as printed,
            tempfile.TemporaryFile() as results,
        ):
            process = subprocess.Popen(
                # Isolated, without site-packages, and leaving no bytecode.
                [sys.executable, "-I", "-S", "-B", str(child), str(results.fileno())],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={},
                pass_fds=(results.fileno(),),
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(job).encode(), timeout=3 * self.seconds)
                ended = "" if process.returncode == 0 else _death(process.returncode)
            except subprocess.TimeoutExpired:
                ended = "it took too long"
            finally:
                _end(process)
            return _verdict(_lines(results), len(tests), ended, _text(printed))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all it may have started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _death(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else "it ended before its time"


def _lines(file: IO[bytes]) -> list[str | None]:
    """What went wrong with the program and each test, as far as the process got; None for nothing."""
    file.seek(0)
    found: list[str | None] = []
    for line in file:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _verdict(lines: list[str | None], tests: int, ended: str, output: str) -> Verdict:
    passed = tuple(line is None for line in lines[1 : tests + 1])
    missing = tests + 1 - len(lines)
    reasons = [line for line in lines if line is not None]
    reason = reasons[0] if reasons else ((ended or "it ended before its time") if missing else None)
    return Verdict(passed + (False,) * (tests - len(passed)), reason, output)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode("utf-8", "replace")
