"""A file of requests in OpenAI's batch format, and the file of their answers: read, counted, gone on with.

A line of input is `{"custom_id", "method": "POST", "url", "body"}`; every one gets one line of output, in the order in
which they end: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
"""

from __future__ import annotations

import json
import re
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from decodery.core.errors import CorruptFile, DecoderyError

from .wire import loads

_MOST_ID = 512
_HEAD = re.compile(rb'\{"id": "batch_req_([1-9][0-9]{0,11})_([0-9a-f]{16})", "custom_id": ')
_RESPONSE, _GOOD = b', "response": ', b'{"status_code": 200, '
_NAMED = 5


@dataclass(frozen=True)
class Line:
    """A line of input.

    Attributes:
        number: From 1.
        digest: Of the line and of what decides texts beside it, 64 bits.
        data: Its bytes, None where they are more than a request may have.
    """

    number: int
    digest: int
    data: bytes | None


@dataclass(frozen=True)
class BatchRequest:
    """A request of a batch that has no answer yet.

    Attributes:
        url: Where a client of the server would send its body to.
    """

    line: Line
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass
class Totals:
    """Lines of a batch.

    Attributes:
        earlier: Answered by a run before.
        failed_earlier: Of those with an error.
        done: Answered by this run.
        failed: Of those with an error.
        named: Some of the failed ones.
    """

    total: int = 0
    earlier: int = 0
    failed_earlier: int = 0
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
    """The file of answers, open for more.

    A line that a kill has cut is taken out again; the request it answers is not done.

    Args:
        digests: By number of a line, at most `last`, that of the answered one or 0.
        failed: Answers that it holds and that are errors.

    Raises:
        CorruptFile: For a file that holds something else.
        DecoderyError: If another process writes it.
    """

    def __init__(self, path: Path, last: int) -> None:
        from filelock import FileLock, Timeout

        self.path = path
        self.digests = array("Q", bytes(8 * (last + 1)))
        self.failed = 0
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
        self.digests[line.number] = line.digest

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
                self.failed += not text.partition(_RESPONSE)[2].startswith(_GOOD)
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


class BatchFile:
    """The requests of `source` and their answers in `out`.

    Made again it goes on where it was ended, in whatever way. Raises what `Answers` does.

    Args:
        most: Bytes of a request.
        salt: What decides texts beside a request, so that no answer of another model counts as one.
    """

    def __init__(self, source: Path, out: Path, most: int, salt: str) -> None:
        self.totals = Totals()
        self._source, self._most, self._salt = source, most, salt
        last = 0
        for line in self._lines():
            self.totals.total, last = self.totals.total + 1, line.number
        self._answers = Answers(out, last)
        self.totals.failed_earlier = self._answers.failed

    def __enter__(self) -> BatchFile:
        self._answers.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._answers.__exit__(kind, error, trace)

    @property
    def over(self) -> int:
        """Lines that have their answer."""
        return self.totals.earlier + self.totals.done

    def unanswered(self) -> Iterator[BatchRequest]:
        """Requests without an answer; lines that are no requests are answered by saying why."""
        known: set[bytes] = set()
        for line in self._lines():
            found: BatchRequest | LineError
            try:
                found = _request(line, self._most)
                name = blake2b(found.custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
                if name in known:
                    message = f"line {line.number}: an earlier line has the custom_id {found.custom_id!r}, too"
                    raise LineError("duplicate_custom_id", message, found.custom_id)
                known.add(name)
            except LineError as error:
                found = error
            if line in self._answers:
                self.totals.earlier += 1
            elif isinstance(found, BatchRequest):
                yield found
            else:
                fault = {"code": found.code, "message": str(found), "param": None, "line": line.number}
                self._answers.add(line, found.custom_id, None, fault)
                self._count(str(found))

    def add(self, request: BatchRequest, status: int, body: Any) -> None:
        """Write the answer to a request; one that has been written stays the only one."""
        if request.line in self._answers:
            return
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        self._answers.add(request.line, request.custom_id, response, None)
        self._count(None if status == 200 else f"line {request.line.number}: {body['error']['message']}")

    def _lines(self) -> Iterator[Line]:
        return read_lines(self._source, self._most, self._salt)

    def _count(self, failed: str | None) -> None:
        self.totals.done += 1
        if failed is not None:
            self.totals.failed += 1
            if len(self.totals.named) < _NAMED:
                self.totals.named += (failed,)


def _request(line: Line, most: int) -> BatchRequest:
    """The request of a line. Raises LineError."""
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
        raise LineError("invalid_url", f"{where} has no url, such as /v1/chat/completions", name)
    if not isinstance(found.get("body"), dict):
        raise LineError("invalid_body", f"{where} has no body that is an object", name)
    return BatchRequest(line, name, found["url"], found["body"])
