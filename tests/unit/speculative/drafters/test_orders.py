"""Drafting in other orders: in levels, several layers at a time, and as deep as a token asks for."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from covering import in_turn
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import LayerPlan
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.easyspec import EasySpec
from decodery.speculative.drafters.follower import Follower
from decodery.speculative.drafters.hierarchical import Hierarchical
from decodery.speculative.drafters.nested import Nested, NestedReading
from decodery.speculative.drafters.ngram import NGram
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.testing import check_identical, tiny_transformer
from decodery.testing.models import Counted
from methods import DRAFTERS
from open_models import BACKENDS, LAYERS, make, same


def first_layers(model: Transformer, count: int) -> Transformer:
    config = replace(model.config, num_layers=count, sliding_layers=model.config.sliding_layers[:count])
    return Transformer(config, replace(model.weights, layers=list(model.weights.layers[:count])))


TARGET = tiny_transformer(0, num_layers=6)
SMALL, SMALLEST = first_layers(TARGET, 5), first_layers(TARGET, 3)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, [11]]
NGRAMS = NGram(scope="request", tree_policy="eagle-2:nodes=12,width=3,depth=3")
SAMPLED = Sampler.from_settings(temperature=0.8, top_p=0.9)
ROOM = Budget(80, 80)


def begun(drafter: Drafter, steps: int = 4, **settings: object) -> Sequence:
    """A text after some steps, which goes on under the drafter."""
    engine = Engine(TARGET)
    seq = engine.submit(Request(PROMPTS[1], drafter=drafter, max_new_tokens=60, seed=3, **settings))  # type: ignore[arg-type]
    for _ in range(steps):
        engine.step()
    return seq


def drafted(drafter: Drafter, seq: Sequence) -> DraftTree:
    """What another drafter, which comes to the text only now, would draft."""
    other = replace(seq)
    other.states[drafter] = drafter.start(other)
    return run_sync(drafter.propose(other, ROOM))  # type: ignore[no-any-return]


INNER = {"ngram": NGRAMS, "draft-model": DraftModel(SMALLEST, length=3)}
CHOICE = {"greedy": Sampler.from_settings(), "sampled": SAMPLED}


@pytest.mark.parametrize(("name", "choice"), in_turn(list(INNER), list(CHOICE)))
def test_a_hierarchy_drafts_what_its_draft_model_would_in_fewer_passes(name: str, choice: str) -> None:
    inner, sampler, small, rule = INNER[name], CHOICE[choice], Counted(SMALL), Rejection()
    drafter = Hierarchical(DraftModel(small), inner, length=4)
    seq = begun(drafter, sampler=sampler, acceptance_rule=rule)
    passes = lengths = 0
    for _ in range(5):
        small.rows.clear()
        chain = run_sync(drafter.propose(seq, ROOM))
        passes, lengths = passes + len(small.rows), lengths + len(chain) - 1
        alone = drafted(DraftModel(SMALL, length=len(chain) - 1), seq)
        assert chain.tokens.tolist() == alone.tokens.tolist() and chain.origin == alone.origin
        assert chain.distributions.keys() == alone.distributions.keys()
        assert all(torch.allclose(law, alone.distributions[node]) for node, law in chain.distributions.items())
        # The next step's text: two drafts come true, and what the hierarchy read of the others must be forgotten.
        seq.tokens += [*chain.tokens[1:3].tolist(), int(chain.tokens[3] + 1) % 64]
    assert lengths >= 4 * 5 and passes < lengths
    short = run_sync(drafter.propose(seq, Budget(2, 2)))
    assert len(short) == 3
    check_identical(TARGET, PROMPTS[:1], drafter=drafter, sampler=sampler, seeds=(0,), max_new_tokens=16)


def test_hierarchies_say_what_they_cannot_draft_with() -> None:
    with pytest.raises(SettingsError, match="not prompt-lookup"):
        Hierarchical(inner="prompt-lookup")
    with pytest.raises(SettingsError, match="length >= 1"):
        Hierarchical(length=0)
    with pytest.raises(SettingsError, match="no hidden states"):
        Hierarchical(inner=DRAFTERS["eagle-3"](SMALL))
    assert Hierarchical(DraftModel(SMALL)).largest() == 36


def by_hand(model: Transformer, segment: Segment, size: int) -> torch.Tensor:
    """Logits of rows that pass `size` layers at a time, put together from single sublayers."""
    assert segment.tokens is not None
    rows = model.embed_tokens(torch.from_numpy(segment.tokens))

    def branch(layer: int, rows: torch.Tensor, kind: str, other: str) -> torch.Tensor:
        layer_plan, tap = LayerPlan((layer,), frozenset({f"{other}.{layer}"})), f"{kind}_out.{layer}"
        return model.forward(
            Batch([replace(segment, tokens=None, states=rows)]), taps=(tap,), layer_plan=layer_plan
        ).hidden[tap]

    inner = list(range(1, LAYERS - 1))
    for group in [[0], *(inner[i : i + size] for i in range(0, len(inner), size)), [LAYERS - 1]]:
        found = [branch(layer, rows, "attn", "mlp") for layer in group]
        for layer, attended in zip(group, found, strict=True):
            rows = rows + attended
            rows = rows + branch(layer, rows, "mlp", "attention")
    return model.head(rows)


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_abreast_attend_to_what_enters_their_group(backend: str, gemma: bool) -> None:
    model = make(backend, gemma=gemma)
    segment = Segment(np.arange(9), tokens=np.arange(9) * 7 % 64)
    found = {size: model.forward(Batch([segment]), layer_plan=LayerPlan(abreast=size)).logits for size in (1, 2, 3)}
    assert torch.equal(found[1], model.forward(Batch([segment])).logits)
    for size in (2, 3):
        assert torch.allclose(found[size], by_hand(model, segment, size), atol=1e-11 if backend == "float64" else 1e-4)
        assert not torch.allclose(found[size], found[1], atol=1e-3)
    with pytest.raises(UnsupportedModel, match="several layers at a time"):
        model.forward(Batch([segment]), layer_plan=LayerPlan(abreast=2), taps=(2,))
    with pytest.raises(SettingsError, match="at least one layer"):
        model.forward(Batch([segment]), layer_plan=LayerPlan(abreast=0))


def held(cache: KVCache) -> torch.Tensor:
    return cache.data[:, :, :, : cache.length].clone()


def test_the_cache_of_layers_abreast_is_put_right_with_every_step() -> None:
    fuzzy = {}
    for calibrate in (True, False):
        seq = begun(EasySpec(SMALL, layers=3, length=5, calibrate=calibrate), steps=8)
        reading: Follower = seq.states[seq.request.drafter]
        run_sync(reading.text(seq.tokens))
        whole = SMALL.new_cache()
        SMALL.forward(Batch([Segment.chunk(seq.tokens, whole)]))
        whole.keep(range(len(seq.tokens)))
        fuzzy[calibrate] = float((held(reading.cache) - held(whole)).abs().max())
    assert fuzzy[True] < 1e-10 < 1e-4 < fuzzy[False]


def as_part(drafter: TreeDrafter, seq: Sequence) -> TreeDrafter:
    """A drafter that goes on with what the text's own one remembers."""
    seq.states[drafter] = seq.states[seq.request.drafter]
    return drafter


def test_easyspec_one_layer_at_a_time_is_the_draft_model() -> None:
    plain, one = begun(DraftModel(SMALL, length=4)), begun(EasySpec(SMALL, length=4, layers=1))
    assert plain.tokens == one.tokens and plain.trace.ledger.rows == one.trace.ledger.rows
    tree = DraftTree.from_paths(plain.last_token, [[4, 5], [4, 6], [9]])
    rows = [run_sync(as_part(DraftModel(SMALL), seq).logits(seq, tree, [0, 1, 2, 3, 4])) for seq in (plain, one)]
    assert torch.equal(*rows)
    three = begun(EasySpec(SMALL, length=4, layers=3))
    # The first token of a draft is the whole draft model's, the others are not; the cache costs rows and no pass.
    other = run_sync(as_part(EasySpec(SMALL, layers=3), three).logits(three, tree, [0, 1, 2, 3, 4]))
    assert three.tokens[: len(plain.tokens)] == plain.tokens[: len(three.tokens)]
    assert not torch.allclose(other[1:], rows[0][1:], atol=1e-3)
    for layers in (2, 4, 8):
        drafter = EasySpec(SMALL, length=4, layers=layers)
        check_identical(TARGET, PROMPTS[:1], drafter=drafter, sampler=SAMPLED, seeds=(0,), max_new_tokens=16)
    with pytest.raises(SettingsError, match="layers >= 1"):
        EasySpec(layers=0)


def test_easyspec_says_where_its_layers_change_nothing() -> None:
    for model, layers, said in ((SMALL, 4, "as layers=3 does"), (SMALLEST, 2, "as draft-model does")):
        with pytest.warns(
            UserWarning, match=f"easyspec:layers={layers} drafts {said}: the first and the last layer stay apart"
        ):
            begun(EasySpec(model, layers=layers))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begun(EasySpec(SMALL, layers=3)), begun(EasySpec(SMALLEST, layers=1))
    with pytest.raises(SettingsError, match="nothing to calibrate"):
        EasySpec(layers=1, calibrate=False)


def nested_logits(model: Transformer, tokens: list[int], layers: int) -> torch.Tensor:
    """[vocab] after `tokens` by the first layers of a model, made a model of their own."""
    alone = Segment(np.arange(len(tokens)), tokens=np.array(tokens), logit_rows=[len(tokens) - 1])
    return first_layers(model, layers).forward(Batch([alone])).logits[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_exit_is_the_truncated_model_however_deep_others_went(backend: str) -> None:
    model = make(backend)
    reading, random = NestedReading(model, (1, 3, 4)), np.random.default_rng(2)
    text, lagged = random.integers(0, 64, 9).tolist(), 0
    for step in range(12):
        deep = int(random.integers(3))
        reading.agree(text)
        # No exit is ever as sure as 2, every one as sure as 0.
        logits = run_sync(reading.after(text, (*(2.0,) * deep, *(0.0,) * (2 - deep))))
        assert same(logits[0], nested_logits(model, text, reading.exits[deep]))
        lagged += reading.cache.evicted
        if step % 4 == 3:
            # The last tokens were drafts that did not come true, of which some layers had read some.
            del text[-3:]
        text.append(int(random.integers(64)))
        if step == 6:
            reading = deepcopy(reading)
    reading.agree(text)
    assert lagged > 4
    run_sync(reading.after(text, (2.0, 2.0)))
    whole = model.new_cache()
    model.forward(Batch([Segment.chunk(text, whole)]))
    whole.keep(range(len(text)))
    assert not reading.cache.evicted and same(held(reading.cache), held(whole))


def test_a_nested_draft_serves_targets_of_several_sizes() -> None:
    drafter = Nested(SMALL, sure=(0.5, 0.1), exits=(1, 3, 5))
    for target, sampler in ((TARGET, SAMPLED), (SMALLEST, Sampler.from_settings())):
        (run,) = check_identical(target, PROMPTS[:1], drafter=drafter, sampler=sampler, seeds=(0,), max_new_tokens=16)
        layers, rows = run.trace.ledger.counts["draft layers"], len(run.tokens) - 1 + len(run.trace.steps)
        assert 0 < layers < 5 * rows
    deepest = Nested(SMALL, exits=(5,))
    seq = begun(deepest)
    assert run_sync(deepest.propose(seq, ROOM)).tokens.tolist() == drafted(DraftModel(SMALL), seq).tokens.tolist()


def test_nested_says_what_it_cannot_draft_with() -> None:
    with pytest.raises(SettingsError, match="decodery train nested"):
        Nested()
    with pytest.raises(SettingsError, match="sure between 0 and 1"):
        Nested(SMALL, sure=(1.5,))
    for given, message in (
        ({}, "trained for no exits: train one with `decodery train nested"),
        ({"exits": (3, 2)}, "exits ascend from 1 to the 5 layers"),
        ({"exits": (1, 3, 5), "sure": (0.1, 0.1, 0.1)}, "one sure for all exits, or 2"),
    ):
        with pytest.raises(SettingsError, match=message):
            begun(Nested(SMALL, **given))
