"""What searches choose among samples is what their definitions choose among texts drawn one by one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.scorers.corrupted import Corrupted
from decodery.scorers.log_probability import LogProbability
from decodery.scorers.product import Product
from decodery.scorers.self_evaluation import SelfEvaluation
from decodery.scorers.text import TextScore
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search.base import Search
from decodery.search.best_of_n import BestOfN
from decodery.search.feature_vote import FeatureVote
from decodery.search.first_finish import FirstFinish
from decodery.search.self_consistency import SelfConsistency
from decodery.search.weighted_vote import WeightedVote
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import TableModel
from decodery.testing.statistics import chi_square
from methods import Even
from sampled import PLAIN, Constant, Failing, plain, run, told, written_of


def test_the_best_is_what_the_scorer_says_of_texts_drawn_one_by_one() -> None:
    for seed in range(3):
        texts = plain(6, seed=seed)
        found = run(BestOfN(Even(), n=6), seed=seed)
        worth = [sum(token % 2 == 0 for token in written_of(text)) / max(len(written_of(text)), 1) for text in texts]
        order = sorted(range(6), key=lambda number: -worth[number])
        assert told(found) == [(texts[number], worth[number]) for number in order]


@pytest.mark.parametrize(
    "scorer",
    [
        LogProbability("mean"),
        SelfEvaluation(question=(9, 8, 7), yes=(1, 2, 3), no=(4,)),
        Corrupted(Even(), noise=1.5),
        Product((LogProbability("sum"), Even())),
        ValueHead(LinearValue(torch.linspace(-1, 1, 32, dtype=torch.float64), torch.tensor(0.0), tap=2)),
    ],
    ids=lambda scorer: type(scorer).__name__,
)
def test_every_kind_of_scorer_judges(scorer: Scorer) -> None:
    found = run(BestOfN(scorer, n=4), eos_ids=())
    scores = [seq.score for seq in found]
    assert sorted(scores, reverse=True) == scores and len(set(scores)) == 4
    # Alone each text is worth the same.
    for seq in found:
        (alone,) = run(BestOfN(scorer, n=1), seed=seq.request.seed, eos_ids=())
        assert alone.generated == seq.generated and alone.score == pytest.approx(seq.score, abs=1e-9)


def test_equal_texts_are_scored_once() -> None:
    greedy = run(BestOfN(Even(), n=5), sampler=Sampler.from_settings())
    assert all(seq.generated == greedy[0].generated for seq in greedy)
    assert greedy[0].trace.ledger.scorer_calls == 1
    drawn = run(BestOfN(Even(), n=5))
    assert drawn[0].trace.ledger.scorer_calls == len({tuple(seq.generated) for seq in drawn}) > 1


def test_only_the_order_of_scores_counts() -> None:
    def worth(text: str) -> float:
        return sum(map(int, text.split())) / 100

    def texts(ids: Any) -> str:
        return " ".join(map(str, ids))

    for seed in range(3):
        orders = []
        for bend in (float, math.exp, lambda x: x**3):
            scorer = TextScore(lambda text, bend=bend: bend(worth(text)), decode=texts)
            orders.append([seq.generated for seq in run(BestOfN(scorer, n=5), seed=seed)])
        turned = TextScore(lambda text: -worth(text), decode=texts)
        assert orders[0] == orders[1] == orders[2] != [seq.generated for seq in run(BestOfN(turned, n=5), seed=seed)]


TABLE = TableModel(3, seed=4)
PAIRS = list(itertools.product(range(3), repeat=2))


def _law() -> np.ndarray:
    """[9] probabilities of the texts of two tokens after the prompt [1]."""
    first = TABLE.logits([1]).softmax(dim=-1)
    return np.array([float(first[a] * TABLE.logits([1, a]).softmax(dim=-1)[b]) for a, b in PAIRS])


def _counts(search: Search, runs: int) -> np.ndarray:
    engine, counts = Engine(TABLE), np.zeros(9)
    # Seeds count up within a search, and are apart between searches.
    asked = [Request([1], seed=1000 * seed, sampler=PLAIN, max_new_tokens=2) for seed in range(runs)]
    jobs = [engine.enter(search.find(engine, request)) for request in asked]
    engine.run(jobs)
    for job in jobs:
        assert job.result is not None
        counts[PAIRS.index(tuple(job.result[0].generated))] += 1
    return counts


class Table(Scorer):
    """Any number for any text."""

    worth = (0.3, 0.9, 0.1, 0.5, 0.7, 0.2, 0.8, 0.4, 0.6)

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([self.worth[PAIRS.index(tuple(output))] for output in candidates.outputs])


def test_the_law_of_the_best_of_n_is_that_of_the_highest_order_statistic() -> None:
    law, worth = _law(), np.array(Table.worth)

    def tilted(n: int) -> np.ndarray:
        upto = np.array([law[worth <= each].sum() for each in worth])
        return upto**n - (upto - law) ** n

    best, constant = _counts(BestOfN(Table(), n=4), 150), _counts(BestOfN(Constant(), n=4), 80)
    assert chi_square(best, tilted(4)) > 1e-3 and chi_square(constant, law) > 1e-3
    # What is wrong shows at this number of runs: another n, and a scorer that is not constant.
    assert chi_square(best, tilted(2)) < 1e-4 and chi_square(best, law) < 1e-6
    kl = float((tilted(4) * np.log(tilted(4) / law)).sum())
    assert kl <= math.log(4) - 3 / 4


def test_equal_weights_are_votes_and_others_are_not() -> None:
    differs = False
    for seed in range(5):
        votes = run(SelfConsistency(n=9, answer="number"), seed=seed, max_new_tokens=2)
        same = run(WeightedVote(Constant(), n=9, answer="number"), seed=seed, max_new_tokens=2)
        assert told(votes) == told(same)
        weighted = run(WeightedVote(Even(), n=9, answer="number"), seed=seed, max_new_tokens=2)
        differs |= told(weighted) != told(votes)
    assert differs


def test_the_majority_is_that_of_texts_drawn_one_by_one() -> None:
    for seed in range(4):
        answers = [written_of(text)[-1] if written_of(text) else None for text in plain(9, seed=seed, max_new_tokens=3)]
        known = [answer for answer in answers if answer is not None]
        best = max(known, key=lambda answer: (known.count(answer), -known.index(answer)))
        first, *others = run(SelfConsistency(n=9, answer="number"), seed=seed, max_new_tokens=3)
        assert written_of(first.generated)[-1] == best and first.score == known.count(best) / len(known)
        assert 1 + len(others) == len(set(known)) == first.trace.ledger.counts["answers"]


def test_features_decide_ties_and_zero_weights_decide_nothing_else() -> None:
    none = FeatureVote(n=8, weights=(0.0, 0.0, 0.0, 0.0), answer="number")
    for seed in range(3):
        votes = [seq.score for seq in run(SelfConsistency(n=8, answer="number"), seed=seed)]
        mine = run(none, seed=seed)
        assert sorted(seq.score for seq in mine) == pytest.approx(sorted(votes))
        top = [seq for seq in mine if seq.score == mine[0].score]
        assert len(mine[0].generated) == min(len(seq.generated) for seq in top)
    (alone,) = run(FeatureVote(n=8, drop=1.0, answer="number"))[:1]
    assert alone.score == 1.0 and len(alone.generated) == min(map(len, plain(8)))


def test_a_perfect_verifier_finds_what_can_be_found() -> None:
    texts = plain(5, eos_ids=())
    for aim in range(8):
        right = TextScore(
            lambda text, aim=aim: int(text.split()[0]) % 8 == aim, decode=lambda ids: " ".join(map(str, ids))
        )
        (best, *_) = run(BestOfN(right, n=5), eos_ids=())
        assert best.score == any(text[0] % 8 == aim for text in texts)


@pytest.mark.parametrize("how", ["raises", "gives NaN"])
@pytest.mark.parametrize("kind", [BestOfN, WeightedVote])
def test_a_text_whose_score_fails_is_left_out(how: str, kind: type[Search]) -> None:
    with pytest.warns(UserWarning, match="no score came"):
        found = run(kind(Failing(how), n=8))
    bad = sum(text[0] % 2 == 0 for text in {tuple(text) for text in plain(8)})
    assert found[0].trace.ledger.counts["unscored"] == bad > 0
    assert found and all(seq.generated[0] % 2 for seq in found)


def test_a_scorer_that_always_fails_is_an_error() -> None:
    class Never(Scorer):
        def score(self, candidates: Candidates) -> torch.Tensor:
            raise RuntimeError("the judge is out")

    with pytest.raises(RuntimeError, match="the judge is out"):
        run(BestOfN(Never(), n=3))


class Beginnings(Even):
    answers = False


def test_wrong_input_is_named() -> None:
    for wrong, message in (
        (lambda: BestOfN(Even(), n=0), "at least 1"),
        (lambda: SelfConsistency(n=0), "at least 1"),
        (lambda: SelfConsistency(n=True), "at least 1"),
        (lambda: FirstFinish(n=2, k=3), "k of at most n"),
        (lambda: WeightedVote(Even(), pattern="("), "no regular expression"),
        (lambda: SelfConsistency(answer="last"), "auto, number"),
        (lambda: FeatureVote(weights=(1.0,)), "four weights"),
        (lambda: FeatureVote(drop=2.0), "drop of feature-vote"),
        (lambda: BestOfN(Beginnings()), "scorer of answers"),
        (lambda: WeightedVote(Beginnings()), "scorer of answers"),
        (lambda: run(WeightedVote(TextScore(lambda text: -1.0, decode=str))), "a weight is no less than 0"),
    ):
        with pytest.raises(SettingsError, match=message):
            wrong()
    assert SelfConsistency().shortcoming(0.5) is None
    silent = run(SelfConsistency(n=2, pattern="nothing"))
    assert [seq.score for seq in silent] == [0.0] and "no answer" in str(SelfConsistency(n=2).shortcoming(0.0))
