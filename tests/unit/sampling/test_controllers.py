"""Warps with a bound, a controller or randomness of their own: top-h, XTC, mirostat; all states under speculation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as hf

from decodery.core.noise import WARP, draw
from decodery.sampling import DRY, XTC, Context, Mirostat, Momentum, NoRepeatNGram, Sampler, Temperature, TopH
from decodery.sampling.history import Repeats, TokenCounts
from decodery.sampling.mirostat import rank_bound, zipf_exponents
from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.testing import check_identical, tiny_transformer

INF = math.inf


def rows(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """From flat to peaked, without ties; then one-hot and equal ones."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]).repeat(count)[:count, None]
    one_hot = torch.full((1, size), -INF).index_fill_(1, torch.tensor([2]), 0.5)
    return torch.cat([torch.randn(count, size, generator=generator) * scales, one_hot, torch.zeros(1, size)])


def plain_top_h(row: Sequence[float], processor: TopH) -> list[int]:
    weights = [math.exp(value - max(row)) for value in row]
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: processor.top or len(row)]
    whole = math.fsum(weights[token] for token in (order if processor.bound == "partial" else range(len(row))))
    probs = [weight / whole for weight in weights]

    def spread(tokens: Sequence[int]) -> float:
        return -math.fsum(probs[token] * math.log(probs[token]) for token in tokens if probs[token] > 0)

    kept = order[:1]
    for size in range(2, len(order) + 1):
        if processor.bound == "partial":
            fits = spread(order[:size]) <= processor.alpha * spread(order) * (1 + 1e-9)
        else:
            mass = math.fsum(probs[token] for token in order[:size])
            fits = spread(order[:size]) / mass + math.log(mass) <= processor.alpha * spread(range(len(row))) * (
                1 + 1e-9
            )
        if not fits or row[order[size - 1]] == -INF:
            break
        kept = order[:size]
    return sorted(kept)


@pytest.mark.parametrize("bound", ["renormalised", "partial"])
@pytest.mark.parametrize(("alpha", "top"), [(0.4, 0), (0.4, 6), (0.83, 0), (0.999, 0)])
def test_top_h_equals_a_plain_scan(bound: str, alpha: float, top: int) -> None:
    processor = TopH(alpha, top, bound)  # type: ignore[arg-type]
    given_rows = rows(200, 12)
    found = processor.process(given_rows, [])
    for row, law in zip(given_rows, found, strict=True):
        kept = torch.isfinite(law).nonzero().flatten().tolist()
        assert kept == plain_top_h(row.tolist(), processor)
        assert torch.equal(law[kept], row[kept])


def test_top_h_bounds_the_entropy_at_every_step_where_the_released_rule_does_not() -> None:
    given_rows = rows(600, 400, seed=4)[:600]
    whole = torch.distributions.Categorical(logits=given_rows.double()).entropy()
    for alpha in (0.3, 0.7):
        kept = [TopH(alpha, 0, bound).process(given_rows, []).double() for bound in ("renormalised", "partial")]  # type: ignore[arg-type]
        bounded, released = (torch.distributions.Categorical(logits=each).entropy() for each in kept)
        assert (bounded <= alpha * whole * (1 + 1e-7)).all()
        assert (released > alpha * whole).any()
    flat = torch.zeros(1, 256)
    assert torch.isfinite(TopH(0.5, 0).process(flat, [])).sum() == 16
    assert torch.isfinite(TopH(0.5, 0, "partial").process(flat, [])).sum() == 128


def test_the_partial_bound_is_that_of_transformers() -> None:
    for size in (50, 3000):
        for alpha in (0.4, 0.77):
            given_rows = rows(90, size, seed=3)[:90]
            ours = TopH(alpha, bound="partial").process(given_rows, [])
            assert torch.equal(ours, hf.TopHLogitsWarper(alpha)(None, given_rows.clone()))


def plain_xtc(row: Sequence[float], threshold: float) -> list[int]:
    """Which tokens go."""
    whole = math.fsum(math.exp(value - max(row)) for value in row)
    probs = [math.exp(value - max(row)) / whole for value in row]
    likely = sorted((t for t in range(len(row)) if probs[t] >= threshold - 1e-7), key=lambda t: (-row[t], t))
    return sorted(likely[:-1])


def test_xtc_drops_all_likely_tokens_but_the_least() -> None:
    given_rows = rows(200, 12)
    for threshold in (0.0613, 0.1, 0.2517, 0.5):
        processor = XTC(1.0, threshold)
        found = processor.process(given_rows, [Context(0, [1])] * len(given_rows))
        for row, law in zip(given_rows, found, strict=True):
            gone = (torch.isfinite(row) & ~torch.isfinite(law)).nonzero().flatten().tolist()
            assert gone == plain_xtc(row.tolist(), threshold)


def test_xtc_changes_its_share_of_positions_and_says_the_same_when_asked_again() -> None:
    processor, row = XTC(0.3, 0.1), torch.zeros(1, 4)
    contexts = [Context(1, [0] * (1 + position), seed=9) for position in range(2000)]
    changed = [not torch.equal(processor.process(row, [each]), row) for each in contexts]
    assert stats.binomtest(sum(changed), len(changed), 0.3).pvalue > 1e-3
    together = processor.process(row.expand(2000, -1), contexts)
    assert [not torch.equal(each[None], row) for each in together] == changed
    assert changed == [draw(9, position, stream=WARP) < 0.3 for position in range(2000)]
    others = [not torch.equal(processor.process(row, [Context(1, each.tokens, seed=10)]), row) for each in contexts]
    assert others != changed


def zipf_source(exponent: float, size: int) -> torch.Tensor:
    return (-exponent * torch.arange(1, size + 1, dtype=torch.float32).log())[None]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [3.0, 4.0])
def test_mirostat_reaches_its_target_on_a_zipf_source(version: int, tau: float) -> None:
    logits, eta, steps = zipf_source(1.1, 1000), 0.2, 500
    processor = Mirostat(tau, eta, version)  # type: ignore[arg-type]
    sampler = Sampler([processor])
    context = sampler.context([0], 1, sampler.init([0]), 5)
    for position in range(steps):
        token = int(sampler.pick(sampler.law(logits, [context]), 5, [position])[0])
        context = Context(1, [0] * (position + 2), sampler.after(context, token, logits[0]), 5)
    state = context.state[0]
    assert state.tokens == steps
    # The identity that the guarantee states, and what follows from a bounded mu.
    assert state.surprise / steps - tau == pytest.approx((2 * tau - state.mu) / (eta * steps), abs=1e-9)
    assert abs(state.surprise / steps - tau) <= 0.05


def test_mirostat_keeps_what_is_less_surprising_than_its_bound() -> None:
    given_rows = rows(100, 50)
    for mu in (-1.0, 0.5, 2.0, 5.0, 90.0):
        processor = Mirostat(version=2)
        state = processor.init([])
        contexts = [Context(0, [], type(state)(mu))] * len(given_rows)
        for row, law in zip(given_rows, processor.process(given_rows, contexts), strict=True):
            bits = -row.double().log_softmax(-1) / math.log(2)
            expected = (bits <= mu) & torch.isfinite(row)
            expected[row.argmax()] = True
            if mu < bits.min():
                expected = row == row.max()
            assert torch.equal(torch.isfinite(law), expected)


def plain_rank_bound(row: Sequence[float], mu: float) -> int:
    probs = sorted((math.exp(value) for value in row), reverse=True)
    pairs = [(math.log((i + 2) / (i + 1)), math.log(probs[i] / probs[i + 1])) for i in range(min(100, len(row) - 1))]
    s = sum(t * b for t, b in pairs) / sum(t * t for t, _ in pairs)
    eps, n = s - 1, len(row)
    k = (eps * 2**mu / (1 - n**-eps)) ** (1 / s)
    return max(1, min(round(k), n))


def test_the_first_version_bounds_the_rank() -> None:
    given_rows = rows(60, 300, seed=6)[:60] + zipf_source(1.3, 300)
    processor = Mirostat(version=1)
    for mu in (0.5, 3.0, 6.0):
        contexts = [Context(0, [], type(processor.init([]))(mu))] * 60
        for row, law in zip(given_rows, processor.process(given_rows, contexts), strict=True):
            size = plain_rank_bound(row.double().tolist(), mu)
            kept = torch.isfinite(law).nonzero().flatten().tolist()
            assert kept == sorted(row.topk(size).indices.tolist())
    assert zipf_exponents(zipf_source(1.37, 101)) == pytest.approx([1.37], rel=1e-5)
    # s = 1 is the limit of its neighbours; a flat start and an excluded tail are no error.
    assert rank_bound(1.0, 5.0, 1000) == pytest.approx(rank_bound(1.00001, 5.0, 1000), abs=1)
    assert rank_bound(0.0, 5.0, 1000) == 1 and rank_bound(0.0, 20.0, 1000) == 1000
    holes = torch.full((1, 300), -INF).index_fill_(1, torch.tensor([4, 7]), 1.0)
    assert torch.isfinite(processor.process(holes, [Context(0, [], processor.init([]))])).sum() == 2


def test_a_target_out_of_reach_is_said() -> None:
    processor = Mirostat(tau=9.0, eta=1.0)
    state = processor.init([])
    with pytest.warns(RuntimeWarning, match="mirostat cannot reach 9 bits per token"):
        for _ in range(8):
            state = processor.advance(state, 0, -0.1)
    assert state.mu > 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor.advance(state, 0, -0.1)


STATEFUL = {
    "dry": Sampler([DRY(0.8, allowed=1), Temperature(0.9)]),
    "dry-greedy": Sampler([DRY(1.5, allowed=1, window=12, breakers=(3,)), Temperature(0.0)]),
    "momentum": Sampler([Momentum()]),
    "top-h": Sampler([Temperature(1.5), TopH(0.7)]),
    "xtc": Sampler([XTC(0.5, 0.05), Temperature(0.7)]),
    "mirostat-1": Sampler([Temperature(0.8), Mirostat(2.0, 0.5, 1)]),
    "mirostat-2": Sampler([NoRepeatNGram(2), Mirostat(2.0, 0.5)]),
}


class _Oblivious(AcceptanceRule):
    """Wrong: every node is judged with the history of the root."""

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq) -> Accepted:  # type: ignore[no-untyped-def]
        path, node = [], 0
        while True:
            law = seq.request.sampler.law(laws.logits[node : node + 1], [seq.context()])
            token = int(seq.request.sampler.pick(law, seq.request.seed, [laws.position(node)])[0])
            child = tree.child(node, token)
            if child is None:
                return Accepted(path, token)
            path.append(child)
            node = child


def test_a_rule_that_forgets_the_path_is_caught() -> None:
    from decodery.testing import LawBroken
    from methods import DRAFTERS

    target = tiny_transformer(0)
    for name in ("dry", "momentum", "mirostat-2"):
        with pytest.raises(LawBroken):
            check_identical(
                *(target, [[5] * 6 + [7, 8, 9] * 4]),
                drafter=DRAFTERS["draft-model"](target),
                acceptance_rule=_Oblivious(),
                sampler=STATEFUL[name],
                seeds=range(4),
            )


def test_a_draft_model_that_is_the_target_knows_every_state() -> None:
    from methods import DRAFTERS

    target = tiny_transformer(0)
    for sampler in STATEFUL.values():
        (run,) = check_identical(
            target, [[1, 2, 3]], drafter=DRAFTERS["draft-model"](target), sampler=sampler, seeds=(0,), max_new_tokens=13
        )
        assert [step.emitted for step in run.trace.decoding] == [4] * 3


def test_long_histories_cost_no_more_per_token() -> None:
    # Counted, not timed: what a node's history holds of its own, beside what it shares with the text before it.
    generator = np.random.default_rng(0)
    text = generator.zipf(1.3, 20_000) % 3000
    counts, repeats = TokenCounts.of(text), Repeats.of(text.tolist())
    for token in text[:500].tolist():
        counts, repeats = counts.add(token), repeats.add(token)
        assert len(counts.tail) <= 64 and len(repeats.tail) <= 65


def test_mirostat_learns_nothing_from_a_token_that_was_excluded_before_it() -> None:
    sampler = Sampler((NoRepeatNGram(1), Temperature(1.0), Mirostat(3.0)))
    context = sampler.context([1, 2, 2], 2, sampler.init([1, 2]), 0)
    # A rule that takes drafts on trust may write what a mask excludes: here the token that was there before.
    after = sampler.after(context, 2, torch.zeros(8))
    assert after[-1] == context.state[-1] and math.isfinite(after[-1].mu)
