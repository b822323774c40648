"""A server that speaks OpenAI's protocol: what it can do, asked once, and the streams of texts that it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decodery.core.errors import ServerError, ServerRefused, SettingsError

if TYPE_CHECKING:
    import httpx

CHAT, PLAIN = "/chat/completions", "/completions"
_PREFILLS: tuple[dict[str, bool], ...] = (
    {"continue_final_message": True, "add_generation_prompt": False},
    {"continue_final_message": True},
    {},
)
"""How servers are asked to go on with the last message: vLLM and SGLang, this package, llama.cpp."""
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What leaves a distribution as it is: without them vLLM takes those of the model's generation_config.json, and
llama.cpp cuts the distribution by defaults of its own. Not every server has these fields."""
_BUSY = {408, 425, 429, 500, 502, 503, 504}
_REFUSED = {400, 413, 422}
"""Statuses after which the same request may succeed later."""
_MOST_EVENT, _MOST_REPLY = 1 << 22, 1 << 24
_CONNECT_SECONDS, _PROBE_SECONDS = 10.0, 120.0
_FIRST_WAIT, _MOST_WAIT = 0.5, 30.0
_SAID = 200


@dataclass(frozen=True)
class Offers:
    """What a server was found to do.

    Attributes:
        model: As it names it.
        chat, plain: Routes that are there.
        logprobs: How many likely tokens it tells of beside each, None where it tells of none, by route.
        cuts: Whether it has the fields of `NEUTRAL`.
    """

    model: str
    chat: bool
    plain: bool
    logprobs: dict[str, int | None] = field(default_factory=dict)
    cuts: bool = False


@dataclass(frozen=True)
class Prefill:
    """How a chat goes on with its last message.

    Attributes:
        fields: Of the request.
        trims: Whether the spaces at the end of that message are left out.
    """

    fields: dict[str, bool]
    trims: bool


@dataclass(frozen=True)
class Settings:
    """How a server is reached.

    Attributes:
        url: With or without /v1, and with or without a name and a password.
        key: Sent as a bearer token.
        timeout: Seconds between two pieces of a text.
        seconds: Of a whole one.
        retries: How often a request is sent again where the server is busy or not there, before it has answered
            anything.
    """

    url: str = field(repr=False)
    key: str | None = field(repr=False)
    timeout: float
    seconds: float
    retries: int


class Endpoint:
    """One server. Safe to share between threads; close a stream to leave it early."""

    def __init__(self, settings: Settings) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SettingsError("a remote model needs httpx: pip install 'decodery[serve]'") from error
        if not settings.url.startswith(("http://", "https://")):
            raise SettingsError(
                "a remote model is at a URL such as http://localhost:8000: this one has no http:// or https://"
            )
        if not (settings.timeout > 0 and settings.seconds > 0 and settings.retries >= 0):
            raise SettingsError("a remote model needs a timeout and seconds above 0, and 0 retries or more")
        try:
            url = httpx.URL(settings.url)
        except httpx.InvalidURL:
            # What httpx says may be a part of the password.
            raise SettingsError(
                "a remote model is at a URL such as http://localhost:8000, with % codes for / ? # @ in a password"
            ) from None
        # A password is sent, and stands in no message.
        base = str(url.copy_with(userinfo=b"")).rstrip("/")
        self.settings = settings
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self.http = httpx.Client(
            auth=(url.username, url.password) if url.userinfo else None,
            headers={"Authorization": f"Bearer {settings.key}"} if settings.key else {},
            timeout=httpx.Timeout(settings.timeout, connect=min(_CONNECT_SECONDS, settings.timeout)),
            limits=httpx.Limits(max_connections=None),
        )

    def probe(self, model: str | None) -> Offers:
        """What the server does, found out by asking for one token by each route.

        Raises ServerError, SettingsError.
        """
        name = self._name(model)
        found: dict[str, int | None] = {}
        cuts = True
        for path, ask in ((CHAT, {"messages": [{"role": "user", "content": "Hi"}]}), (PLAIN, {"prompt": "Hi"})):
            asked = {"model": name, "max_tokens": 1, "temperature": 0, **ask}
            for fields in (NEUTRAL, {}) if cuts else ({},):
                if self._try(path, asked | fields, found):
                    cuts = bool(fields)
                    break
        if not found:
            raise ServerError(
                f"{self.base} writes no texts by {CHAT} or {PLAIN}: give the address of an OpenAI-like server"
            )
        return Offers(name, CHAT in found, PLAIN in found, found, cuts)

    def _try(self, path: str, body: dict[str, Any], found: dict[str, int | None]) -> bool:
        """Whether a route answers a request, and to `found` how many likely tokens it then tells of.

        Raises ServerError for a key that is refused.
        """
        for wanted in (20, 5, None):
            status, said = self._post(path, body | likely(path, wanted))
            if status == 200 and (wanted is None or _tells(path, said)):
                found[path] = wanted
                return True
            if status in (401, 403):
                raise ServerError(f"{self.base} refuses this key (status {status}): give one of these")
            if status in (404, 405, 501):
                break
        return False

    def prefill(self, model: str) -> Prefill | None:
        """How the server goes on with the last message of a chat; None where it does not.

        The prompt's length says so: where the message is closed and another one is begun, the template adds tokens.
        """
        asked = [{"role": "user", "content": "Hi"}]
        alone = self._prompt_tokens({"model": model, "messages": asked})
        for fields in _PREFILLS:
            longer = [
                self._prompt_tokens(
                    {"model": model, "messages": [*asked, {"role": "assistant", "content": said}], **fields}
                )
                for said in ("a", "a\n\n")
            ]
            if alone is not None and longer[0] is not None and longer[0] <= alone + 1:
                return Prefill(fields, trims=longer[1] == longer[0])
        return None

    def _prompt_tokens(self, body: dict[str, Any]) -> int | None:
        """How long the server finds a prompt; None where it refuses it, or does not say."""
        status, said = self._post(CHAT, {"max_tokens": 1, "temperature": 0, **body})
        try:
            return int(said["usage"]["prompt_tokens"]) if status == 200 else None
        except (KeyError, TypeError, ValueError):
            return None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a text, and how often it was asked for again under "retries" with the first.

        Raises:
            ServerError: If the server is not there, refuses, takes too long, or stops before the end.
        """
        import httpx

        until, wait = time.monotonic() + self.settings.seconds, _FIRST_WAIT
        for attempt in range(self.settings.retries + 1):
            last, begun, ended = attempt == self.settings.retries, False, False
            try:
                with self.http.stream("POST", f"{self.base}{path}", json=body) as reply:
                    if reply.status_code in _BUSY and not last:
                        wait = _pause(reply, wait, until)
                        continue
                    if reply.status_code != 200:
                        kind = ServerRefused if reply.status_code in _REFUSED else ServerError
                        raise kind(f"{self.base} answers {reply.status_code}: {_words(reply)}")
                    for event in _events(reply, until):
                        if "error" in event:
                            raise ServerError(f"{self.base} ends a text with an error: {str(event['error'])[:_SAID]}")
                        yield event if begun else {**event, "retries": attempt}
                        begun = True
                        ended = ended or any(choice.get("finish_reason") for choice in event.get("choices") or ())
                if ended:
                    return
                raise ServerError(f"the stream of {self.base} ended in the middle of a text")
            except httpx.TimeoutException as error:
                raise ServerError(f"{self.base} sent nothing for {self.settings.timeout:g} s") from error
            except httpx.HTTPError as error:
                if ended:
                    return
                if begun or last:
                    raise ServerError(f"{self.base} is not there, or went away: {_named(error)}") from error
                time.sleep(max(0.0, min(wait, until - time.monotonic())))
                wait = min(2 * wait, _MOST_WAIT)

    def _name(self, model: str | None) -> str:
        """The model's name there: what was given, if the server lists it, or the only one that it lists."""
        import httpx

        try:
            reply = self.http.get(f"{self.base}/models")
        except httpx.HTTPError as error:
            raise ServerError(f"there is no server at {self.base}: {_named(error)}") from error
        if reply.status_code in (401, 403):
            raise ServerError(f"{self.base} refuses this key (status {reply.status_code}): give one of these")
        try:
            listed = [str(each["id"]) for each in reply.json()["data"]] if reply.status_code == 200 else []
        except (ValueError, KeyError, TypeError):
            listed = []
        if model is not None:
            if listed and model not in listed:
                raise ServerError(f"{self.base} has no model {model!r}: it has {', '.join(listed[:5])}")
            return model
        if len(listed) != 1:
            raise SettingsError(
                f"{self.base} has {', '.join(listed[:5]) or 'no list of models'}: name one by model=..."
            )
        return listed[0]

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        import httpx

        for attempt in range(self.settings.retries + 1):
            try:
                reply = self.http.post(f"{self.base}{path}", json=body, timeout=_PROBE_SECONDS)
            except httpx.HTTPError as error:
                raise ServerError(f"{self.base} does not answer: {_named(error)}") from error
            if reply.status_code not in (429, 503) or attempt == self.settings.retries:
                break
            _pause(reply, _FIRST_WAIT * 2**attempt, time.monotonic() + _PROBE_SECONDS)
        try:
            return reply.status_code, reply.json() if len(reply.content) < _MOST_REPLY else None
        except ValueError:
            return reply.status_code, None


def likely(path: str, top: int | None) -> dict[str, Any]:
    """How a route is asked for log-probabilities of tokens, and of the `top` most likely beside each."""
    if top is None:
        return {}
    return {"logprobs": True, "top_logprobs": top} if path == CHAT else {"logprobs": top}


def _tells(path: str, said: Any) -> bool:
    """Whether an answer holds the log-probabilities that were asked for."""
    try:
        found = said["choices"][0]["logprobs"]
        return bool(found["content"][0]["top_logprobs"] if path == CHAT else found["top_logprobs"][0])
    except (KeyError, IndexError, TypeError):
        return False


def _events(reply: httpx.Response, until: float) -> Iterator[dict[str, Any]]:
    """The objects of a stream of events, to its mark of the end. Raises ServerError for anything else."""
    left = b""
    for part in reply.iter_bytes():
        if time.monotonic() > until:
            raise ServerError("a text took longer than it may (seconds)")
        *lines, left = (left + part).split(b"\n")
        if len(left) > _MOST_EVENT:
            raise ServerError("a server sent an event larger than any text")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                found = json.loads(data)
            except (ValueError, RecursionError):
                found = None
            choices = found.get("choices") if isinstance(found, dict) else None
            if not isinstance(found, dict) or not all(isinstance(each, dict) for each in choices or ()):
                raise ServerError("a server sent an event that is no piece of a text")
            yield found


def _pause(reply: httpx.Response, wait: float, until: float) -> float:
    """Wait as long as a busy server asks for, or as usual; returns the usual wait after that."""
    try:
        asked = float(reply.headers.get("retry-after", ""))
    except ValueError:
        asked = wait
    time.sleep(max(0.0, min(asked, _MOST_WAIT, until - time.monotonic())))
    return min(2 * wait, _MOST_WAIT)


def _words(reply: httpx.Response) -> str:
    """What a server says to a request that it refuses."""
    said = b""
    for part in reply.iter_bytes():
        said += part
        if len(said) > _MOST_REPLY:
            break
    try:
        found = json.loads(said)
        said_so = found["error"]["message"] if isinstance(found.get("error"), dict) else found
        return str(said_so)[:_SAID]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return said.decode(errors="replace").strip()[:_SAID] or "nothing"


def _named(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
