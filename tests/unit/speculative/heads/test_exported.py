"""Heads in the layout of speculators: what is written is read back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.loaders.origins import loaded_from
from decodery.speculative.heads.drafter import head_named
from decodery.speculative.heads.exported import write_speculators
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.parts import Parts
from decodery.testing import tiny_transformer
from published import write
from published_heads import QWEN, SLIDING, block_config, block_tensors

TARGET = tiny_transformer(0, num_layers=6)
loaded_from(TARGET, "some/model")
WORDS = torch.arange(1, 41, 2, dtype=torch.int32)


def shaken(spec: str, *, reduced: bool = True) -> TrainedHead:
    """A head in int8, as training leaves it, with values of its own everywhere."""
    kind, shape = head_named(spec)
    tensors, settings = kind.untrained(TARGET, 0, **shape)
    if reduced:
        tensors["vocabulary"] = WORDS
    if kind.kind in ("dflash", "dspark"):
        for stem in [name.removesuffix(".qkv.weight") for name in tensors if name.endswith(".qkv.weight")]:
            tensors |= {f"{stem}.{each}_norm.weight": torch.ones(TARGET.config.head_dim) for each in "qk"}
    random = torch.Generator().manual_seed(1)
    bound = kind(TrainedHead(kind.kind, tensors, settings), TARGET)
    drawn = {
        name: each + torch.randn(each.shape, generator=random).to(each) / 8 if each.is_floating_point() else each
        for name, each in bound.parts.tensors.items()
    }
    return TrainedHead(kind.kind, Parts(drawn).quantized(), settings, model=TARGET.fingerprint)


def same(read: TrainedHead, written: TrainedHead) -> None:
    """Whether two heads have the same tensors and settings, but for what the layout says besides."""
    one, other = (Parts(each.tensors).floating() for each in (read, written))
    assert one.keys() - other.keys() <= {"lm_head.weight"} and other.keys() - one.keys() <= {"vocabulary"}
    assert all(torch.equal(one[name], other[name].to(one[name].dtype)) for name in one.keys() & other.keys())
    assert read.kind == written.kind
    for name, value in written.settings.items():
        assert json.loads(json.dumps(read.settings.get(name) or value)) == json.loads(json.dumps(value)), name


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        "eagle-3",
        "p-eagle",
        "dflash",
        "dflash:layers=2,block=4",
        "dspark",
        "dspark:markov=gated",
        "dspark:markov=rnn",
        "mtp",
    ],
)
def test_a_head_is_read_back_as_it_was_written(spec: str, reduced: bool, tmp_path: Path) -> None:
    trained = shaken(spec, reduced=reduced)
    write_speculators(trained, TARGET, tmp_path / "out")
    read = TrainedHead.load(tmp_path / "out")
    same(read, trained)
    assert read.facts["verifier"] == "some/model"
    if reduced and trained.kind != "mtp":
        assert torch.equal(read.tensors["vocabulary"], WORDS)
        assert torch.equal(read.tensors["lm_head.weight"], TARGET.projection(WORDS.long()).weight)  # type: ignore[union-attr]


def test_published_heads_are_written_as_they_were_read(tmp_path: Path) -> None:
    """With confidence, windows and norms by head, which heads that are trained here do not have."""
    settings: dict[str, Any] = {"markov_rank": 6, "sample_from_anchor": True, "enable_confidence_head": True}
    config = block_config("dspark", True, QWEN | SLIDING, **settings)
    folder = write(tmp_path / "given", config, block_tensors(QWEN, rank=6))
    trained = TrainedHead.load(folder)
    write_speculators(trained, TARGET, tmp_path / "out")
    same(TrainedHead.load(tmp_path / "out"), trained)


def test_layers_that_are_read_are_written_as_numbers(tmp_path: Path) -> None:
    head = shaken("eagle-3")
    ends = TrainedHead("eagle-3", head.tensors, dict(head.settings) | {"taps": [2, "half", -2]}, model=head.model)
    write_speculators(ends, TARGET, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def test_heads_that_vllm_would_misread_are_refused(tmp_path: Path) -> None:
    kind, shape = head_named("dflash")
    with pytest.raises(UnsupportedModel, match="has no such norms"):
        write_speculators(TrainedHead("dflash", *kind.untrained(TARGET, 0, **shape)), TARGET, tmp_path / "out")
    config = shaken("dflash", reduced=False)
    write_speculators(config, TARGET, tmp_path / "out")
    assert "sliding_window_non_causal" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("spec", ["eagle-3", "p-eagle", "dflash", "mtp"])
def test_biases_are_refused_by_their_name(spec: str, tmp_path: Path) -> None:
    """As Qwen2's layers have them; layers of heads for vLLM have none."""
    trained = shaken(spec)
    (name,) = [name for name in trained.tensors if name.endswith(".qkv.weight")]
    bias = {f"{name.removesuffix('weight')}bias": torch.ones(len(trained.tensors[name]))}
    biased = TrainedHead(trained.kind, dict(trained.tensors) | bias, trained.settings, model=trained.model)
    with pytest.raises(
        UnsupportedModel, match=r"have no biases, and this head has \S*layers\.0\.self_attn\.[qkv]_proj\.bias"
    ):
        write_speculators(biased, TARGET, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_layout_does_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    kind, _ = head_named("medusa")
    tensors, settings = kind.untrained(TARGET, 0)
    with pytest.raises(SettingsError, match="no layout for a head for medusa: it has those for eagle-3, p-eagle"):
        write_speculators(TrainedHead("medusa", tensors, settings), TARGET, tmp_path / "out")
    trained = shaken("eagle-3")
    stretched = dict(trained.settings) | {"layer": trained.settings["layer"] | {"stretch": [2.0] * 4}}
    with pytest.raises(UnsupportedModel, match="whose positions are scaled"):
        write_speculators(TrainedHead("eagle-3", trained.tensors, stretched), TARGET, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(SettingsError, match="out exists: name a new folder"):
        write_speculators(trained, TARGET, tmp_path / "out")
