"""Arithmetic coding with integer frequencies: exact, whatever machine does it."""

from __future__ import annotations

BITS = 64
"""Of the coder's state."""
_TOP = 1 << BITS - 1
_SECOND = 1 << BITS - 2
_MASK = (1 << BITS) - 1


class ArithmeticEncoder:
    """Turns symbols into bits.

    Of every symbol it is told where its share of the frequencies begins and ends.
    """

    def __init__(self) -> None:
        self._low, self._high, self._pending = 0, _MASK, 0
        self._bits: list[int] = []

    def push(self, begin: int, end: int, total: int) -> None:
        """Write a symbol that has the frequencies from `begin` to before `end` of `total`."""
        span = self._high - self._low + 1
        self._high = self._low + span * end // total - 1
        self._low += span * begin // total
        while not (self._low ^ self._high) & _TOP:
            self._emit(self._low >> BITS - 1)
            self._low, self._high = self._low << 1 & _MASK, (self._high << 1 | 1) & _MASK
        # Both come near the middle from its two sides: which side it is will be known later.
        while self._low & _SECOND and not self._high & _SECOND:
            self._pending += 1
            self._low, self._high = self._low << 1 & _TOP - 1, (self._high << 1 | 1) & _MASK | _TOP

    def finish(self) -> bytes:
        """All bits, and as many zeros as the last byte needs."""
        self._pending += 1
        self._emit(self._low >> BITS - 2 & 1)
        bits = self._bits + [0] * (-len(self._bits) % 8)
        return bytes(int("".join(map(str, bits[at : at + 8])), 2) for at in range(0, len(bits), 8))

    def _emit(self, bit: int) -> None:
        self._bits += [bit] + [1 - bit] * self._pending
        self._pending = 0


class ArithmeticDecoder:
    """Reads the symbols back from the bytes of an `ArithmeticEncoder`.

    For each symbol ask for `target`, find whose share it lies in, and tell `pull`.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._next = data, 0
        self._low, self._high, self._code = 0, _MASK, 0
        for _ in range(BITS):
            self._read()

    @property
    def beyond(self) -> bool:
        """Whether it reads what no encoder has written: more bits than follow a text's last symbol."""
        return self._next > 8 * len(self._data) + BITS

    def target(self, total: int) -> int:
        """A frequency below `total`, which lies in the next symbol's share."""
        span = self._high - self._low + 1
        return ((self._code - self._low + 1) * total - 1) // span

    def pull(self, begin: int, end: int, total: int) -> None:
        """Go past a symbol, as `ArithmeticEncoder.push` does."""
        span = self._high - self._low + 1
        self._high = self._low + span * end // total - 1
        self._low += span * begin // total
        while not (self._low ^ self._high) & _TOP:
            self._low, self._high = self._low << 1 & _MASK, (self._high << 1 | 1) & _MASK
            self._read()
        while self._low & _SECOND and not self._high & _SECOND:
            self._low, self._high = self._low << 1 & _TOP - 1, (self._high << 1 | 1) & _MASK | _TOP
            self._code ^= _SECOND
            self._read()

    def _read(self) -> None:
        byte, place = divmod(self._next, 8)
        bit = self._data[byte] >> 7 - place & 1 if byte < len(self._data) else 0
        self._code, self._next = self._code << 1 & _MASK | bit, self._next + 1
