"""Settings of released samplers, each against a plain loop over logits: Dream's, SDAR's, RND1's and LLaDA 2.1's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch

from decodery.diffusion.view import Truncation, View
from decodery.models.torch.transformer import Transformer
from diffusing import MASK, PROMPT, denoiser, fill, logits_of, named, order

LENGTH = 16
FIRST = len(PROMPT)
Chooser = Callable[[np.ndarray, np.ndarray], list[int]]


def truncated(row: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """A distribution [vocab] in which what is left out has no share, by sorting and adding one after the other."""
    order = sorted(range(len(row)), key=lambda token: -row[token])
    kept = order[: top_k or len(order)]
    shares = np.exp(row[kept] - row[kept].max())
    shares, total, count = shares / shares.sum(), 0.0, 0
    for share in shares:
        count, total = count + 1, total + share
        if total > top_p:
            break
    found = np.zeros(len(row))
    found[kept[:count]] = shares[:count] / shares[:count].sum()
    return found


def loop(model: Transformer, choose: Chooser, top_k: int = 0, top_p: float = 1.0) -> list[tuple[int, int]]:
    """Fill a canvas greedily; choose: open places and their distributions to the places that are written."""
    tokens = np.array([*PROMPT, *[MASK] * LENGTH])
    found = list[tuple[int, int]]()
    while (tokens == MASK).any():
        places = np.flatnonzero(tokens == MASK)
        laws = np.stack([truncated(row, top_k, top_p) for row in logits_of(model, tokens)[places]])
        for place in choose(places, laws):
            token = int(laws[list(places).index(place)].argmax())
            found.append((place, token))
        for place, token in found:
            tokens[place] = token
    return found


def entropy(laws: np.ndarray) -> np.ndarray:
    return -np.where(laws > 0, laws * np.log(np.where(laws > 0, laws, 1)), 0).sum(axis=1)


def surest(n: int, score: Callable[[np.ndarray], np.ndarray]) -> Chooser:
    return lambda places, laws: sorted(int(place) for place in places[np.argsort(-score(laws), kind="stable")[:n]])


def margin(laws: np.ndarray) -> np.ndarray:
    best = np.sort(laws, axis=1)
    return best[:, -1] - best[:, -2]


@pytest.mark.parametrize("shifted", [False, True])
def test_confidence_on_truncated_distributions_is_dreams(shifted: bool) -> None:
    """Which changes the order that places are written in, and what is written."""
    model = denoiser(shifted=shifted)
    for spec, score in (
        ("measure=probability", lambda laws: laws.max(axis=1)),
        ("measure=margin", margin),
        ("measure=entropy", lambda laws: -entropy(laws)),
    ):
        for top_k, top_p in ((0, 0.6), (4, 1.0), (5, 0.8)):
            own = f"static:steps=8,tempered=true,top_k={top_k},top_p={top_p},{spec}"
            assert order(fill(model, own, LENGTH)) == loop(model, surest(2, score), top_k, top_p), own
    assert order(fill(model, own, LENGTH)) != order(fill(model, own.replace("true", "false"), LENGTH))


def test_entropy_bounds_are_those_of_the_paper_and_not_of_their_sum_alone() -> None:
    model = denoiser()

    def bounded(gamma: float, wrong: bool = False) -> Chooser:
        def choose(places: np.ndarray, laws: np.ndarray) -> list[int]:
            best = sorted(range(len(places)), key=lambda row: (-laws[row].max(), row))
            unsure, count = entropy(laws)[best], 1
            while count < len(best):
                more = unsure[: count + 1]
                if more.sum() - (0.0 if wrong else more.max()) > gamma:
                    break
                count += 1
            return sorted(int(places[row]) for row in best[:count])

        return choose

    for gamma in (0.5, 2.0, 6.0):
        found = fill(model, f"entropy-bounded:gamma={gamma}", LENGTH)
        assert order(found) == loop(model, bounded(gamma))
        assert found.passes < LENGTH or gamma == 0.5
    assert order(found) != loop(model, bounded(gamma, wrong=True))
    assert fill(model, "entropy-bounded:gamma=0", LENGTH).passes == LENGTH


def test_sequential_writes_from_left_to_right() -> None:
    for spec, each in (("sequential", 1), ("sequential:steps=4", 4)):
        canvas = fill(denoiser(), spec, LENGTH)
        assert [place for place, _ in order(canvas)] == list(range(FIRST, FIRST + LENGTH))
        assert {len(one.positions) for one in canvas.rounds} == {each}


def edited(model: Transformer, tau: float, replace: float, more: int) -> np.ndarray:
    """LLaDA 2.1's loop over blocks of four, written anew."""
    tokens = np.array([*PROMPT, *[MASK] * (24 - FIRST)])
    for start in range(FIRST // 4 * 4, 24, 4):
        idle = 0
        while True:
            places = np.arange(max(start, FIRST), start + 4)
            masked = tokens[places] == MASK
            idle += not masked.any()
            if idle > more:
                break
            laws = np.stack([truncated(row, 0, 1.0) for row in logits_of(model, tokens)[places]])
            best, sure = laws.argmax(axis=1), laws.max(axis=1)
            take = masked & (sure > tau)
            if masked.any() and not take.any():
                take[np.where(masked, sure, -1).argmax()] = True
            edit = ~masked & (sure > replace) & (best != tokens[places])
            tokens[places[take | edit]] = best[take | edit]
            if not masked.any() and not edit.any():
                break
    return tokens


def test_editing_is_llada_2_1s_loop() -> None:
    changed = 0
    for seed in range(2):
        model = denoiser(seed, block_length=4)
        for tau, replace, more in ((0.3, 0.2, 16), (0.2, 0.05, 3), (0.9, 0.3, 0)):
            spec = f"edit:tau={tau},replace={replace},more={more}"
            canvas = fill(model, spec, 24 - FIRST)
            assert canvas.tokens.tolist() == edited(model, tau, replace, more).tolist(), spec
            cached = fill(model, f"{spec},cache=prefix", 24 - FIRST)
            assert order(cached) == order(canvas)
            changed += len(order(canvas)) - (24 - FIRST)
    assert changed > 5, "nothing was edited"


def test_truncation_is_that_of_a_loop() -> None:
    draws = np.random.default_rng(3)
    for _ in range(200):
        row = draws.normal(size=12) * 2
        top_k, top_p = int(draws.integers(0, 14)), float(draws.uniform(0.05, 1))
        found = Truncation(top_k, top_p).applied(torch.from_numpy(row)[None]).softmax(dim=-1)[0].numpy()
        assert np.allclose(found, truncated(row, top_k, top_p))


def _view(confidence: list[float]) -> View:
    n = len(confidence)
    return View(np.arange(n), np.zeros(n, dtype=np.int64), np.array(confidence), torch.zeros(n, 4), (0, n))


def test_places_drawn_by_a_temperature_are_draws_without_replacement() -> None:
    """Against enumeration; ranks without noise, and noise that is not Gumbel's, are told apart."""
    method, sure, heat = named("static:alg_temp=0.5"), [0.9, 0.5, 0.2, 0.6], 0.5
    shares = np.exp(np.array(sure) / heat)
    exact = Counter[tuple[int, ...]]()
    for one, two in permutations(range(4), 2):
        exact[tuple(sorted((one, two)))] += shares[one] / shares.sum() * shares[two] / (shares.sum() - shares[one])
    n = 4000
    seen = Counter(tuple(method.select(_view(sure), ((2,), seed))[0].positions.tolist()) for seed in range(n))  # type: ignore[attr-defined]

    def distance(counts: Counter[tuple[int, ...]]) -> float:
        return sum((counts[pair] - n * share) ** 2 / (n * share) for pair, share in exact.items())

    draws = np.random.default_rng(0)
    wrong = Counter(
        tuple(sorted(np.argsort(-(np.array(sure) / heat + draws.normal(size=4)))[:2].tolist())) for _ in range(n)
    )
    assert distance(seen) < 20.5 < distance(wrong), (distance(seen), distance(wrong))


def test_origin_writes_places_by_chance_whatever_is_proposed() -> None:
    """With steps times from 1 to .001 a place is written in step s with the probability t(s) - t(s + 1)."""
    steps, n, counts = 5, 1500, np.zeros(5)
    times = np.linspace(1, 1e-3, steps + 1)
    exact = np.append(-np.diff(times)[:-1], times[-2])
    method = named(f"origin:steps={steps}")
    for seed in range(n):
        memory = (seed, 0, steps)
        left = np.arange(4)
        while len(left):
            view = View(
                left, np.zeros(len(left), dtype=np.int64), np.ones(len(left)), torch.zeros(len(left), 4), (0, 4)
            )
            commit, memory = method.select(view, memory)  # type: ignore[attr-defined]
            counts[memory[1] - 1] += len(commit.positions)
            left = np.setdiff1d(left, commit.positions)
    assert counts.sum() == 4 * n
    assert np.abs(counts / (4 * n) - exact).max() < 0.02, counts / (4 * n)
    canvas = fill(denoiser(), "origin:steps=8", LENGTH)
    assert canvas.passes <= 8 and not canvas.masked.any()
