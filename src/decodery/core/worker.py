"""A process beside this one that works on what is not trusted, and is ended where it takes too long or too much."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast

_STARTS_IN = 120.0
"""Seconds for the imports of a worker, on a slow disk."""
_LOOKS_EVERY = 0.1
"""Seconds between two looks at a worker: at the time it worked, and at its memory where the system bounds none."""
_STARVED = 12.0
"""How many times as long as it may work a process may take where it waits for the processor or the disk."""


class NotStarted(Exception):
    """The process of a worker ends, or says nothing, before it is ready."""


class Unanswered(Exception):
    """The process was ended for a question; the message says why, as in "it takes more than 10 s"."""


class Worker:
    """Answers questions in a process of its own, which is kept for the next ones; one question at a time.

    Safe to share between threads; after a fork the child has a process of its own.

    Args:
        file: Python code with a function `begin(*arguments)` that makes what the process needs and gives back the
            function that answers. It is run as a file, not as a module of this package, so that only what it imports is
            loaded. Questions and answers are what JSON can say.
        memory: Bytes that the process may take: of address space on Linux, where the kernel holds it to that; elsewhere
            of resident memory, which is looked at ten times a second.
    """

    def __init__(self, file: Path, *arguments: str, memory: int) -> None:
        self.file, self.arguments, self.memory = file, arguments, memory
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._lock = threading.Lock()
        _workers.add(self)

    def start(self) -> None:
        """Let the process begin, without waiting for it: what it imports is then there at the first question."""
        # Whoever holds the lock is asking, or starts it too.
        if self._lock.acquire(blocking=False):
            try:
                with suppress(OSError):
                    self._spawn()
            finally:
                self._lock.release()

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to `question`; starting the process is not counted in `seconds`.

        They are seconds of work where the system tells them apart from waiting, so that a busy machine changes nothing.

        Raises:
            NotStarted, Unanswered: If the limits of time or memory were reached or the process broke down; the next
                question gets a new process.
        """
        line = json.dumps([question, _STARVED * seconds]).encode() + b"\n"
        with self._lock:
            try:
                self._spawn()
                if not self._ready:
                    self._exchange(b"", _STARTS_IN)
                    self._ready = True
            except (OSError, Unanswered) as error:
                self._end()
                raise NotStarted(str(error)) from error
            except BaseException:
                self._end()
                raise
            try:
                reply = json.loads(self._exchange(line, seconds))
                if "answer" not in reply:
                    raise Unanswered(self._too_large())
                return reply["answer"]
            except BaseException:
                # Also at Ctrl-C: an answer that comes later must not be taken for that to another question.
                self._end()
                raise

    def _spawn(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self._end()
        child = Path(__file__).with_name("worker_child.py")
        process = subprocess.Popen(
            # -P: the current folder is no place to import modules from.
            [sys.executable, "-P", str(child), str(self.file), str(self.memory), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C is meant for this process; on Windows no console window may open.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self.process, self._ready = process, False
        self._finalizer = weakref.finalize(self, _end, process)

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and wait for the next one."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        reply = b""
        with _Watch(self.process, seconds, self.memory) as watch, suppress(OSError):
            self.process.stdin.write(line)
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        if watch.late:
            raise Unanswered(f"it takes more than {seconds:g} s")
        if watch.large:
            raise Unanswered(self._too_large())
        if not reply.endswith(b"\n"):
            raise Unanswered("its process breaks down")
        return reply

    def _too_large(self) -> str:
        return f"it takes more than {self.memory >> 20} MiB of memory"

    def _end(self) -> None:
        if self.process is not None:
            self._finalizer()
            self.process = None

    def _forget(self) -> None:
        """After a fork: the process belongs to the parent, and the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        if self.process is not None:
            self._finalizer.detach()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                # Not the buffer above it, which would write what the parent may have been about to.
                cast(io.BufferedReader, pipe).raw.close()
            self.process = None


class _Watch:
    """Kills a process that takes too long, or too much where the system does not see to it, while a block runs."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, memory: int) -> None:
        self.late = self.large = False
        self._process, self._memory = process, memory
        self._worked = processor_seconds(process)
        if self._worked is None:
            self._most, self._until = 0.0, time.monotonic() + seconds
        else:
            self._most, self._until = self._worked + seconds, time.monotonic() + _STARVED * seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(max(0.0, min(_LOOKS_EVERY, self._until - time.monotonic()))):
            worked = processor_seconds(self._process) if self._worked is not None else None
            self.late = time.monotonic() >= self._until or (worked is not None and worked >= self._most)
            self.large = sys.platform != "linux" and resident(self._process) > self._memory
            if self.late or self.large:
                self._process.kill()
                return


def processor_seconds(process: subprocess.Popen[bytes]) -> float | None:
    """Seconds that a process has worked so far; None where that cannot be told."""
    try:
        # After the name, which may hold anything, the 12th and 13th fields are its ticks and the kernel's for it.
        told = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def resident(process: subprocess.Popen[bytes]) -> int:
    """Bytes of memory that a process holds; 0 where that cannot be told."""
    if sys.platform == "win32":
        import ctypes

        class Counters(ctypes.Structure):
            _fields_ = (
                ("cb", ctypes.c_uint32),
                ("faults", ctypes.c_uint32),
                *((name, ctypes.c_size_t) for name in ("peak", "now", "a", "b", "c", "d", "committed", "most")),
            )

        counters = Counters(cb=ctypes.sizeof(Counters))
        handle = ctypes.c_void_p(int(process._handle))
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(handle, ctypes.byref(counters), counters.cb)
        return int(counters.committed)
    try:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, timeout=5)
        return int(told.stdout) << 10
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


def _forget_all() -> None:
    for worker in _workers:
        worker._forget()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
