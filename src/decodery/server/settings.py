"""What a server allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decodery.constraints.base import ConstraintSpec
from decodery.core.errors import SettingsError
from decodery.core.machine import cards, largest_memory, usable_memory
from decodery.search.base import Search
from decodery.step.monitor import Monitor
from decodery.step.scorer import Scorer

GIB = 1 << 30


@dataclass(frozen=True)
class ServerSettings:
    """Limits of a server, for all who use it.

    Attributes:
        name: The model's, as clients know it.
        max_queue: Texts that wait beside those in progress.
        max_running: Texts in progress.
        rows: Of one pass.
        chunk: Of a prompt in one pass.
        pass_seconds: That a pass is to take while texts are written; longer prompts are read in smaller chunks for it.
        kv_bytes: Of keys and values, of texts in progress and of those kept for later ones.
        body_bytes: Of a request.
        description_bytes: Of a schema, grammar or list of tools in it.
        seconds: For one request, from its arrival; what is written by then is its answer.
        max_texts: Of one request at a time (prompts times `n`, branches of a search), once for each model that reads
            them.
        max_texts_per_key: Of all requests of one key at a time.
        side_seconds: For scorers, tests of programs, patterns and grammars of one request.
        drain_seconds: For what is in progress when the server is to stop.
        keys: Name by secret of those who may use it; none lets everybody.
        trust: Whether requests may name files, models and programs.
        strict: Refuse fields that are not known.
        hosts: Names under which the server is reached; "*" is any. By default local names where it listens on a local
            address, and any elsewhere.
        origins: Pages in browsers that may use it, such as "https://example.org"; none by default but its own.
        metrics_key: Whether /metrics needs a key as well.
        guards: Monitors of every text, which no request can leave out.
        constraint: What every text follows, which no request can leave out.
        defaults: By the name of a key, fields of requests that leave them out.
        scorer: What `/v1/rerank` and `/score` rate documents by where a request names no scorer.
        memory_bytes: Of the weights and KV caches of all loaded models, where several are served.
        idle_seconds: Seconds without a request after which a model is unloaded; the first one stays.
        search: Answers every request for a text; None lets requests name one.
    """

    name: str = "model"
    max_queue: int = 256
    max_running: int = 64
    rows: int = 512
    chunk: int = 128
    pass_seconds: float = 0.25
    kv_bytes: int = 2 * GIB
    body_bytes: int = 4 << 20
    description_bytes: int = 64 << 10
    seconds: float = 600.0
    max_texts: int = 128
    max_texts_per_key: int = 256
    side_seconds: float = 60.0
    drain_seconds: float = 30.0
    keys: Mapping[str, str] = field(default_factory=dict)
    trust: bool = False
    strict: bool = False
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    metrics_key: bool = False
    guards: Sequence[Monitor] = ()
    constraint: ConstraintSpec | None = None
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scorer: Scorer | str = "question-likelihood"
    memory_bytes: int = 1 << 62
    idle_seconds: float = 300.0
    search: Search | None = None

    def __post_init__(self) -> None:
        least = {"max_running": 1, "rows": 1, "chunk": 1, "kv_bytes": 1, "body_bytes": 1, "max_texts": 1}
        for name, bound in {
            **least,
            "max_texts_per_key": 1,
            "max_queue": 0,
            "drain_seconds": 0,
            "idle_seconds": 0,
        }.items():
            if getattr(self, name) < bound:
                raise SettingsError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if self.search is not None and self.search.texts_at_once > self.max_texts:
            texts = self.search.texts_at_once
            raise SettingsError(
                f"the search of this server follows {texts} texts at a time, and a request may have {self.max_texts}: "
                "give the search fewer"
            )
        for name in ("seconds", "pass_seconds", "side_seconds"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be above 0, not {getattr(self, name)}")


def kv_bytes(gib: float | None, *, elsewhere: bool = False) -> int:
    """Bytes for keys and values: so many GiB, without a number `quarter_of_memory`.

    Args:
        gib: As the user says, None for the quarter.
        elsewhere: Whether they lie on other machines, whose memory is unknown.
    """
    return quarter_of_memory() if gib is None else _bytes(gib, "--kv-gib", elsewhere=elsewhere)


def quarter_of_memory() -> int:
    """A quarter of the memory where models lie: the first graphics card's, or the machine's without one.

    2 GiB where nothing is known.
    """
    found = next(iter(cards()), None) or usable_memory()
    return 2 * GIB if found is None else found // 4


def memory_bytes(gib: float | None) -> int:
    """Bytes for all loaded models: so many GiB, without a number three times `quarter_of_memory`."""
    return 3 * quarter_of_memory() if gib is None else _bytes(gib, "--memory-gib")


def _bytes(gib: float, option: str, *, elsewhere: bool = False) -> int:
    """Bytes of so many GiB. Raises SettingsError for none, and for more than are here."""
    if not 0 < gib < float("inf"):
        raise SettingsError(f"{option} must be above 0, not {gib}")
    if not elsewhere and gib * GIB > (most := largest_memory() or float("inf")):
        raise SettingsError(f"{option} asks for {gib:g} GiB of memory, and {most / GIB:.1f} GiB are here: give less")
    return int(gib * GIB)
