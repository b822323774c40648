"""Laws of drafts: planted ones are found again, intervals hold what they promise, and a sweep says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

import decodery
from decodery.bench.workloads import questions
from decodery.core.errors import SettingsError
from decodery.engine.output import Output
from decodery.models.torch.transformer import Transformer
from decodery.speculative.heads.drafter import head_kind
from decodery.speculative.heads.head import HEAD, TrainedHead
from decodery_benchmarks.commands.sweep import sweep
from decodery_benchmarks.results import read_result
from decodery_benchmarks.scaling import Law, Plane, joint_report, plot, plot_foretold, report, students_t
from tiny_models import make_model, save

AMOUNTS = (62e3, 125e3, 250e3, 500e3, 1e6)


def test_a_planted_law_is_found_again() -> None:
    law = Law.fit(AMOUNTS, [0.7 + 0.31 * np.log(each) for each in AMOUNTS])
    assert abs(law.intercept - 0.7) < 1e-9 and abs(law.slope - 0.31) < 1e-9 and abs(law.r2 - 1.0) < 1e-9
    assert abs(law.at(4e6)[0] - (0.7 + 0.31 * np.log(4e6))) < 1e-9
    for freedom in (1, 2, 3, 7, 40):
        assert abs(students_t(freedom) - stats.t.ppf(0.975, freedom)) < 1e-3 * students_t(freedom)
    for amounts in ((1.0, 2.0), (3.0, 3.0, 3.0), (0.0, 1.0, 2.0)):
        with pytest.raises(SettingsError, match="a law needs three measurements"):
            Law.fit(amounts, [1.0] * len(amounts))


def test_intervals_cover_what_they_promise() -> None:
    rng = np.random.default_rng(0)
    slopes = narrow = coming = 0
    for _ in range(1000):
        truth = [2.0 + 0.2 * np.log(each) for each in (*AMOUNTS, 2e6)]
        seen = np.array(truth) + rng.normal(0.0, 0.1, 6)
        law = Law.fit(AMOUNTS, seen[:5])
        low, high = law.slope_interval
        slopes += low <= 0.2 <= high
        coming += law.at(2e6)[1] <= seen[5] <= law.at(2e6)[2]
        # As if the spread were known and not found from five points.
        shrunk = (high - low) / 2 * 1.96 / students_t(3)
        narrow += abs(law.slope - 0.2) <= shrunk
    assert 930 <= slopes <= 970 and 930 <= coming <= 970
    assert narrow < 930


def test_what_was_held_out_is_compared_and_drawn() -> None:
    found = report(AMOUNTS[::-1], [3.0, 2.8, 2.6, 2.4, 2.2])
    assert found["amounts"] == list(AMOUNTS) and found["held_out"]["measured"] == 3.0  # type: ignore[index]
    assert found["held_out"]["low"] <= 3.0 <= found["held_out"]["high"] and found["next"]["amount"] == 2e6  # type: ignore[index]
    drawn = plot(Law.fit(AMOUNTS, [2.2, 2.4, 2.7, 2.8, 3.0]), "training tokens", "tokens per pass")
    assert drawn.count("<circle") == 5 and drawn.endswith("</svg>")


PAIRS = [(data, size) for data in (2e3, 8e3, 3.2e4) for size in (8e4, 1.6e5)]


def test_a_law_of_two_amounts_tells_their_shares_apart() -> None:
    def truth(data: float, size: float) -> float:
        return -2.0 + 0.4 * np.log(data) + 0.1 * np.log(size)

    law = Plane.fit(PAIRS, [truth(*each) for each in PAIRS])
    assert np.allclose((law.intercept, *law.slopes, law.r2), (-2.0, 0.4, 0.1, 1.0), atol=1e-9)
    assert abs(law.at((1e5, 1e6))[0] - truth(1e5, 1e6)) < 1e-9
    # Of one amount it is the law of one amount.
    one = Law.fit(AMOUNTS, [2.2, 2.4, 2.7, 2.8, 3.0])
    same = Plane.fit([(each,) for each in AMOUNTS], one.values)
    assert np.allclose((same.slopes[0], *same.slope_intervals[0]), (one.slope, *one.slope_interval), atol=1e-9)
    assert np.allclose(same.at((4e6,)), one.at(4e6), atol=1e-9)
    rng, covered, coming = np.random.default_rng(0), 0, 0
    for _ in range(600):
        seen = [truth(*each) + rng.normal(0.0, 0.1) for each in PAIRS]
        law = Plane.fit(PAIRS, seen)
        covered += all(low <= slope <= high for slope, (low, high) in zip((0.4, 0.1), law.slope_intervals, strict=True))
        _, low, high = law.at((6.4e4, 1.6e5))
        coming += low <= truth(6.4e4, 1.6e5) + rng.normal(0.0, 0.1) <= high
    # Both slopes at once, whose errors have little to do with each other here.
    assert 0.88 * 600 <= covered <= 0.96 * 600 and 0.92 * 600 <= coming <= 0.98 * 600
    found = joint_report(PAIRS, [truth(*each) + 0.01 * number for number, each in enumerate(PAIRS)])
    assert [each["amounts"] for each in found["next"]] == [[6.4e4, 1.6e5], [3.2e4, 3.2e5]]  # type: ignore[attr-defined]
    drawn = plot_foretold(found["foretold"], "tokens per pass")  # type: ignore[arg-type]
    assert drawn.count("<circle") == 6 and drawn.endswith("</svg>")
    # A size that grows with the data always says nothing of its own.
    for wrong in ([(each, 2 * each) for each in AMOUNTS], PAIRS[:2], [(0.0, 1.0), *PAIRS]):
        with pytest.raises(SettingsError, match="a law"):
            Plane.fit(wrong, [1.0] * len(wrong))


def test_a_sweep_takes_heads_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    folder = save(make_model("llama", 0), tmp_path / "model")
    lm = decodery.load(str(folder))
    assert isinstance(lm.model, Transformer)
    heads = []
    for seed, kind in enumerate(("eagle-3", "hydra")):
        tensors, about = head_kind(kind).untrained(lm.model, seed)
        heads.append(tmp_path / f"head-{seed}")
        TrainedHead(kind, tensors, about).save(heads[-1] / HEAD)
    names = ",".join(f"{each}={place}" for place, each in enumerate([*heads, folder], 1))
    options = ["-m", str(folder), "--prompts", "1", "--max-new-tokens", "6", "--json"]
    done = CliRunner().invoke(sweep, [names, *options], catch_exceptions=False)
    found = json.loads(done.output)
    (question,) = questions("built-in", None, 1)
    expected = []
    for kind, head in zip(("eagle-3", "hydra"), heads, strict=True):
        output = lm.generate(question.turns[0], drafter=f"{kind}:head={head},tree_policy=none", max_new_tokens=6)
        assert isinstance(output, Output) and max(step.nodes for step in output.trace.decoding) <= 4
        expected.append(output.trace.tokens_per_pass)
    assert found["values"][:2] == pytest.approx(expected) and found["values"][2] == 5 > max(expected)


def test_a_sweep_measures_fits_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    folders = [save(make_model("llama", seed), tmp_path / f"draft-{seed}") for seed in range(3)]
    names = ",".join(f"{folder}={2.0**place}" for place, folder in enumerate(folders))
    options = [
        "-m",
        str(folders[0]),
        "--prompts",
        "2",
        "--max-new-tokens",
        "4",
        "--json",
        "--out",
        str(tmp_path / "law"),
    ]
    done = CliRunner().invoke(sweep, [names, *options, "--out", str(tmp_path / "law")])
    assert done.exit_code == 0, done.output
    found = read_result(tmp_path / "law" / "law.json")
    assert found["amounts"] == [1.0, 2.0, 4.0] and found["values"][0] > max(found["values"][1:]) >= 1.0
    assert (tmp_path / "law" / "law.svg").read_text().count("<circle") == 3
    both = ",".join(f"{folder}={2.0**place}/{3 + place % 2}" for place, folder in enumerate([*folders, *folders[:2]]))
    done = CliRunner().invoke(sweep, [both, *options[:-2], "--out", str(tmp_path / "both")])
    assert done.exit_code == 0, done.output
    together = read_result(tmp_path / "both" / "law.json")
    assert len(together["slopes"]) == 2 and together["values"] == [*found["values"], *found["values"][:2]]
    # Interrupted after its first drafts it goes on with the others, and only with the same settings.
    measured = json.loads((tmp_path / "law" / "measured.json").read_text())
    measured["values"] = {str(folders[0]): 9.0}
    (tmp_path / "law" / "measured.json").write_text(json.dumps(measured))
    resumed = CliRunner().invoke(sweep, [names, *options, "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert read_result(tmp_path / "law" / "law.json")["values"] == [9.0, *found["values"][1:]]
    with pytest.raises(SettingsError, match="has other settings"):
        CliRunner().invoke(sweep, [names, *options, "--prompts", "1", "--resume"], catch_exceptions=False)
    with pytest.raises(SettingsError, match="no interrupted sweep"):
        again = [names, *options, "--resume", "--out", str(tmp_path / "no")]
        CliRunner().invoke(sweep, again, catch_exceptions=False)
    with pytest.raises(SettingsError, match="needs 5 drafts"):
        CliRunner().invoke(sweep, ["small=1/2,more=2/3,most=3/3"], catch_exceptions=False)
    with pytest.raises(SettingsError, match="the same number of amounts"):
        CliRunner().invoke(sweep, ["small=1,more=2/3,most=3"], catch_exceptions=False)
    with pytest.raises(SettingsError, match="as FOLDER=62000, not 'small'"):
        CliRunner().invoke(sweep, ["small,more=2,most=3"], catch_exceptions=False)
