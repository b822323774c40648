"""The record of a search: what it has written and scored, kept in a file as it comes.

A search begun again with the same model, prompt and settings takes what stands in the file in place of writing or
scoring it once more, and comes to the same result. The file holds a JSON object a line: what is searched, and then
texts and scores.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any, Self

import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.version import __version__

if sys.platform != "win32":
    import fcntl

_KIND = "search record"
_BEGINNING = f'{{"kind": "{_KIND}"'.encode()
_FORMAT = 1
_MOST_BYTES = 1 << 28
_MOST_LINE = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a text.

    Attributes:
        tokens: Ids, or what a server's tokens say.
        logprobs: Of each token: its log-probability, and ids or texts of likely ones with theirs; empty for none.
        ended: Whether nothing more was wanted of the text then, but by a later step of the search.
        reason: Why the text is over, None where it is not.
    """

    tokens: tuple[int | str, ...]
    logprobs: tuple[tuple[float, tuple[tuple[int | str, float], ...]], ...] = ()
    ended: bool = False
    reason: str | None = None


class SearchRecord:
    """A record that is read and goes on; one process at a time has it.

    Args:
        path: The file, which may be new.
        subject: What is searched, and how; a record of anything else is refused.
        most: Bytes of the file at most; what comes later is not kept.

    Raises:
        SettingsError: For the record of another search or in another format, and for one that another process has.
        CorruptFile: For a file that is no record.
    """

    def __init__(self, path: str | Path, subject: Mapping[str, Any], most: int = _MOST_BYTES) -> None:
        self.path, self._most = Path(path), most
        self._parts: dict[str, deque[TextPart]] = {}
        self._scores: dict[str, float] = {}
        self._scorers: dict[int, tuple[object, list[Any]]] = {}
        self._full = False
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise SettingsError(f"cannot keep a record in {path}: {error.strerror}: give another file") from error
        with ExitStack() as refused:
            refused.callback(self._file.close)
            self._lock()
            self._read(json.loads(json.dumps(subject)))
            refused.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def part(self, key: str) -> TextPart | None:
        """What was written next of a text, once for each time that it was; None for nothing."""
        left = self._parts.get(key)
        return left.popleft() if left else None

    def keep_part(self, key: str, part: TextPart, text: str | None) -> None:
        """Add what was written of a text.

        Args:
            text: All of it so far, for readers of the file; None for nothing.
        """
        self._add({"text": key, **dataclasses.asdict(part), **({} if text is None else {"reads": text})})

    def score(self, scorer: object, text: Any) -> float | None:
        """What a scorer has said of a text; None where that is not known."""
        return self._scores.get(self._key(scorer, text))

    def keep_score(self, scorer: object, text: Any, score: float) -> None:
        """Add what a scorer says of a text."""
        key = self._key(scorer, text)
        self._scores[key] = score
        self._add({"scored": key, "scorer": type(scorer).__name__, "score": score})

    def _key(self, scorer: object, text: Any) -> str:
        if id(scorer) not in self._scorers:
            # Functions may have one name: a search has its scorers in the same order whenever it runs.
            settings = digest(described(scorer))
            alike = sum(name[0] == settings for _, name in self._scorers.values())
            self._scorers[id(scorer)] = scorer, [settings, alike]
        return digest([self._scorers[id(scorer)][1], text])

    def _add(self, line: dict[str, Any]) -> None:
        if self._full:
            return
        written = json.dumps(line).encode() + b"\n"
        if len(written) > _MOST_LINE:
            # It would be refused when it is read.
            return
        if self._file.tell() + len(written) > self._most:
            self._full = True
            warnings.warn(f"{self.path} has {self._most} bytes: the search goes on, and is kept no more", stacklevel=4)
            return
        self._file.write(written)
        self._file.flush()

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"{self.path} is the record of a search that is running: give another file") from None
        except OSError:
            # Some file systems have no locks.
            pass

    def _read(self, subject: dict[str, Any]) -> None:
        if self.path.stat().st_size > self._most:
            raise SettingsError(f"{self.path} is larger than {self._most} bytes: give another file")
        self._file.seek(0)
        first, end = True, 0
        for line in self._file:
            if not line.endswith(b"\n"):
                # A process that was killed has left a part of a line; the first line of another file is kept.
                if first and not _BEGINNING.startswith(line[: len(_BEGINNING)]):
                    raise CorruptFile(f"{self.path} is no record of a search: give another file")
                break
            self._take(line, subject, first)
            first, end = False, end + len(line)
        self._file.truncate(end)
        self._file.seek(end)
        if first:
            self._add({"kind": _KIND, "version": _FORMAT, "decodery": __version__, "of": subject})

    def _take(self, line: bytes, subject: dict[str, Any], first: bool) -> None:
        """What one line says."""
        try:
            entry: Any = json.loads(line) if len(line) <= _MOST_LINE else None
            if first:
                if entry["kind"] != _KIND or type(entry["version"]) is not int:
                    raise ValueError
                self._readable(entry)
                self._same(entry["of"], subject)
            elif "text" in entry:
                self._parts.setdefault(entry["text"], deque()).append(_part(entry))
            else:
                if not isinstance(score := entry["score"], float) or math.isnan(score):
                    raise ValueError
                self._scores[entry["scored"]] = score
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptFile(f"{self.path} is no record of a search: give another file") from error

    def _readable(self, entry: Mapping[str, Any]) -> None:
        if entry["version"] != _FORMAT:
            raise SettingsError(
                f"{self.path} was written by decodery {entry.get('decodery', 'of another version')!s:.40} in format "
                f"{entry['version']!s:.20} of records, and this version, {__version__}, goes on from format {_FORMAT}: "
                "go on with that version, or give another file"
            )

    def _same(self, known: dict[str, Any], subject: dict[str, Any]) -> None:
        if other := [name for name in subject if known.get(name) != subject[name]] or list(known.keys() - subject):
            raise SettingsError(
                f"{self.path} is the record of another search, with another {' and '.join(other)}: give another file, "
                "or what it was begun with"
            )


def _part(entry: dict[str, Any]) -> TextPart:
    tokens, ended, reason = tuple(entry["tokens"]), entry["ended"], entry["reason"]
    said = tuple((float(value), tuple((name, float(near)) for name, near in top)) for value, top in entry["logprobs"])
    if (
        not isinstance(entry["tokens"], list)
        or not all(type(token) in (int, str) for token in (*tokens, *(name for _, top in said for name, _ in top)))
        or not isinstance(ended, bool)
        or reason not in (None, "stop", "length", "content_filter")
    ):
        raise ValueError
    return TextPart(tokens, said, ended, reason)


def digest(content: Any) -> str:
    """What tells contents apart that JSON can write."""
    return blake2b(json.dumps(content, default=str).encode(), digest_size=16).hexdigest()


def described(value: Any) -> Any:
    """What a method and its settings are, by content, in values that JSON can write.

    Models are known by their weights, tensors by their values, functions by their code.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), blake2b(data, digest_size=16).hexdigest()]
    if isinstance(weights := getattr(value, "fingerprint", None), str):
        return [type(value).__name__, weights]
    if isinstance(value, FunctionType):
        return [value.__qualname__, _code(value.__code__)]
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [described(each) for each in value]
    if dataclasses.is_dataclass(value):
        fields = {each.name: described(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _code(code: CodeType) -> list[Any]:
    """The code of a function, without where it stands in its file."""
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]
