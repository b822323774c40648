"""TruthPrInt's claim: where a probe of tokens flags, at a high threshold, it is rarely mistaken. Site by site."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from decodery.training.activations import Answered
from decodery.training.probe import train_probe, worst
from decodery.training.ranking import auroc

from .figures import Row
from .settings import WatchSettings

NAME = "answers, specificity"
_THRESHOLDS = (0.5, 0.7, 0.9, 0.95, 0.99)


def specificity(
    answers: list[Answered], test: list[Answered], sites: Ordered[str], settings: WatchSettings
) -> list[Row]:
    """Of every site: which shares of right answers are passed and of wrong ones flagged, by the threshold.

    Each site has a probe of its own. test: the first seed's test part, which none of them has learned from.
    """
    wrong = np.array([each.wrong for each in test])
    found = list[Row]()
    for site in sites:
        probe = train_probe(answers, (site,), "new", rate=settings.rate, seed=settings.seed)
        scores = np.array(worst(probe, test))
        row: Row = {
            "testbed": NAME,
            "what": f"truthprint, specificity / sensitivity at {site}",
            "answers": len(test),
            "AUROC": round(auroc(scores.tolist(), wrong.tolist()), 3),
        }
        for limit in (*_THRESHOLDS, probe.threshold.value):
            told = f"{float((scores[~wrong] <= limit).mean()):.2f} / {float((scores[wrong] > limit).mean()):.2f}"
            row[f"above {limit}" if limit in _THRESHOLDS else "above its own"] = told
        found.append(row)
    return found
