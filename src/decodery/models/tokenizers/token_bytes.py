"""The bytes that tokens stand for, by how a tokenizer spells them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from decodery.core.errors import UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """How a tokenizer spells bytes in its tokens.

    Args:
        between: What stands before every token but the first of a text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        from tokenizers import models

        steps = _flatten(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        words = not steps and isinstance(backend.model, models.WordLevel)
        self.between = b" " if words else b""
        kinds = [step["type"] for step in steps]
        self.byte_level = "ByteLevel" in kinds
        self._replacements = [
            (step["pattern"].get("String", ""), step["content"]) for step in steps if step["type"] == "Replace"
        ]
        self._replacements += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
        known = {"ByteLevel", "Fuse"} if self.byte_level else {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        understood = known.issuperset(kinds) and all(pattern for pattern, _ in self._replacements)
        if not words and not (kinds and understood):
            names = ", ".join(kinds) or "none"
            raise UnsupportedModel(
                f"the tokenizer's decoder ({names}) is neither byte-level nor SentencePiece, and its model "
                f"({type(backend.model).__name__}) not one of words: use a checkpoint whose tokenizer is one of these"
            )
        self.strips_first_space = words or any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        self._alphabet = byte_alphabet() if self.byte_level else {}

    def of(self, token: str) -> bytes:
        """The bytes that a token stands for inside a text, by its own spelling."""
        if self.byte_level:
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError:
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return self.between + token.encode()


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for part in step["decoders"] for inner in _flatten(part)] if "decoders" in step else [step]


def byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level tokenizers (GPT-2, 2019) spell each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
