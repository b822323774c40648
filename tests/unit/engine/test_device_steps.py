"""Steps of texts on a device choose the tokens that each text would have chosen by itself, and wait once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from count_calls import counted_calls
from decodery.core import noise
from decodery.core.errors import NumericalError
from decodery.engine.array_batch import ArrayBatch
from decodery.engine.device_steps import DeviceSteps, _ancestors
from decodery.engine.device_trees import Trees
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.cache import coded
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kept_together import keep_together
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.torch.attention import near
from decodery.models.torch.row_layout import DraftRows, Layout, SegmentRows
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.tree_walk import walk
from decodery.sampling import Sampler
from decodery.sampling.batched import BatchedSampling, Choice, batched_processors
from decodery.sampling.logits_processor import Context
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.suffix_tree import SuffixTree
from decodery.step.drafter import Drafter
from decodery.testing import Garbage, tiny_transformer
from far import FarTensor, Watched, moved
from recordings import recording

PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, [11], list(range(2, 40)), [3, 4] * 5]
SAMPLERS = [
    Sampler.from_settings(temperature=0.0),
    Sampler.from_settings(temperature=1.0),
    Sampler.from_settings(temperature=0.7, top_k=5),
    Sampler.from_settings(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
    Sampler.from_settings(temperature=0.9, top_p=0.5),
]
DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "prompt-lookup": PromptLookup(),
    "suffix-tree": SuffixTree(),
    "garbage trees": Garbage(nodes=7),
}


AUTO = Auto(head=None)


def together(model: Transformer) -> Transformer:
    model.pages_together = True
    return model


def written(
    model: Any, drafters: Sequence[Drafter | None], samplers: Sequence[Sampler] = SAMPLERS, **settings: Any
) -> tuple[list[list[int]], Engine]:
    """Texts of all prompts, each with a sampler, a seed and a drafter of its own."""
    engine = Engine(model)
    texts = [
        engine.submit(
            Request(prompt, sampler=sampler, seed=number, drafter=drafter, max_new_tokens=16 + number, **settings)
        )
        for number, (prompt, sampler, drafter) in enumerate(zip(PROMPTS, samplers, drafters, strict=True))
    ]
    engine.run(texts)
    return [text.generated for text in texts], engine


def steps_of(engine: Engine) -> DeviceSteps:
    steps = engine._arrays._steps
    assert isinstance(steps, DeviceSteps)
    return steps


@pytest.mark.usefixtures("pools_of_pytorch")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_those_of_one_by_one(drafter: str) -> None:
    drafters = [DRAFTERS[drafter]] * len(PROMPTS)
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS), eos_ids=(0,))
    found, engine = written(together(tiny_transformer()), drafters, eos_ids=(0,))
    assert found == expected and steps_of(engine).waits > 3
    mixed, engine = written(together(tiny_transformer()), [*DRAFTERS.values(), None], eos_ids=(0,))
    assert mixed == expected and steps_of(engine).waits > 3


@pytest.mark.usefixtures("pools_of_pytorch")
def test_noise_of_another_position_gives_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    real = noise.keys
    monkeypatch.setattr(noise, "keys", lambda seeds, positions: real(seeds, positions + 1))
    found, _ = written(together(tiny_transformer()), [None] * len(PROMPTS))
    assert found[0] == expected[0] and found[1:] != expected[1:]


@pytest.mark.usefixtures("pools_of_pytorch")
def test_texts_that_come_later_share_the_pass() -> None:
    alone, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    engine, texts = Engine(together(tiny_transformer()), prefill_chunk=4), []
    for number, (prompt, sampler) in enumerate(zip(PROMPTS, SAMPLERS, strict=True)):
        request = Request(prompt, sampler=sampler, seed=number, max_new_tokens=16 + number)
        texts.append(engine.submit(request))
        for _ in range(3):
            engine.step()
    engine.run(texts)
    assert [text.generated for text in texts] == alone
    joined = sum(step.sequences > 1 for text in texts for step in text.trace.steps)
    assert joined and steps_of(engine).waits > 3


@pytest.mark.usefixtures("pools_of_pytorch")
def test_caches_equal_a_fresh_prefill_after_every_step() -> None:
    model, other, compared = together(tiny_transformer()), tiny_transformer(), 0
    engine = Engine(model)
    texts = [engine.submit(Request(prompt, drafter=Garbage(nodes=5), max_new_tokens=12)) for prompt in PROMPTS]
    while not any(text.finished for text in texts):
        engine.step()
        for text in texts:
            if text.finished or not text.position:
                continue
            n, fresh = len(text.tokens) - 1, other.new_cache()
            other.forward(Batch([Segment.chunk(text.tokens[:n], fresh)]))
            fresh.keep(range(n))
            assert text.cache.length == text.cache.next_position == n and not text.cache.tentative
            assert (text.cache.positions[:, :n] == np.arange(n)).all()
            assert torch.allclose(text.cache.data[:, :, :, :n], fresh.data[:, :, :, :n], rtol=0, atol=1e-10)
            compared += 1
    assert compared > 10 and steps_of(engine).waits


@pytest.mark.usefixtures("pools_of_pytorch")
def test_a_text_whose_logits_are_no_numbers_ends_and_the_others_go_on() -> None:
    model = together(tiny_transformer())
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    real = BatchedSampling.choose

    def broken(self: Any, logits: torch.Tensor, owners: np.ndarray, *others: Any) -> torch.Tensor:
        logits[owners == 1] = torch.nan
        return real(self, logits, owners, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchedSampling, "choose", broken)
        engine = Engine(model)
        texts = [
            engine.submit(Request(prompt, sampler=sampler, seed=number, max_new_tokens=16 + number))
            for number, (prompt, sampler) in enumerate(zip(PROMPTS[:3], SAMPLERS, strict=False))
        ]
        while not texts[1].finished:
            engine.step()
    assert isinstance(texts[1].error, NumericalError)
    engine.run([texts[0], texts[2]])
    assert [texts[0].generated, texts[2].generated] == [expected[0], expected[2]]


def test_batched_processors_are_those_of_each_text() -> None:
    random = np.random.default_rng(0)
    samplers = [
        *SAMPLERS,
        Sampler.from_settings(temperature=0.5, top_k=3, top_p=0.9),
        Sampler.from_settings(temperature=1.7, top_k=50, top_p=0.7),
        Sampler.from_settings(temperature=0.0, top_k=4),
        Sampler.from_settings(temperature=0.8, min_p=0.1, order="default"),
    ]
    found = [batched_processors(sampler, 200) for sampler in samplers]
    texts = [each for each in found if each is not None]
    assert len(texts) == len(samplers)
    sampling = BatchedSampling(texts)
    for _ in range(20):
        owners = np.repeat(np.arange(len(samplers)), random.integers(1, 5, len(samplers)))
        logits = torch.from_numpy(random.normal(0, 3, (len(owners), 200))).float()
        # Equals at every border.
        logits = (logits * 4).round() / 4
        seeds, positions = random.integers(0, 2**63, len(owners)).astype(np.uint64), random.integers(0, 99, len(owners))
        logits[1, 7] = torch.nan
        roots, like = np.empty((2, 0), dtype=np.int64), Choice(False, (), ())
        picks = sampling.choose(logits, owners, noise.keys(seeds, positions), roots, like).tolist()
        assert picks[1] == -1
        for row, owner in enumerate(owners.tolist()):
            if row != 1:
                law = samplers[owner].law(logits[row : row + 1], [Context(0, [])])
                expected = samplers[owner].pick(law, int(seeds[row]), [int(positions[row])]).tolist()
                assert [picks[row]] == expected


def test_what_is_applied_text_by_text_is_left_to_the_texts() -> None:
    for settings in ({"repetition_penalty": 1.2}, {"typical": 0.9}, {"mirostat": 2}, {"logit_bias": {3: 1.0}}):
        assert batched_processors(Sampler.from_settings(temperature=0.8, **settings), 64) is None


def test_keys_are_those_of_one_text() -> None:
    random = np.random.default_rng(1)
    seeds, positions = random.integers(0, 2**64, 50, dtype=np.uint64), random.integers(-3, 1 << 40, 50)
    found = noise.keys(seeds, positions)
    words = [noise.mix(int(seed), noise.TOKEN, int(place)) for seed, place in zip(seeds, positions, strict=True)]
    assert found.view(np.uint64).tolist() == words
    logits = torch.randn(130, 300, generator=torch.Generator().manual_seed(0))
    seeds, positions = random.integers(0, 2**64, 130, dtype=np.uint64), random.integers(0, 99, 130)
    picks = noise.keyed_argmax(logits, torch.from_numpy(noise.keys(seeds, positions))).tolist()
    for row, pick in enumerate(picks):
        assert [pick] == noise.gumbel_argmax(logits[row : row + 1], int(seeds[row]), [int(positions[row])]).tolist()


@pytest.mark.usefixtures("pools_of_pytorch")
@pytest.mark.parametrize("dtype", [torch.float64, coded.DTYPE])
def test_rows_of_many_caches_move_as_in_each(dtype: torch.dtype) -> None:
    random = np.random.default_rng(6)
    for _ in range(12):
        caches, others, kept = [], [], []
        for _ in range(random.integers(1, 6)):
            length, n = int(random.integers(1, 40)), int(random.integers(1, 20))
            cache = KVCache(2, 3, 8, dtype=dtype)
            rows = torch.from_numpy(random.normal(size=(2, length + n, 3, 8)))
            cache.reserve(np.arange(length))
            for layer in range(2):
                cache.write(layer, *(layer + rows[:, :length]))
            cache.keep(range(length))
            other = cache.fork()
            chosen = np.unique(np.concatenate(([0], random.integers(0, n, 4))))
            positions = np.full(n, length)
            positions[chosen] = length + np.arange(len(chosen))
            for each in (cache, other):
                each.reserve(positions)
                for layer in range(2):
                    each.write(layer, *(layer + rows[:, length:]))
            other.keep(chosen.tolist())
            caches.append(cache)
            others.append(other)
            kept.append(chosen)
        keep_together(caches, np.array([len(each) for each in kept]), np.concatenate(kept))
        for cache, other in zip(caches, others, strict=True):
            n = other.length
            assert cache.length == n and not cache.tentative
            assert (cache.positions[:, :n] == other.positions[:, :n]).all()
            assert torch.equal(cache.data[:, :, :, :n], other.data[:, :, :, :n])


def waited(
    drafters: Sequence[Drafter | None], samplers: Sequence[Sampler] = SAMPLERS, *, static: bool = False
) -> tuple[list[list[int]], list[tuple[int, int]], ArrayBatch]:
    """Texts on a device that is none, and of each step in which all are written its waits and its copies to there."""
    with Watched() as watched, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FarTensor, "tolist", lambda far: [watched.waits.update(["tolist"]), far.near.tolist()][1])
        base = tiny_transformer()
        model = Transformer(base.config, moved(base.weights, "meta:0"))
        model.static = StaticPasses() if static else None
        engine = Engine(model)
        texts = [
            engine.submit(Request(prompt, sampler=sampler, seed=number, drafter=each, max_new_tokens=16 + number))
            for number, (prompt, sampler, each) in enumerate(zip(PROMPTS, samplers, drafters, strict=True))
        ]
        while any(not text.position for text in texts):
            engine.step()
        engine.step()
        counts = []
        while not any(text.finished for text in texts):
            before = watched.waits.total(), watched.uploads
            engine.step()
            counts.append((watched.waits.total() - before[0], watched.uploads - before[1]))
        engine.run(texts)
    return [text.generated for text in texts], counts, engine._arrays


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "suffix-tree", "garbage trees", "auto"])
def test_a_step_of_many_texts_waits_once(drafter: str) -> None:
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS))
    found, counts, arrays = waited([DRAFTERS.get(drafter) or AUTO] * len(PROMPTS) if drafter != "none" else [None] * 5)
    assert found == expected and isinstance(arrays._steps, DeviceSteps)
    assert len(counts) > 3 and all(waits == 1 for waits, _ in counts)
    # Tokens, positions, what attention goes by, and what choosing goes by; at times page tables and rows that move.
    assert 4 <= sorted(copies for _, copies in counts)[len(counts) // 2] <= 5


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "garbage trees"])
def test_a_step_at_a_fixed_shape_takes_one_copy_in_and_one_out(drafter: str) -> None:
    alike = [SAMPLERS[3]] * len(PROMPTS)
    expected, _ = written(tiny_transformer(), [None] * len(PROMPTS), samplers=alike)
    found, counts, arrays = waited([DRAFTERS[drafter]] * len(PROMPTS), alike, static=True)
    assert found == expected and isinstance(arrays._steps, DeviceSteps)
    assert len(counts) > 3 and all(waits == 1 for waits, _ in counts)
    # At times page tables and rows that move.
    assert min(copies for _, copies in counts) == 1 and max(copies for _, copies in counts) <= 5


@pytest.mark.usefixtures("pools_of_pytorch")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_recorded_steps_choose_the_tokens_of_one_by_one(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From embeddings to tokens and the nodes that they lead to, nothing is decided by what was recorded."""
    recorded = recording(monkeypatch)
    drafters = [DRAFTERS[drafter]] * len(PROMPTS)
    for sampler in SAMPLERS:
        alike = [sampler] * len(PROMPTS)
        expected, _ = written(tiny_transformer(), [None] * len(PROMPTS), samplers=alike, eos_ids=(0,))
        model = together(tiny_transformer())
        model.static = StaticPasses()
        found, engine = written(model, drafters, samplers=alike, eos_ids=(0,))
        assert found == expected and steps_of(engine).waits > 3
    assert any(shape.choice is not None for shape in recorded) and len(recorded) < 120


def tree_of(random: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    parents = np.array([-1, *(int(random.integers(max(0, node - 4), node)) for node in range(1, n))])
    return random.integers(0, 3, n), parents


def followed(picks: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> list[int]:
    """The nodes that choices lead to, one after another."""
    path = [0]
    while len(below := np.flatnonzero((parents == path[-1]) & (tokens == picks[path[-1]]))):
        path.append(int(below[0]))
    return path


def laid_out(random: np.random.Generator, sizes: Sequence[int]) -> tuple[DeviceSteps, Trees]:
    steps = DeviceSteps(together(tiny_transformer()), None)
    steps.hold(len(sizes))
    steps.widen(max(sizes))
    for text, size in enumerate(sizes):
        steps.draft(text, *tree_of(random, size))
    steps.count(sum(sizes) - len(sizes))
    steps.last[: len(sizes)] = steps.drafts[0, : len(sizes), 0]
    steps.next[: len(sizes)] = random.integers(3, 60, len(sizes))
    np.cumsum(sizes, out=steps.first[1 : len(sizes) + 1])
    return steps, Trees.of(steps, len(sizes))


@pytest.mark.usefixtures("pools_of_pytorch")
def test_walks_of_all_texts_are_those_of_each() -> None:
    """Of siblings with the same token the first one is followed, and a walk that ends too soon is found out."""
    random, short = np.random.default_rng(4), 0
    for _ in range(60):
        sizes = random.integers(1, 24, random.integers(1, 6)).tolist()
        steps, trees = laid_out(random, sizes)
        picks = random.integers(0, 3, steps.rows)
        expected = []
        for text, size in enumerate(sizes):
            rows = slice(steps.first[text], steps.first[text] + size)
            tokens, parents = steps.tokens[rows], steps.parents[rows]
            expected += [int(steps.first[text]) + node for node in followed(picks[rows], tokens, parents)]
            depths = [0]
            for node in range(1, size):
                depths.append(depths[parents[node]] + 1)
            assert steps.depths[rows].tolist() == depths
            assert (steps.positions[rows] == steps.next[text] + np.array(depths)).all()
            assert trees.chains[text] == (parents == np.arange(-1, size - 1)).all()
            for node in range(size):
                children = np.flatnonzero(parents == node)
                assert trees.children[steps.first[text] + node] == len(children)
                assert trees.ranks[steps.first[text] + children].tolist() == list(range(len(children)))
        if trees.doublings < 0:
            continue
        nodes = torch.from_numpy(trees.nodes)
        reached = walk(torch.from_numpy(picks), *nodes, trees.doublings)
        assert np.flatnonzero(reached.numpy()).tolist() == expected
        short += not torch.equal(walk(torch.from_numpy(picks), *nodes, 0), reached)
    assert short > 5


def test_pages_are_taken_and_copied_without_a_wait() -> None:
    with Watched() as watched:
        cache = KVCache(2, 1, 8, device="meta:0")
        cache.reserve(np.arange(20))
        cache.wrote(range(2))
        cache.keep(range(20))
        before = watched.uploads
        cache.fork().reserve(np.arange(20, 21))
    # Of new pages, of the pages that are copied, and of where to.
    assert watched.uploads - before == 3 and not watched.waits.total()


def test_texts_that_choose_one_by_one_wait_each() -> None:
    """The count can fail."""
    drafters, samplers = [None] * len(PROMPTS), [Sampler.from_settings(repetition_penalty=1.2)] * len(PROMPTS)
    expected, _ = written(tiny_transformer(), drafters, samplers)
    found, counts, _ = waited(drafters, samplers)
    assert len(counts) > 3 and found == expected and all(waits >= len(PROMPTS) for waits, _ in counts)


def test_a_model_on_the_processor_keeps_its_own_steps() -> None:
    assert not DeviceSteps.serves(tiny_transformer())


@pytest.mark.usefixtures("pools_of_pytorch")
@pytest.mark.parametrize("window", [None, 24, 6, -8])
def test_what_attention_goes_by_is_that_of_each_text(window: int | None) -> None:
    """Trees in arrays see what their masks say; trees that a window ends in are known."""
    random, cut, windows = np.random.default_rng(8), 0, [None, window]
    for _ in range(120):
        sizes = random.integers(1, 40, random.integers(1, 6)).tolist()
        steps, trees = laid_out(random, sizes)
        segments = []
        for text, size in enumerate(sizes):
            rows, length = slice(steps.first[text], steps.first[text] + size), int(steps.next[text])
            cache = KVCache(1, 1, 8)
            cache.reserve(np.arange(length))
            cache.wrote([0])
            cache.keep(range(length))
            cache.reserve(steps.positions[rows])
            mask = None if trees.chains[text] else _ancestors(steps.parents[rows])
            segments.append(Segment(steps.positions[rows], steps.tokens[rows], mask=mask, cache=cache))
        expected, held = SegmentRows.of(segments), steps.next[: len(sizes)]
        none = np.zeros(len(sizes), dtype=np.int64)
        found = DraftRows(
            np.array(sizes), held, none, none, steps.positions[: steps.rows], trees.above, trees.doublings
        )
        layout = Layout(steps.rows + 3, 2, 2, steps.rows + 3, 4)
        first, second = (np.empty(layout.size, dtype=np.int32) for _ in range(2))
        places = random.permutation(len(sizes))
        expected_fits = True
        if window is not None:
            visible = [near(each.positions, each.positions, window) for each in segments]
            seen = [each.seen() for each in segments]
            expected_fits = all((own & near_by == own).all() for own, near_by in zip(seen, visible, strict=True))
        # A tree that fits is never cut; one that is not cut may be left to its text.
        assert expected_fits or not found.fit(windows)
        cut += not found.fit(windows)
        if found.fit(windows):
            layout.fill(first, expected, places, windows)
            layout.fill(second, found, places, windows)
            assert np.array_equal(first, second)
    assert cut < 120 and bool(cut) == (window is not None and abs(window) < 20)


@pytest.mark.usefixtures("pools_of_pytorch")
def test_a_step_calls_little_for_each_text() -> None:
    """What a step goes by is written for all texts at once."""
    calls = {}
    for texts in (4, 24):
        model = together(tiny_transformer())
        model.static = StaticPasses()
        engine = Engine(model)
        asked = [
            engine.submit(Request([1, 2, 3], seed=seed, drafter=Garbage(nodes=2), max_new_tokens=30))
            for seed in range(texts)
        ]
        while any(not text.position for text in asked):
            engine.step()
        engine.step()
        steps = steps_of(engine)

        assert engine._arrays.rows > texts and model.static.shapes
        calls[texts] = counted_calls(steps.run)
    # There were 114 while each text was gone through by itself.
    assert (calls[24] - calls[4]) / 20 < 20
