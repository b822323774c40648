"""Where steps end beside their delimiter, and a final text that is drawn by weight."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.search import StepBeam
from decodery.search.step_nodes import StepEnd
from decodery.step.sequence import Sequence
from methods import SEARCHES, Even
from sampled import run
from scripted_lm import ScriptedLLM
from serving import tiny_lm


def test_a_step_ends_by_a_pattern_or_by_time() -> None:
    lm = tiny_lm()
    seq = lm.engine().open(lm.request_for("q", drafter=None))
    assert seq.text is not None
    marker = StepEnd(seq, None, 100, r"\\boxed\{[^{}]*\}|####.*\n")
    late, soon = StepEnd(seq, None, 100, seconds=1e-9), StepEnd(seq, None, 100, seconds=1e6)
    empty = [StepEnd(seq, None, 100, pattern) for pattern in (r"is #### (\.\d)?", r"\\boxed\{4(.*?)\}")]
    ended = []
    for letter in "so \\boxed{4} is #### 4\n":
        seq.tokens.append(ord(letter))
        seq.text.push(ord(letter))
        question = marker.question(seq)
        assert question is not None, "a pattern is asked beside the loop"
        ended.append(marker(seq))
        assert marker.question(seq) is None, "twice"
        assert late(seq) and not soon(seq)
    assert ended.index(True) == len("so \\boxed{4") and not StepEnd(seq, None, 100, "boxed")(seq)
    assert all(each(seq) for each in empty), "a group that matches nothing is no miss"
    for pattern, words in (("(", "no regular expression"), ("a" * 1001, "at most 1000 characters")):
        with pytest.raises(SettingsError, match=words):
            StepBeam(Even(), step_pattern=pattern)
    with pytest.raises(SettingsError, match="step_seconds"):
        StepBeam(Even(), step_seconds=0.0)


def test_the_final_text_is_drawn_by_weight() -> None:
    """The best one always would come first far more often than its weight allows."""

    def excess(choose: str) -> tuple[float, float]:
        search = replace(SEARCHES["step-beam"], choose=choose)  # type: ignore[type-var]
        total = variance = 0.0
        for seed in range(60):
            found = run(search, seed=seed, max_new_tokens=8)
            worths = [seq.score or 0.0 for seq in found]
            share = max(worths) / sum(worths)
            best = worths.index(max(worths)) == 0 and worths.count(max(worths)) == 1
            if worths.count(max(worths)) == 1:
                total += best - share
                variance += share * (1 - share)
        return total, variance

    total, variance = excess("draw")
    assert variance > 1 and abs(total) < 4 * variance**0.5
    total, variance = excess("best")
    assert total > 4 * variance**0.5
    with pytest.raises(SettingsError, match="by vote or by a draw"):
        replace(SEARCHES["step-beam"], choose="first")  # type: ignore[type-var]


def test_a_delimiter_from_between_single_quotes_is_read_as_meant() -> None:
    found = resolve("search", r'step-beam:scorer=log-probability,delimiter="\n\t"')
    assert found.delimiter == "\n\t" == StepBeam(Even(), delimiter="\n\t").delimiter


def test_a_pattern_in_what_a_server_writes_holds_up_no_other_text() -> None:
    lm = ScriptedLLM(["the sea #### 4 and more", "a river"])
    engine, known = lm.engine(), threading.Event()

    class Late(StepEnd):
        """Knows where a step ends once `known` is set."""

        def __call__(self, seq: Sequence) -> bool:
            assert known.wait(60)
            return super().__call__(seq)

    held = engine.submit(lm.request_for("q", max_new_tokens=9))
    held.segment_end = Late(held, None, 100, "####.*4")
    other = engine.submit(lm.request_for("q", max_new_tokens=9))
    while not other.finished:
        engine.step()
    assert other.text is not None and other.text.text == "a river" and held.position <= 1
    known.set()
    while not held.segment_end(held):
        engine.step()
    assert held.text is not None and held.text.text == "the sea #### 4" and not held.finished
