"""Prompts that texts under a policy share with others, and texts that are dropped and read again."""

from __future__ import annotations

import numpy as np
import pytest

from decodery.engine.engine import Engine
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.kv_cache.after_prompt import AfterPrompt
from decodery.kv_cache.dapq import DapQ
from decodery.kv_cache.quantized import Quantized
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.selecting import Selecting
from decodery.kv_cache.snapkv import SnapKV
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer, to_int8

EXACT = to_int8(tiny_transformer(0))
PROMPT = np.random.default_rng(1).integers(0, 64, 70).tolist()
QUEST = Quest(0.3, page=4, dense_layers=0, least=1)


def written(engine: Engine, kv: CachePolicy | str | None, prompt: list[int] = PROMPT, new: int = 24) -> Sequence:
    seq = engine.submit(Request(prompt, max_new_tokens=new, cache_policy=kv))  # type: ignore[arg-type]
    engine.run([seq])
    return seq


def alone(kv: CachePolicy | str | None, prompt: list[int] = PROMPT, new: int = 24) -> list[int]:
    return decode(EXACT, [prompt], cache_policy=kv, max_new_tokens=new)[0].tokens


def test_a_policy_that_reads_prompts_in_full_shares_them() -> None:
    engine = Engine(EXACT, prefixes=PrefixCache(1 << 24))
    assert alone(QUEST) != alone(None)
    for kv in (QUEST, None, QUEST):
        found = written(engine, kv)
        assert found.tokens == alone(kv)
    assert found.scheduling.cached > 40
    # What was written under the policy is nobody's prefix: a text that goes on from it reads it anew.
    engine = Engine(EXACT, prefixes=PrefixCache(1 << 24))
    longer = [*written(engine, QUEST).tokens, 5]
    after = written(engine, None, longer, 8)
    assert after.tokens == alone(None, longer, 8) and 0 < after.scheduling.cached <= len(PROMPT)


@pytest.mark.parametrize(
    ("kv", "cached"),
    [
        (Quantized(4, group=4, residual=6), 69), (SnapKV(0.4, window=3), 67), (DapQ(0.5, queries=4, recent=2), 69),
        (StreamingLLM(40, sinks=2), 40), ("h2o:budget=0.4", 0), ("expected-attention:budget=0.5", 0),
    ],
)  # fmt: skip
def test_what_a_policy_leaves_as_it_is_comes_from_other_texts(kv: CachePolicy | str, cached: int) -> None:
    engine = Engine(EXACT, prefixes=PrefixCache(1 << 24))
    written(engine, None)
    found = written(engine, kv)
    assert found.scheduling.cached == cached and found.tokens == alone(kv)
    again = engine.submit(Request(PROMPT, max_new_tokens=24, cache_policy=kv, reuse=written(engine, None)))  # type: ignore[arg-type]
    assert again.cache.next_position == cached
    engine.run([again])
    assert again.tokens == alone(kv)
    assert written(engine, None).tokens == alone(None)


class Unwatched(AfterPrompt):
    """Takes tokens whose queries it scores by from other texts, too."""

    def __init__(self, right: AfterPrompt) -> None:
        super().__init__(right.method, right.config, right.prompt)
        self.untouched = right.prompt


class Overlooking(SnapKV):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        right = super().state(model, prompt)
        assert isinstance(right, AfterPrompt)
        return Unwatched(right)


def test_a_policy_that_takes_what_it_must_read_writes_another_text() -> None:
    texts = []
    for kv in (SnapKV(0.4, window=3), Overlooking(0.4, window=3)):
        engine = Engine(EXACT, prefixes=PrefixCache(1 << 24))
        written(engine, None)
        texts.append(written(engine, kv).cache)
    same = [texts[0].view(layer)[0].shape == texts[1].view(layer)[0].shape for layer in range(2)]
    assert not all(same) or not all(texts[0].view(layer)[0].equal(texts[1].view(layer)[0]) for layer in range(2))


class Careless(Selecting):
    """Gives away what it has written as well."""

    untouched = 10_000

    def __init__(self, right: Selecting) -> None:
        super().__init__(right.method, right.config, right.prompt)
        self.untouched = Careless.untouched


class Leaking(Quest):
    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        right = super().state(model, prompt)
        assert isinstance(right, Selecting)
        return Careless(right)


def test_what_a_policy_has_written_would_show_in_another_text() -> None:
    caches = []
    for kv in (QUEST, Leaking(**vars(QUEST))):
        engine = Engine(EXACT, prefixes=PrefixCache(1 << 24))
        longer = [*written(engine, kv).tokens, 5]
        caches.append(written(engine, None, longer, 2).cache)
    fresh = decode(EXACT, [longer], max_new_tokens=2)[0].cache
    same = [all(cache.view(layer)[0].equal(fresh.view(layer)[0]) for layer in range(2)) for cache in caches]
    assert same == [True, False]


def test_a_chat_goes_on_from_the_prompt_it_has_read() -> None:
    engine = Engine(EXACT)
    first = written(engine, QUEST)
    again = engine.submit(Request([*first.tokens, 7], max_new_tokens=8, cache_policy=QUEST, reuse=first))
    assert again.cache.next_position == len(PROMPT)
    engine.run([again])
    assert again.tokens == alone(QUEST, [*first.tokens, 7], 8)
    assert engine.submit(Request(PROMPT, cache_policy="h2o", reuse=first)).cache.next_position == 0


def test_copies_share_a_prompt_under_such_a_policy() -> None:
    engine = Engine(EXACT)
    first = engine.submit(Request(PROMPT, max_new_tokens=12, cache_policy=QUEST))
    clone = engine.submit(Request(PROMPT, max_new_tokens=12, cache_policy=QUEST, seed=5), like=first)
    engine.run([first, clone])
    assert first.tokens == clone.tokens == alone(QUEST, new=12)
    assert first.trace.rows + clone.trace.rows < 2 * len(PROMPT)


@pytest.mark.parametrize("kv", [QUEST, "streaming-llm:budget=12,sinks=2", "h2o:budget=0.4"], ids=str)
def test_what_follows_from_tokens_alone_is_dropped_and_read_again(kv: CachePolicy | str) -> None:
    engine = Engine(EXACT)
    seq = engine.submit(Request(PROMPT, max_new_tokens=24, cache_policy=kv))  # type: ignore[arg-type]
    while seq.position < 9:
        engine.step()
    engine.preempt(seq)
    engine.run([seq])
    assert seq.tokens == alone(kv)
    assert engine.preemptions == (0 if kv == "h2o:budget=0.4" else 1), "what many passes have scored is kept"
