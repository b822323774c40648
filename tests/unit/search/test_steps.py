"""Searches over steps: every text is one the loop writes, cut into steps, and what is chosen follows from the tree."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.best_of_n import BestOfN
from decodery.search.budget_forcing import BudgetForcing
from decodery.search.dvts import DVTS
from decodery.search.lookahead import Lookahead
from decodery.search.mcts import MCTS
from decodery.search.particle_filter import ParticleFilter
from decodery.search.step_beam import StepBeam
from decodery.search.step_nodes import StepEnd, aggregated
from decodery.search.steps import StepSearch
from decodery.search.weighted_vote import WeightedVote
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel, decode
from decodery.testing.statistics import chi_square
from decodery_benchmarks.puzzles.alphabet import tokenizer
from methods import DRAFTERS, SEARCHES, STEPPED, Even
from sampled import MODEL, OTHER, PLAIN, PROMPT, SETTINGS, Constant, Failing, plain, run, told
from scripted_lm import ScriptedLLM

LONG: dict[str, Any] = {"max_new_tokens": 20, "eos_ids": (9, 11)}


def narrow(name: str, **settings: Any) -> StepSearch:
    search = SEARCHES[name]
    assert isinstance(search, StepSearch)
    return replace(search, **({"n": 1, "m": 1} | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(STEPPED))
def test_width_one_is_plain_decoding_and_temperature_zero_judges_each_text_once(name: str) -> None:
    for seed in range(2):
        (seq,) = run(narrow(name), seed=seed, **LONG)
        assert seq.generated == plain(1, seed=seed, **LONG)[0] and seq.request.seed == seed
        assert len(seq.trace.grown) > 1 and seq.trace.ledger.tokens == len(seq.generated)
    greedy: dict[str, Any] = LONG | {"sampler": Sampler.from_settings()}
    found = run(SEARCHES[name], **greedy)
    assert [seq.generated for seq in found] == plain(1, **greedy)
    assert found[0].trace.ledger.scorer_calls == len(found[0].trace.grown)


def test_one_round_is_best_of_n_and_the_vote_a_weighted_vote() -> None:
    for seed in range(2):
        best = told(run(BestOfN(Even(), n=5), seed=seed))
        for search in (StepBeam(Even(), (7,), rounds=1, n=5, m=1), DVTS(Even(), (7,), rounds=1, n=5, m=1)):
            assert told(run(search, seed=seed)) == best
            voted = replace(search, choose="vote", answer="number")
            assert told(run(voted, seed=seed)) == told(run(WeightedVote(Even(), n=5, answer="number"), seed=seed))
    # With steps it is something else.
    assert any(
        told(run(StepBeam(Even(), (7,), 2, n=5), seed=s)) != told(run(BestOfN(Even(), n=5), seed=s)) for s in (0, 1)
    )


@pytest.mark.parametrize("drafter", ["auto", "draft-model", "prompt-lookup", "token-recycling", "suffix-tree"])
def test_drafts_leave_every_step_as_it_is(drafter: str) -> None:
    for name in sorted(STEPPED):
        assert told(run(SEARCHES[name], drafter=DRAFTERS[drafter](OTHER), **LONG)) == _alone(name)


@cache
def _alone(name: str) -> list[tuple[list[int], float | None]]:
    return told(run(SEARCHES[name], **LONG))


def followed(trace: Trace, number: int) -> list[int]:
    """The text that ends with this part."""
    part = trace.grown[number]
    return [*(followed(trace, part.parent) if part.parent >= 0 else []), *part.tokens]


@pytest.mark.parametrize("name", sorted(STEPPED))
def test_the_tree_holds_all_that_was_written_and_says_what_was_chosen(name: str) -> None:
    for seed in range(2):
        found = run(SEARCHES[name], seed=seed, **LONG)
        trace = found[0].trace
        assert sum(len(part.tokens) for part in trace.grown) == trace.ledger.tokens
        assert trace.ledger.counts["discarded"] == trace.ledger.tokens - len(found[0].generated)
        ends = {tuple(followed(trace, n)): part.score for n, part in enumerate(trace.grown) if part.finish}
        assert all(ends[tuple(seq.generated)] == seq.score for seq in found)
        assert trace.tokens + 1 == len(found[0].generated)
        parted = [part for part in trace.grown if part.finish is None]
        assert parted and all(len(part.tokens) == 3 or part.tokens[-1] == 7 for part in parted)


def test_a_beam_keeps_what_the_definition_keeps() -> None:
    search = StepBeam(Even(), (7,), 3, n=6, m=3)
    for seed in range(3):
        trace = run(search, seed=seed, **LONG)[0].trace
        rounds: list[list[int]] = []
        for first in itertools.count():
            numbers = range(6 * first, min(6 * first + 6, len(trace.grown)))
            if not numbers:
                break
            rounds.append(list(numbers))
        for before, after in itertools.pairwise(rounds):
            fresh = {tuple(followed(trace, n)): n for n in reversed(before)}
            going = [n for n in sorted(fresh.values()) if trace.grown[n].finish is None]
            kept = sorted(going, key=lambda n: -(trace.grown[n].score or 0.0))[:2]
            assert [trace.grown[n].parent for n in after] == [kept[i % len(kept)] for i in range(6)]


class Bent(Even):
    """The same order, other distances."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return super().score(candidates) ** 3


@pytest.mark.filterwarnings("ignore:all 6 texts come from one")
def test_what_takes_the_best_asks_for_their_order_alone() -> None:
    def texts(make: Any, scorer: Scorer) -> list[list[list[int]]]:
        return [[seq.generated for seq in run(make(scorer), seed=seed, **LONG)] for seed in range(3)]

    ways: list[Any] = [lambda each: BestOfN(each, n=4)]
    ways += [lambda each, kind=kind: kind(each, (7,), 3, n=6, m=3) for kind in (StepBeam, DVTS)]
    for make in ways:
        assert texts(make, Even()) == texts(make, Bent())
    # Odds are no order.
    odds = partial(ParticleFilter, delimiter=(7,), step_tokens=3, particles=6)
    assert texts(odds, Even()) != texts(odds, Bent())


TABLE = TableModel(3, seed=4)
PAIRS = list(itertools.product(range(3), repeat=2))


class Hint(Scorer):
    """Any number for any beginning."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([(0.9, 0.2, 0.6)[output[-1]] for output in candidates.outputs], dtype=torch.float64)


def test_the_law_of_steps_is_that_of_their_order_statistics() -> None:
    def counts(search: StepSearch, runs: int) -> np.ndarray:
        engine, found = Engine(TABLE), np.zeros(9)
        asked = [Request([1], seed=1000 * seed, sampler=PLAIN, max_new_tokens=2) for seed in range(runs)]
        jobs = [engine.enter(search.find(engine, request)) for request in asked]
        engine.run(jobs)
        for job in jobs:
            assert job.result is not None
            found[PAIRS.index(tuple(job.result[0].generated))] += 1
        return found

    def best(law: torch.Tensor) -> np.ndarray:
        """Of the best of two draws by the hint."""
        worth, p = np.array([0.9, 0.2, 0.6]), law.softmax(dim=-1).numpy()
        upto = np.array([p[worth <= each].sum() for each in worth])
        return upto**2 - (upto - p) ** 2

    first = TABLE.logits([1])
    steps = np.array([best(first)[a] * best(TABLE.logits([1, a]))[b] for a, b in PAIRS])
    plain_law = np.array([first.softmax(-1)[a] * TABLE.logits([1, a]).softmax(-1)[b] for a, b in PAIRS], float)
    greedy_steps = counts(DVTS(Hint(), (9,), 1, n=2, m=2), 150)
    assert chi_square(greedy_steps, steps) > 1e-3 > 1e-6 > chi_square(greedy_steps, plain_law)
    constant = counts(StepBeam(Constant(), (9,), 1, n=2, m=2), 150)
    assert chi_square(constant, plain_law) > 1e-3 > 1e-6 > chi_square(constant, steps)


def test_lines_do_not_know_of_each_other() -> None:
    """What a line finds is what it finds alone with its seeds."""
    two, settings = DVTS(Even(), (7,), 3, n=4, m=2), LONG
    for seed in range(3):
        alone = run(replace(two, n=2), seed=seed, **settings)
        both = run(two, seed=seed, **settings)
        assert {tuple(seq.generated) for seq in alone} <= {tuple(seq.generated) for seq in both}


def test_who_shares_the_engine_and_preemption_change_nothing() -> None:
    alone = {name: _alone(name) for name in STEPPED}
    engine, wanted = Engine(MODEL), SETTINGS | LONG
    text = engine.submit(Request(PROMPT[:3], **wanted))
    jobs = {name: engine.enter(SEARCHES[name].find(engine, Request(PROMPT, seed=7, **wanted))) for name in STEPPED}
    engine.run([text, *jobs.values()])
    assert {name: told(job.result) for name, job in jobs.items()} == alone
    assert text.generated == decode(MODEL, [PROMPT[:3]], **wanted)[0].generated
    for steps in range(1, 20, 6):
        engine = Engine(MODEL, prefill_chunk=4)
        job = engine.enter(SEARCHES["step-beam"].find(engine, Request(PROMPT, seed=7, **wanted)))
        for _ in range(steps):
            engine.step()
        engine.preempt(job)
        engine.run([job])
        assert told(job.result) == alone["step-beam"]


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_text_without_a_score_is_left_and_the_search_goes_on(how: str) -> None:
    for name in sorted(STEPPED):
        with pytest.warns(UserWarning, match="left out"):
            found = run(replace(SEARCHES[name], scorer=Failing(how)), **LONG)  # type: ignore[arg-type]
        assert found and all(seq.generated[0] % 2 for seq in found)


class Dying(Even):
    """Likes one way to begin best, and fails after it."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        if any(len(output) > 3 and output[0] % 3 == 0 for output in candidates.outputs):
            raise ValueError("nothing is known of this")
        return torch.tensor([0.9 if output[0] % 3 == 0 else 0.5 for output in candidates.outputs])


@pytest.mark.parametrize(("name", "width"), [("a-star", "k"), ("mcts", "n")])
def test_where_no_text_behind_the_best_has_a_score_the_others_go_on(name: str, width: str) -> None:
    search = replace(SEARCHES[name], scorer=Dying(), **{width: 6})  # type: ignore[arg-type]
    for seed in range(6):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = run(search, seed=seed, **LONG)
            except ValueError:
                # All of its beginnings are of that kind.
                continue
        assert all(len(seq.generated) <= 4 or seq.generated[0] % 3 for seq in found)
        if warned:
            return
    raise AssertionError("nothing has failed")


def test_where_a_step_ends() -> None:
    ends = StepEnd._in_text
    assert ends("so it is.\n\nNext", "\n\n") and not ends("so it is.\n", "\n\n")
    # Nothing but the delimiter is no step: a model that writes blank lines alone comes to an end.
    assert not ends("\n\n", "\n\n") and not ends("\n\n\n\n", "\n\n") and ends("\n\nso\n\n", "\n\n")


def test_what_a_text_is_worth_by_its_steps() -> None:
    scores = (0.5, 0.2, 0.8)
    worth = {how: aggregated(how, scores, Constant()) for how in ("last", "min", "mean", "prod")}  # type: ignore[arg-type]
    assert worth == {"last": 0.8, "min": 0.2, "mean": pytest.approx(0.5), "prod": pytest.approx(0.08)}
    assert aggregated("last", (), Constant()) == -math.inf


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: StepBeam(Even(), n=2, m=3), "m up to n"),
        (lambda: DVTS(Even(), n=6, m=4), "m=4 divides"),
        (lambda: StepBeam(Even(), step_tokens=0), "step_tokens of at least 1"),
        (lambda: StepBeam(Even(), delimiter=""), "delimiter that ends a step"),
        (lambda: StepBeam(Even(), aggregate="sum"), "last, min, prod or mean"),  # type: ignore[arg-type]
        (lambda: run(StepBeam(Even())), "token ids, or search through `LLM`"),
    ],
)
def test_bad_settings_are_named(make: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make()


def test_a_delimiter_that_the_tokenizer_cannot_write_is_refused() -> None:
    spoken = tokenizer()
    assert StepBeam(Even(), delimiter=";").bind(spoken).delimiter == ";"
    for search in (StepBeam(Even(), delimiter="é"), MCTS(Even()), Lookahead(StepBeam(Even()))):
        with pytest.raises(SettingsError, match="tokenizer cannot write"):
            search.bind(spoken)
    with pytest.raises(SettingsError, match="'Wait', which this model's tokenizer cannot write"):
        BudgetForcing(end="#", wait="Wait").bind(spoken)
    # Whoever writes whole texts alone can write it, and is refused for the steps.
    with pytest.raises(UnsupportedModel, match="only writes texts"):
        ScriptedLLM(["so"]).search("?", StepBeam(Even()), temperature=1.0)
