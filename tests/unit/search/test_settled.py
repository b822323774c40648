"""What searches tell of their first text before they end: it begins so, whatever comes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from decodery.scorers import TextScore
from decodery.search.step_nodes import Node
from decodery.search.steps import Growth
from serving import tiny_lm

VOWELS = TextScore(*[lambda text: (1 + sum(each in "aeiou0123456789" for each in text)) / (2 + len(text))] * 2)
STEPS = {"delimiter": None, "step_tokens": 3, "rounds": 12}


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_lm()


def _told(lm: Any, search: Any, seed: int) -> tuple[list[str], str]:
    """What was told on the way, and what was found."""
    found: list[str] = []
    request = lm.request_for(
        "once", apply_chat_template=False, temperature=1.0, seed=seed, max_new_tokens=24, drafter=None, stop=["e"]
    )
    request.settled = found.append
    best = lm.output(search.bind(lm.tokenizer).run(lm.engine(), request)[0])
    return found, best.text


@pytest.mark.parametrize("name", ["StepBeam", "ParticleFilter", "EntropicParticleFilter", "SpecReason", "Arbitrage"])
def test_what_is_settled_begins_what_is_found(lm: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import decodery.search as known

    own: dict[str, Any] = {"StepBeam": {"n": 4, "m": 2}, "SpecReason": {"threshold": 0.4}, "Arbitrage": {"theta": 0.4}}
    settings = own.get(name, {"particles": 3})
    if name in ("SpecReason", "Arbitrage"):
        settings |= {"model": tiny_lm().model} | ({"router": "threshold"} if name == "Arbitrage" else {})
    search = getattr(known, name)(VOWELS, **STEPS | settings)
    early = 0
    for seed in range(5):
        told, text = _told(lm, search, seed)
        assert told and all(text.startswith(each) for each in told)
        assert all(len(one) <= len(other) for one, other in pairwise(told))
        early += any(0 < len(each) < len(text) for each in told)
    assert early
    if name in ("SpecReason", "Arbitrage"):
        return

    def hasty(self: Growth, candidates: Any) -> None:
        """Takes the first text for the one that is found, however many there are."""
        first: list[Node] = list(candidates)[:1]
        if self._settled is not None and first:
            assert first[0].seq.text is not None
            self._settled(first[0].seq.text.text)

    monkeypatch.setattr(Growth, "settle", hasty)
    wrong = [(told, text) for told, text in (_told(lm, search, seed) for seed in range(4))]
    assert any(not text.startswith(each) for told, text in wrong for each in told)
