"""Monitors with trained parts: what they read, what they learn, and what they do to a text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError
from decodery.engine.monitoring import monitor_reports, monitor_states
from decodery.models.batch import Batch, Segment
from decodery.monitors.factcheckmate import FactCheckmate, Shift
from decodery.monitors.los import LOS, LOSHead
from decodery.monitors.probe import Pool, Probe
from decodery.monitors.recorder import Recorder
from decodery.monitors.truthprint import TruthPrInt
from decodery.sampling.sampler import Sampler
from decodery.step.sequence import Sequence
from decodery.testing import check_identical, decode, tiny_transformer, to_int8
from decodery.training.activations import Answered, collect
from decodery.training.checkable import CheckableQuestion, built_in, read_checkable
from decodery.training.evaluation import Evaluation
from decodery.training.los import scores, train_los
from decodery.training.probe import train_probe, worst
from decodery.training.ranking import auroc, interval, parts
from decodery_benchmarks.monitors.figures import within
from decodery_benchmarks.monitors.settings import WatchSettings
from decodery_benchmarks.monitors.specificity import specificity
from methods import DRAFTERS
from methods import untrained_probe as probe
from methods import untrained_shift as shift
from serving import tiny_lm

MODEL = tiny_transformer(0)
EXACT = to_int8(MODEL)
PROMPTS = [np.random.default_rng(seed).integers(0, 64, n).tolist() for seed, n in ((1, 19), (2, 9))]
WIDTH = 32


def planted(count: int = 200, seed: int = 0, *, shuffled: bool = False) -> list[Answered]:
    """Answers whose states and signatures say which are wrong, at one of two sites; shuffled: they say nothing."""
    draws = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        wrong = bool(torch.rand((), generator=draws) < 0.4)
        tokens = 1 + number % 3
        states = torch.randn(2, tokens + 2, WIDTH, generator=draws)
        numbers = torch.randn(tokens, 25, generator=draws)
        sign = 0.0 if shuffled else 2.0 * wrong - 1
        states[1, :, 3] += 3 * sign
        numbers[:, 20] -= 2 * sign
        numbers[:, 23] = 1.0
        new = {"resid_post.0": states[0, 2:], "resid_post.1": states[1, 2:]}
        prompt = {"resid_post.0": states[0, :2].reshape(-1), "resid_post.1": states[1, :2].reshape(-1)}
        asked = CheckableQuestion(f"p{number}", "a", f"g{number // 2}", stratum=f"{number % 2}")
        found.append(Answered(asked, wrong, [1] * tokens, numbers, prompt, new))
    return found


def test_probes_and_los_find_what_was_planted_and_nothing_where_nothing_is() -> None:
    answers, sites = planted(), ("resid_post.0", "resid_post.1")
    part = parts([each.question.group for each in answers])
    groups = [
        {each.question.group for each, own in zip(answers, part, strict=True) if own == name} for name in set(part)
    ]
    assert len(groups) == 4 and sum(map(len, groups)) == len(set.union(*groups)), "no group is in two parts"
    for rows in ("prompt", "new"):
        for shuffled in (False, True)[: 1 + (rows == "prompt")]:
            seen = planted(shuffled=True) if shuffled else answers
            found = train_probe(seen, sites, rows, inner=(8,), steps=100, lr=1e-2)  # type: ignore[arg-type]
            test = [each for each, own in zip(seen, part, strict=True) if own == "test"]
            wrong, ranks = [each.wrong for each in test], worst(found, test)
            low, high = interval(ranks, wrong, [each.question.group for each in test], draws=200)
            assert (low <= 0.5 <= high) if shuffled else (found.site == "resid_post.1" and low > 0.7)
            if not shuffled:
                flagged = np.array(ranks) > found.threshold.value
                assert flagged[~np.array(wrong)].mean() < 0.3 and flagged[np.array(wrong)].mean() > 0.35
                assert within(ranks, wrong, [each.question.stratum for each in test]) > 0.7
    head = train_los(answers, k=20, width=16, epochs=4)
    test = [each for each, own in zip(answers, part, strict=True) if own == "test"]
    assert auroc(scores(head, test), [each.wrong for each in test]) > 0.7
    with pytest.raises(SettingsError, match="no two kinds to tell apart"):
        train_probe([replace(each, wrong=True) for each in answers], sites, "new")
    with pytest.raises(SettingsError, match="20 log-probabilities of a row were collected, not 21"):
        train_los(answers, k=21)


def test_a_test_part_without_a_group_is_reported_as_empty() -> None:
    items = [(number / 9, number % 2 == 0, f"g{number % 2}") for number in range(9)]
    kept = [each for each in items if each[2] == "g0"]
    seed = next(seed for seed in range(99) if parts(["g0"], seed)[0] == "train")
    evaluated = Evaluation(
        train=lambda known, seed: 1.0,
        score=lambda part, known: torch.stack([torch.tensor(part * each[0]) for each in known]).tolist(),
        label=lambda each: each[1],
        group=lambda each: each[2],
        relabel=lambda one, other: (one[0], other[1], one[2]),
        baselines={"number": lambda each: each[0]},
        words=lambda each: f"word {each[0]}",
    )
    own, baselines = evaluated.tested(1.0, kept, seed)
    assert own["items"] == baselines["number"]["items"] == baselines["bag of words"]["items"] == 0
    again = evaluated.again(kept, seed)
    assert again is not None and again["auroc"] is None


def test_specificity_is_told_site_by_site() -> None:
    answers, sites = planted(), ("resid_post.0", "resid_post.1")
    part = parts([each.question.group for each in answers])
    test = [each for each, own in zip(answers, part, strict=True) if own == "test"]
    rows = specificity(answers, test, sites, WatchSettings())
    assert rows[1]["AUROC"] > rows[0]["AUROC"] + 0.2
    shares = {row["what"][-1]: [float(each) for each in row["above 0.5"].split(" / ")] for row in rows}
    assert sum(shares["1"]) > sum(shares["0"]) + 0.3 and min(shares["1"]) > 0.6
    for row in rows:
        passed, flagged = zip(*(row[f"above {limit}"].split(" / ") for limit in (0.5, 0.7, 0.9, 0.95)), strict=True)
        assert sorted(passed) == list(passed) and sorted(flagged, reverse=True) == list(flagged)


def test_a_score_in_the_stream_is_that_of_the_whole_answer(tmp_path: Path) -> None:
    head = train_los(planted(120), k=20, width=16, epochs=1, every=1)
    head.save(tmp_path / "los.safetensors")
    monitors = [LOS(str(tmp_path), every=4), LOS(head, every=1), Recorder(k=20)]
    texts = decode(EXACT, PROMPTS, monitors=monitors, max_new_tokens=10)
    for text in texts:
        answer = replace(planted(1)[0], signatures=torch.stack([numbers for numbers, _ in monitor_states(text)[2][1]]))
        fourth, each, _ = monitor_reports(text)
        assert fourth.scores[-1] == each.scores[-1] == scores(head, [answer])[0]
        assert fourth.scores[:3] == [None] * 3 and fourth.scores[3:8:4] == each.scores[3:8:4]
        # The law can fail: a prefix is another answer.
        assert each.scores[-2] != each.scores[-1]


def test_files_are_read_as_they_were_written_and_others_refused(tmp_path: Path) -> None:
    probe("new", model="a").save(tmp_path / "probe.safetensors")
    found = Probe.load(tmp_path)
    assert found.threshold == probe("new").threshold and found.score(torch.ones(1, WIDTH)).equal(
        probe("new").score(torch.ones(1, WIDTH))
    )
    for wrong in (LOSHead, Shift):
        with pytest.raises(CorruptFile, match="make one with `decodery train"):
            wrong.load(tmp_path / "probe.safetensors")  # type: ignore[attr-defined]
    with pytest.raises(ModelNotFound, match="decodery train los"):
        LOS(str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="reads new rows, and here prompt rows are needed"):
        decode(EXACT, PROMPTS, monitors=[FactCheckmate(probe("new"))])
    with pytest.raises(SettingsError, match="was trained for another model"):
        decode(EXACT, PROMPTS, monitors=[TruthPrInt(probe("new", model="another"))])
    with pytest.raises(SettingsError, match="needs a trained shift"):
        FactCheckmate(probe("prompt"), action="switch")


def test_factcheckmate_reads_the_prompt_alone_and_shifts_no_key_or_value() -> None:
    read = probe("prompt")
    free = decode(EXACT, PROMPTS, max_new_tokens=12)
    for text, prompt in zip(
        decode(EXACT, PROMPTS, max_new_tokens=12, prefill_chunk=5, monitors=[FactCheckmate(read)]), PROMPTS, strict=True
    ):
        rows = EXACT.forward(Batch([Segment.chunk(prompt, EXACT.new_cache())]), taps=["resid_post.1"]).hidden
        expected = float(read.score(Pool().with_rows(rows["resid_post.1"]).numbers()[None]))
        assert set(monitor_reports(text)[0].scores) == {expected}
    for threshold, size, same in ((1.0, 1.0, True), (0.0, 0.0, True), (0.0, 1.0, False)):
        for scope in ("all", "first"):
            monitor = FactCheckmate(read, shift(size), scope, action="switch", threshold=threshold)  # type: ignore[arg-type]
            texts = decode(EXACT, PROMPTS, max_new_tokens=12, monitors=[monitor])
            assert ([text.tokens for text in texts] == [text.tokens for text in free]) == same, (threshold, size, scope)
    # After the last layer nothing is cached: what was read is what a plain pass reads of the same tokens.
    for text in texts:
        plain = EXACT.new_cache()
        EXACT.forward(Batch([Segment.chunk(text.tokens[:-1], plain)]))
        plain.keep(range(len(text.tokens) - 1))
        assert all(a.equal(b) for at in range(2) for a, b in zip(text.cache.view(at), plain.view(at), strict=True))
    for name in ("token-recycling", "eagle-3"):
        drafter = DRAFTERS[name](MODEL)
        check_identical(
            EXACT,
            PROMPTS,
            drafter=drafter,
            monitors=[monitor],
            plain=texts,
            seeds=(0,),
            max_new_tokens=12,
            tested="drafted",
        )


def spent(text: Sequence, name: str) -> int:
    return int(text.trace.ledger.counts.get(name, 0))


def test_truthprint_tries_other_phrases_and_always_ends() -> None:
    sampler = Sampler.from_settings(temperature=1.0)
    settings: dict[str, Any] = {"sampler": sampler, "max_new_tokens": 14}
    free = decode(EXACT, PROMPTS, **settings)
    never, always = TruthPrInt(probe("new"), threshold=1.0), TruthPrInt(probe("new", 50.0), most=4, share=0.0)
    for text, plain in zip(decode(EXACT, PROMPTS, monitors=[never], **settings), free, strict=True):
        assert text.tokens == plain.tokens and not spent(text, "rollbacks")
    # Where nothing passes the original is written again, and all that acts on the text stands as if nothing had been.
    for text, plain in zip(decode(EXACT, PROMPTS, monitors=[always], **settings), free, strict=True):
        assert text.tokens == plain.tokens and spent(text, "rollbacks") > 10
        assert spent(text, "tokens_taken_back") <= (always.tries + 1) * text.position
        assert all(
            a.equal(b) for at in range(2) for a, b in zip(text.cache.view(at), plain.cache.view(at), strict=True)
        )
    some = TruthPrInt(probe("new", 0.3), most=4, share=0.01)
    texts = decode(EXACT, PROMPTS, monitors=[some], **settings)
    assert [text.tokens for text in texts] != [text.tokens for text in free]
    for name in ("eagle-3",):
        drafter = DRAFTERS[name](MODEL)
        check_identical(
            EXACT, PROMPTS, drafter=drafter, monitors=[some], plain=texts, seeds=(0,), tested="drafted", **settings
        )


def test_what_is_collected_is_kept_and_what_is_asked_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny_lm()
    asked = [CheckableQuestion(f"q{number}", "a", f"{number}") for number in range(5)]
    collected = partial(collect, lm, out=tmp_path, sites=("resid_post.0",), k=4, max_new_tokens=3)
    first = collected(asked)
    monkeypatch.setattr(lm, "engine", None)
    for one, other in zip(first, collected(asked), strict=True):
        assert one.tokens == other.tokens and one.signatures.equal(other.signatures)
        assert one.new["resid_post.0"].shape == (len(one.tokens), lm.model.config.hidden_size)
    with pytest.raises(SettingsError, match="name another folder"):
        collected(asked[:4])
    question = CheckableQuestion("", "Phnom Penh", "")
    assert (
        question.right(" phnom penh.\nMore")
        and not question.right("Phnom")
        and CheckableQuestion("", "7", "").right("7")
    )
    known = built_in(300, seed=1)
    assert len({each.group for each in known}) == 300 and {each.family for each in known} == {"sums", "capitals"}
    assert all(eval(each.group) == int(each.answer) for each in known if each.family == "sums")
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "p", "answer": "a"}\n{"prompt": 3}\n')
    with pytest.raises(CorruptFile, match="line 2 of"):
        read_checkable(file)
