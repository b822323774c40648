"""Adapters: what is added to a model's matrices, text by text, how it is learned, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import inside
from decodery.compression import S2FT, Int4, Int8
from decodery.compression.base import LINEARS, transformed
from decodery.compression.folder import save
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.adapter import Tuned
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.adapters import Adapter, Columns, Thin, tuned
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.native.int8 import Int8Linear
from decodery.models.protocol import LanguageModel, Reader
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Kept
from decodery.testing import tiny_transformer
from decodery.training.adapter import LoRARemaking, S2FTRemaking, train_adapter, usage
from decodery.training.corpus import Corpus
from decodery.training.data import cut_files, write_texts
from decodery.training.kind import Run
from decodery.training.remade import CopyRecipe, Remade, TrainingProgress, written_rows
from decodery.training.training_batch import predictions, training_batch
from tiny_models import tiny_loaded

MODEL = tiny_transformer(0)
EVERY = tiny_loaded().model.vocab_size
IDS = np.random.default_rng(9).integers(0, 64, 20)


def logits(model: LanguageModel) -> torch.Tensor:
    return model.forward(Batch([Segment(np.arange(len(IDS)), tokens=IDS)])).logits


def adapter(seed: int, size: float = 1.0) -> Adapter:
    draws = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64) * size

    columns = Columns(torch.tensor([2, 3, 17]), random(32, 3))
    return Adapter({"layers.0.output": columns, "layers.1.gate_up": Thin(random(128, 2), random(2, 32))})


def test_matrices_are_what_they_were_plus_what_is_added(tmp_path: Path) -> None:
    before, one = logits(MODEL), adapter(0)
    weights = [MODEL.weights.layers[0].output.weight.clone(), MODEL.weights.layers[1].gate_up.weight.clone()]
    sum_of = tuned(MODEL, one)
    columns, thin = one.parts["layers.0.output"], one.parts["layers.1.gate_up"]
    assert isinstance(columns, Columns) and isinstance(thin, Thin)
    difference = sum_of.weights.layers[0].output.weight - weights[0]
    assert torch.allclose(difference[:, columns.columns], columns.delta)
    others = torch.ones(32, dtype=torch.bool).index_fill(0, columns.columns, False)
    assert not difference[:, others].any()
    assert torch.allclose(sum_of.weights.layers[1].gate_up.weight - weights[1], thin.first @ thin.second)
    # What nothing is added to is shared, and the model is as it was, to the bit.
    assert sum_of.weights.layers[0].down is MODEL.weights.layers[0].down
    assert torch.equal(MODEL.weights.layers[0].output.weight, weights[0]) and torch.equal(logits(MODEL), before)
    assert (logits(sum_of) - before).abs().max() > 1e-2
    assert torch.equal(logits(tuned(MODEL, adapter(0, size=0.0))), before)

    one.save(tmp_path / Adapter.FILE)
    again = Adapter.load(tmp_path)
    assert again is Adapter.load(tmp_path / Adapter.FILE)
    assert torch.equal(logits(tuned(MODEL, again)), logits(sum_of)) and tuned(MODEL, again) is tuned(MODEL, again)


def test_requests_choose_their_adapter_and_share_an_engine() -> None:
    sources = [None, Tuned(adapter(0)), Tuned(adapter(1)), Tuned(adapter(0, size=0.0))]
    alone = [_written(MODEL if source is None else source.over(MODEL, [1])) for source in sources]
    engine = Engine(MODEL)
    # Drafts, too, and twice each: texts of one adapter are in one pass.
    found = [
        engine.submit(Request([1, 2, 3], max_new_tokens=12, logits_source=each, drafter=drafter))
        for each in sources
        for drafter in (None, "ngram")
    ]
    engine.run(found)
    written = [seq.generated for seq in found]
    assert written == [each for each in alone for _ in range(2)]
    assert alone[3] == alone[0] and len({tuple(each) for each in alone}) == 3


def _written(model: Reader) -> list[int]:
    engine = Engine(model)  # type: ignore[arg-type]
    seq = engine.submit(Request([1, 2, 3], max_new_tokens=12))
    engine.run([seq])
    return seq.generated


@pytest.mark.parametrize("transform", [Int8(), Int4()])
def test_whole_numbers_are_rounded_anew(transform: Int8 | Int4) -> None:
    base, _ = transformed(MODEL, [transform])
    sum_of = tuned(base, adapter(0))
    made = sum_of.weights.layers[0].output
    assert isinstance(made, Int8Linear) and sum_of.weights.layers[0].down is base.weights.layers[0].down
    dense = base.weights.layers[0].output.dense()  # type: ignore[attr-defined]
    wanted = adapter(0).parts["layers.0.output"].added(dense)
    assert (made.dense() - wanted).abs().max() <= wanted.abs().max() / 127
    assert (made.dense() - dense).abs().max() > 0.5


def test_what_learns_is_what_the_method_says() -> None:
    config = MODEL.config
    whole = Dense(torch.randn(config.hidden_size, config.intermediate_size, dtype=torch.float64))
    part = S2FTRemaking(config, channels=0.1, seed=1).form("layers.1.down", whole, TrainingProgress()).part  # type: ignore[attr-defined]
    assert len(part.columns) == round(0.1 * config.intermediate_size) and not part.delta.any()
    output = Dense(torch.randn(config.hidden_size, config.num_heads * config.head_dim, dtype=torch.float64))
    form = S2FTRemaking(config).form("layers.0.output", output, TrainingProgress())
    # One whole head, whichever keys it shares with others.
    columns = form.part.columns  # type: ignore[attr-defined]
    assert len(columns) == config.head_dim and len(columns // config.head_dim) == len(columns)
    assert len(set((columns // config.head_dim).tolist())) == 1
    assert not S2FTRemaking(config).form("layers.0.qkv", output, TrainingProgress()).parameters
    rows = torch.randn(5, output.shape[1], dtype=torch.float64)
    assert torch.equal(form(rows), rows @ output.weight.T)
    with torch.no_grad():
        form.part.delta.normal_()  # type: ignore[attr-defined]
        assert torch.allclose(form(rows), form.made(8).linear(rows)) and not torch.equal(
            form(rows), rows @ output.weight.T
        )
    low = LoRARemaking(rank=2, layers=("output",))
    assert torch.equal(low.form("layers.0.output", output, TrainingProgress())(rows), rows @ output.weight.T)
    assert not low.form("layers.0.down", whole, TrainingProgress()).parameters


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def taught(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """What another model of the same tokens has written."""
    other = tiny_transformer(7, vocab_size=target.model.vocab_size, dtype=torch.float32)
    assert isinstance(target.model, Transformer)
    loaded = LoadedModel(Transformer(target.model.config, other.weights), target.tokenizer, None, "other", "float32")
    prompts = [[number % 50 + 1, 7] for number in range(40)]
    return write_texts(loaded, prompts, tmp_path_factory.mktemp("taught") / "text", max_new_tokens=16, top=8)


@pytest.mark.parametrize("kind", ["s2ft", "lora"])
def test_an_adapter_learns_what_texts_teach(kind: str, target: LoadedModel, taught: Corpus, tmp_path: Path) -> None:
    assert isinstance(target.model, Transformer)
    before = target.model.weights.layers[0].down.weight.clone()
    remaking = S2FTRemaking(target.model.config, 0.2, 0.5) if kind == "s2ft" else LoRARemaking(4)
    recipe = CopyRecipe(steps=40, batch=8, lr=1e-2)
    found = train_adapter(Run(target, tmp_path, (recipe,)), taught, remaking)
    scores = found.facts["validation"]
    assert scores["cross_entropy"] < scores["baselines"]["without"]["cross_entropy"] - 0.01
    assert scores["tested on"].endswith("texts that chose nothing")
    assert torch.equal(target.model.weights.layers[0].down.weight, before)
    kept = Adapter.load(tmp_path)
    assert torch.equal(logits(tuned(target.model, kept)), logits(tuned(target.model, found)))
    assert usage(kept) == "--logits-source adapter:file=THIS_FOLDER"
    count = sum(
        each.numel() for part in kept.parts.values() for each in part.tensors().values() if each.is_floating_point()
    )
    assert count == kept.facts["parameters"]
    with pytest.raises(SettingsError, match="another model"):
        tuned(tiny_transformer(1, vocab_size=target.model.vocab_size), kept)


def test_one_that_is_masked_is_refused_for_texts_without_a_prompt(target: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("tide moon sand crab gull wave " * 300)
    made = target.tokenizer
    corpus = cut_files([file], tmp_path / "text", tokenizer=made, vocab_size=target.model.vocab_size, length=20)
    recipe = CopyRecipe(steps=1)
    with pytest.raises(SettingsError, match="masked training reads prompts without the adapter, and texts of"):
        train_adapter(Run(target, tmp_path / "made", (recipe,)), corpus, LoRARemaking(2, masked=True))
    assert not (tmp_path / "made").exists()
    train_adapter(Run(target, tmp_path / "made", (recipe,)), corpus, LoRARemaking(2))


def test_one_that_is_masked_learns_behind_what_the_model_itself_has_read(
    target: LoadedModel, taught: Corpus, tmp_path: Path
) -> None:
    assert isinstance(target.model, Transformer)
    recipe = CopyRecipe(steps=40, batch=8, lr=1e-2)
    found = train_adapter(Run(target, tmp_path, (recipe,)), taught, LoRARemaking(4, masked=True))
    scores = found.facts["validation"]
    assert scores["cross_entropy"] < scores["baselines"]["without"]["cross_entropy"] - 0.01
    assert usage(found).startswith("--search 'edge:adapter=THIS_FOLDER")
    # One forward with a mask is a prompt read by the model, and the rest by the adapter after that.
    masked, text = LoRARemaking(4, masked=True), taught[0]
    tokens, begin = text.tokens[:-1].tolist(), text.written - 1
    said = []
    for remaking in (masked, replace(masked, masked=False)):
        remade = Remade(target.model, remaking)
        for index, layer in enumerate(remade.model.weights.layers):
            for name in LINEARS:
                part, known = getattr(layer, name).part, found.parts[f"layers.{index}.{name}"]
                part.first.data.copy_(known.first)
                part.second.data.copy_(known.second)
        taught_here = training_batch([text], Kept(torch.arange(EVERY), torch.arange(EVERY)), np.arange(EVERY))
        remade.progress_made.written = written_rows(taught_here, remade.model)
        with torch.no_grad():
            said.append(predictions(remade.model, taught_here)[0][: taught_here.count])
    cache = target.model.new_cache()
    target.model.forward(Batch([Segment.chunk(tokens[:begin], cache, logit_rows=[])]))
    cache.keep(range(begin))
    apart = tuned(target.model, found).forward(Batch([Segment.chunk(tokens[begin:], cache)])).logits.log_softmax(dim=1)
    assert (said[0] - apart).abs().max() < 1e-4 < 1e-3 < (said[1] - apart).abs().max()


@pytest.mark.parametrize("command", [["s2ft", "--channels", "0.1"], ["lora", "--rank", "2"]])
def test_the_commands_make_adapters_that_texts_name(command: list[str], target: LoadedModel, tmp_path: Path) -> None:
    model, made, text = str(tmp_path / "model"), str(tmp_path / "made"), tmp_path / "text.txt"
    save(tmp_path / "model", *transformed(target.model, [Int8()]), target)
    text.write_text("The tide comes in and goes out again. " * 40)
    learning = ["--length", "16", "--steps", "4", "--lr", "0.05"]
    code, output, errors = inside("train", *command, str(text), "-m", model, "--out", made, *learning)
    assert code == 0 and f"--logits-source adapter:file={made}" in output, errors
    settings = ["-m", model, "--max-new-tokens", "16", "--no-chat-template", "--logits-source", f"adapter:file={made}"]
    code, plain, errors = inside("generate", "The tide", *settings, "--drafter", "none")
    assert code == 0, errors
    assert plain == inside("generate", "The tide", *settings, "--drafter", "ngram")[1]


def test_a_fused_adapter_is_a_copy_like_others(tmp_path: Path) -> None:
    """It writes what the model writes with the adapter, from a folder of its own, and can be made smaller."""
    target = tiny_loaded()
    base = target.model
    assert isinstance(base, Transformer)
    one = adapter(0, size=0.1)
    one.save(tmp_path / Adapter.FILE)
    fused, report = transformed(base, [S2FT(str(tmp_path))])
    assert torch.equal(logits(fused), logits(tuned(base, one))) and not torch.equal(logits(fused), logits(base))
    assert [part.name for part in report.stages[0].parts] == ["layers.0.output", "layers.1.gate_up"]
    old, new = (model.weights.layers[0].output.weight.double() for model in (base, fused))  # type: ignore[attr-defined]
    added = float((new - old).square().sum() / old.square().sum())
    assert report.stages[0].parts[0].error == pytest.approx(added, rel=1e-4) and report.before == report.after
    nothing, report = transformed(base, [S2FT(adapter(0, size=0.0))])
    assert torch.equal(logits(nothing), logits(base)) and report.stages[0].error == 0.0
    save(tmp_path / "copy", fused, transformed(base, [S2FT(one)])[1], target)
    assert torch.equal(logits(load(tmp_path / "copy").model), logits(fused))
    small, report = transformed(base, [S2FT(one), Int8()])
    assert report.after.bytes < report.before.bytes and isinstance(small.weights.layers[0].output, Int8Linear)
    with pytest.raises(SettingsError, match="needs its adapter"):
        transformed(base, [S2FT()])
