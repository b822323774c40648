"""Layers with a sliding window are left alone by cache policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodery.core.errors import UnsupportedModel
from decodery.kv_cache.coprocessor import Coprocessor
from decodery.kv_cache.localist import Localist
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.kv_cache.write_gate import WriteGate
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.cache.page_pool import SLOTS
from decodery.models.torch.transformer import Transformer
from decodery.step.cache_policy import CachePolicy
from decodery.testing import tiny_transformer
from decodery.testing.policies import check_cache_policy
from methods import KVS

WINDOW = 6
TOKENS = np.random.default_rng(4).integers(0, 64, 90)


def sliding(*layers: bool) -> Transformer:
    """A model of which these layers have a window."""
    model = tiny_transformer(0)
    config = replace(model.config, sliding_window=WINDOW, sliding_layers=layers)
    return Transformer(config, model.weights)


def read(model: Transformer, policy: CachePolicy | None) -> tuple[torch.Tensor, KVCache]:
    cache = model.new_cache()
    if policy is not None:
        cache.policy = policy.state(model, 31)
    found = []
    for first, last in ((0, 31), *((at, at + 1) for at in range(31, len(TOKENS)))):
        found.append(model.forward(Batch([Segment.chunk(TOKENS[first:last], cache)])).logits)
        cache.keep(range(last - first))
    return torch.cat(found), cache


# Latents of a coprocessor are read in windowed layers, too, and leave their window as tokens do. A write gate needs a
# layer without a window.
LEAVING = {name: kv for name, kv in KVS.items() if not isinstance(kv, Coprocessor | WriteGate)}


def test_a_write_gate_in_a_windowed_layer_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layer 1, which has a sliding window"):
        KVS["write-gate"].state(sliding(True, True), 31)


@pytest.mark.parametrize("kv", LEAVING.values(), ids=LEAVING)
def test_a_model_whose_layers_all_have_a_window_is_the_same_under_any_policy(kv: CachePolicy) -> None:
    model = sliding(True, True)
    assert torch.allclose(read(model, kv)[0], read(model, None)[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "kv", [StreamingLLM(12, sinks=2), StreamingLLM(12, absolute=True), Localist(1.0, 8), Localist()]
)
def test_layers_without_a_window_are_under_the_policy(kv: CachePolicy) -> None:
    model = sliding(True, False)
    assert not torch.allclose(read(model, kv)[0], read(model, None)[0], atol=1e-3)
    # Layers are independent of one another in what they leave: the first one's rows are those of the model alone.
    alone, under = (read(model, each)[1].view(0)[0][:, -WINDOW:] for each in (None, kv))
    assert torch.allclose(alone, under, atol=1e-9, rtol=0)


def test_windowed_layers_hold_their_window_alone_under_streaming() -> None:
    model = sliding(True, False)
    _, cache = read(model, StreamingLLM(24))
    windowed, full = cache.lengths.tolist()
    assert WINDOW <= windowed <= WINDOW + SLOTS and 24 <= full <= 24 + SLOTS
    check_cache_policy(model, [TOKENS[:40].tolist()], StreamingLLM(24), tolerance=1e-9)
