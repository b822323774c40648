"""Policies of attention: the same hook on every backend, and heads that have lost slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from decodery.core.errors import UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.torch.attention import visible
from decodery.models.torch.transformer import Transformer
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import LawBroken, Oracle, check_cache, check_identical, check_state, decode
from open_models import BACKENDS, LAYERS, make, same
from tiny_models import make_model

TOKENS = np.random.default_rng(3).integers(0, 64, 80)
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)


@pytest.fixture(params=[(backend, gemma) for backend in BACKENDS for gemma in (False, True)], ids=str)
def model(request: pytest.FixtureRequest) -> Transformer:
    backend, gemma = request.param
    return make(backend, gemma=gemma)


class All(AttentionPolicy):
    """Reads everything."""


@dataclass
class Window(AttentionPolicy):
    """The first slots and the last positions."""

    sinks: int
    recent: int

    def select(self, attention: Attention) -> np.ndarray:
        cache, segment = attention.segment.cache, attention.segment
        assert cache is not None
        positions = cache.positions[attention.layer, : attention.seen.shape[-1]]
        near = segment.positions[:, None] - positions[None, :] < self.recent
        return near | (positions < self.sinks)[None, :]


@dataclass
class Best(AttentionPolicy):
    """The slots whose keys a head's queries like best, of those that are content."""

    count: int

    def select(self, attention: Attention) -> np.ndarray:
        keys, (n, heads, dim) = attention.keys.float(), attention.queries.shape
        grouped = attention.queries.float().reshape(n, len(keys), heads // len(keys), dim)
        scores = torch.einsum("nkgd,ksd->kns", grouped, keys).masked_fill(~torch.from_numpy(attention.seen), -torch.inf)
        best = scores.topk(min(self.count, scores.shape[-1]), dim=-1).indices
        return torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best, True).numpy()


@dataclass
class Watching(AttentionPolicy):
    """Writes down what it is shown and told."""

    seen: list[Attention] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    observes = True

    def observe(self, attention: Attention) -> None:
        self.seen.append(replace(attention, keys=attention.keys.clone(), values=attention.values.clone()))

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        self.told.append(list(rows))

    def cut(self, cache: KVCache) -> None:
        self.told.append(cache.lengths.tolist())

    def fork(self) -> Watching:
        return Watching(list(self.seen), [*self.told, "fork"])


def prefilled(model: Transformer, n: int, policy: AttentionPolicy | None = None) -> KVCache:
    cache = model.new_cache()
    cache.policy = policy
    model.forward(Batch([Segment.chunk(TOKENS[:n], cache)]))
    cache.keep(range(n))
    return cache


def tree(cache: KVCache) -> Segment:
    return Segment(cache.next_position + TREE.sum(axis=1) - 1, TOKENS[40:44], mask=TREE, cache=cache)


def test_reading_everything_is_attention_itself(model: Transformer) -> None:
    logits = []
    for policy in (None, All(), Watching()):
        cache = prefilled(model, 20, policy)
        both = Batch([tree(cache), Segment(np.arange(5), TOKENS[:5])])
        logits.append(model.forward(both).logits)
        cache.keep([0, 2])
        logits.append(model.forward(Batch([Segment.chunk(TOKENS[50:53], cache)])).logits)
    for other in (logits[2:4], logits[4:6]):
        assert all(map(same, logits[:2], other))


def test_a_policy_is_shown_what_was_read(model: Transformer) -> None:
    policy = Watching()
    cache = prefilled(model, 20, policy)
    policy.seen.clear()
    model.forward(Batch([Segment(np.arange(5), TOKENS[:5]), tree(cache)]))
    assert [attention.layer for attention in policy.seen] == list(range(LAYERS))
    for attention in policy.seen:
        assert attention.weights is not None and attention.mass is not None and attention.context is not None
        n, heads, dim = attention.queries.shape
        group = heads // len(attention.keys)
        window = model.config.window(attention.layer)
        read = torch.from_numpy(visible(attention.segment, attention.layer, window))
        keys = attention.keys.repeat_interleave(group, dim=0)
        scores = torch.einsum("nhd,hsd->hns", attention.queries, keys).masked_fill(~read, -torch.inf)
        assert torch.allclose(attention.weights, scores.softmax(dim=-1), atol=1e-5)
        assert torch.allclose(attention.mass, scores.logsumexp(dim=-1).T, atol=1e-4)
        values = attention.values.repeat_interleave(group, dim=0)
        context = torch.einsum("hns,hsd->nhd", attention.weights, values)
        assert torch.allclose(attention.context, context, atol=1e-5) and context.shape == (n, heads, dim)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_as_a_policy_is_the_windows_of_a_model(backend: str) -> None:
    gemma, wide = make(backend, gemma=True), make(backend, gemma=True)
    everywhere = replace(wide.config, sliding_window=7, sliding_layers=(True,) * LAYERS, local_rope=None)
    nowhere = replace(wide.config, sliding_window=None, sliding_layers=(False,) * LAYERS, local_rope=None)
    by_model, by_policy = Transformer(everywhere, gemma.weights), Transformer(nowhere, gemma.weights)
    found = []
    for model, policy in ((by_model, None), (by_policy, Window(0, 7)), (by_policy, None)):
        cache = prefilled(model, 25, policy)
        found.append(model.forward(Batch([tree(cache)])).logits)
    assert same(found[0], found[1]) and not same(found[0], found[2])


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("policy", [Window(2, 4), Best(5)], ids=str)
def test_kernels_read_what_torch_reads(policy: AttentionPolicy, gemma: bool) -> None:
    found = []
    for backend in ("native", "portable"):
        model = make(backend, gemma=gemma)
        cache = prefilled(model, 25, policy)
        cache.evict(1, [3, 4, 9], heads=[1])
        logits = model.forward(Batch([Segment(np.arange(5), TOKENS[:5]), tree(cache)])).logits
        cache.keep([0, 1])
        found.append((logits, model.forward(Batch([Segment.chunk(TOKENS[50:53], cache)])).logits))
    assert all(map(torch.equal, *found))


def test_what_lies_elsewhere_can_be_merged(model: Transformer) -> None:
    """Half of the content is hidden from attention, read apart, and joined by the sums of exponentials."""

    class Halves(AttentionPolicy):
        merges = True

        def select(self, attention: Attention) -> np.ndarray:
            late = np.arange(attention.seen.shape[-1]) >= 10
            return np.broadcast_to(late, attention.seen.shape)

        def merge(self, attention: Attention) -> torch.Tensor:
            assert attention.mass is not None and attention.context is not None
            group = attention.queries.shape[1] // len(attention.keys)
            keys, values = (part[:, :10].repeat_interleave(group, 0) for part in (attention.keys, attention.values))
            seen = torch.from_numpy(attention.seen[..., :10]).expand(len(attention.queries), 10)
            scores = torch.einsum("nhd,hsd->nhs", attention.queries, keys)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            mass = scores.logsumexp(dim=-1)
            early = torch.einsum("nhs,hsd->nhd", scores.softmax(dim=-1).nan_to_num(), values)
            share = torch.sigmoid(attention.mass - mass)[..., None]
            return share * attention.context + (1 - share) * early

    logits = []
    for policy in (None, Halves()):
        cache = prefilled(model, 25)
        cache.policy = policy
        logits.append(model.forward(Batch([tree(cache)])).logits)
    tolerance = 1e-10 if model.dtype == torch.float64 else 0.1  # int8 activations may round to a neighbour
    assert torch.allclose(*logits, atol=tolerance, rtol=0)
    missing = prefilled(model, 25, None)
    missing.policy = type("Late", (AttentionPolicy,), {"select": Halves.select})()
    assert not torch.allclose(model.forward(Batch([tree(missing)])).logits, logits[0], atol=0.2, rtol=0)


def test_a_policy_hears_of_all_that_happens_to_a_cache() -> None:
    model, policy = make("float64"), Watching()
    cache = prefilled(model, 12, policy)
    mark = cache.snapshot()
    model.forward(Batch([tree(cache)]))
    cache.keep([0, 2])
    clone = cache.fork()
    cache.restore(mark)
    cache.truncate(5)
    assert policy.told == [list(range(12)), [0, 2], [12] * LAYERS, [5] * LAYERS]
    assert isinstance(clone.policy, Watching) and clone.policy.told == [list(range(12)), [0, 2], "fork"]


def test_a_head_that_lost_slots_reads_the_others(model: Transformer) -> None:
    """The same as a policy that hides them from that head."""

    class Hiding(AttentionPolicy):
        def select(self, attention: Attention) -> np.ndarray:
            shown = np.ones((len(attention.keys), *attention.seen.shape), dtype=bool)
            if attention.layer == 2:
                shown[1, :, [2, 17, 19]] = False
            return shown

    by_policy, lost = prefilled(model, 20), prefilled(model, 20)
    by_policy.policy = Hiding()
    lost.evict(2, [2, 17, 19], heads=[1])
    assert lost.head_lengths.tolist() == [[20, 20], [20, 20], [20, 17], [20, 20]] and lost.evicted and lost.losses
    expected, found = (model.forward(Batch([tree(cache)])).logits for cache in (by_policy, lost))
    assert same(expected, found) and not same(found, model.forward(Batch([tree(prefilled(model, 20))])).logits)
    fork = lost.fork()
    for cache in (lost, fork, by_policy):
        model.forward(Batch([tree(cache)]))
        cache.keep([0, 2, 3])
    follow = [model.forward(Batch([Segment.chunk(TOKENS[50:53], each)])).logits for each in (by_policy, lost, fork)]
    assert same(follow[0], follow[1]) and same(follow[0], follow[2])


def test_slots_that_all_heads_lost_are_gone(model: Transformer) -> None:
    one, other = prefilled(model, 20), prefilled(model, 20)
    one.evict(1, [4, 5, 6, 12])
    other.evict(1, [4, 5, 12], heads=[0])
    other.evict(1, [4, 6, 12, 13], heads=[1])
    assert other.lengths.tolist() == [20, 18, 20, 20]
    assert other.head_lengths[1].tolist() == [17, 16]
    lost = other.losses.of(1, 18)
    assert lost is not None
    # Slots 5, 6 and 13 moved by one and by two.
    assert [np.flatnonzero(head).tolist() for head in lost] == [[4], [5, 11]]
    other.evict(1, [5, 11], heads=[0])
    other.evict(1, [4], heads=[1])
    one.evict(1, [9])
    assert other.head_lengths.tolist() == one.head_lengths.tolist() == [[20, 20], [15, 15], [20, 20], [20, 20]]
    found = [model.forward(Batch([tree(cache)])).logits for cache in (one, other)]
    assert same(*found)


def test_slots_may_go_that_came_after_a_head_lost_others(model: Transformer) -> None:
    cache, other = prefilled(model, 10), prefilled(model, 10)
    for each in (cache, other):
        each.evict(0, [3], heads=[1])
        model.forward(Batch([Segment.chunk(TOKENS[10:60], each)]))
        each.keep(range(50))
        each.evict(0, [50, 55])
    other.evict(0, [3], heads=[1])
    assert cache.head_lengths[0].tolist() == [58, 57]
    assert same(*(model.forward(Batch([tree(each)])).logits for each in (cache, other)))


def test_new_content_is_held_by_every_head(model: Transformer) -> None:
    cache = prefilled(model, 20)
    mark = cache.snapshot()
    cache.evict(0, [15, 16], heads=[0])
    with pytest.raises(ValueError, match="has been cut or evicted since"):
        cache.restore(mark)
    cache.truncate(12)
    model.forward(Batch([Segment.chunk(TOKENS[12:20], cache)]))
    cache.keep(range(8))
    assert cache.head_lengths.tolist() == [[20, 20]] * LAYERS
    assert same(model.forward(Batch([tree(cache)])).logits, model.forward(Batch([tree(prefilled(model, 20))])).logits)


def with_policy(model: Transformer, policy: AttentionPolicy) -> Transformer:
    """The same model, whose caches begin with this policy."""
    plain = model.new_cache

    def new_cache() -> KVCache:
        cache = plain()
        cache.policy = policy
        return cache

    model.new_cache = new_cache  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_laws_of_caches_and_of_speculation_hold_under_a_policy(backend: str) -> None:
    model = with_policy(make(backend), Window(2, 6))
    check_cache(model, programs=2, steps=8, tolerance=1e-9)
    prompt = TOKENS[:9].tolist()
    drafter = Oracle(tuple(decode(model, [prompt], max_new_tokens=16)[0].tokens))
    check_identical(model, [prompt], drafter=drafter, max_new_tokens=16)
    check_state(model, [prompt], drafter=drafter, max_new_tokens=16)


def test_the_law_of_caches_catches_a_policy_that_counts_what_was_not_kept() -> None:
    class Counting(AttentionPolicy):
        def __init__(self) -> None:
            self.asked = 0

        def select(self, attention: Attention) -> np.ndarray:
            self.asked += len(attention.queries)
            shown = np.ones(attention.seen.shape, dtype=bool)
            shown[:, self.asked % 7 : self.asked % 7 + 2] = False
            return shown

    with pytest.raises(LawBroken):
        check_cache(with_policy(make("float64"), Counting()), programs=2)


@pytest.mark.usefixtures("pools_of_pytorch")
def test_backends_that_cannot_ask_say_so() -> None:
    theirs = TransformersModel(make_model("llama"))
    cache = theirs.new_cache()
    cache.policy = All()
    with pytest.raises(UnsupportedModel, match="cannot ask a policy"):
        theirs.forward(Batch([Segment.chunk(TOKENS[:4], cache)]))
    # Passes of a fixed shape leave such caches to the others.
    model = make("float64")
    with torch.no_grad():
        expected = model.forward(Batch([tree(prefilled(model, 20, Window(2, 4)))])).logits
        model.static = StaticPasses()
        cache = prefilled(model, 20)
        assert model.static.shapes, "a cache without a policy runs at a fixed shape"
        assert not same(model.forward(Batch([tree(cache)])).logits, expected)
        assert same(model.forward(Batch([tree(prefilled(model, 20, Window(2, 4)))])).logits, expected)
