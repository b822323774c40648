"""What each kind of draft head is, shown exactly: what an untrained one says, and what it can and cannot see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.config import Rope
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Linear
from decodery.speculative.drafters.chimera import ChimeraHead
from decodery.speculative.drafters.clover import CloverHead
from decodery.speculative.drafters.eagle_3 import EAGLE3Head
from decodery.speculative.drafters.hydra import HydraHead
from decodery.speculative.drafters.medusa import Medusa, MedusaHead
from decodery.speculative.heads.context import ContextLayer, context_layer
from decodery.speculative.heads.drafter import head_kind, head_named
from decodery.speculative.heads.grown import DraftHead
from decodery.speculative.heads.head import Heard, TrainedHead
from decodery.speculative.heads.parts import LayerShape, Parts
from decodery.speculative.heads.reading import HeadReading
from decodery.speculative.tree_building.template import calibrated
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import run_sync
from decodery.testing import tiny_transformer

TARGET = tiny_transformer(0, num_layers=3)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
STATES = TARGET.forward(Batch([Segment.chunk(TEXT, TARGET.new_cache())]), taps=(-1,)).hidden
SAID = TARGET.project(TARGET.final_norm(STATES[-1]))
"""[n, vocab], what the target says after every token."""
ALONE = np.ones((1, 1), dtype=bool)


def made(kind: type[DraftHead], noise: float = 0.0, **shape: bool) -> DraftHead:
    """A head as it begins its training, or with random numbers added everywhere."""
    tensors, settings = kind.untrained(TARGET, 0, **shape)
    random = torch.Generator().manual_seed(1)
    tensors = {
        name: each + noise * torch.randn(each.shape, generator=random, dtype=each.dtype) / each.shape[-1] ** 0.5
        for name, each in tensors.items()
    }
    return kind(TrainedHead(kind.kind, tensors, settings), TARGET)


def said(head: DraftHead, end: int, *below: int) -> list[torch.Tensor]:
    """The logits after the first `end + 1` tokens, and after each of a chain of nodes below them."""
    memory = head.begin()
    states = {-1: STATES[-1][:end]}
    found = [head.read(memory, states, torch.tensor(TEXT[1 : end + 1]), np.arange(end))]
    for depth, token in enumerate(below, start=1):
        row, mask = np.array([depth - 2]), np.ones((1, depth), dtype=bool)
        found.append(head.grow(memory, torch.tensor([token]), row, np.array([depth]), mask)[0])
    return found


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "shape"), [(MedusaHead, {}), (HydraHead, {}), (HydraHead, {"prefix": True})])
def test_untrained_heads_say_what_the_target_says_next(kind: type[DraftHead], shape: dict[str, bool]) -> None:
    head = made(kind, **shape)
    for end in (1, 5, 9):
        # The state before the last token: that one, and those drafted, are seen and count for nothing yet.
        assert apart(said(head, end, 7, 8, 2), [SAID[end - 1]] * 4) < 1e-5
    assert apart(said(made(kind, 0.3, **shape), 5, 7, 8, 2), [SAID[4]] * 4) > 0.1


def biased() -> Transformer:
    """A target whose layers have biases everywhere, as Qwen2's have some, and whose positions are stretched."""
    random = torch.Generator().manual_seed(2)

    def with_bias(linear: Linear) -> Dense:
        assert isinstance(linear, Dense)
        return Dense(linear.weight, torch.randn(len(linear.weight), generator=random, dtype=torch.float64))

    layers = [
        replace(layer, **{name: with_bias(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")})
        for layer in TARGET.weights.layers
    ]
    config = replace(TARGET.config, rope=Rope(kind="linear", factor=2.5))
    return Transformer(config, replace(TARGET.weights, layers=layers))


def test_a_copied_layer_does_what_the_layer_does_biases_and_all() -> None:
    target = biased()
    states = target.forward(Batch([Segment.chunk(TEXT, target.new_cache())]), taps=(2, 3)).hidden
    for silent, expected in ((False, states[3]), (True, states[2])):
        shape, tensors = context_layer(target, silent=silent)
        layer = ContextLayer(Parts(tensors), "layer.", shape)
        found = layer.read(layer.begin(states[2]), states[2], np.arange(len(TEXT)))
        # The target's angles are float32.
        assert float((found[0] - expected[-1]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["chimera", "clover", "eagle", "eagle-3", "falcon", "fspad", "kangaroo", "longspec"])
def test_heads_begin_with_the_biases_of_the_layer_they_copy(name: str) -> None:
    target, kind = biased(), head_kind(name)
    tensors, settings = kind.untrained(target, 0)
    layer = target.weights.layers[settings.get("exit", 2)]
    assert isinstance(layer.qkv, Dense) and layer.qkv.bias is not None
    assert torch.equal(tensors["layer.qkv.bias"], layer.qkv.bias)
    # What was made for this target runs with it.
    assert kind(TrainedHead(name, tensors, settings), target).parts.linear("layer.qkv")


def test_medusa_sees_no_guess_and_hydra_every_one_of_its_path() -> None:
    medusa = made(MedusaHead, 0.3)
    assert apart(said(medusa, 5, 7, 8, 2), said(medusa, 5, 1, 1, 1)) == 0.0
    hydra = made(HydraHead, 0.3)
    one, other = said(hydra, 5, 7, 8, 2), said(hydra, 5, 6, 8, 2)
    assert apart(one[:1], other[:1]) == 0.0
    assert all(apart([a], [b]) > 1e-3 for a, b in zip(one[1:], other[1:], strict=True))


def test_hydra_without_a_prefix_drafts_as_it_is_unrolled() -> None:
    head = made(HydraHead, 0.3)
    guesses = head.unroll({-1: STATES[-1][None, :6]}, torch.tensor([TEXT[1:]]), 4)
    expected = [head.project(guess.spoken[0, 5:6])[0] for guess in guesses]
    assert apart(said(head, 6, *TEXT[7:]), expected) < 1e-9


def test_clover_without_values_sees_no_tokens() -> None:
    head = made(CloverHead, 0.3)
    blind = CloverHead(
        replace(head.trained, tensors={**head.trained.tensors, "value.weight": torch.zeros(32, 32)}), TARGET
    )
    # The last token and those drafted differ, while the states are the same.
    for each, same in ((blind, True), (head, False)):
        found = []
        for last in (4, 60):
            memory = each.begin()
            logits = each.read(memory, {-1: STATES[-1][:3]}, torch.tensor([1, 4, last]), np.arange(3))
            grown = each.grow(memory, torch.tensor([last]), np.array([-1]), np.array([1]), ALONE)
            found.append([logits, grown[0]])
        assert all(torch.equal(a, b) == same for a, b in zip(*found, strict=True))


def test_chimera_drafts_what_its_whole_sequence_gives() -> None:
    head = made(ChimeraHead, 0.3)
    assert isinstance(head, ChimeraHead)
    end, drafted = 5, [7, 8, 2]
    final = TARGET.final_norm(STATES[-1][:end])
    layer = ContextLayer(head.parts, "layer.", LayerShape(**head.trained.settings["layer"]))
    sequence, text = final, [*TEXT[1 : end + 1], *drafted]
    for number, found in enumerate(said(head, end, *drafted)):
        # The target's states, those made up so far, and the last three tokens: through the layer from the start.
        gram = torch.cat([head.embed(torch.tensor([token])) for token in text[end + number - 3 : end + number]], dim=1)
        entered = head.parts.linear("encoded")(head.parts.block("trigram", gram))
        rows = torch.cat((sequence, entered))
        made_up = layer.read(layer.begin(rows), rows, np.arange(len(rows)))
        spoken = head.parts.linear(f"head.{number}")(torch.cat((final[-1:], made_up), dim=1))
        assert apart([found], [head.project(spoken)[0]]) < 1e-9
        sequence = torch.cat((sequence, made_up))


def test_chimera_begins_between_the_target_and_the_last_token() -> None:
    final = TARGET.final_norm(STATES[-1][4:5])
    last = made(ChimeraHead).embed(torch.tensor([TEXT[5]]))
    assert apart(said(made(ChimeraHead), 5), [TARGET.project((final + last) / 2)[0]]) < 1e-5


@pytest.mark.parametrize("kind", [MedusaHead, HydraHead, CloverHead, ChimeraHead, EAGLE3Head])
def test_siblings_in_another_order_say_the_same_and_may_be_asked_again(kind: type[DraftHead]) -> None:
    head = made(kind, 0.3)
    states = TARGET.forward(Batch([Segment.chunk(TEXT, TARGET.new_cache())]), taps=head.taps).hidden
    memory = head.begin()
    root = head.read(memory, states, torch.tensor([*TEXT[1:], 8]), np.arange(len(TEXT)))
    reading = HeadReading(head, memory, root=Heard(root))
    found = {}
    for tokens in ([7, 9, 4, 2], [9, 7, 4, 2], [9, 7, 4, 2]):
        # What was told is not kept: a path that is asked for again is read again, after the text alone.
        tree = DraftTree(np.array([8, *tokens]), np.array([-1, 0, 0, 1, 2] if tokens[0] == 7 else [-1, 0, 0, 2, 1]))
        for nodes in ([1, 2], [3, 4]):
            for node, logits in zip(nodes, reading.after(tree, nodes), strict=True):
                path = tuple(tree.tokens[tree.path(node)].tolist())
                assert torch.equal(found.setdefault(path, logits), logits) or apart([found[path]], [logits]) < 1e-9
    assert len(found) == 4


def test_the_best_tree_of_measured_rates_is_the_best_of_all() -> None:
    rates = ((0.6, 0.2, 0.1), (0.5, 0.3), (0.4, 0.35))
    worth = {
        (*path, rank): 0.0
        for depth in range(3)
        for path in ([()], [(a,) for a in range(3)], [(a, b) for a in range(3) for b in range(2)])[depth]
        for rank in range(len(rates[depth]))
    }
    for path in worth:
        worth[path] = float(np.prod([rates[depth][rank] for depth, rank in enumerate(path)]))
    best = sorted(worth.values(), reverse=True)
    for nodes in range(1, len(worth) + 1):
        for depth in (1, 2, 3):
            shape = calibrated(rates, nodes, depth)
            taken = [shape._path(place) for place in range(1, len(shape) + 1)]
            allowed = [value for path, value in worth.items() if len(path) <= depth]
            best = sorted(allowed, reverse=True)[:nodes]
            assert sorted((worth[path] for path in taken), reverse=True) == pytest.approx(best)
            assert max(map(len, taken)) <= depth
    # Where a guess was never right, nothing is put.
    assert len(calibrated(((0.5, 0.0), (0.0,)), 9, 9)) == 1


def test_a_head_fills_the_tree_of_the_rates_it_was_measured_with() -> None:
    head = made(MedusaHead, 0.3).trained
    drafter = Medusa(replace(head, facts={"rates": [[0.6, 0.3, 0.0], [0.5, 0.1]]}))
    engine = Engine(TARGET)
    seq = engine.submit(Request(TEXT, max_new_tokens=20, drafter=drafter))
    while not seq.position:
        engine.step()
    for nodes, counts in ((9, [1, 2, 4]), (3, [1, 2, 1])):
        tree = run_sync(drafter.propose(seq, Budget(nodes, 9)))
        assert np.bincount(tree.depths).tolist() == counts
    # Rates that no one measured: the published tree of EAGLE, as deep as there are heads.
    other = replace(drafter, head=head)
    seq.states[other] = seq.states[drafter]
    assert run_sync(other.propose(seq, Budget(80, 9))).depths.max() <= 4


def test_the_shape_of_a_head_is_named_with_its_kind() -> None:
    assert head_named("hydra:prefix=true") == (HydraHead, {"prefix": True})
    assert head_named("medusa") == (MedusaHead, {})
    with pytest.raises(SettingsError, match="medusa has no setting 'prefix'; it has no settings"):
        head_named("medusa:prefix=true")
    with pytest.raises(SettingsError, match="hydra: prefix=2 is not true or false"):
        head_named("hydra:prefix=2")
