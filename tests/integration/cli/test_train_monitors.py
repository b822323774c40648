"""Commands that measure and calibrate monitors: what they print fits what was measured, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import inside
from decodery.core.registry import resolve
from decodery.monitors.sparse_autoencoder import SparseAutoencoder
from decodery.training.card import CARD
from methods import untrained_autoencoder
from trained_kinds import KINDS, made_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made_files(tmp_path_factory.mktemp("monitors"))


def said(*arguments: str) -> tuple[int, str, str]:
    code, out, errors = inside("train", *arguments)
    return code, out.strip().rpartition("\n")[2], errors


def test_a_printed_monitor_has_the_settings_that_its_threshold_was_set_with(
    files: dict[str, str], tmp_path: Path
) -> None:
    codes, out, few, other = (tmp_path / each for each in ("codes", "out", "few.jsonl", "other.jsonl"))
    lines = Path(files["labelled"]).read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:24]))
    other.write_text("".join(lines[24:48]))
    files = files | {"labelled": str(few)}
    code, _, errors = said("sae", *KINDS["sae"].format(**files).split(), "--out", str(codes))
    assert code == 0, errors
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(reversed(lines[:24])))
    for known in (few, tmp_path / "." / few.name, copy):
        given = (str(known), "-m", files["chat"], "--monitor", f"sae:codes={codes}", "--out", str(out))
        code, _, errors = said("threshold", *given)
        assert code == 1 and "scores of texts that it knows promise nothing of others: give other texts" in errors
    texts = ("threshold", str(other), "-m", files["chat"], "--rate", "0.3")
    code, last, errors = said(*texts, "--monitor", f"sae:top=4,threshold=0.5,codes={codes}", "--out", str(out))
    assert code == 0, errors
    card = (out / CARD).read_text()
    assert card.startswith("# Made by decodery train threshold") and "--monitor sae:top=4" in card
    assert "| trained | length | mean log-probability |" in card
    monitor = resolve("monitor", last.partition("--monitor ")[2])
    assert monitor.top == 4 and monitor.threshold is None
    assert monitor.limit == resolve("monitor", f"sae:codes={out}").trained.threshold.value
    # Another rate on the same texts: they only calibrated.
    again = (*texts[:-1], "0.4", "--monitor", f"sae:top=4,codes={out}", "--out", str(tmp_path / "again"))
    assert said(*again)[0] == 0
    code, last, errors = said(*texts, "--monitor", "confidence:threshold=3,measure=worst")
    assert code == 0, errors
    monitor = resolve("monitor", last.partition("--monitor ")[2])
    assert monitor.measure == "worst" and monitor.threshold not in (None, 3)
    for given, error in (
        (("--monitor", "confidence", "--out", str(out)), "has no trained part: leave --out out"),
        (("--monitor", f"sae:codes={codes}"), "has a trained part, which keeps its threshold: give --out DIR"),
    ):
        code, _, errors = said(*texts, *given)
        assert code == 1 and error in errors, errors


def test_an_autoencoder_is_measured_where_it_fits(files: dict[str, str], tmp_path: Path) -> None:
    fits, other, made = tmp_path / "fits", tmp_path / "other", untrained_autoencoder()
    made.save(other)
    wide = made.encoder.repeat(2, 1), made.bias, made.decoder.repeat(1, 2), made.shift.repeat(2)
    SparseAutoencoder(*wide, site="resid_post.0").save(fits)
    texts = ("autoencoder", files["text"], "-m", files["model"], "--length", "16", "--out", str(tmp_path / "out"))
    code, last, errors = said(*texts, "--texts", "12", "--measure", str(fits))
    assert code == 0 and f"feature:sae={fits}" in last, errors
    for given, status, error in (
        (("--texts", "12", "--measure", str(other)), 1, "reads 32 numbers, and resid_post.0 of this model has 64"),
        (("--texts", "5", "--measure", str(fits)), 1, "--texts takes 5 pieces of 16 tokens, and 6 are needed"),
        (("--texts", "15", "--steps", "3"), 1, "--texts takes 15 pieces of 16 tokens, and 16 are needed"),
        (("--measure", str(fits), "--k", "4", "--lr", "1"), 1, "--measure trains nothing: leave out --k and --lr"),
    ):
        code, _, errors = said(*texts, *given)
        assert code == status and error in errors, errors
