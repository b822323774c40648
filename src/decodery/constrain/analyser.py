"""Which attributes an object has, found by static analysis in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..core.worker import Worker
from ..errors import ConstraintError, SettingsError

_MOST_MEMORY = 4 << 30
"""Bytes of address space; what needs more ends with an error and is not known."""


class Analyser:
    """Asks `jedi` what may follow a dot; one question at a time, each bounded in time.

    jedi reads code and does not run it. What it cannot read, extension modules of installed packages, it imports to
    list their names: that is done in the other process, whose memory is bounded where the system can.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("jedi") is None:
            raise SettingsError("the monitor needs jedi: run `pip install 'decodery[constrain]'`")
        self._cache = TemporaryDirectory(prefix="decodery-jedi-")
        job = Path(__file__).with_name("jedi_worker.py")
        self._worker = Worker(job, self._cache.name, memory=_MOST_MEMORY)

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer of `jedi_worker.names`; None where it took too long or broke down, and what is asked is not known.

        Raises ConstraintError where the process cannot be started.
        """
        try:
            return self._worker.ask(question, seconds)
        except OSError as error:
            raise ConstraintError("the monitor's analyser does not start: check that `import jedi` works") from error


@functools.cache
def analyser() -> Analyser:
    """The one of this process: it starts in a second and then knows the libraries it has read."""
    return Analyser()
