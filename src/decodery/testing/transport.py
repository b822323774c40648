"""The distributions that acceptance rules emit at a node, and the optimal-transport bound on their acceptance rate.

An acceptance rule is a coupling of the siblings drawn from q and the target's distribution p. No rule that preserves p
can emit a drawn token more often than the optimal coupling (SpecTr: Fast Speculative Decoding via Optimal Transport,
2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from decodery.core.errors import SettingsError


def enumerate_draws(q: torch.Tensor, k: int, *, replacement: bool) -> Iterator[tuple[tuple[int, ...], float]]:
    """Enumerate all sequences of k tokens drawn from q [vocab], with their probabilities.

    Sequences of probability 0 are left out. Without replacement, fewer than k tokens are drawn where q has fewer.
    """
    support = torch.nonzero(q).flatten().tolist()
    size = k if replacement else min(k, len(support))
    drawn = itertools.product(support, repeat=size) if replacement else itertools.permutations(support, size)
    for tokens in drawn:
        mass, left = 1.0, q
        for token in tokens:
            mass *= float(left[token] / left.sum())
            if not replacement:
                left = left.clone()
                left[token] = 0.0
        yield tokens, mass


def node_law(tests: Iterable[tuple[float, torch.Tensor]], tokens: Iterable[int]) -> tuple[torch.Tensor, float]:
    """The distribution [vocab] of the token emitted at a node, and the probability that it was drafted.

    Args:
        tests: For each of `tokens` the probability of its acceptance where none before it was accepted, then a last
            pair with the distribution of the token that is emitted if none is; see `recursive_law`.
        tokens: The drawn tokens.
    """
    *accepts, (_, rest) = list(tests)
    emitted, reach = torch.zeros_like(rest), 1.0
    for (accept, _), token in zip(accepts, tokens, strict=True):
        emitted[token] += reach * accept
        reach *= 1.0 - accept
    return emitted + reach * rest, 1.0 - reach


def linear_program(p: np.ndarray, q: np.ndarray, k: int, *, replacement: bool = True) -> float:
    """The bound for p, q [vocab] by its definition: a linear program with up to k vocab^k variables.

    It needs scipy, is only practical for a few tokens, and is accurate to about 1e-7.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix
    except ImportError as error:
        raise SettingsError("the linear program needs scipy: run `pip install scipy`") from error

    draws = list(enumerate_draws(torch.from_numpy(q), k, replacement=replacement))
    # A variable per draw and token in it: the coupled mass. The remaining mass does not matter for the bound.
    pairs = [(row, token) for row, (tokens, _) in enumerate(draws) for token in set(tokens)]
    row, token = np.array(pairs).T
    ones, columns = np.ones(2 * len(pairs)), np.tile(np.arange(len(pairs)), 2)
    within = coo_matrix((ones, (np.concatenate([row, len(draws) + token]), columns)), (len(draws) + len(p), len(pairs)))
    room = np.concatenate([[mass for _, mass in draws], p])
    found = linprog(-np.ones(len(pairs)), A_ub=within, b_ub=room)
    if not found.success:
        raise ValueError(f"the linear program was not solved: {found.message}")
    return float(-found.fun)


def best_acceptance(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The same bound for k independent draws, for any vocabulary.

    The program is a maximum flow, so the bound is the minimum cut: the minimum of p(H) + 1 - q(H)^k over sets H of
    tokens. As q^k is convex, one of the sets {x: p(x) < c q(x)} attains it, so a sort by p / q is enough.
    """
    used = q > 0
    p, q = p[used], q[used]
    order = np.argsort(p / q, kind="stable")
    cuts = np.cumsum(p[order]) - np.cumsum(q[order]) ** k
    return float(1.0 + min(0.0, cuts.min()))
