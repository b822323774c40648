"""Drafters that guess several tokens at once from the model itself, and what their lossy rules promise instead."""

from __future__ import annotations

import math
import random
import re
import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from decodery.sampling import Sampler
from decodery.speculative.acceptance.rapid import Rapid as RapidRule
from decodery.speculative.acceptance.rapid import acceptance, augmented, emitted_law
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.acceptance.tolerance import Tolerance, tolerated
from decodery.speculative.drafters.aggressive import Aggressive
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.jacobi import Jacobi
from decodery.speculative.drafters.lexical_unit import LexicalUnit
from decodery.speculative.drafters.lookahead import Lookahead
from decodery.speculative.drafters.rapid import Rapid, bm25
from decodery.step.acceptance_rule import NodeDistributions
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence
from decodery.testing import (
    Garbage,
    LawBroken,
    TableModel,
    check_distribution,
    check_identical,
    chi_square,
    decode,
    tiny_transformer,
)
from questions import SAMPLED, prompts
from scripted import Scripted, Unigram
from wrong_rules import NoResidual

TARGET = tiny_transformer(0)
OTHER = tiny_transformer(0, num_layers=1)
PROMPT = [5] * 6 + [7, 8, 9] * 4
SAMPLE = Sampler.from_settings(temperature=1.0)


def submitted(model, prompt: list[int], **settings) -> tuple[Engine, Sequence]:
    engine = Engine(model)
    return engine, engine.submit(Request(prompt, **settings))


def after(model, tokens: list[int]) -> torch.Tensor:
    """[vocab] logits after `tokens`, read in one plain pass."""
    segment = Segment.chunk(tokens, model.new_cache(), logit_rows=[len(tokens) - 1])
    return model.forward(Batch([segment])).logits[0]


# -- the real model ---------------------------------------------------------------------------------------------------


@cache
def plain(lm: LLM, sampler: Sampler | None, number: int) -> list[Sequence]:
    """What plain decoding makes of a prompt; the same for every drafter that is compared with it."""
    return decode(lm.model, [prompts(lm)[number]], sampler=sampler, seeds=(1,), max_new_tokens=24)


@pytest.mark.parametrize(
    ("drafter", "sampler"),
    [
        *((Lookahead(), SAMPLED), (Jacobi(), None), (Jacobi(fill="lookup"), None), (Aggressive(), None)),
        *((LexicalUnit(beta=0.0), SAMPLED), (Rapid(length=16, chunk=16, query=16, gamma=4), None)),
    ],
    ids=lambda each: "" if each is None or each is SAMPLED else type(each).__name__,
)
def test_int8_texts_are_those_of_plain_decoding(smollm2_int8: LLM, drafter: Drafter, sampler: Sampler | None) -> None:
    lm, settings = smollm2_int8, {"sampler": sampler, "seeds": (1,), "max_new_tokens": 24}
    # What is shortened has to be long.
    number = 6 if isinstance(drafter, Rapid) else 2
    known = plain(lm, sampler, number)
    check_identical(lm.model, [prompts(lm)[number]], drafter=drafter, plain=known, **settings)


# -- lookahead --------------------------------------------------------------------------------------------------------


def test_the_window_is_a_tree_with_the_published_mask_and_positions() -> None:
    window, ngram = 4, 4
    drafter = Lookahead(window=window, ngram=ngram)
    _, seq = submitted(TARGET, [1, 2, 3], drafter=drafter)
    # Distinct tokens: cell (level, column) carries 10 * level + column; the last token is cell (0, 0).
    seq.states[seq.request.drafter].levels = [[1, 2, 3]] + [[10 * level + i for i in range(window)] for level in (1, 2)]
    tree = run_sync(drafter.propose(seq, Budget(64, 64)))
    tree.validate()
    cells = {int(token): node for node, token in enumerate(tree.tokens)} | {0: 0}
    mask = tree.ancestor_mask()
    assert len(tree) == window * (ngram - 1)
    for level in range(ngram - 1):
        for column in range(window):
            node = cells[10 * level + column]
            seen = {cells[i] for i in range(column + 1)} | {cells[10 * up + column] for up in range(1, level + 1)}
            assert set(np.flatnonzero(mask[node])) == seen
            assert tree.depths[node] == column + level


def test_ngrams_share_rows_with_the_window_and_budgets_hold() -> None:
    drafter = Lookahead(window=3, ngram=3, grams=2)
    _, seq = submitted(TARGET, [1, 2, 3], drafter=drafter)
    state = seq.states[seq.request.drafter]
    state.levels = [[4, 5], [6, 7, 8]]
    for rest in [(9, 9), (4, 7), (6, 1)]:
        state.remember(3, rest, drafter.grams)
    assert list(state.pool[3]) == [(4, 7), (6, 1)]
    state.remember(3, (4, 7), drafter.grams)
    assert list(state.pool[3]) == [(6, 1), (4, 7)]
    # (4, 7) is level 0 and column 1 of the window, and 6 its column 0.
    assert len(run_sync(drafter.propose(seq, Budget(64, 64)))) == 1 + 5 + 1
    small = run_sync(drafter.propose(seq, Budget(4, 2)))
    assert len(small) == 5 and small.depths.max() == 2
    assert small.child(small.child(0, 4), 7) is not None


def test_the_window_moves_as_published() -> None:
    drafter = Lookahead(window=4, ngram=4, grams=4)
    engine, seq = submitted(TARGET, PROMPT, drafter=drafter, max_new_tokens=30)
    engine.step()
    for number in range(8):
        text, levels = list(seq.tokens), [list(level) for level in seq.states[seq.request.drafter].levels]
        columns = len(levels[0]) + 1
        assert [len(level) for level in levels[1:]] == [columns] * (len(levels) - 1)
        assert (columns, len(levels)) == (max(4, 6 - number), min(3, number + 1))
        engine.step()
        paths = [levels[0][:i] + [level[i] for level in levels[1:]] for i in range(columns)]
        said = [int(after(TARGET, text + path).argmax()) for path in paths]
        moved = seq.states[seq.request.drafter].levels
        if len(levels) < 3:
            assert moved == [*(level[1:] for level in levels), said[1:]]
        else:
            assert moved == [levels[1][1:], levels[2], said]
            for i, following in enumerate(said):
                first = levels[0][i - 1] if i else text[-1]
                assert (levels[1][i], levels[2][i], following) in seq.states[seq.request.drafter].pool[first]


def test_window_rows_do_not_change_the_logits_of_the_text() -> None:
    drafter = Lookahead(window=5, ngram=4)
    engine, seq = submitted(TARGET, PROMPT, drafter=drafter)
    for _ in range(6):
        engine.step()
    tree = run_sync(drafter.propose(seq, Budget(64, 64)))
    cache = seq.cache
    segment = Segment(cache.next_position + tree.depths, tree.tokens, mask=tree.ancestor_mask(), cache=cache)
    logits = TARGET.forward(Batch([segment])).logits
    for node in range(len(tree)):
        path = [int(tree.tokens[each]) for each in tree.path(node)]
        assert (logits[node] - after(TARGET, seq.tokens + path)).abs().max() < 1e-5


@pytest.mark.parametrize("most", [5, 16, 64, 128])
def test_every_ngram_was_predicted_by_the_model(most: int) -> None:
    followed: set[tuple[int, int]] = set()
    kept: list[tuple[int, ...]] = []

    @dataclass(frozen=True)
    class Watched(Lookahead):
        def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
            followed.update(zip(seen.tree.tokens.tolist(), seen.logits.argmax(dim=-1).tolist(), strict=True))
            before = {(first, rest) for first, grams in seq.states[self].pool.items() for rest in grams}
            super().observe(seq, seen)
            after = {(first, rest) for first, grams in seq.states[self].pool.items() for rest in grams}
            kept.extend(rest for _, rest in after - before)

    # Ends of text among the guesses give way to other tokens, which were not predicted either.
    eos = tuple(range(100, 228))
    sampler = Sampler.from_settings(temperature=1.0, min_new_tokens=60, eos_ids=eos)
    engine = Engine(tiny_transformer(0, vocab_size=512))
    request = Request(PROMPT, 60, sampler, Watched(15, 5, 15), eos_ids=eos, max_draft_tokens=most)
    engine.run([engine.submit(request)])
    # With room for five nodes no column of four levels after the first two is ever fed.
    assert kept or most == 5
    for gram in kept:
        assert all(pair in followed for pair in pairwise(gram)), gram


# -- jacobi -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 5])
def test_a_guess_made_from_the_right_distribution_is_accepted(window: int) -> None:
    for sampler in (Sampler.from_settings(), SAMPLE):
        model, drafter = Unigram(50), Jacobi(window=window, fill="last")
        (run,) = check_identical(
            model, [[1, 2]], drafter=drafter, sampler=sampler, seeds=(4,), max_new_tokens=6 * window
        )
        # Blind guesses fail at most once: the next pass has all positions' own draws.
        emitted = [step.emitted for step in run.trace.decoding[:-1]]
        assert len(emitted) > 3
        assert all(max(pair) >= window - 1 for pair in pairwise(emitted)) and max(emitted) == window


def test_jacobi_sampling_keeps_the_law_and_the_check_has_power() -> None:
    # Four tokens: the second pass guesses blindly, the third tests what that one refined.
    model, law = TableModel(3, order=2, seed=1), {"sampler": SAMPLE, "length": 4, "draws": 240}
    check_distribution(model, [1, 2], drafter=Jacobi(window=3), acceptance_rule=Rejection(), **law)
    blind = Jacobi(window=3, fill="last")
    with pytest.raises(LawBroken):
        check_distribution(model, [1, 2], drafter=blind, acceptance_rule=NoResidual(), least=1e-6, **law)


# -- aggressive -------------------------------------------------------------------------------------------------------


def trace_of(text: list[int], drafter: Aggressive, prompt: list[int]) -> list[tuple[int, int]]:
    """(drafted, accepted) of every decoding pass over a scripted answer that ends with token 0."""
    model = Scripted([*prompt, *text, 0])
    (seq,) = decode(model, [prompt], drafter=drafter, max_new_tokens=40, eos_ids=(0,))
    assert seq.generated == [*text, 0]
    return [(step.nodes, step.accepted) for step in seq.trace.decoding]


def test_an_edit_costs_one_plain_step() -> None:
    copying = Aggressive(source=(1, 2, 3, 4, 5))
    assert trace_of([1, 2, 9, 4, 5], copying, [8, 8]) == [(4, 1), (0, 0), (1, 1)]
    assert trace_of([1, 2, 3, 4, 5], copying, [8, 8]) == [(4, 4)]


def test_a_place_is_kept_while_the_copy_goes_on_and_ambiguity_is_settled_as_asked() -> None:
    source = (1, 2, 1, 2, 1, 2, 3)
    assert trace_of(list(source), Aggressive(source=source, max_draft=2), [8]) == [(2, 2), (2, 2), (0, 0)]
    edited = [1, 2, 9, 1, 2, 1, 2, 3]
    skipping = trace_of(edited, Aggressive(source=source), [8])
    nearest = trace_of(edited, Aggressive(source=source, ambiguous="nearest"), [8])
    assert len(nearest) < len(skipping)
    with pytest.raises(SettingsError, match="outside the model's vocabulary"):
        decode(Scripted([1]), [[1]], drafter=Aggressive(source=(99,)))


def test_unique_matches_against_brute_force() -> None:
    chance = random.Random(3)
    for _ in range(200):
        source = [chance.randrange(4) for _ in range(chance.randrange(1, 20))]
        suffix = [chance.randrange(5) for _ in range(chance.randrange(1, 5))][-3:]
        drafter = Aggressive(source=tuple(source))
        _, seq = submitted(TARGET, [1], drafter=drafter)
        expected = None
        for n in range(1, len(suffix) + 1):
            ends = [at for at in range(n, len(source) + 1) if source[at - n : at] == suffix[-n:]]
            if len(ends) == 1:
                expected = ends[0]
            if len(ends) <= 1:
                break
        assert drafter._match(seq.states[seq.request.drafter], suffix) == expected


def test_tolerance_of_one_is_greedy_and_of_more_keeps_to_its_bounds() -> None:
    for drafter in (DraftModel(OTHER), Garbage()):
        check_identical(TARGET, [PROMPT, [3, 1]], drafter=drafter, acceptance_rule=Tolerance(top=1), seeds=(0,))
    rule = Tolerance(top=3, margin=1.0)
    (seq,) = decode(TARGET, [PROMPT], drafter=DraftModel(OTHER), acceptance_rule=rule, max_new_tokens=36)
    (plain,) = decode(TARGET, [PROMPT], max_new_tokens=36)
    assert seq.generated != plain.generated
    for at in range(seq.request.prompt_length, len(seq.tokens)):
        row = after(TARGET, seq.tokens[:at])
        token = seq.tokens[at]
        assert token in row.topk(3).indices and row[token] >= row.max() - 1.0
    assert tolerated(torch.tensor([1.0, 2.0, 2.0, -math.inf]), [0, 1, 2, 3], 2, 5.0) == [False, True, True, False]


# -- rapid ------------------------------------------------------------------------------------------------------------


def random_pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = np.random.default_rng(0)
    return [
        (torch.from_numpy(chance.normal(size=6) * 2), torch.from_numpy(chance.dirichlet(np.full(6, 0.5))))
        for _ in range(count)
    ]


@pytest.mark.parametrize("eta", [0.0, 2.0, 10.0, 40.0])
def test_the_moved_rule_emits_the_law_it_states(eta: float) -> None:
    for law, q in random_pairs(30):
        p, moved = law.softmax(0), augmented(law, q, eta, 0.1).softmax(0)
        emitted = torch.zeros_like(p)
        for token in range(6):
            accept, rest = acceptance(p, moved, q, token)
            emitted[token] += q[token] * accept
            emitted += q[token] * (1 - accept) * rest
        kept = torch.minimum(q, moved)
        rest = (p - kept).clamp_min(0)
        if rest.sum() > 1e-9:
            assert (emitted - kept - (1 - kept.sum()) * rest / rest.sum()).abs().max() < 1e-12
        assert (emitted - emitted_law(p, moved, q)).abs().max() < 1e-12
        if eta == 0:
            assert (emitted - p).abs().max() < 1e-12


def test_the_moved_rule_draws_from_the_law_it_states() -> None:
    eta = 10.0
    law, q = random_pairs(2)[1]
    model = TableModel(6)
    _, seq = submitted(model, [1, 2], sampler=SAMPLE)
    rule, logits, counts = RapidRule(eta=eta), torch.stack([law, law]).float(), np.zeros(6)
    for seed in range(800):
        seq.rebind(seed=seed)
        token = int(seq.request.sampler.pick(q.log()[None], seed, [0])[0])
        tree = DraftTree.chain(2, [token], origin="sampled", distributions={0: q})
        accepted = rule.choose(tree, NodeDistributions(tree, logits, seq), seq)
        counts[token if accepted.path else accepted.bonus] += 1
    p = law.softmax(0)
    assert chi_square(counts, emitted_law(p, augmented(law, q, eta, 0.1).softmax(0), q).numpy()) > 1e-3
    # The test can tell this law from the target's own.
    assert chi_square(counts, p.numpy()) < 1e-6


@pytest.mark.parametrize("rule", [None, Rejection(), RapidRule(eta=0)], ids=["coupled", "rejection", "rapid"])
def test_a_drafter_that_reads_everything_is_always_right(rule) -> None:
    for sampler in (Sampler.from_settings(), SAMPLE):
        drafter = Rapid(tiny_transformer(0), gamma=4, confidence=0.0)
        (seq,) = decode(TARGET, [PROMPT], drafter=drafter, acceptance_rule=rule, sampler=sampler, max_new_tokens=21)
        assert [step.emitted for step in seq.trace.decoding] == [5] * 4
        if sampler.greedy:
            assert seq.generated == decode(TARGET, [PROMPT], max_new_tokens=21)[0].generated


def test_the_step_towards_the_drafter_changes_greedy_texts_and_raises_acceptance() -> None:
    # A drafter that knows half the context; the tiny models disagree often enough.
    drafter = Rapid(OTHER, gamma=3, confidence=0.0, head=1, query=3, chunk=4, length=4)
    check_identical(TARGET, [PROMPT], drafter=drafter, acceptance_rule=RapidRule(eta=0), seeds=(0,), max_new_tokens=40)
    accepted = []
    for eta in (0.0, 50.0):
        (seq,) = decode(TARGET, [PROMPT], drafter=drafter, acceptance_rule=RapidRule(eta=eta), max_new_tokens=48)
        accepted.append(seq.trace.tokens_per_pass)
    assert accepted[0] < accepted[1]


def test_passages_are_ranked_and_kept_in_order() -> None:
    text = "the tide is high . a cat sat . moon pulls the tide . dogs bark . why tide moon ?"
    words = text.split()
    drafter = Rapid(head=1, query=4, chunk=6, length=9)
    ids = list(range(len(words)))
    kept = [words[token] for token in drafter.shorten(ids, [word + " " for word in words])]
    assert " ".join(kept) == "the tide is high . moon pulls the tide . why tide moon ?"
    scores = bm25([["a", "b"], ["a", "a"], ["c", "d"]], {"a", "z"})
    rarity = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    assert np.allclose(scores, [rarity, rarity * 2 * 2.5 / 3.5, 0.0])
    assert drafter.shorten([1, 2], ["x", "y"]) == [1, 2]


def test_rapid_says_why_it_drafts_nothing() -> None:
    # As an ordinary prompt at the defaults: all of it would be read.
    prompt = np.random.default_rng(0).integers(1, 60, 300).tolist()
    expected = r"length=4096 tokens of passages, and the prompt has 300 .* rapid:length=102,"
    with pytest.warns(UserWarning, match=expected) as told:
        (seq,) = decode(TARGET, [prompt], drafter=Rapid(confidence=0.0), max_new_tokens=12)
    assert all(step.nodes == 0 for step in seq.trace.decoding)
    advice = re.search(r"rapid:length=\d+,chunk=\d+", str(told[0].message))
    assert advice is not None
    with pytest.warns(
        UserWarning, match=r"the first 32 and the last 64 tokens of a prompt are always read, and it has 3"
    ):
        decode(TARGET, [[1, 2, 3]], drafter=Rapid(), max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = replace(resolve("drafter", advice[0]), confidence=0.0)
        (seq,) = decode(TARGET, [prompt], drafter=drafter, max_new_tokens=12)
    assert max(step.nodes for step in seq.trace.decoding) == 10
