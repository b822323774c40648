"""StreamingLLM: positions counted among what is kept, and texts that outgrow their model's context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import ContextFull, OutOfMemory
from decodery.kv_cache.streaming_llm import Streaming, StreamingLLM
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.kernel_policy import KernelPolicy
from decodery.models.config import ModelConfig, Rope
from decodery.models.torch.rope import turns
from decodery.testing import LawBroken, decode, tiny_transformer, to_int8
from decodery.testing.policies import check_cache_policy

MODEL = tiny_transformer(0)
SHORT = tiny_transformer(0, max_positions=24)
EXACT = to_int8(SHORT)
TOKENS = np.random.default_rng(8).integers(0, 64, 50)


class InCache(AttentionPolicy):
    """Turns every key to its place among the sinks and the window, one row at a time, and drops nothing."""

    merges = True

    def __init__(self, method: StreamingLLM, config: ModelConfig) -> None:
        self.method, self.config = method, config

    def merge(self, attention: Attention) -> torch.Tensor:
        (position,) = attention.segment.positions.tolist()
        begins = self.method.begins(position)
        held = [at for at in range(position + 1) if at < self.method.sinks or at >= begins]
        found = attention.queries.clone()
        for head, query in enumerate(attention.queries[0]):
            kv_head = head * len(attention.keys) // attention.queries.shape[1]
            asked = self._moved(query, attention.layer, len(held) - 1 - position)
            keys = [
                self._moved(attention.keys[kv_head, at], attention.layer, place - at) for place, at in enumerate(held)
            ]
            weights = torch.stack([asked @ key for key in keys]).softmax(dim=0)
            found[0, head] = weights @ attention.values[kv_head, held]
        return found

    def _moved(self, numbers: torch.Tensor, layer: int, by: int) -> torch.Tensor:
        angles = by * turns(self.config.layer_rope(layer), len(numbers)).double()
        turned = torch.complex(*numbers.chunk(2)) * torch.exp(1j * angles)
        return torch.cat((turned.real, turned.imag))


def logits(policy: AttentionPolicy, sizes: list[int]) -> torch.Tensor:
    """Of all tokens, read in passes of these sizes."""
    cache, found = MODEL.new_cache(), list[torch.Tensor]()
    cache.policy = policy
    for size in sizes:
        start = cache.next_position
        found.append(MODEL.forward(Batch([Segment.chunk(TOKENS[start : start + size], cache)])).logits)
        cache.keep(range(size))
    return torch.cat(found)


@pytest.mark.parametrize("method", [StreamingLLM(11), StreamingLLM(0.3, sinks=2), StreamingLLM(9, sinks=0)], ids=str)
def test_positions_are_counted_among_what_is_kept(method: StreamingLLM) -> None:
    wanted = logits(InCache(method, MODEL.config), [1] * len(TOKENS))
    for sizes in ([1] * len(TOKENS), [13, 7, 1, 1, 28]):
        found = logits(method.state(MODEL, 20), sizes)
        assert torch.allclose(found, wanted, atol=1e-9, rtol=0)
    absolute = logits(StreamingLLM(method.budget, method.sinks, absolute=True).state(MODEL, 20), [len(TOKENS)])
    assert torch.allclose(absolute, wanted, atol=1e-9, rtol=0) == (method.sinks == 0)


LONG = [TOKENS.tolist(), TOKENS[:9].tolist()]


def test_a_text_goes_on_beyond_the_context() -> None:
    check_cache_policy(EXACT, LONG, "streaming-llm:budget=12,sinks=2", tolerance=0.0)
    (text,) = decode(EXACT, LONG[1:], cache_policy="streaming-llm:budget=12", max_new_tokens=80)
    assert (text.position, text.finish_reason, text.context_full) == (80, "length", False)
    assert text.cache.length <= 12 + 16, "memory does not grow with the text"
    drafted = decode(EXACT, LONG, drafter="prompt-lookup", cache_policy="streaming-llm:budget=12", max_new_tokens=60)
    plain = decode(EXACT, LONG, cache_policy="streaming-llm:budget=12", max_new_tokens=60)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]


class Nearest(Streaming):
    """All rows of a pass meet the sinks where the first of them does."""

    def _begins(self, attention: Attention) -> np.ndarray:
        found = super()._begins(attention)
        return np.full_like(found, found[0])

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        found = super().by_kernel(segment)
        assert found is not None and found.windows is not None
        cos, sin = found.windows.turned
        turned = cos[:1].expand_as(cos).contiguous(), sin[:1].expand_as(sin).contiguous()
        return replace(found, windows=replace(found.windows, turned=turned))


class MetTogether(StreamingLLM):
    def state(self, model: Any, prompt: int) -> AttentionPolicy:
        return Nearest(self, model.config, prompt)


def test_the_law_catches_sinks_that_stand_where_another_row_meets_them() -> None:
    with pytest.raises(LawBroken):
        check_cache_policy(EXACT, LONG, MetTogether(12, sinks=2), tolerance=0.0)


@pytest.mark.parametrize("kv", ["streaming-llm:budget=12,absolute=true", "streaming-llm:budget=0.5", "h2o:budget=12"])
def test_what_cannot_go_on_ends_where_the_context_does(kv: str) -> None:
    (text,) = decode(EXACT, LONG[1:], cache_policy=kv, max_new_tokens=80)
    assert (len(text.tokens), text.finish_reason, text.context_full) == (24, "length", True)
    with pytest.raises(ContextFull, match="the prompt has 50 tokens and the model's context 24"):
        decode(EXACT, LONG[:1], cache_policy=kv)


def test_which_models_have_no_end() -> None:
    config = SHORT.config
    assert StreamingLLM(24).endless(config) and not StreamingLLM(25).endless(config)
    learned = ModelConfig(64, 8, 8, 1, 1, 1, 8, max_positions=24, family="gpt2", learned_positions=True)
    assert not StreamingLLM(12).endless(learned)


def test_a_long_prompt_needs_the_memory_of_its_window() -> None:
    from decodery.engine.engine import Engine
    from decodery.engine.request import Request
    from decodery.engine.schedule import Limits

    bounded = Engine(EXACT, limits=Limits(cache_bytes=SHORT.new_cache().slot_bytes * 300))
    prompt = (LONG[0] * 8)[:400]
    text = bounded.submit(Request(prompt, max_new_tokens=4, cache_policy="streaming-llm:budget=12"))
    bounded.run([text])
    assert text.position == 4
    with pytest.raises((OutOfMemory, ContextFull)):
        bounded.submit(Request(prompt, max_new_tokens=4))


def test_rotations_beyond_the_context_are_exact_and_leave_those_inside_as_they_are() -> None:
    rope, head_dim = Rope(10_000.0), SHORT.config.head_dim
    far = np.array([3, 5_000_000, 23, 24])
    cos, sin = SHORT.angles(rope, far)
    angles = far[:, None].astype(np.float64) * turns(rope, head_dim).double().numpy()
    assert np.abs(cos.numpy() - np.cos(angles)).max() < 1e-6 and np.abs(sin.numpy() - np.sin(angles)).max() < 1e-6
    alone = SHORT.angles(rope, far[[0, 2]])[0]
    assert cos[[0, 2]].equal(alone), "rows do not depend on who is in their pass"
