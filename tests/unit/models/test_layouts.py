"""OLMo 2, StableLM, GPT-NeoX and GPT-2 in int8, under the names that older checkpoints have, and what they refuse.

That their logits are those of `transformers` is tested with the other families.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decodery.compression.base import transformed
from decodery.compression.int8 import Int8
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.families.config_json import read_config
from decodery.models.loaders.load import load
from decodery.models.torch.portable import exact_gelu
from decodery.models.torch.transformer import Transformer, runs_natively
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.testing import check_identical
from decodery.training.draft import check_target
from tiny_models import assert_same_logits, make_model, random_ids, reference, save


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("case", ["starcoder2, no biases", "stablelm, side by side", "gpt_neox", "gpt2"])
def test_int8_says_nearly_the_same_and_is_exact(case: str, tmp_path: Path) -> None:
    loaded = load(save(make_model(case), tmp_path / "model"), dtype="int8", device="cpu")
    model, ids = loaded.model, random_ids(16)
    assert isinstance(model, Transformer) and model.capabilities.exact_rows and not runs_natively(model.config)
    together = model.forward(Batch([Segment(np.arange(16), ids)])).logits
    assert torch.nn.functional.cosine_similarity(together, reference(make_model(case), ids)).min() > 0.99
    cache, rows = model.new_cache(), []
    for chunk in (ids[:5], ids[5:6], ids[6:]):
        rows.append(model.forward(Batch([Segment.chunk(chunk, cache)])).logits)
        cache.keep(range(len(chunk)))
    assert model.capabilities.exact_rows and torch.equal(torch.cat(rows), together)
    check_identical(model, [[5, 6, 7] * 3], drafter=PromptLookup(length=3), max_new_tokens=4, tested="drafted")
    # What copies a layer of Llama's kind says that this is none.
    with pytest.raises(SettingsError, match="no draft can be cut"):
        check_target(loaded)
    with pytest.raises(UnsupportedModel, match="cannot be transformed"):
        transformed(model, [Int8()])


def test_the_error_function_is_near_enough() -> None:
    x = torch.linspace(-9, 9, 4001)
    assert (exact_gelu(x) - torch.nn.functional.gelu(x.double())).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("case", "renamed"),
    [
        ("gpt2", ("transformer.", "")),
        ("gpt_neox", ("lm_head.", "embed_out.")),
        ("gpt_neox", ("embed_out.", "lm_head.")),
    ],
)
def test_older_names_of_tensors_are_known(case: str, renamed: tuple[str, str], tmp_path: Path) -> None:
    theirs = make_model(case)
    file = save(theirs, tmp_path / "model") / "model.safetensors"
    tensors = {name.replace(*renamed): tensor for name, tensor in load_file(file).items()}
    # Masks that were once saved beside the weights.
    tensors["gpt_neox.layers.0.attention.bias" if case == "gpt_neox" else "h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, file, {"format": "pt"})
    assert_same_logits(load(tmp_path / "model", dtype="float32", device="cpu").model, theirs)


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"model_type": "minicpm3"}, "minicpm3"),
    ],
)
def test_what_is_not_in_the_pass_is_refused_by_name(case: str, change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config(make_model(case).config.to_dict() | change)
