"""The benchmark of monitors: its figures against plain ones, what it keeps, and what it says of bad input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decodery.bench import report, result
from decodery.bench.watching import job
from decodery.bench.watching.figures import Judged, calibration_error, detection, mcnemar, word_scores
from decodery.bench.watching.heads import _by_means
from decodery.bench.watching.job import WatchJob
from decodery.bench.watching.settings import TESTBEDS, WatchSettings
from decodery.errors import CorruptFile, SettingsError
from serving import tiny_lm


def judged(seed: int = 0, *, apart: float = 2.0, count: int = 400) -> Judged:
    random = np.random.default_rng(seed)
    wrong = random.random(count) < 0.4
    scores = random.standard_normal(count) + apart * wrong
    groups = [f"{at // 2}" for at in range(count)]
    return Judged(scores.tolist(), wrong.tolist(), groups, [f"{at % 3}" for at in range(count)], 1.0)


def test_figures_tell_signal_from_none_and_say_how_sure_they_are() -> None:
    found, nothing = detection("m", "a", [judged(), judged(1)]), detection("m", "b", [judged(apart=0.0)])
    assert 0.88 < found["low"] < found["auroc"] < found["high"] < 0.96 and len(found["by_seed"]) == 2
    assert nothing["low"] < 0.5 < nothing["high"] and found["false"] < 0.25 < 0.75 < found["flagged"]
    random = np.random.default_rng(0)
    chances = random.random(2000)
    wrong = (random.random(2000) < chances).tolist()
    groups = [f"{at}" for at in range(2000)]
    logits = np.log(chances / (1 - chances)).tolist()
    assert calibration_error(Judged(logits, wrong, groups, groups)) < 0.05
    # What no line straightens stays badly calibrated.
    bent = (np.abs(chances - 0.5)).tolist()
    assert calibration_error(Judged(bent, (chances > 0.8).tolist(), groups, groups)) > 0.075
    assert mcnemar(0, 0) == 1.0 and mcnemar(5, 0) == 0.0625 and mcnemar(3, 3) == 1.0
    scores = word_scores(["a salt", "b salt", "a", "b"], [True, True, False, False], ["salt", "c"])
    assert scores[0] > 0 > scores[1]
    import torch

    rows = torch.randn(40, 6, 4, generator=torch.Generator().manual_seed(0))
    labels = np.arange(40) % 2 == 0
    rows[labels, 3] += 3
    told = _by_means(rows, labels, np.arange(40) < 30)
    assert min(np.array(told)[labels[30:]]) > max(np.array(told)[~labels[30:]])


def test_an_interrupted_benchmark_goes_on_and_shows_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fake(name: str) -> Any:
        bed = name.rpartition(".")[2]

        def measure(lm: Any, settings: Any, work: Path, progress: Any) -> Any:
            asked.append(bed)
            acts = [{"testbed": bed, "what": "</script>", "price": 0.25, "left": None}]
            return [detection(bed, "sae", [judged()])], acts, [f"{bed}: noted"]

        return SimpleNamespace(measure=measure)

    monkeypatch.setattr(job, "import_module", fake)
    settings, ends = WatchSettings(methods=("heads", "codes"), rounds=2), iter([False, True])
    first = WatchJob(tiny_lm(), settings, tmp_path).run(lambda *args: None, lambda: next(ends))
    assert not first["complete"] and asked == ["heads"]
    earlier = result.require(result.read(tmp_path), result.MONITORS)
    assert WatchSettings.from_dict(earlier["settings"]) == settings
    whole = WatchJob(tiny_lm(), settings, tmp_path, earlier).run(lambda *args: None)
    assert whole["complete"] and asked == ["heads", "codes"] and [row["testbed"] for row in whole["rows"]] == asked
    text, page = report.table(whole), (tmp_path / "report.html").read_text()
    assert "| heads | sae | 0." in text and "| codes | </script> | 0.250 |  |" in text and text.endswith("codes: noted")
    assert "monitorsPage" in page and "</script> " not in page and "done" not in result.summary(whole)
    with pytest.raises(CorruptFile, match="holds a benchmark of monitors, not a benchmark of searches"):
        result.require(earlier, result.SEARCH)
    with pytest.raises(SettingsError, match=f"testbeds of monitors are {', '.join(TESTBEDS)}"):
        WatchSettings(methods=("heads", "tails"))
