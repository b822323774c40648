"""Recurrent states are in the account: of texts before they are made, and of what is kept for later texts."""

from __future__ import annotations

import pytest

from decodery.engine.engine import Engine
from decodery.engine.preempt import caches
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.cache.account import resident_beside
from decodery.models.cache.known_states import States
from decodery.models.config import Mamba, ModelConfig
from drawn_models import after, made

MAMBA = Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4)
MODEL = made(
    ModelConfig(
        vocab_size=90, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24,
        max_positions=512, mamba=MAMBA, state_layers=(True, False, True),
    )
)  # fmt: skip
STATE = MODEL.new_cache().states.size
PAGE = 16 * MODEL.new_cache().slot_bytes
LONG = [[number + 1] * 40 for number in range(24)]


def held(engine: Engine) -> int:
    """Bytes of pages that somebody holds and of all states, each once, in whatever they are kept."""
    schedule = engine._schedule
    limit, prefixes = schedule.memory.limit, schedule.prefixes
    assert limit is not None
    kept = [] if prefixes is None else prefixes.caches
    every = [*kept, *(cache for run in (*schedule.runs, *schedule._waiting) for cache in caches(run))]
    return limit.used - limit.beside + resident_beside(every)


def most(engine: Engine, prompts: list[list[int]]) -> int:
    """The most that is held after any step of texts that come one after another, four at a time."""
    texts, found = [], 0
    for prompt in prompts:
        texts.append(engine.submit(Request(prompt, max_new_tokens=20)))
        for _ in range(6):
            engine.step()
            found = max(found, held(engine))
    while not all(text.finished for text in texts):
        engine.step()
        found = max(found, held(engine))
    free = Engine(MODEL)
    expected = [free.submit(Request(prompt, max_new_tokens=20)) for prompt in prompts]
    free.run(expected)
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    return found


def test_a_model_says_what_its_states_take() -> None:
    cache = after(MODEL, 0, *[1] * 40)
    assert cache.states.bytes == len(next(iter(cache.states.known.values()))) * STATE


def test_states_of_what_is_kept_for_later_texts_count() -> None:
    bound = 20 * PAGE
    prefixes = PrefixCache(bound)
    engine = Engine(MODEL, limits=Limits(cache_bytes=bound), prefixes=prefixes)
    assert 0.8 * bound < most(engine, LONG) <= bound
    assert len(prefixes) > 1 and prefixes.bytes == engine.held_bytes <= bound
    prefixes.clear()
    assert prefixes.bytes == 0


@pytest.mark.parametrize("announced", [True, False])
def test_texts_are_admitted_with_the_states_that_they_will_have(
    announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not announced:
        monkeypatch.setattr(States, "due", 0)
    bound = 16 * PAGE
    engine = Engine(MODEL, limits=Limits(cache_bytes=bound))
    texts = [engine.submit(Request(prompt, max_new_tokens=20)) for prompt in LONG[:8]]
    found = 0
    while not all(text.finished for text in texts):
        engine.step()
        found = max(found, held(engine))
    assert (found <= bound) == announced


def test_states_that_forks_share_count_once() -> None:
    text = after(MODEL, 0, *[1] * 40)
    forks = [text.fork() for _ in range(4)]
    assert resident_beside([text, *forks]) == resident_beside([text])
