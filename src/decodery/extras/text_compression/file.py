"""A compressed text as a file: what it was made with, its bits, and sums that tell damage."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass

from decodery.core.errors import CorruptFile

MAGIC = b"dcy1"
MOST_BYTES = 1 << 24
"""Of a text."""
MOST_WINDOW = 1 << 20
_DIGEST = 8
_SUM = 4


@dataclass(frozen=True)
class Header:
    """The beginning of a compressed file.

    Attributes:
        model: First bytes of the hash of its weights and its tokenizer.
        text: Of the hash of the text.
        size: Of the text in bytes.
        tokens: How many were coded; 0 of a text that is not empty: it stands there as it is.
        window, overlap: How many tokens the model saw at most, and how many it read again when that was full.
    """

    model: bytes
    text: bytes
    size: int
    tokens: int
    window: int
    overlap: int


def digest(data: bytes) -> bytes:
    """What a header keeps of a hash."""
    return hashlib.sha256(data).digest()[:_DIGEST]


def pack(header: Header, payload: bytes) -> bytes:
    """The file."""
    numbers = b"".join(_varint(each) for each in (header.size, header.tokens, header.window, header.overlap))
    whole = MAGIC + header.model + header.text + numbers + payload
    return whole + zlib.crc32(whole).to_bytes(_SUM, "little")


def unpack(data: bytes) -> tuple[Header, bytes]:
    """Header and payload of a file.

    Raises:
        CorruptFile: For anything that `pack` did not write.
    """
    if not data.startswith(MAGIC):
        raise CorruptFile(
            "this is no text that decodery has compressed: give a file that `decodery compress-text` made"
        )
    if len(data) > 2 * MOST_BYTES or zlib.crc32(data[:-_SUM]) != int.from_bytes(data[-_SUM:], "little"):
        raise _damaged()
    at = len(MAGIC) + 2 * _DIGEST
    model, text = data[len(MAGIC) : len(MAGIC) + _DIGEST], data[len(MAGIC) + _DIGEST : at]
    numbers = []
    for _ in range(4):
        value, at = _read_varint(data[:-_SUM], at)
        numbers.append(value)
    header = Header(model, text, *numbers)
    sound = header.tokens <= header.size <= MOST_BYTES
    if not sound or not 0 < header.overlap < header.window <= MOST_WINDOW:
        raise _damaged()
    return header, data[at:-_SUM]


def check_text(header: Header, text: bytes) -> None:
    """Raise CorruptFile where what came out is not what went in."""
    if len(text) != header.size or digest(text) != header.text:
        raise CorruptFile(
            "the text that comes out is not the one that went in: the file is damaged, or this machine computes "
            "otherwise than the one that made it"
        )


def _damaged() -> CorruptFile:
    return CorruptFile("the compressed text is damaged: get the file again, or compress the text again")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next one begins."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise _damaged()
