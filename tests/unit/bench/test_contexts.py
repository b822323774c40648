"""The benchmark of cache policies: its figures against plain ones, its pictures, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.bench import result
from decodery.core.errors import CorruptFile, SettingsError, UnknownMethod
from decodery.core.registry import resolve
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.models.trained.write_gates import WriteGates
from decodery.testing import tiny_transformer
from decodery_benchmarks import kinds, report
from decodery_benchmarks.long_context import job, measure
from decodery_benchmarks.long_context.bounds import Oracle, Uniform
from decodery_benchmarks.long_context.cases import PROMPT, cases
from decodery_benchmarks.long_context.errors import ROWS, Errors
from decodery_benchmarks.long_context.figures import PANELS, plot
from decodery_benchmarks.long_context.job import ContextJob
from decodery_benchmarks.long_context.measure import Bench
from decodery_benchmarks.long_context.recall import Recall
from decodery_benchmarks.long_context.settings import ContextSettings, spec_of
from serving import tiny_lm


def tiny_bench(texts: int = 1) -> Bench:
    """A small model, its own words, and none of the cases."""
    lm = tiny_lm()
    draws = np.random.default_rng(0)
    bench = object.__new__(Bench)
    bench.lm, bench.model, bench.cases, bench._full = lm, lm.model, {}, None
    bench.texts = [draws.integers(3, lm.model.vocab_size, PROMPT + 24).tolist() for _ in range(texts)]
    return bench


def test_errors_are_those_of_the_weight_that_is_not_read() -> None:
    """Nothing is lost where everything is read; what is lost is bounded by the weight that is missed."""
    bench = tiny_bench()
    errors = Errors(bench, count=1)
    with torch.no_grad():
        nothing = errors.of(resolve("cache-policy", "quest:budget=1.0"))
        assert nothing["error"] < 1e-5 and nothing["mass"] == nothing["recall"] == 1.0
        window = errors.of(StreamingLLM(budget=32))
        evenly = errors.of(Uniform(0.5))
    assert 0 < window["mass"] < 1 and 0 < window["recall"] < 1 and window["error"] > 0
    # Half of the keys at even distances hold about half of what a model pays that has learned nothing.
    assert 0.35 < evenly["mass"] < 0.7 and 0.3 < evenly["recall"] < 0.7
    assert window["error closed"] != window["error"]
    # What the window reads of the weight, by hand: its first four and last 28 of every row.
    caught = [
        weights[:, row, [*range(4), *range(PROMPT + row - 27, PROMPT + row + 1)]].sum(axis=-1).mean()
        for weights in errors._wholes[0].weighing.weights.values()
        for row in range(ROWS)
    ]
    assert window["mass"] == pytest.approx(float(np.mean(caught)), abs=1e-4)


def test_the_oracle_is_told_and_uniform_is_not() -> None:
    lm = tiny_lm()
    found = cases(lm, ContextSettings(methods=("uniform",), prompts=2, input_tokens=(60, 120)))
    assert len(found["needle"]) == 12 and len(found["lines"]) == 2
    for case in [*found["needle"], *found["lines"]]:
        begin, end = case.span
        assert case.answer in lm.tokenizer.decode(case.document[begin:end]) and case.document[begin:end]
    # At the same budget the one keeps the span and the other does not.
    bench = tiny_bench()
    span = (100, 110)
    for kv, kept in ((Oracle(0.1, span), 10), (Uniform(0.1), 1)):
        with torch.no_grad():
            cache, _ = bench.start(kv, bench.texts[0][:PROMPT], PROMPT)
            whole, _ = bench.start(None, bench.texts[0][:PROMPT], PROMPT)
        ours, theirs = cache.view(0)[0][0], whole.view(0)[0][0][slice(*span)]
        there = sum(bool((ours == key).all(dim=1).any()) for key in theirs)
        assert there == kept if kept == 10 else there < 5


def test_an_interrupted_benchmark_goes_on_and_draws_both_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def figures(bench: Any, method: str, share: float, errors: Any, recall: Any) -> dict[str, Any]:
        asked.append((method, share))
        right = [round(4 * share), 4]
        return {
            "needle known": right,
            "lines unknown": right,
            "top-1": share,
            "kl": 1 - share,
            "first difference": [1, 9, 3],
        }

    monkeypatch.setattr(job, "_figures", figures)
    monkeypatch.setattr(measure.Bench, "solved_of_all", lambda self: {"needle": [4, 6]})
    settings = ContextSettings(methods=("uniform", "oracle", "h2o"), shares=(0.25, 0.5), prompts=1, input_tokens=(50,))
    ends = iter([False, False, True])
    first = ContextJob(tiny_lm(), settings, tmp_path).run(lambda *args: None, lambda: next(ends))
    assert not first["complete"] and asked == [("uniform", 0.25), ("oracle", 0.25)]
    earlier = result.require(kinds.read(tmp_path), kinds.CONTEXTS)
    assert ContextSettings.from_dict(earlier["settings"]) == settings
    whole = ContextJob(tiny_lm(), settings, tmp_path, earlier).run(lambda *args: None)
    assert whole["complete"] and len(asked) == len(set(asked)) == len(whole["rows"]) == 6
    assert "needle 4 of 6" in report.table(whole) and "| h2o | 2/4 | 2/4 | 0.500 | 0.50 | 3 |" in report.table(whole)
    drawn = plot(whole["rows"])
    panels = [panel for panel in PANELS if f">{panel}</text>" in drawn]
    assert panels == ["needle known", "lines unknown", "top-1"]
    # Both lines in every panel, and in the legend.
    assert drawn.count("stroke-dasharray") == 2 * (len(panels) + 1)
    assert (tmp_path / "budgets.svg").read_text() == drawn and "<svg" in (tmp_path / "report.html").read_text()
    with pytest.raises(CorruptFile, match="of the kind 'contexts', not 'monitors'"):
        result.require(earlier, kinds.MONITORS)


def test_what_was_made_for_one_model_is_measured_on_that_one_alone(tmp_path: Path) -> None:
    """The small model of recall has another shape; a policy that fits it is asked there."""
    bench, recall = tiny_bench(), Recall(0, lambda *args: None)
    recall._model = tiny_transformer(0, num_layers=1)
    recall._cases = [([1, 2, 3, 4, 1], 2)]
    gate = tmp_path / "write-gate.safetensors"
    WriteGates.initial(bench.model.config, 1, (4,)).save(gate)
    row, other = (
        job._figures(bench, method, 0.5, None, recall)  # type: ignore[arg-type]
        for method in (f"write-gate:gate={gate},budget={{}}", "h2o:budget={}")
    )
    assert row["read"] < 1 and "recall known" not in row and other["recall known"][1] == 1


def test_settings_that_mean_nothing_are_refused() -> None:
    assert spec_of("snapkv", 0.1) == "snapkv:budget=0.1,window=16"
    assert spec_of("h2o:budget={},recent=4", 0.5) == "h2o:budget=0.5,recent=4"
    assert "double-sparsity" not in ContextSettings().methods and "h2o" in ContextSettings().methods
    for wrong in ({"shares": (0.0,)}, {"shares": (3.0,)}, {"prompts": 0}, {"input_tokens": (3,)}):
        with pytest.raises(SettingsError, match="of cache policies"):
            ContextSettings(**wrong)
    with pytest.raises(UnknownMethod, match="h3o"):
        ContextSettings(methods=("h3o",))
