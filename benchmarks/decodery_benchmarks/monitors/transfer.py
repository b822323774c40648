"""What was learned of all kinds of questions but one, asked of that one."""

from __future__ import annotations

from dataclasses import replace

import torch

from decodery.training.activations import Answered
from decodery.training.los import scores as los_scores
from decodery.training.los import train_los
from decodery.training.probe import train_probe, worst
from decodery.training.ranking import auroc, interval

from .align import aligned
from .figures import Row
from .settings import WatchSettings

NAME = "answers, transfer"
_FEWEST = 48
_UNUSED = 0.5
"""A rate that few right answers allow, for a threshold that nothing is flagged by."""


def transferred(answers: list[Answered], site: str, settings: WatchSettings) -> list[Row]:
    """How well what was learned of all other kinds tells one kind's answers, beside what needs no learning.

    FactCheckmate's linear probe on states as they are and in ComnHallu's subspace, LOS-Net on signatures, and the worst
    log-probability.
    """
    found = list[Row]()
    for family in sorted({each.question.family for each in answers}):
        target = [each for each in answers if each.question.family == family]
        source = [each for each in answers if each.question.family != family]
        labels, groups = [each.wrong for each in target], [each.question.group for each in target]
        if len(set(labels)) < 2 or len(source) < _FEWEST:
            continue
        told = _by_states(source, target, site, settings.seed)
        head = train_los(source, epochs=40, rate=_UNUSED, seed=settings.seed)
        told["los"] = los_scores(head, target)
        told["worst log-probability"] = [-float(each.signatures[:, -5].min()) for each in target]
        row: Row = {"testbed": NAME, "what": f"learned of all but {family}", "answers": len(target)}
        for name, scores in told.items():
            low, high = interval(scores, labels, groups)
            row |= {f"AUROC, {name}": round(auroc(scores, labels), 3), f"95 %, {name}": f"{low:.2f} to {high:.2f}"}
        found.append(row)
    return found


def _by_states(source: list[Answered], target: list[Answered], site: str, seed: int) -> dict[str, list[float]]:
    raw = [torch.stack([each.prompt[site] for each in some]).double() for some in (source, target)]
    size = min(64, raw[0].shape[1])
    found = {}
    for name, rows in (("probe as it is", raw), (f"probe in {size} dimensions", aligned(raw[0], raw[1], size))):
        learned, asked = (
            [replace(each, prompt={site: own}) for each, own in zip(some, states, strict=True)]
            for some, states in zip((source, target), rows, strict=True)
        )
        probe = train_probe(learned, (site,), "prompt", rate=_UNUSED, inner=(), seed=seed)
        found[name] = worst(probe, asked)
    return found
