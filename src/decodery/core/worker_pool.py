"""Processes beside this one that work on what is not trusted, and are ended where that takes too long or too much."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from .fair_slots import FairSlots
from .process_usage import processor_seconds, resident

_STARTS_IN = 120.0
"""Seconds for the imports of a worker, on a slow disk."""
_LOOKS_EVERY = 0.1
"""Seconds between two looks at a worker: at the time it worked, and at its memory where the system bounds none."""
NICE, LAST = 5, 15
"""Forward passes, which many texts wait for, go first where cores are few: before what a request waits for alone, and
far before what may take seconds."""
_STARVED = 12.0
"""How many times as long as it may work a process may take where it waits for the processor or the disk."""


class NotStarted(Exception):
    """The process of a worker ends, or says nothing, before it is ready."""


class Unanswered(Exception):
    """The process was ended for a question; the message says why, as in "it takes more than 10 s"."""


class WorkerPool:
    """Answers questions in processes of its own, which are kept for the next ones.

    A process starts as a fresh interpreter in a session of its own and inherits nothing but the pipes for questions and
    answers. It ends with the pool, or with this process. Safe to share between threads; after a fork the child has
    processes of its own.

    Args:
        file: Python code with a function `begin(*arguments)` that makes what the process needs and returns the function
            that answers. It is run as a file, not as a module of this package, so that only what it imports is loaded.
            Questions and answers are what JSON can say.
        arguments: Of `begin`.
        memory: Bytes that a process may take: of address space on Linux, where the kernel holds it to that; elsewhere
            of resident memory, which is looked at ten times a second.
        processes: How many there are at most. Further ones start where one caller's question would wait for another's.
        nice: How much nicer they are than this one.
    """

    def __init__(self, file: Path, *arguments: str, memory: int, processes: int = 2, nice: int = NICE) -> None:
        self.file, self.arguments, self.memory, self.nice = file, arguments, memory, nice
        self.idle: list[WorkerProcess] = []
        self._slots = FairSlots(processes)
        _pools.add(self)

    def start(self) -> None:
        """Let a process begin, without waiting for it: what it imports is then there at the first question."""
        if not self.idle:
            with suppress(OSError):
                self.idle.append(self._process())

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to `question`; neither waiting for a process nor starting one is counted in `seconds`.

        They are seconds of work where the system tells them apart from waiting, so that a busy machine changes nothing.

        Raises:
            NotStarted, Unanswered: If the limits of time or memory were reached or the process broke down; that process
                is ended.
        """
        line = json.dumps([question, _STARVED * seconds]).encode() + b"\n"
        with self._slots.taken():
            process = self._ready()
            try:
                reply = json.loads(process.exchange(line, seconds, self.memory))
                if "answer" not in reply:
                    raise Unanswered(_too_large(self.memory))
            except BaseException:
                # Also at Ctrl-C: an answer that comes later must not be taken for that to another question.
                process.end()
                raise
            self.idle.append(process)
            return reply["answer"]

    def close(self) -> None:
        """End the processes that answer nothing now."""
        while self.idle:
            self.idle.pop().end()

    def _process(self) -> WorkerProcess:
        main = Path(__file__).with_name("worker_main.py")
        # -P: the current folder is no place to import modules from.
        command = [sys.executable, "-P", str(main), str(self.file), str(self.memory), *self.arguments]
        return WorkerProcess(command, self.nice)

    def _ready(self) -> WorkerProcess:
        """A process that has started."""
        while self.idle:
            process = self.idle.pop()
            if process.popen.poll() is None:
                break
            process.end()
        else:
            try:
                process = self._process()
            except OSError as error:
                raise NotStarted(str(error)) from error
        if not process.ready:
            try:
                process.exchange(b"", _STARTS_IN, self.memory)
            except BaseException as error:
                process.end()
                if isinstance(error, Unanswered):
                    raise NotStarted(str(error)) from error
                raise
            process.ready = True
        return process

    def forget(self) -> None:
        """After a fork: the processes are the parent's, and a lock may be held by a thread that is not here."""
        self._slots = FairSlots(self._slots.count)
        self.idle = []


class WorkerProcess:
    """One process of a pool, which answers a line with a line.

    Args:
        ready: Whether it has said that it has started.
    """

    def __init__(self, command: Sequence[str], nice: int) -> None:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self.popen = start_process(command, nice, stdin=pipe, stdout=pipe, stderr=nothing)
        self.ready = False
        self.end = weakref.finalize(self, end_process, self.popen)
        _processes.add(self)

    def exchange(self, line: bytes, seconds: float, memory: int) -> bytes:
        """Send a line and wait for the next one."""
        assert self.popen.stdin is not None and self.popen.stdout is not None
        reply = b""
        with _Watch(self.popen, seconds, memory) as watch, suppress(OSError):
            self.popen.stdin.write(line)
            self.popen.stdin.flush()
            reply = self.popen.stdout.readline()
        if watch.late:
            raise Unanswered(f"it takes more than {seconds:g} s")
        if watch.large:
            raise Unanswered(_too_large(memory))
        if not reply.endswith(b"\n"):
            raise Unanswered("its process breaks down")
        return reply

    def forget(self) -> None:
        """Let go of it without ending it."""
        self.end.detach()
        for pipe in (self.popen.stdin, self.popen.stdout):
            # Not the buffer above it, which would write what the parent may have been about to.
            cast(io.BufferedReader, pipe).raw.close()


def start_process(command: Sequence[str], nice: int = NICE, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, before which others go.

    A Ctrl-C is meant for this one, and on Windows no console may open.

    Args:
        command: The command.
        nice: How much nicer it is than this one.
        settings: See `subprocess.Popen`.
    """
    process = subprocess.Popen(
        command, start_new_session=True, creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0), **settings
    )
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, process.pid, min(os.getpriority(os.PRIO_PROCESS, 0) + nice, 19))
    with suppress(OSError):
        # Linux may weigh sessions against each other, and their processes only within them.
        Path(f"/proc/{process.pid}/autogroup").write_text(str(nice))
    return process


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process of `start_process` with all that it has started, and close the pipes to it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (OSError, AttributeError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _too_large(memory: int) -> str:
    return f"it takes more than {memory >> 20} MiB of memory"


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


def _forget_all() -> None:
    for process in _processes:
        process.forget()
    for pool in _pools:
        pool.forget()


_processes: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
