"""Passes at fixed shapes give what ordinary passes give, whatever the caches go through.

All but the capture itself is an ordinary function and is tested on the CPU; capture and replay need a CUDA device.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covering import in_turn
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig, Rope
from decodery.models.cuda.graphs import MOST_ROWS, StaticPasses
from decodery.models.hooks import Hooks
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.step.draft_tree import DraftTree
from decodery.testing import Garbage, Oracle, check_batch, check_identical, check_state, decode, tiny_transformer
from methods import DRAFTERS, SAMPLERS
from tiny_models import CASES, assert_same_logits, make_model, save

BUDGET = 1 << 26
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, [11], list(range(2, 40))]
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every layer slides": {"sliding_window": 5, "sliding_layers": (True, True)},
    "one layer slides, its own rotation": {
        "sliding_window": 4,
        "sliding_layers": (True, False),
        "local_rope": Rope(theta=100.0),
    },
}


pytestmark = pytest.mark.usefixtures("pools_of_pytorch")


def needs_cuda(test: Any) -> Any:
    """Marks what is skipped without a CUDA device, and what `benchmarks/gpu` runs where there is one."""
    skips = pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing graphs needs a CUDA device")
    return pytest.mark.cuda(skips(test))


def to(value: Any, *args: Any) -> Any:
    """Weights with all their tensors moved or converted."""
    if isinstance(value, torch.Tensor):
        return value.to(*args)
    if isinstance(value, list):
        return [to(item, *args) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: to(getattr(value, field.name), *args) for field in fields(value)})
    return value


def model_of(config: ModelConfig, weights: Any, *, static: bool, budget: int = BUDGET) -> Transformer:
    model = Transformer(config, weights)
    model.static = StaticPasses(budget) if static else None
    return model


def tiny(changes: str = "plain", *, static: bool = True, budget: int = BUDGET, device: str = "cpu") -> Transformer:
    base = tiny_transformer(0, max_positions=1024)
    config = replace(base.config, **CHANGES[changes])
    return model_of(config, to(base.weights, device), static=static, budget=budget)


def forward(model: Transformer, batch: Batch, taps: tuple[int, ...] = ()) -> Scores:
    with torch.no_grad():
        return model.forward(batch, taps=taps)


def shapes(model: Transformer) -> set[tuple[int, int, int]]:
    """Places, capacity and rows of all passes there have been."""
    assert model.static is not None
    arenas = model.static._arenas.items()
    return {(*key, rows) for key, arena in arenas for rows, _ in arena._passes}


@dataclass
class Twins:
    """One sequence in the cache of a model that runs at fixed shapes, and in that of one that does not."""

    static: KVCache
    ordinary: KVCache

    def agree(self) -> None:
        n = self.ordinary.length
        assert (self.static.lengths == self.ordinary.lengths).all()
        assert self.static.next_position == self.ordinary.next_position
        assert (self.static.positions[:, :n] == self.ordinary.positions[:, :n]).all()
        assert torch.allclose(self.static.data[:, :, :, :n], self.ordinary.data[:, :, :, :n], rtol=0, atol=1e-10)


class Pair:
    """The same passes and cache operations on both models, compared after each."""

    def __init__(self, changes: str, seed: int, device: str = "cpu") -> None:
        self.static = tiny(changes, device=device)
        self.ordinary = tiny(changes, static=False, device=device)
        self.random = np.random.default_rng(seed)
        self.twins: list[Twins] = []

    def add(self) -> None:
        self.twins.append(Twins(self.static.new_cache(), self.ordinary.new_cache()))

    def drop(self) -> None:
        del self.twins[self.random.integers(len(self.twins))]

    def fork(self) -> None:
        twins = self.twins[self.random.integers(len(self.twins))]
        self.twins.append(Twins(twins.static.fork(), twins.ordinary.fork()))

    def truncate(self) -> None:
        twins = self.twins[self.random.integers(len(self.twins))]
        n = int(self.random.integers(twins.ordinary.next_position + 1))
        twins.static.truncate(n)
        twins.ordinary.truncate(n)

    def score(self, most_rows: int = 10, sequences: int = 5) -> None:
        count = min(len(self.twins), sequences)
        chosen = [self.twins[i] for i in self.random.permutation(len(self.twins))[:count]]
        trees = [self._tree(int(self.random.integers(1, most_rows + 1))) for _ in chosen]
        wanted = [self._wanted(len(tree)) for tree in trees]
        taps = (0, 2) if self.random.random() < 0.3 else ()
        batches = [
            Batch([_segment(cache, tree, rows) for cache, tree, rows in zip(caches, trees, wanted, strict=True)])
            for caches in ([each.static for each in chosen], [each.ordinary for each in chosen])
        ]
        got, expected = forward(self.static, batches[0], taps), forward(self.ordinary, batches[1], taps)
        assert (got.bounds, got.offsets) == (expected.bounds, expected.offsets)
        assert got.logits.shape == expected.logits.shape and got.logits.dtype == expected.logits.dtype
        assert torch.allclose(got.logits, expected.logits, rtol=0, atol=1e-10)
        assert got.hidden.keys() == expected.hidden.keys() == set(taps)
        for tap in taps:
            assert torch.allclose(got.hidden[tap], expected.hidden[tap], rtol=0, atol=1e-10)
        for twins, tree in zip(chosen, trees, strict=True):
            path = [0, *tree.path(int(self.random.integers(len(tree))))]
            twins.static.keep(path)
            twins.ordinary.keep(path)
        for twins in self.twins:
            twins.agree()

    def _tree(self, nodes: int) -> DraftTree:
        chain = self.random.random() < 0.4
        parents = [node - 1 if chain else int(self.random.integers(0, max(node, 1))) for node in range(nodes)]
        return DraftTree(self.random.integers(0, 64, nodes), np.array([-1, *parents[1:]]), "sampled")

    def _wanted(self, nodes: int) -> list[int] | None:
        some = self.random.permutation(nodes)[: self.random.integers(0, nodes + 1)].tolist()
        return None if self.random.random() < 0.5 else some


def _segment(cache: KVCache, tree: DraftTree, logit_rows: list[int] | None) -> Segment:
    mask = None if tree.is_chain else tree.ancestor_mask()
    return Segment(cache.next_position + tree.depths, tree.tokens, mask=mask, cache=cache, logit_rows=logit_rows)


def go_through_everything(pair: Pair, steps: int) -> None:
    operations = [pair.score] * 6 + [pair.add, pair.fork, pair.truncate, pair.drop]
    pair.add()
    for _ in range(steps):
        operation = operations[pair.random.integers(len(operations))]
        if len(pair.twins) > 1 or operation in (pair.score, pair.add, pair.fork):
            operation()


@pytest.mark.parametrize("case", CASES)
def test_every_family_equals_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make_model(case)
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    assert isinstance(ours, Transformer)
    if ours.config.learned_positions or ours.config.keeps_order or ours.config.unit_values:
        # Such models run at the shapes of their passes, on a GPU too.
        assert not ours.config.static_shapes
        return
    ours.static = StaticPasses(BUDGET)
    with torch.no_grad():
        assert_same_logits(ours, theirs)
    assert shapes(ours) == {(1, 256, rows) for rows in (1, 4, 8, 16)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("changes", CHANGES)
def test_batches_trees_forks_and_cuts_equal_the_ordinary_pass(changes: str, seed: int) -> None:
    pair = Pair(changes, seed)
    go_through_everything(pair, 60)
    assert {places for places, _, _ in shapes(pair.static)} >= {1, 2, 4}


@pytest.mark.parametrize("changes", CHANGES)
def test_growing_caches_go_to_larger_arenas(changes: str) -> None:
    pair = Pair(changes, 0)
    pair.add()
    pair.add()
    while pair.twins[0].ordinary.length < 530:
        pair.score(most_rows=32)
    assert {capacity for _, capacity, _ in shapes(pair.static)} == {256, 512, 1024}


def test_a_cache_does_not_go_back_when_rows_become_fewer() -> None:
    model = tiny()
    cache = model.new_cache()
    for _ in range(4):
        forward(model, Batch([Segment.chunk([1] * 60, cache)]))
        cache.keep(range(60))
    for rows in (17, 1, 1, 17, 1):
        forward(model, Batch([Segment.chunk([1] * rows, cache)]))
    assert shapes(model) == {(1, 256, 64), (1, 512, 1), (1, 512, 32)}


def test_rows_are_padded_to_few_shapes() -> None:
    model = tiny()
    cache = model.new_cache()
    for n in range(1, MOST_ROWS + 1):
        forward(model, Batch([Segment.chunk([1] * n, cache)]))
        cache.keep([])
    assert shapes(model) == {(1, 256, rows) for rows in (1, 2, 4, 8, 16, 32, 64)}


@pytest.mark.parametrize(("drafter", "sampler"), in_turn(["prompt-lookup", "draft-model"], ["greedy", "nucleus"]))
def test_drafts_and_batches_change_no_token(drafter: str, sampler: str) -> None:
    model, made = tiny(), DRAFTERS[drafter](tiny_transformer(0, num_layers=1))
    drafted = check_identical(model, PROMPTS, drafter=made, sampler=SAMPLERS[sampler], eos_ids=(0,))
    ordinary = decode(
        *(tiny(static=False), PROMPTS), sampler=SAMPLERS[sampler], seeds=(0, 1), max_new_tokens=24, eos_ids=(0,)
    )
    assert [seq.generated for seq in drafted] == [seq.generated for seq in ordinary]
    check_batch(model, PROMPTS, drafter=made, sampler=SAMPLERS[sampler])
    assert shapes(model)


@pytest.mark.parametrize("changes", CHANGES)
def test_the_cache_equals_a_fresh_prefill_after_every_step(changes: str) -> None:
    model = tiny(changes)
    (plain,) = decode(model, PROMPTS[:1], max_new_tokens=20)
    for drafter in (None, Garbage(), Oracle(tuple(plain.tokens))):
        check_state(model, [PROMPTS[0]], drafter=drafter, max_new_tokens=20)
    check_identical(model, PROMPTS, drafter=Garbage(nodes=30), sampler=SAMPLERS["plain"])


def test_a_displaced_cache_keeps_the_rows_of_its_last_pass() -> None:
    model, other = tiny(), tiny(static=False)
    first, second, expected = model.new_cache(), model.new_cache(), other.new_cache()
    tree = DraftTree.from_paths(4, [[1, 2], [3, 9]])
    forward(model, Batch([_segment(first, tree, None)]))
    forward(model, Batch([Segment.chunk([8, 8, 8, 8, 8, 8, 8, 8], second)]))
    forward(other, Batch([_segment(expected, tree, None)]))
    for cache in (first, expected):
        cache.keep([0, *tree.path(4)])
    Twins(first, expected).agree()


def test_rows_stay_in_a_cache_that_the_arena_holds() -> None:
    """What a pass of fixed shape left tentative, the ordinary pass that grows the tree goes on from."""
    model, other = tiny(), tiny(static=False)
    caches = [model.new_cache(), other.new_cache()]
    tree = DraftTree.from_paths(4, [[1, 2], [3, 9]])
    logits = []
    for each, cache in zip((model, other), caches, strict=True):
        forward(each, Batch([_segment(cache, tree, None)]))
        grown = Segment(np.array([3]), np.array([7]), mask=np.ones((1, 6), dtype=bool), cache=cache, retained=5)
        logits.append(forward(each, Batch([grown])).logits)
        cache.keep([0, *tree.path(4), 5])
    assert torch.allclose(*logits, rtol=0, atol=1e-10) and shapes(model)
    Twins(*caches).agree()


def test_what_all_arenas_work_in_stays_within_the_budget() -> None:
    config = tiny().config
    budget = 5 * 2 * config.num_kv_heads * 256 * config.head_dim * 8
    pair = Pair("plain", 1)
    pair.static.static = StaticPasses(budget)
    for _ in range(4):
        pair.add()
    used = set()
    for step in range(40):
        pair.score(sequences=1 + step % 4)
        assert pair.static.static.bytes <= budget
        used |= shapes(pair.static)
    # Never all of them at once: places for 1, 2 and 4 caches would be 7 capacities.
    assert {places for places, _, _ in used} == {1, 2, 4}


def test_padding_leaves_the_pages_of_others_alone() -> None:
    """A text that was cut holds pages after its end with a fork that still reads them."""
    model, other = tiny(), tiny(static=False)
    cache, expected = model.new_cache(), other.new_cache()
    for each, held in ((model, cache), (other, expected)):
        forward(each, Batch([Segment.chunk([1] * 60, held)]))
        held.keep(range(60))
    fork = cache.fork()
    cache.truncate(3)
    forward(model, Batch([Segment.chunk([2] * 33, cache)]))
    Twins(fork, expected).agree()


def test_there_are_never_many_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodery.models.cuda.graphs._MOST_ARENAS", 2)
    pair = Pair("plain", 2)
    for _ in range(4):
        pair.add()
    for step in range(12):
        pair.score(sequences=1 + step % 4)
        assert pair.static.static is not None and len(pair.static.static._arenas) <= 2


def test_a_budget_too_small_or_a_full_device_means_the_ordinary_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(budget=1000)
    check_identical(model, PROMPTS, drafter=Garbage())
    assert not shapes(model)

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("the device is full")

    model = tiny()
    monkeypatch.setattr("decodery.models.cuda.graphs._Arena", full)
    check_identical(model, PROMPTS, drafter=Garbage())
    assert model.static is not None and model.static.budget == 0


def test_what_a_place_held_before_cannot_be_seen() -> None:
    model, other = tiny(), tiny(static=False)
    cache = model.new_cache()
    forward(model, Batch([Segment.chunk(range(50), cache)]))
    cache.pages.put(0, torch.full_like(cache.data, torch.nan))
    del cache
    logits = forward(model, Batch([Segment.chunk([1, 2, 3], model.new_cache())])).logits
    expected = forward(other, Batch([Segment.chunk([1, 2, 3], other.new_cache())])).logits
    assert torch.allclose(logits, expected, rtol=0, atol=1e-10)


def test_every_padded_row_sees_something() -> None:
    # Attention kernels differ in what they make of a row that sees nothing; some make NaN, which would stay.
    model = tiny("one layer slides, its own rotation")
    caches = [model.new_cache() for _ in range(3)]
    for _ in range(3):
        forward(model, Batch([Segment.chunk([1] * n, cache) for n, cache in zip((5, 1, 3), caches, strict=True)]))
        for cache in caches:
            cache.keep([0])
    assert model.static is not None
    (arena,) = model.static._arenas.values()
    (step,) = arena._passes.values()
    masks = step._fields(step._inputs)[-1]
    assert masks.shape == (2, 4, 8, 256) and masks.any(dim=-1).all()


def test_what_does_not_fit_is_left_to_the_ordinary_pass() -> None:
    model = tiny()
    assert model.static is not None
    evicted = model.new_cache()
    forward(model, Batch([Segment.chunk([1] * 70, evicted)]))
    evicted.keep(range(70))
    evicted.evict(0, [3])
    tokens, positions = np.array([1, 2]), np.arange(2)
    left = {
        "too many rows": [Segment.chunk([1] * (MOST_ROWS + 1), model.new_cache())],
        "too many rows with padding": [Segment.chunk([1] * n, model.new_cache()) for n in (MOST_ROWS // 2, 1, 1)],
        "no cache": [Segment(positions, tokens)],
        "embeddings": [Segment(positions, states=torch.zeros(2, 32, dtype=torch.float64), cache=model.new_cache())],
        "evicted": [Segment.chunk([1], evicted)],
    }
    with torch.no_grad():
        for reason, segments in left.items():
            assert model.static.forward(model, Batch(segments), Hooks.reading(())) is None, reason
            assert model.forward(Batch(segments)).logits.isfinite().all(), reason
        model.forward(Batch([Segment.chunk([1], model.new_cache())]), layer_plan=LayerPlan((0,)))
    model.forward(Batch([Segment.chunk([1], model.new_cache())]))
    with torch.no_grad():
        looking_around = tiny()
        looking_around.config = replace(looking_around.config, causal=False)
        looking_around.forward(Batch([Segment.chunk([1, 2], looking_around.new_cache())]))
    assert not shapes(model) and not shapes(looking_around)


def test_threads_that_share_a_model_do_not_meet() -> None:
    model = tiny()
    alone = [decode(tiny(static=False), [prompt])[0].generated for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = decode(model, [PROMPTS[number]], drafter=Garbage(seed=number))[0].generated

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(PROMPTS))] == alone


def test_arenas_made_in_inference_mode_work_outside_of_it() -> None:
    model = tiny()
    with torch.inference_mode():
        decode(model, PROMPTS[:1])
    decode(model, PROMPTS[:1])


@needs_cuda
@pytest.mark.parametrize("changes", CHANGES)
def test_replayed_graphs_equal_the_ordinary_pass(changes: str) -> None:
    go_through_everything(Pair(changes, 0, device="cuda"), 60)


@needs_cuda
def test_graphs_give_the_same_tokens_and_caches_with_any_drafter() -> None:
    model = tiny(device="cuda")
    for make in DRAFTERS.values():
        for sampler in (SAMPLERS["greedy"], SAMPLERS["nucleus"]):
            drafted = check_identical(model, PROMPTS, drafter=make(tiny(device="cuda")), sampler=sampler)
            ordinary = decode(
                *(tiny(static=False, device="cuda"), PROMPTS), sampler=sampler, seeds=(0, 1), max_new_tokens=24
            )
            assert [seq.generated for seq in drafted] == [seq.generated for seq in ordinary]
    (plain,) = decode(model, PROMPTS[:1], max_new_tokens=40)
    check_state(model, [PROMPTS[0]], drafter=Oracle(tuple(plain.tokens)), max_new_tokens=40)
    check_batch(model, PROMPTS, drafter=Garbage())


@needs_cuda
def test_results_are_not_overwritten_by_the_next_pass() -> None:
    model = tiny(device="cuda")
    cache = model.new_cache()
    first = forward(model, Batch([Segment.chunk([1, 2], cache)]), taps=(1,))
    logits, hidden = first.logits.clone(), first.hidden[1].clone()
    forward(model, Batch([Segment.chunk([3, 4], cache)]), taps=(1,))
    assert torch.equal(first.logits, logits) and torch.equal(first.hidden[1], hidden)


@needs_cuda
def test_a_replay_neither_asks_the_device_for_memory_nor_waits_for_it() -> None:
    model = tiny(device="cuda")
    cache, tree = model.new_cache(), DraftTree.from_paths(4, [[1, 2], [3, 9]])

    def step() -> None:
        forward(model, Batch([_segment(cache, tree, None)]))
        cache.keep([0, *tree.path(4)])

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
