"""Models of `transformers` that keep states of their own: these follow the tokens of a text, whatever was tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from decodery.core.errors import UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Intervention
from decodery.models.transformers import adapter_states
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import Oracle, check_identical, decode
from small_configs import build
from tiny_models import random_ids, randomize, reference

KINDS = {
    "mamba": ("states", False),
    "rwkv": ("states", True),
    "bamba": ("states", True),
    "bloom": ("states", True),
    "recurrent_gemma": ("nothing", True),
}
"""Families, with what the adapter keeps of them, and whether rows share a call: tuples and layers of states, keys and
values without positions, and states outside of any cache."""


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return TransformersModel(build(request.param))


def read(model: TransformersModel, tokens: Any, cache: KVCache, keep: int | None = None) -> torch.Tensor:
    logits = model.forward(Batch([Segment.chunk(tokens, cache)])).logits
    cache.keep(range(len(tokens) if keep is None else keep))
    return logits


def assert_near(got: torch.Tensor, model: TransformersModel, ids: Any) -> None:
    """The logits are those of the last rows of a plain call over `ids`."""
    assert (got - reference(model.hf_model, np.asarray(ids))[-len(got) :]).abs().max() < 1e-4


def test_what_it_keeps_is_seen_in_its_capabilities(model: TransformersModel) -> None:
    can = model.capabilities
    assert (model.keeps, can.chains) == KINDS[model.config.family]
    assert not (can.trees or can.states or can.changes) and can.sites == {"logits", "residual"}


def test_pieces_drafts_forks_and_cuts_have_the_logits_of_plain_calls(model: TransformersModel) -> None:
    ids, cache = random_ids(30), model.new_cache()
    for size, keep in ((9, 9), (4, 1), (4, 2), (1, 1), (5, 0), (3, 3)):
        start = cache.next_position
        drafted = np.concatenate([ids[start : start + keep], ids[: size - keep]])
        assert_near(read(model, drafted, cache, keep), model, np.concatenate([ids[:start], drafted]))
    start = cache.next_position
    fork = cache.fork()
    assert_near(read(model, [3, 4], cache), model, [*ids[:start], 3, 4])
    assert_near(read(model, [7], fork), model, [*ids[:start], 7])
    assert_near(read(model, [8], fork), model, [*ids[:start], 7, 8])
    cache.truncate(start - 3)
    assert_near(read(model, [9], cache), model, [*ids[: start - 3], 9])
    mark = fork.snapshot()
    read(model, [1, 2], fork)
    fork.restore(mark)
    assert_near(read(model, [5], fork), model, [*ids[:start], 7, 8, 5])


def test_rows_that_stay_are_read_before_those_that_follow(model: TransformersModel) -> None:
    ids, cache = random_ids(12), model.new_cache()
    read(model, ids[:6], cache)
    for retained in range(3):
        positions = np.array([6 + retained])
        segment = Segment(positions, tokens=ids[6 + retained : 7 + retained], cache=cache, retained=retained)
        assert_near(model.forward(Batch([segment])).logits, model, ids[: 7 + retained])
    cache.keep([0, 1])
    assert_near(read(model, [2], cache), model, [*ids[:8], 2])


def test_states_are_read_between_layers_and_not_changed(model: TransformersModel) -> None:
    ids, cache = random_ids(8), model.new_cache()
    read(model, ids[:4], cache)
    tapped = model.forward(Batch([Segment.chunk(ids[4:], cache)]), taps=(0, 1)).hidden
    whole = model.forward(Batch([Segment(np.arange(8), tokens=ids)]), taps=(0, 1)).hidden
    for tap in (0, 1):
        assert tapped[tap].shape == (4, model.config.hidden_size)
        assert (tapped[tap] - whole[tap][4:]).abs().max() < 1e-4
    change = Intervention("resid_post.0", lambda rows, segment: rows * 0)
    with pytest.raises(UnsupportedModel, match="rows cannot be changed between its layers"):
        model.forward(Batch([Segment(np.arange(2), tokens=ids[:2], interventions=(change,))]))
    double = Intervention("logits", lambda rows, segment: rows * 2)
    changed = model.forward(Batch([Segment(np.arange(8), tokens=ids, interventions=(double,))])).logits
    assert_near(changed / 2, model, ids)


def test_what_states_do_not_allow_is_refused_by_name(model: TransformersModel) -> None:
    ids, name = random_ids(4), type(model.hf_model).__name__
    with pytest.raises(UnsupportedModel, match=f"{name} reads no rows that branch: use drafters that propose chains"):
        mask = np.eye(3, dtype=bool)
        model.forward(Batch([Segment(np.zeros(3, dtype=np.int64), tokens=ids[:3], mask=mask)]))
    with pytest.raises(UnsupportedModel, match="embeddings cannot stand in"):
        model.forward(Batch([Segment(np.arange(2), states=torch.zeros(2, model.config.hidden_size))]))
    with pytest.raises(UnsupportedModel, match=f"{name} reads its tokens in order"):
        model.forward(Batch([Segment(np.array([0, 2]), tokens=ids[:2])]))
    cache = model.new_cache()
    read(model, ids, cache)
    cache.evict(0, [1])
    with pytest.raises(UnsupportedModel, match="leave cache policies and prefixes out"):
        model.forward(Batch([Segment.chunk([1], cache)]))


def test_texts_are_those_of_plain_decoding(model: TransformersModel) -> None:
    # Where each row is a call, nothing is drafted.
    tested = None if model.capabilities.chains else "nothing"
    prompts = [[1, 2, 3] * 4, [5, 6]]
    check_identical(model, prompts, drafter="prompt-lookup", seeds=(0,), max_new_tokens=12, tested=tested)


def test_nothing_is_drafted_where_each_row_is_a_call(model: TransformersModel) -> None:
    (plain,) = decode(model, [[1, 2, 3]], max_new_tokens=6)
    (text,) = decode(model, [[1, 2, 3]], drafter=Oracle(tuple(plain.tokens)), max_new_tokens=6)
    assert text.tokens == plain.tokens
    assert (sum(step.nodes for step in text.trace.steps) > 0) == model.capabilities.chains


def test_low_precision_hides_no_state_that_chunks_leave_out() -> None:
    # Chunks leave out the inputs of its convolutions: 1 to 4 % of the logits, about what bfloat16 rounds.
    assert not TransformersModel(build("zamba").to(torch.bfloat16)).capabilities.chains
    assert TransformersModel(build("rwkv").to(torch.bfloat16)).capabilities.chains


def test_a_long_rejected_stretch_takes_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = TransformersModel(build("rwkv"))
    calls: list[int] = []
    plain = ours.calls.logits
    monkeypatch.setattr(
        ours.calls, "logits", lambda given, rows: calls.append(given["input_ids"].shape[1]) or plain(given, rows)
    )
    ids, cache = random_ids(40), ours.new_cache()
    read(ours, ids[:4], cache)
    for size in (15, 15, 4):
        start = cache.next_position
        assert_near(read(ours, [*ids[start : start + size], 1], cache, size), ours, [*ids[: start + size], 1])
    # 15 rows and one that is rejected; 15 are run again with the next 16; then 30 alone, before 5.
    assert calls == [4, 16, 31, 30, 5] and adapter_states._REPLAYED == 16
    assert cache.states.bytes > 0 and len(cache.states.known[0]) <= 3


class Noisy(transformers.GPT2LMHeadModel):
    """Adds other numbers to its logits each time."""

    def forward(self, *args: Any, **options: Any) -> Any:
        found = super().forward(*args, **options)
        found.logits = found.logits + torch.randn_like(found.logits)
        return found


class Peeking(transformers.GPT2LMHeadModel):
    """Adds the mean over all rows to the logits of each, as routers do whose experts are full."""

    def forward(self, *args: Any, **options: Any) -> Any:
        found = super().forward(*args, **options)
        found.logits = found.logits + found.logits.mean(dim=1, keepdim=True)
        return found


class Forgetful(transformers.GPT2LMHeadModel):
    """Forgets what its cache holds."""

    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, position_ids: Any = None, **options: Any
    ) -> Any:
        return super().forward(input_ids=input_ids, use_cache=options.get("use_cache"))


SIZES = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize(("kind", "reason"), [(Noisy, "other logits each time"), (Peeking, "when others follow it")])
def test_logits_that_calls_or_later_tokens_change_are_refused(kind: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^{kind.__name__} gives .*{reason}.*: use generate\(\)") as caught:
        TransformersModel(randomize(kind(transformers.GPT2Config(**SIZES))))
    assert "\n" not in str(caught.value)


def test_models_that_forget_are_read_anew() -> None:
    ours = TransformersModel(randomize(Forgetful(transformers.GPT2Config(**SIZES))))
    assert ours.keeps == "nothing"
    cache = ours.new_cache()
    read(ours, [1, 2, 3], cache)
    assert_near(read(ours, [4, 5], cache), ours, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text", "mimo_v2_flash"])
def test_rows_of_other_widths_and_chunks_allow_trees(family: str) -> None:
    ours = TransformersModel(build(family))
    assert ours.keeps == "keys and values" and ours.capabilities.trees
    ids, cache = random_ids(21), ours.new_cache()
    read(ours, ids[:13], cache)
    read(ours, ids[13:], cache)
    nodes, mask = np.array([3, 4, 5, 6]), np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
    logits = ours.forward(Batch([Segment(20 + mask.sum(axis=1), tokens=nodes, mask=mask, cache=cache)])).logits
    for node in range(4):
        assert_near(logits[node : node + 1], ours, np.concatenate([ids, nodes[mask[node]]]))
    cache.keep([0, 2, 3])
    assert_near(read(ours, [9], cache), ours, [*ids, 3, 5, 6, 9])
