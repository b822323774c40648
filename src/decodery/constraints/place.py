"""Where a Python text stands: in code or not, and whether an attribute's name begins or goes on."""

from __future__ import annotations

import keyword
from dataclasses import dataclass, replace

_WORD = frozenset(b"0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") | frozenset(range(0x80, 0x100))
"""Bytes of identifiers; beyond ASCII Python has nothing but letters of names, strings and comments."""

BREAKING = frozenset(range(0x80)) - _WORD
"""Bytes before which an identifier ends: `abc` and such a byte are two tokens."""

_DIGITS, _BLANK, _QUOTES = frozenset(b"0123456789"), frozenset(b" \t\f\r"), frozenset(b"'\"")
_OPENING, _CLOSING = frozenset(b"([{"), frozenset(b")]}")
_PREFIXES = {b"r", b"u", b"b", b"br", b"rb", b"f", b"fr", b"rf", b"t", b"tr", b"rt"}
_KEYWORDS = {word.encode() for word in keyword.kwlist} - {b"None", b"True", b"False"}
_MAKERS = {b"self", b"cls"}
_NEWLINE, _BACKSLASH, _DOT = 0x0A, 0x5C, 0x2E


@dataclass(frozen=True, slots=True)
class _Frame:
    """One of the things a text stands in, each inside the one before it.

    kind: "code", "comment", "opening" (quotes of which more may follow), "string", "spec" (after the colon of a
    replacement field). quote: of a string. depth: open brackets of code. fields: whether a string has replacement
    fields. run: quotes in a row. pending: a backslash or an opening brace that waits for what follows it.
    """

    kind: str
    quote: bytes = b""
    depth: int = 0
    fields: bool = False
    run: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class CodePosition:
    """After some bytes of Python; `after(more)` is further on, and a place never changes.

    A dot is an attribute's where an expression ends before it: not in strings and comments, numbers, `...` and relative
    imports. Replacement fields of f-strings are code. After a `self` or `cls` that begins a statement it is None as
    well: there attributes are made. A cut or wrong text has a place, too.

    Attributes:
        since: What is written of a name after an attribute's dot, b"" right after the dot, None elsewhere.
    """

    frames: tuple[_Frame, ...] = (_Frame("code"),)
    word: bytes = b""
    last: str = "other"
    joined: bool = False
    relative: bool = False
    fresh: bool = True
    since: bytes | None = None

    @property
    def in_text(self) -> bool:
        """Whether the text ends within a string, a comment or a format.

        Code can come only after a sign that ends it.
        """
        frame = self.frames[-1]
        return frame.kind in ("comment", "spec") or (frame.kind == "string" and frame.pending != ord("{"))

    def after(self, text: bytes) -> CodePosition:
        """The place after `text`."""
        walk = _PositionScanner(self)
        for byte in text:
            walk.take(byte)
        return walk.place()


class _PositionScanner:
    """A place on its way."""

    def __init__(self, place: CodePosition) -> None:
        self.frames = list(place.frames)
        self.word, self.last, self.joined = place.word, place.last, place.joined
        self.relative, self.fresh, self.since = place.relative, place.fresh, place.since

    def place(self) -> CodePosition:
        return CodePosition(
            tuple(self.frames), self.word, self.last, self.joined, self.relative, self.fresh, self.since
        )

    def take(self, byte: int) -> None:
        frame = self.frames[-1]
        if frame.kind == "code":
            self._code(byte)
        elif frame.kind == "comment":
            if byte == _NEWLINE:
                self.frames.pop()
                self._code(byte)
        elif frame.kind == "opening":
            self._opening(frame, byte)
        elif frame.kind == "string":
            self._string(frame, byte)
        else:
            self._spec(byte)

    def _change(self, **values: int) -> None:
        self.frames[-1] = replace(self.frames[-1], **values)  # type: ignore[arg-type]

    def _code(self, byte: int) -> None:
        since, self.since = self.since, None
        joined, self.joined = self.joined, False
        number = self.word[:1].isdigit()
        if byte in _WORD or (number and byte == _DOT):
            self.word += bytes([byte])
            self.since = None if since is None else since + bytes([byte])
            return
        word, before = self.word, self._settle()
        fresh = self.fresh
        self.fresh = fresh and not word and byte in (*_BLANK, _NEWLINE)
        if byte in _BLANK:
            self.joined = joined
        elif byte == _NEWLINE:
            if not joined and not self.frames[-1].depth and len(self.frames) == 1:
                self.last, self.relative, self.fresh = "other", False, True
        elif byte == _BACKSLASH:
            self.joined = True
        elif byte == _DOT:
            self.relative |= before == "from"
            makes = fresh and word in _MAKERS
            attribute = before in ("name", "close", "string") and not self.relative and not makes
            self.last, self.since = "dot", b"" if attribute else None
        elif byte in _QUOTES:
            prefix = word.lower() if word.lower() in _PREFIXES else b""
            fields = b"f" in prefix or b"t" in prefix
            self.frames.append(_Frame("opening", quote=bytes([byte]), fields=fields, run=1))
        elif byte in _OPENING:
            self._change(depth=self.frames[-1].depth + 1)
            self.last = "other"
        elif byte in _CLOSING:
            self._close(byte)
        elif byte == ord("#"):
            self.frames.append(_Frame("comment"))
        elif byte == ord(":") and not self.frames[-1].depth and len(self.frames) > 1:
            self.frames.append(_Frame("spec"))
        else:
            self.last = "other"
            self.relative &= byte != ord(";")
            self.fresh = byte in b":;" and not self.frames[-1].depth

    def _settle(self) -> str:
        """End the word that was being read; returns the kind of the last thing before the cursor."""
        if self.word:
            if self.word[0] in _DIGITS:
                self.last = "number"
            elif self.word in _KEYWORDS:
                self.last = "from" if self.word == b"from" else "other"
                self.relative &= self.word != b"import"
            else:
                self.last = "name"
            self.word = b""
        return self.last

    def _close(self, byte: int) -> None:
        depth = self.frames[-1].depth
        if not depth and byte == ord("}") and len(self.frames) > 1:
            self.frames.pop()
        else:
            self._change(depth=max(0, depth - 1))
            self.last = "close"

    def _opening(self, frame: _Frame, byte: int) -> None:
        """After one or two quotes: a string begins, a longer quote goes on, or the string was empty."""
        if byte == frame.quote[0] and frame.run == 1:
            self._change(run=2)
        elif byte == frame.quote[0]:
            self.frames[-1] = _Frame("string", quote=frame.quote * 3, fields=frame.fields)
        elif frame.run == 1:
            self.frames[-1] = _Frame("string", quote=frame.quote, fields=frame.fields)
            self.take(byte)
        else:
            self.frames.pop()
            self.last = "string"
            self.take(byte)

    def _string(self, frame: _Frame, byte: int) -> None:
        pending, run = frame.pending, frame.run
        if pending or run:
            self._change(pending=0, run=0)
        if pending == _BACKSLASH and byte in (*_QUOTES, _BACKSLASH, _NEWLINE):
            return
        if pending == ord("{"):
            if byte != ord("{"):
                self.frames.append(_Frame("code"))
                self.last = "other"
                self.take(byte)
        elif byte == _BACKSLASH or (byte == ord("{") and frame.fields):
            self._change(pending=byte)
        elif byte == frame.quote[0]:
            if run + 1 == len(frame.quote):
                self._end()
            else:
                self._change(run=run + 1)
        elif byte == _NEWLINE and len(frame.quote) == 1:
            self._end()
            self.take(byte)

    def _spec(self, byte: int) -> None:
        if byte == ord("{"):
            self.frames.append(_Frame("code"))
            self.last = "other"
        elif byte == ord("}"):
            # The field ends with its format.
            del self.frames[-2:]
        elif byte == self._quote()[0]:
            del self.frames[-2:]
            self.take(byte)

    def _quote(self) -> bytes:
        """Of the string around a replacement field."""
        return next(frame.quote for frame in reversed(self.frames) if frame.kind == "string")

    def _end(self) -> None:
        self.frames.pop()
        self.last = "string"
