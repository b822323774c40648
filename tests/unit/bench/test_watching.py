"""The benchmark of monitors: its figures against plain ones, what it keeps, and what it says of bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decodery.bench import result
from decodery.core.errors import CorruptFile, SettingsError
from decodery.training.checkable import FAMILIES, built_in
from decodery.training.ranking import auroc, word_scores
from decodery.training.sae import edges, own_codes
from decodery.training.sequential import built_in_talks
from decodery_benchmarks import kinds, report
from decodery_benchmarks.monitors import codes, job, recall
from decodery_benchmarks.monitors.align import aligned
from decodery_benchmarks.monitors.control import effect
from decodery_benchmarks.monitors.feedback import _observed
from decodery_benchmarks.monitors.figures import (
    Judged,
    calibration_error,
    detection,
    mcnemar,
    of_the_mean,
    ranks,
)
from decodery_benchmarks.monitors.heads import _by_means, pair_shares
from decodery_benchmarks.monitors.job import WatchJob
from decodery_benchmarks.monitors.judge import Judge
from decodery_benchmarks.monitors.more_questions import MORE, more_questions
from decodery_benchmarks.monitors.price import both_ways
from decodery_benchmarks.monitors.records import RECORD, recorded, solved_programs, surface
from decodery_benchmarks.monitors.settings import TESTBEDS, WatchSettings
from decodery_benchmarks.puzzles.robot import Robot
from decodery_benchmarks.training.program_probe import WrittenProgram, accuracies, split, train_program_probe
from serving import tiny_lm


def judged(seed: int = 0, *, apart: float = 2.0, count: int = 400) -> Judged:
    random = np.random.default_rng(seed)
    wrong = random.random(count) < 0.4
    scores = random.standard_normal(count) + apart * wrong
    groups = [f"{at // 2}" for at in range(count)]
    return Judged(scores.tolist(), wrong.tolist(), groups, [f"{at % 3}" for at in range(count)], 1.0)


def test_figures_tell_signal_from_none_and_say_how_sure_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
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
    given = ["a salt", "b salt", "a", "b", "a"], [True, True, False, False, False], ["salt", "b"]
    scores = word_scores(*given)
    assert scores[0] > 0 > scores[1]
    with monkeypatch.context() as patch:
        # The most frequent word of a bag of one is "a": of others nothing is said.
        patch.setattr("decodery.training.ranking._WORDS", 1)
        assert len(set(word_scores(*given))) == 1
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
    earlier = result.require(kinds.read(tmp_path), kinds.MONITORS)
    assert WatchSettings.from_dict(earlier["settings"]) == settings
    whole = WatchJob(tiny_lm(), settings, tmp_path, earlier).run(lambda *args: None)
    assert whole["complete"] and asked == ["heads", "codes"] and [row["testbed"] for row in whole["rows"]] == asked
    text, page = report.table(whole), (tmp_path / "report.html").read_text()
    assert "| heads | sae | 0." in text and "| codes | </script> | 0.250 |  |" in text and text.endswith("codes: noted")
    assert "monitorsPage" in page and "</script> " not in page and "done" not in result.summary(whole)
    with pytest.raises(CorruptFile, match="of the kind 'monitors', not 'search'"):
        result.require(earlier, kinds.SEARCH)
    with pytest.raises(SettingsError, match=f"testbeds of monitors are {', '.join(TESTBEDS)}"):
        WatchSettings(methods=("heads", "tails"))


def test_controls_of_the_testbeds_are_what_they_are_called() -> None:
    import torch

    # A judge that reads turns as they come says what one says that reads all at once, and its question is forgotten.
    judge = Judge(tiny_lm(), built_in_talks(4)[:1])
    turns = ("add salt", "and tea", "then rice")
    incremental = judge.scores(turns)
    assert incremental == pytest.approx([judge.whole(turns[: at + 1]) for at in range(3)], abs=1e-5)
    assert judge.scores(turns) == incremental and abs(judge.whole(turns[::-1]) - incremental[-1]) > 1e-5
    # Every other text ends in a key that stood there before, with one value after it.
    tokens, values, known = recall._asked(12, 0)
    for text, value, seen in zip(tokens.tolist(), values.tolist(), known, strict=True):
        before = {text[at + 1] for at in range(0, len(text) - 1, 2) if text[at] == text[-1]}
        assert before == ({value} if seen else set()), text
    drawn, again = recall.draw(5, torch.Generator().manual_seed(0))
    assert not again[:, 0].any() and again[:, -1].any()
    assert drawn.shape == (5, 2 * recall._PAIRS) and effect([(0.0, 2.0), (1.0, 3.0)]) == 2.828
    low, high = of_the_mean(np.array([0.1, 0.2, 0.3]))
    assert low == pytest.approx(0.2 - 4.3 * 0.1 / 3**0.5) and high == pytest.approx(0.4 - low)
    half, other = (torch.tensor(law, dtype=torch.double) for law in ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]))
    assert codes.divergence(half, half) == 0 and codes.divergence(half, other) == pytest.approx(np.log(2))
    assert ranks([3.0, 1.0, 3.0]).tolist() == [1.5, 0.0, 1.5]
    assert both_ways([True, False, False], [False, True, True]) == {
        "wrong to right": 2,
        "right to wrong": 1,
        "mcnemar p": 1.0,
    }


@pytest.mark.integration
def test_records_of_programs_hold_what_was_written_so_far_and_no_more() -> None:
    import torch

    robot, prompt = Robot(), "230>451:"
    whole, begun = (
        recorded(WrittenProgram(prompt, text, True, 0.0, {}), robot).rows[RECORD] for text in ("mlmr", "mlrr")
    )
    assert torch.equal(whole[:2], begun[:2]) and not torch.equal(whole[2], begun[2])
    assert torch.equal(whole[3], whole[4]) and whole.sum(dim=1).tolist() == [7, 8, 9, 10, 10]
    # What a program holds can be read off its record, whatever the words mean; off a record without the actions not.
    programs = solved_programs(robot, 0)[:400]
    # Short programs recur: those of the test part stand nowhere else.
    of = split(programs, 0)
    tested, others = (
        {each.text for each in of["test"]},
        {each.text for name in of if name != "test" for each in of[name]},
    )
    assert tested and not tested & others and sum(map(len, of.values())) < len(programs)
    blind = [replace(each, rows={RECORD: each.rows[RECORD][:, :32]}) for each in programs]
    common: dict[str, Any] = {"meaning": "lrm", "inner": (64,), "steps": 300, "rate": 0.2}
    read, unread = (
        accuracies(train_program_probe(own, robot, (RECORD,), **common), own, robot, "lrm") for own in (programs, blind)
    )
    assert read["facing"] > unread["facing"] + 0.06 > 0.3
    rows = [replace(each, right=len(each.text) > 4) for each in programs]
    told = surface(rows[:200], rows[200:], robot)
    assert (
        detection("m", "s", [Judged(told, [not each.right for each in rows[200:]], *[["g"] * 200] * 2)])["auroc"] > 0.9
    )


def test_pairs_of_heads_tell_what_no_head_tells_alone() -> None:
    import torch

    draws = torch.Generator().manual_seed(0)
    codes = torch.randint(3, (60, 6), generator=draws)
    codes[:, 2:4] = torch.randint(2, (60, 2), generator=draws)
    positive = codes[:, 2] != codes[:, 3]
    own = own_codes(codes[:40], positive[:40], 3)["score"]
    found = edges(codes[:40], positive[:40], 3)
    assert found[0] == ((2, 3), 1.0) and found[1][1] < 0.5 and float(own[2:4].max()) == 0.0
    told = pair_shares(codes[:40], positive[:40], [found[0][0]], codes[40:])
    assert torch.equal(told.bool(), positive[40:])
    # The pair that says least says something else.
    assert not torch.equal(pair_shares(codes[:40], positive[:40], [(0, 1)], codes[40:]).bool(), positive[40:])


def test_observers_of_feedback_read_what_labels_go_by() -> None:
    import torch

    states = torch.randn(32, 6, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    given = (states[:, 2] > 0).numpy()
    texts = ["salt" if label else "rice" for label in given]
    told = _observed(texts, states, given)
    for scores in told.values():
        assert auroc(scores, given[16:].tolist()) > 0.8
    states[:, 2] = 0
    blind = _observed(["same"] * 32, states, given)
    assert all(abs(auroc(scores, given[16:].tolist()) - 0.5) < 0.3 for scores in blind.values())


def test_states_of_two_sources_share_a_subspace() -> None:
    import torch

    draws = torch.Generator().manual_seed(0)
    source, target = (torch.randn(40, 6, generator=draws) * torch.arange(1, 7) for _ in range(2))
    same, also = aligned(source, source, 3)
    assert torch.allclose(same, also) and same.shape == (40, 3)
    # With all dimensions it is a rotation: distances stay, and what lies where is another matter.
    whole, turned = aligned(source, target, 6)
    for before, after in ((source, whole), (target, turned)):
        assert torch.allclose(torch.cdist(before.double(), before.double()), torch.cdist(after, after), atol=1e-5)
    assert not torch.allclose(whole, source.double(), atol=1e-2)
    # A signal in rotated states is read by what was learned of the others only where they are brought together.
    signal = torch.randn(200, 1, generator=draws)
    rows = torch.cat((5 * signal, 0.1 * torch.randn(200, 5, generator=draws)), dim=1)
    moved = rows.roll(3, dims=1)
    own, other = aligned(rows, moved, 1)
    assert abs(float(torch.corrcoef(torch.stack((own[:, 0], other[:, 0])))[0, 1])) > 0.99
    assert abs(float(torch.corrcoef(torch.stack((rows[:, 0], moved[:, 0])))[0, 1])) < 0.3
    with pytest.raises(SettingsError, match="share no subspace of 7 dimensions"):
        aligned(source, target, 7)
    found = built_in(700, more=more_questions())
    kinds = {each.family for each in found}
    assert kinds == {*FAMILIES, *MORE} and len({each.prompt for each in found}) == 700
    assert all(each.right(f" {each.answer}.") for each in found)
