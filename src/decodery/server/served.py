"""The models of a server: each with an engine of its own, loaded when a request names it and unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from decodery.llm.llm import LLM

from . import chat, completions, llama_cpp
from .admission import Admission
from .errors import ApiError, as_api_error, stopping
from .fields import ChatRequest, CompletionRequest, Shared
from .metrics import Metrics
from .offered import offered
from .plan import Plan
from .request_preprocessor import RequestPreprocessor
from .service import Service
from .settings import GIB, ServerSettings

_LOG = logging.getLogger("decodery.server")
_LEAST = 0.05
"""Seconds between two looks at whether a model is idle, at least."""


@dataclass(frozen=True)
class ModelSource:
    """A model that a server loads when a request names it.

    Attributes:
        name: As clients know it.
        size: Gives the bytes of its weights; it may take long, as for a model that is downloaded.
        load: Loads it.
    """

    name: str
    size: Callable[[], int]
    load: Callable[[], LLM]


class ServedModel:
    """One loaded model: its engine's thread, and the preprocessor of its requests.

    Args:
        lm: The model.
        settings: The server's, with this model's name.
        metrics: What is counted, also from an earlier time that it was loaded.
        admission: Counts the texts of all models.

    Raises:
        SettingsError: If the server's search cannot be run on this model.
    """

    def __init__(self, lm: LLM, settings: ServerSettings, metrics: Metrics, admission: Admission) -> None:
        if settings.search is not None:
            settings.search.bind(lm.tokenizer).fits(lm.model)
        self.lm, self.settings = lm, settings
        self.service = Service(lm, settings, metrics, admission)
        self.preprocessor = RequestPreprocessor(lm, settings)
        self._offered: list[dict[str, Any]] | None = None

    async def plan(self, body: Shared) -> Plan:
        """What a request comes to. Raises ApiError."""
        if isinstance(body, ChatRequest):
            return await chat.plan(self.preprocessor, body)
        assert isinstance(body, CompletionRequest)
        return await completions.plan(self.preprocessor, body)

    async def offered(self) -> list[dict[str, Any]]:
        """The methods that a request may name."""
        if self._offered is None:
            self._offered = await self.preprocessor.do(partial(offered, self.settings.trust, self.lm.model))
        return self._offered

    def stop(self) -> None:
        """End its threads; all that still wait get an error."""
        self.service.stop()
        self.preprocessor.close()


class _Entry:
    """A name, and the model while it is loaded.

    Attributes:
        held: Bytes that it takes of the limit while it is loaded or being loaded.
        users: Requests that are being prepared for it.
        used: When it was last used, by a monotonic clock.
    """

    def __init__(self, source: ModelSource, metrics: Metrics) -> None:
        self.source, self.metrics = source, metrics
        self.model: ServedModel | None = None
        self.loading: asyncio.Task[ServedModel] | None = None
        self.unloading: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.held = self.users = 0
        self.used = 0.0

    @property
    def idle(self) -> bool:
        return self.model is not None and not self.users and self.model.service.idle

    @property
    def state(self) -> str:
        return "loaded" if self.model is not None else "loading" if self.loading is not None else "unloaded"


class ModelPool:
    """The models of a server by name. The first one stays loaded.

    All but `load` is called on the server's loop.

    Args:
        lm: The first model, named as the settings say.
        settings: The server's; `memory_bytes` bounds weights and KV caches of all that are loaded, and a model that
            has had no request for `idle_seconds` is unloaded.
        more: Those that are loaded when a request names them.
        size: Bytes of the first model's weights.
    """

    def __init__(self, lm: LLM, settings: ServerSettings, more: Sequence[ModelSource] = (), size: int = 0) -> None:
        self._settings = settings
        self.draining = False
        self.created = int(time.time())
        metrics = Metrics(settings.name, settings.kv_bytes)
        self._admission = Admission(settings)
        self.first = ServedModel(lm, settings, metrics, self._admission)
        first = _Entry(ModelSource(settings.name, lambda: size, lambda: lm), metrics)
        first.model, first.held = self.first, size + settings.kv_bytes
        self._entries = {settings.name: first}
        for source in more:
            self._entries[source.name] = _Entry(source, Metrics(source.name, settings.kv_bytes))

    @property
    def names(self) -> list[str]:
        """All names, loaded or not."""
        return list(self._entries)

    @property
    def loaded(self) -> list[ServedModel]:
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return all(entry.loading is None and (entry.model is None or entry.idle) for entry in self._entries.values())

    def states(self) -> dict[str, str]:
        """The state of each model by its name: loaded, loading or unloaded."""
        return {name: entry.state for name, entry in self._entries.items()}

    def context(self, name: str) -> int | None:
        """The longest text of a model, None while it is not loaded."""
        model = self._entries[name].model
        return None if model is None else model.preprocessor.context

    def slots(self, name: str) -> list[dict[str, Any]]:
        """What of a model is in progress; nothing while it is not loaded."""
        model = self._entries[name].model
        return [] if model is None else llama_cpp.slots(model.service, model.preprocessor.context)

    def load_figures(self) -> dict[str, Any]:
        """What all loaded models have to do, in sum."""
        figures = [asdict(model.service.load) for model in self.loaded]
        return {name: sum(each[name] for each in figures) for name in figures[0]}

    def metrics(self) -> list[Metrics]:
        """Of all models, those that were unloaded included."""
        return [entry.metrics for entry in self._entries.values()]

    def check(self, name: str | None) -> str:
        """The name of the model that a request means; None is the first.

        Raises:
            ApiError: There is no such model.
        """
        if name is None:
            return self._settings.name
        if name not in self._entries:
            known = ", ".join(map(repr, self.names))
            message = f"there is no model {name[:200]!r} here: use {known[:1000]}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """A model, loaded first where it is not; it stays loaded while this is open or its engine has work.

        Raises:
            ApiError: There is no such model, it cannot be loaded, or no memory is free for it.
        """
        entry = self._entries[self.check(name)]
        entry.users += 1
        try:
            yield entry.model or await self._load(entry)
        finally:
            entry.users -= 1
            entry.used = monotonic()
            if entry.model is not None and entry.model is not self.first:
                self._look_later(entry, self._settings.idle_seconds)

    def drain(self) -> None:
        """Take nothing more."""
        self.draining = True
        for model in self.loaded:
            model.service.draining = True

    def stop(self) -> None:
        """End all engines; all that still wait get an error. On any thread, after which the loop may end."""
        self.draining = True
        for model in self.loaded:
            model.stop()

    async def _load(self, entry: _Entry) -> ServedModel:
        """The model of an entry. Those who wait share one load, and it goes on where they leave."""
        if self.draining:
            raise stopping()
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._loaded(entry))
            entry.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(entry.loading)

    async def _loaded(self, entry: _Entry) -> ServedModel:
        source, settings = entry.source, replace(self._settings, name=entry.source.name)
        try:
            if entry.unloading is not None:
                await entry.unloading
            size = await asyncio.to_thread(source.size)
            await self._make_room(entry, size + settings.kv_bytes)
            entry.held = size + settings.kv_bytes
            model = await asyncio.to_thread(
                lambda: ServedModel(source.load(), settings, entry.metrics, self._admission)
            )
            model.service.on_failure = partial(self._failed, entry, asyncio.get_running_loop())
            if self.draining:
                raise stopping()
            model.service.start()
            entry.model, entry.used = model, monotonic()
            return model
        except Exception as error:
            entry.held = 0
            if isinstance(error, ApiError):
                raise
            _LOG.exception("the model %r cannot be loaded", source.name)
            found = as_api_error(error)
            why = found.message if found.status < 500 else f"loading failed ({type(error).__name__})"
            raise _unavailable(f"the model {source.name!r} cannot be loaded: {why}", "model_not_loaded") from error
        finally:
            entry.loading = None

    async def _make_room(self, entry: _Entry, wanted: int) -> None:
        """Unload idle models, those used longest ago first, until so many bytes are free. Raises ApiError."""
        limit, name = self._settings.memory_bytes, entry.source.name
        left = limit - self._entries[self._settings.name].held
        if wanted > left:
            raise _unavailable(
                f"the model {name!r} takes {wanted / GIB:.1f} GiB with its KV cache, and {max(left, 0) / GIB:.1f} GiB "
                "are left beside the first model: serve with a larger --memory-gib or a smaller --kv-gib",
                "out_of_memory",
            )
        others = [each for each in self._entries.values() if each is not entry]
        while sum(each.held for each in others) + wanted > limit:
            idle = [each for each in others if each.idle and each.model is not self.first]
            leaving = [each.unloading for each in others if each.unloading is not None]
            if leaving:
                await leaving[0]
            elif idle:
                await self._unload(min(idle, key=lambda each: each.used))
            else:
                raise _unavailable(
                    f"no memory is free for the model {name!r}: the loaded ones are in use", "models_in_use", 5
                )

    def _look_later(self, entry: _Entry, seconds: float) -> None:
        if entry.timer is None:
            entry.timer = asyncio.get_running_loop().call_later(max(seconds, _LEAST), self._look, entry)

    def _look(self, entry: _Entry) -> None:
        """Unload a model after `idle_seconds` without a request."""
        entry.timer = None
        if entry.model is None or self.draining:
            return
        if not entry.idle:
            entry.used = monotonic()
        left = entry.used + self._settings.idle_seconds - monotonic()
        if left > 0 or not entry.idle:
            self._look_later(entry, left)
        else:
            self._unload(entry)

    def _unload(self, entry: _Entry) -> asyncio.Task[None]:
        assert entry.model is not None
        model, entry.model = entry.model, None

        async def unload() -> None:
            try:
                await asyncio.to_thread(model.stop)
            finally:
                entry.metrics.unloaded()
                entry.unloading, entry.held = None, 0

        entry.unloading = asyncio.create_task(unload())
        return entry.unloading

    def _failed(self, entry: _Entry, loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
        """On the thread of an engine that an error ended: the next request loads the model anew."""
        _LOG.error("the engine of %r failed: %s: %s", entry.source.name, type(error).__name__, error)
        loop.call_soon_threadsafe(self._drop, entry)

    def _drop(self, entry: _Entry) -> None:
        entry.metrics.unloaded()
        entry.model, entry.held = None, 0


def _unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    return ApiError(503, message, kind="server_error", param="model", code=code, retry_after=retry_after)
