"""Drafting with the target's own layers: what they read, what is chosen and searched for, and what stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, SettingsError
from decodery.core.gaussian_process import GaussianProcess, matern
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.trained.skips import SkipSet, switches
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.dynamic_exit import DEL, tokens_per_layer
from decodery.speculative.drafters.swift import Swift, matchness
from decodery.speculative.stores.skip_search import SkipSearch
from decodery.speculative.trees.caterpillar import Caterpillar
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import run_sync
from decodery.testing import LawBroken, check_batch, check_identical, check_state, decode, tiny_transformer
from decodery.testing.models import Counted
from questions import prompts
from scripted import Unigram

LAYERS = 6
TARGET = tiny_transformer(0, num_layers=LAYERS)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, [11]]
SKIP = SkipSet(frozenset({"attention.2", "mlp.3"}), LAYERS)
NOTHING = SkipSet(frozenset(), LAYERS)
CHAIN = Caterpillar(length=4, stop=0.0, greedy=(1, 1, 1, 1), chance=(1, 1, 1, 1))


def after(tokens: list[int], known: int, layer_plan: LayerPlan) -> torch.Tensor:
    """[vocab] after `tokens`, of which the whole model has read `known` and a route the rest, one by one."""
    cache = TARGET.new_cache()
    if known:
        TARGET.forward(Batch([Segment.chunk(tokens[:known], cache)]))
        cache.keep(range(known))
    for token in tokens[known:]:
        logits = TARGET.forward(Batch([Segment.chunk([token], cache)]), layer_plan=layer_plan).logits[0]
        cache.keep([0])
    return logits


@pytest.mark.parametrize("drafter", [Swift(SKIP), DEL((3,))], ids=["swift", "del"])
def test_a_draft_row_is_the_partial_model_behind_the_whole_models_past(drafter: Swift | DEL) -> None:
    engine = Engine(TARGET)
    seq = engine.submit(Request(PROMPTS[1], drafter=drafter, max_new_tokens=20))
    for _ in range(4):
        engine.step()
    tree = DraftTree.from_paths(seq.last_token, [[4, 5], [4, 6], [9]])
    layer_plan, text = drafter.layer_plan(seq), list(seq.tokens)
    found = run_sync(drafter.logits(seq, tree, [0, 3]))
    later = run_sync(drafter.logits(seq, tree, [2, 4]))
    for node, row in zip([0, 3, 2, 4], [*found, *later], strict=True):
        path = text + tree.tokens[tree.path(node)].tolist()
        assert torch.allclose(row, after(path, len(text) - 1, layer_plan), atol=1e-10)
        # A model that had drafted all along would say something else; its first layers are what they are.
        assert torch.allclose(row, after(path, 0, layer_plan), atol=1e-3) == isinstance(drafter, DEL)
    engine.run([seq])
    assert seq.generated == decode(TARGET, PROMPTS[1:2], max_new_tokens=20)[0].generated


def test_the_whole_model_drafts_for_itself_without_a_mistake() -> None:
    for drafter in (Swift(NOTHING, tree_policy=CHAIN), DEL((LAYERS,), length=4)):
        (run,) = decode(TARGET, PROMPTS[:1], drafter=drafter, max_new_tokens=21)
        assert all(step.accepted == step.nodes for step in run.trace.decoding)
    (run,) = decode(TARGET, PROMPTS[:1], drafter=Swift(NOTHING, tree_policy=CHAIN), max_new_tokens=21)
    assert [step.emitted for step in run.trace.decoding] == [5] * 4


@dataclass(frozen=True)
class Contrary(Swift):
    """Drafts what the model finds least likely."""

    def logits(self, seq, tree, nodes):
        return -(yield from super().logits(seq, tree, nodes))


def test_drafts_that_are_always_wrong_change_nothing() -> None:
    (run,) = check_identical(
        TARGET,
        PROMPTS[1:2],
        drafter=Contrary(NOTHING, tree_policy=CHAIN),
        seeds=(0,),
        max_new_tokens=16,
        tested="drafted",
    )
    assert {step.emitted for step in run.trace.decoding} == {1}
    with pytest.raises(LawBroken):
        check_identical(
            TARGET, PROMPTS[1:2], drafter=Contrary(NOTHING, tree_policy=CHAIN), seeds=(0,), max_new_tokens=16
        )


def test_matchness_of_one_pass_is_that_of_token_by_token() -> None:
    (seq,) = decode(TARGET, PROMPTS[1:2], max_new_tokens=14)
    first, window = seq.request.prompt_length, 10
    for skip in (frozenset(), SKIP.skip, frozenset({"mlp.1", "attention.1", "attention.4"})):
        right = [
            int(after(seq.tokens[: at + 1], first, LayerPlan(skip=skip)).argmax()) == seq.tokens[at + 1]
            for at in range(first, first + window)
        ]
        assert run_sync(matchness(seq, LayerPlan(skip=skip), window)) == pytest.approx(sum(right) / window)
        assert skip or all(right)


def test_texts_share_draft_passes_and_what_was_found() -> None:
    drafter = Swift(ratio=0.3, window=4, bayes=3, proposals=9, enough=1.0, tree_policy=CHAIN)
    alone, all_ = Counted(TARGET), Counted(TARGET)
    decode(alone, PROMPTS[:1], drafter=Swift(SKIP, tree_policy=CHAIN), max_new_tokens=12)
    decode(all_, PROMPTS[:1] * 4, drafter=Swift(SKIP, tree_policy=CHAIN), max_new_tokens=12)
    assert len(all_.rows) == len(alone.rows)
    check_batch(TARGET, PROMPTS[:2], drafter=drafter, seeds=(0,), tested="nothing")
    check_state(TARGET, PROMPTS[:1], drafter=drafter, max_new_tokens=12)
    engine = Engine(TARGET)
    texts = [engine.submit(Request(prompt, drafter=drafter, max_new_tokens=56)) for prompt in PROMPTS]
    engine.run(texts)
    (search,) = {
        id(seq.states[seq.request.drafter].search): seq.states[seq.request.drafter].search for seq in texts
    }.values()
    assert search.proposed == search.tried == 9 and search.matchness == max(search.history)
    assert sum(seq.trace.ledger.passes["search"] for seq in texts) == 9


def test_the_process_predicts_as_the_formula_says() -> None:
    random = np.random.default_rng(0)
    points, values, asked = random.random((12, 5)), random.random(12), random.random((7, 5))
    process = GaussianProcess(points, values, noise=1e-2)
    inverse = np.linalg.inv(matern(points, points, process.scale) + 1e-2 * np.eye(12))
    across = matern(asked, points, process.scale)
    mean, deviation = process.predict(asked)
    assert np.allclose(mean, values.mean() + across @ inverse @ (values - values.mean()))
    assert np.allclose(deviation, values.std() * np.sqrt(1 - np.einsum("ij,jk,ik->i", across, inverse, across)))
    assert process.predict(points)[1].max() < deviation.max()


def _searched(bayes: int) -> SkipSearch:
    search, worth = SkipSearch(14, 0.5, bayes=bayes), np.random.default_rng(1).random(24)
    for _ in range(60):
        chosen = search.propose()
        assert chosen.sum() == search.count == 12
        search.register(chosen, float(worth[~chosen].sum() / worth.sum()))
    return search


def test_promising_sets_are_better_than_random_ones() -> None:
    random, guided = _searched(1000), _searched(4)
    assert guided.matchness > random.matchness + 0.03
    assert guided.matchness == max(guided.history) and guided.best.sum() == 12
    first = SkipSearch(14, 0.5)
    assert {int(name.partition(".")[2]) % 2 for name in first.skip} == {1} and len(first.skip) == 12
    assert len(switches(14)) == 24 and "attention.0" not in switches(14) and "mlp.13" not in switches(14)


def test_a_caterpillar_has_as_many_legs_as_it_has_doubts() -> None:
    def tree(spread: float, **settings: object) -> DraftTree:
        model = Unigram(16, spread=spread)
        drafter = DraftModel(model, tree_policy=Caterpillar(**settings))  # type: ignore[arg-type]
        engine = Engine(model)
        seq = engine.submit(Request([1], drafter=drafter, max_new_tokens=40, return_draft_trees=True))
        while not (trees := [step.tree for step in seq.trace.decoding if step.tree is not None]):
            engine.step()
        found = trees[0]
        return DraftTree(np.array(found.tokens), np.array(found.parents))

    doubtful = tree(0.1)
    assert len(doubtful) == 11 and doubtful.depths.max() == 1
    sure = tree(60.0, length=6)
    assert sure.depths.max() == 6 and len(sure) == 1 + 6 * 3
    assert [len(sure.children(node)) for node in (0, 1)] == [3, 3] and len(sure.children(2)) == 0


def test_the_exit_with_most_tokens_per_layer_is_chosen() -> None:
    random = np.random.default_rng(2)
    for head in (0.0, 8.0):
        drafter = DEL((2, 3, 5), length=6, head=head)
        for _ in range(50):
            rates = random.random(3)
            best = max(
                (sum(rate**i for i in range(d + 1)) / (d * (exit + head) + 12 + head), -number, -d)
                for number, (exit, rate) in enumerate(zip(drafter.layers, rates, strict=True))
                for d in range(7)
            )
            assert drafter.chosen(rates, 12) == (-best[1], -best[2])
    worth = tokens_per_layer(np.array([1.0]), np.array([4]), 12, 3)
    assert worth[0].tolist() == pytest.approx([1 / 12, 2 / 16, 3 / 20, 4 / 24])


def test_shadow_tokens_are_the_drafts_of_their_exit_and_the_target_at_the_top() -> None:
    drafter = DEL((3, LAYERS), decay=1.0, dynamic=False, length=3)
    engine = Engine(TARGET)
    seq = engine.submit(Request(PROMPTS[1], drafter=drafter, max_new_tokens=40))
    engine.step()
    right, asked, drafted = 1.0, 2.0, 0
    while not seq.finished:
        known = len(seq.tokens)
        engine.step()
        emitted = seq.tokens[known:]
        # Each place again, by a plain pass of the first layers after the whole model's past.
        for at in range(len(emitted)):
            said = after(seq.tokens[: known + at], known + at - 1, LayerPlan((0, 1, 2))).argmax()
            right, asked = right + (int(said) == emitted[at]), asked + 1
        drafted += seq.trace.steps[-1].nodes
        state = seq.states[seq.request.drafter]
        assert state.right[0] == right and state.asked[0] == asked
        assert state.asked[1] - state.right[1] == 1  # of the prior; the top is never wrong
    assert drafted


def test_sets_of_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    def refused(skip: SkipSet | str) -> str:
        with pytest.raises(DecoderyError) as caught:
            decode(TARGET, [[1]], drafter=Swift(skip))
        return str(caught.value)

    SKIP.save(tmp_path / SkipSet.FILE)
    assert SkipSet.load(tmp_path / SkipSet.FILE).skip == SKIP.skip
    assert "decodery train swift" in refused(SkipSet(SKIP.skip, LAYERS, {}, "another"))
    assert "decodery train swift" in refused(str(tmp_path / "none"))
    assert "attention.0 to mlp.5, not 'mlp.7'" in refused(SkipSet(frozenset({"mlp.7"}), 9))
    (tmp_path / "cut").write_bytes((tmp_path / SkipSet.FILE).read_bytes()[:-4])
    with pytest.raises(CorruptFile, match="holds no set of skipped sublayers"):
        SkipSet.load(tmp_path / "cut")
    for wrong in ({"ratio": 1.0}, {"window": 0}):
        with pytest.raises(SettingsError, match="ratio from 0 to less than 1"):
            Swift(**wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="there is no state after layer 8 of 6"):
        decode(TARGET, [[1]], drafter=DEL())


@pytest.mark.parametrize(
    "drafter",
    [Swift(SkipSet(frozenset({"attention.7", "attention.12", "mlp.9"}), 30)), DEL((4, 12))],
    ids=["swift", "del"],
)
def test_int8_texts_are_those_of_plain_decoding(smollm2_int8: LLM, drafter: Swift | DEL) -> None:
    asked = [prompts(smollm2_int8)[2]]
    settings = {"seeds": (1,), "max_new_tokens": 12, "tested": "drafted"}
    (run,) = check_identical(smollm2_int8.model, asked, drafter=drafter, **settings)
    assert run.trace.ledger.passes["draft"]
