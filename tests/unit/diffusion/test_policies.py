"""What each rule chooses, against hand cases and plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from covering import FULL
from decodery.core.errors import SettingsError
from decodery.core.registry import methods
from decodery.diffusion.base import UnmaskingPolicy
from decodery.diffusion.canvas import Canvas
from decodery.diffusion.ccd_agreement import CCDAgreement, Proposed
from decodery.diffusion.dystruct import Dystruct
from decodery.diffusion.r2 import R2, Streaks, clusters, runs
from decodery.diffusion.run import Run, filled
from decodery.diffusion.scheduled import dream_quotas, quotas
from decodery.diffusion.view import View
from decodery.step.forward_request import gather, run_sync
from decodery.testing import OracleDenoiser
from diffusing import KINDS, MASK, PROMPT, denoiser, fill, named, order

METHODS = [method.name for method in methods("diffusion") if not method.requirements]


@pytest.mark.invariant
@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_every_method_fills_canvases_of_every_model_alike_alone_and_together(name: str) -> None:
    """With every cache, or it says why not; what is written stays, and is never the mask."""
    for kind, config in KINDS.items():
        model = denoiser(**config)
        if name == "dystruct" and kind == "blocks":
            with pytest.raises(SettingsError, match="all later positions"):
                fill(model, name)
            continue
        alone = [fill(model, name, 8, prompt=PROMPT[:n], seed=n, temperature=0.7, eos=[7]) for n in (2, 5)]
        both = [Canvas.of(model, PROMPT[:n], 8, eos_ids=[7], seed=n) for n in (2, 5)]
        run_sync(gather([filled(model, canvas, named(name), 0.7) for canvas in both]))
        assert [order(canvas) for canvas in both] == [order(canvas) for canvas in alone]
        for canvas in both:
            places = [place for place, _ in order(canvas)]
            assert len(set(places)) == len(places) or named(name).revises
            assert MASK not in canvas.output and (canvas.ended or not canvas.masked.any())
    caches, turn = list(methods("diffusion-cache")), METHODS.index(name) % 2
    for cache in caches if FULL else caches[turn::2]:
        try:
            canvas = fill(denoiser(shifted=True), f"{name}:cache={cache.name}", 8)
        except SettingsError as error:
            assert "leave" in str(error) and "cache" in str(error)
        else:
            assert not canvas.masked.any()


def view(confidence: list[float], tokens: list[int] | None = None, places: list[int] | None = None) -> View:
    """Open places 0, 1, ... with these confidences of the proposals, token 0 unless said."""
    n = len(confidence)
    ids, where = np.array(tokens or [0] * n), np.array(places if places is not None else range(n))
    logprobs = torch.zeros(n, 8, dtype=torch.float64)
    return View(where, ids, np.array(confidence), logprobs, (0, int(where.max()) + 1))


def chosen(spec: str, seen: View, memory: object = None) -> list[int]:
    method = named(spec)
    assert isinstance(method, UnmaskingPolicy)
    return [int(place) for place in method.select(seen, memory)[0].positions]


def test_hand_cases() -> None:
    leap = view([0.95, 0.8, 0.5, 0.76, 0.74, 0.77])
    assert chosen("local-leap:radius=2", leap) == [0, 1] and chosen("local-leap:radius=3", leap) == [0, 1, 3]
    assert chosen("threshold:tau=0.9", view([0.2, 0.9, 0.3, 0.95])) == [1, 3]
    assert chosen("threshold:tau=0.9", view([0.2, 0.3, 0.3])) == [1], (
        "nothing is sure: the surest, and the first of two"
    )
    assert chosen("factor:phi=1", view([0.6, 0.7, 0.5, 0.8])) == [1, 3]
    assert chosen("factor:phi=0", view([1.0, 0.9, 1.0])) == [0, 2] and chosen("factor:phi=0", view([0.9, 0.8])) == [0]
    assert chosen("static", view([0.2, 0.4, 0.4]), ((2, 1), 0)) == [1, 2]
    assert quotas(7, 3) == (3, 2, 2) and quotas(2, 5) == (1, 1)
    # Of four in four passes Dream's code writes 0, 1, 1 and 2; of ten in five 1, 2, 2, 2 and 3.
    assert dream_quotas(4, 4) == (1, 1, 2) and dream_quotas(10, 5) == (1, 2, 2, 2, 3)
    assert fill(denoiser(), "static:steps=4,schedule=dream", 8).passes == 4


def test_rules_that_are_another_one_at_their_limits_are_that_and_contain_it_elsewhere() -> None:
    draws = np.random.default_rng(0)
    for number in range(300):
        n = int(draws.integers(1, 12))
        places = np.sort(draws.choice(20, n, replace=False)).tolist()
        seen = view(draws.random(n).round(2).tolist(), draws.integers(0, 3, n).tolist(), places)
        base = chosen("threshold:tau=0.9", seen)
        assert chosen("local-leap:anchor=0.9,relaxed=0.9", seen) == base == chosen("local-leap:radius=0", seen)
        assert set(base) <= set(chosen("local-leap", seen))
        empty = Streaks(np.full(seen.region[1], -1), np.zeros(seen.region[1], dtype=np.int64))
        assert set(base) <= set(chosen("r2", seen, empty))
        near = [
            i for i in range(n)
            if any(seen.confidence[j] >= 0.8 and abs(places[i] - places[j]) <= 3 for j in range(n))
            and seen.confidence[i] >= 0.4
        ]  # fmt: skip
        surest = int(seen.order[0])
        plain = sorted({places[i] for i in [*near, surest]})
        assert chosen("local-leap:anchor=0.8,relaxed=0.4,radius=3", seen) == plain, number
    model = denoiser()
    for other in ("local-leap:anchor=0.4,relaxed=0.4", "explore-exploit:tau=0.4,blocks=1,few=0"):
        assert order(fill(model, other)) == order(fill(model, "threshold:tau=0.4"))
    assert order(fill(model, "threshold:tau=1.0")) == order(fill(model, "factor:phi=0")) == order(fill(model, "static"))
    assert fill(model, "static:steps=4").passes == fill(model, "random:steps=4").passes == 4


def test_groups_and_runs_against_loops() -> None:
    draws = np.random.default_rng(1)
    for _ in range(200):
        n = int(draws.integers(1, 10))
        is_open, sure, tokens = draws.random(n) < 0.7, draws.random(n), draws.integers(0, 2, n)
        grouped = np.zeros(n, dtype=bool)
        for start in range(n - 2):
            inside = [i for i in range(start, start + 3) if is_open[i]]
            if inside and len(inside) >= 2 and np.mean(sure[inside]) >= 0.5:
                grouped[inside] = True
        assert clusters(is_open, sure, 3, 1, 0.5).tolist() == grouped.tolist()
        heads, start = np.zeros(n, dtype=bool), 0
        while start < n:
            end = start + 1
            while end < n and is_open[start] and is_open[end] and tokens[end] == tokens[start]:
                end += 1
            best = start + int(sure[start:end].argmax())
            heads[best] = is_open[start] and end - start >= 2 and sure[best] > 0.5
            start = end
        assert runs(is_open, sure, tokens, 0.5).tolist() == heads.tolist()


def test_what_stays_the_same_is_written_in_the_pass_in_which_it_has_stayed_long_enough() -> None:
    """Place 0 is written by the threshold in every pass; place 2 proposes a a b b b."""
    method = R2(tau=0.99, stay=0.5, passes=3)
    memory = Streaks(np.full(5, -1), np.zeros(5, dtype=np.int64))
    for number, token in enumerate([1, 1, 2, 2, 2]):
        seen = view([1.0, 0.6, 0.4], [7, token, 5], [0, 2, 4])
        commit, memory = method.select(seen, memory)
        assert (2 in commit.positions) == (number == 4), number


def test_contexts_that_disagree_postpone_a_place() -> None:
    """The entropy of the mean is the mean entropy and the divergence; a place that flips its proposal waits."""
    sure, other = [0.9, 0.05, 0.05], [0.05, 0.9, 0.05]
    laws = [torch.tensor([sure, [0.8, 0.1, 0.1]]), torch.tensor([other, [0.8, 0.1, 0.1]])]
    method, memory = named("ccd:history=1"), None
    assert isinstance(method, UnmaskingPolicy)
    places = []
    for law in laws:
        seen = View.of(law.double().log(), np.array([3, 4]), (3, 5))
        commit, memory = method.select(seen, memory)
        places.append(int(commit.positions[0]))
    assert places == [3, 4], "alone the first place is surer in both passes"
    adaptive = named("ccd:history=1,adaptive=true,floor=0.7")
    assert isinstance(adaptive, UnmaskingPolicy)
    _, memory = adaptive.select(View.of(laws[0].double().log(), np.array([3, 4]), (3, 5)), None)
    again = adaptive.select(View.of(laws[0].double().log(), np.array([3, 4]), (3, 5)), memory)[0]
    assert again.positions.tolist() == [3, 4]
    mean = torch.stack([laws[0][0], laws[1][0]]).double()
    entropy = lambda p: float(torch.special.entr(p).sum())  # noqa: E731
    divergence = sum(float((p * (p / mean.mean(0)).log()).sum()) for p in mean) / 2
    assert entropy(mean.mean(0)) == pytest.approx(sum(map(entropy, mean)) / 2 + divergence)


def test_what_two_passes_agree_on_is_written_against_a_slow_loop() -> None:
    """A place that flips its most likely token waits; a surest place that was not remembered is written by itself."""
    method = CCDAgreement(warm_up=1, places=3, adaptive=True)
    memory, found = Proposed(9), []
    for sure, tokens, places in (
        ([0.9, 0.8, 0.7], [1, 2, 3], [0, 1, 2]),
        ([0.8, 0.7, 0.1], [2, 3, 4], [1, 2, 5]),
        ([0.8, 0.7, 0.6], [5, 4, 4], [2, 5, 6]),
        ([0.6, 0.8], [5, 3], [2, 6]),
    ):
        seen = replace(likely(view(sure, tokens, places), tokens), passed=len(found))
        commit, memory = method.select(seen, memory)
        found.append(commit.positions.tolist())
    # Of 2 and 5, which the second pass remembers, 2 says something else in the third; of 2 and 6 then 6 does.
    assert found == [[0], [1], [5], [2]]
    draws = np.random.default_rng(3)
    for number in range(300):
        n = int(draws.integers(1, 9))
        places = np.sort(draws.choice(12, n, replace=False)).tolist()
        seen = view(draws.random(n).round(1).tolist(), draws.integers(0, 2, n).tolist(), places)
        # What is compared is what is most likely, whatever a temperature has drawn.
        best = draws.integers(0, 2, n).tolist()
        seen = replace(likely(seen, best), passed=9)
        tokens = {int(place): int(draws.integers(0, 2)) for place in draws.choice(12, 5, replace=False)}
        before = Proposed(12, int(draws.integers(0, 5)), tokens)
        width = min(before.width + 1, 4) if n > 1 else 2
        ranked = sorted(range(n), key=lambda i: (-seen.confidence[i], places[i]))
        agree = [i for i in ranked[:width] if tokens.get(places[i]) == best[i]]
        for adaptive in (False, True):
            taken = [ranked[0]]
            if places[ranked[0]] in tokens and agree:
                taken = agree if adaptive else agree[:1]
            commit, after = CCDAgreement(places=4, adaptive=adaptive).select(seen, before)
            assert commit.positions.tolist() == sorted(places[i] for i in taken), number
            left = [i for i in ranked if i not in taken][:width]
            assert after.tokens == {places[i]: best[i] for i in left} and after.width == width
        assert len(CCDAgreement(places=1, adaptive=True).select(seen, before)[0].positions) == 1


def test_what_is_remembered_of_a_pass_grows_from_the_last_one_of_the_warm_up_on() -> None:
    """Sizes of the released code's buffer by pass, and where a tenth of the region is left."""
    for warm_up, sizes in ((5, [1, 1, 1, 1, 2, 3, 4, 5, 5]), (1, [1, 2, 3]), (0, [1, 2, 3]), (2, [1, 2, 3])):
        method, memory, found = CCDAgreement(warm_up=warm_up), Proposed(40), []
        for number in range(len(sizes)):
            _, memory = method.select(replace(view([0.5] * 20), passed=number), memory)
            found.append(memory.width)
            assert len(memory.tokens) == memory.width
        assert found == sizes
        assert method.select(replace(view([0.5] * 4), passed=30), memory)[1].width == 2


def likely(seen: View, tokens: list[int]) -> View:
    """The same with these tokens the most likely ones."""
    logprobs = torch.full((len(tokens), 8), -9.0, dtype=torch.float64)
    logprobs[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return replace(seen, logprobs=logprobs)


def test_measures() -> None:
    law = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64).log()
    places = np.array([0, 1])
    assert View.of(law, places, (0, 2), measure="margin").confidence == pytest.approx([0.2, 0.0])
    entropy = [float(torch.special.entr(row.exp()).sum()) for row in law]
    assert View.of(law, places, (0, 2), measure="entropy").confidence == pytest.approx([-each for each in entropy])
    assert View.of(law, places, (0, 2), late=[0]).confidence.tolist() == [-np.inf, -np.inf]


def seeds(groups: int, copies: int, symbols: int) -> OracleDenoiser:
    """Groups that each repeat one symbol, any of them: one uncertain token decides a group."""
    answers = np.stack(np.meshgrid(*[np.arange(symbols)] * groups, indexing="ij"), -1).reshape(-1, groups)
    return OracleDenoiser(answers.repeat(copies, axis=1), vocab_size=symbols + 1)


def test_exploring_needs_fewer_passes_where_every_group_hangs_on_one_uncertain_token() -> None:
    model, length = seeds(4, 4, 3), 16
    threshold = fill(model, "threshold:block=4", length, prompt=[0])
    several = fill(model, "explore-exploit:block=4,blocks=4,share=0", length, prompt=[0])
    branching = fill(model, "explore-exploit:block=4,blocks=4,share=0,branches=3", length, prompt=[0])
    assert threshold.passes == 8 and several.passes == 2 and model.dead == 0
    assert branching.passes <= threshold.passes and branching.rows > several.rows
    for canvas in (several, branching):
        groups = np.array(canvas.output).reshape(4, 4)
        assert (groups == groups[:, :1]).all()
    # Where an end is likely and something else is drawn, no branch is likely enough: what was drawn is written.
    ending = OracleDenoiser([[9, 9]] * 9 + [[1, 2]], vocab_size=11)
    drawn = [
        fill(ending, "explore-exploit:branches=3", 2, prompt=[0], eos=[9], seed=seed, temperature=1.0).output
        for seed in range(40)
    ]
    assert [9] in drawn and [1, 2] in drawn


def test_dystruct_is_threshold_where_it_decides_nothing_and_keeps_its_bounds() -> None:
    model, plain = denoiser(), "dystruct:tau=0.4,alpha=0,mean=16,least=1,most=16,weld=0"
    assert order(fill(model, plain)) == order(fill(model, "threshold:tau=0.4"))
    method = Dystruct()
    assert method.partition(np.array([0.1] * 8 + [0.9] * 8)) == [(0, 8), (8, 16)]
    assert Dystruct(alpha=0).partition(np.array([0.1] * 8 + [0.9] * 8)) == [(0, 16)]
    assert len(Dystruct(alpha=1e9).partition(np.full(6, 0.4))) == 6
    masked = np.array([False] * 4 + [True] * 12)
    assert method.energy(masked, (4, 8), 0.5) < method.energy(masked, (8, 12), 0.5)
    for seed in range(3):
        for passes in (3, 6, 40):
            spec = f"dystruct:least=2,mean=4,most=8,doubt=1.0,passes={passes}"
            canvas = fill(denoiser(seed), spec, seed=seed, temperature=0.7)
            assert canvas.passes <= passes and not canvas.masked.any()
            assert len(canvas.output) == 16 or canvas.passes == passes
    # What ends early makes no canvas for the rest, and pays for none.
    ending = OracleDenoiser([[1, 2, 9, 9, 9, 9, 9, 9]], vocab_size=11)
    grown = fill(ending, "dystruct:least=1,mean=4,most=8", 8, prompt=[0], eos=[9])
    assert grown.output == [1, 2, 9] and len(grown) == 4


def test_a_border_is_mended_only_where_that_is_likelier() -> None:
    """Two halves that contradict each other are made one text; two that agree are left as they are."""
    model = OracleDenoiser([[1, 1, 1, 1], [2, 2, 2, 2]], vocab_size=4, weights=[0.6, 0.4])
    for written, mended in (([1, 1, 1, 2], [1, 1, 1, 2]), ([1, 2, 1, 1], [1, 1, 1, 1]), ([2] * 4, [2] * 4)):
        method = Dystruct(weld=1, passes=9)
        canvas = Canvas.of(model, [0], 4)
        run = Run(model, canvas, method)
        canvas.tokens[1:] = written
        run_sync(method._weld(run, 3))
        assert canvas.tokens[1:].tolist() == mended and canvas.passes <= 2


@torch.no_grad()
def test_threshold_drafts_are_taken_as_far_as_a_slow_loop_takes_them() -> None:
    """One draft is threshold; with more, every token would have been written from the draft taken before."""
    for seed in range(4):
        model = denoiser(seed)
        assert order(fill(model, "freedave-plus:tau=0.2,drafts=1")) == order(fill(model, "threshold:tau=0.2"))
        canvas = fill(model, "freedave-plus:tau=0.2,drafts=4")
        state, seen = Canvas.of(model, PROMPT, 16), 0
        threshold = named("threshold:tau=0.2")
        assert isinstance(threshold, UnmaskingPolicy)
        for written in canvas.rounds:
            run = Run(model, state, threshold)
            step, _ = threshold.select(run_sync(run.look((5, 21))), None)
            wanted = dict(zip(step.positions.tolist(), step.tokens.tolist(), strict=True))
            for place, token in zip(written.positions.tolist(), written.tokens.tolist(), strict=True):
                assert wanted[place] == token
                state.tokens[place], seen = token, seen + 1
        assert seen == 16 and canvas.passes <= fill(model, "threshold:tau=0.2").passes + 1
    sure = OracleDenoiser([[1, 2, 3, 4]], vocab_size=9)
    assert fill(sure, "freedave-plus", 4, prompt=[0]).passes == 1


def test_bounds_of_cad() -> None:
    model = OracleDenoiser([[1, 2, 3, 4, 5, 6]], vocab_size=9)
    assert [len(each.tokens) for each in fill(model, "cad:most=2", 6, prompt=[0]).rounds] == [2, 2, 2]
    unsure = OracleDenoiser([[0, 1, 2], [1, 2, 0], [2, 0, 1]], vocab_size=4)
    assert [len(each.tokens) for each in fill(unsure, "cad:least=2", 3, prompt=[0]).rounds] == [2, 1]
