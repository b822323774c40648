"""Pairs of an encoder-decoder and its teacher: places align, drawn texts follow the student's law, training resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.reads import Reads
from decodery.models.batch import Segment
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.step.forward_request import run_sync, score
from decodery.testing import tiny_transformer
from decodery_benchmarks.puzzles.alphabet import END_ID
from decodery_benchmarks.training.distilled import DistillationRecipe, distance, drawn, said
from decodery_benchmarks.training.one_stack import OneStackRecipe, asking, train_one_stack
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer
from decodery_benchmarks.training.seq2seq import Seq2SeqRecipe, train_seq2seq
from decodery_benchmarks.training.transductions import transduction
from decodery_benchmarks.training.two_stacks import predicted
from tiny_encoder import tiny_encoder_decoder

SHAPE = TransformerShape(16, 1, 2, 16, 64)
GIVEN = torch.tensor([[3, 40, 7, 12], [21, 5, -1, -1], [9, 9, 30, -1]])
TEXTS = torch.tensor([[4, 8, 15, END_ID], [16, END_ID, -1, -1], [23, 42, 7, 7]])


def test_the_teacher_says_the_tokens_that_the_student_says() -> None:
    teacher = random_transformer(SHAPE, 1)
    rows = said(teacher, GIVEN, TEXTS)
    assert len(rows) == int((TEXTS >= 0).sum())
    place = 0
    for source, text in zip(GIVEN.tolist(), TEXTS.tolist(), strict=True):
        told = [each for each in text if each >= 0]
        beginning = [*(each for each in source if each >= 0), *asking("")]
        for token in told:
            segment = Segment.chunk(beginning, teacher.new_cache())
            alone = run_sync(score(teacher, segment)).logits[-1].log_softmax(dim=-1)
            assert (rows[place] - alone).abs().max() < 1e-5
            # Neighbouring places say something else, so that a shift by one would be seen.
            assert place == 0 or (rows[place - 1] - alone).abs().max() > 1e-3
            beginning.append(token)
            place += 1


def test_the_distance_counts_tokens_alone_and_falls_to_zero_where_both_say_the_same() -> None:
    model = tiny_encoder_decoder()
    read = torch.cat((torch.full((3, 1), model.config.start_id), TEXTS[:, :-1].clamp(min=0)), dim=1)
    own = predicted(model, GIVEN, read)[TEXTS >= 0].log_softmax(dim=-1)
    assert abs(float(distance(model, GIVEN, TEXTS, own))) < 1e-12
    other = torch.randn(own.shape, dtype=own.dtype, generator=torch.Generator().manual_seed(3)).log_softmax(dim=-1)
    by_hand = (other.exp() * (other - own)).sum(dim=1).mean()
    wide = torch.cat((TEXTS, torch.full((3, 5), -1)), dim=1)
    assert abs(float(distance(model, GIVEN, wide, other) - by_hand)) < 1e-12 < float(by_hand)


def test_texts_are_drawn_from_the_students_law() -> None:
    model = tiny_encoder_decoder()
    chance = torch.Generator().manual_seed(0)
    most_likely = drawn(model, GIVEN, 6, DistillationRecipe(top_k=1), chance)
    for source, text in zip(GIVEN, most_likely.tolist(), strict=True):
        engine = Engine(model)
        reads = Reads(tuple(source[source >= 0].tolist()))
        seq = engine.submit(Request([model.config.start_id], logits_source=reads, max_new_tokens=6, eos_ids=(END_ID,)))
        engine.run([seq])
        assert [each for each in text if each >= 0] == seq.generated
    count, how = 4000, DistillationRecipe(temperature=0.6, top_k=4)
    first = drawn(model, GIVEN[:1].expand(count, -1), 1, how, chance)[:, 0].bincount(minlength=59).double()
    logits = predicted(model, GIVEN[:1], torch.tensor([[model.config.start_id]]))[0, 0]
    kept = logits.topk(4).indices

    def misfit(temperature: float) -> float:
        wanted = count * (logits[kept] / temperature).softmax(dim=0)
        return float(((first[kept] - wanted).square() / wanted).sum())

    # 16.3: chi-square of 3 degrees of freedom at 1e-3.
    assert float(first.sum()) == float(first[kept].sum()) and misfit(0.6) < 16.3 < misfit(1.0)


@pytest.mark.integration
def test_a_pair_is_trained_and_goes_on_where_it_was(tmp_path: Path) -> None:
    kind = transduction("normalise")
    alone = OneStackRecipe(SHAPE, steps=2, batch=2, every=1, held=2)
    found = train_one_stack(kind, tmp_path / "teacher", recipe=alone)
    assert train_one_stack(kind, tmp_path / "teacher", recipe=alone) == found
    teacher = dc.models.loaders.load.load(tmp_path / "teacher")
    recipe = Seq2SeqRecipe(hidden=16, heads=2, inner=16, encoder_layers=1, decoder_layers=1, batch=2, steps=2, every=1,
                           held=2)  # fmt: skip
    pair = train_seq2seq(kind, tmp_path / "pair", recipe=recipe, teacher=teacher)
    assert train_seq2seq(kind, tmp_path / "pair", recipe=recipe, teacher=teacher) == pair
    assert isinstance(dc.load(tmp_path / "pair").model, EncoderDecoder)
    other = replace(teacher, model=tiny_transformer(0))
    for wrong in ({"recipe": replace(recipe, block=2)}, {"teacher": other}):
        settings = {"recipe": recipe, "teacher": teacher} | wrong
        with pytest.raises(SettingsError, match=r"leave block out|another vocabulary"):
            train_seq2seq(transduction("reorder"), tmp_path / "no", **settings)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="share from 0 to 1"):
        DistillationRecipe(share=2.0)
