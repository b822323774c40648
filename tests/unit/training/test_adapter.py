"""Adapters: what is added to a model's matrices, text by text, how it is learned, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from commands import inside
from decodery.compression import S2FT, Int4, Int8
from decodery.compression.base import LINEARS, transformed
from decodery.compression.folder import save
from decodery.core.errors import CorruptFile, ModelNotFound, SettingsError, UnsupportedModel
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
from decodery.training.adapter import LoRARemaking, S2FTRemaking, train_adapter
from decodery.training.corpus import Corpus
from decodery.training.data import cut_files, write_texts
from decodery.training.remade import CopyRecipe, Remade, TrainingProgress, written_rows
from decodery.training.training_batch import predictions, training_batch
from scripted import Unigram
from tiny_models import assert_same_logits, make_model, tiny_loaded
from tiny_models import save as save_folder

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
    found = train_adapter(target, taught, tmp_path, remaking, recipe=recipe)
    scores = found.facts["validation"]
    assert scores["with"]["cross_entropy"] < scores["without"]["cross_entropy"] - 0.01
    assert torch.equal(target.model.weights.layers[0].down.weight, before)
    kept = Adapter.load(tmp_path)
    assert torch.equal(logits(tuned(target.model, kept)), logits(tuned(target.model, found)))
    assert "--logits-source adapter:file=THIS_FOLDER" in (tmp_path / "README.md").read_text()
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
        train_adapter(target, corpus, tmp_path / "made", LoRARemaking(2, masked=True), recipe=recipe)
    assert not (tmp_path / "made").exists()
    train_adapter(target, corpus, tmp_path / "made", LoRARemaking(2), recipe=recipe)


def test_one_that_is_masked_learns_behind_what_the_model_itself_has_read(
    target: LoadedModel, taught: Corpus, tmp_path: Path
) -> None:
    assert isinstance(target.model, Transformer)
    recipe = CopyRecipe(steps=40, batch=8, lr=1e-2)
    found = train_adapter(target, taught, tmp_path, LoRARemaking(4, masked=True), recipe=recipe)
    scores = found.facts["validation"]
    assert scores["with"]["cross_entropy"] < scores["without"]["cross_entropy"] - 0.01
    assert "--search 'edge:adapter=THIS_FOLDER" in (tmp_path / "README.md").read_text()
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


def test_what_is_no_adapter_for_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="decodery train s2ft"):
        Tuned().over(MODEL, [1])
    with pytest.raises(ModelNotFound, match="decodery train s2ft"):
        Tuned(str(tmp_path)).over(MODEL, [1])
    (tmp_path / Adapter.FILE).write_bytes(b"nothing")
    with pytest.raises(CorruptFile, match="decodery train s2ft"):
        Tuned(str(tmp_path)).over(MODEL, [1])
    delta = torch.zeros(32, 1)
    for parts in (
        {"layers.9.output": Columns(torch.tensor([0]), delta)},
        {"layers.0.output": Columns(torch.tensor([99]), delta)},
        {"layers.0.output": Thin(torch.zeros(32, 2), torch.zeros(3, 32))},
    ):
        with pytest.raises(SettingsError, match="this adapter is for a model"):
            tuned(MODEL, Adapter(parts))
    with pytest.raises(UnsupportedModel, match="runs itself"):
        Tuned(adapter(0)).over(Unigram(8), [1])
    Adapter({"x": Columns(torch.tensor([0]).int(), delta)}).save(tmp_path / "odd")
    with pytest.raises(CorruptFile, match="holds no adapter, or is damaged"):
        Adapter.load(tmp_path / "odd")
    for bad in ({"channels": 1.5}, {"channels": 0.0, "heads": 0.0}):
        with pytest.raises(SettingsError, match="shares"):
            S2FTRemaking(MODEL.config, **bad)
    with pytest.raises(SettingsError, match="rank of at least 1"):
        LoRARemaking(0)


@pytest.mark.integration
def test_lora_of_other_stacks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make_model("llama").float()
    save_folder(theirs, tmp_path / "model")
    model = load(tmp_path / "model", dtype="float32").model
    changed, tensors = copy.deepcopy(theirs), {}
    draws = torch.Generator().manual_seed(0)
    names = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    for name in (f"model.layers.{layer}.{part}" for layer in (0, 2) for part in names):
        weight = changed.get_parameter(f"{name}.weight")
        shapes = (weight.shape[0], 4), (4, weight.shape[1])
        first, second = (torch.randn(*shape, generator=draws) * 0.1 for shape in shapes)
        with torch.no_grad():
            weight += 2.0 * first @ second
        tensors |= {f"base_model.model.{name}.lora_B.weight": first, f"base_model.model.{name}.lora_A.weight": second}
    folder = tmp_path / "lora"
    folder.mkdir()
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
    assert_same_logits(tuned(model, Adapter.load(folder)), changed)
    with pytest.raises(AssertionError):
        assert_same_logits(model, changed)
    # Another rule of scaling is another model.
    (folder / "adapter_config.json").write_text(json.dumps(about | {"use_rslora": True}))
    with pytest.raises(AssertionError):
        assert_same_logits(tuned(model, Adapter.load(folder)), changed)
    for other in ({"use_dora": True}, {"peft_type": "IA3"}, {"bias": "all"}, {"alpha_pattern": {"q_proj": 3}}):
        (folder / "adapter_config.json").write_text(json.dumps(about | other))
        with pytest.raises(UnsupportedModel, match=f"{next(iter(other))} = .* is not supported"):
            Adapter.load(folder)
    (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(
        {**tensors, "base_model.model.lm_head.lora_A.weight": second.clone()}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(UnsupportedModel, match="only LoRA of linear layers"):
        Adapter.load(folder)
    save_file(dict(list(tensors.items())[:1]), folder / "adapter_model.safetensors")
    with pytest.raises(CorruptFile, match="only one of two matrices"):
        Adapter.load(folder)


def _lora_folder(
    folder: Path, theirs: torch.nn.Module, **about: object
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A folder as PEFT writes it for two matrices; returns [out, 4] and [4, in] by their names in the model."""
    draws, pairs, tensors = torch.Generator().manual_seed(0), {}, {}
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        outputs, inputs = theirs.get_parameter(f"{name}.weight").shape
        first, second = (torch.randn(*shape, generator=draws) * 0.1 for shape in ((outputs, 4), (4, inputs)))
        pairs[name] = first, second
        tensors |= {f"base_model.model.{name}.lora_B.weight": first, f"base_model.model.{name}.lora_A.weight": second}
    folder.mkdir(exist_ok=True)
    # All that PEFT 0.21 writes of a LoRA, in its own order.
    written = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "base_model_name_or_path": "x", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
        "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.1,
        "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
        "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
        "rank_pattern": {}, "revision": None, "target_modules": ["k_proj", "down_proj"], "target_parameters": None,
        "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
        "use_qalora": False, "use_rslora": False, "velora_config": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(written | about))
    save_file(tensors, folder / "adapter_model.safetensors")
    return pairs


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_adapters_that_began_with_a_part_of_the_matrix_take_its_place(
    begun: str, rslora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    theirs = make_model("llama").float()
    save_folder(theirs, tmp_path / "model")
    model = load(tmp_path / "model", dtype="float32").model
    pairs = _lora_folder(tmp_path / "lora", theirs, init_lora_weights=begun, use_rslora=rslora)
    scale = 8 / 2 if rslora else 8 / 4
    for name, (first, second) in pairs.items():
        weight = theirs.get_parameter(f"{name}.weight")
        with torch.no_grad():
            if begun == "pissa":
                # What is left is all that lies beyond the directions of the four largest singular values.
                left = torch.linalg.svd(weight)[0][:, :4]
                rest = weight - left @ (left.T @ weight)
            else:
                # The first columns of Q span the first columns of the matrix.
                basis = torch.linalg.qr(weight[:, :4])[0]
                rest = weight - scale * basis @ (basis.T @ weight)
            weight.copy_(rest + scale * first @ second)
    adapter = Adapter.load(tmp_path / "lora")
    assert_same_logits(tuned(model, adapter), theirs)
    adapter.save(tmp_path / "own")
    assert_same_logits(tuned(model, Adapter.load(tmp_path / "own")), theirs)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication = .* is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is not supported"),
        ({"lora_bias": True}, "lora_bias = True is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices = .* is not supported"),
        ({"something_new": {"x": 1}}, "something_new = .* is not supported"),
        ({"rank_pattern": {"k_proj": 8}}, "rank_pattern = .* is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa_niter_16' changes the model's own"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    ],
)
def test_every_field_of_an_adapters_configuration_is_read_or_refused(about: dict, said: str, tmp_path: Path) -> None:
    theirs = make_model("llama")
    _lora_folder(tmp_path / "lora", theirs)
    assert len(Adapter.load(tmp_path / "lora").parts) == 2
    _lora_folder(tmp_path / "lora", theirs, **about)
    with pytest.raises(UnsupportedModel, match=said):
        Adapter.load(tmp_path / "lora")
    _lora_folder(tmp_path / "lora", theirs, r=8)
    with pytest.raises(CorruptFile, match="says r = 8"):
        Adapter.load(tmp_path / "lora")


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
