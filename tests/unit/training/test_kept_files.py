"""Files that an interrupted run goes on from: read by runs of the same settings, and refused where they are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.training.kept_files import keep, kept


def test_what_is_kept_is_read_by_runs_of_the_same_settings_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "states.safetensors"
    keep(path, {"rows": torch.arange(6.0).view(2, 3)}, "settings", step="4")
    with kept(path, "settings") as (tensors, about):
        assert tensors["rows"].tolist() == [[0, 1, 2], [3, 4, 5]] and about["step"] == "4"
    with pytest.raises(SettingsError, match="other settings or other data"), kept(path, "others"):
        pytest.fail("what belongs to others is not read")


def test_what_is_damaged_or_lacks_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    keep(path, {"rows": torch.zeros(3)}, "settings")
    with pytest.raises(CorruptFile, match="is damaged: remove it"), kept(path, "settings") as (tensors, _):
        tensors["columns"]
    with pytest.raises(CorruptFile, match="is damaged: remove it"), kept(path, "settings") as (tensors, _):
        tensors["rows"].split([1, 1])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CorruptFile, match="is damaged: remove it"), kept(path, "settings"):
        pytest.fail("a file that was cut is not read")
