"""Which attributes an object has, found by static analysis in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.worker_pool import NotStarted, Unanswered, WorkerPool

_MEMORY = 4 << 30
"""Bytes that jedi may take; what needs more is not known."""


class Analyser:
    """Asks `jedi` what may follow a dot; one question at a time, each bounded in time.

    jedi reads code and does not run it. What it cannot read, extension modules of installed packages, it imports to
    list their names: that is done in the other process, whose memory is bounded too.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("jedi") is None:
            raise SettingsError("the monitor needs jedi: run `pip install 'decodery[constrain]'`")
        self._cache = TemporaryDirectory(prefix="decodery-jedi-")
        self.workers = WorkerPool(Path(__file__).with_name("jedi_worker.py"), self._cache.name, memory=_MEMORY)

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer of `jedi_worker.names`.

        None where it took too long or broke down, and what is asked is not known.

        Raises:
            ConstraintError: If the process cannot be started.
        """
        try:
            answer: dict[str, Any] = self.workers.ask(question, seconds)
        except Unanswered:
            return None
        except NotStarted as error:
            raise ConstraintError("the monitor's analyser does not start: check that `import jedi` works") from error
        return answer


@functools.cache
def analyser() -> Analyser:
    """The one of this process: it starts in a second and then knows the libraries it has read."""
    return Analyser()
