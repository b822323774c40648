"""Shorter prompts for a model as it is: pairs of tokens that a batch has often become one row each.

Retrofitting Large Language Models with Dynamic Tokenization (2024). Nothing but the prompt's embeddings changes: its
text stays the same bytes, what is written after it has the model's own tokens, and without merges it is the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decodery.core.errors import SettingsError

from ..tokenizers.tokenizer import Tokenizer

Within = Literal["word", "sentence"]
_MIDDLE = {"word": re.compile(r"\s(?=\S)|(?<=\S)\s"), "sentence": re.compile(r"[.!?](?=\s)|\n")}
"""What may not stand within a merged token, its first character left aside."""

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Merged:
    """One text after merges.

    Attributes:
        spans: [m] first and last + 1 of the original tokens that each row stands for.
    """

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def ids(self) -> list[int]:
        """[m] a token for each row: where it stands for several, their last one."""
        return [self.tokens[stop - 1] for _, stop in self.spans]

    @property
    def shorter(self) -> float:
        """Share of the rows that are gone."""
        return 1.0 - len(self.spans) / max(len(self.tokens), 1)


def merged(
    texts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    *,
    merges: int | None = None,
    shorter: float | None = None,
    within: Within = "word",
) -> list[Merged]:
    """Texts of token ids in which the most frequent pairs of neighbours are merged repeatedly.

    Special tokens are never merged. Of pairs that are as frequent the one whose bytes come first is merged.

    Args:
        merges: How many pairs at most.
        shorter: Until so large a share of all rows is gone; None for as many as there are.
        within: "word", what the tokenizer would split stays apart; or "sentence".

    Raises:
        SettingsError: For other settings.
    """
    if within not in _MIDDLE or (merges is not None and merges < 0) or not 0 <= (shorter or 0.0) < 1:
        raise SettingsError("merges need a number of at least 0, a share below 1, and within='word' or 'sentence'")
    work = _Merging(texts, tokenizer, within)
    while merges is None or work.done < merges:
        if shorter is not None and work.left <= (1.0 - shorter) * len(work.words):
            break
        if not work.step():
            break
    return work.texts()


class _Merging:
    """Rows of all texts in one list, each knowing its neighbours; and where every pair of neighbours stands."""

    def __init__(self, texts: Sequence[Sequence[int]], tokenizer: Tokenizer, within: Within) -> None:
        self._whole, self._tokenizer, self._within = [tuple(text) for text in texts], tokenizer, within
        ids = [token for text in self._whole for token in text]
        # Special tokens are no bytes that could be merged.
        self.words = [b"" if id in tokenizer.special_ids else tokenizer.piece(id) for id in ids]
        self.stops = list(range(1, len(ids) + 1))
        self.before, self.behind = [place - 1 for place in range(len(ids))], [place + 1 for place in range(len(ids))]
        first = 0
        for text in self._whole:
            if text:
                self.before[first], self.behind[first + len(text) - 1] = -1, -1
            first += len(text)
        self.left, self.done = len(ids), 0
        self.places: dict[Pair, set[int]] = {}
        self._valid: dict[Pair, bool] = {}
        for place in range(len(ids)):
            self._note(place)

    def step(self) -> bool:
        """Merge the most frequent pair, from left to right; False where there is none."""
        if not self.places:
            return False
        pair = min(self.places, key=lambda each: (-len(self.places[each]), each))
        for place in sorted(self.places[pair]):
            # Where one text has the same word three times, the middle one is gone already.
            if place in self.places.get(pair, ()):
                self._join(place)
        self.places.pop(pair, None)
        self.done += 1
        return True

    def texts(self) -> list[Merged]:
        found, first = list[Merged](), 0
        for text in self._whole:
            spans, place = list[tuple[int, int]](), first if text else -1
            while place >= 0:
                spans.append((place - first, self.stops[place] - first))
                place = self.behind[place]
            found.append(Merged(text, tuple(spans)))
            first += len(text)
        return found

    def _join(self, place: int) -> None:
        """Make one row of the one at `place` and the one after it."""
        gone = self.behind[place]
        for each in (self.before[place], place, gone):
            self._forget(each)
        self.words[place] += self.words[gone]
        self.stops[place] = self.stops[gone]
        self.behind[place] = behind = self.behind[gone]
        if behind >= 0:
            self.before[behind] = place
        self.left -= 1
        self._note(self.before[place])
        self._note(place)

    def _pair(self, place: int) -> Pair | None:
        """What stands at a place and after it."""
        behind = self.behind[place] if place >= 0 else -1
        if behind < 0 or not self.words[place] or not self.words[behind]:
            return None
        return self.words[place], self.words[behind]

    def _note(self, place: int) -> None:
        pair = self._pair(place)
        if pair is not None and self._fits(pair):
            self.places.setdefault(pair, set()).add(place)

    def _forget(self, place: int) -> None:
        pair = self._pair(place)
        if pair is not None and pair in self.places:
            self.places[pair].discard(place)
            if not self.places[pair]:
                del self.places[pair]

    def _fits(self, pair: Pair) -> bool:
        if pair not in self._valid:
            self._valid[pair] = self._is_one(pair[0] + pair[1])
        return self._valid[pair]

    def _is_one(self, whole: bytes) -> bool:
        try:
            text = whole.decode()
        except UnicodeDecodeError:
            # A part of a character, which nothing splits.
            return True
        if _MIDDLE[self._within].search(text, 1):
            return False
        splits = self._tokenizer.backend.pre_tokenizer if self._within == "word" else None
        return splits is None or len(splits.pre_tokenize_str(text)) == 1
