"""Set the threshold of a monitor on texts of one's own: at most so many harmless ones are flagged at any time."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from decodery.core import method_spec
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress, silent
from decodery.models.trained.artifact import TrainedPart
from decodery.monitors.threshold import Threshold
from decodery.step.monitor import Monitor

from .evaluation import CHOSE_NOTHING, doubts, figures, lines_content
from .held_out import compared
from .kind import ARGUMENT, Data, Run, kind, option
from .labelled import LabelledChat, highest_scores, read_chats, written_tokens
from .ranking import parts, word_scores


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
        monitor: What scores them; its action and its own threshold are left out.
        unit: What the rate is of: "text", the last answer of each conversation; or "conversation", all its answers.

    Returns:
        The threshold, and the report of the test part: how well the highest scores rank what is looked for, beside the
        texts' lengths, mean log-probabilities and words, and the shares that the threshold flags.
    """
    scores = highest_scores(lm, chats, monitor, unit=unit, progress=progress)
    tested = parts([each.group for each in chats], seed) == "test"
    harmless = [score for score, each, test in zip(scores, chats, tested, strict=True) if not test and not each.label]
    longest = max(len(written_tokens(lm, part)) for each in chats for part in each.of_unit(unit)) or None
    threshold = Threshold.calibrated(harmless, rate, data, chat=True, tokens=longest, unit=unit)
    test = [each for each, own in zip(chats, tested, strict=True) if own]
    known = [each.label for each in test], [each.group for each in test]
    own = figures([score for score, own in zip(scores, tested, strict=True) if own], *known, threshold.value)
    written = [[(lm.encode(part.prompt), written_tokens(lm, part)) for part in each.of_unit(unit)] for each in test]
    baselines = {"length": figures([sum(len(text) for _, text in each) for each in written], *known)}
    if all(text for each in written for _, text in each):
        baselines["mean log-probability"] = figures([float(np.mean(doubts(lm, each))) for each in written], *known)
    learned = [each for each, own in zip(chats, tested, strict=True) if not own]
    bags = [[" ".join(said["content"] for said in each.messages) for each in some] for some in (learned, test)]
    words = word_scores(bags[0], [each.label for each in learned], bags[1])
    baselines["bag of words"] = figures(words, *known)
    return threshold, {"unit": f"{unit}s", "tested on": CHOSE_NOTHING, **compared(own, baselines)}


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


@dataclass(frozen=True)
class Watched(Data):
    """What a threshold is set on.

    Attributes:
        unit: What the rate is of. text: the last answer. conversation: all answers of a conversation.
    """

    texts: Path = field(default=Path(), metadata=ARGUMENT)
    monitor: str = option("", "Monitor with its settings, such as truthprint:probe=DIR.", required=True)
    rate: float = option(0.1, "Maximum rate of false alarms.")
    unit: Literal["text", "conversation"] = field(default="text", metadata={"option": "--per"})
    seed: int = option(0, "Random seed of the split.")


def _with_setting(monitor: str, setting: str, value: str) -> str:
    """A monitor as it is given, with a setting in place of its own one and of its threshold.

    The other settings stay: the scores that a threshold was set on may go by them.
    """
    name, settings = method_spec.parts(monitor)
    kept = [
        each
        for each in method_spec.split(settings, ",")
        if each.partition("=")[0].strip() not in ("", setting, "threshold")
    ]
    return f"{name}:{','.join([*kept, f'{setting}={value}'])}"


@kind(
    lambda run: "The {} is ready: --monitor {}".format(*run.made),
    (Watched(),),
    "texts.jsonl --monitor confidence:measure=worst --rate 0.05",
    model="that writes the texts",
    out="folder or nothing",
)
def _threshold(run: Run) -> dict[str, Any]:
    """Set the threshold of any monitor on your own TEXTS.

    TEXTS holds one JSON object a line, {"messages": [...], "label": true or false, "group": text}. The monitor
    scores each text as it does while MODEL writes, and the highest score of a text decides: a further harmless text
    like these is flagged at any of its tokens with at most the given rate. A fifth of the groups is the test set,
    whose figures are printed. A monitor with a trained part is written to --out with the new threshold. Give texts
    that it was not trained on.
    """
    given = run.of(Watched)
    chats, watching, no_folder = read_chats(given.texts), resolve("monitor", given.monitor), run.out == Path()
    known = trained_part(watching)
    if (known is None) != no_folder:
        raise SettingsError(
            f"--monitor {given.monitor} has no trained part: leave --out out"
            if known is None
            else f"--monitor {given.monitor} has a trained part, which keeps its threshold: give --out DIR"
        )
    if known is not None and lines_content(given.texts) in known[1].facts.get("learned from", ()):  # type: ignore[attr-defined]
        raise SettingsError(
            f"--monitor {given.monitor} was trained on {given.texts}, and scores of texts that it knows promise "
            "nothing of others: give other texts"
        )
    how: dict[str, Any] = {"unit": given.unit, "seed": given.seed, "data": str(given.texts)}
    found, report = calibrate(run.lm, chats, watching, given.rate, progress=run.progress, **how)
    if known is None:
        run.made = "threshold", _with_setting(given.monitor, "threshold", repr(found.value))
    else:
        setting, part = known
        with_threshold(part, found, report | {"command": run.command}).save(run.out / part.FILE)
        run.made = "monitor", _with_setting(given.monitor, setting, str(run.out))
    return report | {"threshold": found.facts()}
