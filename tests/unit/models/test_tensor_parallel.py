"""A model that two processes share, over gloo, writes what it writes in one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import split_program
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.loaders.load import load
from decodery.models.torch.transformer import Transformer
from decodery.testing import tiny_transformer, to_int8
from tiny_models import make_model, save

CASES = {"llama": "llama tied, biases, wide heads", "gemma": "gemma3_text", "qwen": "qwen3, biases"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("models")
    for name, case in CASES.items():
        save(make_model(case), whole / name)
    # Of 128 inputs each of two processes takes two groups of 32.
    save(make_model(CASES["llama"], intermediate_size=128), whole / "whole groups")
    return whole


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has written."""
    result = tmp_path_factory.mktemp("result") / "said"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    around = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            [sys.executable, split_program.__file__, str(folder), str(result)],
            env=around | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [each.communicate(timeout=300)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], errors
    return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(2)]


def test_processes_write_the_texts_of_one(shared: list[dict[str, Any]]) -> None:
    expected = split_program.texts(tiny_transformer())
    assert shared[0]["tiny"] == shared[1]["tiny"] == expected


def test_each_has_half_of_the_heads_and_of_the_cache(shared: list[dict[str, Any]]) -> None:
    whole = tiny_transformer()
    for each in shared:
        assert each["kv_heads"] * 2 == whole.config.num_kv_heads
        assert each["cache"] * 2 == whole.new_cache().slot_bytes


def far(found: list[list[float]], expected: list[list[float]]) -> float:
    return float((torch.tensor(found).double() - torch.tensor(expected).double()).abs().max())


def test_logits_are_those_of_one_process(shared: list[dict[str, Any]]) -> None:
    expected = split_program.logits(tiny_transformer())
    for each in shared:
        assert each["logits"] == shared[0]["logits"] and far(each["logits"], expected) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_folders_are_loaded_in_parts(shared: list[dict[str, Any]], folder: Path, name: str) -> None:
    expected = split_program.logits(load(folder / name, dtype="float32").model)
    for each in shared:
        assert far(each[name], expected) < 1e-4


def test_weights_stay_packed_in_every_process(shared: list[dict[str, Any]]) -> None:
    base = to_int8(tiny_transformer())
    expected = split_program.texts(Transformer(base.config, split_program.packed(base)))
    assert shared[0]["packed"] == shared[1]["packed"] == expected


@pytest.mark.parametrize("name", CASES)
def test_quantized_folders_are_loaded_in_parts(shared: list[dict[str, Any]], folder: Path, name: str) -> None:
    base = load(folder / name, dtype="int8").model
    assert isinstance(base, Transformer)
    expected = split_program.logits(Transformer(base.config, split_program.packed(base)))
    for each in shared:
        assert far(each[f"{name}, int8"], expected) < 1e-4


def test_a_model_in_int4_is_shared_from_its_folder_to_its_texts(shared: list[dict[str, Any]], folder: Path) -> None:
    base = load(folder / "whole groups", dtype="int4").model
    assert isinstance(base, Transformer)
    whole = Transformer(base.config, split_program.packed(base))
    expected, plain = split_program.logits(whole), load(folder / "whole groups", dtype="float32").model
    texts = split_program.texts(whole)
    for each in shared:
        assert far(each["whole groups, int4"], expected) < 1e-4 < far(split_program.logits(plain), expected)
        assert each["whole groups, int4, texts"] == texts


def test_what_cannot_stay_packed_is_split_in_floating_point(shared: list[dict[str, Any]], folder: Path) -> None:
    expected = split_program.logits(load(folder / "llama", dtype="float32").model)
    for each in shared:
        found = each["fallback"]
        assert found["dtype"] == "float32" and far(found["logits"], expected) < 1e-4
        (said,) = found["says"]
        assert said.startswith("weights are split in float32, not packed: ") and "are not cut at" in said


def test_groups_of_inputs_are_not_cut(shared: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(shared):
        assert f"that share a step by 32 inputs are not cut at {48 * rank} to {48 + 48 * rank}" in each["int4"]


@pytest.mark.parametrize("wrong", ["without sums", "cut as one"])
def test_a_wrong_plan_gives_other_logits(shared: list[dict[str, Any]], wrong: str) -> None:
    assert far(shared[0][wrong], split_program.logits(tiny_transformer())) > 0.1


def test_other_passes_and_clocks_are_refused_in_every_process(shared: list[dict[str, Any]]) -> None:
    for each in shared:
        assert "have come to different passes" in each["other passes"]
        assert "use prompt-lookup, or leave tensor_parallel_size out" in each["auto"]


def test_processes_are_begun_by_torchrun(folder: Path) -> None:
    with pytest.raises(SettingsError, match="torchrun --nproc-per-node 2 PROGRAM"):
        load(folder / "llama", tensor_parallel_size=2)


def test_what_cannot_be_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from decodery.models.torch.tensor_parallel import SplitTransformer

    model = tiny_transformer()
    mesh: Any = SimpleNamespace(size=lambda: 3, device_type="cpu")
    with pytest.raises(UnsupportedModel, match="4 heads cannot be shared out among 3 processes"):
        SplitTransformer(model.config, model.weights, mesh)
    half = tiny_transformer(dtype=torch.bfloat16)
    mesh = SimpleNamespace(size=lambda: 2, device_type="cpu")
    with pytest.raises(UnsupportedModel, match="choose dtype float32"):
        SplitTransformer(half.config, half.weights, mesh)
