"""What was read by a name is read again once other files lie there: models, adapters, heads, stores, documents."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decodery.compression.copies import copy_of
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders import named
from decodery.models.loaders.adapters import Adapter
from decodery.models.loaders.load import load
from decodery.scorers.reward_model import RewardModel
from decodery.search.documents import demonstrations, library
from decodery.speculative.heads.published import published
from decodery.speculative.stores.datastore import FORMAT, Datastore
from decodery.speculative.stores.trigrams import Trigrams
from decodery.testing.models import tiny_transformer
from published import write
from tiny_models import make_model, save

SETTINGS = {"apply_chat_template": False, "max_new_tokens": 8, "ignore_eos": True}
TEXT = "The cache keeps the keys"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(named, "_loaded", {})
    return tmp_path


def test_a_second_model_is_that_of_the_files_as_they_are_now(home: Path) -> None:
    own, other = (make_model("llama", seed=seed) for seed in (0, 1))
    lm = LLM(load(save(own, home / "own"), dtype="float32", device="cpu"))
    written = {seed: LLM(load(save(each, home / "second"), dtype="float32", device="cpu")).generate(TEXT, **SETTINGS)
               for seed, each in ((1, other), (0, own))}  # fmt: skip

    def drafted() -> float:
        out = lm.generate(TEXT, drafter=f"draft-model:model={home / 'second'},dtype=float32,length=4", **SETTINGS)
        return out.trace.tokens_per_pass

    def handed_over() -> list[int]:
        (out,) = lm.search(TEXT, f"phase-handoff:begins=second,model={home / 'second'},dtype=float32", **SETTINGS)
        return out.tokens

    assert handed_over() == written[0].tokens and drafted() > 3
    first = named.loaded(str(home / "second"), "float32")
    save(other, home / "second")
    assert handed_over() == written[1].tokens != written[0].tokens
    assert drafted() < 2
    # It is loaded once for as long as the files stay, and one that is no longer there is let go.
    assert named.loaded(str(home / "second"), "float32") is named.loaded(str(home / "second"), "float32") is not first
    gone = weakref.ref(first.model)
    del first
    gc.collect()
    assert gone() is None


def test_a_reward_model_is_that_of_the_files_as_they_are_now(home: Path) -> None:
    save(make_model("llama"), home / "judge")
    judge = RewardModel(resolve("scorer", "log-probability"), model=str(home / "judge"))
    before = judge._found
    assert before is judge._found
    save(make_model("llama", seed=1), home / "judge")
    assert judge._found is not before


def test_few_models_stay_loaded(home: Path) -> None:
    loaded = [
        weakref.ref(named.loaded(str(save(make_model("llama", seed=number), home / str(number))), "float32").model)
        for number in range(6)
    ]
    gc.collect()
    assert [model() is not None for model in loaded] == [False, False, True, True, True, True]


def lora(folder: Path, scale: float) -> Path:
    folder.mkdir(exist_ok=True)
    name = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {f"{name}.lora_B.weight": torch.full((64, 1), scale), f"{name}.lora_A.weight": torch.ones(1, 32)}
    if not (folder / "adapter_config.json").exists():
        about = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_whose_weights_alone_were_replaced_is_read_again(tmp_path: Path) -> None:
    model = tiny_transformer(0)
    spec, found, copies = f"s2ft:file={tmp_path / 'lora'}", [], []
    for scale in (1.0, 2.0):
        (part,) = Adapter.load(lora(tmp_path / "lora", scale)).parts.values()
        found.append(part.first[0, 0].item())  # type: ignore[union-attr]
        copies.append(copy_of(model, spec))
        assert copy_of(model, spec) is copies[-1]
    assert found == [1.0, 2.0] and copies[0] is not copies[1]


def test_a_published_head_whose_description_alone_was_replaced_is_read_again(tmp_path: Path) -> None:
    tensors = {f"blocks.0.{number}": torch.ones(2, 2) for number in range(2)}
    folder = write(tmp_path / "head", {"model_type": "nothing"}, tensors)
    for kind in ("nothing", "another"):
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [kind]}))
        with pytest.raises(Exception, match=kind):
            published(folder)


def datastore(folder: Path, document: list[int]) -> str:
    """One as `decodery train datastore` writes it; its description is not written again."""
    folder.mkdir(exist_ok=True)
    made = Datastore.build([document], separator=0, vocab_size=64)
    (shard,) = made.shards
    np.save(folder / "00000.tokens.npy", shard.tokens)
    np.save(folder / "00000.order.npy", shard.order.astype("<u4"))
    if not (folder / "datastore.json").exists():
        facts = {"format": FORMAT, "shards": [len(shard.tokens)], "separator": 0, "vocab_size": 64}
        (folder / "datastore.json").write_text(json.dumps(facts))
    return str(folder)


def test_a_datastore_whose_tokens_alone_were_replaced_is_opened_again(tmp_path: Path) -> None:
    engine, found = Engine(tiny_transformer(0)), []
    for document in ([60, 61, 62, 63], [60, 61, 59, 63]):
        folder = datastore(tmp_path / "store", document)
        assert Datastore.open(folder).count(document[:3]) == 1
        seq = engine.submit(Request([60, 61], drafter=resolve("drafter", f"aded:datastore={folder}"), max_new_tokens=1))
        assert isinstance(seq.states[seq.request.drafter], Trigrams)
        found.append([token for token, _ in seq.states[seq.request.drafter].successors(60, 61)])
    assert found == [[62], [59]]


def test_documents_that_were_replaced_at_once_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "documents.txt"
    for text in ("one", "two"):
        path.unlink(missing_ok=True)
        path.write_text(text)
        assert library(str(path), 9).documents == [text]
    examples = tmp_path / "examples.jsonl"
    for answer in ("3", "4"):
        examples.write_text(json.dumps({"question": "1 + 2", "answer": answer}))
        assert demonstrations(str(examples))[0].answer == answer
