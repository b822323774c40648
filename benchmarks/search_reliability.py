"""How well a head tells, by how much of a text there is, whether another text would be no better."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decodery as dc
from decodery.scorers.process_reward import ProcessHead
from decodery.training.ranking import auc
from decodery.training.value import not_better, states_of
from decodery_benchmarks.puzzles import Puzzle
from decodery_benchmarks.puzzles.alphabet import encoded

_PLACES, _BINS = (0.25, 0.5, 0.75, 1.0), 10


def reliability(lm: dc.LLM, asked: Puzzle, traces: Sequence[dict[str, Any]], head: Path) -> dict[str, Any]:
    """Of all texts of the pools that ended, at the end of the step by which a share of their steps is there.

    no_better, right: AUC of the head for whether another text of the pool is no better, and whether this one is right.
    error: the mean distance of what it says from what is so, of ten bins with as many texts each. bins: both, by bin.
    """
    judge, told = ProcessHead.load(head), list[tuple[list[float], float, int]]()
    for pool in (trace for trace in traces if trace["kind"] == "pool"):
        prompt, known = pool["prompt"], dict[str, list[float]]()
        shares = not_better([float(right) for right in pool["right"]])
        for text, ended, right, share in zip(pool["texts"], pool["ended"], pool["right"], shares, strict=True):
            if ended:
                if text not in known:
                    known[text] = _along(lm, asked, judge, prompt, text)
                told.append((known[text], share, right))
    said, share, right = (np.array(each, dtype=np.float64) for each in zip(*told, strict=True))
    found = {"texts": len(told), "no_better": round(float(share.mean()), 4), "right": round(float(right.mean()), 4)}
    return found | {"places": [_at(place, said[:, column], share, right) for column, place in enumerate(_PLACES)]}


def _along(lm: dc.LLM, asked: Puzzle, judge: ProcessHead, prompt: str, text: str) -> list[float]:
    """What the head says at each of the places."""
    ends = np.cumsum([len(step) for step in asked.steps(text)]) - 1
    chosen = [int(ends[ceil(place * len(ends)) - 1]) for place in _PLACES]
    states = states_of(lm.model, encoded(prompt), encoded(text), judge.tap)[chosen].float()
    with torch.no_grad():
        said: list[float] = judge.logits(states).sigmoid().tolist()
    return said


def _at(place: float, said: np.ndarray, share: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    bins = [(float(said[part].mean()), float(share[part].mean())) for part in np.array_split(np.argsort(said), _BINS)]
    return {
        "place": place,
        "no_better": round(auc(said, share), 4),
        "right": round(auc(said, right), 4),
        "error": round(float(np.mean([abs(one - two) for one, two in bins])), 4),
        "bins": [[round(one, 4), round(two, 4)] for one, two in bins],
    }
