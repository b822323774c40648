"""The setting `predicted_output`, which selects the drafter of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decodery.cli.given import given
from decodery.core.errors import SettingsError
from serving import tiny_lm

BIAS = dict.fromkeys([*range(128, 256), *range(32)], -100.0)
"""Keeps texts free of cut characters, as tokens are bytes here."""
SETTINGS: dict[str, Any] = {"max_new_tokens": 60, "logit_bias": BIAS, "ignore_eos": True}


def test_the_setting_alone_drafts_the_text() -> None:
    lm = tiny_lm()
    plain = lm.generate("x", **SETTINGS, drafter=None)
    for predicted in (plain.text, plain.tokens):
        found = lm.generate("x", **SETTINGS, predicted_output=predicted)
        assert found.tokens == plain.tokens and found.trace.ledger.counts["predicted rightly"] >= 50
    short = lm.generate("x", **SETTINGS, predicted_output=plain.text, drafter="predicted-output:length=4")
    assert short.tokens == plain.tokens and short.trace.passes > found.trace.passes
    assert "predicted" not in lm.generate("x", **SETTINGS, predicted_output="").trace.ledger.counts


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"drafter": "suffix-tree"}, "the drafter suffix-tree does not use a predicted output: leave out drafter, or"),
        ({"drafter": None}, "a predicted output needs a drafter: leave out drafter, or leave out"),
        ({"drafter": "none"}, "a predicted output needs a drafter"),
        ({"drafter": "predicted-output", "predicted_output": None}, "give predicted_output=TEXT"),
    ],
)
def test_other_drafters_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        tiny_lm().generate("x", **{"predicted_output": "abc"} | settings)


def test_the_command_line_takes_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "expected.py"
    file.write_text("def f(): ...\n")
    assert given({"predicted_output": str(file)})["predicted_output"] == "def f(): ...\n"
    for text in ("def g(): ...", "x" * 9999, "a\0b"):
        assert given({"predicted_output": text})["predicted_output"] == text
    with pytest.raises(SettingsError, match="does not use a predicted output"):
        given({"predicted_output": "a", "drafter": "copyspec"})
