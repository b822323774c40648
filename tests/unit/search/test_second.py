"""Steps of a second model: kept, rewritten, and what remains of them in caches, trees and ledgers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decodery.core.errors import ModelNotFound, SettingsError, VocabularyMismatch
from decodery.core.trace import Trace
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.scorers.curiosity import Curiosity, inverted_u
from decodery.scorers.rating import Rating
from decodery.search.arbitrage import Arbitrage
from decodery.search.spec_reason import SpecReason
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from decodery.testing import tiny_transformer
from decodery.testing.models import Counted
from decodery.testing.states import distance_to_fresh
from decodery.training.router import Decisions, decisions, fit_router, spearman
from methods import DRAFTERS, SEARCHES, TWO_MODELS, Even
from sampled import MODEL, OTHER, PLAIN, PROMPT, SETTINGS, plain, run

LONG: dict[str, Any] = {"max_new_tokens": 20, "eos_ids": (9, 11)}
ASKED = Rating(question=(9, 8, 7), words=tuple((token, token + 10) for token in range(1, 11)), values=tuple(range(10)))


def narrow(name: str, bar: float) -> Any:
    search: Any = SEARCHES[name]
    if name == "phase-handoff":
        return replace(search, rounds=1, begins="model" if bar > 1 else "second")
    return replace(
        search, **({"router": "threshold", "theta": bar} if name == "arbitrage" else {"threshold": bar, "first": 0})
    )


@pytest.mark.parametrize("name", sorted(TWO_MODELS))
def test_a_bar_that_nothing_reaches_is_the_model_alone_and_one_below_all_the_second(name: str) -> None:
    for sampler in (PLAIN, Sampler.from_settings(temperature=0.0, repetition_penalty=1.3)):
        settings = LONG | {"sampler": sampler}
        texts = [plain(1, alone, seed=3, **settings)[0] for alone in (MODEL, OTHER)]
        assert [run(narrow(name, bar), seed=3, **settings)[0].generated for bar in (2.0, -1.0)] == texts
        assert texts[0] != texts[1]


def test_what_was_kept_follows_from_the_tree_and_is_in_the_cache() -> None:
    kept = rewritten = 0
    for seed in range(2):
        counted = Counted(OTHER)
        search = SpecReason(ASKED, (7,), 4, model=counted, threshold=3.45)
        (seq,) = run(search, seed=seed, **LONG)
        trace, ledger = seq.trace, seq.trace.ledger
        assert distance_to_fresh(MODEL, seq) < 1e-9 and seq.cache.next_position == len(seq.tokens) - 1
        assert sum(len(part.tokens) for part in trace.grown) == ledger.tokens
        assert ledger.counts["discarded"] == ledger.tokens - len(seq.generated)
        assert ledger.rows["draft"] == sum(counted.rows) and ledger.passes["draft"] == len(counted.rows)
        # Every step that the second model wrote was judged; where it did not reach the bar, the next part replaces it.
        text, at = list[int](), -1
        for number, part in enumerate(trace.grown):
            assert part.parent == at
            if part.author != "draft" or (part.score or 0.0) >= 3.45:
                text, at = [*text, *part.tokens], number
                kept += part.author == "draft"
            else:
                rewritten += 1
                assert trace.grown[number + 1].author == ""
        assert text == seq.generated
        drafted = run(search, seed=seed, drafter=DRAFTERS["draft-model"](OTHER), **LONG)
        assert drafted[0].generated == seq.generated
    # A bar that were ignored either way would leave one of these at 0.
    assert kept and rewritten
    (first,) = run(replace(search, first=2), **LONG)
    assert [part.author for part in first.trace.grown[:3]] == ["", "", "draft"]


def test_the_oracle_takes_the_better_step_of_the_two() -> None:
    wrong = 0
    for seed in range(3):
        (seq,) = run(Arbitrage(Even(), (7,), 3, model=OTHER), seed=seed, **LONG)
        parts, text, at = seq.trace.grown, list[int](), -1
        for number in range(0, len(parts), 2):
            drafted, own = parts[number], parts[number + 1]
            assert (drafted.author, own.author, drafted.parent, own.parent) == ("draft", "", at, at)
            worth, other = float(own.score or 0), float(drafted.score or 0)
            at = number + (worth > other)
            wrong += worth == other
            text += parts[at].tokens
        assert text == seq.generated and sum(len(part.tokens) for part in parts) == seq.trace.ledger.tokens
        counts = seq.trace.ledger.counts
        assert counts.get("kept", 0) + counts.get("escalated", 0) == len(parts) / 2
    assert wrong < 12


def test_two_models_and_shared_passes_and_preemption_change_nothing() -> None:
    wanted = SETTINGS | LONG
    for name in sorted(TWO_MODELS):
        search = SEARCHES[name]
        alone = run(search, **LONG)[0].generated
        engine = Engine(MODEL, prefill_chunk=4)
        job = engine.enter(search.find(engine, Request(PROMPT, seed=7, **wanted)))
        text = engine.submit(Request(PROMPT[:3], **wanted))
        for _ in range(5):
            engine.step()
        engine.preempt(job)
        engine.run([job, text])
        assert job.result is not None and job.result[0].generated == alone


def test_second_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="the second model has room for 16 tokens"):
        run(replace(SEARCHES["spec-reason"], model=tiny_transformer(1, max_positions=16)))  # type: ignore[arg-type]
    with pytest.raises(VocabularyMismatch):
        run(replace(SEARCHES["arbitrage"], model=tiny_transformer(1, vocab_size=32)))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="token ids, or search through `LLM`"):
        run(SpecReason(model=OTHER))


def test_a_trained_router_decides_by_the_state_of_the_second_model(tmp_path: Path) -> None:
    """From texts that both have written to a file that says who writes."""
    oracle = Arbitrage(Even(), (7,), 2, model=OTHER)
    asked = [
        Request([5, 9, number], seed=number, search=oracle, **SETTINGS | {"eos_ids": (), "max_new_tokens": 8})
        for number in range(8)
    ]
    found = decisions(Engine(MODEL), OTHER, asked)
    assert len(found.text) == 8 * 4 and 0 < int((found.advantage > 0).sum()) < 32
    assert bool(found.escalated.any()) and not bool(found.escalated.all())
    router, _ = fit_router(found, 2, steps=50)
    router.save(tmp_path / "router")
    search = Arbitrage(router=str(tmp_path / "router"), delimiter=(7,), step_tokens=3, model=OTHER, theta=0.5)
    for theta, alone in ((0.0, MODEL), (1.01, OTHER)):
        (seq,) = run(replace(search, theta=theta), **LONG)
        assert seq.generated == plain(1, alone, **LONG)[0] and seq.trace.ledger.scorer_calls == 0
    (seq,) = run(search, **LONG | {"eos_ids": ()})
    at, before = -1, -1
    for number, part in enumerate(seq.trace.grown):
        if part.author == "draft":
            text = [*PROMPT, *followed(seq.trace, number)]
            state = OTHER.forward(Batch([Segment.chunk(text, OTHER.new_cache())]), taps=[2]).hidden[2][-1]
            own = before >= 0 and not seq.trace.grown[before].author
            better = float(router.better(state[None], torch.tensor([own]))[0])
            assert part.parent == before
            at = number
            if better < 0.5:
                before = at
        else:
            assert part.parent == before and better >= 0.5
            before = number
    assert followed(seq.trace, before) == seq.generated
    with pytest.raises(SettingsError, match="reads 32 numbers after layer 2"):
        run(replace(search, model=tiny_transformer(1, num_layers=1)))
    for settings, named in (
        ({"router": str(tmp_path / "none")}, "decodery train router"),
        ({"scorer": Even()}, "leave one of the two out"),
        ({"router": "oracle"}, "give one"),
    ):
        with pytest.raises((SettingsError, ModelNotFound), match=named):
            replace(search, **settings)  # type: ignore[arg-type]


def test_a_router_learns_what_can_be_foreseen_and_nothing_else() -> None:
    states = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    escalated, text = torch.arange(400) % 3 == 0, torch.arange(400) // 10
    advantage = states[:, 2] * (1 - 2.0 * escalated.float())
    _, report = fit_router(Decisions(states, escalated, advantage, text), 2, steps=150)
    chance = advantage[torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    _, luck = fit_router(Decisions(states, escalated, chance, text), 2, steps=150)
    assert report["spearman"] > 0.8 > 0.4 > max(luck["spearman"], report["shuffled labels"]["spearman"])
    low, high = report["interval of spearman"]
    assert 0.5 < low <= report["spearman"] <= high and report["tested on"] == "5 texts that chose nothing"
    assert all(abs(each["spearman"]) < 0.5 for each in report["baselines"].values())
    assert spearman(torch.tensor([1.0, 2, 3]), torch.tensor([2.0, 9, 10])) == pytest.approx(1.0)
    with pytest.raises(SettingsError, match="some are better"):
        fit_router(Decisions(states, escalated, -advantage.abs(), text), 2)


def followed(trace: Trace, number: int) -> list[int]:
    """The text that ends with this part."""
    part = trace.grown[number]
    return [*(followed(trace, part.parent) if part.parent >= 0 else []), *part.tokens]


def read(tokens: list[int]) -> torch.Tensor:
    """The model's log-law [n, vocab] after each of these tokens."""
    return MODEL.forward(Batch([Segment.chunk(tokens, MODEL.new_cache())])).logits.double().log_softmax(dim=-1)


def test_a_rating_is_what_the_answers_say() -> None:
    outputs = [[4, 5], [6, 1, 30], [2]]
    texts = Candidates(PROMPT, outputs, [False] * 3, model=MODEL)
    words, values = ((1, 2), (3,), (40,)), (0.001, 1.0, 20.0)
    laws = torch.stack([read([*PROMPT, *output, 9, 8])[-1] for output in outputs]).exp()
    masses = torch.stack([laws[:, list(word)].sum(dim=1) for word in words], dim=1)
    shares = masses / masses.sum(dim=1, keepdim=True)
    rating = Rating((9, 8), words, values)
    mean = run_sync(judge(rating, texts))
    assert torch.allclose(mean, shares @ torch.tensor(values, dtype=torch.float64))
    # Without the other words left out it is another number.
    assert not torch.allclose(mean, masses @ torch.tensor(values, dtype=torch.float64))
    top = laws.argmax(dim=1).tolist()
    asked = Rating((9, 8), ((top[0],), (63,)), (3.0, 1.0), how="argmax")
    assert run_sync(judge(asked, texts)).tolist() == [3.0 if token == top[0] else 1.0 for token in top]
    drawn = run_sync(judge(replace(rating, how="drawn", draws=4000), texts))
    assert torch.allclose(drawn, mean, rtol=0.2)
    few = replace(rating, how="drawn", draws=2)
    assert torch.equal(run_sync(judge(few, texts)), run_sync(judge(few, texts)))
    alike: dict[str, Any] = {"words": ((1, 2), (2,)), "values": (0.0, 1.0)}
    for settings, named in ((alike, "first tokens differ"), ({"values": (1.0,)}, "a value of")):
        with pytest.raises(SettingsError, match=named):
            run_sync(judge(replace(rating, **settings), texts))  # type: ignore[arg-type]


def test_curiosity_is_for_the_last_step_and_largest_at_the_peak() -> None:
    around = inverted_u(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0]), 3.0, 2.0)
    assert around.tolist() == [0.0, 0.75, 1.0, 0.75, 0.0, 0.0]
    outputs, begins = [[4, 5, 6, 8], [6, 1]], [2, 0]
    surprisal = []
    for output, begin in zip(outputs, begins, strict=True):
        law = read([*PROMPT, *output])
        told = [-float(law[len(PROMPT) - 1 + n, output[n]]) for n in range(begin, len(output))]
        surprisal.append(sum(told) / len(told))
    texts = Candidates(PROMPT, outputs, [False, False], model=MODEL, begins=begins)
    curious = Curiosity(Even(), peak=3.0, width=4.0, surprise=2.0, coherent=0.5, bias=-1.0)
    even = run_sync(judge(Even(), texts))
    expected = torch.sigmoid(2.0 * inverted_u(torch.tensor(surprisal).double(), 3.0, 4.0) + 0.5 * even - 1.0)
    found = run_sync(judge(curious, texts))
    assert torch.allclose(found, expected, atol=1e-6)
    # Of the whole text it would be another one.
    whole = run_sync(judge(curious, replace(texts, begins=None)))
    assert not torch.allclose(found[0], whole[0]) and torch.allclose(found[1], whole[1])
