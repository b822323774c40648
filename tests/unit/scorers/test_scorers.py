"""Scorers: their laws with broken ones beside them, and each one's own formula."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources import ControlledDecoding
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.scorers.budgeted import Budgeted
from decodery.scorers.corrupted import Corrupted
from decodery.scorers.length_normalised import LengthNormalised
from decodery.scorers.log_probability import LogProbability
from decodery.scorers.product import Product
from decodery.scorers.program_tests import ProgramTests
from decodery.scorers.sandbox import Sandbox, Verdict
from decodery.scorers.self_evaluation import SelfEvaluation
from decodery.scorers.text import TextScore
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search import PGTD, SMC, BestOfN, ControlledBlocks
from decodery.step.forward_request import ForwardCoroutine, run_sync, score_all
from decodery.step.scorer import Candidates, Scorer, judge, log_scores
from decodery.testing import LawBroken, TableModel, check_scorer, decode, tiny_transformer
from methods import ASKING, SCORERS, Even
from scripted_lm import ScriptedLLM

MODEL = tiny_transformer(0)
TEXTS = [([5, 9, 2], [7, 3, 9]), ([5, 9, 2], [1]), ([5, 9, 2], [8] * 70), ([4] * 70, [11, 14, 5]), ([4] * 70, [7, 3])]


def score(scorer: Scorer, *outputs: list[int], prompt: tuple[int, ...] = (5, 9, 2), finished: bool = True) -> list:
    given = Candidates(list(prompt), list(outputs), [finished] * len(outputs), model=MODEL)
    return run_sync(judge(scorer, given)).tolist()


def test_the_list_names_every_registered_scorer() -> None:
    assert {method.name for method in dc.methods("scorer")} == {*SCORERS, *ASKING}


@pytest.mark.invariant
@pytest.mark.parametrize("name", sorted(SCORERS))
def test_scorers_keep_their_laws(name: str) -> None:
    check_scorer(SCORERS[name], MODEL, TEXTS)


class Remembering(Scorer):
    """Wrong on purpose: worth less, the more often it is asked."""

    def __init__(self) -> None:
        self.asked = Counter[tuple[int, ...]]()

    def score(self, candidates: Candidates) -> torch.Tensor:
        self.asked.update(tuple(output) for output in candidates.outputs)
        return torch.tensor([-float(self.asked[tuple(output)]) for output in candidates.outputs])


class Ranking(Scorer):
    """Wrong on purpose: compares candidates with those beside them."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([float(len(output)) for output in candidates.outputs]).argsort().double()


class Unbounded(Scorer):
    """Wrong on purpose: goes beyond what it says."""

    bounds = 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([float(len(output)) for output in candidates.outputs])


class Unasked(Scorer):
    """Wrong on purpose: runs passes after the engine's back."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        segments = [Segment.chunk([*candidates.prompt, *output], MODEL.new_cache()) for output in candidates.outputs]
        return torch.stack([candidates.model.forward(Batch([each])).logits[-1, 0] for each in segments])


class Leaving(Scorer):
    """Wrong on purpose: leaves its question in what was read of the candidates."""

    def score(self, candidates: Candidates) -> ForwardCoroutine[torch.Tensor]:
        caches = candidates.states
        if caches is None:
            caches = [MODEL.new_cache() for _ in candidates.outputs]
        texts = [[*candidates.prompt, *output, 9] for output in candidates.outputs]
        chunks = [text[cache.next_position :] or [9] for text, cache in zip(texts, caches, strict=True)]
        segments = [Segment.chunk(chunk, cache) for chunk, cache in zip(chunks, caches, strict=True)]
        found = yield from score_all(candidates.model, segments)
        for chunk, cache in zip(chunks, caches, strict=True):
            cache.keep(range(len(chunk)))
        return torch.tensor([float(len(output)) for output in candidates.outputs]) + 0 * found[0].logits[0, 0]


class Constant(Scorer):
    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.ones(len(candidates))


@pytest.mark.parametrize(
    ("scorer", "broken"),
    [
        (Remembering(), "called again"),
        (Ranking(), "scored alone"),
        (Unbounded(), "its bounds are 0.0 and 1.0"),
        (Unasked(), "leave passes to the engine"),
        (Leaving(), "work on a fork"),
        (Constant(), "nothing was put to the test"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Scorer) else "",
)
def test_wrong_scorers_are_caught(scorer: Scorer, broken: str) -> None:
    with pytest.raises(LawBroken, match=broken):
        check_scorer(scorer, MODEL, TEXTS)


def test_log_probabilities_are_those_of_the_model() -> None:
    prompt, outputs = [5, 9, 2], [[7, 3, 9], [1], [], [8] * 70]
    for of, reduced in (("sum", sum), ("mean", np.mean), ("min", min)):
        expected = []
        for output in outputs:
            segment = Segment.chunk([*prompt, *output], MODEL.new_cache())
            law = MODEL.forward(Batch([segment])).logits.log_softmax(-1)
            logprobs = [float(law[len(prompt) - 1 + at, token]) for at, token in enumerate(output)]
            # An answer without tokens is not the most likely one per token.
            expected.append(reduced(logprobs) if logprobs else 0.0 if of == "sum" else -math.inf)
        assert score(LogProbability(of), *outputs) == pytest.approx(expected)
        assert score(LogProbability(of), [], finished=False) == [0.0]
    one = TableModel(3, seed=5)
    given = Candidates([1, 2], [[0, 2, 1]], [True], model=one)
    total = math.prod(
        float(one.logits([1, 2, *[0, 2, 1][:at]]).softmax(-1)[token]) for at, token in enumerate([0, 2, 1])
    )
    assert float(run_sync(judge(LogProbability("sum"), given))[0]) == pytest.approx(math.log(total))


def test_normalised_scores_are_divided_by_a_power_of_the_length() -> None:
    whole, outputs = score(LogProbability("sum"), [7, 3, 9], [1]), ([7, 3, 9], [1])
    assert score(LengthNormalised(LogProbability("sum"), 0.5), *outputs) == pytest.approx([whole[0] / 3**0.5, whole[1]])
    assert score(LengthNormalised(penalty=1.0), *outputs) == pytest.approx(score(LogProbability("mean"), *outputs))
    assert score(LengthNormalised("log-probability(of=sum)", 0.0), *outputs) == pytest.approx(whole)


def test_budgets_take_from_what_is_longer_and_from_nothing_else() -> None:
    outputs = [[2] * length for length in (1, 4, 5, 6, 8, 9)]
    whole = score(Even(), *outputs)
    shares = [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert all(whole)
    assert score(Budgeted(Even(), most=4, spare=4), *outputs) == pytest.approx(
        [value * share for value, share in zip(whole, shares, strict=True)]
    )
    assert score(Budgeted(Even(), most=9, spare=4), *outputs) == pytest.approx(whole)


def test_products_multiply_weights_and_what_is_ruled_out_stays_so() -> None:
    product = Product((LogProbability("sum"), Even()), (0.5, 2.0))
    (logprob,), (even,) = score(LogProbability("sum"), [4, 7, 6]), score(Even(), [4, 7, 6])
    assert score(product, [4, 7, 6]) == pytest.approx([0.5 * logprob + 2 * math.log(even)])
    assert score(product, [7, 3]) == [-math.inf]
    whole = TextScore(lambda text: len(text) % 2 == 0, decode=lambda ids: "x" * len(ids))
    # What nothing is known of counts as weight 1.
    assert score(Product((whole, Even())), [4, 7], finished=False) == score(Product((Even(),)), [4, 7])
    assert not whole.prefixes and Product((whole, Even())).prefixes and not Product((whole,)).prefixes
    assert resolve("scorer", "product:factors=log-probability(of=sum)/self-evaluation(question=x)").scorers == (
        LogProbability("sum"),
        SelfEvaluation("x"),
    )


def test_a_product_asks_for_all_its_factors_at_once() -> None:
    @dataclass
    class Counting:
        passes: int = 0
        models: list = field(default_factory=list)

        def __getattr__(self, name: str):
            return getattr(MODEL, name)

        def __hash__(self) -> int:
            return id(self)

        def forward(self, batch: Batch, **settings):
            self.passes += 1
            return MODEL.forward(batch, **settings)

    model, product = Counting(), Product((LogProbability("sum"), SCORERS["self-evaluation"]))
    given = Candidates([5, 9], [[7, 3], [1, 4]], [True, True], model=model)
    run_sync(judge(product, given))
    assert model.passes == 1


def test_self_evaluation_is_the_share_of_yes() -> None:
    scorer = SelfEvaluation(question=(9, 8, 7), yes=(1, 2, 3), no=(4,))
    law = MODEL.forward(Batch([Segment.chunk([5, 9, 2, 7, 3, 9, 8, 7], MODEL.new_cache())])).logits[-1].softmax(-1)
    yes, no = float(law[[1, 2, 3]].sum()), float(law[4])
    assert score(scorer, [7, 3]) == pytest.approx([yes / (yes + no)])
    for wrong, message in (
        (SelfEvaluation(), "give token ids, or search"),
        (SelfEvaluation((1,), (2,), (2, 3)), "begin differently"),
        (SelfEvaluation((1,), (2,), (99,)), "outside the vocabulary of 64"),
    ):
        with pytest.raises(SettingsError, match=message):
            score(wrong, [7, 3])


def test_a_corrupted_scorer_is_bent_as_its_formula_says() -> None:
    def logit(p: float) -> float:
        return math.log(p / (1 - p))

    output, (right,) = [7, 3, 4, 6], score(Even(), [7, 3, 4, 6])
    assert score(Corrupted(Even()), output) == pytest.approx([right])
    bent = Corrupted(Even(), confidence=3.0, optimism=2.0, exploit=3.0, pattern=(3, 4), length=8)
    assert score(bent, output) == pytest.approx([1 / (1 + math.exp(-(3 * logit(right) + 2 * (1 - 4 / 8) + 3)))])
    assert score(bent, [2, 4]) == pytest.approx([1 / (1 + math.exp(-(3 * logit(0.99) + 2 * (1 - 2 / 8))))])
    noisy = Corrupted(Even(), noise=1.5)
    texts = [[int(x) for x in np.random.default_rng(n).integers(0, 64, 6)] for n in range(2000)]
    for scorer, alike in ((noisy, True), (Corrupted(Even(), noise=1.0), False)):
        xi = [(logit(a) - logit(min(max(b, 0.01), 0.99))) / 1.5
              for a, b in zip(score(scorer, *texts), score(Even(), *texts), strict=True)]  # fmt: skip
        # A standard normal number for each text; one of another width is told apart.
        steps = np.linspace(0.05, 0.95, 19)
        found = np.searchsorted(np.sort(xi), [NormalDist().inv_cdf(step) for step in steps]) / len(xi)
        assert (np.abs(found - steps).max() < 0.04) == alike
    assert score(noisy, output) == score(noisy, output) != score(Corrupted(Even(), noise=1.5, seed=1), output)


@dataclass(frozen=True)
class Lengths(Scorer):
    """An own scorer, whose author knows no tensors."""

    made: Any

    def score(self, candidates: Candidates) -> Any:
        return self.made([len(output) for output in candidates.outputs])


@pytest.mark.parametrize(
    "made",
    [
        list,
        tuple,
        np.array,
        lambda found: np.array(found, np.float32),
        torch.tensor,
        lambda found: [*map(float, found)],
    ],
)
def test_scores_may_come_as_lists_and_arrays(made: Any) -> None:
    lm = ScriptedLLM(lambda asked: " ".join(["word"] * (asked.number % 3 + 1)))
    found = lm.search("?", BestOfN(Lengths(made), n=3), temperature=1.0)
    assert [out.score for out in found] == [3.0, 2.0, 1.0]


def test_scores_that_are_no_numbers_are_named() -> None:
    for made in (lambda found: ["good"] * len(found), lambda found: None, lambda found: [[1], [2, 3]]):
        with pytest.raises(SettingsError, match="Lengths must give"):
            run_sync(judge(Lengths(made), Candidates([1], [[2], [3]], [True, True])))
    # Right and wrong come as numpy's as well.
    for right in (True, np.True_):
        scorer = TextScore(lambda text: right, logarithmic=True)  # noqa: B023
        scores = run_sync(judge(scorer, Candidates([1], [[2]], [True], texts=["x"])))
        assert scores.tolist() == [0.0]


def test_what_a_scorer_cannot_score_is_said() -> None:
    head = ValueHead(LinearValue(torch.ones(32), torch.tensor(0.0), 1))
    finished = TextScore(lambda text: 1.0, decode=str)
    for call, message in (
        (lambda: score(finished, [1], finished=False), "does not score beginnings"),
        (lambda: score(head, [1]), "hidden states after layer 1, which are not at hand"),
        (lambda: score(TextScore(lambda text: math.nan, decode=str), [1]), "a number or -inf"),
        (lambda: score(TextScore(lambda text: 1.0), [1]), "reads text"),
        (lambda: log_scores(finished, torch.tensor([-1.0])), "no less than 0"),
        (lambda: run_sync(judge(LogProbability(), Candidates([1], [[2]], [True]))), "needs a model"),
        (lambda: LengthNormalised(Even()), "divides logarithms"),
        (lambda: Corrupted(LogProbability()), "bounds are 0 and 1"),
        (lambda: Budgeted(LogProbability()), "at least 0: give it a verifier"),
        (lambda: Budgeted(Even(), spare=0), "1 to spare"),
        (lambda: Corrupted(Even(), exploit=1.0), "a pattern"),
        (lambda: Product(()), "needs factors"),
        (lambda: LogProbability("max"), "sum, mean or min"),
        (lambda: SMC(potential=3), "not an instance"),
    ):
        with pytest.raises(SettingsError, match=message):
            call()
    request = Request([1, 2], sampler=Sampler.from_settings(temperature=1.0), max_new_tokens=4)
    with pytest.raises(SettingsError, match="not at hand"):
        SMC(2, potential=head).run(Engine(MODEL), request)
    with pytest.raises(SettingsError, match="does not score beginnings"):
        ControlledBlocks(finished, block=2).run(Engine(MODEL), request)


def test_searches_take_any_scorer_by_its_name() -> None:
    request = Request([5, 9, 2], max_new_tokens=6, eos_ids=(0,))
    drawn = Request([5, 9, 2], max_new_tokens=6, sampler=Sampler.from_settings(temperature=1.0), eos_ids=(0,))
    for search, wanted in (
        (resolve("search", "smc:particles=4,block=2,potential=log-probability(of=sum)"), drawn),
        (resolve("search", "controlled-blocks:samples=3,value=log-probability"), drawn),
        (resolve("search", "pg-td:budget=5,tests=length-normalised"), request),
        (SMC(4, 2, potential=Product((Even(), LogProbability("sum")))), drawn),
        (PGTD(SCORERS["self-evaluation"], budget=5), request),
        (ControlledBlocks(SCORERS["self-evaluation"]), drawn),
    ):
        (best, *_) = search.run(Engine(MODEL), wanted)
        ledger = best.trace.ledger
        assert ledger.scorer_calls >= 3 and math.isfinite(best.score)
    # The best of the programs is the one the scorer likes best, for the prompt and the tokens alone.
    (best,) = PGTD(LogProbability("mean"), budget=6).run(Engine(MODEL), request)
    ended = best.generated[-1] == 0
    assert best.score == pytest.approx(score(LogProbability("mean"), best.generated[: -1 if ended else None])[0])


def test_a_search_that_is_named_takes_a_scorer_that_no_text_could_name() -> None:
    scorer = TextScore(lambda text: -abs(len(text) - 3.0))

    def found(search: Any, **settings: Any) -> list[str]:
        lm = ScriptedLLM(lambda asked: "x" * (asked.seed % 5 + 1))
        return [out.text for out in lm.search("q", search, temperature=1.0, **settings)]

    assert found("best-of-n:n=5", scorer=scorer) == found(BestOfN(scorer, n=5)) and found(BestOfN(scorer))[0] == "xxx"
    for search, message in (
        ("self-consistency:n=2", "self-consistency has no setting 'scorer'; its settings are n"),
        ("best-of-n:scorer=text", "scorer is given twice"),
        (BestOfN(scorer), "this BestOfN is built already: give scorer to it"),
        ("best-of-n:particles=2", "best-of-n has no setting 'particles'"),
    ):
        with pytest.raises(SettingsError, match=message):
            found(search, scorer=scorer)


def test_a_source_asks_a_scorer_that_asks_the_model() -> None:
    source = ControlledDecoding(LogProbability("sum"), strength=3.0, k=4)
    (steered,), (plain,) = decode(MODEL, [[5, 9, 2]], logits_source=source), decode(MODEL, [[5, 9, 2]])
    # What is most likely already gets likelier still.
    assert steered.generated == plain.generated and steered.trace.ledger.scorer_calls == 4 * 24
    with pytest.raises(
        SettingsError, match=r"not an instance of a scorer method; pass an instance .dc.scorers.TextScore makes"
    ):
        ControlledDecoding(lambda text: 1.0)


def test_tests_of_programs_are_scored_in_the_sandbox() -> None:
    box = Sandbox(seconds=2.0)
    scorer = dc.scorers.ProgramTests(tests=("assert f(2) == 4", "assert f(3) == 9"), sandbox=box)
    prompt, bodies = "def f(x):\n    return", (" x * x", " 4", " x *")
    given = Candidates([1], [[1], [2], [3]], [True] * 3, texts=bodies, decode=lambda ids: prompt)
    assert run_sync(judge(scorer, given)).tolist() == [1.0, 0.5, 0.0]


def test_programs_are_run_side_by_side() -> None:
    """Each of two programs waits until the other one runs, too."""
    together = threading.Barrier(2)

    class Waiting(Sandbox):
        def run(self, program: str, tests: Sequence[str] = ()) -> Verdict:
            together.wait(30)
            return Verdict(tuple("2" in program for _ in tests), None, "")

    scorer = ProgramTests(tests=("assert x",), head="", sandbox=Waiting())
    found = run_sync(judge(scorer, Candidates([0], [[1], [2]], [True, True], texts=["x = 1", "x = 2"])))
    assert found.tolist() == [0.0, 1.0]
