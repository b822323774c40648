"""Second models that `auto` finds by itself: which fit, which are too dear, and what is remembered of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

import decodery.speculative.drafters.adviser_record as record_module
import decodery.speculative.drafters.found_models as found_module
from decodery.core.method_spec import from_network
from decodery.llm.llm import LLM
from decodery.models.loaders import nearby as nearby_module
from decodery.models.loaders.drafts import SHIPPED
from decodery.models.loaders.load import load
from decodery.models.loaders.nearby import nearby, own_place
from decodery.models.loaders.source import weight_bytes
from decodery.speculative.drafters.advice import AskCosts
from decodery.speculative.drafters.adviser_record import remembered
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.found_models import chosen_model, found_models
from tiny_gguf import write_gguf
from tiny_models import make_model, make_tokenizer, save


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(record_module, "_kept", record_module._Kept())
    monkeypatch.setattr(nearby_module, "hub_cache", lambda: tmp_path / "hub")
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    write_gguf(folder / "target.gguf", make_model("llama", num_hidden_layers=16), Kind.Q8_0)
    write_gguf(folder / "small.gguf", make_model("llama", num_hidden_layers=1, seed=1), Kind.Q8_0)
    return folder


def target(here: Path) -> LLM:
    return LLM(load(here / "target.gguf", device="cpu"))


def test_smaller_models_of_the_family_and_vocabulary_are_found_and_the_dear_ones_not_asked(here: Path) -> None:
    write_gguf(here / "dear.gguf", make_model("llama", num_hidden_layers=10), Kind.Q8_0)
    write_gguf(here / "larger.gguf", make_model("llama", num_hidden_layers=20), Kind.Q8_0)
    write_gguf(here / "family.gguf", make_model("qwen2", num_hidden_layers=1), Kind.Q8_0)
    (here / "mmproj-small.gguf").write_bytes((here / "small.gguf").read_bytes())
    (here / "broken.gguf").write_bytes(b"GGUF")
    cached = here.parents[1] / "hub" / "models--a--b" / "snapshots" / "1"
    cached.mkdir(parents=True)
    write_gguf(cached / "cached-q8_0.gguf", make_model("llama", num_hidden_layers=2), Kind.Q8_0)
    other = make_tokenizer()
    other.add_special_tokens(["<|other|>"])
    folder = save(make_model("llama", num_hidden_layers=1), here.parent / "vocabulary")
    other.save(str(folder / "tokenizer.json"))
    model = target(here).model
    found = {Path(each.name).stem: each for each in found_models(model)}
    assert list(found) == ["small", "cached-q8_0", "dear"]
    assert found["small"].share == weight_bytes(str(here / "small.gguf")) / weight_bytes(str(here / "target.gguf"))
    assert not found["small"].refusal and found["dear"].share > found_module._DEAREST
    chosen, notes = chosen_model(model)
    assert chosen is found["small"]
    assert notes[-1] == (
        f"drafting with n-grams: the model {here / 'dear.gguf'} would take {found['dear'].share:.0%} of a pass a "
        "token: not asked"
    )


def test_what_has_no_room_is_not_asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_module, "usable_memory", lambda: 1 << 16)
    chosen, (note,) = chosen_model(target(here).model)
    assert chosen is None and "has no room in memory" in note


def test_what_a_found_model_brought_decides_and_other_files_are_another_one(here: Path) -> None:
    write_gguf(here / "second.gguf", make_model("llama", num_hidden_layers=2), Kind.Q8_0)
    lm = target(here)
    small, second = found_models(lm.model)

    def told(identity: str, brought: float) -> None:
        costs, recall = AskCosts(0.1), remembered(lm.model, identity)
        assert recall is not None
        recall(costs)
        costs.taken, costs.brought, costs.passed = 1.0, brought, 100.0

    told(small.identity, 0.0)
    assert chosen_model(lm.model)[0] is second
    told(second.identity, 0.0)
    chosen, notes = chosen_model(lm.model)
    assert chosen is None and all("would cost 1.0% more than it brings" in note for note in notes)
    written = lm.generate("abc", drafter="auto:model=found,warm=none", max_new_tokens=4)
    assert [note for note in notes if note not in written.trace.notes] == []
    write_gguf(here / "small.gguf", make_model("llama", num_hidden_layers=1, seed=2), Kind.Q8_0)
    again = target(here).model
    assert found_models(again)[0].identity != small.identity and chosen_model(again)[0] is not None


def test_a_text_with_a_found_model_is_the_same_and_its_record_is_kept(here: Path) -> None:
    lm = target(here)
    bound = Auto(model="found").bind(lm.model)
    (found,) = found_models(lm.model)
    assert (bound.model, bound.known_as, bound.notes) == (found.name, found.identity, ())
    plain = lm.generate("abcabc", drafter=None, max_new_tokens=24)
    assert lm.generate("abcabc", drafter="auto:model=found", max_new_tokens=24).tokens == plain.tokens
    assert record_module._key(lm.model, found.identity) in record_module._kept.running
    with from_network():
        (note,) = Auto(model="found").bind(lm.model).notes
    assert note == "drafting with n-grams: models are not looked for in requests from a network"
    (here / "small.gguf").unlink()
    (note,) = Auto(model="found", vocabulary=64).bind(target(here).model).notes
    assert note == "drafting with n-grams: no smaller model was found that fits this one"


def test_a_found_model_that_is_no_longer_there_is_done_without(here: Path) -> None:
    lm = target(here)
    (found,) = found_models(lm.model)
    (here / "small.gguf").unlink()
    bound = Auto(model="found").bind(lm.model)
    assert bound.model is None and len(bound.notes) == 1
    assert bound.notes[0].startswith(f"drafting with n-grams: the model {found.name} cannot be loaded: ")
    assert lm.generate("abc", drafter="auto:model=found,warm=none", max_new_tokens=4).trace.notes == [*bound.notes]


def test_what_lies_near_is_named_once_the_nearest_first(here: Path) -> None:
    hub, beside = here.parents[1] / "hub", here.parent / "beside"
    beside.mkdir()
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "c-00001-of-00002.gguf"):
        (beside / name).write_bytes(b"")
    for state in ("1", "2"):
        (hub / "models--x--y" / "snapshots" / state).mkdir(parents=True)
        (hub / "models--x--y" / "snapshots" / state / "config.json").write_text(json.dumps({}))
    (hub / "models--x--y" / "snapshots" / "1" / "y-Q4_K_M.gguf").symlink_to(beside / "a.gguf")
    (here / "inner").mkdir()
    (here / "inner" / "config.json").write_text("{}")
    found = [
        (each.path.relative_to(here.parents[1]).as_posix(), each.inside)
        for each in nearby(own_place(str(here / "target.gguf")), ["config.json"])
    ]
    assert found == [
        ("models/mine/inner", True),
        ("models/mine/small.gguf", True),
        ("models/beside/a.gguf", False),
        ("models/beside/b-00001-of-00002.gguf", False),
        ("hub/models--x--y/snapshots/1", False),
        ("hub/models--x--y/snapshots/2", False),
    ]
    # Which of two states was loaded is not known, and a file is known by its quantization.
    assert own_place("x/y") is None and own_place("x/z") is None and own_place("") is None
    assert own_place("x/y:q4_k_m") == hub / "models--x--y" / "snapshots" / "1" / "y-Q4_K_M.gguf"


def test_the_shipped_draft_has_its_bytes() -> None:
    (name,) = SHIPPED
    assert weight_bytes(name) == (SHIPPED[name] / "int8.safetensors").stat().st_size
