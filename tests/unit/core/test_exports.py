"""What a package of methods exports is what its modules define, found late, and known to type checkers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import decodery
from decodery.core.catalogue import FAMILIES, shown
from decodery.core.registry import methods

EXPORTING = [family for family in FAMILIES if shown(family)]
ROOT = Path(__file__).parents[3]


def test_the_index_of_methods_and_the_stubs_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "method_index.py"), "--check"], check=True)


def test_every_method_is_exported_by_its_package() -> None:
    # Benchmarks register methods of their own where other tests have imported them.
    found = [method for method in methods() if method.cls.__module__.startswith("decodery.")]
    assert {method.family for method in found} <= set(EXPORTING)
    for method in found:
        package = importlib.import_module(f"decodery.{FAMILIES[method.family]}")
        assert getattr(package, method.cls.__name__) is method.cls
        assert method.cls.__name__ in dir(package)


@pytest.mark.parametrize("family", EXPORTING)
def test_a_package_exports_what_it_lists_and_nothing_else(family: str) -> None:
    path = f"decodery.{FAMILIES[family]}"
    package = importlib.import_module(path)
    everything: dict[str, object] = {}
    exec(f"from {path} import *", everything)
    assert set(package.__all__) == set(shown(family)) == everything.keys() - {"__builtins__"}
    # A function of a module's name would be hidden by the module, or hide it.
    modules = {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
    assert not modules & set(shown(family))
    for name in ("Nothing", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module '{path}' has no attribute '{name}'"):
            getattr(package, name)


def test_names_are_listed_without_importing_torch_and_used_by_importing_one_module() -> None:
    code = (
        "import sys, decodery as dc\n"
        "drafters = dc.speculative.drafters\n"
        "assert {'PromptLookup', 'union'} <= {*dir(drafters)}\n"
        "assert {'sampling', 'load', 'speculative'} <= {*dir(dc)}\n"
        "assert 'EAGLE2' in dir(dc.speculative.trees) and 'Goodput' in dir(dc.speculative.draft_length)\n"
        "assert 'torch' not in sys.modules\n"
        "assert drafters.PromptLookup.__name__ == 'PromptLookup' and 'PromptLookup' in vars(drafters)\n"
        "assert 'decodery.speculative.drafters.rest' not in sys.modules\n"
        "assert dc.sampling.top_p.TopP is dc.sampling.TopP\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_tells_type_checkers_of_every_family() -> None:
    (block,) = (
        node for node in ast.parse(Path(str(decodery.__file__)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    )  # fmt: skip
    named = {name.asname or name.name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {FAMILIES[family].partition(".")[0] for family in EXPORTING} <= named
