"""Questions whose answers can be checked: what tells a monitor which texts were wrong, with no judge."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decodery.core.errors import SettingsError

from .built_in import built_in_data
from .lines import read_texts

_SHOTS = "Question: What is 2 + 3?\nAnswer: 5\n\nQuestion: What is the capital of Mexico?\nAnswer: Mexico City\n\n"
FAMILIES = ("sums", "capitals")


@dataclass(frozen=True, slots=True)
class CheckableQuestion:
    """A question whose answer can be checked."""

    prompt: str  # Plain text, after which the answer is the rest of the line, or what a user says in a chat
    answer: str
    group: str  # What must not be both learned from and tested on
    family: str = ""
    stratum: str = ""  # How hard it looks from outside, such as its number of digits

    def right(self, text: str) -> bool:
        """Exact match of the first line, without case, accents, outer punctuation and a leading article."""
        return _plain(text.strip().partition("\n")[0]) == _plain(self.answer)

    def held_by(self, text: str) -> bool:
        """Whether a text holds the answer as whole words, without case and accents."""
        return re.search(rf"(?<!\w){re.escape(_bare(self.answer))}(?!\w)", _bare(text)) is not None


def question(text: str, chat: bool) -> str:
    """A question as a user's message, or as a plain text after examples that show what an answer is."""
    return text if chat else f"{_SHOTS}Question: {text}\nAnswer:"


def capitals() -> dict[str, str]:
    """Of 116 countries."""
    return dict(built_in_data("capitals"))


def built_in(
    count: int,
    seed: int = 0,
    families: tuple[str, ...] = FAMILIES,
    *,
    chat: bool = False,
    more: Iterable[CheckableQuestion] = (),
) -> list[CheckableQuestion]:
    """`count` questions in random order: sums of numbers of up to three digits, and capitals."""
    if count < 1 or not families or set(families) - set(FAMILIES):
        raise SettingsError(f"built-in questions are of {', '.join(FAMILIES)}, and at least one is needed")
    random, found = np.random.default_rng(seed), dict[str, CheckableQuestion]()
    if "capitals" in families:
        for country, capital in capitals().items():
            asked = question(f"What is the capital of {country}?", chat)
            found[country] = CheckableQuestion(asked, capital, country, "capitals", "capitals")
    found |= {each.group: each for each in more}
    # At least every other one, where there are fewer than there are capitals.
    wanted = len(found) + max(count - len(found), (count + 1) // 2)
    while "sums" in families and len(found) < wanted:
        digits = random.integers(1, 4, 2)
        one, other = (int(random.integers(10 ** (n - 1) if n > 1 else 0, 10**n)) for n in digits)
        group = f"{min(one, other)}+{max(one, other)}"
        asked = question(f"What is {one} + {other}?", chat)
        found.setdefault(group, CheckableQuestion(asked, str(one + other), group, "sums", f"sums {sum(digits)}"))
    questions = list(found.values())
    return [questions[at] for at in random.permutation(len(questions))[:count]]


def read_checkable(path: Path) -> list[CheckableQuestion]:
    """Of a file of JSON lines {"prompt": text, "answer": text, "group": text}.

    Without a group each stands alone.
    """
    return [CheckableQuestion(*each) for each in read_texts(path, "prompt", "answer", "group")]


def _plain(text: str) -> str:
    return re.sub(r"^(the|a|an) ", "", _bare(text).strip(" \t.,;:!?\"'"))


def _bare(text: str) -> str:
    """Without case and accents."""
    return "".join(each for each in unicodedata.normalize("NFKD", text) if not unicodedata.combining(each)).casefold()
