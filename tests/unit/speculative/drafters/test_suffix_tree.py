"""Suffix trees grow alike from a text and from past outputs, and draft what sums to most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import pytest

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.speculative.drafters.suffix_tree import SuffixTree
from decodery.speculative.stores.automaton import SuffixAutomaton as Automaton
from decodery.speculative.stores.suffix_trie import SuffixTrie
from decodery.speculative.tree_building.best_first import grow
from decodery.step.draft_length_policy import Budget
from decodery.step.drafter_memory import Memory
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer, to_int8

TARGET = to_int8(tiny_transformer(0))


def sequence(tokens: Ordered[int], memory: Memory) -> Sequence:
    engine = Engine(TARGET, memory=memory)
    return engine.submit(Request(list(tokens)))


def test_text_and_past_outputs_grow_the_same_trees() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        text = random.integers(0, 3, 40).tolist()
        own, past = Automaton(depth=8), SuffixTrie(8, 1000)
        own.extend(text)
        past.add(text)
        for length in range(1, 5):
            state = 0
            for token in text[-length:]:
                state = own.next[state][token]
            place = past.find(text[-length:])
            assert place is not None
            limits = {"nodes": 12, "depth": 8 - length, "least": 0.05}
            for branch in (True, False):
                a = grow(
                    state,
                    own.count.__getitem__,
                    lambda s, own=own: sorted((t, n) for t, n in own.next[s].items() if own.count[n]),
                    branch=branch,
                    **limits,
                )
                b = grow(
                    place,
                    past.count,
                    lambda p, past=past: sorted(past.following(p), key=lambda step: step[0]),
                    branch=branch,
                    **limits,
                )
                assert (a.tokens, a.parents) == (b.tokens, b.parents)
                assert a.score == pytest.approx(b.score)


def test_suffix_tree_takes_the_draft_that_sums_to_most() -> None:
    # After 1 2 came 3 twice and 4 once, after 9 1 2 always 4.
    text = [7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 6, 5, 9, 1, 2]
    seq = sequence(text, Memory())
    drafter = SuffixTree(branch=False)
    seq.states[drafter] = drafter.start(seq)
    # Three matched tokens, one of two occurrences goes on: 1/2 + 1/2 + 1/2. Two matched: 2/4 + 2/4.
    assert run_sync(drafter.propose(seq, Budget(64, 64))).tokens.tolist() == [2, 4, 6, 5]
    assert drafter.match_length(seq) == 3


def best_sum(text: Ordered[int], drafter: SuffixTree) -> float:
    """The largest sum of path probabilities of any match length, by counting runs in the text itself."""
    counts = Counter(tuple(text[at:end]) for at in range(len(text)) for end in range(at, len(text) + 1))
    best = 0.0
    for length in range(1, min(drafter.depth, len(text))):
        run = tuple(text[-length:])
        nodes = min(int(drafter.factor * length) + drafter.offset, drafter.nodes)
        # Best first, without a heap: of all that could be added next, the most likely.
        chosen: dict[tuple[int, ...], float] = {(): 1.0}
        while len(chosen) <= nodes:
            below = {
                (*path, token): chance * counts[(*run, *path, token)] / counts[(*run, *path)]
                for path, chance in chosen.items()
                if length + len(path) < drafter.depth
                for token in set(text)
            }
            open_ = {path: chance for path, chance in below.items() if chance >= drafter.least and path not in chosen}
            if not open_:
                break
            most_likely = max(open_, key=lambda path: open_[path])
            chosen[most_likely] = open_[most_likely]
        best = max(best, sum(chosen.values()) - 1)
    return best


def test_suffix_tree_tries_every_match_length() -> None:
    random = np.random.default_rng(0)
    for number in range(80):
        text = random.integers(0, 2 + number % 2, 6 + number % 15).tolist()
        drafter = SuffixTree(
            depth=int(random.integers(2, 7)),
            factor=float(random.choice([0.5, 1.0, 2.0])),
            offset=int(random.integers(0, 2)),
            nodes=int(random.integers(1, 6)),
        )
        seq = sequence(text, Memory())
        own, past = Automaton(drafter.depth), SuffixTrie(drafter.depth, 1000)
        own.extend(text)
        past.add(text)
        expected = pytest.approx(best_sum(text, drafter))
        assert drafter._from_text(own, Budget(64, 64)).score == expected, (text, drafter)
        assert drafter._from_past(past, seq.tokens, Budget(64, 64)).score == expected, (text, drafter)


@pytest.mark.parametrize("branch", [True, False])
def test_suffix_tree_drafts_far_ahead_in_a_long_copy(branch: bool) -> None:
    def drafted(text: Ordered[int], **settings: Any) -> list[int]:
        seq = sequence(text, Memory())
        drafter = SuffixTree(branch=branch, **settings)
        seq.states[drafter] = drafter.start(seq)
        return run_sync(drafter.propose(seq, Budget(64, 64))).tokens.tolist()[1:]

    assert drafted([0, 1, 2, 3, 1, 2, 3], depth=4) == [1, 2]
    # With as many tokens matched as are counted, half of them are worth most: 32 of a match of 32.
    text = np.random.default_rng(0).permutation(64).tolist()
    for copied in (40, 63, 64):
        assert drafted([*text, *text[:32], *text[:copied]]) == [*text, *text][copied : copied + 32]
