"""Second models that a method names: the precision they are loaded in."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from decodery.core.errors import SettingsError
from decodery.core.registry import methods, resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.drafts import SHIPPED
from decodery.models.loaders.load import load
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel
from decodery.speculative.drafters.draft_model import DraftModel
from tiny_gguf import write_gguf
from tiny_models import make_model

USES = {
    "draft-model": "drafter",
    "rapid": "drafter",
    "entropy-adaptive": "logits_source",
    "transfer-q": "logits_source",
}
"""What takes a second model by name, and the option that it is given to."""
SPECS = {
    "draft-model": "draft-model:model={},dtype={}",
    "rapid": "rapid:model={},dtype={}",
    "entropy-adaptive": "entropy-adaptive:small={},dtype={}",
    "transfer-q": "transfer-q:reward=log-probability,baseline={},dtype={},k=2,length=2",
}


@pytest.fixture
def lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    write_gguf(tmp_path / "target.gguf", make_model("llama"), Kind.Q8_0)
    write_gguf(tmp_path / "second.gguf", make_model("llama", seed=1), Kind.Q8_0)
    return LLM(load(tmp_path / "target.gguf", dtype="float32", device="cpu"))


def test_whatever_takes_a_second_model_by_name_takes_its_precision() -> None:
    found = set()
    for method in methods():
        kinds = typing.get_type_hints(method.cls)
        fields = {field.name for field in dataclasses.fields(method.cls) if field.init}
        if any(LanguageModel in (kind := typing.get_args(kinds[name])) and str in kind for name in fields):
            assert kinds.get("dtype") == Precision, method.name
            found.add(method.name)
    assert found >= USES.keys()


@pytest.mark.parametrize("name", USES)
def test_a_second_model_is_loaded_in_the_precision_asked_for(name: str, lm: LLM, tmp_path: Path) -> None:
    def generate(dtype: str) -> list[int]:
        settings: dict[str, Any] = {USES[name]: SPECS[name].format(tmp_path / "second.gguf", dtype)}
        return lm.generate("Hi", **{"drafter": None, "max_new_tokens": 6, "ignore_eos": True, **settings}).tokens

    written = generate("int4")
    if USES[name] == "drafter":
        assert written == lm.generate("Hi", drafter=None, max_new_tokens=6, ignore_eos=True).tokens
    second = tmp_path / "home" / "converted"
    assert len(list(second.rglob("int4*.safetensors"))) == 1 and not list(second.rglob("int8*.safetensors"))
    generate("int8")
    assert len(list(second.rglob("int8*.safetensors"))) == 1


@pytest.mark.parametrize("name", USES)
def test_a_precision_that_does_not_exist_is_refused(name: str) -> None:
    family = {"drafter": "drafter", "logits_source": "logits-source"}[USES[name]]
    with pytest.raises(SettingsError) as caught:
        resolve(family, SPECS[name].format("second.gguf", "int5"))
    assert str(caught.value) == f"{name}: dtype=int5 is not auto, float32, bfloat16, float16, int8 or int4"


def test_a_precision_without_a_name_is_refused(lm: LLM) -> None:
    assert named(lm.model) is lm.model
    for drafter in ("rapid:dtype=int4", DraftModel(lm.model, dtype="int4")):
        with pytest.raises(SettingsError, match="a second model given by name: name one, or leave dtype out"):
            lm.generate("Hi", drafter=drafter)
    with pytest.raises(SettingsError, match="smollm2-draft is kept in int8 alone"):
        named("smollm2-draft", "int4")
    assert not list(SHIPPED["smollm2-draft"].parent.glob("*.lock"))
