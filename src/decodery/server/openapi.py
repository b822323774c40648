"""The OpenAPI document of a server, made from the fields of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from decodery.core.version import __version__

from .fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .llama_cpp import InfillRequest
from .scoring import RerankRequest, ScoreRequest

_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/completions": (CompletionRequest, "Continue texts, or tokens."),
    "/v1/rerank": (RerankRequest, "Documents by how well they fit a query."),
    "/score": (ScoreRequest, "How well documents fit a query."),
    "/infill": (InfillRequest, "What stands between two texts."),
    "/tokenize": (TokenizeRequest, "The tokens of a text or of a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of some tokens."),
}
_GETS = {
    "/v1/models": "The models that are served.",
    "/v1/models/{model}": "One of them.",
    "/slots": "Texts in progress, and free places.",
    "/tokenizer_info": "What begins and ends a text, and the chat template.",
    "/health": "Whether the engine runs.",
    "/ready": "Whether a request would be taken.",
    "/metrics": "Figures for Prometheus.",
    "/version": "The version of decodery.",
    "/decodery/load": "What is in progress and waits.",
    "/decodery/methods": "The methods that a request may name.",
}
_OPEN = {"/health", "/ready", "/metrics", "/version", "/decodery/load"}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(*, keys: bool) -> dict[str, Any]:
    """The document.

    Args:
        keys: Whether the server asks for one.
    """
    kinds = [(kind, "validation") for kind, _ in _POSTS.values()]
    _, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = {**definitions["$defs"], "Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, (kind, what) in _POSTS.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if path.startswith("/v1"):
            answer["text/event-stream"] = {"schema": {}}
        statuses = (400, 401, 404, 408, 413, 415, 429, 503)
        body = {"required": True, "content": content}
        paths[path] = {"post": {"summary": what, "requestBody": body, "responses": _responses(answer, statuses)}}
    for path, what in _GETS.items():
        kind_of = "text/plain" if path == "/metrics" else "application/json"
        shape = {"type": "string"} if path == "/metrics" else {"type": "object"}
        refused = (401, 404) if "{" in path else (401, 503)
        paths[path] = {"get": {"summary": what, "responses": _responses({kind_of: {"schema": shape}}, refused)}}
        if "{" in path:
            name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            paths[path]["get"]["parameters"] = [name]
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "decodery", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in paths.items():
            for operation in operations.values():
                operation["security"] = [] if path in _OPEN else [{"key": []}]
    return found


def _responses(content: dict[str, Any], statuses: Sequence[int]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    return found | {str(status): {"description": "Refused.", "content": error} for status in statuses}
