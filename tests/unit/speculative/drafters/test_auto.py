"""What `auto` expects to come next, how many nodes it feeds, and the contexts it begins with."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import decodery.models.loaders.load as load_module
import decodery.speculative.drafters.auto_text as auto_module
import decodery.speculative.heads.advice as advice_module
from decodery.cli.main import main
from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders.load import LoadedModel
from decodery.sampling import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.stores.blending import Blending
from decodery.speculative.stores.contexts import Contexts
from decodery.speculative.stores.expectations import CONTEXTS, LEAST, SuccessorRates
from decodery.speculative.stores.past import PastTexts
from decodery.speculative.stores.warm import WarmContexts
from decodery.speculative.tree_building.most_likely import ExpectedSpeedup
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.drafter_memory import Memory
from decodery.testing import tiny_transformer
from decodery.training.data import Corpus, write_texts
from decodery.training.ngram_cache import learn_contexts
from methods import DRAFTERS
from tiny_models import VOCAB, tiny_loaded


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def corpus(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[256, 65 + number % 3] for number in range(60)]
    out = tmp_path_factory.mktemp("corpus") / "text"
    return write_texts(target, prompts, out, max_new_tokens=24, temperatures=(0.0, 0.3), top=8)


@pytest.fixture(scope="module")
def warm(target: LoadedModel, corpus: Corpus) -> WarmContexts:
    return learn_contexts(corpus, width=4, vocabulary=target.model.config.vocabulary)


def best_size(costs: np.ndarray, chances: list[float], sequences: int) -> int:
    """Of all sizes the one with most tokens per second; the slow way."""
    return int(np.argmax([(sequences + sum(chances[:n])) / costs[n] for n in range(len(chances) + 1)]))


def test_the_tree_has_the_size_that_pays_most() -> None:
    """Passes get dearer in steps; a rule that stops at the first node that does not pay misses what lies after one."""
    generator, impatient = np.random.default_rng(0), 0
    for _ in range(300):
        limit, sequences = int(generator.integers(1, 33)), int(generator.integers(1, 4))
        steps = generator.exponential(size=limit + sequences + 1) * (generator.random(limit + sequences + 1) < 0.3)
        costs = 5 + np.cumsum(steps)
        chances = np.sort(generator.random(limit) ** 3)[::-1].tolist()
        worth = ExpectedSpeedup(costs[sequences:], sequences)
        for chance in chances:
            if chance < worth.bar():
                break
            worth.take(chance)
        expected = best_size(costs[sequences:], chances, sequences)
        assert worth.best == expected
        assert expected == 0 or chances[expected - 1] >= worth.least or worth.least == LEAST
        grown = [best_size(costs[sequences:], chances[: n + 1], sequences) for n in range(limit)]
        first = next((n for n in range(limit) if grown[n] <= n), limit)
        impatient += first != expected
    assert impatient > 10


def test_what_a_step_has_taken_already_calls_for_more_nodes() -> None:
    """Time that questions took is spent whatever is fed, as in a step that takes longer."""
    costs, chances = 1 + 0.2 * np.arange(9.0), [0.9, 0.5, 0.3, 0.25, 0.15, 0.1, 0.05, 0.05]
    worth, sizes = ExpectedSpeedup(costs, 1), []
    for chance in chances:
        worth.take(chance)
    for spent in (0.0, 0.3, 0.7):
        worth.spend(spent)
        costs = costs + spent
        sizes.append(worth.best)
        assert worth.best == best_size(costs, chances, 1)
        assert worth.seconds == pytest.approx(costs[worth.best] / (1 + sum(chances[: worth.best])))
    assert sizes == sorted(set(sizes))


def test_contexts_are_ranked_by_what_the_model_expected_where_they_stood(corpus: Corpus, warm: WarmContexts) -> None:
    """Against dictionaries."""
    learned, _ = corpus.split()
    for order in CONTEXTS:
        counts, mass = Counter(), {}
        for number in learned:
            text = corpus[number]
            for at in range(len(text.tokens)):
                if at + 1 >= order and np.isfinite(text.logprobs[at, 0]):
                    context = tuple(text.tokens[at + 1 - order : at + 1].tolist())
                    counts[context] += 1
                    found = mass.setdefault(context, Counter())
                    for token, logprob in zip(text.likely[at].tolist(), text.logprobs[at].tolist(), strict=True):
                        found[token] += float(np.exp(np.float32(logprob)))
        often = {context for context, count in counts.items() if count >= (1 if order == 1 else 2)}
        known = [tuple(context) for context in warm.contexts[order].tolist()]
        assert set(known) == often and len(known) == len(often) > 3
        assert all(counts[a] >= counts[b] for a, b in pairwise(known))
        for context, row in zip(known, warm.rows[order].tolist(), strict=True):
            weights = [mass[context][token] for token in row]
            assert len(set(row)) == 4 and np.allclose(weights, sorted(mass[context].values())[:-5:-1], rtol=1e-4)


def test_contexts_are_kept_in_a_file(warm: WarmContexts, tmp_path: Path) -> None:
    warm.save(tmp_path / "kept.safetensors")
    again = WarmContexts.load(tmp_path / "kept.safetensors")
    assert again.vocab_size == VOCAB and again.vocabulary == warm.vocabulary and again.facts == warm.facts
    for order in CONTEXTS:
        assert (again.contexts[order] == warm.contexts[order]).all() and (again.rows[order] == warm.rows[order]).all()
    assert np.allclose(again.rates, warm.rates)
    content = (tmp_path / "kept.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-9])
    bad = replace(warm, rows={**warm.rows, 1: warm.rows[1] + VOCAB})
    bad.save(tmp_path / "bad.safetensors")
    for name in ("cut", "bad"):
        with pytest.raises(CorruptFile, match=f"{name}.*damaged"):
            WarmContexts.load(tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelNotFound, match="train ngram-cache"):
        WarmContexts.load(tmp_path / "none.safetensors")


def test_a_store_filled_at_once_knows_what_one_filled_by_hand_knows(warm: WarmContexts) -> None:
    contexts = Contexts(CONTEXTS, 6)
    for order in CONTEXTS:
        contexts.fill(order, warm.contexts[order], warm.rows[order])
    for number, order in enumerate(CONTEXTS):
        found = [contexts.rows(context)[number] for context in warm.contexts[order].tolist()]
        right = [row == [*kept, -1, -1] for row, kept in zip(found, warm.rows[order].tolist(), strict=True)]
        # Two contexts may share a place of the table; then one of them is not known, and never the other's.
        assert np.mean(right) > 0.99
        assert all(row is None or good for row, good in zip(found, right, strict=True))
    rates = SuccessorRates(3, 6, warm.rates)
    assert np.allclose(np.array(rates.of)[:, :, :4], warm.rates)


def test_stores_that_begin_with_the_same_contexts_change_apart(warm: WarmContexts) -> None:
    """What one learns the other does not know, nor one that begins later, also after a copy has been dropped."""
    one, other = warm.store(6), warm.store(6)
    context = warm.contexts[3][0].tolist()
    before = other.rows(context)
    assert before[0] is not None and one.rows(context) == before
    tree, logits = DraftTree.root(context[-1]), torch.arange(VOCAB, 0, -1.0)[None]
    one.learn(context, VerificationFeedback(tree, logits, {}, [], [0], 2))
    assert one.rows(context) == [[0, 1, 2, 3, 4, 5]] * 3
    del one
    assert other.rows(context) == before and warm.store(6).rows(context) == before


def test_a_warm_start_guesses_more_of_the_first_text(target: LoadedModel, warm: WarmContexts, tmp_path: Path) -> None:
    warm.save(tmp_path / "warm.safetensors")
    accepted, texts = {}, {}
    for name in ("none", str(tmp_path / "warm.safetensors")):
        drafter = resolve("drafter", f"auto:warm={name}")
        engine = Engine(target.model, memory=Memory(), pass_seconds=lambda context: np.ones(1024))
        seq = engine.submit(Request([256, 66], 24, drafter=drafter))
        engine.run([seq])
        accepted[name], texts[name] = sum(step.accepted for step in seq.trace.steps), seq.tokens
    cold, hot = accepted.values()
    assert hot > cold
    assert len(set(map(tuple, texts.values()))) == 1


def test_contexts_of_another_vocabulary_are_refused(target: LoadedModel, warm: WarmContexts, tmp_path: Path) -> None:
    replace(warm, vocabulary="another").save(tmp_path / "other.safetensors")
    engine = Engine(target.model)
    with pytest.raises(SettingsError, match="another vocabulary"):
        engine.submit(Request([256], 4, drafter=Auto(warm=str(tmp_path / "other.safetensors"))))
    with pytest.raises(ModelNotFound, match="no table of contexts at"):
        engine.submit(Request([256], 4, drafter=Auto(warm=str(tmp_path / "none"))))


def test_each_opinion_counts_as_much_as_it_was_right() -> None:
    """Of two that disagree the one that was right is believed, whatever it says of itself, where it was right."""
    generator, blending = np.random.default_rng(0), Blending()
    sure, modest = [(0.8, 1, None), (0.1, 2, None)], {2: 0.3, 4: 0.1}

    def best(place: tuple[int, int]) -> tuple[float, int]:
        return blending.blend(place, sure, modest)[0][0]

    assert best((0, 0))[1] == best((1, 0))[1] == 1
    for _ in range(400):
        for place, right in (((0, 0), 2), ((1, 0), 1)):
            _, told = blending.blend(place, sure, modest)
            blending.learn(told, right if generator.random() < 0.7 else 3)
    assert best((0, 0))[1] == 2 and best((1, 0))[1] == 1
    # Right in 35 of 100 cases over both places, where it said 30; what it says is taken for what it is worth.
    assert 0.3 < best((0, 0))[0] < 0.4
    # Asked where it was sure without a head, the best chance fell in half of the places and stayed in the other half.
    assert 0.5 < blending.hoped(0.8) < 0.7
    assert blending.gain(0.8, 1.0, row=0.2) < 0 < blending.gain(0.1, 1.0, row=0.2)
    # What is not fed saves nothing, whatever is known of it.
    assert blending.gain(0.1, 0.1, row=0.2) == 0


def test_the_first_guess_is_trusted_apart_and_everywhere() -> None:
    """Right whatever it says, as those of a model that drafts for a greedy text; the others never are."""
    blending = Blending()
    for _ in range(40):
        _, told = blending.blend((0, 0), [], {1: 0.35, 2: 0.32})
        blending.learn(told, 1)
    for place in ((0, 0), (3, 1)):
        (first, token), (second, _) = blending.blend(place, [(0.3, 7, None)], {1: 0.35, 2: 0.32})[0][:2]
        assert token == 1 and first > 0.85 and second < 0.1
    assert blending.gain(0.05, 1.0, row=0.1) > 0.5 > Blending().gain(0.05, 1.0, row=0.1)


def test_the_past_gives_what_followed_the_longest_end() -> None:
    """Against all texts, looked through by hand; what is left of too many is the newest."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 4, size=int(generator.integers(10, 40))).tolist() for _ in range(30)]
    past, known, found = PastTexts((8, 4, 2), most=300), list[int](), 0
    for text in [[0] * 10, *texts]:
        copied, repeated = past.after(text, 5, 10)
        ends = [at for at in range(2, len(known)) if known[at - 2 : at] == text[-2:] and known[at] != -1]
        if not ends:
            assert not copied
        elif copied:
            found += 1
            agree = [next(n for n in range(11) if n == 10 or known[at - 1 - n] != text[-1 - n]) for at in ends]
            # The newest of the longest of its orders; others may agree for longer, never for a longer order.
            assert any((n >= order) == (repeated >= order) for n in agree for order in (8, 4, 2))
            places = [at for at, n in zip(ends, agree, strict=True) if n == repeated]
            after = [known[at : at + 5] for at in places]
            assert copied in [each[: each.index(-1)] if -1 in each else each for each in after]
        past.add(text)
        known += [*text, -1]
        if len(known) > 300:
            known = known[-150:]
    assert found > 10


def test_an_earlier_text_is_copied_where_it_agrees_for_longer(target: LoadedModel) -> None:
    """Of the same prompt, under another name: the second text takes fewer passes, and only where the first is known."""
    passes = {}
    for namespaces in (("", ""), ("one", "another")):
        engine = Engine(target.model, memory=Memory(), pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))
        texts = []
        for cache_namespace in namespaces:
            seq = engine.submit(
                Request([256, 66], 24, drafter=Auto(warm=None, width=1), cache_namespace=cache_namespace)
            )
            engine.run([seq])
            texts.append(seq)
        assert texts[0].tokens == texts[1].tokens
        passes[namespaces] = texts[1].trace.passes
    assert passes[("", "")] < passes[("one", "another")]


def test_a_head_is_asked_where_it_pays() -> None:
    """One that costs nothing is asked wherever n-grams are unsure, one that costs a pass hardly ever.

    The text is drawn: n-grams know what follows in one that repeats itself.
    """
    sampler = Sampler.from_settings(temperature=1.0)
    model = tiny_transformer(0, num_layers=4)
    head = DRAFTERS["eagle-3"](model).trained
    asked = {}
    for share in (0.0, 1.0):
        engine = Engine(model, memory=Memory(), pass_seconds=lambda context: np.ones(1024))
        counts = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(advice_module, "_SHARE", share)
            # What there is to read for an answer has a price of its own.
            patch.setattr(advice_module, "_READ", share * advice_module._READ)
            seq = engine.submit(Request([1, 2, 3], 40, sampler=sampler, drafter=Auto(warm=None, head=head)))
            while not seq.finished:
                engine.step()
                counts.append(seq.states[seq.request.drafter].advice.costs.idle == 0)
        asked[share] = sum(counts) / len(counts)
    assert asked[0.0] > 0.4 and asked[1.0] < 0.1


def test_nothing_is_looked_for_where_no_row_can_pay(target: LoadedModel) -> None:
    """A row that costs more than a token is worth is not fed even for one that is certain; a cheaper one is."""
    drafted, texts = {}, []
    for power in (0.5, 1.2):
        costs = np.arange(64.0) ** power
        engine = Engine(target.model, memory=Memory(), pass_seconds=lambda context, costs=costs: costs)
        for _ in range(2):
            # The second text has all been said before.
            seq = engine.submit(Request([256, 65], 24, drafter=Auto(warm=None)))
            engine.run([seq])
        drafted[power], state = seq.trace.rows - seq.trace.passes, seq.states[seq.request.drafter]
        assert state.skips.silent == (power > 1)
        texts.append(seq.tokens)
    assert drafted[0.5] > 0 and drafted[1.2] == 0 and texts[0] == texts[1]


def test_texts_whose_drafts_cannot_pay_reckon_seldom_until_fewer_are_left(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen texts whose rows cost more than they bring: one step in nine is computed, for all in one call.

    A text that is left alone computes in every step.
    """
    reckoned: list[int] = []
    plain = auto_module.propose_together

    def counted(texts: Any, *settings: Any) -> Any:
        reckoned.append(len(texts))
        return plain(texts, *settings)

    monkeypatch.setattr(auto_module, "propose_together", counted)
    engine = Engine(target.model, pass_seconds=lambda _: np.arange(600.0) ** 1.2)
    asked = [Request([256, 65 + number], 40 if number else 60, drafter=Auto(warm=None)) for number in range(16)]
    texts = [engine.submit(each) for each in asked]
    engine.run(texts)
    together, alone = sum(each == 16 for each in reckoned), sum(each == 1 for each in reckoned)
    assert 4 <= together <= 6 and alone == 20
    monkeypatch.setattr(auto_module, "_REST", 0)
    reckoned.clear()
    engine.run([engine.submit(each) for each in asked])
    assert sum(each == 16 for each in reckoned) > 30


def test_a_head_that_cannot_be_asked_is_refused(target: LoadedModel) -> None:
    other = DRAFTERS["kangaroo"](tiny_transformer(0, num_layers=4)).trained
    with pytest.raises(SettingsError, match="auto cannot ask a head for kangaroo"):
        Engine(target.model).submit(Request([256], 4, drafter=Auto(head=other)))


def test_the_embedded_model_begins_with_what_comes_along(smollm2_int8: LLM) -> None:
    """Of the very first text, with contexts, and more with the head as well; the same text comes out."""
    prompt = "List the three primary colours and say what each of them stands for."
    accepted, texts = [], []
    for drafter in ("auto:warm=none", "auto", "auto:head=shipped"):
        smollm2_int8.memory.clear()
        # Rows that cost next to nothing, whatever machine this is and whatever else it does.
        engine = Engine(
            smollm2_int8.model,
            detokenizer=smollm2_int8.tokenizer.stream,
            memory=smollm2_int8.memory,
            pass_seconds=lambda context: 1.0 + 0.02 * np.arange(1024),
        )
        seq = engine.submit(smollm2_int8.request(smollm2_int8.encode(prompt), max_new_tokens=36, drafter=drafter))
        if (advice := seq.states[seq.request.drafter].advice) is not None:
            # As if texts before this one, and the beginning of this one, had paid for questions.
            advice.costs.credit = advice.balance = 12.0
        engine.run([seq])
        accepted.append(sum(step.accepted for step in seq.trace.steps))
        texts.append(seq.generated)
    assert texts[0] == texts[1] == texts[2]
    assert accepted[1] > accepted[0] + 3 and accepted[2] > accepted[1]


def test_the_embedded_model_has_one_kind_of_head(smollm2_int8: LLM) -> None:
    prompt, texts = "Name three rivers of Europe and say where they end.", []
    for drafter in (None, "eagle-3:tree_policy=none,length=2"):
        output = smollm2_int8.generate(prompt, max_new_tokens=32, drafter=drafter)
        texts.append(output.tokens)
    assert texts[0] == texts[1] and output.trace.passes < 28
    with pytest.raises(SettingsError, match="no head for medusa comes along for this model: make one with `decodery"):
        smollm2_int8.generate(prompt, max_new_tokens=4, drafter="medusa")


def test_contexts_are_learned_on_the_command_line(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_module, "load", lambda name, dtype: target)
    (tmp_path / "prompts").write_text("a\nb\n")
    command = ["train", "ngram-cache", "--out", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--texts", "24", "--max-new-tokens", "12"])
    assert not ended.value.code
    path = tmp_path / "out" / "contexts.safetensors"
    told = capsys.readouterr()
    assert f"--drafter auto:warm={path}" in told.out and '"first": 0.' in told.out
    assert WarmContexts.load(path).facts["corpus"]["texts"] == 24
    with pytest.raises(SystemExit) as ended:
        main([*command, "--texts", "7"])
    assert ended.value.code and "7 texts are too few" in capsys.readouterr().err
