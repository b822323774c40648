"""Servers that are measured: those that are there, and those that are started for it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from decodery.core.errors import DecoderyError

_READY_SECONDS, _LEAVE_SECONDS, _LOOKS_EVERY = 300.0, 40.0, 0.2
_LAST_WORDS = 400


@dataclass(frozen=True)
class Target:
    """A server by name. url: where it is, or command: what starts it, {port} standing for the port it is to take."""

    name: str
    url: str = ""
    command: tuple[str, ...] = ()

    @contextmanager
    def open(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Its address, while it is there. Raises DecoderyError for one that cannot be started."""
        if not self.command:
            yield self.url
            return
        with self.process(stopped) as (_, url):
            yield url

    @contextmanager
    def process(self, stopped: Callable[[], bool]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """The process that `command` starts, and its address; SIGTERM ends it. Raises DecoderyError."""
        port = _free_port()
        with tempfile.TemporaryFile() as said:
            command = [part.replace("{port}", str(port)) for part in self.command]
            try:
                # A Ctrl-C is for the measurement, which then ends the server.
                process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            except OSError as error:
                raise DecoderyError(f"cannot start {self.name}: {command[0]}: {error.strerror}") from error
            try:
                url = f"http://127.0.0.1:{port}"
                until = time.monotonic() + _READY_SECONDS
                while not _answers(url):
                    if process.poll() is not None or stopped() or time.monotonic() > until:
                        said.seek(0)
                        words = said.read().decode(errors="replace").strip()[-_LAST_WORDS:]
                        raise DecoderyError(f"{self.name} did not start: {words or 'it said nothing'}")
                    time.sleep(_LOOKS_EVERY)
                yield process, url
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_LEAVE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def own(model: str, dtype: str) -> Target:
    """This package's own server."""
    command = (sys.executable, "-m", "decodery", "serve", "--port", "{port}", "--model", model, "--dtype", dtype)
    return Target("decodery", command=command)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code in (200, 401)
    except httpx.HTTPError:
        return False
