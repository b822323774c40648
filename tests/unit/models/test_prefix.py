"""A learned past: what a text sees of it, that it stays whatever is cut, and that it touches no other text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from decodery.core.errors import CorruptFile, ModelNotFound
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.attention import rotate
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.prefix import KVPrefix, Prefixed, Prefixes
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import tiny_transformer
from decodery.testing.models import to_int8
from open_models import without_kernels
from tiny_models import make_model, save

TOKENS = [5, 9, 2, 44, 17, 30, 8, 7, 6, 50, 3]


def random_prefix(model: LanguageModel, n: int = 3, seed: int = 0) -> KVPrefix:
    zeros = KVPrefix.zeros(model.config, n).data
    return KVPrefix(torch.randn(zeros.shape, generator=torch.Generator().manual_seed(seed)))


def logits(model: LanguageModel, sizes: list[int], cache: KVCache | None = None) -> torch.Tensor:
    """[tokens, vocab] after every one of `TOKENS`, read in chunks of these sizes."""
    cache, rows = cache or model.new_cache(), []
    for size in sizes:
        chunk = TOKENS[cache.next_position : cache.next_position + size]
        rows.append(model.forward(Batch([Segment.chunk(chunk, cache)])).logits)
        cache.keep(range(size))
    return torch.cat(rows)


def behind_past(theirs: torch.nn.Module, ours: Transformer, prefix: KVPrefix) -> torch.Tensor:
    """The same by transformers, where the text begins at position n after keys that stand at 0 to n - 1."""
    past, n = DynamicCache(), prefix.data.shape[3]
    for layer, (keys, values) in enumerate(prefix.data):
        cos, sin = ours.angles(ours.config.layer_rope(layer), np.full(keys.shape[1], n))
        turned = rotate(keys.transpose(0, 1), cos[:, None], sin[:, None]).transpose(0, 1)
        past.update(turned[None], values[None], layer)
    with torch.no_grad():
        return theirs(torch.tensor([TOKENS]), past_key_values=past).logits[0]


@pytest.mark.parametrize("case", ["llama", "qwen3, tied", "mistral, every layer slides"])
def test_a_text_attends_to_the_prefix_as_to_a_past(case: str, tmp_path: Path) -> None:
    theirs = make_model(case)
    ours = load(str(save(theirs, tmp_path / "model")), dtype="float32").model
    assert isinstance(ours, Transformer)
    prefix = random_prefix(ours)
    expected = behind_past(theirs, ours, prefix)
    for model in (ours, TransformersModel(theirs)):
        for sizes in ([11], [4, 1, 1, 5]):
            got = logits(Prefixed(model, prefix), sizes)
            assert (got - expected).abs().max() < 1e-4
        assert (logits(model, [11]) - expected).abs().max() > 0.1


def test_integer_kernels_see_it_bit_by_bit_in_chunks_trees_and_both_stacks() -> None:
    model = to_int8(tiny_transformer(0))
    prefixed = Prefixed(model, random_prefix(model))
    whole = logits(prefixed, [11])
    assert torch.equal(logits(prefixed, [3, 1, 1, 6]), whole)
    portable = without_kernels(tiny_transformer(0))
    assert torch.equal(logits(Prefixed(portable, random_prefix(model)), [4, 7]), whole)
    cache = prefixed.new_cache()
    logits(prefixed, [4], cache)
    # Two branches after four tokens: another token, and the text itself.
    mask = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=bool)
    tree = Segment(np.array([4, 4, 5]), np.array([60, *TOKENS[4:6]]), mask=mask, cache=cache)
    assert torch.equal(model.forward(Batch([tree])).logits[1:], whole[4:6])
    cache.keep([1, 2])
    assert torch.equal(logits(prefixed, [5], cache), whole[6:])


def test_it_stays_whatever_becomes_of_the_text() -> None:
    model = tiny_transformer(0)
    prefixed = Prefixed(model, random_prefix(model))
    cache = prefixed.new_cache()
    whole = logits(prefixed, [11], cache)
    assert (cache.length, cache.next_position, cache.evicted) == (14, 11, False)
    assert cache.positions[0, :14].tolist() == list(range(-3, 11))
    clone = cache.fork()
    clone.truncate(0)
    assert (clone.length, clone.next_position, clone.prefix, clone.evicted) == (3, 0, 3, False)
    assert (logits(prefixed, [11], clone) - whole).abs().max() < 1e-12
    clone.evict(0, [5])
    assert clone.evicted
    exact = prefixed.new_cache()
    exact.provide(11)
    logits(prefixed, [11], exact)
    assert exact.capacity == 16
    with pytest.raises(ValueError, match="holds nothing"):
        cache.prepend(prefixed.prefix.data)


def test_texts_with_different_prefixes_and_without_share_passes() -> None:
    model = to_int8(tiny_transformer(0))
    scorers = [model, *(Prefixed(model, random_prefix(model, n, seed=n)) for n in (2, 5)), model]
    assert len(set(scorers)) == 1 and scorers[1] != Prefixed(tiny_transformer(0), scorers[1].prefix)
    alone = [logits(scorer, [6, 5]) for scorer in scorers]
    caches = [scorer.new_cache() for scorer in scorers]
    for first, last in ((0, 6), (6, 11)):
        scores = model.forward(Batch([Segment.chunk(TOKENS[first:last], cache) for cache in caches]))
        for number, (cache, expected) in enumerate(zip(caches, alone, strict=True)):
            cache.keep(range(last - first))
            assert torch.equal(scores.of(number), expected[first:last])
    assert len({tuple(each[-1].tolist()) for each in alone}) == 3


def test_a_prefix_of_zeros_still_draws_attention() -> None:
    model = tiny_transformer(0)
    moved = logits(Prefixed(model, KVPrefix.zeros(model.config, 2)), [11]) - logits(model, [11])
    assert moved.abs().max() > 0.1


def test_what_was_kept_is_read_and_nothing_else(tmp_path: Path) -> None:
    model, path = tiny_transformer(0), tmp_path / "p.safetensors"
    kept = Prefixes({"even": random_prefix(model), "odd": random_prefix(model, seed=1)}, {"made": "by hand"})
    kept.save(path)
    found = Prefixes.load(path)
    assert found.facts == kept.facts and list(found.by_name) == ["even", "odd"]
    assert all(torch.equal(found.by_name[name].data, kept.by_name[name].data) for name in ("even", "odd"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptFile, match=r"holds no set of learned prefixes.*train some"):
        Prefixes.load(path)
    with pytest.raises(ModelNotFound, match="no set of learned prefixes at"):
        Prefixes.load(tmp_path / "none")
    Prefixes({"flat": KVPrefix(torch.zeros(3))}).save(path)
    with pytest.raises(CorruptFile, match="holds no set of learned prefixes, or is damaged"):
        Prefixes.load(path)
    assert not random_prefix(tiny_transformer(0, num_layers=1)).fits(model.config)


def test_requests_without_a_source_are_scored_beside_prefixed_ones() -> None:
    """The engine runs one pass for all that score alike, and a text without a prefix is what it is alone."""
    model = to_int8(tiny_transformer(0))
    engine = Engine(model)
    alone = engine.submit(Request(TOKENS, max_new_tokens=12))
    engine.run([alone])
    steered = engine.submit(Request(TOKENS, max_new_tokens=12))
    steered.rebind(model=Prefixed(model, random_prefix(model)))
    steered.cache = steered.request.model.new_cache()
    plain = engine.submit(Request(TOKENS, max_new_tokens=12))
    calls = []
    original, model.forward = (
        model.forward,
        lambda batch, **rest: (calls.append(len(batch.segments)), original(batch, **rest))[1],
    )
    engine.run([steered, plain])
    assert set(calls) == {2} and plain.generated == alone.generated != steered.generated
