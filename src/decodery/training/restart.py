"""What a text is worth beside others of its prompt: how likely starting over would not do better.

Labels of Adaptive Inference-Time Compute: LLMs Can Predict if They Can Do Better, Even Mid-Generation (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from decodery.core.errors import SettingsError

P = TypeVar("P")


def not_better(rewards: Sequence[float]) -> list[float]:
    """[m] the share of the m - 1 other samples of a prompt whose reward is no higher than a sample's own.

    Ties count as not better, because the question is whether restarting would do better: where nothing is ever right, a
    wrong text has the label 1, and no further sample is drawn for it.
    """
    if len(rewards) < 2:
        raise SettingsError("a text is compared with others of its prompt: give at least two for each")
    return [(sum(other <= own for other in rewards) - 1) / (len(rewards) - 1) for own in rewards]


def compared(judged: Sequence[tuple[P, str, float]]) -> list[tuple[P, str, float]]:
    """The same (prompt, text, reward), with the label of `not_better` in place of the reward."""
    places: dict[P, list[int]] = {}
    for place, (prompt, _, _) in enumerate(judged):
        places.setdefault(prompt, []).append(place)
    found = list(judged)
    for prompt, own in places.items():
        for place, label in zip(own, not_better([judged[place][2] for place in own]), strict=True):
            found[place] = (prompt, judged[place][1], label)
    return found
