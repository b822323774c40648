"""A draft head in one native call: the same bits as its parts one by one, summed in the kernels' order."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch

from decodery.core.errors import NumericalError
from decodery.core.native.kernels import choose, kernel_sets, library
from decodery.core.topk import most_likely, topk
from decodery.models.native.int4 import Int4Linear
from decodery.models.torch import portable
from decodery.speculative.drafters.advice import WIDTH
from decodery.speculative.drafters.eagle_3 import EAGLE3Head
from decodery.speculative.heads import parts
from decodery.speculative.heads.grown import Nodes
from decodery.speculative.heads.head import Seen, TrainedHead
from decodery.speculative.heads.parts import Parts
from decodery.testing import tiny_transformer
from decodery.testing.models import to_int8

PLAIN = tiny_transformer(0, num_layers=4, hidden_size=96, vocab_size=200)
# Numbers that bfloat16 holds, too.
PLAIN.weights.embedding = PLAIN.weights.embedding.bfloat16().double()
TARGET = to_int8(PLAIN)
WORDS = torch.arange(0, 200, 3, dtype=torch.int32)
RANDOM = torch.Generator().manual_seed(5)
ROWS = 70
"""So many that attention's blocks of values and the room for keys both run over."""
STATES = torch.randn(3, ROWS, 96, generator=RANDOM)
TOKENS = torch.randint(0, 200, (ROWS,), generator=RANDOM)


def trained(bits: int, **settings: bool) -> TrainedHead:
    tensors, own = EAGLE3Head.untrained(PLAIN, 0)
    random = torch.Generator().manual_seed(3)
    shaken = {
        name: (each + 0.3 * torch.randn(each.shape, generator=random, dtype=each.dtype) / each.shape[-1] ** 0.5).float()
        for name, each in tensors.items()
    }
    found = Parts(shaken).quantized()
    if bits == 4:
        for name in [name for name in found if found[name].dtype == torch.int8]:
            stem = name.removesuffix("weight")
            del found[f"{stem}scale"]
            layer = Int4Linear.quantize(shaken[name])
            found |= {name: layer.weight, f"{stem}step": layer.step, f"{stem}least": layer.least}
    return TrainedHead("eagle-3", found | {"vocabulary": WORDS}, own | settings)


def by_parts(head: EAGLE3Head) -> EAGLE3Head:
    """The same head, in PyTorch's operations one by one."""
    other = EAGLE3Head(head.trained, TARGET)
    other.__dict__["native"] = None
    return other


def drafted(head: EAGLE3Head) -> list[torch.Tensor]:
    """Logits and features of a text read in pieces, then of a tree's levels, then of text over them."""
    memory, found, first = head.begin(), [], 0

    def read(end: int) -> None:
        nonlocal first
        states = {tap: STATES[place, first:end] for place, tap in enumerate(head.taps)}
        found.append(head.read(memory, states, TOKENS[first:end], np.arange(first, end)))
        found.append(memory.last)
        first = end

    for end in (40, 41, 66):
        read(end)
    fork = deepcopy(memory)
    above, ones = np.array([-1, -1, -1]), np.ones(3, dtype=np.int64)
    found.append(head.grow(memory, torch.tensor([7, 8, 9]), above, ones, np.eye(3, dtype=bool)))
    below = np.array([[1, 0, 0, 1, 0], [0, 0, 1, 0, 1]], dtype=bool)
    found.append(head.grow(memory, torch.tensor([11, 12]), np.array([0, 2]), 2 * ones[:2], below))
    found.append(memory.rows)
    read(ROWS)
    # Rows of the tree left nothing after.
    states = {tap: STATES[place, 66:ROWS] for place, tap in enumerate(head.taps)}
    assert torch.equal(head.read(fork, states, TOKENS[66:ROWS], np.arange(66, ROWS)), found[-2])
    return found


@pytest.fixture
def in_order(monkeypatch):
    """The order of the kernels' sums for PyTorch's operations."""

    def attend(queries, keys, values, seen, scale):
        every = np.ones((len(queries), keys.shape[1]), dtype=bool) if seen is None else seen.numpy()
        return portable.attend(queries * scale, keys, values, [np.flatnonzero(row) for row in every])[0]

    monkeypatch.setattr(parts, "attend", attend)
    monkeypatch.setattr(parts, "silu", portable.silu)
    monkeypatch.setattr(parts, "rms_norm", lambda rows, _, weight, eps: portable.rms_norm(rows, weight, eps))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("norm_first", [False, True])
def test_one_call_gives_the_bits_of_the_parts(bits, norm_first, in_order) -> None:
    head = EAGLE3Head(trained(bits, norm_before_residual=norm_first), TARGET)
    lib = library()
    assert lib is not None and head.native is not None
    expected = drafted(by_parts(head))
    try:
        for kernels, threads in [(name, 1) for name in kernel_sets()] + [(kernel_sets()[0], 3)]:
            choose(kernels)
            lib.decodery_threads(threads)
            found = drafted(head)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (kernels, threads)
        # However embeddings are kept, or where they have to be made.
        for table in (TARGET.weights.embedding.bfloat16(), None):
            head.native._table = table
            assert all(torch.equal(a, b) for a, b in zip(drafted(head), expected, strict=True))
    finally:
        choose(kernel_sets()[0])
        lib.decodery_threads(torch.get_num_threads())


def test_several_texts_in_one_call_get_the_bits_of_each_alone() -> None:
    head, calls = EAGLE3Head(trained(8), TARGET), 0
    native = head.native
    assert native is not None

    def counted(*rows, **settings):
        nonlocal calls
        calls += 1
        return native(*rows, **settings)

    head.__dict__["native"] = counted
    bounds = [(0, 5), (3, 40), (60, 61)]
    seen = [
        [
            Seen(
                {tap: STATES[place] for place, tap in enumerate(head.taps)},
                range(first, end),
                TOKENS[first:end].tolist(),
                first,
            )
        ]
        for first, end in bounds
    ]
    nodes = [
        (torch.arange(n), -np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64), np.eye(n, dtype=bool))
        for n in (2, 1, 3)
    ]
    memories = [head.begin() for _ in seen]
    heard = head.hear_all(list(zip(memories, seen, strict=True)))
    grown = head.grow_all([Nodes(memory, *own) for memory, own in zip(memories, nodes, strict=True)])
    assert calls == 2
    for number, memory in enumerate(memories):
        alone = head.begin()
        expected = head.hear(alone, seen[number])
        assert torch.equal(expected.logits, heard[number].logits) and expected.best == heard[number].best
        assert torch.equal(head.grow(alone, *nodes[number]), grown[number])
        assert torch.equal(alone.rows, memory.rows) and torch.equal(alone.last, memory.last)


def test_one_call_is_near_what_pytorch_makes_of_the_parts() -> None:
    """Rounding to int8 turns a difference in the last bit into one of 1/127 here and there."""

    def apart(one: EAGLE3Head, other: EAGLE3Head) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(drafted(one), drafted(other), strict=True))

    head = EAGLE3Head(trained(8), TARGET)
    assert apart(head, by_parts(head)) < 0.1
    assert apart(head, EAGLE3Head(trained(8, norm_before_residual=True), TARGET)) > 0.3


def test_what_was_seen_in_passes_is_read_where_it_lies() -> None:
    """Rows of several passes, some of which became text; the most likely tokens come with the call."""
    head = EAGLE3Head(trained(8), TARGET)
    hidden = {tap: STATES[place] for place, tap in enumerate(head.taps)}
    chain, path = Seen(hidden, range(20), TOKENS[:20].tolist(), 0), [20, 22, 25]
    heard = head.hear(memory := head.begin(), [chain, Seen(hidden, path, TOKENS[path].tolist(), 20)])
    rows, other = [*range(20), *path], head.begin()
    read = {tap: states[rows] for tap, states in hidden.items()}
    assert torch.equal(heard.logits, head.read(other, read, TOKENS[rows], np.arange(23)))
    assert torch.equal(memory.held.read(0, 23), other.held.read(0, 23))
    ids, chances = most_likely(heard.logits[None], WIDTH)
    assert heard.best == (WORDS.numpy()[ids[0]].tolist(), chances[0].tolist())
    assert by_parts(head).hear(head.begin(), [chain]).best is None
    hidden[head.taps[0]] = STATES[0].clone()
    hidden[head.taps[0]][7, 3] = torch.nan
    with pytest.raises(NumericalError, match="NaN"):
        head.hear(head.begin(), [chain])


def test_heads_that_learn_or_are_wider_run_by_parts() -> None:
    tensors, settings = EAGLE3Head.untrained(PLAIN, 0)
    assert EAGLE3Head(TrainedHead("eagle-3", tensors, settings), PLAIN).native is None
    # The target's own words are in floating point.
    assert EAGLE3Head(trained(8), PLAIN).native is None


def test_the_most_likely_and_their_probabilities() -> None:
    for rows, vocab, k in ((1, 6144, 8), (3, 37, 5), (2, 4, 9)):
        logits = 5 * torch.randn(rows, vocab, generator=RANDOM)
        logits[0, 1] = -torch.inf
        ids, chances = most_likely(logits, k)
        expected = logits.double().softmax(dim=-1).numpy()
        assert (ids == topk(logits, k)[0]).all()
        assert np.abs(chances - np.take_along_axis(expected, ids, axis=1)).max() < 1e-6
        assert np.abs(most_likely(logits.double(), k)[1] - chances).max() < 1e-6
    logits[1, 2] = torch.nan
    with pytest.raises(NumericalError, match="NaN"):
        most_likely(logits, 2)
