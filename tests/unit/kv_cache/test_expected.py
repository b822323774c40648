"""What Expected Attention expects is what many draws of the queries to come say."""

from __future__ import annotations

import numpy as np
import torch

from decodery.kv_cache.after_prompt import Prompt, turned
from decodery.kv_cache.expected_attention import ExpectedAttention
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
