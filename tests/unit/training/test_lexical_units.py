"""Lexical units: what placeholders ask, what becomes of the answers, how they are trained, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from commands import inside
from decodery.core.errors import DecoderyError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.extras.superposed.ngrams import load_ngrams
from decodery.llm.llm import LLM
from decodery.logits_sources.guidance import Guidance
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.placeholders import Placeholders
from decodery.speculative.acceptance.lexical_unit import LexicalUnit as LexicalUnitRule
from decodery.speculative.drafters.combine import Cascade, Union
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.lexical_unit import LexicalUnit
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import MASK_TOKEN
from decodery.testing import Garbage, check_identical, check_state, decode, tiny_transformer
from decodery.testing.models import to_int8
from decodery.training import loop
from decodery.training.ahead import sure_runs
from decodery.training.corpus import Corpus
from decodery.training.data import write_texts
from decodery.training.kind import Run
from decodery.training.placeholders import UNITS, PlaceholderTrainee, UnitsRecipe, train_units
from scripted import Scripted, Unigram
from tiny_models import VOCAB, make_tokenizer

TARGET = tiny_transformer(0)
PROMPT = [5] * 6 + [7, 8, 9] * 4


ANY = Placeholders(torch.zeros(3, 1))
"""For models over a table, whose embeddings are tokens: they read token 0."""


def test_a_model_that_understands_placeholders_gives_whole_units() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1, 2, 3, 4, 5]
    drafter = LexicalUnit(units=ANY)
    for rule in (None, LexicalUnitRule()):
        (seq,) = decode(Scripted([1, *text]), [[1]], drafter=drafter, acceptance_rule=rule, max_new_tokens=14)
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
    # Placeholders stand after the last token and after each drafted one, as chains of their own.
    text = list(range(1, 16))
    drafter = LexicalUnit(beta=0.0, units=ANY)
    engine = Engine(Misled([1, *text]))
    seq = engine.submit(Request([1], drafter=drafter, max_new_tokens=15))
    for _ in range(3):
        engine.step()
    tree = drafter.propose(seq, Budget(64, 12))
    assert tree.tokens.tolist() == [seq.last_token, *seq.states[seq.request.drafter].unit, *[MASK_TOKEN] * 12]
    assert tree.depths[4:].tolist() == [*(1, 2, 3), *(2, 3, 4), *(3, 4, 5), *(4, 5, 6)]
    assert tree.inputs is not None and len(tree.inputs) == 12 and not len(tree.children(3))
    # Every unit was wrong, and the next one was there all the same.
    engine.run([seq])
    assert seq.generated == text and {step.nodes for step in seq.trace.decoding[1:4]} == {15}


def test_units_of_another_model_or_none_are_refused_with_what_to_do(tmp_path: Path) -> None:
    def refused(model, **settings) -> str:
        with pytest.raises(DecoderyError) as caught:
            decode(model, [[1]], drafter=LexicalUnit(**settings))
        return str(caught.value)

    assert "decodery train lexical-units" in refused(TARGET) and "decodery train lexical-units" in refused(
        TARGET, units=ANY
    )
    assert "decodery train lexical-units" in refused(TARGET, units=str(tmp_path / "units.safetensors"))
    assert "--span 5" in refused(Scripted([1, 2]), span=5, units=ANY)
    other = Placeholders(torch.zeros(3, 32), {"vocabulary": "another"})
    other.save(tmp_path / "units.safetensors")
    assert "another model" in refused(TARGET, units=str(tmp_path))
    with pytest.raises(
        DecoderyError, match="needs rows given as embeddings, which the logits source guidance does not give"
    ):
        decode(TARGET, [[1]], drafter=LexicalUnit(units=other), logits_source=Guidance(1.5))
    for damaged in (b"", b"\x08\0\0\0\0\0\0\0{}      ", (tmp_path / "units.safetensors").read_bytes()[:-8]):
        (tmp_path / "damaged").write_bytes(damaged)
        assert "holds no set of placeholders" in refused(TARGET, units=str(tmp_path / "damaged"))


def test_placeholders_go_with_other_drafters_and_constraints() -> None:
    units = LexicalUnit(beta=0.0, units=Placeholders(torch.ones(3, 32)))
    alone = TokenRecycling(nodes=8, scope="request")
    for drafter in (Union((units, alone)), Union((alone, units)), Cascade((units, alone)), Forced(units)):
        check_identical(TARGET, [PROMPT, [3]], drafter=drafter, max_new_tokens=20)
        check_state(TARGET, [PROMPT], drafter=drafter, max_new_tokens=12)


def test_units_are_trusted_only_from_beta_on() -> None:
    drafter = LexicalUnit(beta=0.0, units=Placeholders(TARGET.weights.embedding[:3].float()))
    check_identical(TARGET, [PROMPT, [3]], drafter=drafter, acceptance_rule=LexicalUnitRule(beta=1.01))
    (trusting,) = decode(
        TARGET, [PROMPT], drafter=drafter, acceptance_rule=LexicalUnitRule(beta=1e-9), max_new_tokens=40
    )
    (plain,) = decode(TARGET, [PROMPT], max_new_tokens=40)
    assert trusting.generated != plain.generated
    assert trusting.trace.tokens_per_pass > 2
    # Placeholders are never text, and drafts that say nothing of their chance are checked.
    assert min(trusting.generated) >= 0
    check_identical(TARGET, [PROMPT], drafter=Garbage(), acceptance_rule=LexicalUnitRule(beta=1e-9))


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    tokenizer = Tokenizer(make_tokenizer(), bos_id=256, eos_ids=(257,))
    model = tiny_transformer(3, vocab_size=VOCAB, dtype=torch.float32)
    return LoadedModel(model, tokenizer, None, "tiny", "float32")


@pytest.fixture(scope="module")
def written(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[number % 50 + 1, 7] for number in range(40)]
    return write_texts(target, prompts, tmp_path_factory.mktemp("written") / "text", max_new_tokens=24, top=4)


def test_runs_are_counted_from_each_token_on(written: Corpus) -> None:
    for alpha in (0.0, 0.2, 0.9):
        text = written[3]
        assert text.likely is not None and text.logprobs is not None
        sure = []
        for at in range(len(text.tokens)):
            chances = dict(zip(text.likely[at - 1].tolist(), np.exp(text.logprobs[at - 1].astype(float)), strict=True))
            asked = at > text.written
            sure.append(asked and chances.get(int(text.tokens[at]), 0.0) >= alpha)
        expected = []
        for at in range(len(sure)):
            run = sure[at:].index(False) if False in sure[at:] else len(sure) - at
            expected.append(run)
        assert sure_runs(text, alpha).tolist() == expected


def test_placeholders_are_scored_as_the_drafter_will_see_them(target: LoadedModel, written: Corpus) -> None:
    trainee, text = PlaceholderTrainee(target.model, target.model, UnitsRecipe(span=3, places=5), ahead=2), written[0]
    training_batch = trainee.training_batch(text, 0.0)
    assert training_batch is not None and len(training_batch.segments) == 5
    logq = trainee.logq([training_batch])
    for number, segment in enumerate(training_batch.segments):
        known = int(segment.positions[0])
        rows = torch.cat(
            (target.model.embed_tokens(torch.from_numpy(text.tokens[:known]).long()), trainee.placeholders)
        )
        whole = Segment(np.arange(known + 2), states=rows, logit_rows=[known, known + 1])
        expected = target.model.forward(Batch([whole])).logits.log_softmax(dim=-1)
        assert (logq[number] - expected).abs().max() < 1e-4
        assert training_batch.right[number].tolist() == [
            int(text.tokens[at]) if at < len(text.tokens) else -1 for at in (known + 1, known + 2)
        ]


def _last(out: Path) -> np.ndarray:
    """Where training ended, whatever was best on the few texts held out."""
    with safe_open(out / "training" / loop.CHECKPOINT, framework="np") as file:
        return file.get_tensor("now.placeholders")


@pytest.mark.integration
def test_placeholders_alone_learn_and_a_run_goes_on_where_it_stopped(
    target: LoadedModel, written: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe = target.model, UnitsRecipe(span=3, alpha=0.0, steps=10, lr=0.1, places=4)
    assert isinstance(model, Transformer)
    before = model.weights.embedding.clone()
    found = train_units(Run(target, tmp_path / "whole", (recipe,), learning=model), written)
    trainee, taught = PlaceholderTrainee(model, model, recipe, ahead=2), [written[number] for number in range(12)]
    losses = [float(trainee.loss(taught, np.random.default_rng(0)).detach())]
    with torch.no_grad():
        trainee.placeholders.copy_(torch.from_numpy(_last(tmp_path / "whole")))
    losses.append(float(trainee.loss(taught, np.random.default_rng(0)).detach()))
    assert losses[1] < losses[0] - 0.1
    assert torch.equal(model.weights.embedding, before) and found.data.shape == (2, 32)
    # Interrupted between two steps, and begun again.
    monkeypatch.setattr(loop, "monotonic", itertools.count(0, 60).__next__)

    def stop(what: str, done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_units(Run(target, tmp_path / "twice", (recipe,), progress=stop, learning=model), written)
    assert not (tmp_path / "twice" / UNITS).exists()
    again = train_units(Run(target, tmp_path / "twice", (recipe,), learning=model), written)
    assert torch.equal(again.data, found.data)
    kept = Placeholders.load(tmp_path / "twice" / UNITS)
    assert torch.equal(kept.data, found.data) and kept.facts["validation"] == found.facts["validation"]
    assert set(found.facts["validation"]["baselines"]) == {"untrained"}
    with pytest.raises(DecoderyError, match="float32"):
        train_units(Run(target, tmp_path / "int8", (recipe,), learning=to_int8(model)), written)


def test_commands_make_what_they_say_and_a_folder_holds_one_part(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodery.models.loaders.load.load", lambda name, **options: target)
    (tmp_path / "prompts").write_text("\n".join(map(str, range(20))))
    common = ["--texts", "20", "--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "12"]
    ngrams, units = ["ngrams"], ["lexical-units", "--steps", "2", "--alpha", "0"]
    for command, made in ((ngrams, "ngrams.safetensors"), (units, UNITS)):
        out = tmp_path / command[0]
        code, told, _ = inside("train", *command, *common, "--out", str(out))
        assert code == 0 and (out / made).is_file(), told
    assert Placeholders.load(tmp_path / "lexical-units" / UNITS).data.shape == (3, 32)
    assert load_ngrams(tmp_path / "ngrams" / "ngrams.safetensors").shards
    # The card of one would say nothing of the other.
    code, _, said = inside("train", *units, *common, "--out", str(tmp_path / "ngrams"))
    assert code == 1 and f"no {UNITS}: name a new folder" in said


def test_the_shipped_placeholders_save_passes(smollm2_int8: LLM) -> None:
    # Counts on prompts they have not seen; the text stays that of plain decoding.
    for prompt in ("List the days of the week.", "Write a short story about a lighthouse."):
        plain, units = (
            smollm2_int8.generate(prompt, max_new_tokens=48, drafter=drafter) for drafter in (None, "lexical-unit")
        )
        assert units.tokens == plain.tokens
    assert units.trace.tokens_per_pass > 1.05
