"""Drafters that guess inside of the target's own pass: their trees, what their rows may touch, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.text import _segment
from decodery.logits_sources.guidance import Guidance
from decodery.logits_sources.sven import SVEN
from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import WHOLE
from decodery.models.trained.placeholders import Placeholders
from decodery.models.trained.transfer import Transfer
from decodery.speculative.drafters.combine import Cascade, Union
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.hidden_transfer import HiddenTransfer
from decodery.speculative.drafters.ppd import PPD
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.speculative.tree_building.stages import LONGEST, Stages, fastest_stages, find_stages, most_likely, spread
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import MASK_TOKEN, DraftTree
from decodery.step.drafter import Drafter
from decodery.testing import check_identical, check_state, decode, tiny_transformer
from decodery.testing.models import to_int8
from methods import SOURCES
from scripted import Scripted

TARGET = tiny_transformer(0)
PROMPT = [5] * 6 + [7, 8, 9] * 4
RATES = torch.tensor([[0.4, 0.2, 0.1], [0.3, 0.2, 0.05], [0.2, 0.1, 0.05]])


def ppd(hidden: int = 32, length: int | None = 16) -> PPD:
    return PPD(length, Placeholders(torch.linspace(-1, 1, 3 * hidden).view(3, hidden), rates=RATES))


def transfer(hidden: int = 32, length: int | None = 16, layers: tuple[int, ...] = (0, 1, 1)) -> HiddenTransfer:
    maps = torch.eye(hidden).roll(1, 0).repeat(3, 1, 1)
    return HiddenTransfer(length, Transfer(maps, layers, RATES))


DRAFTERS: dict[str, Callable[..., PPD | HiddenTransfer]] = {"ppd": ppd, "hidden-transfer": transfer}


# -- trees ------------------------------------------------------------------------------------------------------------


def test_places_are_the_most_likely_and_closed() -> None:
    rates = RATES.double().numpy()
    for nodes in (1, 5, 20, 39):
        parents, ranks, depths, chances = most_likely(rates, nodes)
        paths = [
            np.prod([rates[depth, rank] for depth, rank in enumerate(path)])
            for length in (1, 2, 3)
            for path in itertools.product(range(3), repeat=length)
        ]
        assert chances[1:] == pytest.approx(sorted(paths, reverse=True)[:nodes])
        assert (parents[1:] < np.arange(1, nodes + 1)).all() and depths.max() <= 3 and ranks.max() <= 2
    assert len(most_likely(rates, 100)[0]) == 40


def test_guesses_are_taken_away_where_they_are_worth_least() -> None:
    lasts, gains = np.array([0.5, 0.1, 0.3, 0.05]), np.array([0.4, 0.1])

    def one_by_one(room: int) -> list[int]:
        asks = [3] * 4
        while sum(asks) > max(room, 4):
            losses = [last * gains[ask - 2] if ask > 1 else np.inf for last, ask in zip(lasts, asks, strict=True)]
            asks[int(np.argmin(losses))] -= 1
        return asks

    for room in range(14):
        assert spread(lasts, gains, room).tolist() == one_by_one(room)


def every_family(rates: np.ndarray, length: int) -> float:
    """The best tokens per pass over all sizes of both trees and all numbers of guesses after their nodes."""
    best, most = 0.0, (length - 3) // 2
    trees = []
    for depth in (1, 2):
        parents, _, _, chances = most_likely(rates[:depth], most)
        found = []
        for nodes in range(1, len(chances)):
            lasts = chances[: nodes + 1] - np.bincount(parents[1 : nodes + 1], chances[1 : nodes + 1], nodes + 1)
            for asks in itertools.product((1, 2), repeat=nodes):
                if 1 + nodes + 2 + sum(asks) <= length:
                    one = float(lasts[1:] @ (np.array(asks) == 1))
                    found.append((float(chances[1 : nodes + 1].sum()), one))
        trees.append(found)
    for (small, stays), (large, falls) in itertools.product(*trees):
        share = falls / (falls + 1.0 - stays)
        best = max(best, 1 + share * small + (1 - share) * large)
    return best


@pytest.mark.parametrize("length", [6, 8, 10, 12])
def test_no_family_of_trees_is_better(length: int) -> None:
    for rates in (RATES[:2].double().numpy(), np.array([[0.5, 0.3], [0.5, 0.4]]), np.array([[0.9, 0.05], [0.1, 0.05]])):
        found, single = find_stages(rates, length), find_stages(rates[:1], length)
        assert found is not None and single is not None
        best = max(every_family(rates, length) if length >= 5 else 0.0, single.tokens)
        assert found.tokens == pytest.approx(best, rel=5e-3) and found.tokens <= best + 1e-9
        assert max(tree.rows for tree in found.trees) <= length


def test_expected_tokens_are_those_of_the_chain_of_passes() -> None:
    found = find_stages(np.array([[0.5, 0.3], [0.5, 0.4], [0.5, 0.2]]), 16)
    assert found is not None and len(found.trees) > 1
    assert played(found, 40_000) == pytest.approx(found.tokens, rel=0.01)
    # A chain that is told to go on with the largest tree whatever it guessed is another one.
    wrong = Stages(tuple(replace(tree, asks=np.full_like(tree.asks, 2)) for tree in found.trees), found.share, 0.0)
    assert played(wrong, 40_000) > 1.01 * found.tokens


def played(stages: Stages, passes: int) -> float:
    random, state, tokens = np.random.default_rng(0), len(stages.trees) - 1, 0
    draws = [random.choice(len(tree.lasts), size=passes, p=tree.lasts / tree.lasts.sum()) for tree in stages.trees]
    for number in range(passes):
        tree, node = stages.trees[state], draws[state][number]
        tokens += 1 + int(tree.depths[node])
        state = int(tree.asks[node]) - 1
    return tokens / passes


def test_the_length_is_the_fastest_by_what_passes_cost() -> None:
    rates = RATES.double().numpy()
    speeds = {}
    for name, cost in (("free", 1e-9), ("cheap", 0.01), ("dear", 0.5)):
        found = fastest_stages(rates, lambda rows, cost=cost: 1.0 + cost * rows, LONGEST)
        speeds[name] = 1 if found is None else max(tree.rows for tree in found.trees)
    assert speeds["dear"] == 1 < speeds["cheap"] < speeds["free"] and speeds["free"] > 48
    assert fastest_stages(rates, lambda rows: np.ones(len(rows)), 3) is None


def test_a_machine_on_which_rows_are_dear_decodes_plainly() -> None:
    for cost, nodes in ((1.0, 0), (1e-6, 1)):
        engine = Engine(TARGET, pass_seconds=lambda context, cost=cost: 1.0 + cost * np.arange(200.0))
        seq = engine.submit(Request(PROMPT, drafter=ppd(length=None), max_new_tokens=12))
        engine.run([seq])
        assert (max(step.nodes for step in seq.trace.decoding) > 0) == bool(nodes)


# -- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("precision", ["float64", "int8"])
def test_rows_that_guess_are_seen_by_no_other(name: str, precision: str) -> None:
    model = TARGET if precision == "float64" else to_int8(tiny_transformer(1, dtype=torch.float32))
    engine = Engine(model)
    seq = engine.submit(Request(PROMPT, drafter=DRAFTERS[name](), max_new_tokens=20))
    while len(seq.trace.decoding) < 4:
        engine.step()
    tree = seq.request.drafter.propose(seq, Budget(64, 12))  # type: ignore[union-attr]
    known = tree.tokens != MASK_TOKEN
    assert isinstance(tree, DraftTree) and 1 < known.sum() < len(tree) and bool(tree.changes) == (name != "ppd")
    bare = tree.prune(known)
    whole, alone = (
        model.forward(Batch([replace(_segment(each, seq, WHOLE), cache=seq.cache.fork())]), taps=(1, -1))
        for each in (tree, bare)
    )
    rows = np.flatnonzero(known)
    if precision == "int8":
        assert torch.equal(whole.logits[rows], alone.logits)
        assert all(torch.equal(whole.hidden[tap][rows], alone.hidden[tap]) for tap in (1, -1))
    else:
        assert (whole.logits[rows] - alone.logits).abs().max() < 1e-10
    # Nor by those of other nodes: a chain's rows are what they are after its node alone.
    node = int(tree.chains[1].max())
    line = np.isin(np.arange(len(tree)), [0, *tree.path(node), *tree.asked(node)])
    (chain,) = (model.forward(Batch([replace(_segment(tree.prune(line), seq, WHOLE), cache=seq.cache.fork())])).logits,)
    assert (chain - whole.logits[np.flatnonzero(line)]).abs().max() < (1e-10 if precision == "float64" else 1e-4)


def test_states_put_in_place_are_read_as_the_tokens_they_stand_for() -> None:
    # With the true state of the next token in its place, a row says what that token's own row says.
    text, place = [3, 1, 4, 1, 5, 9, 2, 6], 4
    for layer in (0, 1):
        whole = TARGET.forward(Batch([Segment.chunk(text, TARGET.new_cache())]), taps=(layer,))
        engine = Engine(TARGET)
        seq = engine.submit(Request(text[: place + 1], max_new_tokens=4))
        engine.step()
        cache = TARGET.new_cache()
        TARGET.forward(Batch([Segment.chunk(text[:place], cache)]))
        cache.keep(range(place))
        seq.tokens, seq.cache = text[: place + 1], cache
        true = whole.hidden[layer][place + 1 : place + 3]

        def put(rows: torch.Tensor, tree: DraftTree, true: torch.Tensor = true) -> torch.Tensor:
            changed = rows.clone()
            changed[tree.chains[0]] = true[tree.chains[2]]
            return changed

        asked = DraftTree.root(text[place]).with_mask_nodes(np.array([2]), torch.zeros(2, 32), {layer: put})
        found = TARGET.forward(Batch([_segment(asked, seq, WHOLE)])).logits
        expected = whole.logits[place : place + 3]
        # The second one reads keys and values of the first, which stand only above the layer.
        assert (found[:2] - expected[:2]).abs().max() < 1e-10
        if layer == 0:
            assert (found - expected).abs().max() < 1e-10


class Knowing(Scripted):
    """A model that says the next token of its text after tokens, and after a row without a token, read as token 0,
    the one after that."""


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_model_that_knows_is_believed_as_far_as_it_is_asked(name: str) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1, 2, 3, 4, 5]
    (seq,) = decode(Knowing([1, *text]), [[1]], drafter=DRAFTERS[name](1, 64, **_flat(name)), max_new_tokens=17)
    assert seq.generated == text[:17]
    # The first pass has no draft; all others accept as many as were guessed, which is three where rows allow it.
    emitted = [step.emitted for step in seq.trace.decoding]
    assert emitted[0] == 1 and set(emitted[1:-1]) == {4}
    anti = DRAFTERS[name](1, 64, **_flat(name))
    wrong = Scripted([1, *text])
    wrong.logits = lambda tokens: _misled(text, tokens)  # type: ignore[method-assign]
    (seq,) = decode(wrong, [[1]], drafter=anti, max_new_tokens=12)
    assert seq.generated == text[:12] and {step.emitted for step in seq.trace.decoding} == {1}


def _flat(name: str) -> dict[str, tuple[int, ...]]:
    return {"layers": (0, 0, 0)} if name == "hidden-transfer" else {}


def _misled(text: list[int], tokens) -> torch.Tensor:
    row = torch.zeros(16, dtype=torch.float64)
    at = min(len(tokens), len(text)) - 1
    # After the text itself the truth, after anything else what never comes.
    row[text[at] if list(tokens[1:]) == text[: len(tokens) - 1] else 0] = 20.0
    return row


@pytest.mark.parametrize("name", DRAFTERS)
def test_they_go_with_other_drafters_constraints_and_sources(name: str) -> None:
    drafter, other = DRAFTERS[name](), TokenRecycling(nodes=8, scope="request")
    for each in (Union((drafter, other)), Union((other, drafter)), Cascade((drafter, other)), Forced(drafter)):
        check_identical(TARGET, [PROMPT, [3]], drafter=each, max_new_tokens=20, seeds=(0,))
        check_state(TARGET, [PROMPT], drafter=each, max_new_tokens=12)
    sven = SOURCES["sven"](TARGET)
    assert isinstance(sven, SVEN)
    check_identical(
        TARGET, [PROMPT], drafter=drafter, logits_source=sven, max_new_tokens=16, seeds=(0,), tested="drafted"
    )
    with pytest.raises(DecoderyError, match="which the logits source guidance does not give"):
        decode(TARGET, [PROMPT], drafter=drafter, logits_source=Guidance(1.5))


def test_trees_with_changes_keep_them_through_every_cut() -> None:
    tree = DraftTree.chain(1, [2, 3]).with_mask_nodes(
        np.array([2, 1, 0]), torch.zeros(2, 4), {1: lambda rows, tree: rows}
    )
    assert tree.tokens.tolist() == [1, 2, 3, -1, -1, -1] and tree.parents.tolist() == [-1, 0, 1, 0, 3, 1]
    assert tree.asked(0) == [3, 4] and tree.asked(1) == [5] and not tree.asked(2)
    assert [each.tolist() for each in tree.chains] == [[3, 4, 5], [0, 0, 1], [0, 1, 0]]
    merged = DraftTree.chain(1, [9]).merge(tree)
    for each in (tree.prune(np.arange(6) != 2), merged, tree.extended([(2, 7)])):
        each.validate(10)
        assert set(each.changes) == {1}
    assert [each.tolist() for each in merged.chains[1:]] == [[0, 0, 2], [0, 1, 0]]


def test_nothing_is_said_behind_an_end() -> None:
    engine = Engine(TARGET)
    seq = engine.submit(Request(PROMPT, drafter=ppd(), max_new_tokens=30))
    while len(seq.trace.decoding) < 3:
        engine.step()
    guesses = seq.states[seq.request.drafter].guesses
    seq.rebind(eos_ids=frozenset({int(guesses[0, 0])}))
    tree = seq.request.drafter.propose(seq, Budget(64, 12))  # type: ignore[union-attr]
    (ended,) = (node for node in tree.children(0) if tree.tokens[node] == guesses[0, 0])
    assert not (tree.parents == ended).any() and len(tree.children(0)) > 1


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_was_not_trained_or_for_another_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def refused(drafter: Drafter) -> str:
        with pytest.raises(DecoderyError) as caught:
            decode(TARGET, [[1]], drafter=drafter)
        return str(caught.value)

    assert "decodery train ppd" in refused(PPD()) and "decodery train hidden-transfer" in refused(HiddenTransfer())
    assert "decodery train ppd" in refused(PPD(ppd=Placeholders(torch.zeros(3, 32))))
    assert "another shape" in refused(transfer(layers=(0, 1, 7))) and "another shape" in refused(transfer(16))
    with pytest.raises(DecoderyError, match="4 to 64 rows"):
        PPD(length=3)
    maps = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    made = Transfer(maps, (0, 1), RATES[:2], {"a": 1}, "somebody else")
    made.save(tmp_path / "transfer.safetensors")
    assert "trained for another model" in refused(HiddenTransfer(transfer=str(tmp_path)))
    again = Transfer.load(tmp_path / "transfer.safetensors")
    assert torch.equal(again.maps, made.rounded().maps) and again.facts == {"a": 1}
    assert (again.maps - maps).abs().max() < 0.02 and torch.equal(again.rates, RATES[:2])
    for rates in (RATES[:2].flip(1), RATES[:1], RATES[:2] * 3, RATES[:2] - 0.1):
        Transfer(maps, (0, 1), rates).save(tmp_path / "damaged")
        with pytest.raises(CorruptFile, match="holds no hidden transfer"):
            Transfer.load(tmp_path / "damaged")
        Placeholders(maps[0, :2], {}, rates).save(tmp_path / "damaged")
        with pytest.raises(CorruptFile, match="holds no set of placeholders"):
            Placeholders.load(tmp_path / "damaged")
    Transfer(maps, (1, 0), RATES[:2]).save(tmp_path / "damaged")
    with pytest.raises(CorruptFile, match="holds no hidden transfer"):
        Transfer.load(tmp_path / "damaged")
