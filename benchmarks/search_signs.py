"""What the length of texts and a mark in them tell of their being right, and what votes by these are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decodery.search.answers import vote
from decodery_benchmarks.intervals import interval

_SUBSETS, _DROP = 200, 0.5


def signs(traces: list[dict[str, Any]], mark: str, budgets: Sequence[int]) -> dict[str, Any]:
    """What is told of texts that ended, in puzzles with texts of both kinds, and of votes in all puzzles.

    shorter, fewer: AUC, the share of pairs of a right and a wrong text in which the right one is, ties half. by_marks:
    by number of marks, texts, and the share of them that is right. votes: see `votes`.
    """
    pools = [trace for trace in traces if trace["kind"] == "pool"]
    shorter, fewer, counts = list[float](), list[float](), dict[int, list[int]]()
    for pool in pools:
        told = [
            (length, text.count(mark), right)
            for length, text, right, ended in zip(
                pool["lengths"], pool["texts"], pool["right"], pool["ended"], strict=True
            )
            if ended
        ]
        for _, marks, right in told:
            counts.setdefault(marks, []).append(right)
        right, wrong = ([each[:2] for each in told if each[2] == kind] for kind in (1, 0))
        if right and wrong:
            for column, found in enumerate((shorter, fewer)):
                pairs = [
                    (one[column] < two[column]) + (one[column] == two[column]) / 2 for one in right for two in wrong
                ]
                found.append(sum(pairs) / len(pairs))
    by_marks = {str(marks): [len(each), round(sum(each) / len(each), 4)] for marks, each in sorted(counts.items())}
    found = {name: round(sum(each) / len(each), 4) for name, each in (("shorter", shorter), ("fewer", fewer)) if each}
    return {
        "mark": mark,
        "puzzles": len(shorter),
        **found,
        "by_marks": by_marks,
        "votes": votes(pools, mark, [budget for budget in budgets if budget > 1]),
    }


def votes(pools: list[dict[str, Any]], mark: str, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Votes of the shorter half, and weighted by length and marks, over random subsets of every pool.

    The weights are a logistic regression's on both, standardised within a pool, fitted on every other puzzle for those
    between. gain: over the plain vote of the same subsets, with its 95 % interval over puzzles.
    """
    told = [_told(pool, mark) for pool in pools]
    fitted = [_logistic(told[half::2], pools[half::2]) for half in (0, 1)]
    weighed = [
        1 / (1 + np.exp(-(rows @ fitted[1 - number % 2][:-1] + fitted[1 - number % 2][-1])))
        for number, rows in enumerate(told)
    ]
    found = []
    for n in budgets:
        plain = np.array([_voted(pool, n) for pool in pools])
        kinds = {
            "the shorter half": np.array([_voted(pool, n, drop=_DROP) for pool in pools]),
            "weighted": np.array([_voted(pool, n, each) for pool, each in zip(pools, weighed, strict=True)]),
        }
        for kind, right in kinds.items():
            row = {"kind": kind, "n": n, "accuracy": round(float(right.mean()), 4)}
            gain = right - plain
            found.append(row | {"gain": round(float(gain.mean()), 4), "interval": interval(gain)})
    return found


def _told(pool: dict[str, Any], mark: str) -> np.ndarray:
    """[texts, 2] length and marks, each with mean 0 and deviation 1 within the pool; 0 where all are the same."""
    rows = np.array(
        [[length, text.count(mark)] for length, text in zip(pool["lengths"], pool["texts"], strict=True)], float
    )
    spread = rows.std(axis=0)
    standardised: np.ndarray = (rows - rows.mean(axis=0)) / np.where(spread == 0, 1.0, spread)
    return standardised


def _logistic(told: Sequence[np.ndarray], pools: Sequence[dict[str, Any]]) -> np.ndarray:
    """[3] weights and bias by Newton's method, with a trace of ridge."""
    rows = np.concatenate(told)
    design = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
    labels, found = np.concatenate([pool["right"] for pool in pools]), np.zeros(3)
    for _ in range(30):
        chances = 1 / (1 + np.exp(-(design @ found)))
        gradient = design.T @ (chances - labels) + 1e-3 * found
        found -= np.linalg.solve((design.T * (chances * (1 - chances))) @ design + 1e-3 * np.eye(3), gradient)
    return found


def _voted(pool: dict[str, Any], n: int, weights: np.ndarray | None = None, drop: float = 0.0) -> float:
    """How right the elected text is, on average over subsets of n; of equals the shorter one, as `feature-vote` has it.

    drop: the share of texts with an answer that is left out, the longest ones.
    """
    random, found = np.random.default_rng(n), 0.0
    for _ in range(_SUBSETS):
        chosen = sorted(random.permutation(len(pool["texts"]))[:n].tolist(), key=lambda number: pool["lengths"][number])
        voting = [number for number in chosen if pool["answers"][number] is not None] or chosen[:1]
        kept = voting[: max(1, len(voting) - int(drop * len(voting)))]
        weighed = [1.0 if weights is None else float(weights[number]) for number in kept]
        groups = vote([pool["answers"][number] for number in kept], weighed)
        members = groups[0].members if groups else [0]
        found += pool["right"][kept[max(members, key=lambda member: weighed[member])]]
    return found / _SUBSETS
