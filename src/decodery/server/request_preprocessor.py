"""Prepares requests for the engine, in threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from decodery.constraints.base import ConstraintSpec
from decodery.llm.llm import LLM
from decodery.llm.resolve_settings import resolve_cache_policy
from decodery.models.config import POSITIONS
from decodery.sampling.constraint import Constraint

from .admission import PREPARED, FairThreads
from .errors import ApiError, as_api_error, invalid, log_failure
from .methods import Compiled, untrusted
from .settings import ServerSettings

T = TypeVar("T")


def _too_long(context: int, prompt: int, answer: int) -> str:
    """In the words by which clients tell this error from others."""
    return (
        f"This model's maximum context length is {context} tokens. However, the request needs {prompt + answer} tokens "
        f"({prompt} of the prompt, {answer} of the answer): shorten the prompt, or ask for fewer tokens"
    )


class RequestPreprocessor:
    """Reads prompts on two threads and compiles constraints, which may take seconds, on two others.

    Keys take turns on them.
    """

    def __init__(self, lm: LLM, settings: ServerSettings) -> None:
        self.lm = lm
        self.settings = settings
        self._compiled = Compiled(lm)
        # Where all clients are one owner, it has all threads, and as many requests as may wait for the engine.
        alone = len(settings.keys) < 2
        most = settings.max_running + settings.max_queue if alone else PREPARED
        self._reading, self._compiling = (
            FairThreads(2, name, settings.side_seconds, most, spare=0 if alone else 1)
            for name in ("prompts", "constraints")
        )

    def close(self) -> None:
        """End its threads after what they are doing."""
        for pool in (self._reading, self._compiling):
            pool.close()

    @property
    def context(self) -> int:
        return self.lm.model.config.max_positions

    def reach(self, cache_policy: str | None) -> int:
        """Tokens of the longest text under a cache policy: some know no end."""
        policy = resolve_cache_policy(cache_policy)
        return POSITIONS.most if policy is not None and policy.endless(self.lm.model.config) else self.context

    @cached_property
    def _longest_piece(self) -> int:
        return max(map(len, self.lm.vocabulary.pieces))

    async def do(self, what: Callable[[], T]) -> T:
        """Work on a request that takes milliseconds; its errors become the client's."""
        return await self._run(self._reading, what)

    async def compile(self, language: ConstraintSpec | None) -> Constraint | None:
        if language is None:
            return None
        found = await self._run(self._compiling, lambda: self._compiled.get(language))
        if found.after is not None and found.after.unenforced:
            raise invalid("a server does not check finished texts: leave out unenforced=check", "decodery.constraint")
        return found

    def check_length(self, text: str, cache_policy: str | None = None) -> None:
        """Refuse early what cannot fit, counted generously."""
        if len(text) > self.reach(cache_policy) * self._longest_piece:
            raise invalid(
                f"the prompt has {len(text)} characters, more than fit this model's context of {self.context} tokens",
                "messages",
                "context_length_exceeded",
            )

    def check_description(self, text: str, param: str) -> None:
        """Refuse schemas and the like that are larger than the server allows."""
        if len(text) > self.settings.description_bytes:
            raise invalid(
                f"{param} has {len(text)} characters, and this server takes {self.settings.description_bytes}", param
            )

    def room(self, prompt: int, wanted: int | None, default: int | None, cache_policy: str | None = None) -> int:
        """How many tokens a text may have.

        Without a bound no text gets more than the model's context, whatever its policy.

        Args:
            wanted: As the request says, else `default`, None for all that fit.
            cache_policy: The cache policy.
        """
        left = self.reach(cache_policy) - prompt
        if left < 1 or (wanted is not None and wanted > left):
            raise invalid(
                _too_long(self.context, prompt, max(wanted or 1, 1)),
                "max_tokens" if left >= 1 else "messages",
                "context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        return min(self.context if default is None else default, left)

    def truncated(self, tokens: list[int], most: int | None, cache_policy: str | None) -> list[int]:
        """The last tokens of a prompt.

        Args:
            tokens: The prompt.
            most: How many stay; None: all, -1: as many as leave room for one more.
            cache_policy: The cache policy.
        """
        if most is None:
            return tokens
        if most == 0:
            raise invalid("truncate_prompt_tokens must be at least 1, or -1 for all that fit", "truncate_prompt_tokens")
        most = self.reach(cache_policy) - 1 if most == -1 else most
        return tokens if len(tokens) <= most else tokens[-most:]

    async def _run(self, threads: FairThreads, what: Callable[[], T]) -> T:
        def work() -> T:
            with untrusted(self.settings.trust):
                return what()

        try:
            return await threads.run(work)
        except ApiError:
            raise
        except Exception as error:
            log_failure(error, None)
            raise as_api_error(error) from error
