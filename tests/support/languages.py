"""Languages over a small vocabulary, models that write them, and what constraints let pass of them."""

from __future__ import annotations

import random

import numpy as np

from decodery.constraints import Choice, ConstraintSpec, Grammar, JSONSchema, PythonType, Regex
from decodery.constraints.tool_calls import ToolCalls
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling import Sampler
from decodery.sampling.constraint import Constrained, Constraint
from decodery.testing import tiny_transformer, to_int8

SIZE = 300
EOS = 290
MERGED = [
    '{"', '":', '","', '": "', "name", "na", "nam", "me", "age", "true", "12", "é", "ab", "abc", "  ", "\n", "ba", "z",
]  # fmt: skip


def make_vocabulary() -> Vocabulary:
    """Every byte, some longer tokens, two ends, a special token, and ids without a text."""
    pieces = [bytes([byte]) for byte in range(256)] + [text.encode() for text in MERGED]
    pieces += [b"\xc3\xa9\xe2"] + [b""] * (SIZE - len(pieces) - 1)
    pieces[EOS], pieces[EOS + 1], pieces[EOS + 2] = b"<eos>", b"<end>", b"<special>"
    merged = sorted(MERGED, key=len, reverse=True)

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        while text:
            found = next((each for each in merged if text.startswith(each)), None)
            ids += [256 + MERGED.index(found)] if found else list(text[0].encode())
            text = text[len(found or text[0]) :]
        return ids

    return Vocabulary(pieces, frozenset({EOS, EOS + 1, EOS + 2}), (EOS, EOS + 1), encode)


VOCABULARY = make_vocabulary()
ENDS = VOCABULARY.eos_ids
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], frozenset({256}), (256,), lambda t: list(t.encode()))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ab", "abc", True]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LANGUAGES: dict[str, ConstraintSpec] = {
    "json-schema": JSONSchema(SCHEMA, "compact"),
    "json-schema, flexible": JSONSchema(SCHEMA, mode="strict"),
    "regex": Regex("(ab|é)*c?"),
    "regex, strict": Regex("[^x]{2,5}name", mode="strict"),
    "grammar": Grammar('start: "(" start ")" | /[ab]+/'),
    "choice": Choice(("name", "age", "na")),
    "python-type": PythonType(list[int]),
    "tool-calls": ToolCalls([{"name": "now"}, {"name": "say", "parameters": SCHEMA}], required=True),
}
TARGET = to_int8(tiny_transformer(0, vocab_size=SIZE))
OTHER = tiny_transformer(1, vocab_size=SIZE)
PROMPTS = [[5, 6, 7], [10, 11] * 6]


def constrained(language: ConstraintSpec, **settings: float) -> Sampler:
    return Sampler((Constrained(language.compile(VOCABULARY)), *Sampler.from_settings(**settings).processors))


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the engine takes a text byte by byte, and lets it end."""
    state = constraint.init([])
    for byte in text.encode():
        if not constraint.permits(state, byte):
            return False
        state = constraint.advance(state, byte)
    return constraint.is_complete(state)


def written(constraint: Constraint, chance: random.Random, longest: int = 160) -> str | None:
    """A text of the engine's, or None where it does not come to an end soon. Endings are preferred, blanks avoided."""
    state, done = constraint.init([]), bytearray()
    for _ in range(longest):
        allowed = np.flatnonzero(constraint.allowed(state))
        if 256 in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return done.decode()
        allowed = allowed[allowed < 256]
        plain = [byte for byte in allowed.tolist() if chr(byte) not in " \n\r\t"]
        plain = plain or allowed.tolist()
        closing = [byte for byte in plain if chr(byte) in '"}]']
        byte = chance.choice(closing if closing and chance.random() < 0.3 else plain)
        done.append(byte)
        state = constraint.advance(state, byte)
    return None
