"""Passes at fixed shapes, and attention of all texts in one call, give what ordinary passes give.

All but the capture itself is an ordinary function and is tested on the CPU, with a recording in the place of a graph;
capture and replay need a CUDA device.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covering import in_turn
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.config import Rope
from decodery.models.cuda import graphs
from decodery.models.cuda.captured import Shapes
from decodery.models.cuda.graphs import MOST_APART, MOST_ROWS, StaticPass, StaticPasses
from decodery.models.hooks import Hooks
from decodery.models.layer_plan import LayerPlan
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.step.draft_tree import DraftTree
from decodery.testing import Garbage, Oracle, check_batch, check_identical, check_state, decode, tiny_transformer
from methods import DRAFTERS, SAMPLERS
from recordings import recording
from tiny_models import CASES, assert_same_logits, make_model, save

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


def tiny(changes: str = "plain", *, static: bool = True, together: bool = False, device: str = "cpu") -> Transformer:
    """A model whose passes are static, or together in one call per layer, or those of every text by itself."""
    base = tiny_transformer(0, max_positions=8192)
    model = Transformer(replace(base.config, **CHANGES[changes]), to(base.weights, device))
    model.static, model.pages_together = StaticPasses() if static else None, together
    return model


def forward(model: Transformer, batch: Batch, taps: tuple[int, ...] = ()) -> Scores:
    with torch.no_grad():
        return model.forward(batch, taps=taps)


def shapes(model: Transformer) -> set[tuple[int, int]]:
    """Texts and rows of all passes there have been."""
    assert model.static is not None
    return {(shape.texts, shape.rows) for shape in model.static.shapes}


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

    def __init__(self, changes: str, seed: int, device: str = "cpu", *, together: bool = False) -> None:
        self.static = tiny(changes, device=device, static=not together, together=together)
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

    def grow(self) -> None:
        """Score a tree in passes, whose rows stay in the cache from one to the next."""
        twins, size = self.twins[self.random.integers(len(self.twins))], int(self.random.integers(2, 30))
        tree = self._tree(size)
        cuts = sorted({0, size, *self.random.integers(1, size, 2).tolist()})
        for first, last in pairwise(cuts):
            mask = tree.ancestor_mask()[first:last, :last]
            logits = []
            for model, cache in ((self.static, twins.static), (self.ordinary, twins.ordinary)):
                positions = cache.next_position + tree.depths[first:last]
                segment = Segment(positions, tree.tokens[first:last], mask=mask, cache=cache, retained=first)
                logits.append(forward(model, Batch([segment])).logits)
            assert torch.allclose(*logits, rtol=0, atol=1e-10)
        path = [0, *tree.path(int(self.random.integers(size)))]
        twins.static.keep(path)
        twins.ordinary.keep(path)
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
    operations = [pair.score] * 6 + [pair.grow] * 2 + [pair.add, pair.fork, pair.truncate, pair.drop]
    pair.add()
    for _ in range(steps):
        operation = operations[pair.random.integers(len(operations))]
        if len(pair.twins) > 1 or operation in (pair.score, pair.grow, pair.add, pair.fork):
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
    ours.static = StaticPasses()
    with torch.no_grad():
        assert_same_logits(ours, theirs)
    assert shapes(ours) == {(1, rows) for rows in (1, 4, 8, 16)}


@pytest.mark.parametrize("case", CASES)
def test_every_family_equals_transformers_with_its_texts_together(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make_model(case)
    ours = load(save(theirs, tmp_path / "model"), dtype="float32", device="cpu").model
    assert isinstance(ours, Transformer)
    ours.pages_together = True
    with torch.no_grad():
        assert_same_logits(ours, theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("changes", CHANGES)
def test_batches_trees_forks_and_cuts_equal_the_ordinary_pass(changes: str, seed: int) -> None:
    pair = Pair(changes, seed)
    go_through_everything(pair, 60)
    # Those since page tables grew last, by which all are captured anew.
    assert len(shapes(pair.static)) > 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("changes", CHANGES)
def test_texts_together_equal_each_by_itself(changes: str, seed: int) -> None:
    go_through_everything(Pair(changes, seed, together=True), 60)


def test_texts_that_cannot_be_taken_together_are_computed_beside_the_others() -> None:
    model, other = tiny(static=False, together=True), tiny(static=False)
    logits = []
    for each in (model, other):
        plain, evicted = each.new_cache(), each.new_cache()
        forward(each, Batch([Segment.chunk(range(20), plain), Segment.chunk(range(30), evicted)]))
        plain.keep(range(20))
        evicted.keep(range(30))
        evicted.evict(0, [3])
        own = Segment(np.arange(4), np.arange(4))
        segments = [Segment.chunk([7], evicted), Segment.chunk([1, 2, 3], plain), own]
        logits.append(forward(each, Batch(segments)).logits)
    assert torch.allclose(*logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", CHANGES)
def test_a_layer_makes_one_call_for_any_number_of_texts(changes: str) -> None:
    counts = []
    for texts in (2, 9):
        model = tiny(changes, static=False, together=True)
        caches = [model.new_cache() for _ in range(texts)]
        forward(model, Batch([Segment.chunk([1] * 20, cache) for cache in caches]))
        for cache in caches:
            cache.keep(range(20))
        calls = Calls()
        with calls:
            forward(model, Batch([Segment.chunk([2], cache) for cache in caches]))
        counts.append(calls.names)
    attending = [count for name, count in counts[0].items() if "scaled_dot_product" in name]
    assert counts[0] == counts[1] and attending == [2]


class Calls(TorchDispatchMode):
    """Counts PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func.overloadpacket)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("changes", CHANGES)
def test_texts_that_grow_beyond_what_tables_hold_are_captured_anew(changes: str) -> None:
    pair = Pair(changes, 0)
    pair.add()
    pair.add()
    while pair.twins[0].ordinary.length < 530:
        pair.score(most_rows=32)
    assert shapes(pair.static)


def test_positions_beyond_the_first_angles_are_turned_alike() -> None:
    model, other = tiny(), tiny(static=False)
    logits = []
    for each in (model, other):
        cache, positions = each.new_cache(), np.array([4090, 4100])
        forward(each, Batch([Segment.chunk([1], cache)]))
        cache.keep([0])
        logits.append(forward(each, Batch([Segment(positions, np.array([2, 3]), cache=cache)])).logits)
    assert torch.allclose(*logits, rtol=0, atol=1e-10) and shapes(model) == {(1, 2)}


def test_rows_are_padded_to_few_shapes() -> None:
    model = tiny()
    cache = model.new_cache()
    for n in range(1, MOST_APART + 1):
        forward(model, Batch([Segment.chunk([1] * n, cache)]))
        cache.keep([])
    assert shapes(model) == {(1, rows) for rows in (1, 2, 4, 8, 16, 32, 64)}


def test_with_a_kernel_shapes_have_up_to_512_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes rows as they come; here each row's attention stands for it."""
    monkeypatch.setattr(graphs, "kernel_for", lambda pool: True)
    model, other = tiny(), tiny(static=False)
    counts, logits = [1] * 60 + [16, 3, 40, 350], []
    for each in (model, other):
        caches = [each.new_cache() for _ in counts]
        segments = [Segment.chunk([5] * n, cache, [n - 1]) for n, cache in zip(counts, caches, strict=True)]
        logits.append(forward(each, Batch(segments)).logits)
    assert torch.allclose(*logits, rtol=0, atol=1e-10) and shapes(model) == {(64, 512)}
    cache = model.new_cache()
    found = set()
    for n in range(1, MOST_ROWS + 60, 9):
        forward(model, Batch([Segment.chunk([1] * n, cache)]))
        cache.keep([])
        found |= shapes(model)
    assert {rows for texts, rows in found if texts == 1} <= {1, 2, 4, 8, 16, 32, 64, *range(128, 513, 64)}


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


@pytest.mark.parametrize("most", [MOST_APART, 4])
def test_a_tree_grows_from_one_pass_to_the_next(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of fixed shapes go on from what they left tentative, and so does the ordinary pass."""
    monkeypatch.setattr(graphs, "MOST_APART", most)
    model, other = tiny(), tiny(static=False)
    caches = [model.new_cache(), other.new_cache()]
    tree = DraftTree.from_paths(4, [[1, 2], [3, 9]])
    logits = []
    for each, cache in zip((model, other), caches, strict=True):
        forward(each, Batch([_segment(cache, tree, None)]))
        grown = Segment(np.array([3]), np.array([7]), mask=np.ones((1, 6), dtype=bool), cache=cache, retained=5)
        logits.append(forward(each, Batch([grown])).logits)
        cache.keep([0, *tree.path(4), 5])
    assert torch.allclose(*logits, rtol=0, atol=1e-10) and shapes(model) == {(1, 1), *([(1, 8)] if most > 4 else [])}
    Twins(*caches).agree()
    held = [model.new_cache(), other.new_cache()]
    for first in range(34):
        chained = [Segment(np.array([first]), np.array([7 + first % 3]), cache=each, retained=first) for each in held]
        model.static = StaticPasses()
        found = [forward(each, Batch([own])).logits for each, own in zip((model, other), chained, strict=True)]
        # A shape of one row has bits for 32 tentative ones, and another one of one row for more.
        assert model.static is not None and [shape.words for shape in model.static.shapes] == [1 + (first >= 32)]
        assert torch.allclose(*found, rtol=0, atol=1e-10)


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


def test_there_are_never_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodery.models.cuda.captured._MOST_SHAPES", 2)
    pair = Pair("plain", 2)
    for _ in range(4):
        pair.add()
    for step in range(12):
        pair.score(sequences=1 + step % 4)
        assert pair.static.static is not None and len(pair.static.static.shapes) <= 2


def test_a_full_device_means_the_ordinary_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def full(self: StaticPass, model: Any) -> None:
        tried.append(self.shape)
        raise torch.OutOfMemoryError("the device is full")

    model = tiny()
    monkeypatch.setattr(StaticPass, "replay", full)
    check_identical(model, PROMPTS, drafter=Garbage())
    assert not shapes(model) and tried and len(tried) == len(set(tried))


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
    (step,) = model.static._passes.held.values()
    rest = step._inputs.split(step._sizes)[-1]
    _, _, _, begins, bits, _ = step.layout.fields(rest)
    assert begins.shape == (2, 16) and (bits != 0).any(dim=-1).all()


@pytest.mark.parametrize("changes", CHANGES)
def test_recorded_passes_equal_the_ordinary_pass(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a pass is decided by numbers of the pass that was recorded, and nothing waits for the device."""
    recorded = recording(monkeypatch)
    pair = Pair(changes, 0)
    go_through_everything(pair, 80)
    assert pair.static.static is not None and 3 < len(recorded) < 60


def test_what_does_not_fit_is_left_to_the_ordinary_pass() -> None:
    model = tiny()
    assert model.static is not None
    evicted = model.new_cache()
    forward(model, Batch([Segment.chunk([1] * 70, evicted)]))
    evicted.keep(range(70))
    evicted.evict(0, [3])
    tokens, positions = np.array([1, 2]), np.arange(2)
    left = {
        "too many rows": [Segment.chunk([1] * (MOST_APART + 1), model.new_cache())],
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


def test_pages_stand_still_from_the_look_for_a_graph_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, taken, waiting = tiny(), StaticPasses._step, list[int](), list[tuple[int, threading.Thread]]()
    cache = model.new_cache()
    pool = cache.pages.pool

    def looked(self: StaticPasses, *args: Any) -> StaticPass:
        found = real(self, *args)
        # Taking pages, another thread may move all of them.
        other = threading.Thread(target=lambda: taken.append(len(pool.take(1))))
        other.start()
        other.join(0.2)
        waiting.append((len(taken), other))
        return found

    monkeypatch.setattr(StaticPasses, "_step", looked)
    for number in range(3):
        forward(model, Batch([Segment.chunk([1, 2], cache)]))
        before, other = waiting[-1]
        other.join()
        assert before == number and len(taken) == number + 1


def test_logits_of_all_shapes_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recording(monkeypatch)
    model = tiny()
    caches = [model.new_cache() for _ in range(16)]
    # With many texts first page tables grow but once.
    for texts, rows in ((16, 3), (8, 6), (4, 16), (3, 16), (2, 20), (1, 64), (2, 1), (1, 3), (1, 1)):
        forward(model, Batch([Segment.chunk([1] * rows, cache) for cache in caches[:texts]]))
    assert model.static is not None
    kept = [made._captured.result[0] for made in model.static._passes.held.values()]
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    assert len(kept) > 7 and sum(sizes.values()) < 2 * max(each.nbytes for each in kept)


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


def test_shapes_made_in_inference_mode_work_outside_of_it() -> None:
    model = tiny()
    with torch.inference_mode():
        decode(model, PROMPTS[:1])
    decode(model, PROMPTS[:1])


def test_what_is_done_before_the_first_layer_has_no_fixed_shape() -> None:
    """At one, embeddings would reach the first layer without their norm."""
    base = tiny_transformer(0)
    model = Transformer(replace(base.config, joined_norms=True), base.weights)
    assert not model.config.static_shapes
    found = [forward(model, Batch([Segment.chunk([1, 2, 3], model.new_cache())])).logits]
    model.static = StaticPasses()
    found.append(forward(model, Batch([Segment.chunk([1, 2, 3], model.new_cache())])).logits)
    assert (found[0] - found[1]).abs().max() > 0.1


def test_graphs_of_all_shapes_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps what was freed for the stream that had it."""
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(object()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: len(made))
    shapes, memories = Shapes[int, object](), list[Any]()
    for number in range(3):
        shapes.renew(number, torch.device("cuda"))
        memories.append(shapes.memory)
    assert len(made) == 1 and {id(each.stream) for each in memories} == {id(made[0])}


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
