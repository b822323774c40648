"""Heads that guess the target's next states: EAGLE, FSPAD and Falcon."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.eagle import EAGLEHead
from decodery.speculative.drafters.falcon import FalconHead
from decodery.speculative.drafters.fspad import FSPADHead
from decodery.speculative.heads.drafter import head_kind
from decodery.speculative.heads.grown import DraftHead
from decodery.speculative.heads.head import Guess, Heard, TrainedHead
from decodery.speculative.heads.matching import LAST, mismatch
from decodery.speculative.heads.reading import HeadReading
from decodery.step.draft_tree import DraftTree
from decodery.testing import tiny_transformer

TARGET = tiny_transformer(0, num_layers=3)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def head_of(kind: type[DraftHead], seed: int = 1, **settings: object) -> DraftHead:
    """A head with random numbers everywhere."""
    tensors, about = kind.untrained(TARGET, seed=0)
    random = torch.Generator().manual_seed(seed)
    shaken = {
        name: each + 0.3 * torch.randn(each.shape, generator=random, dtype=each.dtype) / each.shape[-1] ** 0.5
        for name, each in tensors.items()
    }
    return kind(TrainedHead(kind.kind, shaken, about | settings), TARGET)


def states() -> torch.Tensor:
    return TARGET.forward(Batch([Segment.chunk(TEXT, TARGET.new_cache())]), taps=(LAST,)).hidden[LAST]


def read(head: DraftHead, end: int) -> tuple[object, torch.Tensor]:
    memory = head.begin()
    return memory, head.read(memory, {LAST: states()[:end]}, torch.tensor(TEXT[1 : end + 1]), np.arange(end))


def unrolled(head: DraftHead, steps: int) -> list[Guess]:
    n = len(TEXT) - steps
    return head.unroll({LAST: states()[None, :n]}, torch.tensor([TEXT[1:]]), steps)


def test_eagle_is_one_layer_over_states_and_the_tokens_chosen_after_them() -> None:
    """Against the formula, written out item by item without a cache."""
    head, n = head_of(EAGLEHead), 9
    parts, shape = head.parts, head.layer.shape
    items = torch.cat((TARGET.embed_tokens(torch.tensor(TEXT[1 : n + 1])), TARGET.final_norm(states()[:n])), dim=1)
    rows = items @ parts["fc.weight"].T + parts["fc.bias"]
    fused = (rows @ parts["layer.qkv.weight"].T).view(n, -1, shape.head_dim)
    frequencies = shape.theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
    angles = torch.outer(torch.arange(n).double(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        found = torch.complex(*heads.chunk(2, dim=-1)) * turns
        return torch.cat((found.real, found.imag), dim=-1)

    group = shape.heads // shape.kv_heads
    queries, keys = turned(fused[:, : shape.heads])[-1], turned(fused[:, shape.heads : shape.heads + shape.kv_heads])
    context = []
    for number in range(shape.heads):
        own = number // group
        weights = (keys[:, own] @ queries[number] / shape.head_dim**0.5).softmax(dim=0)
        context.append(weights @ fused[:, shape.heads + shape.kv_heads + own])
    stream = rows[-1] + parts["layer.output.weight"] @ torch.cat(context)
    normed = stream / (stream.square().mean() + shape.eps).sqrt() * parts["layer.mlp_norm.weight"]
    gate, up = (parts["layer.gate_up.weight"] @ normed).chunk(2)
    guessed = stream + parts["layer.down.weight"] @ (torch.nn.functional.silu(gate) * up)
    _, found = read(head, n)
    assert float((found - TARGET.project(guessed[None])[0]).abs().max()) < 1e-9


def test_untrained_eagle_repeats_what_the_target_said() -> None:
    tensors, about = EAGLEHead.untrained(TARGET, seed=0)
    head = EAGLEHead(TrainedHead("eagle", tensors, about), TARGET)
    scores = TARGET.forward(Batch([Segment.chunk(TEXT, TARGET.new_cache())]))
    assert float((read(head, 7)[1] - scores.logits[6]).abs().max()) < 1e-9


def test_fspad_without_its_narrow_half_does_not_hear_the_token() -> None:
    head = head_of(FSPADHead)
    said = [read(head, 9)[1]]
    for name, deaf in (("narrow.weight", True), ("gate.weight", False)):
        other = head_of(FSPADHead)
        other.parts.tensors[name].zero_()
        memory, _ = read(other, 9)
        grown = [
            other.grow(memory, torch.tensor([token]), np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool))
            for token in (7, 8)
        ]
        # Without a gate nothing of the token comes through either.
        assert torch.equal(*grown), (name, deaf)
        said.append(grown[0])
    memory, _ = read(head, 9)
    grown = [
        head.grow(memory, torch.tensor([token]), np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool))
        for token in (7, 8)
    ]
    assert float((grown[0] - grown[1]).abs().max()) > 1e-3


def test_fspad_with_one_vector_for_both_is_a_layer_that_guesses_states() -> None:
    head = head_of(FSPADHead)
    apart = unrolled(head, 2)
    assert float((apart[0].features - apart[0].spoken).abs().max()) > 1e-3
    for name in ("feature.weight", "word.weight"):
        head.parts.tensors[name].copy_(torch.eye(TARGET.config.hidden_size))
    same = unrolled(head, 2)
    assert all(torch.equal(each.features, each.spoken) for each in same)
    # The matrices are all that stands between the two.
    again = head_of(FSPADHead)
    expected = same[0].spoken @ again.parts["word.weight"].T
    assert float((expected - apart[0].spoken).abs().max()) < 1e-9


def test_falcon_of_single_items_without_memory_is_eagle() -> None:
    class Linear(FalconHead):
        def recur(self, items: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self.parts.linear("fc")(items.flatten(0, 1)).view(*items.shape[:2], -1)
            return rows, states[:, None].expand(-1, items.shape[1], -1, -1, -1)

    eagle = head_of(EAGLEHead)
    falcon = Linear(TrainedHead("falcon", eagle.parts.tensors, {**eagle.trained.settings, "block": 1}), TARGET)
    for one, other in zip(unrolled(eagle, 4), unrolled(falcon, 4), strict=True):
        assert float((one.features - other.features).abs().max()) < 1e-9
    tree = DraftTree(np.array([TEXT[8], 7, 9, 4, 2, 6]), np.array([-1, 0, 0, 1, 2, 3]))
    found = []
    for head in (eagle, falcon):
        memory, logits = read(head, 8)
        reading = HeadReading(head, memory, root=Heard(logits))
        found.append(torch.cat([logits[None], reading.after(tree, [1, 2]), reading.after(tree, [3, 4, 5])]))
    assert float((found[0] - found[1]).abs().max()) < 1e-9


@pytest.mark.parametrize("block", [1, 2, 3])
def test_falcon_drafts_what_it_was_unrolled_to_whatever_its_block(block: int) -> None:
    head, steps = head_of(FalconHead, block=block), 7
    guesses = unrolled(head, steps)
    for end in range(1, len(TEXT) - steps + 1):
        memory, logits = read(head, end)
        drafted = [logits]
        for depth in range(1, steps):
            row, mask = np.array([depth - 2]), np.ones((1, depth), dtype=bool)
            drafted.append(head.grow(memory, torch.tensor([TEXT[end + depth]]), row, np.array([depth]), mask)[0])
        for guess, found in zip(guesses, drafted, strict=True):
            expected = head.project(guess.spoken[0, end - 1 : end])[0]
            assert float((expected - found).abs().max()) < 1e-9


def test_falcon_asks_its_layer_once_for_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    head, passes = head_of(FalconHead), 0
    plain = FalconHead._behind

    def counted(self: FalconHead, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return plain(self, rows, context)

    monkeypatch.setattr(FalconHead, "_behind", counted)
    memory, logits = read(head, 8)
    reading = HeadReading(head, memory, root=Heard(logits))
    for depth in range(1, 6):
        reading.after(DraftTree.chain(TEXT[8], TEXT[9 : 9 + depth]), [depth])
    assert passes == 3


@pytest.mark.parametrize("name", ["eagle", "fspad", "falcon"])
def test_nodes_that_are_asked_about_again_are_read_again(name: str) -> None:
    head = head_of(head_kind(name))
    memory, logits = read(head, 8)
    reading = HeadReading(head, memory, root=Heard(logits))
    tree = DraftTree(np.array([TEXT[8], 7, 9, 4, 2]), np.array([-1, 0, 0, 1, 2]))
    first = [reading.after(tree, [1, 2]), reading.after(tree, [3, 4])]
    again = [reading.after(tree, [1, 2]), reading.after(tree, [3, 4])]
    assert all(float((one - other).abs().max()) < 1e-9 for one, other in zip(first, again, strict=True))


def test_states_are_matched_with_the_one_behind_each_guess() -> None:
    random = torch.Generator().manual_seed(0)
    features, known = torch.randn(2, 6, 4, generator=random), torch.ones(2, 6, dtype=torch.bool)
    known[1, 4:] = False
    right = [Guess(features, features.roll(-step, dims=1)) for step in (1, 2)]
    assert float(mismatch(right, features, known)) == 0
    off = [Guess(features, features)]
    expected = smooth_l1_loss(
        torch.cat((features[0, :5], features[1, :3])), torch.cat((features[0, 1:], features[1, 1:4]))
    )
    assert float((mismatch(off, features, known) - expected).abs()) < 1e-6


@pytest.mark.parametrize("name", ["eagle", "fspad"])
def test_a_head_learns_a_short_text_by_heart_to_the_second_token(name: str) -> None:
    """The noise on its inputs must be less than the inputs themselves, however short a text is."""
    tensors, about = head_kind(name).untrained(TARGET, seed=0)
    head = head_kind(name)(TrainedHead(name, tensors, about), TARGET)
    parameters = list(head.parts.tensors.values())
    for tensor in parameters:
        tensor.requires_grad_(True)
    moves = [torch.zeros_like(tensor) for tensor in parameters]
    n = len(TEXT) - 2
    known, rows = torch.ones(1, n, dtype=torch.bool), {LAST: states()[None, :n]}
    expected = TARGET.forward(Batch([Segment.chunk(TEXT, TARGET.new_cache())])).logits.argmax(dim=-1)
    for _ in range(40):
        (guess,) = head.unroll({LAST: states()[None, : n + 1]}, torch.tensor([TEXT[1:]]), 1)
        words = head.project(guess.spoken[0, :n])
        loss = torch.nn.functional.cross_entropy(words, expected[1 : n + 1]) + head.regret(
            [Guess(guess.spoken[:, :n], guess.features[:, :n])], rows, known
        )
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for tensor, move, gradient in zip(parameters, moves, gradients, strict=True):
                move.mul_(0.9).add_(gradient / (gradient.norm() + 1e-6))
                tensor.sub_(0.02 * move * tensor.shape[0] ** 0.5)
    with torch.no_grad():
        guesses = unrolled(head, 2)
        for depth, each in enumerate(guesses, start=1):
            found = head.project(each.spoken[0]).argmax(dim=-1)
            assert float((found == expected[depth : depth + n]).float().mean()) > 0.6, depth


@pytest.mark.parametrize("name", ["eagle", "fspad", "falcon"])
def test_it_learns_under_noise_and_all_of_it_learns(name: str) -> None:
    head = head_of(head_kind(name))
    still = unrolled(head, 4)
    for tensor in head.parts.tensors.values():
        tensor.requires_grad_(True)
    guesses = unrolled(head, 4)
    assert float((guesses[0].spoken - still[0].spoken).detach().abs().max()) > 1e-3
    assert torch.equal(guesses[0].spoken, unrolled(head, 4)[0].spoken)
    with torch.no_grad():
        assert torch.equal(unrolled(head, 4)[0].spoken, still[0].spoken)
    n = len(TEXT) - 4
    known = torch.ones(1, n, dtype=torch.bool)
    words = head.project(guesses[0].spoken.flatten(0, 1)).logsumexp(dim=-1).sum()
    (words + head.regret(guesses, {LAST: states()[None, :n]}, known)).backward()
    for part, tensor in head.parts.tensors.items():
        assert tensor.grad is not None and float(tensor.grad.abs().max()) > 0, part
