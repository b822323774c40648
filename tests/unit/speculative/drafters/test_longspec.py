"""LongSpec: a window of its own, the target's past, and positions as in long texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.speculative.drafters.longspec import LongSpec, LongSpecHead
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.trees.eagle_2 import EAGLE2
from decodery.testing import check_identical, tiny_transformer

TARGET = tiny_transformer(0, num_layers=3, max_positions=4096)
WINDOW = 4
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def trained(window: int = WINDOW) -> TrainedHead:
    """Random numbers everywhere, and a short window."""
    tensors, about = LongSpecHead.untrained(TARGET, seed=0)
    random = torch.Generator().manual_seed(1)
    shaken = {
        name: each + 0.3 * torch.randn(each.shape, generator=random, dtype=each.dtype) / each.shape[-1] ** 0.5
        for name, each in tensors.items()
    }
    return TrainedHead("longspec", shaken, {"layer": about["layer"] | {"window": window}})


def states(tokens: list[int]) -> dict[int | str, torch.Tensor]:
    return TARGET.forward(Batch([Segment.chunk(tokens, TARGET.new_cache())]), taps=(-2,)).hidden


def read(head: LongSpecHead, tokens: list[int], pieces: list[int]):
    every, memory, first = states(tokens)[-2], head.begin(), 0
    for end in pieces:
        own = torch.tensor(tokens[first + 1 : end + 1])
        logits = head.read(memory, {-2: every[first:end]}, own, np.arange(first, end))
        first = end
    return memory, logits


def grown(head: LongSpecHead, memory) -> torch.Tensor:
    place = np.array([-1]), np.array([1]), np.ones((1, 1), dtype=bool)
    return head.grow(memory, torch.tensor([7]), *place)


def test_steps_are_those_of_training_at_any_window() -> None:
    for window in (1, 3, 100):
        head, steps = LongSpecHead(trained(window), TARGET), 3
        n = len(TEXT) - steps
        guesses = head.unroll({-2: states(TEXT)[-2][None, :n]}, torch.tensor([TEXT[1:]]), steps)
        for end in range(1, n + 1):
            memory, logits = read(head, TEXT, [*range(2, end, 3), end])
            drafted = [logits]
            for step in range(1, steps):
                place = np.array([step - 2]), np.array([step]), np.ones((1, step), dtype=bool)
                drafted.append(head.grow(memory, torch.tensor([TEXT[end + step]]), *place)[0])
            for guess, found in zip(guesses, drafted, strict=True):
                expected = head.project(guess.spoken[0, end - 1 : end])[0]
                assert float((expected - found).abs().max()) < 1e-9


def test_its_own_memory_is_a_window() -> None:
    head = LongSpecHead(trained(), TARGET)
    whole, logits = read(head, TEXT, [5, 6, 13])
    assert whole.held.length == WINDOW + 1
    assert whole.past.length == 13
    # A head that never saw what lies before the window says the same, where the target's past is the same.
    short = head.begin()
    short.past = whole.past
    first = 13 - WINDOW - 1
    found = head.read(short, {}, torch.tensor(TEXT[first + 1 : 14]), np.arange(first, 13))
    assert float((found - logits).abs().max()) < 1e-12
    assert float((grown(head, short) - grown(head, whole)).abs().max()) < 1e-12
    # Its last token alone is another matter.
    alone = head.begin()
    alone.past = whole.past
    found = head.read(alone, {}, torch.tensor(TEXT[13:14]), np.arange(12, 13))
    assert float((found - logits).abs().max()) > 1e-3


def test_the_past_is_that_of_the_targets_cache() -> None:
    head = LongSpecHead(trained(), TARGET)
    memory, _ = read(head, TEXT, [11])
    cache = TARGET.new_cache()
    TARGET.forward(Batch([Segment.chunk(TEXT[:11], cache)]))
    cache.keep(range(11))
    for own, kept in zip(memory.past.read(0, 11), cache.view(TARGET.config.num_layers - 1), strict=True):
        assert float((own - kept).abs().max()) < 1e-12
    expected = grown(head, memory)
    memory.cache = cache
    assert float((grown(head, memory) - expected).abs().max()) < 1e-12
    memory.cache.truncate(9)
    assert float((grown(head, memory) - expected).abs().max()) > 1e-3


def test_training_puts_short_texts_at_random_positions() -> None:
    head, steps = LongSpecHead(trained(), TARGET), 2
    n, tokens = len(TEXT) - steps, torch.tensor([TEXT[1:]])
    given = {-2: states(TEXT)[-2][None, :n]}
    plain = head.unroll(given, tokens, steps)
    for tensor in head.parts.tensors.values():
        tensor.requires_grad_(True)
    positions = head._positions(n, tokens)
    anchors = int((positions == np.arange(n)).sum())
    assert anchors <= 4 and n <= positions[-1] < TARGET.config.max_positions
    assert (np.diff(positions[anchors:]) == 1).all()
    learned = head.unroll(given, tokens, steps)
    assert torch.equal(learned[1].spoken, head.unroll(given, tokens, steps)[1].spoken)
    with torch.no_grad():
        assert torch.equal(head.unroll(given, tokens, steps)[1].spoken, plain[1].spoken)
        assert float((learned[1].spoken - plain[1].spoken).abs().max()) > 1e-6
    head.project(learned[1].spoken.flatten(0, 1)).logsumexp(dim=-1).sum().backward()
    for part, tensor in head.parts.tensors.items():
        assert tensor.grad is not None and float(tensor.grad.abs().max()) > 0, part


@pytest.mark.parametrize("length", [3, 700])
def test_texts_are_those_of_plain_decoding(length: int) -> None:
    prompt = [(7 * place * place + 3) % 64 for place in range(length)]
    drafter = LongSpec(trained(16), tree_policy=EAGLE2(nodes=6, width=3, depth=3))
    check_identical(TARGET, [prompt], drafter=drafter, max_new_tokens=12, seeds=(0,))
    engine = Engine(TARGET)
    seq = engine.submit(Request(prompt, max_new_tokens=12, drafter=drafter))
    while not seq.finished:
        engine.step()
    memory = seq.states[seq.request.drafter].memory
    assert memory.past.length == 0 and memory.held.length <= 17
