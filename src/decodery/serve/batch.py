"""Files of requests in OpenAI's batch format, answered by the code that answers a server's requests, without HTTP.

A line of input is `{"custom_id", "method": "POST", "url", "body"}`; every one gets one line of output, in the order in
which they end: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CorruptFile, DecoderyError
from .app import Front
from .errors import ApiError, as_api_error, invalid
from .fields import ChatRequest, CompletionRequest
from .keys import NOBODY
from .run import EngineFailed
from .wire import checked, loads

KINDS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_LOOKS_EVERY = 0.2
_MOST_ID = 512
_HEAD = re.compile(rb'\{"id": "batch_req_([1-9][0-9]{0,11})_([0-9a-f]{16})", "custom_id": ')
_NAMED = 5


@dataclass(frozen=True)
class Line:
    """A line of input. number: from 1. digest: of the line and of what decides texts beside it, 64 bits.

    data: its bytes, None where they are more than a request may have.
    """

    number: int
    digest: int
    data: bytes | None


@dataclass
class Totals:
    """Lines of a batch. earlier: answered by a run before; failed: with an error; named: some of those."""

    total: int = 0
    earlier: int = 0
    done: int = 0
    failed: int = 0
    named: tuple[str, ...] = ()
    complete: bool = False


class LineError(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


def read_lines(source: Path, most: int, salt: str) -> Iterator[Line]:
    """The lines of a file that are not empty, at most `most` bytes of one in memory."""
    key = blake2b(salt.encode(), digest_size=32).digest()
    number = 0
    try:
        with source.open("rb") as file:
            while piece := file.readline(most + 1):
                number += 1
                data: bytes | None = piece.strip()
                digest = blake2b(piece.rstrip(b"\r\n"), digest_size=8, key=key)
                while len(piece) > most and not piece.endswith(b"\n"):
                    data, piece = None, file.readline(most + 1)
                    digest.update(piece.rstrip(b"\r\n"))
                    if len(piece) <= most:
                        break
                if data != b"":
                    yield Line(number, int.from_bytes(digest.digest()), data)
    except OSError as error:
        raise DecoderyError(f"cannot read {source}: {error.strerror}") from error


class Answers:
    """The file of answers, open for more. digests: by number of a line, at most `last`, that of the answered one or 0.

    A line that a kill has cut is taken out again; the request it answers is not done. Raises CorruptFile for a file
    that holds something else, and DecoderyError where another process writes it.
    """

    def __init__(self, path: Path, last: int) -> None:
        from filelock import FileLock, Timeout

        self.path = path
        self.digests = array("Q", bytes(8 * (last + 1)))
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DecoderyError(f"another process writes {path}: wait for it, or choose another file") from None
        except OSError as error:
            raise self._cannot(error) from error
        try:
            self._file = self._open()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._lock.release()

    def __contains__(self, line: Line) -> bool:
        """Whether this line has its answer. Raises CorruptFile where another one with its number has."""
        found = self.digests[line.number]
        if found not in (0, line.digest):
            raise self._other(line.number)
        return found != 0

    def add(self, line: Line, custom_id: str | None, response: Any, error: Any) -> None:
        """Write one answer, whole before the next one; what a killed process has written stays."""
        head = f'{{"id": "batch_req_{line.number}_{line.digest:016x}", "custom_id": {json.dumps(custom_id)}, '
        text = f'{head}"response": {json.dumps(response)}, "error": {json.dumps(error)}}}\n'
        left = memoryview(text.encode("ascii"))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as failure:
            raise self._cannot(failure) from failure

    def _open(self) -> FileIO:
        try:
            file = FileIO(self.path, "a+")
        except OSError as error:
            raise self._cannot(error) from error
        end = 0
        with self.path.open("rb") as lines:
            for text in lines:
                if not text.endswith(b"\n"):
                    break
                head = _HEAD.match(text)
                if head is None:
                    file.close()
                    raise CorruptFile(f"{self.path} holds something else than answers to a batch: choose another file")
                number = int(head[1])
                if number >= len(self.digests):
                    file.close()
                    raise self._other(number)
                self.digests[number] = int(head[2], 16)
                end += len(text)
        file.truncate(end)
        return file

    def _other(self, number: int) -> CorruptFile:
        return CorruptFile(
            f"line {number} is not the one that {self.path} answers: the input, the model, its precision or the "
            "version has changed since; choose another output file"
        )

    def _cannot(self, error: OSError) -> DecoderyError:
        return DecoderyError(
            f"cannot write {self.path} ({error.strerror}): what it holds stays; once it can be written, the same "
            "command goes on from there"
        )


@dataclass
class Batch:
    """Answers the lines of `source` in `out`; run it again to go on where it was ended, in whatever way.

    front: of a service that has been started; at once: requests in progress at a time.
    """

    front: Front
    source: Path
    out: Path
    at_once: int

    async def run(self, report: Callable[[int, int], None], stopped: Callable[[], bool]) -> Totals:
        """Answer all lines, or until `stopped`: what is in progress then is left for the next run.

        report: hears how many lines are done and how many there are. Raises DecoderyError where a file cannot be read
        or written, EngineFailed where the engine ends.
        """
        totals, last = Totals(), 0
        for line in self._lines():
            totals.total, last = totals.total + 1, line.number
        with Answers(self.out, last) as answers:
            lines = self._unanswered(answers, totals)
            pending, over = set[asyncio.Task[None]](), set[asyncio.Task[None]]()
            try:
                while not stopped():
                    while len(pending) < self.at_once and (each := next(lines, None)) is not None:
                        pending.add(asyncio.create_task(self._answer(*each, answers, totals)))
                    report(totals.earlier + totals.done, totals.total)
                    if not pending:
                        totals.complete = True
                        break
                    over, pending = await asyncio.wait(
                        pending, timeout=_LOOKS_EVERY, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in over:
                        task.result()
            finally:
                for task in pending:
                    task.cancel()
                # Of several that failed together one has been raised.
                await asyncio.gather(*pending, *over, return_exceptions=True)
        return totals

    def _lines(self) -> Iterator[Line]:
        return read_lines(self.source, self.front.settings.body_bytes, self.front.service.fingerprint)

    def _unanswered(self, answers: Answers, totals: Totals) -> Iterator[tuple[Line, dict[str, Any] | LineError]]:
        """Lines without an answer, with the request that each is or why it is none."""
        known: set[bytes] = set()
        for line in self._lines():
            found: dict[str, Any] | LineError
            try:
                found = _request(line, self.front.settings.body_bytes)
                name = blake2b(found["custom_id"].encode("utf-8", "surrogatepass"), digest_size=12).digest()
                if name in known:
                    message = f"line {line.number}: an earlier line has the custom_id {found['custom_id']!r}, too"
                    raise LineError("duplicate_custom_id", message, found["custom_id"])
                known.add(name)
            except LineError as error:
                found = error
            if line in answers:
                totals.earlier += 1
            else:
                yield line, found

    async def _answer(self, line: Line, found: dict[str, Any] | LineError, answers: Answers, totals: Totals) -> None:
        if isinstance(found, LineError):
            fault = {"code": found.code, "message": str(found), "param": None, "line": line.number}
            answers.add(line, found.custom_id, None, fault)
            self._failed(str(found), totals)
        else:
            status, body = await self._respond(found["url"], found["body"])
            response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
            answers.add(line, found["custom_id"], response, None)
            if status != 200:
                self._failed(f"line {line.number}: {body['error']['message']}", totals)
        totals.done += 1

    async def _respond(self, url: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer, as a client of the server would get them."""
        try:
            kind = KINDS.get(url)
            if kind is None:
                raise ApiError(404, f"there is no {url[:80]!r} here: a batch has {' and '.join(KINDS)}", param="url")
            request = checked(body, kind, strict=self.front.settings.strict)
            if request.stream:
                raise invalid("a batch has no streams", "stream")
            return 200, await self.front.answer(request, NOBODY)
        except Exception as error:
            if not self.front.service.alive:
                raise EngineFailed("the engine ended: what it has answered is kept") from error
            failed = as_api_error(error)
            return failed.status, failed.body

    @staticmethod
    def _failed(why: str, totals: Totals) -> None:
        totals.failed += 1
        if len(totals.named) < _NAMED:
            totals.named += (why,)


def _request(line: Line, most: int) -> dict[str, Any]:
    """The request of a line: custom_id, url and body. Raises LineError."""
    where = f"line {line.number}"
    if line.data is None:
        raise LineError("line_too_long", f"{where} is longer than {most} bytes, the most a request may have")
    try:
        found = loads(line.data)
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json_line", f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise LineError("invalid_json_line", f"{where} is not a JSON object")
    name = found.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_ID:
        raise LineError("invalid_custom_id", f"{where} has no custom_id of 1 to {_MOST_ID} characters")
    if found.get("method", "POST") != "POST":
        raise LineError("invalid_method", f'{where}: its method is not "POST"', name)
    if not isinstance(found.get("url"), str):
        raise LineError("invalid_url", f"{where} has no url, such as {next(iter(KINDS))}", name)
    if not isinstance(found.get("body"), dict):
        raise LineError("invalid_body", f"{where} has no body that is an object", name)
    return found
