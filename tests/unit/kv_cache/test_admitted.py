"""Texts under a policy hold no more than they are admitted for, what the policy keeps beside pages included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.kv_cache.after_prompt import Noting
from decodery.kv_cache.coprocessor import Augmented
from decodery.kv_cache.evicting import Evicting
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.quantized import Quantized, Storing
from decodery.models.cache.account import resident
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy
from decodery.testing import tiny_transformer, to_int8
from methods import KVS

PROMPT = np.random.default_rng(3).integers(0, 64, 90).tolist()
CODED = to_int8(tiny_transformer(0, max_positions=256))
CODED.narrow_caches(torch.int8)
MODELS: dict[str, LanguageModel] = {"float64": tiny_transformer(0, max_positions=256), "int8": CODED}
POLICIES = KVS | {"quantized, small groups": Quantized(8, group=2, residual=8), "h2o, nearly all": H2O(0.99)}


def held(model: LanguageModel, kv: CachePolicy) -> tuple[int, list[int]]:
    """What a text is expected to take to its end, and what it holds after each step."""
    engine = Engine(model, prefill_chunk=16)
    text = engine.submit(Request(PROMPT, max_new_tokens=40, cache_policy=kv))
    promised, found = text.cache.more_for(len(PROMPT) + 40), []
    while not text.finished:
        engine.step()
        found.append(resident([text.cache]))
    assert text.error is None and len(text.generated) == 40
    return promised, found


@pytest.mark.parametrize("kv", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("dtype", MODELS)
def test_a_text_holds_no_more_than_it_is_admitted_for(kv: CachePolicy, dtype: str) -> None:
    promised, found = held(MODELS[dtype], kv)
    assert max(found) <= promised


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("actqkv", Noting),
        ("coprocessor", Augmented),
        ("h2o, nearly all", Evicting),
        ("quantized, small groups", Storing),
    ],
)
def test_what_is_not_announced_would_show(
    name: str, kind: type[AttentionPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "more_for", AttentionPolicy.more_for)
    promised, found = held(CODED, POLICIES[name])
    assert max(found) > promised


def test_queries_that_are_kept_of_a_prompt_count() -> None:
    model = tiny_transformer(0)
    for name in ("snapkv", "expected-attention", "actqkv"):
        engine = Engine(model, prefill_chunk=16)
        text = engine.submit(Request(PROMPT[:40], max_new_tokens=2, cache_policy=KVS[name]))
        beside = []
        while not text.finished:
            engine.step()
            beside.append(resident([text.cache]) - text.cache.pages.held.size * text.cache.pages.pool.page_bytes)
        assert beside[-1] == 0
        row = model.config.num_layers * model.config.num_heads * model.config.head_dim * 8
        assert max(beside) == (0 if name == "snapkv" else 32 * row)
