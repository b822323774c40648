"""The figure of a method is that of its family's tables, of the most that was spent, beside a named baseline."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sys import modules
from types import ModuleType

import pytest

PAGES = {
    "speed": ("Speed", "# Speed\n\n## Advisers\n\n| kind | `auto` |\n|---|---:|\n| edit | 1.29 |\n"),
    "diffusion": (
        "Diffusion",
        "# Diffusion\n\n## Lists\n\n|  | passes | one answer |\n|---|---:|---:|\n| `static` | 10 | 1.0 |\n"
        "| `edit` | 4 | 0.9 |\n| `static:cache=kept(refresh=4)` | 10 | 0.8 |\n",
    ),
    "search": (
        "Search",
        "# Search\n\n## Questions\n\n| method | n | accuracy (95 %) | over the vote (95 %) |\n|---|---:|---:|---:|\n"
        "| `greedy` | 1 | 0.3 |  |\n| `best` | 1 | 0.3 | +0.00 (+0.00 to +0.00) |\n"
        "| `best` | 8 | 0.5 | +0.20 (+0.10 to +0.30) |\n| `best` | 4 | 0.4 | +0.10 (-0.10 to +0.20) |\n",
    ),
    "training": (
        "Training",
        "# Training\n\n## Kinds\n\n| kind | figure | held out | 95 % interval | baselines |\n|---|---|---|---|---|\n"
        "| `probe` | auroc | 0.7 | 0.6 to 0.8 | length 0.5 |\n| `counted` | nothing is held out | hours 0.1 |  |  |\n",
    ),
}


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    path = Path(__file__).parents[3] / "tools" / "docs" / "evidence.py"
    spec = spec_from_file_location("evidence_of_docs", path)
    assert spec is not None and spec.loader is not None
    # Dataclasses look for the module that they are in.
    modules[spec.name] = found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("diffusion", "edit", "[Lists](results/diffusion.md#lists): one answer 0.9 (static 1.0), passes 4 (static 10)"),
        ("diffusion", "static", "[Lists](results/diffusion.md#lists): one answer 1.0, passes 10"),
        ("drafter", "counted", "None"),
        ("search", "best", "over the vote (95 %) +0.20 (+0.10 to +0.30), accuracy (95 %) 0.5 (greedy 0.3)"),
        ("monitor", "probe", "auroc, held out 0.7 (0.6 to 0.8) (length 0.5)"),
        ("monitor", "edit", "None"),
    ],
)
def test_figures_are_of_the_family_and_of_the_most_that_was_spent(
    evidence: ModuleType, family: str, name: str, said: str
) -> None:
    assert str(evidence.figure(family, name, PAGES)).endswith(said)


def test_a_gain_is_called_so_only_where_its_whole_interval_is(evidence: ModuleType) -> None:
    assert evidence.figure("search", "best", PAGES).remark == "a gain in this table"
    less = {"search": ("Search", PAGES["search"][1].replace("+0.10 to +0.30", "-0.10 to +0.30"))}
    assert evidence.figure("search", "best", less).remark == "no gain shown in this table"


def test_methods_within_settings_of_others_have_their_rows(evidence: ModuleType) -> None:
    (table,) = evidence.tables("diffusion-cache", "kept", PAGES)
    assert table.rows == ["| `static:cache=kept(refresh=4)` | 10 | 0.8 |"] and table.base.startswith("| `static` |")
