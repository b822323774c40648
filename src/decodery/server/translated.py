"""Routes in the form of other services; each is a chat, or a completion, under another name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decodery.core.version import __version__

from . import anthropic, embeddings, messages, ollama, responses
from .dialect import OpenAI
from .errors import ApiError
from .fields import Body, ChatRequest, CompletionRequest, Shared
from .job import FinishedText, Update
from .plan import Form, Plan
from .response_items import messages_of
from .wire import Json, checked

if TYPE_CHECKING:
    from .app import Front

B = TypeVar("B", bound=Body)


class Translated:
    """The routes of Anthropic, Ollama and of OpenAI's responses.

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
        preprocessor, tools = self._front.preprocessor, messages.tools_in_use(chat)
        tokens, _ = await preprocessor.do(lambda: messages.encoded(preprocessor, chat.messages, tools))
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
        self._front.check_model(body.model)
        preprocessor = self._front.preprocessor
        found = await preprocessor.do(lambda: embeddings.readings(preprocessor, body))
        return await self._front.run(request, owner, Plan(found, 1, VectorForm(body)), Vectors(), body.ignored)

    async def _ollama_chat(self, request: Request) -> Response:
        owner, body = await self._read(request, ollama.OllamaChatRequest)
        return await self._front.respond(
            request, owner, self._chat(body, ollama.as_chat(body)), ollama.Ollama(chat=True)
        )

    async def _ollama_generate(self, request: Request) -> Response:
        owner, body = await self._read(request, ollama.OllamaGenerateRequest)
        asked, dialect = ollama.as_chat(body), ollama.Ollama(chat=False)
        if "messages" not in asked or self._front.preprocessor.lm.chat_template is not None:
            return await self._front.respond(request, owner, self._chat(body, asked), dialect)
        prompt = "\n\n".join(message["content"] for message in asked.pop("messages"))
        return await self._front.respond(request, owner, self._chat(body, asked | {"prompt": prompt}), dialect)

    async def _ollama_tags(self, request: Request) -> Response:
        self._front.owner(request)
        return Json({"models": [self._ollama_card()]})

    async def _ollama_show(self, request: Request) -> Response:
        _, body = await self._read(request, ollama.ShowRequest)
        self._front.check_model((body.model or body.name or "").removesuffix(":latest") or None)
        chat = self._front.preprocessor.lm.chat_template
        card = self._ollama_card()
        return Json(
            {
                "details": card["details"],
                "modified_at": card["modified_at"],
                "template": "" if chat is None else chat.source,
                "model_info": {"general.architecture": "", "context_length": self._front.preprocessor.context},
                "capabilities": ["completion", *(["tools"] if chat is not None else [])],
            }
        )

    async def _ollama_version(self, request: Request) -> Response:
        return Json({"version": __version__})

    def _ollama_card(self) -> dict[str, Any]:
        name, at = self._front.settings.name, datetime.fromtimestamp(self._front.created, UTC).isoformat()
        details = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
        return {"name": name, "model": name, "modified_at": at, "size": 0, "digest": "", "details": details}

    async def _read(self, request: Request, kind: type[B]) -> tuple[str, B]:
        owner = self._front.owner(request)
        body: B = await self._front.read(request, kind)
        return owner, body

    def _chat(self, body: Body, asked: dict[str, Any]) -> Any:
        """A translated request, which answers for the fields that nobody read."""
        kind: type[Shared] = ChatRequest if "messages" in asked else CompletionRequest
        chat = checked(asked, kind, strict=True)
        chat.ignore(body.ignored)
        return chat


@dataclass
class VectorForm(Form):
    """The vectors of a request."""

    body: embeddings.EmbeddingsRequest

    prefix, whole, chunk = "embd-", "list", "list"

    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        return {"object": "embedding", "index": index, "embedding": embeddings.vector_of(self.body, text.vector)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def grown(self, index: int, news: Update) -> list[dict[str, Any]]:
        return []

    def ended(self, index: int, news: Update, text: FinishedText) -> list[dict[str, Any]]:
        return [self.choice(index, text)]


class Vectors(OpenAI):
    """The answer to a request for vectors."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        tokens = answer["usage"]["prompt_tokens"]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": answer["choices"], "model": answer["model"], "usage": usage}


def written_error(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an error in the form of the service whose route this is."""
    if path.startswith("/v1/messages"):
        return anthropic.error(error)
    return {"error": error.message} if path.startswith("/api/") else error.body
