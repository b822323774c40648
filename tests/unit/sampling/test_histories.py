"""Warps that look at what was written: histories of trees, DRY and momentum."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodery.sampling import DRY, Context, LogitsProcessor, Momentum, Sampler
from decodery.sampling.history import Repeats, TokenCounts, token_counts
from decodery.sampling.momentum import depths
from decodery.testing import decode, tiny_transformer

INF = math.inf


def at(processor: LogitsProcessor, prompt: Sequence[int], written: Sequence[int], seed: int = 0) -> Context:
    """The context after `written`, with the processor's own state there."""
    state = processor.init(prompt)
    for token in written:
        state = processor.advance(state, token, -1.0)
    return Context(len(prompt), [*prompt, *written], state, seed)


TEXTS = st.lists(st.integers(0, 3), max_size=150)


@given(TEXTS, st.lists(st.lists(st.integers(0, 5), max_size=80), min_size=1, max_size=4))
def test_counts_of_a_tree_equal_plain_ones(prompt: list[int], paths: list[list[int]]) -> None:
    start, made = TokenCounts.of(prompt), []
    for path in paths:
        history = start
        for token in path:
            history = history.add(token)
        made.append(history)
    ids, counts = token_counts(made, 5)
    for row, path in zip(counts, paths, strict=True):
        plain = Counter(prompt + path)
        found = {int(token): int(count) for token, count in zip(ids, row, strict=True) if count}
        assert found == {token: count for token, count in plain.items() if token < 5}
    assert start.tail == ()


def plain_repeats(tokens: Sequence[int]) -> dict[int, int]:
    """End positions before the last, and over how many tokens the text repeats its end there: by comparison."""
    found = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length:
            found[end] = length
    return found


@given(TEXTS, TEXTS)
def test_repeats_equal_a_plain_comparison(prompt: list[int], written: list[int]) -> None:
    found = Repeats.of(prompt)
    for token in written:
        found = found.add(token)
    tokens = prompt + written
    expected = plain_repeats(tokens)
    assert dict(zip(found.ends.tolist(), found.lengths.tolist(), strict=True)) == expected
    assert len(found) == len(tokens) and set(found.tokens().tolist()) == set(tokens)
    for least in (1, 2, 4):
        longest: dict[int, int] = {}
        for end, length in expected.items():
            if length >= least:
                longest[tokens[end + 1]] = max(length, longest.get(tokens[end + 1], 0))
        ids, lengths = found.followers(least)
        assert dict(zip(ids.tolist(), lengths.tolist(), strict=True)) == longest


def test_a_branch_leaves_its_trunk_as_it_is() -> None:
    draw_from = random.Random(3)
    trunk = Repeats.of([draw_from.randrange(3) for _ in range(70)])
    before = (trunk.ends.tolist(), trunk.lengths.tolist(), len(trunk))
    branches = [[draw_from.randrange(3) for _ in range(140)] for _ in range(2)]
    states = [trunk, trunk]
    for pair in zip(*branches, strict=True):
        states = [state.add(token) for state, token in zip(states, pair, strict=True)]
    for state, branch in zip(states, branches, strict=True):
        tokens = trunk.text.tolist() + branch
        assert dict(zip(state.ends.tolist(), state.lengths.tolist(), strict=True)) == plain_repeats(tokens)
    assert (trunk.ends.tolist(), trunk.lengths.tolist(), len(trunk)) == before


def plain_dry(tokens: Sequence[int], processor: DRY) -> dict[int, float]:
    """What each token loses, by comparing every position with the end of the text."""
    tokens = list(tokens)[-processor.window :] if processor.window else list(tokens)
    since = next((n for n, token in enumerate(reversed(tokens)) if token in processor.breakers), len(tokens))
    longest: dict[int, int] = {}
    for end, length in plain_repeats(tokens).items():
        length, token = min(length, since), tokens[end + 1]
        if length >= processor.allowed and token not in processor.breakers:
            longest[token] = max(length, longest.get(token, 0))
    most = int(88.7228391 / math.log(processor.base)) if processor.base > 1.000001 else 10**9
    return {
        token: processor.multiplier * processor.base ** min(n - processor.allowed, most) for token, n in longest.items()
    }


@given(
    TEXTS,
    TEXTS,
    st.builds(
        DRY,
        multiplier=st.just(0.8),
        base=st.sampled_from([1.0, 1.2]),
        allowed=st.integers(1, 4),
        window=st.sampled_from([None, 3, 20]),
        breakers=st.sampled_from([(), (3,), (0, 3)]),
    ),
)
def test_dry_equals_its_plain_definition(prompt: list[int], written: list[int], processor: DRY) -> None:
    logits = torch.linspace(-1, 1, 4)[None]
    found = processor.process(logits, [at(processor, prompt, written)])[0]
    expected = logits[0].double()
    for token, fine in plain_dry(prompt + written, processor).items():
        expected[token] -= fine
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)


def test_dry_by_hand() -> None:
    # "1 2 3" was followed by 4 and, later, by 5; 7 is where runs break.
    text = [1, 2, 3, 4, 7, 9, 2, 3, 5, 8, 1, 2, 3]
    processor = DRY(multiplier=1.0, base=2.0, allowed=2, breakers=(7,))
    fines = -processor.process(torch.zeros(1, 10), [at(processor, [], text)])[0]
    assert fines.tolist() == [0, 0, 0, 0, 2.0, 1.0, 0, 0, 0, 0]
    broken = [1, 2, 3, 4, 1, 7, 2, 3]
    assert (processor.process(torch.zeros(1, 10), [at(processor, [], broken)])[0, 4]).item() == -1.0


def test_no_penalty_of_dry_is_beyond_float32() -> None:
    processor = DRY(allowed=1)
    law = processor.process(torch.zeros(1, 4), [at(processor, [1] * 400, [])])
    assert law[0, 1] < -1e37 and torch.isfinite(law).all()


@given(TEXTS.filter(bool))
def test_depths_equal_a_comparison_of_runs(text: list[int]) -> None:
    seen = Repeats.of(text)
    for token in range(5):
        run, depth = [*text, token], 0
        while depth < len(run) and any(
            run[start : start + depth + 1] == run[len(run) - depth - 1 :] for start in range(len(text) - depth)
        ):
            depth += 1
        assert depths(seen, [token]) == [depth]


def test_momentum_takes_the_best_score_and_leaves_nothing_to_chance() -> None:
    sampler = Sampler([Momentum()])
    assert sampler.greedy
    text = [1, 2, 3, 1, 2]
    logits = torch.tensor([[0.1, 0.1, 0.1, 0.5, 0.2]]).log()
    context = sampler.ahead(sampler.context([1], 1, sampler.init([1])), text[1:])
    # 3 has followed "1 2": depth 3, so 0.5 - 0.2 * 3; 4 has never occurred.
    assert sampler.law(logits, [context])[0].tolist() == pytest.approx([0.1, -0.1, -0.1, -0.1, 0.2], abs=1e-6)
    assert sampler.pick(sampler.law(logits, [context]), 0, [5]).tolist() == [4]
    blocked = Momentum(k=1, resistance=(0.0, INF))
    assert blocked.process(logits, [at(blocked, text, [])]).argmax().item() == 3


def test_an_infinite_resistance_forbids_runs() -> None:
    model = tiny_transformer(0)
    processor = Momentum(k=64, resistance=(0.0, 0.0, 0.0, INF))
    (run,) = decode(model, [[5, 6, 7]], sampler=Sampler([processor]), max_new_tokens=80)
    runs = [tuple(run.tokens[start : start + 3]) for start in range(len(run.tokens) - 2)]
    assert len(set(runs)) == len(runs)
    (greedy,) = decode(model, [[5, 6, 7]], max_new_tokens=80)
    assert len({tuple(greedy.tokens[start : start + 3]) for start in range(81)}) < 81
    (same,) = decode(model, [[5, 6, 7]], sampler=Sampler([Momentum(alpha=0.0)]), max_new_tokens=80)
    assert same.tokens == greedy.tokens
