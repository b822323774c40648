"""What a folder holds is all of one causal language model: nothing is missing, nothing is left over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.loaders.load import load
from decodery.models.transformers.adapter import TransformersModel
from small_configs import build
from tiny_models import SHAPE, assert_same_logits, make_model, random_ids, randomize, reference, save

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


def rewritten(folder: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    """The folder with other tensors, and other values in its config.json."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    return folder


def model_of(kind: str) -> transformers.PreTrainedModel:
    """One that this package runs itself, or one that runs through transformers."""
    return make_model(kind) if kind == "qwen2" else build(kind)


@pytest.mark.parametrize("kind", ["qwen2", "helium"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_models_with_another_head_are_refused(kind: str, head: str, tmp_path: Path) -> None:
    sizes = SHAPE | {"num_labels": 1, "num_hidden_layers": 1, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    kinds = {"ForSequenceClassification": "AutoModelForSequenceClassification"}
    auto = getattr(transformers, kinds.get(head, "AutoModelForTokenClassification"))
    folder = save(randomize(auto.from_config(config)), tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=rf"architectures = \w+{head} is not a causal language model"):
        load(folder, device="cpu")
    # Without a name, the tensors tell.
    with pytest.raises((UnsupportedModel, CorruptFile), match=r"tensor (score|classifier|lm_head)\.(weight|bias)"):
        load(rewritten(folder, dict, architectures=None), device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", ["qwen2", "helium"])
def test_a_tensor_that_is_left_over_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    folder = save(model_of(kind), tmp_path / "model")
    rewritten(folder, lambda each: each | {"v_head.summary.weight": torch.ones(1, 64)})
    with pytest.raises(UnsupportedModel, match=r"tensor v_head\.summary\.weight belongs to a part"):
        load(folder, device="cpu")


@pytest.mark.parametrize("kind", ["qwen2", "helium"])
def test_a_tensor_that_is_missing_is_named(kind: str, tmp_path: Path) -> None:
    folder = save(model_of(kind), tmp_path / "model")
    rewritten(folder, lambda each: {name: part for name, part in each.items() if "layers.1.mlp" not in name})
    with pytest.raises(CorruptFile, match=r"has no tensor model\.layers\.1\.mlp\.\w+\.\w+"):
        load(folder, device="cpu", dtype="float32")


def test_what_everyone_computes_anew_may_be_there(tmp_path: Path) -> None:
    theirs = make_model("llama")
    folder = save(theirs, tmp_path / "model")
    rewritten(folder, lambda each: each | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert_same_logits(load(folder, dtype="float32", device="cpu").model, theirs)


def test_a_head_that_differs_from_the_embedding_it_should_share_is_used(tmp_path: Path) -> None:
    folder = save(make_model("llama", tie_word_embeddings=True), tmp_path / "model")
    own = torch.randn(288, 64, generator=torch.Generator().manual_seed(3))
    rewritten(folder, lambda each: each | {"lm_head.weight": own})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, own)
    assert_same_logits(load(folder, dtype="float32", device="cpu").model, theirs)
    # One table that is written twice is one table.
    rewritten(folder, lambda each: each | {"lm_head.weight": each["model.embed_tokens.weight"].clone()})
    assert load(folder, dtype="float32", device="cpu").model.config.tie_embeddings


def test_models_of_encoder_and_decoder_have_nothing_left_over(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=288, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2)
    folder = save(randomize(transformers.T5ForConditionalGeneration(config)), tmp_path / "model")
    assert load(folder, device="cpu").model.config.family == "t5"
    rewritten(folder, lambda each: each | {"decoder.block.0.layer.3.weight": torch.ones(2)})
    with pytest.raises(UnsupportedModel, match=r"tensor decoder\.block\.0\.layer\.3\.weight belongs to a part"):
        load(folder, device="cpu")


class Renamed(transformers.GPT2LMHeadModel):
    """Calls its cache as another version of `transformers` does."""

    def forward(self, input_ids=None, cache=None, position_ids=None, attention_mask=None, **options):
        found = super().forward(
            input_ids=input_ids, past_key_values=cache, position_ids=position_ids, attention_mask=attention_mask,
            **options,
        )  # fmt: skip
        return Output(logits=found.logits, cache=found.past_key_values)


class Output(dict):
    """Logits and a cache by the names that they were given."""

    __getattr__ = dict.__getitem__


def test_a_cache_is_found_by_either_of_its_names() -> None:
    config = transformers.GPT2Config(vocab_size=288, n_embd=48, n_layer=2, n_head=4, n_positions=128)
    theirs = randomize(Renamed(config))
    ours = TransformersModel(theirs)
    ids = random_ids(9)
    assert (ours.calls.run_anew(ids, range(9)) - reference(theirs, ids)).abs().max() < 1e-5
    assert ours.capabilities.trees and ours.config.num_layers == 2
    assert_same_logits(ours, theirs)
