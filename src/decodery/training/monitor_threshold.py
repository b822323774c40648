"""Set the threshold of a monitor on texts of one's own: at most so many harmless ones are flagged at any time."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from decodery.models.loaders.store import Progress, silent
from decodery.models.trained.artifact import TrainedPart
from decodery.monitors.threshold import Threshold
from decodery.step.monitor import Monitor

from .evaluation import figures
from .labelled import LabelledChat, highest_scores, written_tokens
from .ranking import parts

if TYPE_CHECKING:
    from decodery.llm.llm import LLM


def calibrate(
    lm: LLM,
    chats: Ordered[LabelledChat],
    monitor: Monitor,
    rate: float,
    *,
    unit: str = "text",
    seed: int = 0,
    data: str = "",
    progress: Progress = silent,
) -> tuple[Threshold, dict[str, Any]]:
    """The threshold that flags a harmless text at any of its tokens with probability `rate` at most.

    The monitor itself scores each text token by token, as it does in use; the highest score of a text decides. Four
    fifths of the groups calibrate, see `Threshold.calibrated`; the rest is tested.

    Args:
        lm: The model.
        chats: Texts with labels.
        monitor: What scores them; its action and its own threshold are left out.
        rate: Of harmless texts that are flagged at most.
        unit: What the rate is of: "text", the last answer of each conversation; or "conversation", all its answers.
        seed: Of the split.
        data: What the texts are, for the threshold's facts.
        progress: Called with how many are done.

    Returns:
        The threshold, and the report of the test part: how well the highest scores rank what is looked for, and the
        shares that the threshold flags.

    Raises:
        SettingsError: There are too few harmless texts for the rate.
    """
    scores = highest_scores(lm, chats, monitor, unit=unit, progress=progress)
    tested = parts([each.group for each in chats], seed) == "test"
    harmless = [score for score, each, test in zip(scores, chats, tested, strict=True) if not test and not each.label]
    longest = max(len(written_tokens(lm, part)) for each in chats for part in each.of_unit(unit)) or None
    threshold = Threshold.calibrated(harmless, rate, data, chat=True, tokens=longest, unit=unit)
    test = [(score, each) for score, each, own in zip(scores, chats, tested, strict=True) if own]
    found: dict[str, Any] = {"unit": f"{unit}s", "tested on": "the test part, which chose nothing"}
    found |= figures(
        [score for score, _ in test],
        [each.label for _, each in test],
        [each.group for _, each in test],
        threshold.value,
    )
    return threshold, found


def trained_part(monitor: Monitor) -> tuple[str, TrainedPart] | None:
    """The setting of a monitor whose trained part has a threshold, and the part; None where it has none."""
    for each in fields(monitor):
        part = getattr(monitor, each.name)
        if isinstance(part, TrainedPart) and hasattr(part, "threshold"):
            return each.name, part
    return None


def with_threshold(part: TrainedPart, threshold: Threshold, report: dict[str, Any]) -> TrainedPart:
    """A trained part that flags above another threshold; the report of it stands in its facts."""
    facts = {**part.facts, "calibration": report}  # type: ignore[attr-defined]
    return replace(part, threshold=threshold, facts=facts)  # type: ignore[type-var]
