"""A model on any OpenAI-compatible server, used like one that was loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import Any, cast

from decodery.core.conversation import Prompt, PromptTokens
from decodery.core.errors import PromptError, SettingsError, UnsupportedModel
from decodery.core.settings import checked
from decodery.engine.remote import PLAIN_PROMPT, RemoteModel
from decodery.engine.request import Request
from decodery.models.loaders.endpoint import Endpoint, Settings
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.pieces import PROMPT
from decodery.sampling.constraint import Constraint

from .llm import LLM
from .prompts import one


class RemoteLLM(LLM):
    """An `LLM` whose texts a server writes.

    `LLM.generate`, `LLM.stream` and searches by whole texts work on it.

    What needs more of a model than its texts is refused in a sentence: drafters, constraints, sources, and searches
    that score tokens. Texts that a server breaks off come with `complete=False`; where none came at all, the error is
    raised.
    """

    def __init__(self, model: RemoteModel) -> None:
        super().__init__(LoadedModel(model, cast(Any, model.pieces), None, model.offers.model, "remote"))

    def encode(
        self,
        prompt: Prompt | Ordered[int],
        *,
        apply_chat_template: bool = True,
        allow_special: bool = False,
        tools: Ordered[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """One number that stands for the whole prompt, which only the server reads."""
        if allow_special:
            raise SettingsError("the server decides which special tokens it reads: leave out allow_special")
        sent = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        for name, value in (sent | {"continue_final_message": continue_final_message}).items():
            if value:
                raise SettingsError(
                    f"{name} is not sent to a server here: leave it out, or use the server's own client"
                )
        prompt = one(prompt)
        if isinstance(prompt, PromptTokens):
            raise PromptError("a server's token ids are not known here: give the prompt as a text")
        if not apply_chat_template and not isinstance(prompt, str):
            raise SettingsError(
                "chat messages are rendered by the server: leave out apply_chat_template=False, or give a text"
            )
        return [PROMPT if apply_chat_template else PLAIN_PROMPT]

    def request(self, tokens: Ordered[int], **settings: Any) -> Request:
        """See `LLM.request`; the drafter "auto" is none, for servers draft as they like."""
        if settings.get("stop_token_ids"):
            raise SettingsError("a server's token ids are not known here: give the texts to stop at as stop")
        drafter = settings.pop("drafter", None)
        return super().request(tokens, drafter=None if drafter == "auto" else drafter, **settings)

    def _compiled(self, constraint: Any) -> Constraint:
        raise UnsupportedModel(
            "a constraint needs every token's probability, which a server does not give: load the model here with "
            "decodery.load"
        )


@checked()
def remote(
    url: str,
    model: str | None = None,
    *,
    key: str | None = None,
    timeout: float = 60.0,
    seconds: float = 600.0,
    connections: int = 16,
    retries: int = 4,
) -> RemoteLLM:
    """The model of an OpenAI-compatible server, such as http://localhost:8000.

    What the server can do is found out now, by asking for one token by each route.

    Args:
        url: Of the server, with or without /v1.
        model: As the server names it; it may be left out where there is one.
        key: Sent as a bearer token.
        timeout: Seconds without any sign of life of a text, after which it is broken off.
        seconds: That a whole one may take.
        connections: Texts asked for at a time.
        retries: Of a request to a server that is busy (429, 503 and the like) or away, with growing pauses, before it
            has answered.

    Raises:
        ServerError: If there is no such server.
        SettingsError: If a setting is out of range.
    """
    if connections < 1:
        raise SettingsError(f"a remote model needs at least one connection, not {connections}")
    endpoint = Endpoint(Settings(url, key, timeout, seconds, retries))
    return RemoteLLM(RemoteModel(endpoint, endpoint.probe(model), connections))
