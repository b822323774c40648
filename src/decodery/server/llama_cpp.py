"""llama.cpp's own routes: `/infill`, its forms of `/tokenize` and `/detokenize`, and `/slots`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictStr

from decodery.models.tokenizers.tokenizer import Tokenizer

from . import answer
from .dialect import Dialect, event
from .errors import invalid
from .fields import CompletionRequest, Shared, TokenizeRequest
from .messages import encoded
from .request_preprocessor import RequestPreprocessor
from .service import Service


class ExtraFile(BaseModel):
    """A file that the model reads first."""

    filename: StrictStr = "tmp"
    text: StrictStr


class InfillRequest(Shared):
    """`POST /infill`: what stands between two texts, from a model trained to fill gaps.

    Attributes:
        prompt: Goes on with `input_prefix`.
        input_extra: Files that the model reads first.
        response_fields: What is returned, by name; a path such as "timings/prompt_n" names what lies inside.
        samplers, n_indent: Hints of editors that change nothing here.
    """

    input_prefix: StrictStr = ""
    input_suffix: StrictStr = ""
    input_extra: Annotated[list[ExtraFile], Field(max_length=1024)] | None = None
    prompt: StrictStr = ""
    response_fields: Annotated[list[StrictStr], Field(max_length=64)] | None = None
    samplers: list[StrictStr] | None = None
    n_indent: int | None = None


def completion(preprocessor: RequestPreprocessor, body: InfillRequest) -> CompletionRequest:
    """The same request as a completion of tokens.

    Raises:
        ApiError: For a model without tokens for gaps, and for several texts.
    """
    if body.n is not None and body.n > 1:
        raise invalid("infill gives one text: leave n out", "n")
    files = [(each.filename, each.text) for each in body.input_extra or ()]
    for text in (body.input_prefix, body.input_suffix, body.prompt, *(text for _, text in files)):
        preprocessor.check_length(text)
    tokens = preprocessor.lm.tokenizer.infill(body.input_prefix + body.prompt, body.input_suffix, files)
    if tokens is None:
        raise invalid("this model has no tokens to fill gaps with: serve one trained to, such as Qwen2.5-Coder")
    shared = {name: getattr(body, name) for name in Shared.model_fields}
    if shared["max_tokens"] is None:
        shared["max_tokens"] = preprocessor.room(len(tokens), None, None)
    found = CompletionRequest.model_construct(**shared, prompt=tokens)
    hints = [name for name in ("samplers", "n_indent") if getattr(body, name)]
    found.ignore([*body.ignored, *hints])
    return found


class LlamaCpp(Dialect):
    """Answers in the form of llama.cpp's completions.

    Args:
        fields: What is returned of an answer that is no stream; all by default.
    """

    def __init__(self, fields: list[str] | None = None) -> None:
        self._fields = fields

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        found = self._last(answer, choice, answer["usage"], choice["text"])
        if self._fields is None:
            return found
        picked = {path: _inside(found, path) for path in self._fields}
        return {path: value for path, value in picked.items() if value is not None}

    async def stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        head, last, usage = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        async for chunk in chunks:
            if "error" in chunk:
                yield event(chunk)
                return
            head, usage = chunk, chunk.get("usage") or usage
            for choice in chunk["choices"]:
                last = choice if choice.get("finish_reason") else last
                if choice["text"]:
                    yield event({"index": 0, "content": choice["text"], "tokens": [], "stop": False, "id_slot": -1})
        yield event(self._last(head, last, usage, ""))

    def _last(
        self, head: Mapping[str, Any], choice: Mapping[str, Any], usage: Mapping[str, Any], text: str
    ) -> dict[str, Any]:
        stop, full = choice.get("stop_reason"), bool(choice.get("decodery", {}).get("context_full"))
        kind = "limit" if choice.get("finish_reason") == "length" else "word" if isinstance(stop, str) else "eos"
        written, read = usage["completion_tokens"], usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            **{"index": 0, "content": text, "tokens": [], "id_slot": -1, "stop": True, "model": head["model"]},
            **{"tokens_predicted": written, "tokens_evaluated": read, "tokens_cached": cached},
            **{"stop_type": kind, "stopping_word": stop if isinstance(stop, str) else "", "truncated": full},
            "timings": {"cache_n": cached, "prompt_n": read - cached, "predicted_n": written},
        }


def _inside(found: Any, path: str) -> Any:
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def tokenized(preprocessor: RequestPreprocessor, body: TokenizeRequest) -> dict[str, Any]:
    """The tokens of a text or a conversation, in the form of who asked.

    Raises:
        ApiError: For one that is too long, and for more than one text.
    """
    if sum(each is not None for each in (body.prompt, body.messages, body.content)) != 1:
        raise invalid("give one of prompt, messages and content", "prompt")
    tokenizer = preprocessor.lm.tokenizer
    preprocessor.check_length(body.prompt or body.content or "")
    if body.content is not None:
        spans = [] if body.parse_special else [(0, len(body.content))]
        ids = tokenizer.encode_content(body.content, spans, special=body.add_special).ids
        return {"tokens": [{"id": id, "piece": _piece(tokenizer, id)} for id in ids] if body.with_pieces else ids}
    if body.messages is not None:
        ids, _ = encoded(
            preprocessor,
            body.messages,
            body.tools or (),
            variables=body.chat_template_kwargs,
            continue_final_message=bool(body.continue_final_message),
        )
    else:
        ids = tokenizer.encode(body.prompt or "", special=body.add_special_tokens)
    found = {"tokens": ids, "count": len(ids), "max_model_len": preprocessor.context}
    texts = [answer.token_text(tokenizer, id) for id in ids] if body.return_token_strs else None
    return found | ({} if texts is None else {"token_strs": texts})


def _piece(tokenizer: Tokenizer, id: int) -> str | list[int]:
    """A token's text, or its bytes where these are no text by themselves."""
    piece = tokenizer.piece(id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def slots(service: Service, context: int) -> list[dict[str, Any]]:
    """What is in progress, text by text, and the places that are free."""
    busy: list[dict[str, Any]] = []
    for job in service.in_progress():
        most = getattr(job.request, "max_new_tokens", None)
        left = {} if most is None or job.search is not None else {"n_remain": max(most - job.sent, 0)}
        busy.append(
            {
                "is_processing": True,
                "n_prompt_tokens": len(job.request.prompt),
                "next_token": {"has_next_token": True, "n_decoded": job.sent, **left},
            }
        )
    free = [{"is_processing": False}] * max(service.settings.max_running - len(busy), 0)
    return [{"id": number, "n_ctx": context, **each} for number, each in enumerate([*busy, *free])]
