"""DFlash and DSpark heads in GGUF files of llama.cpp: they are those of the folders that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.parts import Parts
from head_gguf import EXACT, Coding, file_of
from published import write
from published_heads import OUTPUTS, SLIDING, SPOKEN, VOCAB, block_config, block_tensors

OWN_PLACES = {"sample_from_anchor": False}
DSPARK = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", EXACT, {}, {}),
    "dflash with windows": ("dflash", EXACT | SLIDING, {}, {}),
    "dflash from its anchor": ("dflash", EXACT, {"sample_from_anchor": True}, {"sample_from_anchor": True}),
    "dflash of some tokens": ("dflash", EXACT, {"draft_vocab_size": OUTPUTS}, {}),
    "dspark": ("dspark", EXACT, {"projector_type": "dspark", **DSPARK}, {}),
    "dspark of own places": ("dspark", EXACT, OWN_PLACES | {"projector_type": "dspark"} | DSPARK, OWN_PLACES),
}
"""The kind, its layers, what the folder's configuration says besides, and the file."""


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_folder_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    kind, layers, own, keys = CASES[name]
    outputs, rank = own.get("draft_vocab_size", VOCAB), own.get("markov_rank", 0)
    tensors = block_tensors(layers, outputs=outputs, rank=rank)
    config = block_config(kind, False, layers, **own)
    del config["num_target_layers"]
    folder = TrainedHead.load(write(tmp_path / "head", config, tensors))
    file = TrainedHead.load(file_of(tmp_path / "head.gguf", layers, tensors, **keys))
    assert (file.kind, file.settings) == (folder.kind, folder.settings) and file.kind == kind
    assert file.tensors.keys() == folder.tensors.keys()
    assert all(torch.equal(each, folder.tensors[known]) for known, each in file.tensors.items())
    assert file.settings["from_anchor"] == ("anchor" in name or name == "dspark")
    if outputs == OUTPUTS:
        assert torch.equal(file.tensors["vocabulary"], SPOKEN.int())


def test_a_quantized_file_is_near_the_whole_one(tmp_path: Path) -> None:
    tensors = block_tensors(EXACT)
    whole = TrainedHead.load(file_of(tmp_path / "whole.gguf", EXACT, tensors))
    coded = TrainedHead.load(file_of(tmp_path / "coded.gguf", EXACT, tensors, Coding.Q8_0))
    assert any(each.dtype == torch.int8 for each in coded.tensors.values())
    rows = [Parts(each.tensors).floating()["fc.weight"] for each in (whole, coded)]
    assert 0 < float((rows[0] - rows[1]).abs().max()) < 0.05


def test_what_is_not_run_is_refused_by_its_name(tmp_path: Path) -> None:
    tensors = block_tensors(EXACT)
    path = tmp_path / "head.gguf"
    with pytest.raises(UnsupportedModel, match=r"the key dflash.selector_count is not known here"):
        TrainedHead.load(file_of(path, EXACT, tensors, selector_count=2))
    missing = {name: each for name, each in tensors.items() if name != "hidden_norm.weight"}
    with pytest.raises(CorruptFile, match=r"no tensor hidden_norm.weight"):
        TrainedHead.load(file_of(path, EXACT, missing))
    short = EXACT | SLIDING | {"layer_types": ["sliding_attention"]}
    with pytest.raises(CorruptFile, match="sliding_window_pattern should have 2 values"):
        TrainedHead.load(file_of(path, short, tensors))
