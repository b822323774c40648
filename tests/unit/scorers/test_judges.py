"""Scorers that ask after prompts of their own: a judge's labels, and rewards calibrated by the model's own texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.calls import Calls
from decodery.models.batch import Batch, Segment
from decodery.scorers import InfAlign, LLMJudge, QuestionLikelihood, TextScore
from decodery.scorers.infalign import transform, win_rate
from decodery.search import BestOfN, WeightedVote
from decodery.step.forward_request import run_sync
from decodery.step.scorer import Candidates, judge
from scripted_lm import Said, ScriptedLLM
from serving import tiny_lm


def test_a_label_counts_by_its_probability_whoever_tells_it() -> None:
    lm = tiny_lm(max_positions=2048)
    scorer = LLMJudge(labels=("no", "maybe", "yes")).bind(lm.tokenizer)
    request = lm.request_for("Is it so?", drafter=None)
    calls = Calls(lm.engine(), request, request.conversation)
    outputs = [lm.tokenizer.encode(text) for text in ("It is.", "Never.")]
    candidates = Candidates(
        request.prompt, outputs, [True, True], texts=["It is.", "Never."], model=lm.model, calls=calls
    )
    scores = run_sync(judge(scorer, candidates))
    for text, score in zip(("It is.", "Never."), scores.tolist(), strict=True):
        ids = lm.encode(f"Question:\nIs it so?\n\nAnswer:\n{text}\n\n{scorer.instruction}")
        law = lm.model.forward(Batch([Segment.chunk(ids, lm.model.new_cache(), logit_rows=[len(ids) - 1])])).logits[0]
        weights = law.softmax(0)[[ord(letter) for letter in "nmy"]].double()
        assert score == pytest.approx(float((weights[1] / 2 + weights[2]) / weights.sum()), abs=1e-9)
        # The favourite label alone would say something else.
        assert abs(score - int(weights.argmax()) / 2) > 1e-4
    assert torch.equal(run_sync(judge(scorer, candidates.of([1]))), scores[1:])
    with pytest.raises(SettingsError, match="some of these are equal"):
        run_sync(judge(LLMJudge(labels=("aa", "ab")).bind(lm.tokenizer), candidates))
    # After a server: spellings of one label are summed, and what is not listed counts as the least that is.
    heard = {"no": math.log(0.5), " yes": math.log(0.2), "yes": math.log(0.1), "other": math.log(0.2)}
    remote = ScriptedLLM(lambda asked: Said("no", heard) if "Question:" in asked.text else "text")
    (found,) = remote.search("q", BestOfN(LLMJudge(labels=("no", "maybe", "yes")), n=1))
    assert found.score == pytest.approx(0.35 / 0.9) and found.trace.ledger.counts["unheard"] == 1
    assert remote.asked[-1].max_tokens == 1 and remote.asked[-1].temperature == 0


def test_a_passage_counts_by_the_question_after_it() -> None:
    lm = tiny_lm(max_positions=2048)
    scorer = QuestionLikelihood(shown="About: {passage}").bind(lm.tokenizer)
    request = lm.request_for("Why so?", drafter=None)
    calls = Calls(lm.engine(), request, request.conversation)
    passages = ["It rains.", "A longer passage about the sun."]
    outputs = [lm.tokenizer.encode(text) for text in passages]
    candidates = Candidates(request.prompt, outputs, [True, True], texts=passages, model=lm.model, calls=calls)
    scores = run_sync(judge(scorer, candidates))
    question = [ord(sign) for sign in "Why so?"]
    for text, score in zip(passages, scores.tolist(), strict=True):
        ids = [*lm.encode(f"About: {text}"), *question]
        rows = list(range(len(ids) - len(question) - 1, len(ids) - 1))
        logits = lm.model.forward(Batch([Segment.chunk(ids, lm.model.new_cache(), logit_rows=rows)])).logits
        law = logits.double().log_softmax(-1)
        assert score == pytest.approx(float(law[range(len(question)), question].mean()), abs=1e-9)
        # The passage after the question, which a swap of the two would score, has another value.
        assert abs(score - float(law[range(len(question)), ids[: len(question)]].mean())) > 1e-3
    assert float(run_sync(judge(scorer, candidates.of([1])))[0]) == pytest.approx(float(scores[1]), abs=1e-12)
    with pytest.raises(SettingsError, match=r"write \{passage\}"):
        QuestionLikelihood(shown="x")


def test_what_a_server_says_beside_the_labels_is_no_score() -> None:
    def found(heard: dict[str, float], labels: tuple[str, ...] = ("bad", "better", "good")) -> float:
        lm = ScriptedLLM(lambda asked: Said(next(iter(heard)), heard) if "Question:" in asked.text else "text")
        return lm.search("q", BestOfN(LLMJudge(labels=labels), n=1))[0].score

    # A token that begins two labels tells of neither: .4 of better and .1 of good are left, and .1 bounds bad.
    assert found({"b": math.log(0.5), "bet": math.log(0.4), "good": math.log(0.1)}) == pytest.approx(0.5)
    with pytest.raises(SettingsError, match=r"one of bad, better, good, and began with '<think>'"):
        found({"<think>": 0.0})
    with pytest.raises(SettingsError, match="'1' begins '10'"):
        found({"1": 0.0}, ("1", "10"))


def test_exact_transforms_have_the_known_figures_and_beat_others_at_the_same_divergence() -> None:
    for n, beta, divergence, won in ((4, 0.5, 0.2119, 0.7792), (16, 0.8, 0.1298, 0.8613)):
        grid, reward, density = transform(n, beta)
        assert float((density * np.log(density)).mean()) == pytest.approx(divergence, abs=2e-4)
        assert win_rate(density, n) == pytest.approx(won, abs=5e-4)
        assert win_rate(np.ones_like(grid), n) == pytest.approx(0.5, abs=1e-3)
        assert np.allclose(np.exp(reward / beta) / np.exp(reward / beta).mean(), density, atol=1e-6)
        for other in (grid, np.exp(5 * grid)):
            low, high = 0.0, 100.0
            for _ in range(60):
                tilt = (low + high) / 2
                tilted = np.exp(tilt * (other - other.max()))
                tilted /= tilted.mean()
                near = float((tilted * np.log(np.maximum(tilted, 1e-300))).mean()) < divergence
                low, high = (tilt, high) if near else (low, tilt)
            assert win_rate(tilted, n) < win_rate(density, n) - 1e-3
    # Less is kept to the untrained model, more is won; a sharp law is found as well as a flat one.
    won = 0.5
    for beta in (0.8, 0.4, 0.2, 0.1, 0.05):
        _, reward, density = transform(16, beta)
        assert np.allclose(np.exp((reward - reward.max()) / beta), density / density.max(), atol=1e-5)
        assert win_rate(density, 16) > won + 1e-3
        won = win_rate(density, 16)
    grid, reward, _ = transform(1, 1.0)
    assert np.allclose(reward, grid, atol=1e-3)
    _, _, worst = transform(4, 0.5, worst=True)
    assert win_rate(worst, 4, worst=True) > 0.6


def test_calibration_takes_the_scale_out_of_a_reward_and_leaves_its_order() -> None:
    def script(asked: Any) -> str:
        return str((asked.seed * 2654435761) % 997)

    def found(how: Any, search: Any = WeightedVote) -> list[tuple[str, float]]:
        scorer = InfAlign(TextScore(how), samples=40, transform="identity")
        outputs = ScriptedLLM(script).search("q", search(scorer, n=8), temperature=1.0)
        return [(out.text, out.score) for out in outputs]

    plain = found(lambda text: float(text))
    assert found(lambda text: math.exp(float(text) / 100)) == plain
    scores = [score for _, score in found(lambda text: float(text), BestOfN)]
    assert scores == sorted(scores, reverse=True) and all(0 <= score <= 1 for score in scores)
    best = ScriptedLLM(script).search("q", BestOfN(TextScore(lambda text: float(text)), n=8), temperature=1.0)
    assert found(lambda text: float(text), BestOfN)[0][0] == best[0].text
    # Without calibration the scale decides the vote.
    raw = [
        [out.score for out in ScriptedLLM(script).search("q", WeightedVote(TextScore(how), n=8), temperature=1.0)]
        for how in (lambda text: float(text), lambda text: math.exp(float(text) / 100))
    ]
    assert raw[0] != pytest.approx(raw[1], abs=1e-3)
