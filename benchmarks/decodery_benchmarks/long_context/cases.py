"""Texts with one right answer: a needle in a filler, and a line of a list."""

from __future__ import annotations

import random
from dataclasses import dataclass

from decodery.bench.workloads import documents
from decodery.llm.llm import LLM

from .settings import ContextSettings

WORDS = (
    *("apple", "river", "stone", "candle", "window", "garden", "silver", "tiger", "pencil", "bridge", "cloud"),
    *("violin", "anchor", "basket", "copper", "desert", "engine", "falcon", "guitar", "hammer", "island", "kettle"),
)
FILLER = "The grass is green. The sky is blue. The sun is warm. Here we go. There and back again."
_FILLER_TOKENS = 25
DEPTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_LINES = 8
PROMPT, FOLLOWING, TEXTS = 256, 64, 5
"""Tokens of a text that a policy takes for the prompt, tokens after it that are scored, and how many texts."""


@dataclass(frozen=True)
class Case:
    """document, question: token ids. answer: the text that must come. span: tokens of the document that hold it."""

    document: list[int]
    question: list[int]
    answer: str
    span: tuple[int, int]


def cases(lm: LLM, settings: ContextSettings) -> dict[str, list[Case]]:
    """By task: needles by depth in texts of every length, and lines."""
    draw = random.Random(settings.seed)
    lengths = [(length, depth) for length in settings.input_tokens for depth in DEPTHS]
    return {
        "needle": [_needle(lm, draw, length, depth) for length, depth in lengths],
        "lines": [_lines(lm, draw) for _ in range(settings.prompts)],
    }


def texts(lm: LLM) -> list[list[int]]:
    """Passages [PROMPT + FOLLOWING] that a policy reads the beginning of as a prompt."""
    size, read = PROMPT + FOLLOWING, [_encode(lm, document) for document in documents().values()]
    found = [tokens[at : at + size] for at in range(200, 200 + TEXTS * size, size) for tokens in read]
    return [tokens for tokens in found if len(tokens) == size][:TEXTS]


def _encode(lm: LLM, text: str) -> list[int]:
    return lm.tokenizer.encode(text, special=False)


def _needle(lm: LLM, draw: random.Random, length: int, depth: float) -> Case:
    word, number = draw.choice(WORDS), str(draw.randrange(10000, 100000))
    parts = [FILLER] * (length // _FILLER_TOKENS)
    before = _encode(lm, " ".join(parts[: round(depth * len(parts))]) + "\n")
    needle = _encode(lm, f"The secret number of {word} is {number}.\n")
    after = _encode(lm, " ".join(parts[round(depth * len(parts)) :]))
    asked = f"\nQuestion: What is the secret number of {word}?\nAnswer: The secret number of {word} is"
    span = len(before), len(before) + len(needle)
    return Case(before + needle + after, _encode(lm, asked), number, span)


def _lines(lm: LLM, draw: random.Random) -> Case:
    words = draw.sample(WORDS, _LINES)
    numbers = {word: str(draw.randrange(10000, 100000)) for word in words}
    document, spans = _encode(lm, "Here is a list.\n"), {}
    for word in words:
        line = _encode(lm, f"line {word}: {numbers[word]}\n")
        spans[word] = len(document), len(document) + len(line)
        document += line
    asked = draw.choice(words)
    question = _encode(lm, f"The value on the line {asked} was:\nline {asked}:")
    return Case(document, question, numbers[asked], spans[asked])
