"""Functions that score texts: those that wait, those that take too long, and both kinds in one scorer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decodery.core.errors import SettingsError
from decodery.scorers import TextScore
from decodery.search import BestOfN
from scripted_lm import ScriptedLLM


def found(scorer: TextScore, n: int = 5) -> list[str]:
    lm = ScriptedLLM(lambda asked: "x" * (asked.seed % 5 + 1))
    return [out.text for out in lm.search("q", BestOfN(scorer, n=n), temperature=1.0)]


def test_functions_that_wait_do_so_side_by_side() -> None:
    waiting, most = 0, 0
    everybody = asyncio.Event()

    async def length(text: str) -> float:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == 5:
            everybody.set()
        # One after the other, the first of them would wait for good.
        await asyncio.wait_for(everybody.wait(), 60)
        return -abs(len(text) - 3.0)

    assert found(TextScore(length)) == found(TextScore(lambda text: -abs(len(text) - 3.0)))
    assert most == 5


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_that_takes_too_long_leaves_its_text_out(waits: bool) -> None:
    never = threading.Event()

    def slow(text: str) -> float:
        if len(text) == 4:
            never.wait(60)
        return float(len(text))

    async def slowly(text: str) -> float:
        if len(text) == 4:
            await asyncio.sleep(60)
        return float(len(text))

    with pytest.warns(UserWarning, match=r"1 of 5 texts are left out.*took more than 1 s"):
        texts = found(TextScore(slowly if waits else slow, seconds=1.0))
    never.set()
    assert texts == ["xxxxx", "xxx", "xx", "x"]


def test_an_error_of_a_function_is_its_own() -> None:
    async def failing(text: str) -> float:
        raise TimeoutError("the service does not answer")

    def broken(text: str) -> float:
        raise ValueError("no number in it")

    for scorer, words in (
        (TextScore(failing), "the service does not answer"),
        (TextScore(broken), "no number in it"),
        (TextScore(broken, seconds=60.0), "no number in it"),
    ):
        with pytest.raises(Exception, match=words):
            found(scorer)
    with pytest.raises(SettingsError, match="seconds of the scorer text"):
        TextScore(len, seconds=0.0)


def test_beginnings_and_answers_may_have_functions_of_both_kinds() -> None:
    async def whole(text: str) -> bool:
        return len(text) == 2

    scorer = TextScore(whole, beginning=lambda text: 0.5)
    assert found(scorer)[0] == "xx" and scorer.prefixes
