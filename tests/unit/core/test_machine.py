"""The memory that a process may use: its control groups bound what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from decodery.core.machine import _limits, physical_memory, usable_memory
from decodery.server import settings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, []),
        ("0::/\n", {"memory.max": f"{4 * GIB}\n"}, [4 * GIB]),
        # A group has what those above it allow.
        ("0::/a/b\n", {"a/memory.max": f"{2 * GIB}\n", "a/b/memory.max": "max\n"}, [2 * GIB]),
        ("4:cpu,memory:/docker/x\n2:cpu:/\n", {"memory/memory.limit_in_bytes": f"{3 * GIB}\n"}, [3 * GIB]),
        ("2:cpu:/\n", {"memory/memory.limit_in_bytes": f"{GIB}\n", "memory.max": f"{GIB}\n"}, []),
    ],
)
def test_limits_of_groups_are_found(tmp_path: Path, groups: str, files: dict[str, str], expected: list[int]) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert list(_limits(own, root)) == expected


def test_no_more_than_the_machine_has() -> None:
    usable, machine = usable_memory(), physical_memory()
    assert machine is None or (usable is not None and 0 < usable <= machine)
    assert list(_limits(Path("nowhere"), Path("nowhere"))) == []


def test_a_server_takes_of_the_memory_where_its_models_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    for cards, usable, quarter in (((), 64, 16), ((24, 80), 128, 6), ((), None, None)):
        monkeypatch.setattr(settings, "cards", lambda cards=cards: tuple(each * settings.GIB for each in cards))
        monkeypatch.setattr(settings, "usable_memory", lambda usable=usable: usable and usable * settings.GIB)
        expected = 2 if quarter is None else quarter
        assert settings.kv_bytes(None) == settings.quarter_of_memory() == expected * settings.GIB
        assert settings.memory_bytes(None) == 3 * expected * settings.GIB
