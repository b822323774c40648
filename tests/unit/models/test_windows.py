"""Layers with a window give memory back, and nothing that is read afterwards differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from weakref import WeakSet

import numpy as np
import pytest
import torch

from decodery.core.mapped_memory import discards
from decodery.engine.engine import Engine
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.models.batch import Batch, Segment
from decodery.models.cache import cache as caches
from decodery.models.cache.cache import KVCache, Snapshot
from decodery.models.cache.page_pool import SLOTS, PagePool
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.cache_policy import CachePolicy
from decodery.testing import tiny_transformer
from far import Devices
from methods import KVS

WINDOW, LAYERS, BEHIND = 20, 3, 32
SLIDES = (True, False, True)

pytestmark = pytest.mark.skipif(not discards(), reason="memory is given back on Linux alone")


def sliding() -> Transformer:
    """A model whose first and last layer see 20 tokens, with heads wide enough for pages of their own."""
    base = tiny_transformer(0, num_layers=LAYERS, hidden_size=256, max_positions=2048, dtype=torch.float64)
    config = replace(base.config, sliding_window=WINDOW, sliding_layers=SLIDES)
    return Transformer(config, base.weights)


def in_int8() -> Transformer:
    """The same on native kernels, where there are such."""
    base = sliding()

    def rounded(linear: object) -> Int8Linear:
        assert isinstance(linear, Dense)
        return Int8Linear.quantize(linear.weight.float())

    layers = [
        Layer(
            attention_norm=layer.attention_norm.float(), qkv=rounded(layer.qkv), output=rounded(layer.output),
            mlp_norm=layer.mlp_norm.float(), gate_up=rounded(layer.gate_up), down=rounded(layer.down),
        )
        for layer in base.weights.layers
    ]  # fmt: skip
    weights = base.weights
    return Transformer(
        base.config, Weights(weights.embedding.float(), layers, weights.norm.float(), rounded(weights.head))
    )


MODEL = sliding()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back sooner than after some hundreds of tokens."""
    monkeypatch.setattr(caches, "_BEHIND", BEHIND)


@torch.no_grad()
def read(cache: KVCache, tokens: list[int]) -> torch.Tensor:
    """Logits [vocab] of the last token, all of which become content."""
    logits = MODEL.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[len(tokens) - 1])])).logits[0]
    cache.keep(range(len(tokens)))
    return logits


def apart(cache: KVCache, tokens: list[int]) -> float:
    """How far what it says of one more token is from what a cache does that has read all at once."""
    clone, fresh = cache.fork(), MODEL.new_cache()
    assert cache.next_position == len(tokens)
    return float((read(clone, [7]) - read(fresh, [*tokens, 7])).abs().max())


def wander(seed: int, *, too_far: int = 0) -> float:
    """Texts that are read on, forked, cut, marked and returned to, and give back at every step: the largest difference.

    too_far: how much narrower than it is the window is held for.
    """
    random = np.random.default_rng(seed)
    family, worst, marks = [(MODEL.new_cache(), list[int]())], 0.0, []
    for _ in range(14):
        cache, tokens = family[random.integers(len(family))]
        cache.window = WINDOW - too_far
        match random.integers(6):
            case 0 if tokens:
                family = [*family[-1:], (cache.fork(), list(tokens))]
            case 1 if tokens:
                cache.truncate(int(random.integers(len(tokens))))
                del tokens[cache.next_position :]
                marks = [each for each in marks if each[0] is not cache]
            case 2:
                marks.append((cache, cache.snapshot(), len(tokens)))
            case 3 if marks:
                owner, snapshot, length = marks.pop()
                owner.restore(snapshot)
                for each, held in family:
                    if each is owner:
                        del held[length:]
                marks = [each for each in marks if each[0] is not owner]
            case _:
                more = random.integers(1, 60, int(random.integers(1, 80))).tolist()
                read(cache, more)
                tokens += more
        cache.release_passed()
        worst = max([worst, *(apart(each, held) for each, held in family)])
    return worst


def test_what_is_given_back_is_read_by_nobody() -> None:
    assert max(wander(seed) for seed in range(3)) < 1e-9


@pytest.mark.integration
def test_giving_back_a_block_too_much_shows() -> None:
    assert max(wander(seed, too_far=BEHIND + SLOTS) for seed in range(3)) > 1e-6


def test_memory_of_a_long_text_goes_back() -> None:
    cache, random = MODEL.new_cache(), np.random.default_rng(0)
    cache.provide(1024)
    for _ in range(10):
        read(cache, random.integers(1, 60, 100).tolist())
        cache.release_passed()
    held = cache.slot_bytes * 1024
    passed = cache.pages.passed * SLOTS
    assert 1000 - WINDOW - 3 * BEHIND <= passed <= 1000 - WINDOW
    assert cache.bytes == held - held * 2 // 3 * passed // 1024
    # The layer that sees everything has its pages.
    assert not cache.data[[0, 2], :, :, :passed].any()
    assert cache.data[1, :, :, :1000].any(-1).all() and cache.data[[0, 2], :, :, passed:1000].any(-1).all()


def test_pages_of_a_device_go_to_its_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no need of a system that takes memory back."""
    monkeypatch.setattr(caches, "discards", lambda: False)

    def used(device: str) -> int:
        cache = KVCache(LAYERS, 1, 8, device=device, window=WINDOW, windowed=[0, 2])
        cache.reserve(np.arange(400))
        cache.wrote(range(LAYERS))
        cache.keep(range(400))
        cache.release_passed()
        return len(cache.pages.held)

    with Devices():
        assert used("meta:0") < used("cpu") == LAYERS * 400 // SLOTS


def test_a_shared_block_goes_with_the_last_that_reads_it() -> None:
    first = MODEL.new_cache()
    read(first, list(range(1, 60)) * 5)
    second, whole = first.fork(), first.bytes
    first.release_passed()
    assert (
        first.pages.passed
        and caches.resident([first, second]) == whole
        and apart(second, list(range(1, 60)) * 5) < 1e-9
    )
    second.release_passed()
    assert first.bytes < whole
    third = second.fork()
    del first, second
    assert apart(third, list(range(1, 60)) * 5) < 1e-9


def test_a_cut_too_far_back_reads_again() -> None:
    cache, tokens = MODEL.new_cache(), list(range(1, 60)) * 5
    read(cache, tokens)
    cache.release_passed()
    assert cache.begins(260) and not cache.begins(100)
    cache.truncate(260)
    assert cache.next_position == 260 and apart(cache, tokens[:260]) < 1e-9
    cache.truncate(100)
    assert cache.next_position == 0 and cache.pages.passed == 0
    read(cache, tokens)
    assert apart(cache, tokens) < 1e-9


def test_marks_are_not_looked_at_while_there_is_nothing_to_give_back() -> None:
    cache = MODEL.new_cache()
    read(cache, list(range(1, 60)))

    class Looked(WeakSet[Snapshot]):
        def __iter__(self) -> Iterator[Snapshot]:
            raise AssertionError("looked at")

    cache._snapshots = Looked()
    cache.release_passed()
    read(cache, list(range(1, 60)))
    with pytest.raises(AssertionError, match="looked at"):
        cache.release_passed()


def test_marks_keep_what_they_may_return_to() -> None:
    cache, tokens = MODEL.new_cache(), list(range(1, 60)) * 5
    read(cache, tokens[:50])
    snapshot = cache.snapshot()
    read(cache, tokens[50:])
    cache.release_passed()
    assert cache.pages.passed == 0
    cache.restore(snapshot)
    assert apart(cache, tokens[:50]) < 1e-9


@pytest.mark.parametrize("make", [sliding, in_int8])
def test_texts_are_the_same_and_take_less(make: Callable[[], Transformer], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()

    def written() -> tuple[list[int], int]:
        engine = Engine(model)
        seq = engine.submit(Request([5, 6, 7, 8] * 40, max_new_tokens=160, drafter=PromptLookup()))
        engine.run([seq])
        return seq.tokens, seq.cache.bytes

    tokens, less = written()
    monkeypatch.setattr(KVCache, "release_passed", lambda self: None)
    every, more = written()
    assert tokens == every and less <= more * 3 // 4


def test_new_memory_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(self: PagePool, count: int) -> np.ndarray:
        pages, slots = take(self, count), count * SLOTS
        rows = torch.full((1, 2, 1, slots, self.row), torch.nan, dtype=self.dtype)
        self.write(pages[None, None], range(slots), rows)
        return pages

    take = PagePool.take
    monkeypatch.setattr(PagePool, "take", filled)
    cache, tokens = MODEL.new_cache(), list(range(1, 60)) * 8
    for first in range(0, len(tokens), 59):
        read(cache, tokens[first : first + 59])
        cache.release_passed()
    assert cache.pages.passed > 0 and apart(cache, tokens) < 1e-9


def test_what_begins_alike_is_found_where_enough_is_left() -> None:
    kept, tokens = PrefixCache(1 << 30), list(range(1, 60)) * 5
    cache = MODEL.new_cache()
    read(cache, tokens[:100])
    kept.add(tokens[:100], cache)
    read(cache, tokens[100:])
    cache.release_passed()
    kept.add(tokens, cache)
    assert len(kept) == 2
    for alike in (260, 90):
        found = kept.find([*tokens[:alike], 61, 62])
        assert found is not None and found.next_position == alike and apart(found, tokens[:alike]) < 1e-9
    assert kept.find([*tokens[:180], 61, 62]) is None


def under(model: Transformer, kv: CachePolicy, *, gives: bool) -> tuple[list[torch.Tensor], KVCache]:
    """Logits of a text that is read token by token after its prompt, and its cache."""
    cache, found = model.new_cache(), []
    cache.policy = kv.state(model, len(PROMPT))
    for first, last in ((0, len(PROMPT)), *((at, at + 1) for at in range(len(PROMPT), len(TEXT)))):
        found.append(
            model.forward(Batch([Segment.chunk(TEXT[first:last], cache, logit_rows=[last - first - 1])])).logits
        )
        cache.keep(range(last - first))
        if gives:
            cache.release_passed()
    return found, cache


TEXT = np.random.default_rng(5).integers(1, 60, 240).tolist()
PROMPT = TEXT[:150]
# Latents stand before a text, and four parts were learned for models of another shape.
APART = ("coprocessor", "write-gate", "double-sparsity", "lserve", "meta-soft")
READ = {name: kv for name, kv in KVS.items() if not name.startswith(APART)}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("kv", READ.values(), ids=READ)
def test_windows_give_back_under_a_policy(kv: CachePolicy, kernels: bool) -> None:
    model = in_int8() if kernels else MODEL
    (alone, held), (given, gives) = (under(model, kv, gives=each) for each in (False, True))
    assert all(torch.equal(one, two) for one, two in zip(alone, given, strict=True))
    assert gives.policy is not None
    if not gives.policy.anew or isinstance(kv, StreamingLLM):
        # What was cut could not be read again, or windows are evicted with all else.
        assert gives.pages.passed == 0
        return
    assert gives.pages.passed * SLOTS > len(TEXT) - WINDOW - 3 * BEHIND
    table = gives.pages.table
    assert (table[[0, 2], :, : gives.pages.passed] < 0).all() and gives.bytes < held.bytes
    assert gives.more_for(len(TEXT) + 40) == held.more_for(len(TEXT) + 40)
    # What follows a cut far back is read again, and others do not begin with what is left.
    assert (gives.untouched, held.untouched) == (0, len(PROMPT))
    gives.truncate(len(TEXT) - 4)
    assert gives.next_position == len(TEXT) - 4
    gives.truncate(20)
    assert gives.next_position == 0
    segment = Segment.chunk(PROMPT, gives, logit_rows=[len(PROMPT) - 1])
    assert torch.equal(model.forward(Batch([segment])).logits, alone[0])


def test_a_text_that_gave_back_is_no_beginning_under_a_policy() -> None:
    prefixes = PrefixCache(1 << 26)
    engine = Engine(MODEL, prefixes=prefixes)
    texts = []
    for _ in range(2):
        text = engine.submit(Request(PROMPT, max_new_tokens=140, cache_policy=Quest(20)))
        engine.run([text])
        assert text.cache.pages.passed > len(PROMPT) // SLOTS
        texts.append(text.tokens)
        kept = prefixes.find([*PROMPT, 1])
        assert kept is not None and kept.next_position == len(PROMPT)
    assert texts[0] == texts[1]
