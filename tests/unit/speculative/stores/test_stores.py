"""What drafters remember, against slow and obvious counterparts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from decodery.models.batch import Batch, Segment
from decodery.speculative.stores import contexts as contexts_module
from decodery.speculative.stores.adjacency import Adjacency
from decodery.speculative.stores.automaton import SuffixAutomaton
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.distributions import MeanDistributions
from decodery.speculative.stores.positions import Positions
from decodery.speculative.stores.suffix_trie import SuffixTrie
from decodery.speculative.stores.trigrams import Trigrams
from decodery.speculative.stores.windows import Windows
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.testing import tiny_transformer


def random_text(random: np.random.Generator, n: int, size: int) -> list[int]:
    return random.integers(0, size, n).tolist()


def runs_of(text: list[int], length: int) -> list[tuple[int, ...]]:
    return [tuple(text[start : start + length]) for start in range(len(text) - length + 1)]


def observation(tree: DraftTree, logits: torch.Tensor, path: list[int]) -> VerificationFeedback:
    return VerificationFeedback(tree, logits, {}, path, [0], start=0)


def test_the_adjacency_holds_the_top_tokens_of_every_scored_node() -> None:
    model = tiny_transformer()
    tree = DraftTree.from_paths(5, [(1, 2, 3), (1, 4), (6, 2), (7, 8)])
    segment = Segment(tree.depths, tree.tokens, mask=tree.ancestor_mask(), cache=model.new_cache())
    logits = model.forward(Batch([segment])).logits
    store = Adjacency(model.vocab_size, 8)
    store.learn(observation(tree, logits, [5]))
    for node, token in enumerate(tree.tokens.tolist()):
        text = [5, *tree.tokens[tree.path(node)].tolist()]
        fresh = model.forward(Batch([Segment.chunk(text, model.new_cache())])).logits[-1]
        if (tree.tokens == token).sum() == 1:
            assert store.matrix[token].tolist() == fresh.topk(8).indices.tolist()
    # Token 2 stands at nodes 2 and 6; the later one counts, unless the other was accepted.
    assert store.matrix[2].tolist() == logits[6].topk(8).indices.tolist()
    store.learn(observation(tree, logits, [1, 2]))
    assert store.matrix[2].tolist() == logits[2].topk(8).indices.tolist()
    assert (store.matrix[[0, 9, 63]] == -1).all()
    assert store.ranks(np.array([2, 9, 2]), np.array([store.matrix[2, 4], 1, -5])).tolist() == [4, 8]


@pytest.mark.parametrize("pick", ["first", "last"])
def test_positions_grow_as_if_built_anew(pick: str) -> None:
    random = np.random.default_rng(0)
    text = random_text(random, 200, 3)
    index = Positions(3, pick)  # type: ignore[arg-type]
    end = 0
    while end < len(text):
        end += int(random.integers(1, 6))
        index.extend(text[:end])
        found: dict[tuple[int, ...], int] = {}
        for start, run in enumerate(runs_of(text[: end - 1], 3)):
            if pick == "last" or run not in found:
                found[run] = start
        assert index.starts == found
        assert index.find(text[:end]) == found.get(tuple(text[:end][-3:]))


def test_trigram_weights_are_a_recount_of_every_window() -> None:
    text = random_text(np.random.default_rng(1), 120, 4)
    table = Trigrams(1000)
    expected: Counter[tuple[int, ...]] = Counter()
    for end in range(1, len(text) + 1):
        window = text[max(0, end - 16) : end]
        table.reinforce(window, 0.04, 0.5)
        for run in runs_of(window, 3):
            expected[run] = min(expected[run] + 0.04, 0.5)
    for first in range(4):
        for second in range(4):
            found = dict(table.successors(first, second))
            assert found == pytest.approx({c: w for (a, b, c), w in expected.items() if (a, b) == (first, second)})
    assert max(expected.values()) == 0.5


def test_a_trigram_table_is_loaded_relatively_and_stays_bounded() -> None:
    table = Trigrams(5)
    table.load([np.array([1, 2, 3, 1, 2, 3, 1, 2, 4]), np.array([1, 2, 5])], keep=2)
    assert dict(table.successors(1, 2)) == {3: 0.5, 4: 0.25}
    for token in range(300):
        table.reinforce([1, 2, token + 10], 0.1, 1.0)
        table.reinforce([token, token + 1, 0], 0.1, 1.0)
    assert len(table) == 5
    assert len(table.successors(1, 2)) <= 64


def rows(*laws: dict[int, float], width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = np.full((len(laws), width), -1), np.zeros((len(laws), width))
    for row, law in enumerate(laws):
        ids[row, : len(law)], weights[row, : len(law)] = list(law), list(law.values())
    return ids, weights


def test_the_mean_distribution_of_the_worked_example() -> None:
    bob, mary, tom, sue = range(4)
    laws = {bob: 0.7, mary: 0.2, tom: 0.05}, {bob: 0.3, mary: 0.6, sue: 0.05}
    together = MeanDistributions(4, 10)
    together.learn([(8, 9)] * 2, *rows(*laws))
    apart = MeanDistributions(4, 10)
    for law in laws:
        apart.learn([(8, 9)], *rows(law))
    for store in (together, apart):
        ids, weights = store.longest([(7, 8, 9), (1, 2, 3)], (3, 2))
        assert ids.tolist() == [[bob, mary, tom, sue], [-1] * 4]
        assert weights[0] == pytest.approx([0.5, 0.4, 0.025, 0.025])


def test_mean_distributions_are_those_of_a_slow_average_and_bounded() -> None:
    random = np.random.default_rng(3)
    store, means, seen = MeanDistributions(4, 50), {}, Counter()
    for _ in range(40):
        contexts = [(int(random.integers(0, 6)),) for _ in range(5)]
        laws = [dict(zip(random.permutation(9)[:4].tolist(), random.random(4).tolist(), strict=True)) for _ in contexts]
        store.learn(contexts, *rows(*laws))
        for context, law in zip(contexts, laws, strict=True):
            old, c = means.get(context, {}), seen[context]
            mixed = {v: (c * old.get(v, 0.0) + law.get(v, 0.0)) / (c + 1) for v in {*old, *law}}
            means[context] = dict(sorted(mixed.items(), key=lambda item: -item[1])[:4])
            seen[context] += 1
    for context, law in means.items():
        ids, weights = store.longest([context], (1,))
        assert dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True)) == pytest.approx(law, abs=1e-5)
    for number in range(1000):
        store.learn([(number, number)], *rows({1: 1.0}))
    assert len(store) == 50
    assert store.longest([(999, 999)], (2,))[0][0, 0] == 1
    assert store.longest([(3, 3)], (2,))[0][0, 0] == -1


@pytest.mark.parametrize("size", [2, 3])
def test_the_automaton_finds_the_longest_suffix_that_stood_before(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(150):
        text = random_text(random, int(random.integers(1, 40)), size)
        automaton = SuffixAutomaton(depth=5)
        for end in range(1, len(text) + 1):
            automaton.extend(text[:end])
            part = text[:end]
            longest = max((n for n in range(1, end) if tuple(part[-n:]) in runs_of(part, n)[:-1]), default=0)
            assert automaton.matched == longest
            if longest:
                assert automaton.follows() == runs_of(part, longest).index(tuple(part[-longest:])) + longest
        assert len(automaton.length) <= 2 * len(text) + 1
        for length in range(1, 6):
            for run, count in Counter(runs_of(text, length)).items():
                state = 0
                for token in run:
                    state = automaton.next[state][token]
                assert automaton.count[state] == count


def every_count(trie: SuffixTrie, texts: list[list[int]], size: int) -> None:
    expected: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for length in range(1, trie.depth + 1):
            expected.update(runs_of(text, length))
    for run, count in expected.items():
        place = trie.find(run)
        assert place is not None and trie.count(place) == count
        after = {token: trie.count(below) for token, below in trie.following(place)}
        assert after == {token: expected[(*run, token)] for token in range(size) if expected[(*run, token)]}
        assert trie.find((*run, size + 1)) is None
    assert {token for token, _ in trie.following(trie.root())} == {run[0] for run in expected}


def test_the_trie_counts_runs_and_forgets_texts() -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        texts = [random_text(random, int(random.integers(1, 25)), 3) for _ in range(5)]
        trie = SuffixTrie(depth=6, tokens=1000)
        for text in texts:
            trie.add(text)
        for gone in range(5):
            every_count(trie, texts[gone:], 3)
            trie.forget_oldest()
        assert not trie.following(trie.root())


def test_the_trie_is_bounded() -> None:
    trie = SuffixTrie(depth=8, tokens=100)
    texts = [random_text(np.random.default_rng(number), 30, 4) for number in range(10)]
    for text in texts:
        trie.add(text)
    assert len(trie) == 3
    every_count(trie, texts[-3:], 4)
    trie.add(random_text(np.random.default_rng(0), 500, 4))
    assert len(trie) == 1


def test_windows_of_a_growing_text() -> None:
    text = random_text(np.random.default_rng(9), 300, 2)
    windows = Windows()
    for end in (1, 2, 10, 11, 256, 257, 300):
        windows.extend(text[:end])
        for n in (1, 3):
            run = tuple(text[max(0, end - n) : end])
            expected = [(text[at + n : end] + [-1] * 5)[:5] for at in range(end - n) if tuple(text[at : at + n]) == run]
            found = windows.continuations(n, 5000, 5).tolist()
            assert found == sorted(expected)
    assert len(windows.continuations(1, 7, 5)) == 7


def test_contexts_know_what_the_model_ranked_highest_after_the_last_tokens() -> None:
    """Against a dictionary, over chunks of a text and trees with branches that were accepted in part."""
    generator, vocab, width = np.random.default_rng(3), 12, 3
    contexts, known = Contexts((3, 2, 1), width), {}
    text = [int(token) for token in generator.integers(vocab, size=4)]
    for _ in range(40):
        start = len(text) - 1
        parents = [-1, 0, 0, 1, 1, 2, 3]
        tokens = [
            text[-1],
            *generator.permutation(vocab)[:2],
            *generator.permutation(vocab)[:2],
            *generator.integers(vocab, size=2),
        ]
        tree = DraftTree(np.array(tokens), np.array(parents))
        logits = torch.tensor(generator.normal(size=(7, vocab)), dtype=torch.float32)
        path = [[], [1], [1, 3], [1, 3, 6]][generator.integers(4)]
        emitted = [int(tree.tokens[node]) for node in path] + [int(generator.integers(vocab))]
        text += emitted
        contexts.learn(text, VerificationFeedback(tree, logits, {}, path, emitted, start))
        for node in [*range(7), 0, *path]:
            before = text[: start + 1] + [int(tree.tokens[each]) for each in tree.path(node)]
            best = logits[node].topk(width).indices.tolist()
            known.update({tuple(before[-order:]): best for order in (1, 2, 3) if len(before) >= order})
        for _ in range(20):
            context = [int(token) for token in generator.integers(vocab, size=3)]
            expected = [known.get(tuple(context[-order:])) for order in (3, 2, 1)]
            assert contexts.rows(context) == expected
            assert contexts.rows(context[1:]) == [None, *expected[1:]], "too short for the longest"


def test_of_two_contexts_in_one_place_the_later_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts_module, "_BITS", 1)
    contexts = Contexts((1,), 1)
    for token in range(8):
        logits = torch.eye(8)[[token]]
        contexts.learn([token], VerificationFeedback(DraftTree.root(token), logits, {}, [], [0], 0))
    found = [contexts.rows([token])[0] for token in range(8)]
    assert found[7] == [7] and sum(row is not None for row in found) <= 2
    assert all(row is None or row == [token] for token, row in enumerate(found)), "never another context's tokens"
