"""Query-only test-time training: what is trained, what stays, and what it writes."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.trained.queries import Span, queries_of, with_queries
from decodery.search import QueryTTT
from decodery.testing import check_search, decode, tiny_transformer, to_int8

MODEL = tiny_transformer(3)
PROMPT = [int(n) for n in torch.randint(0, MODEL.vocab_size, (60,), generator=torch.Generator().manual_seed(1))]
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "eos_ids": (0,)}


def _run(search: QueryTTT, model: Any = MODEL, **settings: Any) -> Any:
    return search.run(Engine(model, prefill_chunk=16), Request(PROMPT, **SETTINGS | settings))[0]


def _weights(model: Any) -> list[torch.Tensor]:
    layers = [
        tensor
        for layer in model.weights.layers
        for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        for tensor in part.tensors().values()
    ]
    return [model.weights.embedding, model.weights.norm, *layers]


def _read() -> Any:
    cache = MODEL.new_cache()
    logits = MODEL.forward(Batch([Segment.chunk(PROMPT[:-1], cache)])).logits
    cache.keep(range(len(PROMPT) - 1))
    return cache, logits


@pytest.mark.parametrize("recompute", [False, True])
def test_before_any_step_the_loss_is_that_of_a_full_pass_and_only_queries_have_gradients(recompute: bool) -> None:
    cache, logits = _read()
    for start, length in ((0, 20), (13, 30), (30, 29)):
        queries = queries_of(MODEL)
        loss = Span(MODEL, cache, start, length, recompute).loss(with_queries(MODEL, queries), PROMPT)
        following = torch.tensor(PROMPT[start + 1 : start + length + 1])
        assert float(loss.detach()) == pytest.approx(
            float(cross_entropy(logits[start : start + length], following)), abs=1e-9
        )
        # A span one row off has another loss.
        other = cross_entropy(logits[start : start + length - 1], following[1:])
        assert abs(float(loss.detach() - other)) > 1e-3
        loss.backward()
        assert all(each.grad is not None and bool(each.grad.any()) for each in queries)
        assert not any(each.requires_grad for each in _weights(MODEL))


def test_the_model_and_the_prompts_keys_stay_as_they_were() -> None:
    before = copy.deepcopy(_weights(MODEL))
    cache, _ = _read()
    kept = [tensor.clone() for layer in range(MODEL.config.num_layers) for tensor in cache.view(layer)]
    search = QueryTTT(steps=4, span=16, lr=1e-2)
    adapted = search.adapted(MODEL, PROMPT, cache)
    after = [tensor for layer in range(MODEL.config.num_layers) for tensor in cache.view(layer)]
    assert all(map(torch.equal, kept, after)) and all(map(torch.equal, before, _weights(MODEL)))
    own = MODEL.config.num_heads * MODEL.config.head_dim
    for here, there in zip(MODEL.weights.layers, adapted.weights.layers, strict=True):
        assert torch.equal(here.qkv.weight[own:], there.qkv.weight[own:]) and here.down is there.down
        assert not torch.equal(here.qkv.weight[:own], there.qkv.weight[:own])
    # It learns the prompt.
    losses = [float(Span(MODEL, cache, 0, 59, False).loss(each, PROMPT)) for each in (MODEL, adapted)]
    assert losses[1] < losses[0] - 1e-3


def test_no_steps_are_plain_decoding_and_steps_change_the_text_repeatably() -> None:
    plain = decode(MODEL, [PROMPT], **SETTINGS)[0].generated
    assert _run(QueryTTT(steps=0)).generated == plain
    search = QueryTTT(steps=6, span=24, lr=3e-2)
    found = _run(search)
    assert found.generated == _run(search).generated != plain
    assert decode(MODEL, [PROMPT], **SETTINGS)[0].generated == plain
    ledger = found.trace.ledger
    # Each span is scored by the model as it is, too.
    assert ledger.rows["training"] == 2 * 6 * 24 and ledger.passes["training"] == 6
    assert _run(replace(search, recompute=True)).generated != plain
    # Memory that is wanted back is read again by nobody.
    engine = Engine(MODEL)
    job = engine.enter(search.find(engine, Request(PROMPT, **SETTINGS)))
    engine.step()
    engine.preempt(job)
    engine.run([job])
    assert job.result[0].generated == found.generated


# What the model writes by itself is easy for it, what chance draws is hard.
EASY = [*PROMPT[:8], *decode(MODEL, [PROMPT[:8]], max_new_tokens=40)[0].generated]


def test_steps_that_go_astray_are_taken_back_whole_and_said() -> None:
    plain = decode(MODEL, [EASY], **SETTINGS)[0].generated
    for steps in (1, 9):
        with pytest.warns(UserWarning, match=r"query-ttt: after 1 steps the loss .* give an lr below 10"):
            (wild,) = QueryTTT(steps=steps, span=24, lr=10.0).run(Engine(MODEL), Request(EASY, **SETTINGS))
        assert wild.generated == plain and wild.trace.ledger.counts["aborted"] == 1


def test_spans_that_differ_are_no_rise_of_a_loss() -> None:
    prompt = [*EASY, *PROMPT[20:]]
    cache = MODEL.new_cache()
    MODEL.forward(Batch([Segment.chunk(prompt[:-1], cache)]))
    cache.keep(range(len(prompt) - 1))
    losses = [float(Span(MODEL, cache, start, 16, False).loss(MODEL, prompt)) for start in (16, 60)]
    assert losses[1] > 1.5 * losses[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = QueryTTT(steps=32, span=16, lr=1e-12).run(Engine(MODEL), Request(prompt, **SETTINGS))
    assert "aborted" not in found.trace.ledger.counts


def test_it_keeps_the_law_without_steps_and_says_where_there_are_no_gradients() -> None:
    check_search(MODEL, [PROMPT], QueryTTT(steps=0), max_new_tokens=6, eos_ids=(0, 3, 9))
    with pytest.raises(UnsupportedModel, match="dtype=float32"):
        _run(QueryTTT(), to_int8(tiny_transformer(0, dtype=torch.float32)))
