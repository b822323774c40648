"""Routes in the form of other services; each is a chat, or a completion, under another name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decodery.core.version import __version__

from . import anthropic, embeddings, llama_cpp, messages, ollama, responses, scoring
from .dialect import Dialect, Rewritten
from .errors import ApiError
from .fields import Body, ChatRequest, CompletionRequest, Shared, StreamOptions
from .plan import Plan
from .request_preprocessor import RequestPreprocessor
from .response_items import messages_of
from .wire import Json, checked

if TYPE_CHECKING:
    from .app import Front

B = TypeVar("B", bound=Body)


class Translated:
    """The routes of Anthropic, Ollama and llama.cpp, of OpenAI's responses, and of rerankers.

    Args:
        front: Whose requests these become.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._kept = responses.Kept()

    def routes(self) -> list[Route]:
        """The routes."""
        posts: dict[str, Callable[[Request], Any]] = {
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/responses": self._respond,
            "/v1/embeddings": self._embeddings,
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"), self._rerank),
            **dict.fromkeys(("/score", "/v1/score"), self._score),
            "/infill": self._infill,
            "/api/chat": self._ollama_chat,
            "/api/generate": self._ollama_generate,
            "/api/show": self._ollama_show,
        }
        one = "/v1/responses/{response}"
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            Route(one, self._response, methods=["GET"]),
            Route(one, self._drop_response, methods=["DELETE"]),
            Route("/api/tags", self._ollama_tags),
            Route("/api/version", self._ollama_version),
        ]

    async def _messages(self, request: Request) -> Response:
        owner, body = await self._read(request, anthropic.MessagesRequest)
        chat = self._chat(body, anthropic.as_chat(body))
        return await self._front.respond(request, owner, chat, anthropic.Anthropic())

    async def _count_tokens(self, request: Request) -> Response:
        _, body = await self._read(request, anthropic.CountRequest)
        chat = self._chat(body, anthropic.as_chat(body))
        tools = messages.tools_in_use(chat)
        async with self._front.models.use(body.model) as served:
            preprocessor = served.preprocessor
            work = preprocessor.do(lambda: messages.encoded(preprocessor, chat.messages, tools))
            tokens, _ = await self._front.prepared(request, work)
        return Json({"input_tokens": len(tokens)})

    async def _respond(self, request: Request) -> Response:
        owner, body = await self._read(request, responses.ResponsesRequest)
        name = body.previous_response_id
        earlier = [] if name is None else self._kept.messages(owner, name)
        asked = responses.as_chat(body, earlier)
        read = asked["messages"] if body.instructions is None else asked["messages"][1:]

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                self._kept.put(owner, response, [*read, *messages_of(response["output"])])

        dialect = responses.Responses(body, keep)
        return await self._front.respond(request, owner, self._chat(body, asked), dialect)

    async def _response(self, request: Request) -> Response:
        return Json(self._kept.response(self._front.owner(request), request.path_params["response"]))

    async def _drop_response(self, request: Request) -> Response:
        name = request.path_params["response"]
        self._kept.drop(self._front.owner(request), name)
        return Json({"id": name, "object": "response", "deleted": True})

    async def _embeddings(self, request: Request) -> Response:
        owner, body = await self._read(request, embeddings.EmbeddingsRequest)
        return await self._numbers(request, owner, body, embeddings.plan, Rewritten(embeddings.vectors))

    async def _rerank(self, request: Request) -> Response:
        owner, body = await self._read(request, scoring.RerankRequest)
        return await self._numbers(request, owner, body, scoring.plan, scoring.written(body))

    async def _score(self, request: Request) -> Response:
        owner, body = await self._read(request, scoring.ScoreRequest)
        return await self._numbers(request, owner, body, scoring.plan, scoring.written(body))

    async def _numbers(
        self,
        request: Request,
        owner: str,
        body: Any,
        plan: Callable[[RequestPreprocessor, Any], Plan],
        dialect: Dialect,
    ) -> Response:
        async with self._front.models.use(body.model) as served:
            planning = served.preprocessor.do(lambda: plan(served.preprocessor, body))
            return await self._front.run(request, owner, served, planning, dialect, body)

    async def _infill(self, request: Request) -> Response:
        owner, body = await self._read(request, llama_cpp.InfillRequest)
        body.n = body.n or 1
        self._front.fill(body, owner)
        dialect = llama_cpp.LlamaCpp(body.response_fields)
        async with self._front.models.use(body.model) as served:
            work = served.preprocessor.do(lambda: llama_cpp.completion(served.preprocessor, body))
            asked = await self._front.prepared(request, work)
            if asked.stream:
                asked.stream_options = StreamOptions(include_usage=True)
            return await self._front.run(request, owner, served, served.plan(asked), dialect, asked)

    async def _ollama_chat(self, request: Request) -> Response:
        owner, body = await self._read(request, ollama.OllamaChatRequest)
        return await self._front.respond(
            request, owner, self._chat(body, ollama.as_chat(body)), ollama.Ollama(chat=True)
        )

    async def _ollama_generate(self, request: Request) -> Response:
        owner, body = await self._read(request, ollama.OllamaGenerateRequest)
        asked, dialect = ollama.as_chat(body), ollama.Ollama(chat=False)
        async with self._front.models.use(asked["model"]) as served:
            if "messages" in asked and served.lm.chat_template is None:
                asked["prompt"] = "\n\n".join(message["content"] for message in asked.pop("messages"))
            return await self._front.respond(request, owner, self._chat(body, asked), dialect)

    async def _ollama_tags(self, request: Request) -> Response:
        self._front.owner(request)
        return Json({"models": [self._ollama_card(name) for name in self._front.models.names]})

    async def _ollama_show(self, request: Request) -> Response:
        _, body = await self._read(request, ollama.ShowRequest)
        name = (body.model or body.name or "").removesuffix(":latest") or None
        async with self._front.models.use(name) as served:
            chat, context = served.lm.chat_template, served.preprocessor.context
        card = self._ollama_card(served.settings.name)
        return Json(
            {
                "details": card["details"],
                "modified_at": card["modified_at"],
                "template": "" if chat is None else chat.source,
                "model_info": {"general.architecture": "", "context_length": context},
                "capabilities": ["completion", *(["tools"] if chat is not None else [])],
            }
        )

    async def _ollama_version(self, request: Request) -> Response:
        return Json({"version": __version__})

    def _ollama_card(self, name: str) -> dict[str, Any]:
        at = datetime.fromtimestamp(self._front.models.created, UTC).isoformat()
        details = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
        return {"name": name, "model": name, "modified_at": at, "size": 0, "digest": "", "details": details}

    async def _read(self, request: Request, kind: type[B]) -> tuple[str, B]:
        owner = self._front.owner(request)
        body: B = await self._front.read(request, kind)
        return owner, body

    def _chat(self, body: Body, asked: dict[str, Any]) -> Any:
        """A translated request, and the check of its unread fields."""
        kind: type[Shared] = ChatRequest if "messages" in asked else CompletionRequest
        # These forms have one text, whatever the default of a key is.
        chat = checked(asked | {"n": 1}, kind, strict=True)
        chat.ignore(body.ignored)
        return chat


def written_error(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an error in the form of the service whose route this is."""
    if path.startswith("/v1/messages"):
        return anthropic.error(error)
    return {"error": error.message} if path.startswith("/api/") else error.body
