"""Every key of a GGUF file is read, known to say nothing, or refused by its name, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization

from decodery.core.errors import DecoderyError, UnsupportedModel
from decodery.models.config import ModelConfig, Rope
from decodery.models.loaders.fields import Array, Either, Flag, Kind, Number, Text, Whole
from decodery.models.loaders.gguf_architectures import ARCHITECTURES
from decodery.models.loaders.gguf_config import _CONFIG, OTHERS, UNREAD, read_gguf_config
from decodery.models.loaders.gguf_file import GGUFFile
from dense_gguf import write_dense
from selective_gguf import write_selective
from tiny_gguf import write_gguf, write_states
from tiny_models import make_model

Write = Callable[..., None]
WRITTEN: dict[str, tuple[Write, str]] = {
    **{name: (write_gguf, case) for name, case in {
        "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3, tied", "gemma3": "gemma3_text",
    }.items()},
    "mamba2": (write_states, "mamba2"),
    "falcon-h1": (write_states, "falcon_h1"),
    **{name: (write_selective, name) for name in ("mamba", "jamba")},
    **{name: (write_dense, case) for name, case in {
        **{each: each for each in ("gemma", "gemma2", "phi3", "smollm3", "granite", "ernie4_5", "glm4", "starcoder2")},
        **{each: each for each in ("lfm2", "gemma3n", "gemma4", "olmoe", "granitemoe", "seed_oss", "nemotron_h")},
        "phi2": "phi", "olmo2": "olmo3", "exaone4": "exaone4, no window", "hunyuan-dense": "hunyuan_v1_dense",
        "mistral3": "mistral, no window", "deepseek2": "deepseek_v3", "llama4": "llama4_text", "lfm2moe": "lfm2_moe",
        "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe, normed", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss",
        "mixtral": "mixtral", "granitehybrid": "granitemoehybrid", "nemotron_h_moe": "nemotron_h, experts",
        "qwen3next": "qwen3_next", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe",
    }.items()},
}  # fmt: skip
"""By architecture, what writes a file of it, and of which model; files of Mixtral are called Llama's."""
ALONE = ("rope.scaling.original_context_length", "attention.layer_norm_rms_epsilon", *UNREAD)
"""Keys that change nothing where no other key is beside them, or where norms are centred and another one counts."""


def written(name: str, path: Path) -> GGUFFile:
    write, case = WRITTEN[name]
    changes = {"n_group": 1, "topk_group": 1} if name == "nemotron_h_moe" else {}
    write(path, make_model(case, **changes), Quantization.F32)
    return GGUFFile.whole(path)


def values(kind: Kind) -> list[Any]:
    """Some of a kind that switch something on, or off."""
    if isinstance(kind, Either):
        return values(kind.kinds[0])
    if isinstance(kind, Flag):
        return [True, False]
    if isinstance(kind, Text):
        return ["linear"]
    if isinstance(kind, Array):
        return [np.array([1.0, 0.0, 1.0, 0.0, 1.0][: min(kind.most, 3)])]
    if isinstance(kind, Whole):
        return [max(kind.least, 3), max(kind.least, 5)]
    assert isinstance(kind, Number)
    return [0.375, 4.0]


def test_all_architectures_have_a_file() -> None:
    assert set(ARCHITECTURES) <= set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_key_is_read_or_refused(name: str, tmp_path: Path) -> None:
    file = written(name, tmp_path / "model.gguf")
    plain, prefix = read_gguf_config(file, "x"), file.metadata["general.architecture"]
    own = ARCHITECTURES.get(name)
    ignored = {*ALONE, *(() if own is None else own.unread)}
    said = dict(file.metadata)

    def read(key: str, value: Any) -> ModelConfig | None:
        file.metadata = said | {f"{prefix}.{key}": value}
        try:
            return read_gguf_config(file, "x")
        except DecoderyError:
            return None

    for key, kind in (_CONFIG | OTHERS).items():
        if key not in ignored and f"{prefix}.{key}" not in said:
            assert any(read(key, value) != plain for value in values(kind)), key


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "expert_weights_norm", False),
        ("llama4", "expert_gating_func", 1),
        ("olmo2", "attention.causal", False),
        ("gemma", "final_logit_softcapping", 30.0),
        ("mixtral", "attn_logit_softcapping", 50.0),
        ("smollm3", "attention.sliding_window", 8),
        ("hunyuan-dense", "attention.scale", 0.5),
        ("llama", "rope.scaling.yarn_log_multiplier", 0.1),
    ],
)
def test_what_would_be_passed_over_is_refused_by_its_name(name: str, key: str, value: Any, tmp_path: Path) -> None:
    file = written(name, tmp_path / "model.gguf")
    file.metadata[f"{file.metadata['general.architecture']}.{key}"] = value
    with pytest.raises(UnsupportedModel, match=key.replace(".", r"\.")):
        read_gguf_config(file, "x")


def test_what_converters_write_of_it_and_changes_nothing_is_known(tmp_path: Path) -> None:
    file = written("granite", tmp_path / "model.gguf")
    plain = read_gguf_config(file, "x")
    # Of a Granite 4 of which all layers attend.
    file.metadata |= {"granite.ssm.state_size": 128, "granite.ssm.inner_size": 256, "granite.expert_count": 0}
    file.metadata |= {"granite.attention.causal": True, "granite.rope.scaling.type": "none"}
    assert read_gguf_config(file, "x") == plain


def test_a_factor_alone_scales_positions(tmp_path: Path) -> None:
    file = written("granite", tmp_path / "model.gguf")
    file.metadata |= {"granite.rope.scaling.factor": 4.0}
    assert read_gguf_config(file, "x").rope == Rope(1e4, "linear", factor=4.0)
    # As llama.cpp, which scales nothing where a file says so.
    file.metadata |= {"granite.rope.scaling.type": "none"}
    assert read_gguf_config(file, "x").rope == Rope(1e4)


@pytest.mark.parametrize("kind", ["linear", None])
def test_a_factor_beside_divided_frequencies_is_refused(kind: str | None, tmp_path: Path) -> None:
    write_dense(tmp_path / "model.gguf", make_model("exaone4"))
    file = GGUFFile.whole(tmp_path / "model.gguf")
    turned = read_gguf_config(file, "x").local_rope
    assert turned is not None and turned.kind == "factors"
    file.metadata |= {"exaone4.rope.scaling.factor": 4.0} | ({"exaone4.rope.scaling.type": kind} if kind else {})
    with pytest.raises(UnsupportedModel, match=r"rope\.scaling\.factor = 4\.0"):
        read_gguf_config(file, "x")
