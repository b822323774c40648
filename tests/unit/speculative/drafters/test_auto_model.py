"""`auto` with a second model: asked where that pays, followed where it is right, and never heard in the text."""

from __future__ import annotations

import numpy as np
import pytest

import decodery.speculative.drafters.advice as parts_module
import decodery.speculative.drafters.model_advice as advice_module
from decodery.core.errors import SettingsError, VocabularyMismatch
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.protocol import LanguageModel
from decodery.sampling import Sampler
from decodery.speculative.drafters.advice import Opinion
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.eagle_3 import EAGLE3Head
from decodery.speculative.drafters.model_advice import ModelAdvice
from decodery.speculative.heads.advice import HeadAdvice
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.stores.blending import Blending
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.step.sequence import Sequence
from decodery.testing import TableModel, check_identical, decode, tiny_transformer
from decodery.testing.models import Counted, to_int8

TARGET, OTHER = tiny_transformer(0), tiny_transformer(0, num_layers=1)
TARGETS = [to_int8(tiny_transformer(seed)) for seed in (3, 4)]
LONG = [5] * 6 + [7, 8, 9] * 20


def engine(model: LanguageModel) -> Engine:
    """Rows that cost next to nothing, whatever machine this is."""
    return Engine(model, memory=Memory(), pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))


def written(model: LanguageModel, drafter: Drafter, *numbers: int, temperature: float = 0.0) -> Sequence:
    """The last of some texts, which are written one after the other."""
    loop, sampler = engine(model), Sampler.from_settings(temperature=temperature)
    for number in numbers:
        seq = loop.submit(Request([1, 2, 3, number], 120, drafter=drafter, sampler=sampler))
        loop.run([seq])
    return seq


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_that_knows_what_no_copy_does_is_followed(temperature: float) -> None:
    """Texts of a table of three tokens' contexts hold hardly anything twice; the other model has the same table."""
    target, other = (TableModel(64, order=3, seed=1, spread=20) for _ in range(2))
    # Of a size that is not known, so that asking it is believed to take a tenth of a pass.
    found = {
        "alone": written(target, Auto(warm=None, most=4), 2, temperature=temperature),
        "both": written(target, Auto(warm=None, most=4, model=other), 0, 1, 2, temperature=temperature),
        "chain": written(target, DraftModel(other, length=4), 2, temperature=temperature),
    }
    assert len({tuple(seq.tokens) for seq in found.values()}) == 1
    speed = {name: seq.trace.tokens_per_pass for name, seq in found.items()}
    # Questions about this text may lose little at first, however much the adviser saved in others.
    assert speed["alone"] < 1.2 and speed["both"] > 0.85 * speed["chain"] > 4.1
    # No more questions either, nor rows that are fed in vain.
    drafts = {name: seq.trace.ledger.passes.get("draft", 0) for name, seq in found.items()}
    assert drafts["alone"] == 0 and drafts["both"] < 1.05 * drafts["chain"]
    assert found["both"].trace.rows < 1.2 * found["chain"].trace.rows


def test_a_model_that_knows_nothing_is_not_asked_where_copies_know_all() -> None:
    """Texts of a table of one token's contexts run in circles; the other model expects other tokens, and is sure."""
    target, other = (TableModel(16, order=1, seed=seed, spread=20) for seed in (1, 2))
    alone, chain = (written(target, drafter, 0, 1) for drafter in (Auto(warm=None, most=8), DraftModel(other)))
    both = written(target, Auto(warm=None, most=8, model=other), 0, 1)
    assert both.tokens == alone.tokens == chain.tokens
    assert alone.trace.tokens_per_pass > 5 and chain.trace.tokens_per_pass < 2
    assert both.trace.tokens_per_pass > 0.95 * alone.trace.tokens_per_pass
    assert both.trace.ledger.passes.get("draft", 0) < 0.1 * both.trace.passes


def test_a_model_is_asked_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that costs nothing in every step, one that costs more than a pass in hardly any."""
    target, other = (TableModel(64, order=3, seed=1, spread=20) for _ in range(2))
    asked = {}
    for share in (0.0, 1.5):
        monkeypatch.setattr(advice_module, "_SHARE", share)
        seq = written(target, Auto(warm=None, model=other), 0)
        asked[share] = seq.trace.ledger.passes.get("draft", 0) / seq.trace.passes
    assert asked[0.0] > 1 and asked[1.5] < 0.1


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_an_adviser_that_never_helps_takes_less_than_one_pass_in_a_hundred(share: float) -> None:
    """A second model that is sure of wrong tokens is asked once passes have paid for that, a dear one later."""
    target, other = (TableModel(64, order=3, seed=seed, spread=20) for seed in (1, 2))
    loop, drafter = engine(target), Auto(warm=None, model=other)
    for number in range(2):
        seq = loop.submit(Request([1, 2, 3, number], 60, drafter=drafter))
        costs = seq.states[seq.request.drafter].advice.costs
        costs.share = share
        loop.run([seq])
        assert costs.taken - costs.brought < 0.01 * costs.passed
    assert (costs.taken > 0) == (share < 0.5)


@pytest.mark.parametrize("bounded", [True, False])
def test_what_was_earned_with_other_texts_is_not_spent_on_one(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adviser has the table of one model's texts, and expects other tokens in those of the next one."""
    if not bounded:
        monkeypatch.setattr(parts_module, "_OF_STEP", 100.0)
    memory, other = Memory(), TableModel(64, order=3, seed=1, spread=20)
    for seed in (1, 2):
        loop = Engine(
            TableModel(64, order=3, seed=seed, spread=20), memory=memory,
            pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024),
        )  # fmt: skip
        # Prices of passes are known per model, and so are advisers of it: what is shared is what the adviser earned.
        seq = loop.submit(Request([1, 2, 3], 200, drafter=Auto(warm=None, model=other)))
        costs = seq.states[seq.request.drafter].advice.costs
        taken, brought, passed = costs.taken, costs.brought, costs.passed
        loop.run([seq])
    assert brought > taken + 20
    lost = (costs.taken - taken - costs.brought + brought) / (costs.passed - passed)
    assert (lost < 0.01) == bounded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_while_no_question_can_be_paid_the_text_is_in_arrays(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it is to earn, and with what it has earned, as in steps that it takes by itself."""
    other, sampler = TARGETS[1], Sampler.from_settings(temperature=temperature)

    def found(silent: bool) -> tuple[list[list[int]], float, float, float]:
        with monkeypatch.context() as patch:
            if not silent:
                patch.setattr(ModelAdvice, "silence", lambda advice, seq: 0)
            loop, in_arrays, steps, tokens = engine(TARGETS[0]), 0, 0, []
            for number in range(2):
                given = Request([1, 2, 3, number], 150, drafter=Auto(warm=None, model=other), sampler=sampler)
                seq = loop.submit(given)
                advice = seq.states[seq.request.drafter].advice
                # Dear at first, so that it is not asked for long.
                advice.costs.share = (0.5, 0.02)[number]
                while not seq.finished:
                    loop.step()
                    in_arrays += len(loop._arrays)
                    steps += 1
                tokens.append(seq.tokens)
                assert seq.trace.notes[-1] == advice.explained()
            return tokens, in_arrays / steps, advice.costs.passed, advice.costs.taken

    texts, share, passed, taken = found(True)
    same, none, seconds, paid = found(False)
    assert texts == same and taken > 0 and paid > 0
    assert share > 0.7 and none == 0
    # Questions come in other steps where other drafts end otherwise, but the same steps are accounted for.
    assert passed == pytest.approx(seconds, rel=0.05)


def test_while_no_question_to_a_head_can_be_paid_the_text_is_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in arrays show no states, so that the first question after them waits for those of another step."""
    target, late = TARGETS[0], list[int]()
    tensors, settings = EAGLE3Head.untrained(target, 0)
    head, real = TrainedHead("eagle-3", tensors, settings), HeadAdvice.most_likely

    def checked(advice: HeadAdvice, seq: Sequence, tree: DraftTree, nodes: list[int]) -> Opinion:
        late.extend(len(seq.tokens) - each.start - 1 - len(each.tokens) for each in advice.head.fresh[-1:])
        return real(advice, seq, tree, nodes)

    monkeypatch.setattr(HeadAdvice, "most_likely", checked)

    def found(silent: bool) -> tuple[list[list[int]], float, float]:
        with monkeypatch.context() as patch:
            if not silent:
                patch.setattr(HeadAdvice, "silence", lambda advice, seq: 0)
            loop, in_arrays, steps, tokens = engine(target), 0, 0, []
            for number in range(2):
                seq = loop.submit(Request([1, 2, 3, number], 150, drafter=Auto(warm=None, head=head)))
                advice = seq.states[seq.request.drafter].advice
                advice.costs.share = (0.5, 0.02)[number]
                while not seq.finished:
                    loop.step()
                    in_arrays += len(loop._arrays)
                    steps += 1
                tokens.append(seq.tokens)
            taken = advice.costs.taken
            if not silent:
                assert advice.reaches(0)
            advice.pass_over(1, 1, 1.0, 1.0)
            assert not advice.reaches(0)
            return tokens, in_arrays / steps, taken

    texts, share, taken = found(True)
    same, none, paid = found(False)
    assert texts == same and taken > 0 and paid > 0
    assert share > 0.7 and none == 0
    assert late and {*late} == {0}


def test_no_answer_saves_more_than_the_most() -> None:
    random, blending = np.random.default_rng(4), Blending()
    for _ in range(40):
        best, said, row, other = random.random(4)
        blending.blend((0, 0), [(best, 3, None)], {3: said, 5: 1 - said})
        assert blending.gain(other, 1.0, row) <= blending.most(row) + 1e-12
        assert max(blending.gain(place / 10, 1.0, row) for place in range(10)) > blending.most(row) - 1e-12


def test_the_end_is_asked_about_where_earlier_answers_kept_their_promise() -> None:
    seq = engine(TARGET).submit(Request([1, 2], 9, drafter=Auto(warm=None, model=OTHER)))
    advice = seq.states[seq.request.drafter].advice
    advice.begin(Budget(8, 8, pass_seconds=lambda context: np.ones(64)))
    advice.costs.share = 0.1
    # Nothing was earned yet.
    assert not advice.choose(seq, 0.4)
    advice.costs.credit = advice.balance = 12.0
    assert advice.choose(seq, 0.4)
    advice.begin(advice.budget)
    advice.costs.saved(0.0, 100.0, 10.0)
    assert not advice.choose(seq, 0.4) and advice.choose(seq, 2.0)
    # Without credit it is not, whatever it promises.
    advice.costs.spend(1000.0)
    assert not advice.choose(seq, 2.0)


def test_what_is_to_be_read_first_is_part_of_the_price() -> None:
    seq = engine(TARGET).submit(Request(LONG, 60, drafter=Auto(warm=None, model=OTHER)))
    advice = seq.states[seq.request.drafter].advice
    dear = Budget(8, 8, pass_seconds=lambda context: np.arange(1.0, 200.0))
    advice.begin(dear)
    assert advice.unread(seq) == len(LONG) and not advice.choose(seq, 0.9)
    advice.costs.credit, advice.costs.share, advice.costs.fresh, advice.balance = 1000.0, 0.1, False, 1000.0
    # Rows take a second each and a token two: a fifth of a pass, and a tenth of 65 rows over 60 / 8 questions.
    assert not advice.choose(seq, 0.5) and advice.choose(seq, 0.6)


def test_what_a_model_is_believed_to_cost_is_its_share_of_the_weights() -> None:
    loop = engine(TARGET)
    for layers, least, most in ((1, 0.4, 0.7), (4, 1.4, 2.0)):
        other = tiny_transformer(0, num_layers=layers)
        seq = loop.submit(Request([1, 2], 4, drafter=Auto(warm=None, model=other)))
        assert least < seq.states[seq.request.drafter].advice.costs.share < most


def test_of_a_long_text_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the second model's context is shorter than the text: it begins anew, and no row is beyond it."""
    monkeypatch.setattr(advice_module, "_WAITING", 20)
    other = tiny_transformer(0, num_layers=2, max_positions=40)
    drafter = Auto(warm=None, model=Counted(other), most=8)
    (seq,) = check_identical(TARGET, [LONG], drafter=drafter, seeds=(0,), max_new_tokens=60)
    advice = seq.states[seq.request.drafter].advice
    assert isinstance(advice, ModelAdvice) and advice.start > len(LONG)
    assert advice.follower.tokens == seq.tokens[advice.start :][: len(advice.follower.tokens)]
    assert len(advice.follower.tokens) <= 40 and seq.trace.ledger.rows["draft"] < 300


def test_forks_and_preempted_texts_go_on_as_the_text_would() -> None:
    target, other = to_int8(TARGET), Counted(to_int8(OTHER))
    settings = {"drafter": Auto(warm=None, model=other), "sampler": Sampler.from_settings(temperature=0.8)}
    loop, plain = engine(target), engine(target)
    seq = loop.submit(Request([5, 6, 7, 5, 6, 7], 30, seed=1, **settings))
    twins = []
    for _ in range(5):
        loop.step()
        twins.append(loop.fork(seq))
    twins[3].rebind(seed=2)
    loop.preempt(twins[1])
    loop.preempt(twins[3])
    loop.run([seq, *twins])
    expected = plain.submit(Request([5, 6, 7, 5, 6, 7], 30, seed=1, sampler=settings["sampler"]))
    plain.run([expected])
    assert all(each.tokens == expected.tokens for each in (seq, *twins[:3], twins[4]))
    assert twins[3].tokens != expected.tokens
    advisers = [each.states[each.request.drafter].advice for each in (seq, *twins)]
    assert len({id(each.blending) for each in advisers}) == 1
    assert len({id(each.follower) for each in advisers}) == len(advisers)
    # What one holds is the beginning of its own text, whoever wrote beside it.
    for each, advice in zip((seq, *twins), advisers, strict=True):
        assert advice.follower.tokens == each.tokens[: len(advice.follower.tokens)]


def test_texts_share_the_passes_of_their_questions() -> None:
    other = Counted(OTHER)
    loop = engine(TARGET)
    drafter = Auto(warm=None, model=other)
    texts = [loop.submit(Request([number, 2, 3], 16, drafter=drafter)) for number in range(6)]
    loop.run(texts)
    assert 0 < len(other.rows) < sum(seq.trace.ledger.passes.get("draft", 0) for seq in texts) / 2
    assert [seq.tokens for seq in texts] == [
        seq.tokens for seq in decode(TARGET, [[number, 2, 3] for number in range(6)], max_new_tokens=16)
    ]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="give one of the two"):
        resolve("drafter", "auto:head=shipped,model=smollm2-draft")
    with pytest.raises(VocabularyMismatch, match="65 tokens and the other 64"):
        engine(TARGET).submit(Request([1], drafter=Auto(model=tiny_transformer(vocab_size=65))))
