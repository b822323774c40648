"""Training what guesses ahead: rows are scored as drafters will see them, learn alone, and their rates are counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from decodery.cli.main import cli
from decodery.core.errors import DecoderyError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.text import _segment
from decodery.llm.llm import LLM
from decodery.models.batch import Batch
from decodery.models.layer_plan import WHOLE
from decodery.models.loaders.drafts import PROMPTS, TRANSFER
from decodery.models.loaders.load import LoadedModel
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.placeholders import Placeholders
from decodery.models.trained.transfer import Transfer
from decodery.speculative.drafters.hidden_transfer import HiddenTransfer
from decodery.speculative.drafters.in_pass import InPass
from decodery.speculative.drafters.ppd import PPD
from decodery.step.draft_tree import DraftTree
from decodery.testing import check_identical
from decodery.testing.models import to_int8
from decodery.training import ahead, loop
from decodery.training.ahead import AheadTrainee
from decodery.training.corpus import Corpus, TrainingText
from decodery.training.data import write_texts
from decodery.training.held_out import HeldOut
from decodery.training.hidden_transfer import TransferRecipe, TransferTrainee, train_transfer
from decodery.training.kind import Run
from decodery.training.placeholders import PlaceholderTrainee, PPDRecipe, train_ppd
from tiny_models import tiny_loaded

LAYERS = (0, 1, 1)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def written(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    prompts = [[number % 50 + 1, 7] for number in range(40)]
    return write_texts(target, prompts, tmp_path_factory.mktemp("written") / "text", max_new_tokens=24, top=4)


def _ppd(target: LoadedModel) -> tuple[AheadTrainee, Callable[[], InPass]]:
    trainee = PlaceholderTrainee(target.model, target.model, PPDRecipe(places=5), ahead=3, decay=0.8)
    rates = torch.tensor([[0.3, 0.1]] * 3)
    return trainee, lambda: PPD(16, Placeholders(trainee.placeholders.detach(), rates=rates))


def _transfer(target: LoadedModel) -> tuple[AheadTrainee, Callable[[], InPass]]:
    trainee = TransferTrainee(target.model, target.model, TransferRecipe(layers=LAYERS, places=5))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        trainee.maps += torch.randn(trainee.maps.shape, generator=noise) / 8
    rates = torch.tensor([[0.3, 0.1]] * 3)
    return trainee, lambda: HiddenTransfer(16, Transfer(trainee.maps.detach(), LAYERS, rates))


@pytest.mark.parametrize("make", [_ppd, _transfer])
def test_rows_are_scored_as_the_drafter_will_see_them(make, target: LoadedModel, written: Corpus) -> None:
    trainee, drafter = make(target)
    training_batch = trainee.training_batch(written[1], 0.0)
    assert training_batch is not None and len(training_batch.segments) == 5
    logq = trainee.logq([training_batch])
    for number, segment in enumerate(training_batch.segments):
        known = written[1].tokens[: int(segment.positions[0])].tolist()
        engine = Engine(target.model)
        seq = engine.submit(Request(known[:-1], drafter=drafter(), max_new_tokens=8))
        engine.step()
        # The text as it was written, whatever this one would go on with.
        seq.tokens = known
        asked = seq.states[seq.request.drafter].asked
        tree = DraftTree.root(known[-1]).with_mask_nodes(np.array([3]), asked.inputs, asked.changes)
        expected = target.model.forward(Batch([_segment(tree, seq, WHOLE)])).logits[1:].log_softmax(dim=-1)
        assert (logq[number] - expected).abs().max() < 1e-4


def test_what_is_taught_falls_off_and_is_what_the_model_expects(target: LoadedModel, written: Corpus) -> None:
    trainee, _ = _ppd(target)
    training_batch = trainee.training_batch(written[1], 0.0)
    assert training_batch is not None
    text = written[1]
    assert text.likely is not None and text.logprobs is not None
    for row, segment in enumerate(training_batch.segments):
        place = int(segment.positions[0]) - 1
        for offset in range(3):
            there = place + offset + 2 < len(text.tokens)
            assert float(training_batch.weight[row, offset]) == pytest.approx(0.8**offset if there else 0.0)
            if there:
                share = np.exp(text.logprobs[place + 1 + offset].astype(float))
                assert training_batch.share[row, offset].tolist() == pytest.approx(
                    (share / share.sum()).tolist(), abs=1e-3
                )
                assert int(training_batch.right[row, offset]) == text.tokens[place + 2 + offset]


def test_rates_are_how_often_ranks_are_right(target: LoadedModel, written: Corpus) -> None:
    trainee, _ = _ppd(target)
    texts = [written[number] for number in range(6)]
    rates = trainee.rates(texts, lambda *_: None)
    assert rates.shape == (3, 10) and bool((rates.diff(dim=1) <= 0).all() and (rates > 0).all())
    hits, seen = np.zeros(10), 0
    for text in texts:
        training_batch = trainee.training_batch(text, 0.0, places=48)
        assert training_batch is not None
        for row, right in zip(
            trainee.logq([training_batch])[:, 0].detach(), training_batch.right[:, 0].tolist(), strict=True
        ):
            if right >= 0:
                seen += 1
                hits += (row.topk(10).indices == right).numpy()
    assumed = 16 / (np.arange(1, 11) * np.arange(2, 12))
    assert rates[0].tolist() == pytest.approx(sorted((hits + assumed) / (seen + 32), reverse=True), abs=1e-6)


def test_rates_are_counted_on_texts_that_chose_nothing(
    target: LoadedModel, written: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, counted = list[HeldOut[TrainingText]](), list[TrainingText]()

    def held_out(items: Sequence[TrainingText], prompts: Sequence[Hashable]) -> HeldOut[TrainingText]:
        known.append(HeldOut.of(items, prompts))
        return known[-1]

    def rates(self: AheadTrainee, texts: Sequence[TrainingText], progress: object) -> torch.Tensor:
        counted.extend(texts)
        return torch.tensor([[0.3, 0.1]] * 3)

    monkeypatch.setattr(ahead, "HeldOut", SimpleNamespace(of=held_out))
    monkeypatch.setattr(AheadTrainee, "rates", rates)
    train_ppd(Run(target, tmp_path, (PPDRecipe(steps=1, places=4, batch=4),)), written)
    chose, seen = ({tuple(text.tokens) for text in some} for some in (known[0].choosing, counted))
    assert chose and seen and not chose & seen


@pytest.mark.integration
@pytest.mark.parametrize("name", ["ppd", "hidden-transfer"])
def test_they_learn_alone_and_a_run_goes_on_where_it_stopped(
    name: str, target: LoadedModel, written: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target.model
    assert isinstance(model, Transformer)
    before = model.weights.embedding.clone()

    def learn(folder: str, teacher=model, **settings):
        if name == "ppd":
            recipe = PPDRecipe(steps=12, lr=0.1, places=4, batch=4)
            return train_ppd(Run(target, tmp_path / folder, (recipe,), learning=teacher, **settings), written)
        recipe = TransferRecipe(steps=12, lr=0.03, places=4, layers=LAYERS)
        return train_transfer(Run(target, tmp_path / folder, (recipe,), learning=teacher, **settings), written)

    found = learn("whole")
    assert torch.equal(model.weights.embedding, before)
    trainee = _ppd(target)[0] if name == "ppd" else TransferTrainee(model, model, TransferRecipe(layers=LAYERS))
    taught, ((kind, learned),) = [written[number] for number in range(12)], trainee.parameters.items()
    untaught = float(trainee.loss(taught, np.random.default_rng(0)).detach())
    # Where training ended, whatever was best on the few texts held out.
    with safe_open(tmp_path / "whole" / "training" / loop.CHECKPOINT, framework="pt") as file, torch.no_grad():
        learned.copy_(file.get_tensor(f"now.{kind}"))
    assert float(trainee.loss(taught, np.random.default_rng(0)).detach()) < untaught - 0.02
    # Interrupted between two steps, and begun again.
    monkeypatch.setattr(loop, "monotonic", itertools.count(0, 60).__next__)

    def stop(what: str, done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn("twice", progress=stop)
    again = learn("twice")
    if name == "ppd":
        kept = Placeholders.load(tmp_path / "twice" / PROMPTS)
        assert torch.equal(kept.data, found.data) and torch.equal(kept.rates, found.rates)
        drafter: InPass = PPD(16, str(tmp_path / "twice"))
    else:
        made = Transfer.load(tmp_path / "twice" / TRANSFER)
        assert torch.equal(made.maps, found.rounded().maps) and torch.equal(made.rates, found.rates)
        drafter = HiddenTransfer(16, str(tmp_path / "twice"))
    assert found.facts["validation"] == again.facts["validation"]
    check_identical(model, [[5, 7]], drafter=drafter, max_new_tokens=24, seeds=(0,), tested="drafted")
    with pytest.raises(DecoderyError, match="float32"):
        learn("int8", to_int8(model))


def test_the_commands_make_what_the_drafters_read(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodery.models.loaders.load.load", lambda name, **options: target)
    (tmp_path / "prompts").write_text("\n".join(map(str, range(20))))
    common = ["--out", str(tmp_path / "out"), "--texts", "20", "--prompts", str(tmp_path / "prompts")]
    common += ["--max-new-tokens", "12", "--steps", "2"]

    def train(*command: str):
        return CliRunner().invoke(cli, ["train", *command, *common])

    for command, made in ((("ppd",), PROMPTS), (("hidden-transfer", "--layers", "1/1"), TRANSFER)):
        (tmp_path / "out" / "README.md").unlink(missing_ok=True)
        (tmp_path / "out" / "training" / loop.CHECKPOINT).unlink(missing_ok=True)
        done = train(*command)
        assert done.exit_code == 0 and (tmp_path / "out" / made).is_file(), done.output
    assert Transfer.load(tmp_path / "out" / TRANSFER).layers == (1, 1)
    for layers, said in (("1/x", "is not a list of integers"), ("1/0", "ascending"), ("7", "2 layers")):
        (tmp_path / "out" / "training" / loop.CHECKPOINT).unlink(missing_ok=True)
        assert (
            said
            in str(train("hidden-transfer", "--layers", layers).exception or "")
            + train("hidden-transfer", "--layers", layers).output
        )


@pytest.mark.parametrize("name", ["ppd", "hidden-transfer"])
def test_what_is_shipped_saves_passes(name: str, smollm2_int8: LLM) -> None:
    # Counts on a prompt it has not seen; the text stays that of plain decoding.
    prompt = "Write a short story about a lighthouse."
    plain = smollm2_int8.generate(prompt, max_new_tokens=32, drafter=None)
    drafted = smollm2_int8.generate(prompt, max_new_tokens=32, drafter=f"{name}:length=16")
    assert drafted.tokens == plain.tokens and drafted.trace.tokens_per_pass > 1.1
