"""What each policy keeps and reads, against a few lines that look at everything and forget nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decodery.kv_cache.expected_attention import ExpectedAttention
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.pyramid_kv import PyramidKV
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.snapkv import SnapKV
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.kv_cache.tova import TOVA
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.torch.rope import rope_table
from decodery.models.torch.transformer import Transformer
from decodery.step.cache_policy import CachePolicy
from open_models import LAYERS, make

TOKENS = np.random.default_rng(8).integers(0, 64, 62)
PROMPT, HEADS, GROUP = 40, 2, 2


class Reference(AttentionPolicy):
    """Reads what plain lists say and drops nothing from the cache; passes of the prompt, then of single tokens.

    alive: by layer and key-value head, the positions that are held. read: the same of what the last row read.
    """

    observes = True

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.alive: dict[int, list[list[int]]] = {}
        self.read: dict[int, list[list[int]]] = {}
        self.scores: dict[tuple[int, int], dict[int, float]] = {}

    def select(self, attention: Attention) -> np.ndarray | None:
        position = int(attention.segment.positions[0])
        if position < PROMPT:
            return None
        held = self.alive.get(attention.layer, [list(range(position))] * HEADS)
        self.read[attention.layer] = READS[type(self.policy)](self, attention, held, position)
        mask = np.zeros((HEADS, 1, attention.seen.shape[-1]), dtype=bool)
        for head, positions in enumerate(self.read[attention.layer]):
            mask[head, 0, [*positions, position]] = True
        return mask

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        keeps = KEEPS.get(type(self.policy))
        if keeps is not None:
            held = self.alive.get(attention.layer, [[]] * HEADS)
            self.alive[attention.layer] = [
                sorted(keeps(self, attention, attention.layer, head, held[head])) for head in range(HEADS)
            ]


def top(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda j: (-scores[j], j))[:count]


def part(policy: Any, length: int) -> int:
    return max(1, math.ceil(round(policy.budget * length, 9))) if policy.budget <= 1 else min(policy.budget, length)


def weights_of(attention: Attention, head: int) -> np.ndarray:
    """[group, rows, slots]"""
    assert attention.weights is not None
    return attention.weights[head * GROUP : (head + 1) * GROUP].numpy()


def held(reference: Reference, attention: Attention, alive: list[list[int]], position: int) -> list[list[int]]:
    return alive


def window(reference: Reference, attention: Attention, alive: list[list[int]], position: int) -> list[list[int]]:
    sinks, last = reference.policy.sinks, part(reference.policy, position + 1) - reference.policy.sinks
    return [[j for j in range(position) if j < sinks or j > position - last]] * HEADS


def pages(reference: Reference, attention: Attention, alive: list[list[int]], position: int) -> list[list[int]]:
    policy, found = reference.policy, []
    if attention.layer < policy.dense_layers:
        return alive
    size, mine = policy.page, position // policy.page
    for head in range(HEADS):
        keys, bounds = attention.keys[head].numpy(), {}
        for page in range(mine):
            inside = keys[page * size : (page + 1) * size]
            bounds[page] = max(
                sum(max(q * low, q * high) for q, low, high in zip(query, inside.min(0), inside.max(0), strict=True))
                for query in attention.queries[0, head * GROUP : (head + 1) * GROUP].numpy()
            )
        count = max(policy.least, math.ceil(part(policy, position + 1) / size))
        chosen = {*top(bounds, count - 1), mine}
        found.append([j for j in range(position) if j // size in chosen])
    return found


def heavy(reference: Reference, attention: Attention, layer: int, head: int, alive: list[int]) -> list[int]:
    """H2O: the sums of all that was paid."""
    paid, scores = weights_of(attention, head).mean(0), reference.scores.setdefault((layer, head), {})
    for row, position in zip(paid, attention.segment.positions.tolist(), strict=True):
        for j in range(position + 1) if position < PROMPT else [*alive, position]:
            scores[j] = scores.get(j, 0.0) + row[j]
    length = int(attention.segment.positions[-1]) + 1
    count = part(reference.policy, length)
    there = sorted({*alive, *attention.segment.positions.tolist()})
    last = there[len(there) - round(reference.policy.recent * count) :]
    rest = {j: scores[j] for j in there if j not in last}
    return [*last, *top(rest, count - len(last))]


def looked_at(reference: Reference, attention: Attention, layer: int, head: int, alive: list[int]) -> list[int]:
    """TOVA: what the last row pays, over all heads."""
    assert attention.weights is not None
    paid, position = attention.weights[:, -1].numpy().mean(0), int(attention.segment.positions[-1])
    there = range(position + 1) if position < PROMPT else [*alive, position]
    return top({j: paid[j] for j in there}, part(reference.policy, position + 1))


def end_of_prompt(reference: Reference, attention: Attention, layer: int, head: int, alive: list[int]) -> list[int]:
    """SnapKV and PyramidKV."""
    policy, position = reference.policy, int(attention.segment.positions[-1])
    if position >= PROMPT:
        return [*alive, position]
    start = PROMPT - policy.window
    paid = weights_of(attention, head)[:, start:, :start].sum(1).mean(0)
    side = policy.kernel // 2
    scores = {}
    for j in range(start):
        near = paid[max(j - side, 0) : j + side + 1]
        scores[j] = near.sum() / policy.kernel if policy.pool == "mean" else near.max()
    count = policy.budgets(LAYERS, PROMPT)[layer] - policy.window
    return [*top(scores, count), *range(start, PROMPT)]


def expected(reference: Reference, attention: Attention, layer: int, head: int, alive: list[int]) -> list[int]:
    policy, position = reference.policy, int(attention.segment.positions[-1])
    if position >= PROMPT:
        return [*alive, position]
    dim = attention.keys.shape[-1]
    cos, sin = (each.double().numpy() for each in rope_table(MODEL.config.rope, dim, PROMPT + policy.future))

    def rotation(at: int) -> np.ndarray:
        half, turn = dim // 2, np.zeros((dim, dim))
        for c in range(half):
            turn[c, c] = turn[c + half, c + half] = cos[at, c]
            turn[c, c + half], turn[c + half, c] = -sin[at, c], sin[at, c]
        return turn

    mean_turn = sum(rotation(PROMPT + k) for k in range(policy.future)) / policy.future
    keys, values = attention.keys[head].numpy(), attention.values[head].numpy()
    paid = np.zeros(PROMPT)
    for number in range(head * GROUP, (head + 1) * GROUP):
        queries = attention.queries[:, number].numpy()
        still = np.array([rotation(at).T @ queries[at] for at in range(policy.sinks, PROMPT)])
        mean, spread = mean_turn @ still.mean(0), mean_turn @ np.cov(still.T, bias=True) @ mean_turn.T
        z = np.array([key @ mean + key @ spread @ key / 2 for key in keys[policy.sinks :]])
        paid[policy.sinks :] += np.exp(z - z.max()) / np.exp(z - z.max()).sum() / GROUP
    scores = {j: math.inf if j < policy.sinks else paid[j] * np.linalg.norm(values[j]) for j in range(PROMPT)}
    return top(scores, part(policy, PROMPT))


MODEL = make("float64")
READS: dict[type, Callable[..., list[list[int]]]] = {StreamingLLM: window, Quest: pages}
KEEPS: dict[type, Callable[..., list[int]]] = {
    H2O: heavy,
    TOVA: looked_at,
    SnapKV: end_of_prompt,
    PyramidKV: end_of_prompt,
    ExpectedAttention: expected,
}
READS |= dict.fromkeys(KEEPS, held)
POLICIES: list[CachePolicy] = [
    StreamingLLM(11, absolute=True),
    StreamingLLM(0.3, sinks=2, absolute=True),
    Quest(12, page=4, dense_layers=1, least=1),
    Quest(0.3, page=5, dense_layers=0, least=2),
    H2O(0.3),
    H2O(12, recent=0.25),
    TOVA(0.25),
    SnapKV(0.4, window=5),
    SnapKV(14, window=3, kernel=3, pool="max"),
    PyramidKV(0.5, window=4),
    ExpectedAttention(0.4, future=6),
]


def logits(model: Transformer, policy: AttentionPolicy, sizes: list[int]) -> tuple[torch.Tensor, Any]:
    """Of all tokens after the prompt, read in passes of these sizes."""
    cache = model.new_cache()
    cache.policy = policy
    found = []
    for size in sizes:
        start = cache.next_position
        found.append(model.forward(Batch([Segment.chunk(TOKENS[start : start + size], cache)])).logits)
        cache.keep(range(size))
    return torch.cat(found)[PROMPT:], cache


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_keeps_and_reads_what_its_paper_says(policy: CachePolicy) -> None:
    ones = [1] * (len(TOKENS) - PROMPT)
    reference = Reference(policy)
    if isinstance(policy, StreamingLLM):
        # Its windows hold in the prompt too, which the reference reads token by token.
        wanted, _ = streamed(policy)
    else:
        wanted, _ = logits(MODEL, reference, [PROMPT, *ones])
    alone, cache = logits(MODEL, policy.state(MODEL, PROMPT), [PROMPT, *ones])
    assert torch.allclose(alone, wanted, atol=1e-9, rtol=0)
    plain, _ = logits(MODEL, AllOf(), [PROMPT, *ones])
    assert not torch.allclose(alone, plain, atol=1e-3, rtol=0), "the policy did nothing"
    together, _ = logits(MODEL, policy.state(MODEL, PROMPT), [13, PROMPT - 13, 7, 1, 12, len(ones) - 20])
    assert torch.allclose(together, wanted, atol=1e-9, rtol=0), "blocks are not what single tokens are"
    if type(policy) in KEEPS:
        for layer in range(LAYERS):
            assert cache.head_lengths[layer].tolist() == [len(each) for each in reference.alive[layer]]


@pytest.mark.parametrize("kind", [SnapKV, PyramidKV])
def test_a_budget_below_the_window_keeps_the_end_of_the_prompt(kind: Any) -> None:
    """The window shrinks with the budget: of more rows than may stay, the newest would have been the ones to go."""
    policy = kind(6, window=32)
    _, cache = logits(MODEL, policy.state(MODEL, PROMPT), [PROMPT])
    _, whole = logits(MODEL, AllOf(), [PROMPT])
    for layer, count in enumerate(policy.budgets(LAYERS, PROMPT)):
        assert cache.head_lengths[layer].tolist() == [count] * HEADS
        assert torch.equal(cache.data[layer, :, :, count - 1], whole.data[layer, :, :, PROMPT - 1])


class AllOf(AttentionPolicy):
    """Reads everything."""


def streamed(policy: StreamingLLM) -> tuple[torch.Tensor, Any]:
    global PROMPT
    known, PROMPT = PROMPT, 0
    try:
        found, cache = logits(MODEL, Reference(policy), [1] * len(TOKENS))
    finally:
        PROMPT = known
    return found[PROMPT:], cache
