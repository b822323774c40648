"""Heads that `auto` finds by itself, and what is remembered of each on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import decodery.speculative.drafters.adviser_record as record_module
from decodery.core.method_spec import from_network
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders import nearby, origins
from decodery.speculative.drafters.advice import AskCosts
from decodery.speculative.drafters.adviser_record import Record, keep_records, record_of, remembered
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.eagle_3 import EAGLE3Head
from decodery.speculative.heads.found import FoundHead, chosen_head, found_heads, identity
from decodery.speculative.heads.head import HEAD, TrainedHead
from decodery.step.drafter_memory import Memory
from decodery.testing import tiny_transformer
from head_gguf import EXACT, file_of
from published import write
from published_heads import block_config, block_tensors


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(record_module, "_kept", record_module._Kept())
    return tmp_path


def head_for(model: object, seed: int = 0) -> TrainedHead:
    tensors, settings = EAGLE3Head.untrained(model, seed)  # type: ignore[arg-type]
    tensors["norm.weight"] = tensors["norm.weight"] + seed
    return TrainedHead("eagle-3", tensors, settings, model=model.fingerprint)  # type: ignore[attr-defined]


def test_heads_beside_a_model_are_found_and_those_of_other_models_are_not(own_home: Path) -> None:
    model, other = tiny_transformer(0, num_layers=4), tiny_transformer(1, num_layers=4)
    folder = own_home / "models" / "mine"
    folder.mkdir(parents=True)
    origins.loaded_from(model, str(folder))
    for place, target in (("inside", model), ("other", other)):
        (folder / place).mkdir()
        head_for(target).save(folder / place / HEAD)
    (own_home / "models" / "beside").mkdir()
    head_for(model, 1).save(own_home / "models" / "beside" / HEAD)
    (own_home / "models" / "broken").mkdir()
    (own_home / "models" / "broken" / HEAD).write_bytes(b"none")
    found = found_heads(model)
    assert [Path(each.place.removeprefix("in ")).name for each in found] == ["inside", "beside"]
    assert len({identity(each.trained) for each in found}) == 2
    bound = Auto(head="found").bind(model)
    assert bound.head is found[0].trained
    assert Auto(head="found").bind(other).head is None


def test_heads_that_name_no_model_are_found_in_its_folder_where_they_fit(own_home: Path) -> None:
    """A GGUF file and a folder in z-lab's layout; not beside the folder, and not of another shape."""
    here, tensors = own_home / "models" / "mine", block_tensors(EXACT)
    (here / "nested").mkdir(parents=True)
    model, other = tiny_transformer(0, num_layers=6), tiny_transformer(0, num_layers=6, hidden_size=48)
    for each in (model, other):
        origins.loaded_from(each, str(here / "model-q4_k_m.gguf"))
    (here / "model-q4_k_m.gguf").write_bytes(b"GGUF" + bytes(400))
    file_of(here / "draft.gguf", EXACT, tensors)
    file_of(own_home / "models" / "beside.gguf", EXACT, tensors)
    write(here / "zlab", block_config("dflash", False, EXACT), tensors)
    write(own_home / "models" / "zlab", block_config("dflash", False, EXACT), tensors)
    write(here / "another", block_config("dflash", False, EXACT) | {"target_model_name_or_path": "a/other"}, tensors)
    by_shape = "by its shape alone, as it names no model"
    assert [each.place for each in found_heads(model)] == [
        f"in {here / 'zlab'}, {by_shape}",
        f"in {here / 'draft.gguf'}, {by_shape}",
    ]
    assert found_heads(other) == ()


def test_gguf_heads_that_name_their_model_are_found_by_it(own_home: Path) -> None:
    """Beside its folder too; those of another model not even inside."""
    here, tensors = own_home / "models" / "mine", block_tensors(EXACT)
    here.mkdir(parents=True)
    model = tiny_transformer(0, num_layers=6)
    origins.loaded_from(model, str(here / "some-model-q4_k_m.gguf"))
    (here / "some-model-q4_k_m.gguf").write_bytes(b"GGUF" + bytes(400))
    file_of(here / "other.gguf", EXACT, tensors, base="owner/other-model")
    beside = file_of(own_home / "models" / "head.gguf", EXACT, tensors, base="owner/Some-Model")
    assert [each.place for each in found_heads(model)] == [f"in {beside}"]


def test_heads_for_the_embedded_model_are_known_by_its_name_on_the_hub(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearby, "hub_cache", lambda: own_home / "hub")
    model = tiny_transformer(0, num_layers=6)
    origins.loaded_from(model, "smollm2")
    cached, named = own_home / "hub" / "models--a--head" / "snapshots", "target_model_name_or_path"
    cached.mkdir(parents=True)
    for state, target in (("1", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("2", "HuggingFaceTB/SmolLM2-360M-Instruct")):
        write(cached / state, block_config("dflash", False, EXACT) | {named: target}, block_tensors(EXACT))
    assert [each.place for each in found_heads(model)] == [f"in {cached / '1'}"]


def test_the_trace_says_why_there_is_no_head(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_transformer(0, num_layers=4)

    def notes(place: str) -> list[str]:
        engine = Engine(model, memory=Memory())
        seq = engine.submit(Request([1, 2, 3], max_new_tokens=4, drafter=Auto(warm=None, head=place)))
        engine.run([seq])
        return seq.trace.notes

    assert notes("found") == ["drafting with n-grams: no head was found that fits this model"]
    assert notes("shipped") == ["drafting with n-grams: no head comes along for this model"]
    with from_network():
        assert Auto(head="found").bind(model).notes[0].endswith("not looked for in requests from a network")
    bad = head_for(model)
    monkeypatch.setattr("decodery.speculative.heads.found._known", {model: (FoundHead("here", bad),)})
    keep = AskCosts(0.1)
    recall = remembered(model, identity(bad))
    assert recall is not None
    recall(keep)
    keep.taken, keep.passed = 2.0, 100.0
    assert notes("found") == ["drafting with n-grams: the head for eagle-3 here would cost 2.0% more than it brings"]
    keep.taken, keep.brought = 1.0, 2.0
    assert len(notes("found")) == 1 and "would cost" not in notes("found")[0]


def test_what_an_adviser_brought_is_remembered_and_decides(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_transformer(0, num_layers=4)
    monkeypatch.setattr("decodery.speculative.heads.found._candidates", lambda model: iter(()))
    heads = [head_for(model, seed) for seed in (0, 1)]
    monkeypatch.setattr(
        "decodery.speculative.heads.found._candidates",
        lambda model: iter((f"number {at}", head) for at, head in enumerate(heads)),
    )

    def told(head: TrainedHead, taken: float, brought: float, passed: float) -> None:
        costs, recall = AskCosts(0.1), remembered(model, identity(head))
        assert recall is not None
        recall(costs)
        costs.taken, costs.brought, costs.passed = taken, brought, passed

    assert chosen_head(model)[0] is heads[0]
    told(heads[0], 1.0, 2.0, 100.0)
    # All are tried in turn.
    assert chosen_head(model)[0] is heads[1]
    told(heads[1], 1.0, 5.0, 100.0)
    assert chosen_head(model)[0] is heads[1]
    keep_records()
    monkeypatch.setattr(record_module, "_kept", record_module._Kept())
    assert record_of(model, identity(heads[1])) == Record(1.0, 5.0, 100.0, 4.0, 4.0)
    told(heads[1], 9.0, 0.0, 100.0)
    chosen, notes = chosen_head(model)
    assert chosen is heads[0] and notes[0].endswith("saves 1.0% of the time of passes, its questions included")
    assert notes[1] == "drafting with n-grams: the head for eagle-3 number 1 would cost 2.5% more than it brings"
    told(heads[0], 9.0, 0.0, 100.0)
    assert chosen_head(model)[0] is None
    # Another head is another adviser, whatever its folder.
    changed = replace(heads[0], tensors={**heads[0].tensors, "norm.weight": heads[0].tensors["norm.weight"] + 2})
    assert record_of(model, identity(changed)) == Record()


def test_a_trial_is_earned_by_several_processes(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes of earlier processes have earned is there for the next one, until a question was asked."""
    model = tiny_transformer(0, num_layers=4)
    for process, (asked, earned) in enumerate(((0.0, 0.8), (1.0, 1.6), (0.0, 0.4))):
        costs = AskCosts(0.1, recalled=remembered(model, "any"))
        for _ in range(100):
            costs.step(1.0, timed=True)
        assert np.isclose(costs.credit, earned), process
        assert record_of(model, "any").explained("it").endswith("not tried on this machine") == (process < 2)
        if asked:
            costs.spend(asked)
        keep_records()
        monkeypatch.setattr(record_module, "_kept", record_module._Kept())


def test_given_prices_are_not_remembered(own_home: Path) -> None:
    model = tiny_transformer(0, num_layers=4)
    costs = AskCosts(0.1, recalled=remembered(model, "any"))
    costs.step(1.0, timed=False)
    assert costs.recalled is not None
    costs.step(1.0, timed=True)
    assert costs.recalled is None and np.isclose(record_of(model, "any").passed, 2.0)
