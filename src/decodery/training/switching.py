"""Find the entropy at which a small model should hand over to a large one, for a wanted share of the large one."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import replace

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.entropy_adaptive import EntropyAdaptive
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel


def calibrate(
    model: LanguageModel,
    source: EntropyAdaptive,
    prompts: Ordered[Ordered[int]],
    share: float,
    *,
    length: int = 64,
    rounds: int = 7,
    highest: float = 8.0,
    progress: Progress = silent,
) -> EntropyAdaptive:
    """`source` with the threshold at which the large `model` writes a given share of the tokens.

    The share falls as the threshold rises, so the interval from 0 to `highest` bits is halved `rounds` times; of all
    thresholds tried the one that came closest is taken.

    Args:
        length: Tokens per text.

    Raises:
        SettingsError: For a share outside [0, 1] or no prompts.
    """
    if not 0 <= share <= 1 or not prompts:
        raise SettingsError(f"calibration needs a share between 0 and 1, not {share}, and at least one prompt")
    low, high = 0.0, highest
    tried: dict[float, float] = {}
    for number in range(rounds):
        threshold = (low + high) / 2
        tried[threshold] = large_share(model, replace(source, threshold=threshold), prompts, length)
        if tried[threshold] > share:
            low = threshold
        else:
            high = threshold
        progress("calibrating", number + 1, rounds)
    return replace(source, threshold=min(tried, key=lambda threshold: abs(tried[threshold] - share)))


def large_share(model: LanguageModel, source: EntropyAdaptive, prompts: Ordered[Ordered[int]], length: int) -> float:
    """The share of tokens that the large model writes in greedy texts of `length` tokens."""
    engine = Engine(model)
    texts = [engine.submit(Request(prompt, length, logits_source=source)) for prompt in prompts]
    engine.run(texts)
    by_large = sum(text.trace.ledger.counts.get("large tokens", 0) for text in texts)
    return by_large / sum(len(text.generated) for text in texts)
