"""Attention over latents in the native pass: what policies are shown, and hook points.

That bits are equal in every tree, chunk, batch and kernel set is tested in `test_native_experts`, logits beside
those of `transformers` in `test_native_families`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.config import Latent, ModelConfig
from decodery.models.torch.transformer import Transformer
from drawn_models import after, made


def config_of(queries: int) -> ModelConfig:
    latent = Latent(rank=34, turned=6, plain=11, value=21, queries=queries)
    return ModelConfig(90, 72, 80, 3, 4, 1, 40, 512, latent=latent)


def in_pytorch(model: Transformer) -> Transformer:
    """The same weights, layer by layer."""
    with mock.patch("decodery.models.torch.transformer.runs_natively", lambda config: False):
        return Transformer(model.config, model.weights)


@dataclass
class Watched(AttentionPolicy):
    """Reads what is less than `recent` positions away, and writes down what it is shown."""

    recent: int
    contexts: list[torch.Tensor] = field(default_factory=list)
    observes = True

    def select(self, attention: Attention) -> np.ndarray:
        cache, segment = attention.segment.cache, attention.segment
        assert cache is not None
        positions = cache.positions[attention.layer, : attention.seen.shape[-1]]
        return segment.positions[:, None] - positions[None, :] < self.recent

    def observe(self, attention: Attention) -> None:
        assert attention.context is not None
        self.contexts.append(attention.context)


@pytest.mark.parametrize("queries", [0, 50])
def test_policies_are_shown_latents_and_hook_points_values(queries: int) -> None:
    model, taps = made(config_of(queries)), ("head_out.0", "attn_out.1", "resid_post.2")
    found = []
    for each in (model, in_pytorch(model)):
        policy, cache = Watched(7), after(each, 20)
        cache.policy = policy
        scores = each.forward(Batch([Segment(np.arange(20, 23), tokens=np.arange(3), cache=cache)]), taps=taps)
        assert scores.hidden["head_out.0"].shape == (3, 4 * 21)
        assert len(policy.contexts) == 3 and policy.contexts[0].shape == (3, 4, 40)
        found.append([scores.logits, *(scores.hidden[tap] for tap in taps), *policy.contexts])
    # Inputs are rounded to bytes in both: one in a hundred goes another way.
    assert all((ours - theirs).abs().max() < 0.02 * theirs.abs().max() for ours, theirs in zip(*found, strict=True))
    every = model.forward(Batch([Segment(np.arange(20, 23), tokens=np.arange(3), cache=after(model, 20))])).logits
    assert (every - found[0][0]).abs().max() > 0.02 * every.abs().max()
