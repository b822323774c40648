"""ActQKV against loops that look at one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decodery.kv_cache.actqkv import ActQKV, Fetching, entropy, probes
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.step.cache_policy import shared_out
from decodery.testing import tiny_transformer

MODEL = tiny_transformer(0)
TOKENS = np.random.default_rng(8).integers(0, 64, 62)
PROMPT = 41
ONES = [1] * (len(TOKENS) - PROMPT)


def probe(queries: np.ndarray, kind: str) -> np.ndarray:
    """[d] of the queries [j, d] of a window up to a row."""
    if kind == "last":
        return queries[-1]
    mean, spread = queries.mean(0), queries.var(0)
    phi = [
        np.mean([(c - z) ** 2 / s for c, z, s in zip(q, mean, spread, strict=True) if s > 1e-12] or [0])
        for q in queries
    ]
    if kind == "mean" or sum(phi) < 1e-9:
        return mean
    return sum(share * q for share, q in zip(phi, queries, strict=True)) / sum(phi)


class Fetched(AttentionPolicy):
    """What ActQKV reads, row by row; budgets: by layer after the prompt."""

    def __init__(self, method: ActQKV) -> None:
        self.method = method
        self.queries: dict[int, np.ndarray] = {}
        self.entropies: dict[int, float] = {}
        self.shares: list[float] = []

    def select(self, attention: Attention) -> np.ndarray:
        method, keys = self.method, attention.keys.numpy()
        known = self.queries.get(attention.layer, np.zeros((0, *attention.queries.shape[1:])))
        self.queries[attention.layer] = np.concatenate((known, attention.queries.numpy()))
        mask = np.zeros((2, len(attention.segment), attention.seen.shape[-1]), dtype=bool)
        if attention.segment.positions[0] == PROMPT and attention.layer == 0:
            flat = np.array([self.entropies[layer] for layer in sorted(self.entropies)])
            self.shares = shared_out(flat, math.ceil(method.budget * PROMPT) / PROMPT).tolist()
        for row, at in enumerate(attention.segment.positions.tolist()):
            budget = method.budget if at < PROMPT else self.shares[attention.layer]
            total = max(1, math.ceil(round(budget * (at + 1), 9)))
            recent = max(1, int(np.rint(method.recent * total)))
            rows: list[list[float]] = []
            for head in range(2):
                worth = [
                    self.worth(attention.layer, head, at, block, keys[head]) for block in range(at // method.block + 1)
                ]
                free = []
                for block in range(len(worth)):
                    if block * method.block < method.sinks or (block + 1) * method.block > at + 1 - recent:
                        worth[block] = math.inf
                    else:
                        free.append(worth[block])
                rows.append(free)
                count = max(math.ceil(total / method.block), len(worth) - len(free) + 1)
                best = sorted(range(len(worth)), key=lambda block: (-worth[block], block))[:count]
                mask[head, row, [j for j in range(at + 1) if j // method.block in best]] = True
            if at == PROMPT - 1:
                self.entropies[attention.layer] = entropy(np.array(rows)) if rows[0] else 0.0
        return mask

    def worth(self, layer: int, head: int, at: int, block: int, keys: np.ndarray) -> float:
        size, queries = self.method.block, self.queries[layer][:, 2 * head : 2 * head + 2]
        begin = at // self.method.window * self.method.window if at < PROMPT else at
        asking = sum(probe(queries[begin : at + 1, each], self.method.probe) for each in range(2))
        inside = list(range(block * size, min((block + 1) * size, at + 1)))
        if (block + 1) * size <= min(PROMPT, at + 1):
            own = queries[inside].mean(0).sum(0)
            inside = sorted(inside, key=lambda j: (-float(own @ keys[j]), j))[: self.method.representatives]
        return float(np.mean([asking @ keys[j] for j in inside]))


def logits(policy: AttentionPolicy | None, sizes: list[int]) -> torch.Tensor:
    cache = MODEL.new_cache()
    cache.policy = policy
    found = []
    for size in sizes:
        start = cache.next_position
        found.append(MODEL.forward(Batch([Segment.chunk(TOKENS[start : start + size], cache)])).logits)
        cache.keep(range(size))
    return torch.cat(found)


METHODS = [
    ActQKV(0.4, block=4, window=9, representatives=2, sinks=2),
    ActQKV(0.3, block=3, window=16, representatives=1, sinks=0, probe="mean"),
    ActQKV(0.5, block=2, window=5, representatives=2, sinks=3, recent=0.5, probe="last"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_rows_read_the_blocks_that_their_probe_asks_for(method: ActQKV) -> None:
    wanted = logits(Fetched(method), [PROMPT, *ONES])
    for sizes in ([PROMPT, *ONES], [13, PROMPT - 13, 7, 1, len(ONES) - 8]):
        assert torch.allclose(logits(method.state(MODEL, PROMPT), sizes), wanted, atol=1e-9, rtol=0)
    assert not torch.allclose(logits(None, [PROMPT, *ONES]), wanted, atol=1e-3, rtol=0)
    other = replace(method, probe="mean" if method.probe != "mean" else "weighted")
    assert not torch.allclose(logits(other.state(MODEL, PROMPT), [PROMPT, *ONES]), wanted, atol=1e-3, rtol=0)


def test_a_probe_weighs_what_sticks_out() -> None:
    queries = torch.randn(2, 11, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    queries[..., 2] = 0.5
    for weighted, kind in ((True, "weighted"), (False, "mean")):
        found = probes(queries, 3, weighted)
        for head in range(2):
            for row in range(3, 11):
                wanted = probe(queries[head, : row + 1].numpy(), kind)
                assert found[head, row - 3].numpy() == pytest.approx(wanted, abs=1e-9)
    same = queries[:, :1].expand(-1, 5, -1)
    assert torch.allclose(probes(same, 0, True), same, atol=1e-12), "queries that are alike ask as their mean does"


def test_layers_share_the_budget_by_their_entropy() -> None:
    method = METHODS[0]
    state = method.state(MODEL, PROMPT)
    assert isinstance(state, Fetching)
    logits(state, [PROMPT])
    budgets, entropies = state._budgets, state._entropies
    assert sum(budgets.values()) == pytest.approx(2 * math.ceil(0.4 * PROMPT) / PROMPT)
    assert (budgets[0] < budgets[1]) == (entropies[0] < entropies[1]) and budgets[0] != budgets[1]
    assert entropy(np.zeros((2, 8))) == pytest.approx(math.log(8)) and entropy(np.array([[90.0, 0, 0]])) < 1e-9
