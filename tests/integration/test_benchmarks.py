"""The scripts of `benchmarks/` run at tiny size where they can, and what any of them imports and takes exists."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from covering import some
from decodery_benchmarks.results import validate
from tiny_scripts import FOLDER, apart, run

SCRIPTS = sorted(
    str(path.relative_to(FOLDER))
    for path in FOLDER.rglob("*.py")
    if path.parent.name != "gpu" and "decodery_benchmarks" not in path.parts
)
"""All but the kit for GPUs, which has tests of its own, what stands in for another package, and the package of all."""
TEXTS = {name: (FOLDER / name).read_text("utf-8") for name in SCRIPTS}
PROGRAMS = [name for name, text in TEXTS.items() if "argparse" in text and "def main" in text]


def imported(script: str) -> list[tuple[str, str]]:
    """Modules of this package, and names in them, that a script imports anywhere."""
    found = []
    for node in ast.walk(ast.parse(TEXTS[script])):
        if isinstance(node, ast.Import):
            found += [(each.name, "") for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, each.name) for each in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] in ("decodery", "decodery_benchmarks")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_scripts_import_exists(script: str) -> None:
    for module, name in imported(script):
        known = import_module(module)
        assert not name or hasattr(known, name) or find_spec(f"{module}.{name}"), f"{module} has no {name}"


@pytest.mark.parametrize("script", PROGRAMS)
def test_scripts_take_their_options(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(script, tmp_path, "--help")
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


TINY: dict[str, dict[str, Any]] = {
    "agreement.py": {"sizes": {"tokens": 8}},
    "attention_training.py": {"sizes": {"steps": 4}},
    "beyond_context.py": {"arguments": "--tokens 64"},
    "canvas_bits.py": {"_DRAWS": 1},
    "compression.py": {"arguments": "{folder}/data/humaneval_dev.jsonl"},
    "constraints.py": {},
    "draft/own_layers.py": {},
    "draft/replayed.py": {},
    "draft/trained.py": {"sizes": {"step": 8}},
    "draft/unguessable.py": {"real": True},
    "dynamic_tokens.py": {"sizes": {"prompt": 64, "behind": 16}},
    "infalign.py": {},
    "judge_laws.py": {},
    "localist.py": {"DIALS": (0.6,)},
    "long_prompts.py": {},
    "memory_by_length.py": {},
    "monitor.py": {},
    "pg_td.py": {},
    "pruning.py": {"arguments": "--read 16 --behind 4"},
    "quality.py": {"arguments": "--model smollm2 --precisions int8"},
    "samples.py": {"arguments": "{folder}/data/gsm8k_train_1000.jsonl --out {folder}/results/samples.jsonl"},
    "search_programs.py": {},
    "short_conv.py": {"sizes": {"steps": 6}},
    "sparse_products.py": {},
    "tree_scan.py": {},
    "processors.py": {"LENGTHS": (10,)},
}
"""Scripts that run at tiny size, and what makes them tiny beyond `tiny_scripts.SIZES`."""


@pytest.mark.parametrize("script", some(list(TINY), len(TINY) // 8))
def test_scripts_run_at_tiny_size(script: str, tmp_path: Path) -> None:
    assert apart(script, tmp_path, TINY[script]) or any((tmp_path / "results").iterdir())
    for path in (tmp_path / "results").glob("*.json"):
        validate(json.loads(path.read_text("utf-8")))
