"""What Expected Attention expects is what many draws of the queries to come say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.kv_cache.after_prompt import AfterPrompt, Prompt, turned
from decodery.kv_cache.expected_attention import _BLOCK, ExpectedAttention, Expecting, Moments
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.testing import tiny_transformer

HEADS, LENGTH, DRAWS = 2, 24, 20_000


def seen() -> tuple[Prompt, torch.Tensor]:
    """A prompt whose values are of length 1, one query head for each key-value head; its queries before rotation."""
    config, draw = tiny_transformer().config, torch.Generator().manual_seed(5)
    shape = HEADS, LENGTH, config.head_dim
    still = torch.randn(shape, generator=draw, dtype=torch.float64) * 0.4 + 0.3
    keys, values = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    at = np.arange(LENGTH)
    values = values / values.norm(dim=-1, keepdim=True)
    return Prompt(config, 0, turned(config, 0, still, at), at, keys, values), still


def drawn(prompt: Prompt, still: torch.Tensor, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms [heads, length] of what drawn queries at the next position pay on average, and their errors."""
    draw = torch.Generator().manual_seed(6)
    mean, apart = still.mean(dim=1, keepdim=True), still - still.mean(dim=1, keepdim=True)
    root = torch.linalg.cholesky(apart.transpose(1, 2) @ apart / LENGTH)
    normal = torch.randn(HEADS, DRAWS, still.shape[-1], generator=draw, dtype=torch.float64)
    queries = mean + spread * normal @ root.transpose(1, 2)
    queries = turned(prompt.config, 0, queries, np.full(DRAWS, LENGTH))
    paid = (queries @ prompt.keys.transpose(1, 2)).exp()
    return paid.mean(dim=1).log(), paid.std(dim=1) / DRAWS**0.5 / paid.mean(dim=1)


def test_scores_are_what_normal_queries_pay() -> None:
    prompt, still = seen()
    scores = torch.from_numpy(ExpectedAttention(0.5, future=1, sinks=0).scores(prompt)).log()
    expected, error = drawn(prompt, still, 1.0)
    # Softmax leaves one constant a head open, which the mean takes away.
    gap = (scores - expected) - (scores - expected).mean(dim=1, keepdim=True)
    assert (gap.abs() <= 4 * error + 1e-3).all()
    # The mean query alone, which a rule without the covariance would score by, is far from that.
    alone, _ = drawn(prompt, still, 0.0)
    gap = (scores - alone) - (scores - alone).mean(dim=1, keepdim=True)
    assert (gap.abs() > 4 * error + 1e-3).float().mean() > 0.5


def test_queries_that_are_all_alike_are_ranked_by_their_attention() -> None:
    prompt, still = seen()
    alike = still.mean(dim=1, keepdim=True).expand_as(still)
    config, at = prompt.config, prompt.at
    same = Prompt(config, 0, turned(config, 0, alike, at), at, prompt.keys, prompt.values)
    scores = ExpectedAttention(0.5, future=1, sinks=0).scores(same)
    query = turned(config, 0, alike[:, :1], np.array([LENGTH]))
    paid = (query @ prompt.keys.transpose(1, 2)).softmax(dim=-1)[:, 0].numpy()
    np.testing.assert_allclose(scores, paid, rtol=1e-6)


def test_scores_are_the_published_ones_with_sinks_and_groups() -> None:
    config, draw, sinks, group = tiny_transformer().config, torch.Generator().manual_seed(7), 4, 2
    dim = config.head_dim
    still = torch.randn(HEADS * group, LENGTH, dim, generator=draw, dtype=torch.float64) + 0.2
    keys, values = (torch.randn(HEADS, LENGTH, dim, generator=draw, dtype=torch.float64) for _ in range(2))
    # First tokens that would take nearly all attention: a softmax over them too ranks the others' heads otherwise.
    keys[0, :sinks] *= 6
    at = np.arange(LENGTH)
    prompt = Prompt(config, 0, turned(config, 0, still, at), at, keys, values)
    found = ExpectedAttention(0.5, future=1, sinks=sinks, epsilon=0.01).scores(prompt)
    paid = torch.zeros(HEADS, LENGTH - sinks, dtype=torch.float64)
    for head in range(HEADS * group):
        known = still[head, sinks:]
        mean = turned(config, 0, known.mean(dim=0)[None, None], np.array([LENGTH]))[0, 0]
        apart = turned(config, 0, (known - known.mean(dim=0))[None], np.full(len(known), LENGTH))[0]
        own = keys[head // group, sinks:]
        products = torch.stack([key @ mean + ((apart @ key) ** 2).mean() / 2 for key in own])
        paid[head // group] += products.softmax(dim=0) / group
    wanted = (paid + 0.01) * values[:, sinks:].norm(dim=-1)
    assert np.isposinf(found[:, :sinks]).all()
    np.testing.assert_allclose(found[:, sinks:], wanted.numpy(), rtol=1e-9)


MODEL, READ = tiny_transformer(0), 300


def compressed(kind: type[AfterPrompt], *sizes: int) -> tuple[KVCache, int]:
    """A prompt that is read in passes of these sizes, in turn, and the most bytes that were noted between them."""
    cache, tokens, most = MODEL.new_cache(), np.random.default_rng(8).integers(0, 64, READ), 0
    cache.policy = policy = kind(ExpectedAttention(0.3), MODEL.config, READ)
    while cache.next_position < READ:
        for size in sizes:
            part = tokens[cache.next_position : cache.next_position + size]
            if len(part):
                MODEL.forward(Batch([Segment.chunk(part, cache)]))
                cache.keep(range(len(part)))
                most = max(most, policy.bytes)
    return cache, most


def test_sums_choose_what_all_queries_do() -> None:
    """However a prompt is cut: of its queries, only those of one block are kept beside the sums."""
    whole, every = compressed(AfterPrompt, 50)
    caches, config = [], MODEL.config
    for sizes in ((50,), (300,), (1, 63, 100), (64, 7)):
        cache, most = compressed(Expecting, *sizes)
        moments = config.num_layers * config.num_heads * (config.head_dim + 1) * config.head_dim * 8
        assert most <= moments + config.num_layers * (_BLOCK - 1) * config.num_heads * config.head_dim * 8 < every
        caches.append(cache)
    for cache in caches:
        for layer in range(config.num_layers):
            assert cache.lengths[layer] == whole.lengths[layer]
            length = int(cache.lengths[layer])
            assert (cache.positions[layer, :length] == whole.positions[layer, :length]).all()
            assert torch.allclose(cache.view(layer)[0], whole.view(layer)[0], atol=1e-9)


def test_sums_of_parts_are_those_of_all() -> None:
    rows = torch.randn(3, 100, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64) + 2.0
    whole, parts = Moments.of(rows), [Moments.of(rows[:, first : first + 30]) for first in range(0, 100, 30)]
    joined = parts[0].joined(parts[1]).joined(parts[2]).joined(parts[3])
    assert joined.count == whole.count == 100
    assert torch.allclose(joined.mean, whole.mean, rtol=1e-12) and torch.allclose(joined.spread, whole.spread)
    # Without what lies between the parts' means it is not.
    assert not torch.allclose(sum(part.spread for part in parts), whole.spread)  # type: ignore[arg-type]


def test_queries_that_are_added_up_are_not_cut() -> None:
    cache = MODEL.new_cache()
    cache.policy = Expecting(ExpectedAttention(0.3), MODEL.config, READ)
    MODEL.forward(Batch([Segment.chunk(np.arange(100) % 64, cache)]))
    cache.keep(range(100))
    cache.truncate(_BLOCK)
    with pytest.raises(ValueError, match="the first 64 tokens are gone"):
        cache.truncate(_BLOCK - 1)
