"""Lexical units: what placeholders ask, what becomes of the answers, how they are trained, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decodery.budget.base import Budget
from decodery.core.tree import UNKNOWN
from decodery.decode.engine import Engine
from decodery.decode.request import Request
from decodery.draft.combine import First, Fuse
from decodery.draft.forced import Forced
from decodery.draft.lexical_unit import LexicalUnit
from decodery.draft.token_recycling import TokenRecycling
from decodery.errors import DecoderyError
from decodery.model.placeholders import Placeholders
from decodery.source.guidance import Guidance
from decodery.testing import Garbage, TableModel, check_identical, check_state, decode, tiny_transformer
from decodery.verify.lexical_unit import LexicalUnit as LexicalUnitRule

TARGET = tiny_transformer(0)
PROMPT = [5] * 6 + [7, 8, 9] * 4


class Scripted(TableModel):
    """Says the next token of a fixed text, prompt included, whatever it reads; the last one for ever."""

    def __init__(self, text: list[int], vocab_size: int = 16) -> None:
        super().__init__(vocab_size)
        self.text = text

    def logits(self, tokens) -> torch.Tensor:
        row = torch.zeros(self.vocab_size, dtype=torch.float64)
        row[self.text[min(len(tokens), len(self.text) - 1)]] = 20.0
        return row


class Unigram(TableModel):
    """A model that ignores what it reads."""

    def logits(self, tokens) -> torch.Tensor:
        return super().logits([])


ANY = Placeholders(torch.zeros(3, 1))
"""For models over a table, whose embeddings are tokens: they read token 0."""


def test_a_model_that_understands_placeholders_gives_whole_units() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1, 2, 3, 4, 5]
    drafter = LexicalUnit(units=ANY)
    for rule in (None, LexicalUnitRule()):
        (seq,) = decode(Scripted([1, *text]), [[1]], drafter=drafter, rule=rule, max_new_tokens=14)
        assert seq.generated == text[:14]
        # The first pass has placeholders alone; every other has a unit of four, of which the first token is the bonus.
        assert [step.emitted for step in seq.trace.decoding] == [1, 4, 4, 4]


def test_units_end_before_doubt_and_before_repetition() -> None:
    (seq,) = decode(Scripted([1, 2, 3, 3, 4, 5, 6, 7]), [[1]], drafter=LexicalUnit(units=ANY), max_new_tokens=7)
    assert [step.emitted for step in seq.trace.decoding] == [1, 1, 4]
    flat = Unigram(8, spread=0.1)
    (doubting,) = decode(flat, [[1]], drafter=LexicalUnit(beta=0.9, units=ANY), max_new_tokens=9)
    assert {step.emitted for step in doubting.trace.decoding} == {1}


class Misled(Scripted):
    """A model that expects the wrong token wherever it reads a placeholder."""

    def logits(self, tokens) -> torch.Tensor:
        row = super().logits(tokens)
        return row.roll(5) if tokens[-1] == 0 else row


def test_every_pass_finds_a_unit_whatever_becomes_of_the_last_one() -> None:
    # Placeholders stand behind the pending token and behind each drafted one, as chains of their own.
    text = list(range(1, 16))
    drafter = LexicalUnit(beta=0.0, units=ANY)
    engine = Engine(Misled([1, *text]))
    seq = engine.submit(Request([1], drafter=drafter, max_new_tokens=15))
    for _ in range(3):
        engine.step()
    tree = drafter.propose(seq, Budget(64, 12))
    assert tree.tokens.tolist() == [seq.pending, *seq.draft_state.unit, *[UNKNOWN] * 12]
    assert tree.depths[4:].tolist() == [*(1, 2, 3), *(2, 3, 4), *(3, 4, 5), *(4, 5, 6)]
    assert sorted(tree.inputs) == list(range(4, 16)) and not len(tree.children(3))
    # Every unit was wrong, and the next one was there all the same.
    engine.run([seq])
    assert seq.generated == text and {step.nodes for step in seq.trace.decoding[1:4]} == {15}


def test_units_of_another_model_or_none_are_refused_with_what_to_do(tmp_path: Path) -> None:
    def refused(model, **settings) -> str:
        with pytest.raises(DecoderyError) as caught:
            decode(model, [[1]], drafter=LexicalUnit(**settings))
        return str(caught.value)

    assert "decodery train units" in refused(TARGET) and "decodery train units" in refused(TARGET, units=ANY)
    assert "decodery train units" in refused(TARGET, units=str(tmp_path / "units.safetensors"))
    assert "--span 5" in refused(Scripted([1, 2]), span=5, units=ANY)
    other = Placeholders(torch.zeros(3, 32), {"vocabulary": "another"})
    other.save(tmp_path / "units.safetensors")
    assert "another model" in refused(TARGET, units=str(tmp_path))
    with pytest.raises(DecoderyError, match="takes no input embeddings"):
        decode(TARGET, [[1]], drafter=LexicalUnit(units=other), source=Guidance(1.5))
    for damaged in (b"", b"\x08\0\0\0\0\0\0\0{}      ", (tmp_path / "units.safetensors").read_bytes()[:-8]):
        (tmp_path / "damaged").write_bytes(damaged)
        assert "holds no units" in refused(TARGET, units=str(tmp_path / "damaged"))


def test_placeholders_go_with_other_drafters_and_constraints() -> None:
    units = LexicalUnit(beta=0.0, units=Placeholders(torch.ones(3, 32)))
    alone = TokenRecycling(nodes=8, scope="request")
    for drafter in (Fuse((units, alone)), Fuse((alone, units)), First((units, alone)), Forced(units)):
        check_identical(TARGET, [PROMPT, [3]], drafter=drafter, max_new_tokens=20)
        check_state(TARGET, [PROMPT], drafter=drafter, max_new_tokens=12)


def test_units_are_trusted_only_from_beta_on() -> None:
    drafter = LexicalUnit(beta=0.0, units=Placeholders(TARGET.weights.embedding[:3].float()))
    check_identical(TARGET, [PROMPT, [3]], drafter=drafter, rule=LexicalUnitRule(beta=1.01))
    (trusting,) = decode(TARGET, [PROMPT], drafter=drafter, rule=LexicalUnitRule(beta=1e-9), max_new_tokens=40)
    (plain,) = decode(TARGET, [PROMPT], max_new_tokens=40)
    assert trusting.generated != plain.generated
    assert trusting.trace.tokens_per_pass > 2
    # Placeholders are never text, and drafts that say nothing of their chance are checked.
    assert min(trusting.generated) >= 0
    check_identical(TARGET, [PROMPT], drafter=Garbage(), rule=LexicalUnitRule(beta=1e-9))
