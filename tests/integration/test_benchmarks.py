"""The scripts of `benchmarks/` run at tiny size where they can, and what any of them imports and takes exists."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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


OURS = ("decodery", "decodery_benchmarks")


def imported(tree: ast.AST) -> list[tuple[str, str, str]]:
    """Modules of this package, names in them, empty for the module itself, and what a script calls them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                found += [(each.name, "", each.asname or top)] + [(top, "", top)] * (not each.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, each.name, each.asname or each.name) for each in node.names]
    return [each for each in found if each[0].partition(".")[0] in OURS]


def chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`, or none where it begins with something else than a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    return [*before, node.attr] if isinstance(node, ast.Attribute) and (before := chain(node.value)) else []


def missing(text: str) -> set[str]:
    """What a script imports of this package, or takes of modules that it imports, and is not there."""
    tree, modules, lost = ast.parse(text), {}, set()
    for module, name, bound in imported(tree):
        known = import_module(module)
        if name and not hasattr(known, name) and not find_spec(f"{module}.{name}"):
            lost.add(f"{module}.{name}")
        elif isinstance(value := getattr(known, name, None) if name else known, ModuleType):
            modules[bound] = value
    # A parameter or a variable may be called as a module is elsewhere in the script.
    bound = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    bound |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    for node in ast.walk(tree):
        names = chain(node) if isinstance(node, ast.Attribute) else []
        at = modules.get(names[0]) if names and names[0] not in bound else None
        for name in names[1:]:
            if not isinstance(at, ModuleType):
                break
            if not hasattr(at, name):
                lost.add(f"{at.__name__}.{name}")
            at = getattr(at, name, None)
    return lost


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_scripts_take_exists(script: str) -> None:
    assert not missing(TEXTS[script])


def test_names_that_are_gone_are_found() -> None:
    assert missing("from decodery.training import gone") == {"decodery.training.gone"}
    script = "from decodery.core import noise as n\nimport decodery\nn.gone(n.nth_seed)\ndecodery.core.noise.lost.x"
    assert missing(script) == {"decodery.core.noise.gone", "decodery.core.noise.lost"}
    assert not missing("from decodery.core import noise\ndef f(noise):\n    return noise.gone")


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
