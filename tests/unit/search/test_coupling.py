"""Couplings, bottleneck maps, and messages that come back exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.belief import Belief, join, split
from decodery.search.coupling import Coupling, DecodedMessage
from decodery.search.mec import bottleneck, couple, entropy
from decodery.testing import TableModel, chi_square, tiny_transformer, to_int8
from decodery.testing.models import Counted

INT8 = to_int8(tiny_transformer(5, dtype=torch.float32))


def laws(count: int, most: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    found = [
        random.dirichlet(np.full(random.integers(1, most + 1), random.choice([0.1, 0.5, 5.0]))) for _ in range(count)
    ]
    return [np.eye(4)[2], np.full(6, 1 / 6), *found]


def test_couplings_have_their_marginals_and_little_entropy() -> None:
    for p, q in zip(laws(300, 12), laws(300, 40)[::-1], strict=True):
        joint = couple(p, q)
        assert np.abs(joint.sum(1) - p).max() < 1e-12 and np.abs(joint.sum(0) - q).max() < 1e-12
        assert np.count_nonzero(joint) <= len(p) + len(q) - 1
        assert entropy(joint.ravel()) <= max(entropy(p), entropy(q)) + 1 + 1e-9


def binary(p: float) -> float:
    return entropy(np.array([p, 1 - p]))


def test_bottleneck_maps_stay_within_the_rate_and_the_published_gap() -> None:
    random = np.random.default_rng(1)
    for p in laws(1000, 30):
        rate = random.uniform(0, entropy(p) + 0.2)
        labels = bottleneck(p, rate)
        kept = entropy(np.bincount(labels, weights=p))
        assert kept <= rate + 1e-6
        second = np.sort(p)[::-1][1] if len(p) > 1 else 0.0
        # No map keeps more than the rate, nor than there is.
        assert min(rate, entropy(p)) - kept <= binary(second) + 1e-6
        assert set(labels) == set(range(labels.max() + 1))


def run(model, coupling: Coupling, seed: int = 0, **settings) -> list[int]:
    (seq,) = coupling.run(Engine(model), Request([3, 1], **{"max_new_tokens": 200, "seed": seed} | settings))
    return seq.generated


def read(model, coupling: Coupling, tokens: list[int], length: int, **settings) -> DecodedMessage:
    return coupling.read(Engine(model, prefill_chunk=5), Request([3, 1], **settings), tokens, length)


@pytest.mark.parametrize("settings", [
    {}, {"merge": False}, {"bits": 2}, {"bits": 1, "top_k": 5}, {"temperature": 0.4}, {"rate": 0.3, "compress": "step"},
    {"key": "secret", "ending": "eos"},
])  # fmt: skip
def test_messages_come_back(settings) -> None:
    random, coupling = np.random.default_rng(2), Coupling(**{"key": "k"} | settings)
    for number in range(6):
        message = random.bytes(int(random.integers(1, 8)))
        model = INT8 if number % 2 else TableModel(12, order=2, seed=number, spread=1.5)
        written = Coupling(message, **{"key": "k"} | settings)
        requests = {"eos_ids": (7,)}
        tokens = run(model, written, seed=number, **requests)
        found = read(model, coupling, tokens, len(message), **requests)
        assert found.message == message and found.certainty > 1 - 1e-6


def test_the_reader_takes_long_passes_where_they_change_nothing() -> None:
    message = bytes(range(200, 240))
    tokens = run(INT8, Coupling(message))
    assert len(tokens) > 65

    counted = Counted(INT8)
    assert read(counted, Coupling(), tokens, len(message)).message == message
    assert counted.rows == [2, 64, len(tokens) - 65]


def marginal(belief: Belief, p: np.ndarray, value: int) -> np.ndarray:
    """The law of the sender's next token for one message value, without merging."""
    found = np.zeros(len(p))

    def pick(group, joint, block) -> int:
        column = joint[:, 0] if block is None else joint[:, value]
        found[group] = column / column.sum()
        return 0

    belief.follow(p, pick)
    return found


@pytest.mark.parametrize(("compress", "rate"), [("once", 1.0), ("step", 0.4)])
def test_averaged_over_messages_tokens_follow_the_law(compress, rate: float) -> None:
    """At every step of every possible text: the sender's law, weighted by what is believed of the message."""
    model = TableModel(4, order=2, seed=3)

    def visit(prefix: list[int], depth: int) -> None:
        p = model.logits([1, *prefix]).softmax(-1).numpy()

        def belief() -> Belief:
            fresh = Belief(1, 4, rate, compress, merge=False)
            for n, token in enumerate(prefix):
                q = model.logits([1, *prefix[:n]]).softmax(-1).numpy()
                fresh.follow(q, lambda group, joint, block, token=token: token)
            return fresh

        posterior = belief().posteriors[0]
        mixed = sum(weight * marginal(belief(), p, value) for value, weight in enumerate(posterior) if weight > 0)
        assert np.abs(mixed - p).max() < 1e-12
        if depth:
            for token in range(4):
                visit([*prefix, token], depth - 1)

    visit([], 3)


@pytest.mark.parametrize("compress", ["once", "step"])
def test_with_merging_too_tokens_follow_the_law(compress) -> None:
    """Over uniform messages and the sender's chance, for two tokens in turn."""
    random, counts = np.random.default_rng(4), np.zeros((9, 5))
    first, second = random.dirichlet(np.full(9, 0.4)), random.dirichlet(np.full(5, 1.0))
    for _ in range(2000):
        belief, values = (
            Belief(2, 3, 0.6 if compress == "step" else 1.0, compress, merge=True),
            random.integers(0, 8, 2),
        )

        def pick(group, joint, block, values=values) -> int:
            column = joint[:, 0] if block is None else joint[:, values[block]]
            return int(random.choice(len(group), p=column / column.sum()))

        counts[belief.follow(first, pick), belief.follow(second, pick)] += 1
    law = np.outer(first, second).ravel()
    assert chi_square(counts.ravel(), law) > 1e-4
    # The test has power: a law that is a little flatter is told apart.
    flatter = law**0.8 / (law**0.8).sum()
    assert chi_square(counts.ravel(), flatter) < 1e-4


def test_a_lower_rate_tells_less_and_a_higher_one_more() -> None:
    right = []
    for rate in (0.25, 0.6, 1.0):
        hits = 0
        for number in range(10):
            message = np.random.default_rng(number).bytes(3)
            model = TableModel(12, order=2, seed=1, spread=1.5)
            found = read(model, Coupling(rate=rate), run(model, Coupling(message, rate=rate), number), 3)
            hits += sum(a == b for a, b in zip(found.message, message, strict=True))
            assert found.certainty < 1 or found.message == message
        right.append(hits)
    assert right[0] < right[1] < right[2] == 30


def test_blocks_are_taken_apart_and_joined() -> None:
    message = bytes([0, 255, 18, 7])
    for bits in (1, 2, 4, 8):
        blocks = split(message, bits)
        assert len(blocks) == 32 // bits and join(blocks, bits) == message
    assert split(b"\x12", 4).tolist() == [1, 2]


def test_wrong_settings_do_not_read_the_message() -> None:
    message = b"attack at dawn"
    tokens = run(INT8, Coupling(message, key="right"))
    assert read(INT8, Coupling(key="right"), tokens, 14).message == message
    assert read(INT8, Coupling(key="wrong"), tokens, 14).message != message
    with pytest.raises(SettingsError, match="could not have been written like this"):
        read(INT8, Coupling(key="right", top_k=2), tokens, 14)
    assert read(INT8, Coupling(key="right"), tokens[:8], 14).certainty < 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coupling(top_k=1), "top_k to 2"),
        (lambda: Coupling(temperature=0.0), "temperature"),
        (lambda: Coupling(rate=1.5), "rate"),
        (lambda: Coupling(bits=3), "1, 2, 4, 8"),
        (lambda: run(INT8, Coupling()), "needs a message"),
        (lambda: run(INT8, Coupling(b"much too long a message"), max_new_tokens=5), "allow more tokens"),
        (lambda: run(INT8, Coupling(b"a"), sampler=Sampler.from_settings(temperature=1.0)), "use temperature 0"),
        (lambda: read(INT8, Coupling(), [1], 0), "at least one byte"),
        (lambda: read(INT8, Coupling(), [], 1), "no text to read"),
    ],
)
def test_what_it_cannot_do_is_refused(make, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()
