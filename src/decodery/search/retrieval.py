"""Finding texts by the words they share with a question."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


class Keywords:
    """Ranks texts by Okapi BM25.

    Source: The Probabilistic Relevance Framework: BM25 and Beyond (2009).

    Args:
        k1, b: How soon repeated words count no more, and how much length counts against.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        counts = [Counter(words(text)) for text in texts]
        sizes = [sum(each.values()) for each in counts]
        mean = sum(sizes) / len(sizes) if any(sizes) else 1.0
        known = Counter(word for each in counts for word in each)
        self._postings: dict[str, list[tuple[int, float]]] = {}
        for number, each in enumerate(counts):
            for word, times in each.items():
                rarity = math.log(1 + (len(texts) - known[word] + 0.5) / (known[word] + 0.5))
                weight = rarity * times * (k1 + 1) / (times + k1 * (1 - b + b * sizes[number] / mean))
                self._postings.setdefault(word, []).append((number, weight))
        self._size = len(texts)

    def best(self, question: str, k: int) -> list[int]:
        """Numbers of the k texts that fit best, best first; of equals the one that comes first."""
        scores = [0.0] * self._size
        for word in set(words(question)):
            for number, weight in self._postings.get(word, ()):
                scores[number] += weight
        return sorted(range(self._size), key=lambda number: -scores[number])[:k]


def words(text: str) -> list[str]:
    """Its words without case."""
    return _WORD.findall(text.casefold())
