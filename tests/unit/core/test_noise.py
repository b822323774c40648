"""The stateless noise is uniform, independent along every axis, and the same whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from decodery.core import noise

Hash = Callable[[int, int, int, np.ndarray], np.ndarray]
"""(seed, stream, position, tokens [m]) -> uniforms [m]."""


def shipped(seed: int, stream: int, position: int, tokens: np.ndarray) -> np.ndarray:
    return noise.uniform(seed, position, torch.from_numpy(tokens), stream).numpy()


def summed(seed: int, stream: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """A bad hash: it mixes well, but what it mixes is the sum of its arguments."""
    return shipped(seed + stream + position, 0, 0, tokens)


def shifted(seed: int, stream: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """A bad hash: position p sees the numbers of position 0 from token p on."""
    return shipped(seed, stream, 0, tokens + position)


def unfinished(seed: int, stream: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """A bad hash: the additive sequence without its finalizer."""
    key = noise.mix(seed, stream, position) / 2**64
    return (key + tokens * (noise._STEP / 2**64)) % 1.0


def few_bits(seed: int, stream: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """A bad hash: good numbers, rounded to multiples of 1/100."""
    return (np.floor(shipped(seed, stream, position, tokens) * 100) + 0.5) / 100


def worst_p_value(hashed: Hash) -> float:
    """The smallest p-value of all tests on a block [2 seeds, 2 streams, 48 positions, 1024 tokens]."""
    tokens = np.arange(1024)
    block = np.array(
        [[[hashed(s, r, p, tokens) for p in range(48)] for r in (noise.TOKEN, noise.ACCEPT)] for s in (11, 12)]
    )
    tests = [stats.kstest(block.ravel(), "uniform").pvalue]
    tests.append(stats.chisquare(np.histogram(block, bins=256, range=(0, 1))[0]).pvalue)
    tests += [pair_p_value(np.delete(block, 0, axis), np.delete(block, -1, axis)) for axis in range(4)]
    # Along the diagonals of (position, token), where a hash of their sum or difference would repeat itself.
    tests.append(pair_p_value(block[..., 1:, :-1], block[..., :-1, 1:]))
    tests.append(pair_p_value(block[..., 1:, 1:], block[..., :-1, :-1]))
    return min(tests)


def pair_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Chi-square of the joint histogram: any dependence of two neighbours, linear or not."""
    joint = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[[0, 1], [0, 1]])[0]
    return float(stats.chisquare(joint.ravel()).pvalue)


def test_uniform_and_independent_of_all_neighbours() -> None:
    assert worst_p_value(shipped) > 1e-4


@pytest.mark.parametrize("bad", [summed, shifted, unfinished, few_bits])
def test_the_same_tests_catch_a_bad_hash(bad: Hash) -> None:
    assert worst_p_value(bad) < 1e-9


def test_a_changed_input_bit_changes_half_of_the_output() -> None:
    def bits(seed: int, position: int, token: int) -> int:
        return int(noise._bits(seed, position, np.array([token]), noise.TOKEN)[0])

    flipped = []
    for trial in range(40):
        base = (trial * 7919, trial + 3, trial * 31)
        for argument in range(3):
            for bit in range(15):
                changed = list(base)
                changed[argument] ^= 1 << bit
                flipped.append((bits(*base) ^ bits(*changed)).bit_count())
    # 1800 binomial(52, 1/2) counts: their mean has a standard deviation of 0.085.
    assert abs(np.mean(flipped) - 26) < 0.4
    assert min(flipped) > 5


def test_every_bit_is_balanced() -> None:
    bits = noise._bits(5, 9, np.arange(100_000), noise.TOKEN)
    shares = [((bits >> bit) & 1).mean() for bit in range(52)]
    assert max(abs(share - 0.5) for share in shares) < 0.008
    assert bits.max() < 2**52 and bits.min() >= 0


def test_the_hash_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 for the state 1234567.
    state, step = 1234567, noise._STEP
    outputs = [noise._finish((state + k * step) % 2**64) for k in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_values_stay_as_they_are_from_release_to_release() -> None:
    known = noise.uniform(7, 3, torch.tensor([0, 1, 49151])).tolist()
    assert known == [0.6807717817559041, 0.4692369968910727, 0.9459472058524651]
    assert noise.mix(1, 2, 3) == 15020427595393229491


def test_any_subset_order_and_shape_sees_the_same_numbers() -> None:
    tokens = torch.arange(5000)
    uniforms, gumbels = noise.uniform(3, 8, tokens), noise.gumbel(3, 8, tokens)
    some = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:777]
    assert torch.equal(noise.uniform(3, 8, some), uniforms[some])
    assert torch.equal(noise.gumbel(3, 8, some), gumbels[some])
    assert torch.equal(noise.gumbel(3, 8, some[:776].view(8, 97)), gumbels[some[:776]].view(8, 97))
    several = noise.gumbel(3, [9, 8, 8], tokens)
    assert several.shape == (3, 5000) and torch.equal(several[1], gumbels) and torch.equal(several[2], gumbels)
    assert not torch.equal(several[0], gumbels)


def test_the_tensor_arithmetic_of_other_devices_gives_the_same_bits() -> None:
    tokens = torch.tensor([0, 1, 2, 49151, 2**31, 2**62])
    for positions in (4, [4, 0, 123456]):
        expected = noise._bits(-9, positions, tokens.numpy(), noise.RESIDUAL)
        assert np.array_equal(noise._bits(-9, positions, tokens, noise.RESIDUAL).numpy(), expected)


def test_draw_equals_uniform() -> None:
    for seed, position, token, stream in [(0, 0, 0, noise.ACCEPT), (-3, 17, 49151, noise.TOKEN), (2**70 + 1, 5, 8, 3)]:
        tensor = noise.uniform(seed, position, torch.tensor([token]), stream)
        assert noise.draw(seed, position, token, stream) == tensor.item()


def test_the_extremes_are_finite() -> None:
    ends = np.array([0, 2**52 - 1])
    unit, gumbel = noise._unit(ends), noise._gumbel(ends)
    assert 0 < unit[0] < unit[1] < 1
    assert np.isfinite(gumbel).all() and gumbel[1] < noise._MOST


def full_argmax(rows: torch.Tensor, seed: int, positions: list[int]) -> torch.Tensor:
    tokens = torch.arange(rows.shape[1])
    return (rows.double() + noise.gumbel(seed, positions, tokens)).argmax(dim=-1)


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 6.0, 40.0])
@pytest.mark.parametrize("keep", [1, 2, 50, 5000, 20_000])
def test_the_bounded_argmax_is_the_full_one(scale: float, keep: int) -> None:
    generator = torch.Generator().manual_seed(int(scale * 10) + keep)
    rows = torch.randn(12, 20_000, generator=generator) * scale
    rows = rows.masked_fill(torch.rand(rows.shape, generator=generator).argsort(-1) >= keep, -torch.inf)
    positions = [i // 2 for i in range(12)]
    expected = full_argmax(rows, 99, positions)
    assert torch.equal(noise.gumbel_argmax(rows, 99, positions), expected)
    assert torch.equal(noise.gumbel_argmax(rows + 500.0, 99, positions), full_argmax(rows + 500.0, 99, positions))
    singles = [noise.gumbel_argmax(rows[i : i + 1], 99, positions[i : i + 1]) for i in range(12)]
    assert torch.equal(torch.cat(singles), expected)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 40.0])
def test_native_and_other_sweeps_find_the_same(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(150, 3001, generator=torch.Generator().manual_seed(int(scale * 2))) * scale
    rows[:, 7] = -torch.inf
    positions = list(range(150))
    native = noise.gumbel_argmax(rows, 5, positions)
    monkeypatch.setattr(noise, "library", lambda: None)
    assert torch.equal(noise.gumbel_argmax(rows, 5, positions), native)
    if scale < 1:
        # Another stream would have drawn others.
        assert not torch.equal(noise.gumbel_argmax(rows, 5, positions, noise.GUESS), native)


def test_what_logarithms_cannot_tell_apart_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.full(1000, -50.0, dtype=np.float32)
    bits = noise._bits(5, 3, np.arange(1000), noise.TOKEN)
    winner = int(bits.argmax())
    assert noise._raced(np.zeros(1000, dtype=np.float32), 5, 3, noise.TOKEN).tolist() == [winner]
    assert noise._raced(row, 5, 3, noise.TOKEN).tolist() == [winner]
    # What is no law is nobody's to race over.
    assert noise._raced(np.full(10, -np.inf, dtype=np.float32), 5, 3, noise.TOKEN) is None
    assert noise._raced(np.zeros(1000), 5, 3, noise.TOKEN) is None


def test_the_bounded_argmax_finds_a_winner_far_from_the_top() -> None:
    # Many unlikely tokens together outweigh a likely one, so the winner is mostly one without a head start.
    row = torch.zeros(1, 30_000)
    row[0, 0] = 6.0
    wins = [int(noise.gumbel_argmax(row, 1, [position])[0]) for position in range(200)]
    assert wins == [int(full_argmax(row, 1, [position])[0]) for position in range(200)]
    assert sum(token > 0 for token in wins) > 150


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("keep", [1, 7, 3000, 20_000])
def test_the_bounded_topk_is_that_of_a_full_sort(scale: float, keep: int) -> None:
    generator = torch.Generator().manual_seed(int(scale * 10) + keep)
    rows = torch.randn(6, 20_000, generator=generator) * scale
    rows = rows.masked_fill(torch.rand(rows.shape, generator=generator).argsort(-1) >= keep, -torch.inf)
    positions = [i // 2 for i in range(6)]
    whole = rows.double() + noise.gumbel(99, positions, torch.arange(20_000))
    for k in (1, 5, 64):
        ids, scores = noise.gumbel_topk(rows, k, 99, positions)
        values, order = whole.sort(dim=-1, descending=True)
        there = min(k, keep)
        assert (ids[:, :there] == order[:, :there].numpy()).all() and (ids[:, there:] == -1).all()
        assert np.allclose(scores[:, :there], values[:, :there]) and (scores[:, there:] == -np.inf).all()
    assert (
        noise.gumbel_topk(rows, 1, 99, positions)[0][:, 0] == noise.gumbel_argmax(rows, 99, positions).numpy()
    ).all()


def test_the_topk_is_drawn_without_replacement() -> None:
    law = torch.tensor([1.0, 0.0, -0.5, -torch.inf, 0.7])
    draws = 20_000
    ids, _ = noise.gumbel_topk(law.expand(draws, -1), 2, 3, range(draws))
    counts = np.zeros((5, 5))
    np.add.at(counts, (ids[:, 0], ids[:, 1]), 1)
    p = law.double().softmax(-1).numpy()
    expected = p[:, None] * p[None, :] / (1 - p[:, None]) * draws * (1 - np.eye(5))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-4
    independent = np.outer(p, p) * (1 - np.eye(5))
    wrong = independent[possible] / independent.sum() * draws
    assert stats.chisquare(counts[possible], wrong).pvalue < 1e-4


def test_no_rows_give_no_tokens() -> None:
    assert noise.gumbel_argmax(torch.zeros(0, 10), 1, []).shape == (0,)


@pytest.mark.parametrize("stream", [noise.TOKEN, noise.RESIDUAL])
def test_the_argmax_is_drawn_from_the_law(stream: int) -> None:
    law = torch.tensor([2.0, 1.0, 0.0, -torch.inf, -1.0, 1.5, -3.0, 0.5])
    draws = 20_000
    chosen = noise.gumbel_argmax(law.expand(draws, -1), 42, range(draws), stream)
    counts = np.bincount(chosen.numpy(), minlength=8)
    expected = law.double().softmax(-1).numpy() * draws
    assert counts[3] == 0
    finite = expected > 0
    assert stats.chisquare(counts[finite], expected[finite]).pvalue > 1e-4
    # The same check must notice a law that is slightly off.
    wrong = (law * 1.1).double().softmax(-1).numpy() * draws
    assert stats.chisquare(counts[finite], wrong[finite]).pvalue < 1e-4


def test_seeds_draw_independently() -> None:
    row = torch.zeros(2000, 16)
    first, second = (noise.gumbel_argmax(row, seed, range(2000)).numpy() for seed in (5, 6))
    assert abs((first == second).mean() - 1 / 16) < 0.03


def test_seeds_of_several_texts_go_on_from_0_and_are_hashed_as_they_are() -> None:
    assert [noise.nth_seed(2**64 - 2, number) for number in range(4)] == [2**64 - 2, 2**64 - 1, 0, 1]
    tokens = torch.arange(8)
    assert torch.equal(noise.uniform(noise.nth_seed(2**64 - 1, 1), 3, tokens), noise.uniform(0, 3, tokens))
    assert not torch.equal(noise.uniform(2**64 - 1, 3, tokens), noise.uniform(0, 3, tokens))
