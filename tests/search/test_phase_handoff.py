"""One model begins and another goes on: who wrote what, what each has read, and what is held behind the hand-off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decodery.errors import SettingsError
from decodery.sample import Sampler
from decodery.search.phase_handoff import PhaseHandoff
from decodery.testing.models import Counted
from methods import DRAFTERS
from sampled import OTHER, PROMPT, plain, run

GREEDY: dict[str, Any] = {"sampler": Sampler.from_settings(), "max_new_tokens": 14, "eos_ids": ()}


def test_the_second_model_goes_on_as_it_would_behind_a_prompt_that_is_all_of_it() -> None:
    counted = Counted(OTHER)
    search = PhaseHandoff(step_tokens=5, model=counted)
    (seq,) = run(search, **GREEDY)
    (begun,) = plain(1, **GREEDY)
    assert seq.generated[:5] == begun[:5] and seq.generated != begun
    tokens = [*PROMPT, *begun[:5]]
    for token in seq.generated[5:]:
        assert token == best(tokens)
        tokens.append(token)
    # It reads what it has not written in one pass, and then a token at a time; the model holds nothing any more.
    assert counted.rows == [len(PROMPT) + 4, *[1] * 9]
    assert seq.cache.length == 0 and [part.author for part in seq.trace.grown] == ["", "draft"]
    drafted = run(search, drafter=DRAFTERS["draft-model"](OTHER), **GREEDY)
    assert drafted[0].generated == seq.generated


def test_phases_take_turns_and_penalties_see_all_of_them() -> None:
    for begins in ("model", "second"):
        search = PhaseHandoff(step_tokens=3, rounds=4, begins=begins, model=OTHER)  # type: ignore[arg-type]
        (seq,) = run(search, **GREEDY)
        authors = [part.author for part in seq.trace.grown]
        assert authors == (["", "draft"] * 2 if begins == "model" else ["draft", ""] * 2)
        assert [len(part.tokens) for part in seq.trace.grown] == [3, 3, 3, 5]
        (whole,) = run(search, **GREEDY | {"max_new_tokens": 40})
        (other,) = run(search, **GREEDY | {"max_new_tokens": 40, "sampler": Sampler.from_settings(no_repeat_ngram=1)})
        assert len(set(other.generated)) == 40 > len(set(whole.generated))
    (cut,) = run(replace(search, delimiter=(seq.generated[1],)), **GREEDY)
    assert len(cut.trace.grown[0].tokens) == 2


def test_a_text_that_ends_before_is_not_handed_over() -> None:
    (begun,) = plain(1, **GREEDY)
    counted = Counted(OTHER)
    (seq,) = run(PhaseHandoff(step_tokens=12, model=counted), **GREEDY | {"eos_ids": (begun[2],)})
    assert seq.generated == begun[:3] and counted.rows == []
    with pytest.raises(SettingsError, match="begins with the model or the second one, not 'small'"):
        PhaseHandoff(begins="small")  # type: ignore[arg-type]


def best(tokens: list[int]) -> int:
    from decodery.model.batch import Batch, Segment

    return int(OTHER.forward(Batch([Segment.chunk(tokens, OTHER.new_cache())])).logits[-1].argmax())
