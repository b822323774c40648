"""What the wording of a text says about it: its length, and how often it hedges, thinks aloud and argues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

HEDGING = ("maybe", "perhaps", "might", "possibly", "probably", "likely", "unlikely", "not sure", "i think", "i guess")
THINKING = ("wait", "hmm", "let me check", "let me see", "alternatively", "actually", "hold on", "on second thought")
DISCOURSE = ("therefore", "thus", "so", "because", "first", "second", "next", "then", "finally", "hence", "since")


def _of(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(sorted(words, key=len, reverse=True))})\b", re.IGNORECASE)


_MARKERS = tuple(_of(words) for words in (HEDGING, THINKING, DISCOURSE))


@dataclass(frozen=True)
class TextFeatures:
    """Of one text.

    Attributes:
        length: Tokens.
        hedging, thinking, discourse: Markers of each kind per 1000 tokens.
    """

    length: float
    hedging: float
    thinking: float
    discourse: float


def features(text: str, length: int) -> TextFeatures:
    """Features [4] of one text.

    Args:
        length: Its tokens.
    """
    counts = [len(markers.findall(text)) * 1000 / max(length, 1) for markers in _MARKERS]
    return TextFeatures(float(length), *counts)


def standardised(pool: Sequence[TextFeatures]) -> np.ndarray:
    """[n, 4] features with mean 0 and deviation 1 within the pool: they compare texts, not problems.

    A feature that is the same in all texts is 0.
    """
    rows = np.array([astuple(each) for each in pool])
    centred = rows - rows.mean(axis=0)
    spread = rows.std(axis=0)
    same = np.ptp(rows, axis=0) == 0
    return np.where(same, 0.0, centred / np.where(same, 1.0, spread))
