"""PG-TD: the tree is that of the formula, caches change nothing about it, and enough programs hold the best one."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from decodery.core.errors import SettingsError
from decodery.core.noise import draw
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.scorers.program_tests import ProgramTests
from decodery.scorers.sandbox import Sandbox
from decodery.scorers.text import TextScore
from decodery.search.base import Branches
from decodery.search.beam import Beam
from decodery.search.pg_td import PGTD, Programs, Tree
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from decodery.testing import TableModel, decode, tiny_transformer, to_int8

TOY = TableModel(3, seed=5)
MODEL = to_int8(tiny_transformer(1))


def worth(text: str) -> float:
    """Any number in [0, 1) for any text."""
    return draw(hash(tuple(map(int, text.split()))) % (1 << 31), 0)


def judged(function: Callable[[str], float] = worth) -> TextScore:
    """A scorer of texts that are the numbers of their tokens."""
    return TextScore(function, decode=lambda ids: " ".join(map(str, ids)))


def grow(settings: PGTD, model=MODEL, prompt=(5, 9, 2), **request) -> tuple[Tree, Programs]:
    """A search as it is run, with its tree."""
    request = {"max_new_tokens": 8, "eos_ids": (0, 3)} | request
    programs = Programs(settings, Branches(Engine(model), Request(list(prompt), **request), settings))
    run_sync(programs.begin())
    tree = Tree(settings, programs, run_sync(programs.edges(())))
    while not tree.done:
        run_sync(tree.rollout())
    return tree, programs


def test_a_budget_of_all_programs_finds_the_best_one() -> None:
    for seed in range(3):
        settings = PGTD(judged(lambda text, seed=seed: worth(f"{seed} {text}")), budget=81)
        tree, programs = grow(settings, TOY, (1, 2), max_new_tokens=4, eos_ids=())
        best = max(product(range(3), repeat=4), key=lambda ids: worth(" ".join(map(str, (seed, *ids)))))
        assert programs.best[0].path == best and len(programs.rewards) == 81
        assert tree.root.closed


def test_a_budget_of_one_is_greedy_decoding_and_more_is_never_worse() -> None:
    (greedy,) = decode(MODEL, [[5, 9, 2]], max_new_tokens=8, eos_ids=(0, 3))
    before: list = []
    for budget in range(1, 8):
        _, programs = grow(PGTD(judged(), budget=budget))
        found = list(programs.rewards.items())
        assert found[: len(before)] == before and len(found) == budget
        assert programs.best[0].reward == max(programs.rewards.values())
        before = found
    assert before[0][0] == tuple(greedy.generated)


@pytest.mark.parametrize("beams", [1, 2])
def test_caches_change_nothing_but_the_work(beams: int) -> None:
    runs = [grow(PGTD(judged(), budget=12, beams=beams, caches=caches)) for caches in (True, False)]
    (tree, programs), (bare, slow) = runs
    assert tree.root == bare.root and tree.rollouts == bare.rollouts
    assert list(programs.rewards.items()) == list(slow.rewards.items())
    passes = [each.branches.root.trace.passes for _, each in runs]
    assert passes[0] < passes[1]
    if beams == 1:
        # With caches no program is written twice.
        assert programs.completions == 12 < len(tree.rollouts) == slow.completions


@pytest.mark.parametrize("variant", ["p_ucb", "p_uct", "uct"])
def test_every_step_is_the_one_of_the_formula(variant: str) -> None:
    settings = PGTD(judged(), budget=15, variant=variant, c=2.0, c_base=5.0)
    tree, programs = grow(settings)
    ends = set(programs.rewards)
    for count, (path, _) in enumerate(tree.rollouts):
        assert path == _next(tree, tree.rollouts[:count], ends, settings)
    for node in _nodes(tree.root):
        through = [each for each in tree.rollouts if each[0][: len(node.path)] == node.path]
        assert node.visits == len(through) + (not node.path)
        for edge in node.edges:
            rewards = [reward for path, reward in through if path[len(node.path) : len(node.path) + 1] == (edge.token,)]
            assert edge.visits == len(rewards) and edge.best == max(rewards, default=0.0)


def _nodes(node):
    yield node
    for edge in node.edges:
        if edge.node is not None:
            yield from _nodes(edge.node)


def _next(tree: Tree, made: list, ends: set, settings: PGTD) -> tuple[int, ...]:
    """The node the next rollout creates, worked out from the list of those before it."""
    known = {path for path, _ in made}
    tokens = {node.path: [(edge.token, edge.probability) for edge in node.edges] for node in _nodes(tree.root)}

    def closed(path):
        return path in known and (path in ends or all(closed((*path, token)) for token, _ in tokens[path]))

    path: tuple[int, ...] = ()
    while path == () or path in known:
        here = [reward for other, reward in made if other[: len(path)] == path]
        n = len(here) + (path == ())
        beta = settings.c + math.log((n + settings.c_base + 1) / settings.c_base) * (settings.variant == "p_ucb")
        values = []
        for rank, (token, p) in enumerate(tokens[path]):
            child = (*path, token)
            if closed(child):
                continue
            seen = [reward for other, reward in made if other[: len(child)] == child]
            spread = beta * p * math.sqrt(math.log(n)) / (1 + len(seen))
            if settings.variant == "uct":
                spread = settings.c * math.sqrt(math.log(n) / (1 + len(seen)))
            values.append((max(seen, default=0.0) + spread, -rank, child))
        path = max(values)[2]
    return path


def test_completions_by_beams_are_those_of_beam_search() -> None:
    _, programs = grow(PGTD(judged(), budget=1, beams=3), eos_ids=(0,))
    (path,) = programs.rewards
    best, *_ = Beam(3).run(Engine(MODEL), Request([5, 9, 2, path[0]], max_new_tokens=7, eos_ids=(0,)))
    assert path == (path[0], *best.generated)


def test_it_ends_with_the_first_program_that_passes_and_holds_to_masks() -> None:
    one = PGTD(judged(lambda text: 1.0))
    (found,) = one.run(Engine(MODEL), Request([5, 9, 2], max_new_tokens=8))
    assert found.score == 1.0 and found.trace.ledger.counts == {"programs": 1, "rollouts": 1, "completions": 1}
    sampler = Sampler.from_settings(logit_bias={token: -1e9 for token in range(64) if token % 2})
    (found,) = PGTD(judged(), budget=5).run(Engine(MODEL), Request([5, 9, 2], max_new_tokens=8, sampler=sampler))
    assert all(token % 2 == 0 for token in found.generated)


def test_programs_are_told_by_their_tests(tmp_path: Path) -> None:
    path = tmp_path / "tests.py"
    path.write_text(
        "import math\nassert double(2) == 4\nassert double(math.inf) == math.inf\nassert double('a') == 'aa'\n"
    )
    box = Sandbox(seconds=1.0)
    scorer = ProgramTests(str(path), head="def double(x):\n    return", sandbox=box)

    def tests(text: str) -> float:
        return float(run_sync(judge(scorer, Candidates([], [[]], [True], texts=[text])))[0])

    assert tests(" x * 2\n") == 1.0
    assert tests(" x + x if x else 1/0") == 1.0 and tests(" 4") == pytest.approx(1 / 3)
    assert tests(" x +") == 0.0 and "SyntaxError" in scorer.verdict(" x +").reason
    assert tests("Here:\n```python\ndef double(x):\n    return x * 2\n```\nDone.") == 1.0
    assert tests("def double(x):\n    return x * 2\n") == 1.0


def test_wrong_input_is_named(tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.py", tmp_path / "broken.py"
    empty.write_text("x = 1\n")
    broken.write_text("assert (\n")
    for settings, message in (
        ({"tests": f"program-tests:file={tmp_path / 'no.py'}"}, "cannot read tests"),
        ({"tests": f"program-tests:file={empty}"}, "holds no test"),
        ({"tests": f"program-tests:file={broken}"}, "cannot read tests"),
        ({"tests": judged(), "k": 0}, "at least 1"),
        ({"tests": judged(), "variant": "puct"}, "p_ucb, p_uct or uct"),
        ({"tests": judged(), "c": -1.0}, "c of pg-td must be"),
    ):
        with pytest.raises(SettingsError, match=message):
            PGTD(**settings)
    with pytest.raises(SettingsError, match="a number or -inf"):
        PGTD(judged(lambda text: math.nan)).run(Engine(MODEL), Request([5], max_new_tokens=3))
    with pytest.raises(SettingsError, match="temperature 0"):
        PGTD(judged()).run(Engine(MODEL), Request([5], sampler=Sampler.from_settings(temperature=1.0)))
