"""Figures of data that chose nothing: which items they are of, and that their interval holds what is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.training import loop
from decodery.training.card import CARD, check_folder, write_card
from decodery.training.corpus import Corpus, TrainingText, claim, shard_path, write_shard
from decodery.training.evaluation import figures
from decodery.training.held_out import HeldOut, Measured, bootstrap, compared, hold_out, paired


def test_half_chooses_and_the_other_half_is_tested() -> None:
    known = HeldOut.of([1.0, 2.0, 3.0, 4.0])
    assert (known.choosing, known.tested) == ([1.0, 3.0], [2.0, 4.0])
    found = known.measured(lambda some: {"mean": float(np.mean(some))}, "mean")
    assert found["mean"] == 3.0 and found["interval of mean"] == [2.0, 4.0]
    report = known.report(found, {"untrained": {"mean": 0.123456}}, "texts")
    assert report["tested on"] == "2 texts that chose nothing" and report["baselines"]["untrained"]["mean"] == 0.1235
    assert "shuffled labels" not in report
    mixed = known.report(found, {}, control={"mean": 1.00001, "interval of mean": [0.5, 1.5]})
    assert mixed["shuffled labels"] == {"mean": 1.0, "interval of mean": [0.5, 1.5]}


def test_whole_groups_are_held_out_and_none_both_chooses_and_is_tested() -> None:
    for groups, every in (
        ([0, 1] * 8, 20),
        ([0, 1, 2] * 9, 10),
        (list(range(12)) * 3, 20),
        ([*range(60), *[5] * 9], 20),
    ):
        learned, held = hold_out(groups, every)
        seen, unseen = ({groups[number] for number in part} for part in (learned, held))
        assert held and seen and not seen & unseen and seen | unseen == set(groups)
        known = HeldOut.of(held)
        sides = [{groups[number] for number in part} for part in (known.choosing, known.tested)]
        assert len(unseen) == 1 or not sides[0] & sides[1]
    assert hold_out([3, 3], 10) == ([0, 1], [])


def test_a_prompt_does_not_both_choose_and_test_where_texts_were_left_out() -> None:
    groups = [number % 40 for number in range(200)]
    _, held = hold_out(groups, 20)
    for missing in range(len(held)):
        kept = [number for at, number in enumerate(held) if at != missing]
        known = HeldOut.of(kept, [groups[number] for number in kept])
        chose, tested = ({groups[number] for number in part} for part in (known.choosing, known.tested))
        assert chose and tested and not chose & tested
        assert sorted([*known.choosing, *known.tested]) == sorted(kept)
        assert [groups[number] for number in known.tested] == list(known.groups)
    # Texts of one prompt alone have no half that chose nothing.
    alone = HeldOut.of([1, 2, 3], "aaa")
    assert alone.tested is alone.choosing == [1, 2, 3]
    assert alone.said() == "3 texts of 1 prompts that also chose the best step"


def test_a_large_group_is_learned_and_not_left_out() -> None:
    assert hold_out([0] * 50 + [1], 20) == (list(range(50)), [50])
    assert len(hold_out([0] * 200 + list(range(1, 41)), 20)[0]) == 238
    for groups in (2, 4, 5, 20, 400):
        learned, held = hold_out([*range(groups), *[groups - 1] * 99], 20)
        assert len(learned) >= 100 and groups - 1 not in held


def test_the_gain_is_of_the_same_items_and_says_over_what(tmp_path: Path) -> None:
    # Items differ by far more than the two sets of figures do.
    known = HeldOut([], list(range(8)))
    before = [float(number) for number in known.tested]
    after = [value - 0.2 - 0.01 * (number % 2) for number, value in enumerate(before)]

    def loss(of: list[float]) -> Any:
        return known.measured(lambda some: {"loss": float(np.mean([of[number] for number in some]))}, "loss")

    assert loss(after)["interval of loss"][1] > loss(before)["interval of loss"][0]
    others = {"untrained": loss(before), "other": loss(after[::-1]), "constant": {"loss": 9.0}}
    report = known.report(loss(after), others, control=loss([value - 1 for value in after]))
    untrained = report["baselines"]["untrained"]
    low, high = untrained["interval of gain"]
    # Less is better of a loss.
    assert untrained["gain"] == pytest.approx(0.205) and 0.19 < low < 0.205 < high < 0.22
    assert report["gain"] == "better than untrained; not shown to be better than other; worse than shuffled labels"
    assert "gain" not in report["baselines"]["constant"]
    how: dict[str, Any] = {"about": "", "use": "", "settings": (), "command": "", "hours": 0.0}
    write_card(tmp_path, "x", figures=report, **how)
    assert f"| gain | {report['gain']} | 0.2050 |" in (tmp_path / CARD).read_text()
    few = HeldOut([], known.tested[:5])
    said = few.report(
        few.measured(lambda some: {"ttr": 1.0}, "ttr"), {"x": few.measured(lambda some: {"ttr": 0}, "ttr")}
    )
    assert said["gain"].startswith("fewer than 6 items or prompts, or of the rarer kind, were tested") and said[
        "baselines"
    ]["x"]["interval of gain"] == [1.0, 1.0]


@dataclass(frozen=True)
class Made:
    steps: int = 3


def test_a_card_says_how_it_was_made_and_what_stands_beside_its_figures(tmp_path: Path) -> None:
    known = HeldOut.of([1.0, 2.0, 3.0, 4.0])
    found = known.measured(lambda some: {"ttr": float(np.mean(some))}, "ttr")
    figures = known.report(found, {"before": {"ttr": 0.5}}, control={"ttr": 0.25}) | {"best_step": 7}
    how: dict[str, Any] = {"about": "A thing.", "use": "-m THIS_FOLDER", "settings": (Made(),), "hours": 0.25}
    write_card(tmp_path, "x", command="decodery train x --out y", figures=figures, **how)
    text = (tmp_path / CARD).read_text()
    assert text.startswith('# Made by decodery train x\n\nA thing.\n\n    decodery generate "..." -m THIS_FOLDER\n')
    for line in (
        "    decodery train x --out y",
        "`Made(steps=3)`",
        "Of 2 texts that chose nothing:",
        "| | trained | before | shuffled labels |",
        "| ttr | 3.0000 | 0.5000 | 0.2500 |",
        "| interval of ttr | 2.0000 to 4.0000 |  |  |",
        "| best_step | 7 |  |  |",
        "ttr: distinct tokens as a share of the last ones of greedy continuations.",
    ):
        assert line in text.splitlines(), line
    assert ", in 0.250 hours." in text
    # Another's card stays, and its folder is refused where a kind says what stands in its own.
    (tmp_path / CARD).write_text("# Mine\n")
    write_card(tmp_path, "x", command="", figures=figures, **how)
    assert (tmp_path / CARD).read_text() == "# Mine\n"
    with pytest.raises(SettingsError, match=r"README.md and no x.safetensors: name a new folder"):
        check_folder(tmp_path, "x.safetensors")


def test_one_item_alone_is_said_to_have_chosen() -> None:
    assert HeldOut.of(["one"]).said() == "1 texts that also chose the best step"
    # Items that are equal are still two.
    assert HeldOut.of(["one", "one"]).said() == "1 texts that chose nothing"


def wrong(values: list[float], weights: list[float] | None = None) -> list[float]:
    """The spread of single items in place of that of their mean."""
    return np.percentile(values, (2.5, 97.5)).tolist()


def covered(interval: object, truth: float = 0.0, trials: int = 200, size: int = 40) -> float:
    """How often the interval of draws around `truth` holds it, and is not much wider than it needs to be."""
    found = 0
    for trial in range(trials):
        low, high = interval(np.random.default_rng(trial).normal(truth, 1.0, size).tolist())  # type: ignore[operator]
        found += low <= truth <= high and high - low < 4 * 2 / size**0.5
    return found / trials


def test_the_interval_holds_the_mean_about_as_often_as_it_says() -> None:
    assert 0.88 < covered(bootstrap) <= 0.99
    assert covered(wrong) < 0.5


def test_the_interval_of_a_gain_also_holds_for_few_items() -> None:
    for size in (3, 4, 8, 12):
        assert 0.92 < held_by(paired, size) < 0.98
    # Draws with replacement of four items are too narrow.
    assert held_by(bootstrap, 4) < 0.88


def held_by(interval: Callable[[list[float]], list[float]], size: int, trials: int = 600) -> float:
    found = 0
    for trial in range(trials):
        low, high = interval(np.random.default_rng(trial).normal(0.0, 1.0, size).tolist())
        found += low <= 0 <= high
    return found / trials


def texts_of_prompts(trial: int) -> tuple[list[float], list[int]]:
    """Figures of 5 texts of each of 20 prompts, which have more in common than they differ, and their prompts."""
    random = np.random.default_rng(trial)
    values = random.normal(0.0, 1.0, (20, 1)) + random.normal(0.0, 0.3, (20, 5))
    return values.flatten().tolist(), np.repeat(np.arange(20), 5).tolist()


def test_texts_of_one_prompt_are_one_item_of_an_interval() -> None:
    held = {"prompts": 0, "texts": 0}
    for trial in range(200):
        values, prompts = texts_of_prompts(trial)
        for name, groups in (("prompts", prompts), ("texts", [])):
            found = HeldOut([], values, groups).measured(lambda some: {"mean": float(np.mean(some))}, "mean")
            low, high = found["interval of mean"]
            held[name] += low <= 0 <= high
    assert 0.88 < held["prompts"] / 200 <= 0.99 and held["texts"] / 200 < 0.7
    known = HeldOut.of([1.0, 2.0, 3.0, 4.0, 5.0, 8.0], ["a", "b", "a", "c", "a", "c"])
    assert known.said() == "3 texts of 2 prompts that chose nothing"
    found = known.measured(lambda some: {"mean": float(np.mean(some))}, "mean", lambda item: item)
    assert (found.each, found.weights, found.units) == ([2.0, 6.0], [2.0, 12.0], 2)
    alone = replace(known, groups=["b", "b", "b"]).measured(lambda some: {"mean": float(np.mean(some))}, "mean")
    assert alone["interval of mean"] is None and not alone.gain(alone)


def test_texts_of_a_corpus_have_the_prompts_that_they_begin_with(tmp_path: Path) -> None:
    begun = [[1, 2, 3], [1, 2], [1, 2], [1], [1]]
    claim(tmp_path, {}, 9)
    texts = [TrainingText(np.array([*prompt, 4, 5], dtype=np.int32), len(prompt)) for prompt in begun]
    write_shard(shard_path(tmp_path, 0), texts, 0)
    prompts = Corpus(tmp_path).prompts(range(5))
    # One that begins a text is no prompt that texts have in common.
    assert prompts[1] == prompts[2] and len(set(prompts)) == 4


def rankings(trial: int, prompts: int = 24) -> tuple[list[float], list[float], list[bool], list[str]]:
    """Scores of two equally good judges of 6 answers each to some prompts, which are right or wrong, and the prompts.

    Each judge is fond of some prompts, for all of their answers.
    """
    random = np.random.default_rng(trial)
    wrong = np.repeat(random.random(prompts) < 0.5, 6)
    one, other = (
        wrong + np.repeat(random.normal(0, 1, prompts), 6) + random.normal(0, 0.3, len(wrong)) for _ in range(2)
    )
    return one.tolist(), other.tolist(), wrong.tolist(), np.repeat(np.arange(prompts).astype(str), 6).tolist()


@pytest.mark.parametrize("prompts", [10, 24])
def test_the_gain_in_auroc_over_a_baseline_is_of_whole_prompts(prompts: int) -> None:
    def wide(groups: Callable[[list[str]], list[str]], trial: int) -> list[float] | None:
        one, other, wrong, asked = rankings(trial, prompts)
        gain = figures(one, wrong, groups(asked)).gain(figures(other, wrong, groups(asked)))
        return gain.get("interval of gain")

    held: dict[str, list[bool]] = {"prompts": [], "answers": []}
    for trial in range(150):
        for name, groups in (("prompts", list), ("answers", lambda asked: [*map(str, range(len(asked)))])):
            if edges := wide(groups, trial):  # type: ignore[arg-type]
                held[name].append(edges[0] <= 0 <= edges[1])
    assert 0.9 < np.mean(held["prompts"]) <= 0.995 and np.mean(held["answers"]) < 0.8


def test_the_gain_in_auroc_says_over_what_and_nothing_of_too_few_prompts() -> None:
    wrong, asked = [True, False] * 30, [str(number // 4) for number in range(60)]
    random = np.random.default_rng(0)
    good, plain = ((scale * np.array(wrong) + random.normal(size=60)).tolist() for scale in (3.0, 0.5))
    own, baseline, noise = (figures(each, wrong, asked) for each in (good, plain, random.normal(size=60).tolist()))
    report = compared(own, {"length": baseline, "nothing": None}, noise)
    beside = report["baselines"]["length"]
    assert beside["gain"] == pytest.approx(own["auroc"] - baseline["auroc"], abs=2e-4)
    assert beside["interval of gain"][0] > 0 and own["groups"] == 15 and report["baselines"]["nothing"] is None
    assert report["gain"] == "better than length, shuffled labels" and report["shuffled labels"]["gain"] > 0.2
    same = compared(own, {"itself": own})
    assert same["gain"] == "not shown to be better than itself" and same["baselines"]["itself"]["gain"] == 0
    # Of other prompts, as those of a control may be, nothing is said.
    other = figures(plain, wrong, [f"other {int(group) // 2}" for group in asked])
    assert "gain" not in compared(own, {"other": other})["baselines"]["other"]
    # The rarer kind is of too few prompts to say anything, and of one alone nothing can be taken away.
    few = [label and int(group) < 4 for label, group in zip(wrong, asked, strict=True)]
    assert compared(figures(good, few, asked), {"length": figures(plain, few, asked)})["gain"].startswith("fewer")
    one = [label and group == "0" for label, group in zip(wrong, asked, strict=True)]
    assert not figures(good, one, asked).gain(figures(plain, one, asked))


def test_an_item_counts_by_its_weight() -> None:
    low, high = bootstrap([0.0, 1.0], [1e9, 1.0])
    assert low == 0.0 and high in (0.0, 1.0)
    assert bootstrap([0.25]) == [0.25, 0.25]
    assert paired([1.0, 3.0, 2.0], [1.0, 1e-9, 1.0])[1] < paired([1.0, 3.0, 2.0])[1]
    one, other = ({"loss": 1.0}, [1.0, 2.0, 3.0]), ({"loss": 2.0}, [2.0, 3.0, 5.0])
    for counts, known in (([1.0, 1.0, 2.0], True), ([0.0, 1.0, 0.0], False), ([0.0, 0.0, 0.0], False)):
        better, worse = (Measured(figures, "loss", each, counts) for figures, each in (one, other))
        assert bool(better.gain(worse)) is known


def descent(steps: int, **settings: object) -> tuple[torch.Tensor, loop.History]:
    weight = torch.zeros(1, dtype=torch.float32)
    history = loop.train(
        {"weight": weight},
        lambda step: (weight - 1).square().sum(),
        loop.even_plan(steps, 0.1, validate_every=1, **settings),
        None,
        **({"validate": lambda: {"loss": 1.0}, "metric": "loss"} if settings else {}),  # type: ignore[arg-type]
    )
    return weight, history


def test_without_validation_the_last_step_is_kept_and_nothing_is_written() -> None:
    weight, history = descent(5)
    assert float(weight) == pytest.approx(0.5, abs=0.05) and history.step == history.best_step == 5


def test_a_training_without_gain_ends() -> None:
    weight, history = descent(50, patience=3)
    assert history.step == 3 and history.best_step == 0 and float(weight) == 0.0
