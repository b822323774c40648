"""CPPD: drafts by place from what an encoder has read keep every law, and what is trained says short texts at once."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from click.testing import CliRunner

from decodery.cli.main import cli
from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.reads import Reads
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.artifact import Artifact
from decodery.models.trained.slots import Slots
from decodery.sampling import Sampler
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.draft_length.fixed import Fixed
from decodery.speculative.drafters.cppd import CPPD
from decodery.testing import LawBroken, check_batch, check_distribution, check_identical, check_state, tiny_transformer
from decodery.training.cppd import CPPDRecipe, CPPDTrainee, emitted, figures, states_of, train_cppd, written
from decodery.training.kind import Run
from decodery_benchmarks.puzzles.alphabet import tokenizer
from decodery_benchmarks.training.seq2seq import Seq2SeqRecipe, train_seq2seq
from decodery_benchmarks.training.transductions import sources, transduction
from tiny_encoder import tiny_encoder_decoder
from wrong_rules import Credulous, NoResidual

START, END = 58, 56
MODEL = tiny_encoder_decoder()
TARGET = LoadedModel(MODEL, tokenizer(), None, "tiny", "float64")
SOURCES = [
    [7 * start % 50 + step * place % 7 for place in range(4 + start % 3)] for start in range(9) for step in (1, 3)
]
RECIPE = CPPDRecipe(layers=1, longest=7, symbols=12, steps=80, batch=18, lr=5e-3, every=25)


@cache
def trained() -> Slots:
    """Slots that know most of what the tiny model writes of these sources, those held out among them."""
    with TemporaryDirectory() as folder:
        return train_cppd(Run(TARGET, Path(folder), (RECIPE,)), [*SOURCES, SOURCES[-1], *SOURCES])


def test_drafts_by_place_keep_every_law() -> None:
    drafter, seen = CPPD(trained()), Reads(tuple(SOURCES[4]))
    common = {"drafter": drafter, "logits_source": seen}
    for sampler in (Sampler.from_settings(temperature=0.8), Sampler.from_settings(repetition_penalty=1.3)):
        check_identical(MODEL, [[START], [START, 3]], sampler=sampler, seeds=(1,), max_new_tokens=9, **common)
    (run,) = check_identical(MODEL, [[START]], seeds=(0,), max_new_tokens=8, **common)
    assert run.trace.ledger.passes["encoder"] == 1 and len(run.trace.steps) < 8
    check_identical(MODEL, [[START]], draft_length=Fixed(1), seeds=(0,), max_new_tokens=8, **common)
    check_identical(MODEL, [[START]], acceptance_rule=Rejection(), seeds=(0,), max_new_tokens=8, **common)
    check_identical(
        MODEL, [[START]], drafter=CPPD(trained(), tree_policy="eagle-2:nodes=6"), logits_source=seen, max_new_tokens=8
    )
    check_batch(MODEL, [[START], [START, 3]], seeds=(0,), max_new_tokens=6, **common)
    check_state(MODEL, [[START]], max_new_tokens=6, **common)
    wrong = common | {"drafter": CPPD(CPPDTrainee(MODEL, [([1, 2], [3, 4, 5, 6])], (END,), RECIPE).slots)}
    check_identical(MODEL, [[START]], seeds=(0,), max_new_tokens=8, tested="drafted", **wrong)
    with pytest.raises(LawBroken, match="departs from plain"):
        check_identical(MODEL, [[START]], acceptance_rule=Credulous(), seeds=(0,), max_new_tokens=8, **wrong)


def test_slots_learn_what_the_model_writes(tmp_path: Path) -> None:
    ends = TARGET.tokenizer.eos_ids
    pairs = written(MODEL, SOURCES, ends, RECIPE.longest + 1, tmp_path)
    assert written(MODEL, SOURCES, ends, RECIPE.longest + 1, tmp_path) == pairs
    slots = trained()
    found, before = figures(MODEL, slots, pairs), figures(MODEL, CPPDTrainee(MODEL, pairs, ends, RECIPE).slots, pairs)
    assert found["passes"] < 0.6 * before["passes"] and found["exact"] > 0.5 > before["exact"]
    # What is counted is what decoding does.
    engine = Engine(MODEL)
    runs = [
        Request(
            [START], logits_source=Reads(tuple(source)), drafter=CPPD(slots), max_new_tokens=len(text), eos_ids=ends
        )
        for source, text in pairs
    ]
    texts = [engine.submit(each) for each in runs]
    engine.run(texts)
    assert [seq.generated for seq in texts] == [text for _, text in pairs]
    assert sum(len(seq.trace.steps) for seq in texts) == round(found["passes"] * len(pairs))
    assert emitted([1, 2, 9, 4, 5], [1, 2, 3, 4, 5]) == [3, 2] and emitted([9, 1, 2], [1, 2, 3]) == [1, 1, 1]
    # Sources side by side are read as each by itself, and what counts is looked at by nobody.
    both, alone = states_of(MODEL, [SOURCES[0], SOURCES[4]]), states_of(MODEL, [SOURCES[0]])
    said = slots.say(*alone)
    assert (slots.say(*both, torch.randn(5, 32)).logits[0] - said.logits[0]).abs().max() < 1e-4 < said.logits.std()
    trainee = CPPDTrainee(MODEL, pairs, ends, RECIPE)
    trainee.loss(pairs).backward()
    assert all(bool(tensor.grad.any()) for tensor in trainee.parameters.values())  # type: ignore[union-attr]
    assert figures(MODEL, slots, pairs[:1])["passes"] == len(texts[0].trace.steps)


def test_nothing_is_drafted_behind_the_end_that_is_expected() -> None:
    slots = trained()
    tensors = {name: tensor.clone() for name, tensor in slots.tensors.items()}
    tensors["said.weight"].zero_()
    tensors["said.bias"].copy_(torch.where(slots.tokens == int(slots.tokens[1]), 1.0, 0.0))
    silent = CPPD(Slots(tensors, slots.tokens, (int(slots.tokens[1]),), slots.facts, slots.model))
    engine = Engine(MODEL)
    seq = engine.submit(Request([START], logits_source=Reads((1, 2)), drafter=silent, max_new_tokens=6))
    engine.run([seq])
    assert [step.nodes for step in seq.trace.steps] == [1, *[0] * (len(seq.trace.steps) - 1)] and len(
        seq.trace.steps
    ) > 1


def test_slots_are_trained_by_one_command_kept_and_refused(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "slots"
    shape = Seq2SeqRecipe(hidden=16, heads=2, inner=16, encoder_layers=1, decoder_layers=1, batch=2, steps=1, held=1)
    train_seq2seq(transduction("normalise"), model, recipe=shape)
    lines = tmp_path / "sources.txt"
    lines.write_text("\n".join(islice(sources(transduction("normalise"), "train"), 12)) + "\n")
    command = ["train", "cppd", str(lines), "-m", str(model), "--out", str(out), "--texts", "12", "--steps", "2",
               "--batch", "2", "--longest", "4"]  # fmt: skip
    for _ in range(2):
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0 and "--drafter cppd:slots=" in result.output, result.output
    kept = Slots.load(out / Slots.FILE)
    assert kept.count <= 5 and kept.facts["texts"] == 12 and "symbol" not in kept.tensors
    lines = CliRunner().invoke(cli, ["generate", "3 may 1988", "-m", str(model), "--drafter", f"cppd:slots={out}"])
    assert lines.exit_code == 0, lines.output

    found = Artifact.read(out / Slots.FILE, "slots", "")
    for change in ({"place": torch.zeros(2, 3)}, {"tokens": torch.tensor([3, 1])}, {"extra": torch.zeros(1)}):
        Artifact("slots", {**found.tensors, **change}, found.facts, found.model).save(tmp_path / "broken")
        with pytest.raises(CorruptFile, match="train cppd"):
            Slots.load(tmp_path / "broken")
    with pytest.raises(SettingsError, match="trained for another model"):
        kept.check(MODEL)
    with pytest.raises(SettingsError, match="train cppd SOURCES"):
        CPPD().bind(MODEL)
    with pytest.raises(UnsupportedModel, match="cppd needs a source that an encoder reads, which Transformer does not"):
        Engine(tiny_transformer(0)).submit(Request([1], drafter=CPPD(kept)))
    with pytest.raises(SettingsError, match="an encoder has read"):
        train_cppd(Run(LoadedModel(tiny_transformer(0), tokenizer(), None, "", ""), tmp_path / "new"), SOURCES)
    with pytest.raises(PromptError, match="give at least 9"):
        train_cppd(Run(TARGET, tmp_path / "new"), SOURCES[:3])
    with pytest.raises(SettingsError, match="made with other settings or other data"):
        written(MODEL, SOURCES, (END,), 4, out)
    with pytest.raises(SettingsError, match="layers is 0: give one in"):
        CPPDRecipe(layers=0)


def test_drawn_texts_follow_the_law() -> None:
    drafter, few = CPPD(trained()), Sampler.from_settings(temperature=1.5, top_k=3)
    settings = {"logits_source": Reads(tuple(SOURCES[4])), "sampler": few, "length": 3, "draws": 150}
    check_distribution(MODEL, [START], drafter=drafter, acceptance_rule=Rejection(), **settings)
    with pytest.raises(LawBroken, match="do not follow"):
        check_distribution(MODEL, [START], drafter=drafter, acceptance_rule=NoResidual(), **settings)
