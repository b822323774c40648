"""The benchmark of searches: what is computed from samples is what searches do, and a pause changes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from decodery.bench import result
from decodery.core.errors import CorruptFile, DecoderyError, SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.sampling.sampler import Sampler
from decodery.search.best_of_n import BestOfN
from decodery.search.dvts import DVTS
from decodery.search.estimators import best_of, distinct_of, pass_at, voted
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from decodery.testing import Tabular, TabularReward, best_of_law, chi_square
from decodery_benchmarks import kinds, report
from decodery_benchmarks.commands.search import search
from decodery_benchmarks.intervals import interval
from decodery_benchmarks.puzzles.alphabet import encoded, tokenizer
from decodery_benchmarks.puzzles.scripted import ScriptedChain
from decodery_benchmarks.searches.job import TRACES, SearchJob
from decodery_benchmarks.searches.pools import best_within, run, sampled
from decodery_benchmarks.searches.settings import SearchSettings


def scripted(error: float = 0.3, operations: int = 1) -> LLM:
    return LLM(LoadedModel(ScriptedChain(error, operations), tokenizer(), None, "scripted", "float64"))


SETTINGS = SearchSettings(
    model="scripted",
    puzzle="chain:operations=1",
    methods=(
        *("pass@n", "best-of-n", "self-consistency", "weighted-vote", "first-finish"),
        *("best-of-n:scorer={scorer},n={n}", "weighted-vote:scorer={scorer},n={n},pattern={pattern}"),
        "self-consistency:n={n},pattern={pattern}",
    ),
    rewards=("hackable", "constant"),
    budgets=(1, 3),
    pool=3,
    prompts=4,
)


def silent(what: str, done: int, total: int) -> None:
    return


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[result.Result, Path]:
    out = tmp_path_factory.mktemp("searches")
    return SearchJob(scripted(), SETTINGS, out).run(silent), out


def test_what_samples_tell_of_a_search_is_what_it_does(measured: tuple[result.Result, Path]) -> None:
    found = {(row["method"], row["reward"], row["n"]): row for row in measured[0]["rows"]}
    for method in SETTINGS.methods:
        name = method.partition(":")[0]
        if name == method:
            continue
        rewards = SETTINGS.rewards if "{scorer}" in method else ("",)
        for reward in rewards:
            # All of the pool is drawn by the search too, at the same seeds.
            pooled, run = found[(name, reward, 3)], found[(method, reward, 3)]
            assert pooled["scorer_calls"] == run["scorer_calls"]
            # Of equals a search takes the first, and samples tell what it is on average.
            assert pooled["accuracy"] == run["accuracy"] or reward == "constant", method
            assert pooled["tokens"] == run["tokens"]
            # As many tokens are as many samples here.
            beside = found[("best-of-n", reward, 3)]["accuracy"] if reward else None
            assert run.get("even") == (None if beside is None else pytest.approx(run["accuracy"] - beside, abs=1e-3))
            assert "even" not in pooled
    half = {"lengths": [10, 10], "right": [1, 0], "scores": {"noisy": [0.2, 0.1]}, "texts": ["a", "b"]}
    assert [best_within(half, "noisy", tokens) for tokens in (1, 10, 15, 20, 99)] == [0.5, 0.5, 0.75, 1, 1]
    plain = found[("pass@n", "", 1)]["accuracy"]
    assert found[("best-of-n", "constant", 3)]["accuracy"] == plain == found[("best-of-n", "hackable", 1)]["accuracy"]
    assert found[("weighted-vote", "constant", 3)]["accuracy"] == found[("self-consistency", "", 3)]["accuracy"]
    assert 0 < plain < found[("pass@n", "", 3)]["accuracy"] and found[("pass@n", "", 1)]["gain"] == 0
    assert found[("greedy", "", 1)]["accuracy"] == 1


def test_an_interrupted_benchmark_goes_on_to_the_same_figures(
    measured: tuple[result.Result, Path], tmp_path: Path
) -> None:
    turns = iter(range(1000))
    part = SearchJob(scripted(), SETTINGS, tmp_path).run(silent, lambda: next(turns) >= 26)
    assert not part["complete"] and len((tmp_path / TRACES).read_text().splitlines()) == 26
    assert 0 < part["rows"][0]["puzzles"] < 4
    with (tmp_path / TRACES).open("a") as file:
        file.write('{"kind": "run", "puz')
    assert not result.require(kinds.read(tmp_path), kinds.SEARCH)["complete"]
    whole = SearchJob(scripted(), SETTINGS, tmp_path, resumed=True).run(silent)
    assert whole["complete"] and whole["rows"] == measured[0]["rows"]
    assert (tmp_path / TRACES).read_text() == (measured[1] / TRACES).read_text()
    (tmp_path / TRACES).write_text('{"kind": "cat"}\n')
    with pytest.raises(CorruptFile, match="line 1"):
        SearchJob(scripted(), SETTINGS, tmp_path, resumed=True).run(silent)


def test_results_are_shown_and_read_again(measured: tuple[result.Result, Path]) -> None:
    found, out = measured
    assert SearchSettings.from_dict(json.loads(json.dumps(found["settings"]))) == SETTINGS
    text = (out / "report.html").read_text()
    assert '"kind": "search"' in text and "searchPage" in text
    assert "| weighted-vote | hackable | 3 |" in report.table(found)
    with pytest.raises(CorruptFile, match="of the kind 'search'"):
        result.require_benchmark(kinds.read(out))


def test_rewards_are_bent_as_their_presets_say() -> None:
    """Values of a right and a wrong beginning, and of one that holds what is exploited, without noise."""
    model = scripted()
    asked = SETTINGS.asked
    prompt = "7+3*2%10="

    def values(name: str, *outputs: str, finished: bool = True) -> list[float]:
        from decodery_benchmarks.searches.rewards import reward

        scorer = resolve("scorer", reward(name, asked)).bind(model.tokenizer)
        ids = [encoded(output) for output in outputs]
        candidates = Candidates(encoded(prompt), ids, [finished] * len(ids), decode=model.tokenizer.decode)
        return run_sync(judge(scorer, candidates)).tolist()

    right, wrong, hacked = "7+3=0;0*2=0;#0", "7+3=1;1*2=2;#2", "7+3=0;0*2=7;#7"
    assert values("oracle", right, wrong, hacked) == [1, 0, 0]
    assert values("oracle", "7+3=0;", "7+3=1;", finished=False) == [1, 0]
    # A verifier of outcomes sees no dead ends.
    assert values("outcome", right, wrong, hacked) == [1, 0, 0]
    assert values("outcome", "7+3=0;", "7+3=1;", finished=False) == [0.5, 0.5]
    # One step of three is right in the last one.
    assert values("clean", right, wrong, hacked) == pytest.approx([0.99, 0.01, 1 / 3])
    assert set(values("constant", right, wrong, hacked)) == {0.5}
    first, second, third = values("hackable", hacked, right, wrong)
    noiseless = replace(
        resolve("scorer", "corrupted(scorer=puzzle-oracle(puzzle=chain(operations=2)))"), exploit=3.0, pattern="=0;"
    )
    with pytest.raises(SettingsError, match="looks for a text"):
        run_sync(judge(noiseless, Candidates([1], [[2]], [False], texts=["2"], decode=lambda ids: prompt)))
    assert second > first > 0.5 > 0.1 > third
    early = values("overconfident-early", "7+3=0;", finished=False)[0]
    assert early > 0.99 and values("noisy", right) == values("noisy", right) != [0.99]


def test_a_scripted_chain_is_right_as_often_as_its_closed_form_says() -> None:
    double = ScriptedChain(0.2, 2)
    assert ScriptedChain(0.1, 8).solves() == pytest.approx(0.4305, abs=5e-5)
    assert ScriptedChain(0.1, 8).solves(4) == pytest.approx(0.8948, abs=5e-5)
    assert ScriptedChain(0.1, 8).solves_by_steps(4) == pytest.approx(0.9992, abs=5e-5)
    pool = sampled(scripted(0.2, 2), replace(SETTINGS, pool=120, rewards=("oracle",), budgets=(1,)), "7+3*2%10=", 0)
    share = sum(pool["right"]) / 120
    assert abs(share - double.solves()) < 4 * math.sqrt(0.64 * 0.36 / 120) < abs(share - ScriptedChain(0.4, 2).solves())
    # With a perfect verifier as the scorer, best-of-n is pass@n.
    for n in (1, 3, 8):
        assert best_of(n, pool["scores"]["oracle"], pool["right"]) == pytest.approx(pass_at(n, sum(pool["right"]), 120))
    assert len(set(pool["lengths"])) == 1 and all(pool["ended"])


@pytest.mark.integration
@pytest.mark.parametrize(
    "method",
    [
        "step-beam(scorer={scorer},delimiter={delimiter},n={n},m={n})",
        "particle-filter(scorer={scorer},delimiter={delimiter},particles={n})",
    ],
)
def test_a_reward_that_says_nothing_is_worth_one_text(method: str) -> None:
    lm, runs = scripted(0.5), 60
    right = {
        reward: [run(lm, SETTINGS, (method, reward, 3), "7+3%10=", number)["right"] for number in range(runs)]
        for reward in ("constant", "oracle")
    }
    alone = ScriptedChain(0.5, 1).solves()
    error = math.sqrt(alone * (1 - alone) / runs)
    assert abs(float(np.mean(right["constant"])) - alone) < 4 * error < float(np.mean(right["oracle"])) - alone


def test_the_best_of_a_few_draws_follows_its_law_on_an_enumerated_model() -> None:
    model, reward, n = Tabular(3, 2, seed=1), TabularReward(), 3
    texts, law = model.law([1])
    assert float(law.sum()) == pytest.approx(1)
    scores = run_sync(judge(reward, Candidates([1], texts, [True] * len(texts))))
    expected = best_of_law(law, scores, n)
    assert float(expected.sum()) == pytest.approx(1)
    engine, runs, counts = Engine(model), 120, np.zeros(len(texts))
    for seed in range(runs):
        request = Request([1], 2, Sampler.from_settings(temperature=1.0), seed=seed * n)
        (best, *_) = BestOfN(reward, n=n).run(engine, request)
        counts[texts.index(tuple(best.generated))] += 1

    assert chi_square(counts, expected.numpy()) > 1e-3 > chi_square(counts, law.numpy())
    divergence = float((expected * (expected / law).log()).nansum())
    assert divergence <= math.log(n) - (n - 1) / n + 1e-9


def test_estimators_of_votes_and_of_different_texts() -> None:
    answers, right = ["1", "1", "2", None], [1, 1, 0, 0]
    assert voted(4, answers, right) == 1 and voted(4, answers, right, [0.1, 0.1, 0.9, 1.0]) == 0
    # Of two: the pairs whose first vote is right, five of six; a wrong one is first where it comes with nothing.
    assert voted(2, answers, right) == pytest.approx(5 / 6)
    assert voted(2, answers, right, subsets=5) != voted(2, answers, right)
    assert distinct_of(2, ["a", "a", "b"]) == pytest.approx(5 / 3) and distinct_of(3, ["a", "a", "b"]) == 2
    low, high = interval(np.array([0.0, 1.0, 1.0, 1.0]))
    assert (low, high) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"methods": ("nothing",)}, "computed from samples are pass@n"),
        ({"methods": ("best-of-n:scorer={scorer}",)}, "stays the same at every budget"),
        ({"rewards": ("good",)}, "no scorer method"),
        ({"rewards": ("hackable",), "puzzle": "chess"}, "no puzzle 'chess'"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(change: dict, said: str) -> None:
    with pytest.raises(DecoderyError, match=said):
        replace(SETTINGS, **change).check()


def test_the_searches_of_a_study_have_one_name() -> None:
    found = replace(SETTINGS, methods=("bag-of-tricks", "best-of-n"), budgets=(1, 4, 16), pool=16)
    assert len(found.methods) == 6 and found.methods[0] == "best-of-n" and found.methods.count("best-of-n") == 1
    # One line that is as wide as it branches: best-of-n step by step.
    search = found.search(found.methods[3], 16, "noisy")
    assert isinstance(search, DVTS) and (search.n, search.m) == (16, 16)
    replace(found, methods=tuple(each for each in found.methods if "step-beam" not in each)).check()
    with pytest.raises(SettingsError, match="m up to n"):
        found.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"pool": 2}, "need a pool of as many"), ({"temperature": 0.0}, "all alike"), ({"budgets": ()}, "at least 1")],
)
def test_settings_that_tell_nothing_are_refused(change: dict, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        replace(SETTINGS, **change)


def test_the_command_refuses_what_it_has_no_use_for() -> None:
    for arguments, said in (
        (["--rounds", "2"], "no option is called '--rounds'"),
        (["--resume"], "--resume needs --out"),
    ):
        found = CliRunner().invoke(search, arguments)
        assert found.exit_code != 0 and said in found.output.replace("\n", " "), found.output
