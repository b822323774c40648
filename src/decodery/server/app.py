"""The routes of a server."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from decodery.core.fair_slots import caller
from decodery.core.version import __version__
from decodery.llm.llm import LLM

from . import llama_cpp, openapi, page
from .dialect import Dialect, OpenAI
from .errors import ApiError
from .fields import Body, ChatRequest, CompletionRequest, DetokenizeRequest, Shared, TokenizeRequest
from .front_door import middleware
from .key_defaults import KeyDefaults
from .keys import Keys
from .metrics import exposition
from .plan import Plan
from .request_handler import RequestHandler
from .served import ModelPool, ModelSource, ServedModel
from .service import Service
from .settings import ServerSettings
from .translated import Translated, written_error
from .wire import ClientGone, Json, prepared, read, respond

T = TypeVar("T")

_GONE = 499
"""The status of a request whose client has left."""
_SLOW = 60.0
"""Seconds that a reader may take for a stream, beyond what the text may."""


class Front:
    """What clients meet: the models, and the keys to them.

    Args:
        lm: The model.
        settings: Limits, names and keys.
        more: Further models, which are loaded when a request names them.
        size: Bytes of the first model's weights, which count where there are further ones.
    """

    def __init__(self, lm: LLM, settings: ServerSettings, more: Sequence[ModelSource] = (), size: int = 0) -> None:
        self.settings = settings
        self.models = ModelPool(lm, settings, more, size)
        self.keys = Keys(settings.keys)
        self._defaults = {name: KeyDefaults(fields) for name, fields in settings.defaults.items()}

    @property
    def service(self) -> Service:
        """The engine's thread of the first model."""
        return self.models.first.service

    def app(self, routes: Sequence[BaseRoute] = (), host: str = "127.0.0.1") -> Starlette:
        """The application.

        Args:
            routes: Further routes.
            host: Where it listens.
        """
        routes = [
            *routes,
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/decodery/load", self._load),
            Route("/slots", self._slots),
            Route("/decodery/methods", self._methods),
            Route("/openapi.json", self._openapi),
            *Translated(self).routes(),
            *page.routes(),
        ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            ApiError: _refused,
            ClientGone: _gone,
            HTTPException: _not_found,
        }
        before = middleware(self.settings, host)
        return Starlette(routes=routes, exception_handlers=handlers, middleware=before)

    async def answer(self, body: ChatRequest | CompletionRequest, owner: str) -> dict[str, Any]:
        """A request's answer as one object, for those who are in this process. Raises ApiError."""
        caller.set(owner)
        async with self.models.use(body.model) as served:
            handler = RequestHandler(served.service, await served.plan(body), owner)
            try:
                await handler.open()
                return await handler.whole()
            finally:
                handler.close()

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, ChatRequest)

    async def _completions(self, request: Request) -> Response:
        return await self._respond(request, CompletionRequest)

    async def _respond(self, request: Request, kind: type[Shared]) -> Response:
        owner = self.owner(request)
        return await self.respond(request, owner, await self.read(request, kind), OpenAI())

    async def respond(self, request: Request, owner: str, body: Shared, dialect: Dialect) -> Response:
        """The answer to a request in the form of a dialect. Raises ApiError."""
        self.fill(body, owner)
        async with self.models.use(body.model) as served:
            return await self.run(request, owner, served, served.plan(body), dialect, body)

    def fill(self, body: Shared, owner: str) -> None:
        """Set what a request leaves out and its key has a default for."""
        if owner in self._defaults:
            self._defaults[owner].fill(body)

    async def run(
        self, request: Request, owner: str, served: ServedModel, planning: Awaitable[Plan], dialect: Dialect, body: Body
    ) -> Response:
        """The answer to what is planned for a body. Raises ApiError."""
        arrived = monotonic()
        plan = await self.prepared(request, planning)
        handler = RequestHandler(served.service, plan, owner, arrived)
        seconds = self.settings.seconds + _SLOW
        return await respond(request, handler, dialect, body.ignored, stream=plan.stream, seconds=seconds)

    async def prepared(self, request: Request, work: Awaitable[T]) -> T:
        """What a request needs before it is answered, see `wire.prepared`. Raises ApiError."""
        return await prepared(request, work, self.settings.seconds)

    def owner(self, request: Request) -> str:
        """The name of the key that a request came with; Anthropic's clients have a header of their own for it."""
        owner = self.keys.owner(request.headers.get("authorization") or request.headers.get("x-api-key"))
        caller.set(owner)
        return owner

    async def read(self, request: Request, kind: type[Any]) -> Any:
        """The body of a request. Raises ApiError."""
        return await read(request, kind, self.settings.body_bytes, strict=self.settings.strict)

    async def _models(self, request: Request) -> Response:
        self.owner(request)
        return Json({"object": "list", "data": [self._card(name) for name in self.models.names]})

    async def _model(self, request: Request) -> Response:
        self.owner(request)
        return Json(self._card(self.models.check(request.path_params["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.models.created, "owned_by": "decodery"}
        return card | {"max_model_len": self.models.context(name), "status": {"value": self.models.states()[name]}}

    async def _tokenize(self, request: Request) -> Response:
        self.owner(request)
        body: TokenizeRequest = await self.read(request, TokenizeRequest)
        async with self.models.use(body.model) as served:
            work = served.preprocessor.do(partial(llama_cpp.tokenized, served.preprocessor, body))
            return Json(await self.prepared(request, work))

    async def _detokenize(self, request: Request) -> Response:
        self.owner(request)
        body: DetokenizeRequest = await self.read(request, DetokenizeRequest)
        async with self.models.use(body.model) as served:
            decode = partial(served.lm.tokenizer.decode, body.tokens, special=True)
            text = await self.prepared(request, served.preprocessor.do(decode))
        # vLLM names it prompt, and llama.cpp content.
        return Json({"prompt": text, "content": text})

    async def _tokenizer_info(self, request: Request) -> Response:
        self.owner(request)
        async with self.models.use(request.query_params.get("model")) as served:
            lm = served.lm
        ids = {"bos_token": lm.tokenizer.bos_id, "eos_token": next(iter(lm.tokenizer.eos_ids), None)}
        found = {
            name: None if id is None else lm.tokenizer.piece(id).decode("utf-8", "replace") for name, id in ids.items()
        }
        return Json({**found, "chat_template": None if lm.chat_template is None else lm.chat_template.source})

    async def _health(self, request: Request) -> Response:
        if self.service.failure is not None:
            message = f"the engine failed: {type(self.service.failure).__name__}"
            raise ApiError(503, message, kind="server_error", code="engine_failed")
        return Json({"status": "stopping" if self.models.draining else "ok"})

    async def _ready(self, request: Request) -> Response:
        if not self.service.alive or self.models.draining or self.service.full:
            why = "the queue is full" if self.service.alive and self.service.full else "the server is not ready"
            raise ApiError(503, why, kind="server_error", code="not_ready", retry_after=1)
        return Json({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        if self.settings.metrics_key:
            self.owner(request)
        found = exposition(self.models.metrics())
        return Response(found, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, request: Request) -> Response:
        return Json({"version": __version__})

    async def _load(self, request: Request) -> Response:
        limits = {"max_running": self.settings.max_running, "max_queue": self.settings.max_queue}
        figures = {**self.models.load_figures(), **limits, "models": self.models.states()}
        return Json(figures | {"draining": self.models.draining})

    async def _slots(self, request: Request) -> Response:
        self.owner(request)
        name = self.models.check(request.query_params.get("model"))
        found = self.models.slots(name)
        if (
            request.query_params.get("fail_on_no_slot") not in (None, "", "0")
            and found
            and all(each["is_processing"] for each in found)
        ):
            raise ApiError(503, "no slot is free", kind="server_error", code="no_slot", retry_after=1)
        return Json(found)

    async def _methods(self, request: Request) -> Response:
        self.owner(request)
        async with self.models.use(request.query_params.get("model")) as served:
            return Json({"object": "list", "data": await served.offered()})

    async def _openapi(self, request: Request) -> Response:
        return Json(openapi.document(keys=bool(self.settings.keys)))


async def _refused(request: Request, error: ApiError) -> Response:
    return Json(written_error(request.url.path, error), error.status, headers=error.headers)


async def _gone(request: Request, error: ClientGone) -> Response:
    return Response(status_code=_GONE)


async def _not_found(request: Request, error: HTTPException) -> Response:
    path, given = request.url.path, f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        message = (
            f"there is no {given} here: {_nearest(path, {getattr(each, 'path', '') for each in request.app.routes})}"
        )
    elif error.status_code == 405:
        message = f"there is no {given} here: use {(error.headers or {}).get('Allow', 'another method')}"
    else:
        message = f"{given}: {error.detail}"
    return Json(written_error(path, ApiError(error.status_code, message)), error.status_code, headers=error.headers)


def _nearest(path: str, known: set[str]) -> str:
    """What to do about a path that is no route."""
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant and meant in known:
            return f"did you mean {meant}? The base URL of OpenAI's clients ends with one /v1"
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    return f"did you mean {near[0]}?" if near else "GET /openapi.json lists all routes"
