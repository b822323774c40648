"""A process of its own for work that may take too long, too much memory, or the process with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

_STARTS_IN = 120.0
"""Seconds for reading what the work needs, on a slow disk."""


class Worker:
    """Answers questions in another process; one at a time, each bounded in time.

    job: a file of Python with `start(*arguments)`, called once, and `answer(question)`, which take and give what JSON
    can say. It is read alone, not as a module of this package, so that nothing but what it imports is loaded. memory:
    bytes of address space; Windows and macOS have no such limit, that of time holds everywhere. The process starts with
    the first question, ends with this object, and is started anew where it did not answer.
    """

    def __init__(self, job: Path, *arguments: str, memory: int) -> None:
        child = Path(__file__).with_name("worker_child.py")
        # -P: the current folder is no place to import modules from.
        self._command = [sys.executable, "-P", str(child), str(job), str(memory), *arguments]
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: SimpleQueue[bytes] = SimpleQueue()

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer; None where it took too long, or the process broke down over it.

        Raises OSError where the process cannot be started.
        """
        if self._owner != os.getpid():
            # A fork has a process of its own: the answers of this one belong to whom it was forked from.
            self._owner, self._lock, self._process = os.getpid(), threading.Lock(), None
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.flush()
                line = self._answers.get(timeout=seconds)
            except (Empty, OSError):
                line = b""
            if not line:
                self._end()
                self._process = None
                return None
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _start(self) -> None:
        answers: SimpleQueue[bytes] = SimpleQueue()
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._answers = process, answers
        self._end = weakref.finalize(self, _end, process, os.getpid())
        threading.Thread(target=_listen, args=(process, answers), daemon=True).start()
        try:
            ready = answers.get(timeout=_STARTS_IN)
        except Empty:
            ready = b""
        if not ready:
            self._end()
            self._process = None
            raise OSError(f"{Path(self._command[3]).name} does not start")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _listen(process: subprocess.Popen[bytes], answers: SimpleQueue[bytes]) -> None:
    """Pass on what the process says, b"" once it is gone."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(b"")
