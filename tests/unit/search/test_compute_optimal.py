"""Compute-optimal search: a table of the best strategies, how it is fitted, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import decodery
from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.artifact import Artifact
from decodery.search.allocation import Allocation
from decodery.search.compute_optimal import ComputeOptimal
from decodery_benchmarks.commands.search import search
from decodery_benchmarks.commands.train_puzzles import compute_optimal
from decodery_benchmarks.puzzles.alphabet import tokenizer
from decodery_benchmarks.puzzles.scripted import ScriptedChain
from decodery_benchmarks.searches.allocation import Fold, crossed, fitted
from decodery_benchmarks.searches.job import SearchJob
from decodery_benchmarks.searches.settings import SearchSettings
from sampled import plain, run, told

BEST = "best-of-n(scorer=log-probability,n=5)"
TREE = "value-guided(scorer=log-probability,step_tokens=4,n=2,choose=best)"


def table(*strategies: str, edges: tuple[float, ...] = (), choices: Any = ((0,),), probes: int = 2) -> Allocation:
    return Allocation("log-probability(of=mean)", probes, edges, (4,), strategies, choices)


def test_one_bin_and_one_strategy_is_that_strategy() -> None:
    direct = run(resolve("search", BEST))
    found = run(ComputeOptimal(table(BEST), n=4))
    # What was drawn to tell the difficulty is among what it draws, and nothing is drawn twice.
    assert told(found) == told(direct)
    assert found[0].trace.ledger.tokens == direct[0].trace.ledger.tokens
    probes = sum(map(len, plain(2)))
    # The scorer reads the probes once.
    assert found[0].trace.ledger.rows["model"] == direct[0].trace.ledger.rows["model"] + probes
    tree = run(resolve("search", TREE))
    found = run(ComputeOptimal(table(TREE), n=9))
    assert told(found) == told(tree)
    assert found[0].trace.ledger.tokens == tree[0].trace.ledger.tokens + probes
    assert found[0].trace.ledger.counts["probed"] == 2
    # More probes than texts: all that are there take part.
    assert len(run(ComputeOptimal(table("best-of-n(scorer=log-probability,n=1)", probes=3), n=4))) == 3


def test_the_scores_of_the_probes_choose_the_strategy() -> None:
    means, chosen = [], []
    for seed in range(3):
        scored = run(resolve("search", "best-of-n(scorer=log-probability(of=mean),n=2)"), seed=seed)
        means.append(sum(seq.score or 0.0 for seq in scored) / 2)
    edge = sorted(means)[1]
    both = table(BEST, "best-of-n(scorer=log-probability,n=3)", edges=(edge,), choices=((0,), (1,)))
    for seed, mean in enumerate(means):
        found = run(ComputeOptimal(both, n=4), seed=seed)
        assert found[0].trace.ledger.counts["bin"] == (mean >= edge - 1e-9)
        chosen.append(len(found))
        assert told(found) == told(run(resolve("search", both.strategies[int(mean >= edge - 1e-9)]), seed=seed))
    assert set(chosen) == {3, 5}


def fold(right: Any, tokens: Any, easy: Any = (0.1, 0.2, 0.8, 0.9)) -> Fold:
    shown = np.array(easy)
    return Fold(
        *("log-probability", 1, (2, 4), tuple("abc")[: len(right)]),
        *(np.array(right, dtype=float), np.array(tokens, dtype=float)),
        *(np.full(len(shown), 10.0), shown, shown),
    )


def test_a_table_holds_what_was_best_within_the_budget() -> None:
    known = fold([[0, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], [[20, 20, 20, 20], [20, 20, 20, 20], [40.0, 40, 40, 40]])
    found = fitted(known, 2)
    # The third is the best, and costs as much as four texts.
    assert found.choices == ((1, 2), (0, 2)) and found.edges == (0.5,)
    assert [found.strategy(mean, n) for mean, n in ((0.4, 2), (0.5, 3), (0.5, 4), (0.9, 99))] == ["b", "a", "c", "c"]
    assert fitted(known, 1).choices == ((0, 2),)
    cheap = replace(known, tokens=np.array([[20.0] * 4, [19.0] * 4, [40.0] * 4]))
    assert fitted(cheap, 1).choices == ((1, 2),)
    with pytest.raises(SettingsError, match="begins at a budget of 2"):
        found.strategy(0.4, 1)
    with pytest.raises(SettingsError, match="keeps within the tokens of 2"):
        fitted(replace(known, tokens=known.tokens + 10), 1)
    # A half of the prompts decides for the other half: what that one says of itself changes nothing.
    halves = known.part(np.array([0, 2])), known.part(np.array([1, 3]))
    assert [fitted(half, 2).choices for half in halves] == [((1, 1), (0, 0)), ((0, 2), (0, 2))]
    rows = crossed(known, 2)
    assert [row["accuracy"] for row in rows] == [0.25, 0.5] and rows[0]["single"] == 0.25
    wrong = replace(known, right=known.right * [1, 0, 1, 0] + (1 - known.right) * [0, 1, 0, 1])
    assert fitted(wrong.part(np.array([0, 2])), 2).choices == fitted(halves[0], 2).choices
    assert crossed(wrong, 2) != rows


def scripted() -> LLM:
    return LLM(LoadedModel(ScriptedChain(0.3, 2), tokenizer(), None, "scripted", "float64"))


@pytest.mark.integration
def test_a_benchmark_makes_a_table_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SearchSettings(
        model="scripted",
        puzzle="chain:operations=2",
        methods=(
            "pass@n",
            "best-of-n",
            "self-consistency",
            "step-beam(scorer={scorer},n={n},m={n},delimiter={delimiter})",
        ),
        rewards=("clean",),
        budgets=(2, 4),
        pool=4,
        prompts=4,
        split="validation",
    )
    SearchJob(scripted(), settings, tmp_path / "run").run(lambda what, done, total: None)
    monkeypatch.setattr("decodery_benchmarks.solvers.load", lambda *args, **kwargs: scripted())
    out = tmp_path / "table.safetensors"
    arguments = [str(tmp_path / "run"), "--out", str(out), "--probes", "2", "--bins", "2"]
    done = CliRunner().invoke(compute_optimal, [*arguments, "--reward", "clean"], catch_exceptions=False)
    assert done.exit_code == 0 and f"table={out},n=4" in done.output, done.output
    found = Allocation.load(out)
    # Beside two probes the tree has no tokens left at two texts.
    assert not any("step-beam" in found.strategies[row[0]] for row in found.choices)
    assert found.facts["puzzles"] == 4 and len(found.facts["cross_validated"]) == 2
    assert not any("pass@n" in strategy for strategy in found.strategies)
    best = scripted().search(
        "7+3*2%10=", f"compute-optimal:table={out},n=4", temperature=1.0, apply_chat_template=False, max_new_tokens=24
    )
    assert best[0].text.startswith("7+3=") and best[0].trace.ledger.counts["probed"] == 2
    for wrong in (["--reward", "noisy"], ["--reward", "clean", "--probes", "9"]):
        failed = CliRunner().invoke(compute_optimal, [*arguments, *wrong])
        assert failed.exit_code == 1 and "this benchmark has" in str(failed.exception)
    # Whatever is told of test puzzles afterwards, no table knows them.
    SearchJob(scripted(), replace(settings, split="test"), tmp_path / "test").run(lambda what, done, total: None)
    refused = [str(tmp_path / "test"), *arguments[1:], "--reward", "clean"]
    failed = CliRunner().invoke(compute_optimal, refused)
    assert failed.exit_code == 1 and "measure with --split validation" in str(failed.exception)


def test_a_benchmark_of_searches_takes_puzzles_of_one_split(tmp_path: Path) -> None:
    common = ["--prompts", "1", "--budgets", "1", "--pool", "1", "--methods", "pass@n"]
    done = CliRunner().invoke(
        search, [*common, "--split", "validation", "--rewards", "oracle", "--out", str(tmp_path / "a")]
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "a" / "results.json").read_text())["settings"]["split"] == "validation"
    for wrong in ("qualitative", "test,validation", ""):
        failed = CliRunner().invoke(search, [*common, "--split", wrong])
        assert failed.exit_code == 2 and "'test', 'validation'" in failed.output


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with pytest.raises(decodery.core.errors.ModelNotFound, match="compute-optimal"):
        Allocation.load(path)
    sound = table(BEST)
    sound.save(path)
    assert Allocation.load(path).strategies == (BEST,)
    for wrong in ({"strategies": []}, {"edges": [0.1]}, {"budgets": [0]}, {"probes": 0}):
        broken = Artifact.read(path, "table of strategies", "")
        facts = {**broken.facts, **wrong}
        Artifact("table of strategies", {"choices": torch.tensor([[0]])}, facts).save(tmp_path / "broken")
        with pytest.raises(CorruptFile, match="holds no table of strategies"):
            Allocation.load(tmp_path / "broken")
    with pytest.raises(SettingsError, match="other searches than itself"):
        ComputeOptimal(table("compute-optimal:table=x"), n=4)
