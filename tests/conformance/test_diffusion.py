"""What methods write is what the denoiser's exact laws say: closed forms, enumeration, and wrong rules that fail."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import gumbel_argmax
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.run import Run, filled
from decodery.diffusion.view import Commit, View
from decodery.step.forward_request import run_sync
from decodery.testing import OracleDenoiser, chi_square
from diffusing import fill, named, order

N = 4
SHUFFLE = [list(each) for each in permutations(range(N))]
REPLACE = [[9 if i == r else i for i in range(N)] for r in range(N)]
REMOVE = [[i for i in range(N) if i != r] for r in range(N)]
INSERT = [[*range(r), 9, *range(r, N)] for r in range(N + 1)]
PAIR = [[0, 1], [2, 3]]


def oracle(answers: list[list[int]]) -> OracleDenoiser:
    return OracleDenoiser(answers, vocab_size=11)


def one_step(answers: list[list[int]]) -> float:
    """How likely tokens that are drawn one by one from their marginals make an answer together."""
    marginals = oracle(answers).laws(np.full(len(answers[0]), 10))
    return sum(math.prod(marginals[i, token] for i, token in enumerate(answer)) for answer in answers)


def drawn(
    answers: list[list[int]],
    count: int,
    spec: str = "random",
    temperature: float = 1.0,
    model: OracleDenoiser | None = None,
) -> list[tuple[int, ...]]:
    model, length = model or oracle(answers), len(answers[0])
    return [tuple(fill(model, spec, length, prompt=[0], seed=s, temperature=temperature).output) for s in range(count)]


def test_the_closed_forms_of_one_step() -> None:
    """By enumeration over the oracle's marginals, against the formulas."""
    removed = sum(
        math.prod(1 - i / N for i in range(1, r)) * math.prod(i / N for i in range(r, N)) for r in range(1, N + 1)
    )
    inserted = sum(
        math.prod((N - i) / (N + 1) for i in range(r)) / (N + 1) * math.prod(i / (N + 1) for i in range(r + 1, N + 1))
        for r in range(N + 1)
    )
    assert one_step(SHUFFLE) == pytest.approx(math.factorial(N) / N**N)
    assert one_step(REPLACE) == pytest.approx((1 - 1 / N) ** (N - 1))
    assert one_step(REMOVE) == pytest.approx(removed)
    assert one_step(INSERT) == pytest.approx(inserted)
    assert one_step(PAIR) == pytest.approx(1 / 2)


@pytest.mark.parametrize(("answers", "steps", "expected"), [
    (SHUFFLE, 1, math.factorial(N) / N**N),
    (SHUFFLE, 2, 3 / 4 * 1 / 2),
    (PAIR, 1, 1 / 2),
])  # fmt: skip
def test_random_order_draws_tokens_of_one_pass_independently(
    answers: list[list[int]], steps: int, expected: float
) -> None:
    count = 160
    found = drawn(answers, count, f"random:steps={steps}")
    share = sum(list(each) in answers for each in found) / count
    assert abs(share - expected) < 3.5 * math.sqrt(expected * (1 - expected) / count)


def test_one_token_a_pass_in_random_order_draws_from_the_task() -> None:
    """And a temperature that is not 1, or tokens of one pass, do not."""
    answers, weights = list(permutations(range(3))), np.arange(1, 7) / 21
    tilted = OracleDenoiser(answers, vocab_size=11, weights=weights)

    def p(spec: str, temperature: float) -> float:
        canvases = [fill(tilted, spec, 3, prompt=[0], seed=s, temperature=temperature) for s in range(120)]
        counts = Counter(tuple(canvas.output) for canvas in canvases)
        if not set(counts) <= set(answers):
            return 0.0
        return chi_square(np.array([counts[key] for key in answers]), weights)

    assert p("random", 1.0) > 1e-3
    assert p("random", 0.25) < 1e-6
    assert p("random:steps=1", 1.0) < 1e-6


def test_proposals_are_draws_at_their_temperature() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.2, -0.4, 0.9, -2.0], dtype=torch.float64)
    rows, count = logits.repeat(1500, 1), 1500
    for temperature in (0.5, 2.0):
        view = View.of(rows, np.arange(count), (0, count), temperature=temperature, seed=3)
        counts = np.bincount(view.tokens, minlength=8)
        assert chi_square(counts, (logits / temperature).softmax(0).numpy()) > 1e-3
        assert chi_square(counts, (logits / (temperature * 1.6)).softmax(0).numpy()) < 1e-6
        # Confidence is the law's own, whatever the temperature of the draw.
        assert np.allclose(view.confidence, logits.softmax(0).numpy()[view.tokens])
    assert torch.equal(gumbel_argmax(logits[None], 3, [5]), gumbel_argmax(logits[None], 3, [5]))


def test_noise_is_that_of_the_pass_or_of_the_position() -> None:
    """Four places of one law: drawn anew, an unlikely token is written only where all open places draw it at once."""
    answers = [list(each) for each in product((0, 1), repeat=N)]
    model = OracleDenoiser(
        answers, vocab_size=11, weights=[0.7 ** (N - sum(each)) * 0.3 ** sum(each) for each in answers]
    )

    def share(spec: str) -> float:
        return float(np.mean(drawn(answers, 150, spec, model=model)))

    assert share("static") == pytest.approx(sum(0.3**left for left in range(1, N + 1)) / N, abs=0.05)
    assert share("static:noise=position") == pytest.approx(0.3, abs=0.07)
    freedave = drawn(answers, 20, "freedave", model=model)
    assert freedave == drawn(answers, 20, "static:noise=position", model=model)
    with pytest.raises(SettingsError, match="give freedave:noise=position"):
        drawn(answers, 1, "freedave:noise=pass", model=model)


def test_replacing_at_random_shows_what_a_threshold_overlooks() -> None:
    """Every original is likely at every place, and all of them together are no answer."""
    model = oracle(REPLACE)
    assert fill(model, "threshold:tau=0.7", N, prompt=[0]).output == [0, 1, 2, 3]
    assert model.dead == 0 and fill(model, "static", N, prompt=[0]).output in REPLACE
    canvas = fill(model, "factor:phi=0.99", N, prompt=[0])
    assert len(canvas.rounds[0].tokens) == 2 and canvas.output in REPLACE


def test_the_information_of_the_rounds_is_that_of_the_text() -> None:
    """One token a pass: the chain rule. All at once: what the passes lose is the total correlation."""
    for spec in ("random", "static", "ccd", "explore-exploit:few=0", "r2", "local-leap"):
        canvas = fill(oracle(SHUFFLE), spec, N, prompt=[0], seed=5, temperature=1.0)
        total = sum(each.nats for each in canvas.rounds)
        if spec in ("random", "static"):
            assert total == pytest.approx(math.log(24), abs=1e-6)
        assert canvas.passes * max(each.nats for each in canvas.rounds) >= total - 1e-9
    at_once = fill(oracle(SHUFFLE), "random:steps=1", N, prompt=[0], seed=5, temperature=1.0)
    assert sum(each.nats for each in at_once.rounds) == pytest.approx(N * math.log(N), abs=1e-6)


def test_what_training_minimises_is_the_likelihood_where_marginals_are_exact() -> None:
    """Over all numbers of masks and all places for them; dividing by the share of masks as well counts it twice."""
    answers = [[0, 1, 2, 0], [0, 1, 1, 0], [2, 1, 2, 0], [2, 2, 2, 2], [1, 0, 1, 0]]
    model, losses, twice = oracle(answers), 0.0, 0.0
    for answer in answers:
        for size in range(1, N + 1):
            for hidden in combinations(range(N), size):
                canvas, places = Canvas.of(model, [0], N), 1 + np.array(hidden)
                shown = np.setdiff1d(np.arange(N), hidden)
                canvas.tokens[1 + shown] = np.array(answer)[shown]
                view = run_sync(Run(model, canvas, named("static")).look((1, 1 + N)))
                loss = -float(view.logprobs_of(Commit(places, np.array(answer)[list(hidden)])).mean())
                share = 1 / (len(answers) * N * math.comb(N, size))
                losses, twice = losses + share * loss, twice + share * loss * N / size
    assert N * losses == pytest.approx(math.log(len(answers)), abs=1e-6) and N * twice > N * losses + 0.5


def test_blocks_of_one_are_the_most_likely_tokens_from_left_to_right() -> None:
    from diffusing import denoiser

    model, canvas = denoiser(), fill(denoiser(), "static:block=1", 8)
    tokens = canvas.tokens.copy()
    tokens[5:] = model.config.mask_id
    from decodery.models.batch import Batch, Segment

    for place in range(5, 13):
        logits = model.forward(Batch([Segment(np.arange(13), tokens)])).logits
        tokens[place] = int(logits[place, :-1].argmax())
    assert tokens.tolist() == canvas.tokens.tolist()
    assert [place for place, _ in order(canvas)] == list(range(5, 13))


def test_ends() -> None:
    """A canvas is done when its end is written and nothing is open before it; the rest is filled, and not counted."""
    answers = [[3, 4, 9, 9, 9, 9]]
    canvas = fill(oracle(answers), "threshold:block=3", 6, prompt=[0], eos=[9])
    assert canvas.output == [3, 4, 9] and canvas.passes == 1 and canvas.tokens[1:].tolist() == answers[0]
    late = fill(oracle(answers), "static:eos=last", 6, prompt=[0], eos=[9])
    assert [place for place, _ in order(late)] == [1, 2, 3]
    free = fill(OracleDenoiser([[3, 4, 9, 9], [3, 5, 6, 9]], vocab_size=11), "static:eos=free", 4, prompt=[0], eos=[9])
    assert {place for place, _ in order(free)[:2]} == {1, 4}
    never = fill(oracle([[3, 9, 5]]), "static:eos=never", 3, prompt=[0], eos=[9])
    assert never.end is None and len(never.output) == 3
    cad = fill(oracle([[3, 9, 9, 9]]), "cad:eos_share=0.25", 4, prompt=[0], eos=[9])
    assert len(cad.rounds[0].tokens) == 1 and cad.output == [3, 9]
    # Two of six are to be written before an end may be: the second pass has one candidate, however many are due.
    least = fill(oracle([[3, 9, 9, 9, 9, 9]]), "cad:least=2,eos_share=0.3", 6, prompt=[0], eos=[9])
    assert least.rounds[0].tokens.tolist() == [3]
    only = fill(oracle([[9, 9, 9]]), "cad:least=2,eos_share=1", 3, prompt=[0], eos=[9])
    assert only.rounds[0].tokens.tolist() == [9, 9] and only.output == [9]


def test_guidance_goes_from_the_law_without_the_prompt_to_that_with_it() -> None:
    class Prompted(OracleDenoiser):
        """Without its prompt, any answer; with it, the second one somewhat more."""

        def forward(self, batch: Any, **settings: Any) -> Any:
            scores = super().forward(batch, **settings)
            for number, segment in enumerate(batch.segments):
                if segment.tokens[0] != self.config.mask_id:
                    scores.of(number)[:, 2:4] += 0.5
            return scores

    model = Prompted([[0, 1], [0, 1], [2, 3]], vocab_size=11)
    assert fill(model, "static", 2, prompt=[7]).output == [0, 1]
    assert fill(model, "static:guidance=0", 2, prompt=[7]).output == [0, 1]
    strong = Canvas.of(model, [7], 2)
    run_sync(filled(model, strong, resolve("diffusion", "static:guidance=4")))
    assert strong.output == [2, 3] and strong.passes == 2 and strong.rows == 2 * 2 * 3
