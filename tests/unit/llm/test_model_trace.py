"""`LLM.trace`: states by the names of `transformers` modules, read and changed as PyTorch hooks there would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import decodery as dc
from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.llm.model_trace import ModelTrace, site_of
from serving import tiny_lm
from tiny_models import make_model, save

TOKENS = [5, 9, 200, 31, 7, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = make_model("llama")
    return save(model, tmp_path_factory.mktemp("llama")), model


@pytest.fixture(scope="module")
def lm(folder: tuple[Path, Any]) -> LLM:
    return dc.load(str(folder[0]), dtype="float32")


def test_modules_give_what_their_hooks_give(lm: LLM, folder: tuple[Path, Any]) -> None:
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1.self_attn", "model.layers.2.mlp", "model.norm"]
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, given, result: seen.update({name: (result if torch.is_tensor(result) else result[0])[0]})

    handles = [folder[1].get_submodule(name).register_forward_hook(keep(name)) for name in names]
    inner = folder[1].get_submodule("model.layers.1.self_attn.o_proj")
    handles.append(
        inner.register_forward_hook(lambda module, given, result: seen.update({"o_proj.input": given[0][0]}))
    )
    with torch.no_grad():
        logits = folder[1](torch.tensor([TOKENS])).logits[0]
    for handle in handles:
        handle.remove()
    with lm.trace(TOKENS) as trace:
        saved = {name: trace.read(name) for name in names}
        saved["o_proj.input"] = trace.read("model.layers.1.self_attn.o_proj.input")
    for name, each in saved.items():
        assert torch.allclose(each.value, seen[name], atol=1e-4), name
    # The check sees a wrong layer.
    assert not torch.allclose(saved["model.layers.0"].value, seen["model.embed_tokens"], atol=1e-4)
    assert torch.allclose(trace.logits, logits, atol=1e-4)


def test_a_change_acts_as_a_hook_that_changes(lm: LLM, folder: tuple[Path, Any]) -> None:
    def doubled(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
        result = result.clone()
        result[0, 2:4] *= 2
        return result

    handle = folder[1].get_submodule("model.layers.0.mlp").register_forward_hook(doubled)
    with torch.no_grad():
        logits = folder[1](torch.tensor([TOKENS])).logits[0]
    handle.remove()
    with lm.trace(TOKENS) as plain:
        pass
    with lm.trace(TOKENS) as trace:
        trace.write("model.layers.0.mlp", lambda rows: rows * 2, rows=slice(2, 4))
    assert torch.allclose(trace.logits, logits, atol=1e-4)
    # Rows before those changed do not see it.
    assert torch.equal(trace.logits[:2], plain.logits[:2]) and not torch.allclose(trace.logits[2:], plain.logits[2:])


def test_states_of_one_prompt_are_patched_into_another(lm: LLM) -> None:
    other = [*TOKENS[:3], 77, *TOKENS[4:]]
    with lm.trace(other) as source:
        state = source.read("blocks.1.hook_resid_post")
    with lm.trace(TOKENS) as trace:
        trace.write("resid_post.1", state.value[3], rows=3)
        trace.write("resid_post.1", state.value[-2:], rows=[-2, -1])
        after = trace.read("resid_post.-1")
    with lm.trace(other) as whole:
        wanted = whole.read(-1)
    assert torch.allclose(after.value[3:], wanted.value[3:], atol=1e-5) and after.value.shape == (len(TOKENS), 64)


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("model.layers.7", "resid_post.7"),
        ("model.layers.7.input", "resid_pre.7"),
        ("model.language_model.layers.7.mlp", "mlp_out.7"),
        ("transformer.h.3.attn.c_proj.input", "head_out.3"),
        ("transformer.wte", "embed"),
        ("blocks.3.attn.hook_z", "head_out.3"),
        ("gpt_neox.layers.3.attention.dense", "attn_out.3"),
        ("hook_embed", "embed"),
        ("transformer.ln_f", "final_norm"),
        ("lm_head", "logits"),
        ("attn_out.2", "attn_out.2"),
        (4, 4),
    ],
)
def test_names_of_other_libraries(name: str | int, site: str | int) -> None:
    assert site_of(name) == site


def test_wrong_use_is_refused_in_words() -> None:
    lm = tiny_lm()
    with (
        pytest.raises(SettingsError, match=r"no site 'model.layers.1.mlp.gate_proj'.*sites are"),
        lm.trace("ab") as trace,
    ):
        trace.read("model.layers.1.mlp.gate_proj")
    with pytest.raises(SettingsError, match="outside the prompt: it has 2 tokens"), lm.trace("ab") as trace:
        trace.write("embed", torch.zeros(1), rows=2)
    with lm.trace("ab") as trace:
        saved = trace.read("embed")
        with pytest.raises(SettingsError, match="read it after that"):
            _ = saved.value
        with pytest.raises(SettingsError, match="read them after that"):
            _ = trace.logits
    with pytest.raises(SettingsError, match="the pass has run"):
        trace.read("embed")
    with pytest.raises(SettingsError, match=r"gives \[3\] in place of \[2, "), lm.trace("ab") as trace:
        trace.write("embed", torch.zeros(3))
    with pytest.raises(SettingsError, match="a change gives None in place of"), lm.trace("ab") as trace:
        trace.write("embed", lambda rows: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(SettingsError, match="one token or more"):
        ModelTrace(lm.model, [])
