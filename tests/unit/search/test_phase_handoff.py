"""One model begins and another goes on: who wrote what, what each has read, and what is held after the hand-off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.phase_handoff import PhaseHandoff, entropy
from decodery.step.sequence import TokenLogprob
from decodery.testing.models import Counted
from methods import DRAFTERS
from sampled import MODEL, OTHER, PROMPT, plain, run

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


def test_phases_end_where_a_model_has_become_sure_or_is_not_any_more() -> None:
    many = GREEDY | {"max_new_tokens": 30}
    surprises = [entropy(each) for each in plain_entropies()]
    assert min(surprises) < max(surprises)
    limit = (min(surprises) + max(surprises)) / 2
    search = PhaseHandoff(step_tokens=99, rounds=9, below=limit, above=limit, window=1, model=OTHER)
    (seq,) = run(search, **many)
    parts = [(part.author, len(part.tokens)) for part in seq.trace.grown]
    first = next(place for place, each in enumerate(surprises, start=1) if each < limit)
    assert parts[0] == ("", first) and parts[1][0] == "draft" and len(parts) > 2
    assert seq.request.logprobs is None and all(not each.top for each in seq.token_logprobs)
    # Without limits, or with such as are never met, the phases are as long as they are told to be.
    never = replace(search, below=0.0, above=99.0, step_tokens=6, rounds=2)
    assert run(never, **many)[0].generated == run(replace(never, below=None, above=None), **many)[0].generated
    with pytest.raises(SettingsError, match="at least 0 nats"):
        PhaseHandoff(below=-1.0)


def plain_entropies() -> list[TokenLogprob]:
    engine = Engine(MODEL)
    seq = engine.submit(Request(PROMPT, logprobs=20, **GREEDY | {"max_new_tokens": 30}))
    engine.run([seq])
    return seq.token_logprobs


def best(tokens: list[int]) -> int:
    from decodery.models.batch import Batch, Segment

    return int(OTHER.forward(Batch([Segment.chunk(tokens, OTHER.new_cache())])).logits[-1].argmax())
