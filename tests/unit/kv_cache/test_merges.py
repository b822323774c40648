"""What kernels merge of evicted tokens is what `D2O.folded` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.native.kernels import choose, kernel_sets
from decodery.kv_cache.d2o import D2O, Folded, Merging
from decodery.kv_cache.merges import Merges
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.pages import PageTable
from decodery.models.torch.transformer import Transformer
from decodery.testing import tiny_transformer, to_int8
from in_16_bits import in_16_bits
from largest import Largest

RAW = tiny_transformer(0, num_layers=4, max_positions=512, dtype=torch.float32)
TOKENS = np.random.default_rng(11).integers(0, 64, 400)
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
PROMPT = 150
METHODS = [
    D2O(0.4, dense=0, sinks=2), D2O(0.3, merge="mean", dense=0, beta=0.4), D2O(40, threshold=False, dense=0),
    D2O(0.35, dense=1, recent=0.2, beta=1.0),
]  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.int8]


def begun(
    method: D2O, dtype: torch.dtype = torch.float32, model: Transformer | None = None
) -> tuple[Transformer, KVCache, Merging]:
    """A text whose prompt is read."""
    model = to_int8(RAW) if model is None else model
    if dtype != torch.float32:
        model.narrow_caches(dtype)
    cache = model.new_cache()
    cache.policy = state = method.state(model, PROMPT)
    assert isinstance(state, Merging)
    while cache.next_position < PROMPT:
        read(model, cache, TOKENS[cache.next_position : cache.next_position + 50])
    return model, cache, state


def read(model: Transformer, cache: KVCache, tokens: np.ndarray) -> torch.Tensor:
    logits = model.forward(Batch([Segment.chunk(tokens, cache)])).logits
    cache.keep(range(len(tokens)))
    return logits


def check_steps(method: D2O, dtype: torch.dtype, steps: int = 60) -> int:
    """Read one row at a time and fold in Python what each of them leaves out; how many rows left out something."""
    model, cache, state = begun(method, dtype)
    found = 0
    for at in range(PROMPT, PROMPT + steps):
        model.forward(Batch([Segment.chunk(TOKENS[at : at + 1], cache)]))
        assert state._worths is not None and state._worths.added is not None
        added, before, wanted = state._worths.added[0].copy(), dict(state._held), {}
        for place, (layer, held) in enumerate(before.items()):
            assert isinstance(held, Folded)
            keys, values = (part.float() for part in cache.view(layer))
            chosen = added[place, :, : keys.shape[1]] >= 0
            if chosen.all():
                wanted[layer] = keys, values, held.tau
                continue
            found += 1
            keys, values, tau = method.folded(keys, values, chosen, held.tau)
            wanted[layer] = cache.rounded(keys), cache.rounded(values), tau
        cache.keep([0])
        for layer, (keys, values, tau) in wanted.items():
            ours, held = [part.float() for part in cache.view(layer)], state._held[layer]
            assert isinstance(held, Folded)
            assert ours[0].equal(keys) and ours[1].equal(values)
            assert (held.tau is None) == (tau is None)
            assert tau is None or np.allclose(held.tau, tau, rtol=1e-13, atol=1e-13)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_merge_as_python_does(method: D2O, dtype: torch.dtype) -> None:
    assert check_steps(method, dtype) > 60


class Otherwise(Merging):
    """Kernels follow another rule."""

    wrong: dict[str, Any]

    def _merges(self) -> Merges:
        return replace(super()._merges(), **self.wrong)


@pytest.mark.parametrize(
    "wrong", [{"beta": 0.2}, {"threshold": False}, {"weighted": False}, {"known": np.full((4, 2), -1.0)}], ids=str
)
def test_another_rule_would_show(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Otherwise, "wrong", wrong, raising=False)
    monkeypatch.setattr(D2O, "state", lambda self, model, prompt: Otherwise(self, model.config, prompt, by_kernel=True))
    with pytest.raises(AssertionError):
        check_steps(METHODS[0], torch.float32)


def written(method: D2O, dtype: torch.dtype, *, python: bool = False) -> tuple[torch.Tensor, KVCache]:
    """Logits of rows after a prompt: one by one, a tree and chunks."""
    model, cache, state = begun(method, dtype, in_16_bits(RAW))
    if python:
        state.__class__ = type("InPython", (Merging,), {"by_kernel": lambda self, segment: None})
    found = [read(model, cache, TOKENS[at : at + 1]) for at in range(PROMPT, PROMPT + 20)]
    at = cache.next_position + TREE.sum(axis=1) - 1
    found.append(model.forward(Batch([Segment(at, TOKENS[at], mask=TREE, cache=cache)])).logits)
    cache.keep([0, 2])
    found += [read(model, cache, TOKENS[at : at + 10]) for at in range(cache.next_position, PROMPT + 50, 10)]
    return torch.cat(found), cache


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_text_is_that_of_python(method: D2O) -> None:
    (ours, cache), (theirs, other) = written(method, torch.float32), written(method, torch.float32, python=True)
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=0)
    assert cache.lengths.tolist() == other.lengths.tolist()
    for layer in range(4):
        assert (cache.positions[layer][: cache.lengths[layer]] == other.positions[layer][: cache.lengths[layer]]).all()
        for one, two in zip(cache.view(layer), other.view(layer), strict=True):
            assert torch.allclose(one, two, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_rejected_leave_nothing(dtype: torch.dtype) -> None:
    """Merges are in the pages while later rows of a pass are read: neither a fork nor the text itself keeps them."""
    model, cache, _ = begun(METHODS[0], dtype)
    clone, alone = cache.fork(), cache.fork()
    whole = [cache.stored(layer) for layer in range(4)]
    at = cache.next_position + TREE.sum(axis=1) - 1
    first = model.forward(Batch([Segment(at, TOKENS[at], mask=TREE, cache=cache)])).logits
    more = Segment(at[-1:] + 1, TOKENS[:1], mask=np.ones((1, 5), dtype=bool) & [1, 0, 1, 1, 1], cache=cache, retained=4)
    second = model.forward(Batch([more])).logits
    cache.keep([])
    for layer, known in enumerate(whole):
        assert cache.stored(layer).equal(known) and clone.stored(layer).equal(known)
    path = [read(model, alone, np.array([token])) for token in (*TOKENS[at[[0, 2, 3]]], TOKENS[0])]
    assert torch.cat(path).equal(torch.cat((first[[0, 2, 3]], second)))


def test_pages_are_looked_through_where_others_hold_some(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, _ = begun(METHODS[0])
    right, whole = PageTable._wanting, 0

    def wanting(self: PageTable, span: np.ndarray, begin: int, *about: Any) -> Any:
        nonlocal whole
        whole += begin == 0
        return right(self, span, begin, *about)

    monkeypatch.setattr(PageTable, "_wanting", wanting)
    at = cache.next_position + TREE.sum(axis=1) - 1
    for shared in (0, 1):
        clones = [cache.fork() for _ in range(shared)]
        model.forward(Batch([Segment(at, TOKENS[at], mask=TREE, cache=cache)]))
        cache.keep([])
        assert whole == shared == len(clones)


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]], ids=str)
def test_a_path_that_ends_in_an_earlier_pass_of_a_tree_is_that_of_steps(method: D2O) -> None:
    """Layers that keep everything are longer than all that evict: nothing of them is lost."""
    model, cache, _ = begun(method)
    alone = cache.fork()
    at = cache.next_position + TREE.sum(axis=1) - 1
    model.forward(Batch([Segment(at, TOKENS[at], mask=TREE, cache=cache)]))
    more = Segment(at[-1:] + 1, TOKENS[:1], mask=np.ones((1, 5), dtype=bool) & [1, 0, 1, 1, 1], cache=cache, retained=4)
    model.forward(Batch([more]))
    cache.keep([0, 2])
    for token in TOKENS[at[[0, 2]]]:
        read(model, alone, np.array([token]))
    assert cache.lengths.tolist() == alone.lengths.tolist()
    for layer in range(4):
        assert cache.stored(layer).equal(alone.stored(layer))


def test_all_kernel_sets_merge_the_same_bits() -> None:
    found = []
    try:
        for name in kernel_sets():
            choose(name)
            found.append(written(METHODS[0], torch.float16)[0])
    finally:
        choose(kernel_sets()[0])
    assert all(each.equal(found[0]) for each in found)


def test_similarities_of_a_long_prompt_are_never_all_there() -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 6000, 4, generator=draw)
    chosen = np.arange(6000)[None] % 3 == 0
    with Largest() as largest:
        kept, _, _ = D2O().folded(keys, values, chosen, None)
    assert largest.numbers <= 1 << 20
    unit = torch.nn.functional.normalize(keys[0].double(), dim=-1)
    near, target = (unit[~chosen[0]] @ unit[chosen[0]].T).max(dim=1)
    alone = torch.ones(2000, dtype=torch.bool)
    alone[target[near >= near.mean()]] = False
    assert kept[0, alone].equal(keys[0, chosen[0]][alone]) and not kept[0, ~alone].equal(keys[0, chosen[0]][~alone])


def test_layers_that_keep_all_tokens_are_read_without_the_policy() -> None:
    _, cache, state = begun(D2O(0.4, dense=1))
    assert sorted(state._held) == [1, 2] and cache.lengths.tolist()[::3] == [PROMPT, PROMPT]
    whole: AttentionPolicy = begun(D2O(1.0))[2]
    assert not whole.wanted(Segment.chunk(TOKENS[:1], cache))
