"""Errors as OpenAI's clients know them."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from pydantic import ValidationError

from decodery.core.errors import DecoderyError, MonitorFailed, NotTrusted, OutOfMemory

from .wrong_fields import wrong_field

_LOG = logging.getLogger("decodery.server")
_MOST_LOGGED = 500
"""Characters of an error's message in the log."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: The field it is about.
        retry_after: Seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """A request that may be made again in a while."""
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after)


def stopping() -> ApiError:
    """The server takes nothing more."""
    return ApiError(503, "the server is about to stop", kind="server_error", code="stopping", retry_after=5)


def log_failure(error: BaseException, whose: str | None) -> None:
    """Write a line about an unexpected error to the server's log, where it came from included.

    Clients are told its kind alone, see `as_api_error`. Errors that are answers to what a client asked leave no line.

    Args:
        error: What ended a request.
        whose: The name of the key that it came with; None while it is being read.
    """
    if isinstance(error, ApiError) or as_api_error(error).status < 500:
        return
    cause = error.__cause__ if isinstance(error, MonitorFailed) and error.__cause__ is not None else error
    frames = traceback.extract_tb(cause.__traceback__)
    at = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    message = " ".join(str(cause).split())[:_MOST_LOGGED]
    which = "that is being read" if whose is None else f"of {whose!r}"
    _LOG.error("decodery: a request %s failed: %s: %s%s", which, type(cause).__name__, message, at)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error that ended its request.

    Of unexpected errors only the kind is returned.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return invalid(*wrong_field(error))
    if isinstance(error, NotTrusted):
        return invalid(str(error), "decodery", "not_trusted")
    if isinstance(error, OutOfMemory):
        return ApiError(400, str(error), code="out_of_memory")
    if isinstance(error, MonitorFailed):
        # What it says is for who wrote the monitor, and may hold what it read.
        return ApiError(500, "a monitor of this request failed, and the text ended there", kind="server_error")
    if isinstance(error, DecoderyError):
        return invalid(str(error))
    return ApiError(500, f"the server failed at this request ({type(error).__name__})", kind="server_error")
