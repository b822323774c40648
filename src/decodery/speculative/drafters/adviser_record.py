"""What each adviser of `auto` has brought on this machine: remembered by model and adviser, between processes too."""

from __future__ import annotations

import atexit
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from decodery.core.errors import DecoderyError
from decodery.core.machine import describe
from decodery.models.loaders import store
from decodery.models.loaders.fields import Fields, Kind, Number, read_json
from decodery.models.protocol import Reader

from .advice import AskCosts

_MACHINE = ("processor", "threads", "gpus", "kernels", "decodery")
_MOST_SECONDS = 1e9
_NUMBERS = ("taken", "brought", "passed", "promised", "kept")
_KINDS: dict[str, Kind] = {name: Number(-_MOST_SECONDS, _MOST_SECONDS) for name in _NUMBERS}
_TRIED = 10.0
"""Seconds of passes after which it is known well enough to be compared with others."""
_KNOWN = 60.0
"""Seconds of passes after which an adviser that brought less than it took is left out."""


@dataclass(frozen=True)
class Record:
    """What an adviser has done for a model.

    Attributes:
        taken, brought: Seconds of its questions, and those that its answers saved.
        passed: Seconds of the passes of all steps in which it could be asked.
        promised, kept: Tokens that its answers were to save and saved, recent ones.
    """

    taken: float = 0.0
    brought: float = 0.0
    passed: float = 0.0
    promised: float = 0.0
    kept: float = 0.0

    @property
    def gain(self) -> float:
        """What it saved of the time of passes, less what it took; negative where it costs."""
        return (self.brought - self.taken) / self.passed if self.passed else 0.0

    @property
    def tried(self) -> bool:
        """Whether it had its chance."""
        return self.taken > 0 and self.passed >= _TRIED

    @property
    def pays(self) -> bool:
        """False where it is known that it brings less than it takes."""
        return self.passed < _KNOWN or self.brought >= self.taken

    def explained(self, name: str) -> str:
        """A sentence about it, for people."""
        if not self.taken:
            return f"{name}: not tried on this machine"
        if self.gain >= 0:
            return f"{name}: saves {self.gain:.1%} of the time of passes, its questions included"
        if not self.pays:
            return f"drafting with n-grams: {name} would cost {-self.gain:.1%} more than it brings"
        return f"{name}: has cost {-self.gain:.1%} so far"


@dataclass
class _Kept:
    """The records of this process: what was read, and the costs that have grown since."""

    lock: Lock = field(default_factory=Lock)
    read: dict[str, Record] = field(default_factory=dict)
    running: dict[str, list[AskCosts]] = field(default_factory=dict)


_kept = _Kept()


def remembered(model: Reader, adviser: str) -> Callable[[AskCosts], None] | None:
    """What adds to costs what is remembered of an adviser, and remembers them when the process ends.

    Args:
        model: The target.
        adviser: The identity of the adviser's content, "" where it has none.

    Returns:
        None where the model or the adviser cannot be told from others.
    """
    if not model.fingerprint or not adviser:
        return None
    key, known = _key(model, adviser), record_of(model, adviser)

    def recall(costs: AskCosts) -> None:
        if known.promised > 0:
            costs.promised, costs.kept, costs.fresh = known.promised, known.kept, not known.taken
            # A trial that many short processes have earned is made in one of them.
            costs.credit += max(costs.earned(known.passed) + known.brought - known.taken, 0.0)
        with _kept.lock:
            if not _kept.running:
                atexit.register(keep_records)
            _kept.running.setdefault(key, []).append(costs)

    return recall


def record_of(model: Reader, adviser: str) -> Record:
    """What is known of an adviser of a model on this machine, this process included."""
    key = _key(model, adviser)
    with _kept.lock:
        if key not in _kept.read:
            _kept.read[key] = _load(_path(key))
        known, running = _kept.read[key], list(_kept.running.get(key, ()))
    return _joined(known, running)


def keep_records() -> None:
    """Write what this process has learned."""
    with _kept.lock:
        running, _kept.running = _kept.running, {}
        for key, costs in running.items():
            known = _kept.read[key] = _joined(_kept.read.get(key, Record()), costs)
            if known.passed:
                text = json.dumps({name: getattr(known, name) for name in _NUMBERS})
                try:
                    store.write_text(_path(key), text)
                except (DecoderyError, OSError):
                    # A cache that cannot be written to is no reason to fail.
                    return


def _joined(known: Record, running: list[AskCosts]) -> Record:
    sums = {name: getattr(known, name) + sum(getattr(each, name) for each in running) for name in _NUMBERS[:3]}
    last = running[-1] if running else known
    return Record(**sums, promised=last.promised, kept=last.kept)


def _load(path: Path) -> Record:
    try:
        fields = Fields(read_json(path), str(path), _KINDS)
        return Record(**{name: fields.get(name, 0.0) for name in _NUMBERS})
    except DecoderyError:
        return Record()


def _path(key: str) -> Path:
    return store.home() / "advisers" / f"{key}.json"


@cache
def _machine() -> list[Any]:
    found = describe()
    return [found[name] for name in _MACHINE]


def _key(model: Reader, adviser: str) -> str:
    text = json.dumps([_machine(), model.fingerprint, adviser])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
