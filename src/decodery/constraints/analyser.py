"""Static analysis of the attributes of an object, in a separate process."""

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
"""Memory limit of jedi, in bytes; an analysis that needs more has no result."""


class Analyser:
    """Finds with `jedi` the names that may follow a dot; one query at a time, each with a time limit.

    jedi reads code and does not run it. Extension modules of installed packages, which it cannot read, are imported to
    list their names. This happens in the other process, which has a memory limit too.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("jedi") is None:
            raise SettingsError("the monitor needs jedi: run `pip install 'decodery[constrain]'`")
        self._cache = TemporaryDirectory(prefix="decodery-jedi-")
        self.workers = WorkerPool(Path(__file__).with_name("jedi_worker.py"), self._cache.name, memory=_MEMORY)

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return the result of `jedi_worker.names`, None where it took too long or failed.

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
    """The analyser of this process: it starts in a second, and caches the libraries that it has read."""
    return Analyser()
