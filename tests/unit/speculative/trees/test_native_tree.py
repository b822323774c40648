"""The native calls of `auto` against the Python they stand for, number for number."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core import noise
from decodery.core.native.kernels import library
from decodery.core.requirements import Requirements
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CONTEXTS, CopyRates, Expectations, SuccessorRates
from decodery.speculative.stores.ngrams import Occurrences
from decodery.speculative.stores.past import PastTexts
from decodery.speculative.tree_building.most_likely import ExpectedSpeedup, MostLikelyTree
from decodery.speculative.tree_building.native_tree import NativeText, learn_together, propose_together
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.forward_request import run_sync

VOCAB, LIMIT, WIDTH = 24, 12, 5
pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels were not built")


@dataclass
class _Rule:
    requirements: Requirements = field(default_factory=Requirements)


@dataclass
class _Sampler:
    greedy: bool


@dataclass
class _Request:
    """What trees read of a request."""

    sampler: _Sampler
    seed: int = 7
    acceptance_rule: _Rule = field(default_factory=_Rule)
    eos_ids: tuple[int, ...] = (3,)
    prompt_length: int = 1


@dataclass
class _Text:
    """What trees read of a sequence."""

    tokens: list[int]
    request: _Request

    @property
    def last_token(self) -> int:
        return self.tokens[-1]

    @property
    def position(self) -> int:
        return len(self.tokens) - self.request.prompt_length


def _memory() -> Expectations:
    past = PastTexts((5, 3))
    past.add([1, 2, 4, 5, 6, 7, 8, 9, 1, 2, 4])
    return Expectations(
        Occurrences((5, 3, 2, 1)), Contexts(CONTEXTS, WIDTH), SuccessorRates(3, WIDTH), past, CopyRates()
    )


def _parts(memory: Expectations) -> list[np.ndarray]:
    tables = [np.asarray(each) for each in (*memory.contexts._keys, *memory.contexts._rows)]
    return [*tables, memory.rates.of, memory.rates.seen, *(part for t in memory.trusts for part in (t.hits, t.seen))]


@pytest.mark.parametrize("greedy", [True, False])
def test_native_calls_do_what_python_does(greedy: bool) -> None:
    """Over a text with repetitions: the same trees, and the same tables, rates and trust after every step."""
    generator = np.random.default_rng(3)
    law = generator.dirichlet(np.full(VOCAB, 0.08), size=VOCAB)
    text: Any = _Text([1], _Request(_Sampler(greedy)))
    slow, fast = _memory(), _memory()
    native = NativeText(text, fast, LIMIT)
    sizes, differing = set(), 0
    for step in range(250):
        costs = 1 + np.cumsum(generator.exponential(0.06, size=int(generator.integers(2, LIMIT + 2))))
        depth, texts = int(generator.integers(1, 9)), int(generator.integers(1, 3))
        slow.find(text.tokens, min(len(costs) - 1, depth))
        expected = run_sync(MostLikelyTree(text, slow, ExpectedSpeedup(costs, texts), depth).grown())
        found = propose_together([native], [text], costs, texts, [len(costs) - 1], [depth])
        tree = DraftTree.root(text.last_token) if found is None else found[0][0]
        assert tree.tokens.tolist() == expected.tokens.tolist() and tree.parents.tolist() == expected.parents.tolist()
        sizes.add(len(tree))
        if not greedy:
            unheeded = replace(text, request=_Request(_Sampler(True)))
            blind = run_sync(MostLikelyTree(unheeded, slow, ExpectedSpeedup(costs, texts), depth).grown())
            differing += blind.tokens.tolist() != tree.tokens.tolist()
        logits = torch.from_numpy(np.log(law[tree.tokens] + 1e-9)).float()
        path, node, token = [], 0, -1
        while True:
            token = int(generator.choice(VOCAB, p=law[tree.tokens[node]]))
            if (child := tree.child(node, token)) is None:
                break
            path.append(child)
            node = child
        emitted = [*tree.tokens[path].tolist(), token]
        start = len(text.tokens) - 1
        text.tokens += emitted
        seen = VerificationFeedback(tree, logits, {}, path, emitted, start)
        if step % 5 == 0:
            native.pass_over()
        elif found is not None:
            slow.learn_all(text.tokens, start + 1)
        slow.contexts.learn(text.tokens, seen)
        assert not learn_together([native], [text], [seen])
        for ours, theirs in zip(_parts(fast), _parts(slow), strict=True):
            assert np.array_equal(ours, theirs)
    assert len(sizes) > 4
    assert greedy or differing > 20


def test_a_text_whose_logits_are_no_numbers_is_named() -> None:
    """Beside one that learns, from logits of another precision."""
    texts: Any = [_Text([1, 2], _Request(_Sampler(True))) for _ in range(2)]
    memory = _memory()
    native = [NativeText(text, memory, LIMIT) for text in texts]
    tree, logits = DraftTree.root(2), torch.zeros(1, VOCAB)
    seen = [VerificationFeedback(tree, each, {}, [], [4], 1) for each in (logits / 0, logits.double())]
    assert learn_together(native, texts, seen) == [0]
    assert memory.contexts.rows([2])[-1] == [0, 1, 2, 3, 4]
    assert deepcopy(native[0]) is None


def test_noise_tells_which_token_is_drawn() -> None:
    """Where rates are those of the law, who heeds the noise guesses the token that it draws more often."""
    memory, right = _memory(), {"heeding": 0, "blind": 0}
    law = np.array([0.3, 0.2, 0.15, 0.1, 0.05])
    memory.contexts.fill(1, np.array([[9]]), np.arange(10, 15)[None].astype(np.int32))
    memory.rates.of[2, 2] = law
    ids = torch.tensor([*range(10, 15), *range(100, 120)])
    logs = torch.from_numpy(np.log(np.concatenate((law, np.full(20, 0.01)))))
    for position in range(600):
        token = int(ids[(logs + noise.gumbel(5, position, ids)).argmax()])
        right["heeding"] += memory.candidates([9], -1, 0.0, (5, position))[0][1] == token
        right["blind"] += memory.candidates([9], -1)[0][1] == token
    assert 0.2 * 600 < right["blind"] < 0.4 * 600
    assert right["heeding"] > right["blind"] + 60
    assert 0 < sum(chance for chance, _, _ in memory.candidates([9], -1, 0.0, (5, 1))) < 1


def test_texts_that_share_a_pass_share_its_rows() -> None:
    """Of all ways to divide some rows among texts, the one whose nodes are most likely; equal parts promise less."""
    generator = np.random.default_rng(1)
    memory = _memory()
    memory.contexts.fill(
        1, np.arange(VOCAB)[:, None], generator.integers(0, VOCAB, size=(VOCAB, WIDTH)).astype(np.int32)
    )
    repeated = generator.integers(4, VOCAB, size=40).tolist()
    tokens = [[*repeated, *repeated[:30]], [7, 7, 11], [20, 21]]
    texts: Any = [_Text(each, _Request(_Sampler(True))) for each in tokens]
    native, rows = [NativeText(text, memory, LIMIT) for text in texts], 6

    def promised(numbers: list[int], limit: int) -> float:
        costs = 1 + 1e-6 * np.arange(limit + 1.0)
        shown, calls = [texts[number] for number in numbers], [native[number] for number in numbers]
        found = propose_together(calls, shown, costs, 1.0, [limit] * len(numbers), [8] * len(numbers))
        assert found is not None and sum(len(tree) - 1 for tree in found[0]) <= limit
        return found[1]

    alone = [[0.0, *(promised([number], limit) for limit in range(1, rows + 1))] for number in range(3)]
    splits = [(a, b, rows - a - b) for a in range(rows + 1) for b in range(rows + 1 - a)]
    values = [sum(own[part] for own, part in zip(alone, split, strict=True)) for split in splits]
    assert promised([0, 1, 2], rows) == pytest.approx(max(values))
    assert values[splits.index((2, 2, 2))] < 0.95 * max(values)
