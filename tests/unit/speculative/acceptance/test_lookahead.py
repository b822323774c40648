"""Rules that read on before they decide: AdaDec and CNTP against plain decoding and plain re-computation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Ordered
from pathlib import Path

import numpy as np
import pytest
import torch

from covering import in_turn
from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.noise import gumbel, mix
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.speculative.acceptance.adadec import AdaDec
from decodery.speculative.acceptance.cntp import CNTP
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.sequence import Sequence
from decodery.testing import check_batch, check_state, decode, tiny_transformer, to_int8
from decodery.training.adadec_thresholds import fit, observe, read_solutions
from methods import DRAFTERS, KINDS

TARGET = to_int8(tiny_transformer(0))
OTHER = tiny_transformer(0, num_layers=1)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, list(range(2, 40))]
PLAIN = Sampler.from_settings()
NUCLEUS = Sampler.from_settings(temperature=0.8, top_p=0.95)
ADADEC = AdaDec(tau=2.5)
CAUTIOUS = CNTP(most=4, high=3.0, length=6, stops=(9, 20, 31))


def logits_after(tokens: Ordered[int]) -> torch.Tensor:
    """[n, vocab] float64 of one pass over `tokens`, row i after the i-th."""
    return TARGET.forward(Batch([Segment.chunk(list(tokens), TARGET.new_cache())])).logits.double()


def tokens_of(
    sampler: Sampler, rule: AcceptanceRule | None = None, drafter: str | None = None, n: int = 24, prompts: int = 3
) -> list[list[int]]:
    chosen = DRAFTERS[drafter](OTHER) if drafter else None
    runs = decode(
        *(TARGET, PROMPTS[:prompts]),
        **{"sampler": sampler, "acceptance_rule": rule, "drafter": chosen, "max_new_tokens": n, "eos_ids": (0,)},
        seeds=(0,) if sampler.greedy else (0, 1),
    )
    return [run.generated for run in runs]


def entropy_of(row: torch.Tensor) -> float:
    return float(torch.distributions.Categorical(logits=row).entropy())


def test_adadec_that_never_pauses_or_never_looks_is_greedy() -> None:
    greedy = tokens_of(PLAIN)
    assert tokens_of(PLAIN, AdaDec(tau=math.inf)) == greedy
    assert tokens_of(PLAIN, AdaDec(tau=0.0, length=0)) == greedy
    assert tokens_of(PLAIN, AdaDec(tau=0.0, width=1)) == greedy
    assert tokens_of(PLAIN, ADADEC) != greedy


def plain_adadec(prompt: list[int], rule: AdaDec, length: int) -> tuple[list[int], int]:
    """The text and the pauses, every score from a pass over the whole text."""
    tokens, pauses = list(prompt), 0
    for _ in range(length):
        row = logits_after(tokens)[-1]
        chosen = int(row.argmax())
        if entropy_of(row) >= rule.tau:
            pauses += 1
            scores = {}
            for token in row.topk(rule.width).indices.tolist():
                run = [token]
                while len(run) < rule.length + 1 and run[-1] not in (0, *rule.stops):
                    run.append(int(logits_after([*tokens, *run])[-1].argmax()))
                rows = logits_after([*tokens, *run]).log_softmax(-1)[len(tokens) - 1 :]
                scores[token] = sum(float(rows[i, each]) for i, each in enumerate(run)) / len(run)
            chosen = max(scores, key=lambda token: scores[token])
        tokens.append(chosen)
        if chosen == 0:
            break
    return tokens[len(prompt) :], pauses


@pytest.mark.parametrize("rule", [ADADEC, AdaDec(tau=1.0, width=4, length=2), AdaDec(tau=0.0, length=3, stops=(8, 22))])
def test_adadec_equals_a_recomputation_from_scratch(rule: AdaDec) -> None:
    paused = 0
    for prompt in PROMPTS[:2]:
        expected, pauses = plain_adadec(prompt, rule, 16)
        (run,) = decode(TARGET, [prompt], acceptance_rule=rule, max_new_tokens=16, eos_ids=(0,))
        assert run.generated == expected
        passes, rows = (run.trace.ledger.counts.get(name, 0) for name in ("extra_passes", "extra_rows"))
        assert (passes > 0) == (pauses > 0) and passes <= pauses * rule.length
        assert rows <= passes * (1 + 16 + rule.width * rule.length)
        paused += pauses
    assert paused > 2


def plain_cntp(prompt: list[int], rule: CNTP, seed: int, length: int) -> list[int]:
    """The text, every trial drawn from passes over the whole text."""
    tokens: list[int] = list(prompt)

    def draw(context: list[int], noise: int) -> tuple[int, float]:
        row = logits_after(context)[-1].float()
        law = NUCLEUS.law(row[None], [NUCLEUS.context(context, len(prompt), NUCLEUS.init(prompt), seed)])[0].double()
        token = int((law + gumbel(noise, len(context) - len(prompt), torch.arange(len(law)))).argmax())
        return token, float(law.log_softmax(-1)[token])

    while len(tokens) - len(prompt) < length and (len(tokens) == len(prompt) or tokens[-1] != 0):
        law = NUCLEUS.law(
            logits_after(tokens)[-1:].float(), [NUCLEUS.context(tokens, len(prompt), NUCLEUS.init(prompt), seed)]
        )
        number = rule.trials(entropy_of(law[0].double()))
        if number == 1:
            tokens.append(draw(tokens, seed)[0])
            continue
        trials = []
        for trial in range(number):
            noise = mix(seed, len(tokens) - len(prompt), trial)
            run: list[int] = []
            total = 0.0
            while not run or (len(run) < rule.length and run[-1] not in (0, *rule.stops)):
                token, logprob = draw([*tokens, *run], noise)
                run, total = [*run, token], total + logprob
            trials.append((math.exp(-total / len(run)), trial, run))
        tokens += min(trials)[2]
    return tokens[len(prompt) :][:length]


def test_cntp_equals_a_recomputation_from_scratch() -> None:
    for prompt, seed in itertools.product(PROMPTS[:2], (0, 3)):
        (run,) = decode(
            TARGET, [prompt], acceptance_rule=CAUTIOUS, sampler=NUCLEUS, seeds=(seed,), max_new_tokens=14, eos_ids=(0,)
        )
        assert run.generated == plain_cntp(prompt, CAUTIOUS, seed, 14)
        assert run.trace.ledger.counts["extra_passes"] > 0


def test_cntp_with_one_trial_is_plain_sampling() -> None:
    sampled = tokens_of(NUCLEUS)
    assert tokens_of(NUCLEUS, CNTP(most=1)) == sampled
    assert tokens_of(NUCLEUS, CNTP(low=50.0, high=60.0)) == sampled
    assert tokens_of(NUCLEUS, CAUTIOUS) != sampled
    with pytest.raises(SettingsError, match="the acceptance rule cntp needs a temperature above 0"):
        tokens_of(PLAIN, CAUTIOUS)


def test_how_many_trials_an_entropy_asks_for() -> None:
    rule = CNTP()
    assert [rule.trials(nats) for nats in (0.0, 0.01, 0.17, 0.18, 1.49, 1.5, 9.0)] == [1, 1, 1, 2, 9, 10, 10]


def test_trials_end_at_punctuation_by_their_text() -> None:
    class Letters:
        def push(self, ids: Ordered[int]) -> str:
            return "".join(" ." if token % 4 == 0 else "a" for token in ids)

        def finish(self) -> str:
            return ""

    rule = CNTP(least=3, most=3)
    engine = Engine(TARGET, detokenizer=Letters)
    seq = engine.submit(Request([1, 2, 3], sampler=NUCLEUS, acceptance_rule=rule, max_new_tokens=60))
    while not seq.finished:
        engine.step()
        # Whole trials become text, so what is there ends where a trial ended.
        assert (
            not seq.generated
            or seq.generated[-1] % 4 == 0
            or seq.trace.steps[-1].emitted in (0, rule.length)
            or seq.finished
        )


LOOKING = {"adadec": (ADADEC, PLAIN), "cntp": (CAUTIOUS, NUCLEUS)}


@pytest.mark.parametrize(("drafter", "name"), in_turn(KINDS, list(LOOKING)))
def test_drafts_change_nothing(name: str, drafter: str) -> None:
    rule, sampler = LOOKING[name]
    assert tokens_of(sampler, rule, drafter, 12, 2) == _plain(name)


def _plain(name: str, known: dict[str, list[list[int]]] = {}) -> list[list[int]]:  # noqa: B006
    if name not in known:
        rule, sampler = LOOKING[name]
        known[name] = tokens_of(sampler, rule, None, 12, 2)
    return known[name]


@pytest.mark.parametrize("name", LOOKING)
def test_batches_and_caches_stay_in_order(name: str) -> None:
    rule, sampler = LOOKING[name]
    check_batch(
        TARGET, PROMPTS[:2], acceptance_rule=rule, sampler=sampler, drafter=DRAFTERS["draft-model"](OTHER), seeds=(0,)
    )
    for drafter in (None, DRAFTERS["draft-model"](OTHER)):
        check_state(TARGET, PROMPTS[:1], acceptance_rule=rule, sampler=sampler, drafter=drafter, max_new_tokens=10)


@pytest.mark.parametrize("name", LOOKING)
def test_the_length_limit_cuts_and_changes_nothing(name: str) -> None:
    rule, sampler = LOOKING[name]
    whole = tokens_of(sampler, rule, n=12, prompts=2)
    for length in (1, 2, 7):
        assert tokens_of(sampler, rule, n=length, prompts=2) == [tokens[:length] for tokens in whole]


def test_the_models_context_is_never_left() -> None:
    small = tiny_transformer(0, max_positions=24)
    for name in LOOKING:
        rule, sampler = LOOKING[name]
        (run,) = decode(small, [PROMPTS[0]], acceptance_rule=rule, sampler=sampler, max_new_tokens=100)
        assert len(run.tokens) == 24


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingsError, match="the acceptance rule adadec needs temperature 0"):
        decode(TARGET, PROMPTS[:1], acceptance_rule=ADADEC, sampler=NUCLEUS)
    for make in (
        lambda: AdaDec(tau=math.nan),
        lambda: AdaDec(width=0),
        lambda: AdaDec(length=-1),
        lambda: CNTP(least=3, most=2),
        lambda: CNTP(low=1.0, high=1.0),
        lambda: CNTP(length=0),
        lambda: CNTP(entropy="bits"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SettingsError):
            make()


def test_a_trace_counts_what_was_asked_for() -> None:
    (run,) = decode(TARGET, PROMPTS[:1], acceptance_rule=ADADEC, max_new_tokens=16)
    assert isinstance(run, Sequence)
    ledger, steps = run.trace.ledger, run.trace.steps
    # What a rule asks for has a step of its own, of rows that are all new nodes.
    asked = [step.rows for step in steps if step.nodes == step.rows]
    assert asked and ledger.counts == {"extra_passes": len(asked), "extra_rows": sum(asked)}
    assert ledger.passes == {"model": len(steps)} and ledger.rows == {"model": sum(step.rows for step in steps)}
    assert run.trace.summary()["ledger"]["counts"] == ledger.counts
    assert sum(step.emitted for step in run.trace.steps) == 16


# Thresholds.


def test_a_fit_finds_the_threshold_its_data_was_drawn_with() -> None:
    draw = np.random.default_rng(0)
    entropies = draw.uniform(0, 4, 20_000)
    # Right with probability sigmoid(-3 (H - 2)): as many of both kinds, and as likely one as the other at H = 2.
    right = draw.random(20_000) < 1 / (1 + np.exp(3 * (entropies - 2)))
    found = fit(entropies, right, np.arange(20_000))
    assert abs((found.weight, found.bias)[0] + 3) < 0.2
    assert -found.bias / found.weight == pytest.approx(2, abs=0.05)
    assert abs(found.tau - 2) < 0.15 and found.tokens == 20_000 and found.wrong == int((~right).sum())
    # Classes are balanced before the fit: ten times as many right ones move nothing.
    many = np.concatenate([entropies, np.repeat(entropies[right], 9)])
    more = np.concatenate([right, np.ones(9 * int(right.sum()), dtype=bool)])
    assert fit(many, more, np.arange(len(many))).tau == pytest.approx(2, abs=0.15)
    # Where texts are alike in whole, as few as there are say how sure the accuracy is.
    texts = np.arange(20_000) % 50
    wide = fit(entropies, np.where(texts < 40, right, ~right), texts)
    assert wide.texts == 5 and wide.interval[1] - wide.interval[0] > 10 * (found.interval[1] - found.interval[0])


def test_the_accuracy_of_a_threshold_is_that_on_texts_that_taught_nothing() -> None:
    draw, gains = np.random.default_rng(3), []
    for trial in range(200):
        # Every text has an entropy of its own, which says nothing of what is right in another one.
        texts = np.repeat(np.arange(20), 10)
        own, kind = draw.uniform(0, 4, 20), np.arange(20) % 2 == 0
        entropies, right = own[texts], (draw.random(200) < 0.9) == kind[texts]
        try:
            gains.append(fit(entropies, right, texts, seed=trial).accuracy - 0.5)
        except SettingsError:
            continue
    assert len(gains) > 60 and abs(np.mean(gains)) < 3 * np.std(gains) / len(gains) ** 0.5
    with pytest.raises(SettingsError, match="2 solutions leave nothing to test"):
        fit(entropies, right, texts % 2)


def test_the_accuracy_of_a_threshold_is_that_on_tokens_that_chose_nothing() -> None:
    draw = np.random.default_rng(1)
    gains = []
    for _ in range(200):
        entropies = draw.uniform(0, 4, 120)
        right = draw.random(120) < 1 / (1 + np.exp(0.6 * (entropies - 2)))
        try:
            found = fit(entropies, right, np.arange(120))
        except SettingsError:
            continue
        # What the rule of these tokens allows: the mean over entropies of sigmoid(0.6 |H - 2|).
        gains.append(found.accuracy - 0.642)
        assert found.interval[0] <= found.accuracy <= found.interval[1] and found.tested >= 2
    # The best of 99 cut-offs on the tokens that choose it is about 0.1 above what others are worth.
    assert len(gains) > 160 and np.mean(gains) < 0.04


def test_what_no_threshold_can_be_learned_from_is_refused() -> None:
    draw = np.random.default_rng(0)
    entropies = draw.uniform(0, 4, 500)
    with pytest.raises(SettingsError, match="not surer where it is right"):
        fit(entropies, entropies > 2 + draw.normal(size=500), np.arange(500))
    with pytest.raises(SettingsError, match="only 3 tokens"):
        fit(entropies, np.arange(500) < 3, np.arange(500))


def test_solutions_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "solutions.jsonl"
    path.write_text('{"prompt": "a", "solution": "b"}\n\n{"prompt": "c", "canonical_solution": "d"}\n')
    assert read_solutions(path) == [("a", "b"), ("c", "d")]
    for line in ("[]", '{"prompt": "a"}', '{"prompt": 3, "solution": "b"}', "x"):
        path.write_text('{"prompt": "a", "solution": "b"}\n' + line)
        with pytest.raises(CorruptFile, match="line 2 of"):
            read_solutions(path)


def test_entropies_are_those_before_each_token_of_a_solution(smollm2: LLM) -> None:
    prompt, solution = "def double(x):\n", "    return x + x\n" * 12
    pairs = [(prompt, solution), ("# Nothing.\n", "x = 1\n"), (prompt, "    pass")]
    entropies, right, texts = observe(smollm2.model, smollm2.tokenizer, pairs)
    tokens = smollm2.tokenizer.encode(prompt + solution)
    first = len(smollm2.tokenizer.encode(prompt))
    size = len(tokens) - first
    entropies, right = entropies[:size], right[:size]
    # Solutions of one prompt are of one text.
    assert set(texts[:size]) == {texts[-1]} and set(texts[size:]) == {1, texts[-1]}
    logits = smollm2.model.forward(Batch([Segment.chunk(tokens[:-1], smollm2.model.new_cache())])).logits[first - 1 :]
    assert entropies == pytest.approx([entropy_of(row.double()) for row in logits], rel=1e-3, abs=1e-4)
    assert right.tolist() == [int(row.argmax()) == token for row, token in zip(logits, tokens[first:], strict=True)]
