"""Which attributes an object has, found by static analysis in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import ConstraintError, SettingsError

_STARTS_IN = 120.0
"""Seconds for reading jedi and the stubs of the built-in types, on a slow disk."""


class Analyser:
    """Asks `jedi` what may follow a dot; one question at a time, each bounded in time.

    jedi reads code and does not run it. What it cannot read, extension modules of installed packages, it imports to
    list their names: that is done in the other process, whose memory is bounded where the system can.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("jedi") is None:
            raise SettingsError("the monitor needs jedi: run `pip install 'decodery[constrain]'`")
        self._lock = threading.Lock()
        self._cache = TemporaryDirectory(prefix="decodery-jedi-")
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: SimpleQueue[bytes] = SimpleQueue()

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer of `jedi_worker.names`; None where it took too long or broke down, and what is asked is not known.

        Raises ConstraintError where the process cannot be started.
        """
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
        worker = Path(__file__).with_name("jedi_worker.py")
        answers: SimpleQueue[bytes] = SimpleQueue()
        # -P: the current folder is no place to import modules from.
        process = subprocess.Popen(
            [sys.executable, "-P", str(worker), self._cache.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process, self._answers = process, answers
        self._end = weakref.finalize(self, _end, process)
        threading.Thread(target=_listen, args=(process, answers), daemon=True).start()
        try:
            ready = answers.get(timeout=_STARTS_IN)
        except Empty:
            ready = b""
        if not ready:
            self._end()
            self._process = None
            raise ConstraintError("the monitor's analyser does not start: check that `import jedi` works")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _listen(process: subprocess.Popen[bytes], answers: SimpleQueue[bytes]) -> None:
    """Pass on what the process says, b"" once it is gone."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(b"")


@functools.cache
def analyser() -> Analyser:
    """The one of this process: it starts in a second and then knows the libraries it has read."""
    return Analyser()
