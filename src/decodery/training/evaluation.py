"""One report for all trained monitors: the part that chose nothing, with intervals, baselines and a control."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.monitors.threshold import Threshold

from .held_out import Measured, compared
from .kind import Run
from .lines import read_lines
from .loop import content
from .ranking import auroc, interval, part_of, ranked, turned, word_scores
from .tensors import int_tensor

Item = TypeVar("Item")
Part = TypeVar("Part")

CHOSE_NOTHING = "the test part, which chose nothing"
SEEDS = 3
"""How many trainings, each with a split of its own, a report has the AUROC of."""
NOWHERE = 1e9
"""A threshold that no score is above."""


@dataclass(frozen=True)
class MonitorContext:
    """What the training of a monitor's part is given beside its settings.

    Attributes:
        chat, tokens: Whether prompts have the chat template, and how long texts can be: what the threshold is for.
    """

    model: str = ""
    data: str = ""  # What is learned from, for the facts of the threshold
    chat: bool | None = None
    tokens: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None  # The folder of the checkpoints; None to keep none.
    progress: Progress = silent

    @classmethod
    def of(cls, run: Run, **more: Any) -> MonitorContext:
        """That of a run; the facts know the files that it learns from, under any name."""
        files = [each for given in run.settings for each in vars(given).values() if isinstance(each, Path)]
        facts = {**run.facts, "learned from": [lines_content(each) for each in files if each.is_file()]}
        return cls(run.lm.model.fingerprint, facts=facts, out=run.training, progress=run.progress, **more)

    def threshold(self, harmless: Ordered[float], rate: float) -> Threshold:
        """The threshold by the highest scores of harmless texts, of which it flags a share `rate` at most."""
        return Threshold.calibrated(harmless, rate, self.data, chat=self.chat, tokens=self.tokens)

    def unset(self, rate: float) -> Threshold:
        """A threshold that is not known yet."""
        return Threshold(0.5, rate, 0, self.data)


def lines_content(path: Path) -> str:
    """What a file has in common with its copies: the SHA-256 of its lines, in any order."""
    return content(sorted(read_lines(path)))


ALONE = MonitorContext()
"""That of a training outside of a run."""


@dataclass(frozen=True)
class Evaluation(Generic[Item, Part]):
    """How a monitor is trained, and what it is compared with.

    Attributes:
        train: the trained part of labelled items, called with `seed=`. What it learns from and chooses by are items of
            the parts "train", "validation" and "calibration" of `ranking.parts` with that seed.
        baselines: numbers of an item that need no monitor. The train part says which way round each is read.
        limit: the trained part flags scores above it; None where it flags nothing.
    """

    train: Callable[..., Part]
    score: Callable[[Part, Ordered[Item]], list[float]]  # of each item, as the monitor has it for a whole text
    label: Callable[[Item], bool]  # whether an item is what the monitor looks for
    group: Callable[[Item], str]  # what must not be both learned from and tested on
    relabel: Callable[[Item, Item], Item]  # the first item with the label of the second
    baselines: Mapping[str, Callable[[Item], float]]
    limit: Callable[[Part], float | None] = lambda part: None
    words: Callable[[Item], str] | None = None  # the text of an item, for a bag of its words as one more baseline

    def run(
        self, items: Ordered[Item], seed: int, unit: str, others: Mapping[str, Ordered[Item]] | None = None
    ) -> tuple[Part, dict[str, Any]]:
        """Train the part, others with further seeds, and the control, and test all of them.

        Args:
            others: The same items in other forms, by name, of each of which another training is a baseline.

        Returns:
            The trained part, and its report; see `compared` and `figures`. "auroc by seed" has that of this seed and of
            the next ones, None where a split has too few items of a kind. The control is the same training on labels
            that were shuffled over all items, tested on such labels: its interval should hold 0.5.

        Raises:
            SettingsError: there are too few items to learn from.
        """
        trained = self.train(items, seed=seed)
        own, baselines = self.tested(trained, items, seed)
        baselines |= {name: self.again(known, seed) for name, known in (others or {}).items()}
        further = [self.again(items, other) for other in range(seed + 1, seed + SEEDS)]
        order = np.random.default_rng(seed).permutation(len(items))
        mixed = [self.relabel(one, items[at]) for one, at in zip(items, order.tolist(), strict=True)]
        report = {"unit": unit, "tested on": CHOSE_NOTHING, **compared(own, baselines, self.again(mixed, seed))}
        report["auroc by seed"] = [own["auroc"], *(each and each["auroc"] for each in further)]
        return trained, report

    def again(self, items: Ordered[Item], seed: int) -> Measured | None:
        """The `figures` of another training; None where there is too little to learn from."""
        try:
            part = self.train(items, seed=seed)
        except SettingsError:
            return None
        test = part_of(items, self.group, seed, "test")
        return figures(self._scored(part, test), *self._known(test))

    def tested(self, trained: Part, items: Ordered[Item], seed: int) -> tuple[Measured, dict[str, Measured | None]]:
        """What a trained part and the baselines say of the test part of items."""
        test, learned = (part_of(items, self.group, seed, name) for name in ("test", "train"))
        known, labels = self._known(test), self._known(learned)[0]
        baselines: dict[str, Measured | None] = {}
        for name, measure in self.baselines.items():
            values, others = ([measure(each) for each in some] for some in (test, learned))
            baselines[name] = figures(turned(values, others, labels), *known)
        if self.words is not None:
            texts, words = ([self.words(each) for each in some] for some in (test, learned))
            baselines["bag of words"] = figures(word_scores(words, labels, texts), *known)
        return figures(self._scored(trained, test), *known, self.limit(trained)), baselines

    def _scored(self, part: Part, items: Ordered[Item]) -> list[float]:
        # Of few groups none may fall into the test part.
        return self.score(part, items) if items else []

    def _known(self, items: Ordered[Item]) -> tuple[list[bool], list[str]]:
        return [self.label(each) for each in items], [self.group(each) for each in items]


def figures(scores: Ordered[float], wrong: Ordered[bool], groups: Ordered[str], limit: float | None = None) -> Measured:
    """How well scores rank what is looked for.

    Args:
        limit: scores above it are flagged; None for no flags.

    Returns:
        `items`, the `groups` that they are of, such as prompts, the `base rate`, `auroc` and its 95 % `interval` over
        groups, and with a limit the shares `flagged of harmless` and `flagged of wanted`; None for what cannot be said,
        as of items of one kind.
    """
    labels = np.asarray(wrong, dtype=bool)
    found: dict[str, Any] = {"items": len(labels), "groups": len(set(groups))}
    found["base rate"] = _said(labels.mean()) if len(labels) else None
    both = len(set(labels.tolist())) == 2
    found["auroc"] = _said(auroc(scores, wrong)) if both else None
    found["interval"] = [_said(edge) for edge in interval(scores, wrong, groups)] if both else None
    if limit is not None:
        flagged = np.asarray(scores, dtype=float) > limit
        for name, kind in (("flagged of harmless", ~labels), ("flagged of wanted", labels)):
            found[name] = _said(flagged[kind].mean()) if kind.any() else None
    return ranked(found, "auroc", scores, labels.tolist(), groups)


def keep_evaluated(part: Any, report: Mapping[str, Any], path: Path, **more: Any) -> dict[str, Any]:
    """Write a trained part with its report in its facts.

    Returns:
        What is printed: the report, and where the part flags.
    """
    replace(part, facts={**part.facts, "report": report}).save(path)
    limit = {} if part.threshold.value >= NOWHERE else {"threshold": part.threshold.facts()}
    return {**more, **report, **limit}


@torch.no_grad()
def doubts(lm: LLM, texts: Ordered[tuple[Ordered[int], Ordered[int]]]) -> list[float]:
    """The mean of -log p over the tokens of each text, in nats.

    Args:
        texts: what stands before each text, at least one token, and the text, at least one token.
    """
    found = []
    for before, text in texts:
        tokens, first = [*before, *text], len(before) - 1
        rows = range(first, len(tokens) - 1)
        segment = Segment.chunk(tokens, lm.model.new_cache(), logit_rows=list(rows))
        found.append(doubt_of(lm.model.forward(Batch([segment])).logits, text))
    return found


def doubt_of(logits: torch.Tensor, text: Ordered[int]) -> float:
    """The mean of -log p over the tokens of a text, in nats, from the logits [n, vocab] before each."""
    written = int_tensor(list(text)).to(logits.device)
    return -float(logits.double().log_softmax(dim=-1).gather(1, written[:, None]).mean())


def _said(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)
