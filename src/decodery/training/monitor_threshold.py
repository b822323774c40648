"""Set the threshold of a monitor on texts of one's own: at most so many harmless ones are flagged at any time."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

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
from .ranking import parts, turned, word_scores

Item = TypeVar("Item")


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
        texts' lengths, mean log-probabilities and words, and the shares that the threshold flags. The other texts say
        which way round lengths and log-probabilities are read.
    """
    scores = highest_scores(lm, chats, monitor, unit=unit, progress=progress)
    tested = parts([each.group for each in chats], seed) == "test"

    def split(values: Iterable[Item]) -> tuple[list[Item], list[Item]]:
        """Those of the test part, and the others."""
        pairs = list(zip(values, tested.tolist(), strict=True))
        return [each for each, own in pairs if own], [each for each, own in pairs if not own]

    labels, known = split(each.label for each in chats)
    groups, _ = split(each.group for each in chats)
    said, before = split(scores)
    harmless = [score for score, label in zip(before, known, strict=True) if not label]
    written = [[(lm.encode(part.prompt), written_tokens(lm, part)) for part in each.of_unit(unit)] for each in chats]
    longest = max(len(text) for each in written for _, text in each) or None
    threshold = Threshold.calibrated(harmless, rate, data, chat=True, tokens=longest, unit=unit)
    measures = {"length": [float(sum(len(text) for _, text in each)) for each in written]}
    if all(text for each in written for _, text in each):
        measures["mean log-probability"] = [float(np.mean(doubts(lm, each))) for each in written]
    baselines = {name: figures(turned(*split(values), known), labels, groups) for name, values in measures.items()}
    test, learned = split(" ".join(each["content"] for each in chat.messages) for chat in chats)
    baselines["bag of words"] = figures(word_scores(learned, known, test), labels, groups)
    own = figures(said, labels, groups, threshold.value)
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
