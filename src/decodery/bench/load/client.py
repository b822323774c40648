"""One client of any server that speaks OpenAI's protocol, and what it saw of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from .arrivals import Arrival
from .settings import LoadSettings

if TYPE_CHECKING:
    import httpx

_SAID = 200


@dataclass
class Seen:
    """An answer as its client saw it. Times are seconds since the stage began.

    at: when the request was due; times: of every piece of text; tokens: as the server counts them, and where it does
    not, pieces; error: why there is no whole answer.
    """

    at: float
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float | None:
        """Seconds to the first text; to the end of an answer without any."""
        if self.error:
            return None
        return (self.times[0] if self.times else self.end) - self.at

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text: what a reader waits."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def per_token(self) -> float | None:
        """Mean seconds from a token to the next."""
        if self.error or self.tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    def good(self, settings: LoadSettings) -> bool:
        if self.first is None or self.first > settings.first_token_limit:
            return False
        return self.per_token is None or self.per_token <= settings.gap_limit

    def to_dict(self) -> dict[str, Any]:
        return {
            "at": round(self.at, 4),
            "first": None if self.first is None else round(self.first, 4),
            "end": round(self.end, 4),
            "longest_gap": round(max(self.gaps, default=0.0), 4),
            "pieces": len(self.times),
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "error": self.error,
        }


@dataclass(frozen=True)
class Client:
    """Sends requests of a stage that began at `zero`, on the monotonic clock. model: as the server names it."""

    http: httpx.AsyncClient
    model: str
    settings: LoadSettings
    zero: float

    async def ask(self, arrival: Arrival, number: int, at: float) -> Seen:
        """Ask for one answer and read it to its end; whatever goes wrong is noted."""
        import httpx

        seen = Seen(at)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": arrival.prompt}],
            "max_tokens": arrival.max_tokens,
            "temperature": self.settings.temperature,
            "seed": self.settings.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with asyncio.timeout(self.settings.timeout):
                await self._read(seen, body)
        except TimeoutError:
            seen.error = f"no whole answer within {self.settings.timeout:g} s"
        except (httpx.HTTPError, ValueError) as error:
            seen.error = f"{type(error).__name__}: {error}"[:_SAID]
        seen.end = monotonic() - self.zero
        return seen

    async def _read(self, seen: Seen, body: dict[str, Any]) -> None:
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                seen.error = f"status {response.status_code}: {response.text}"[:_SAID]
                return
            async for chunk in _chunks(response.aiter_lines()):
                if "error" in chunk:
                    seen.error = str(chunk["error"])[:_SAID]
                    return
                if any(_text(choice) for choice in chunk.get("choices") or ()):
                    seen.times.append(monotonic() - self.zero)
                if usage := chunk.get("usage"):
                    seen.tokens = int(usage.get("completion_tokens") or 0)
                    seen.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        seen.tokens = seen.tokens or len(seen.times)


async def _chunks(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of events. Raises ValueError where it ends before it is over, or holds something else."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError("an event is no object")
        yield found
    raise ValueError("the stream ended before it was over")


def _text(choice: dict[str, Any]) -> str:
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""
