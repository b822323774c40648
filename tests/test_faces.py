"""What a package of methods shows is what its modules define, found late, and known to type checkers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import decodery
from decodery.catalogue import shown
from decodery.registry import FAMILIES, methods

PACKAGES = [family for family in FAMILIES if shown(family)]


def test_every_method_is_shown_by_its_package() -> None:
    found = methods()
    assert {method.family for method in found} <= set(PACKAGES)
    for method in found:
        package = importlib.import_module(f"decodery.{method.family}")
        assert getattr(package, method.cls.__name__) is method.cls
        assert method.cls.__name__ in dir(package)


@pytest.mark.parametrize("family", PACKAGES)
def test_a_package_shows_what_it_lists_and_nothing_else(family: str) -> None:
    package = importlib.import_module(f"decodery.{family}")
    everything: dict[str, object] = {}
    exec(f"from decodery.{family} import *", everything)
    assert set(package.__all__) == set(shown(family)) == everything.keys() - {"__builtins__"}
    # A function of a module's name would be hidden by the module, or hide it.
    modules = {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
    assert not modules & set(shown(family))
    for name in ("Nothing", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'decodery.{family}' has no attribute '{name}'"):
            getattr(package, name)


def test_names_are_listed_without_importing_torch_and_used_by_importing_one_module() -> None:
    code = (
        "import sys, decodery as dc\n"
        "assert {'PromptLookup', 'Drafter', 'fuse'} <= {*dir(dc.draft)}\n"
        "assert {'budget', 'load', 'verify'} <= {*dir(dc)}\n"
        "assert 'EAGLE2' in dir(dc.draft.growth) and 'Budget' in dir(dc.budget) and 'torch' not in sys.modules\n"
        "assert dc.draft.PromptLookup.__name__ == 'PromptLookup' and 'PromptLookup' in vars(dc.draft)\n"
        "assert 'decodery.draft.rest' not in sys.modules and dc.sample.top_p.TopP is dc.sample.TopP\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_tells_type_checkers_of_every_family() -> None:
    (block,) = (
        node for node in ast.parse(Path(str(decodery.__file__)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    )  # fmt: skip
    named = {name.asname for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {family.partition(".")[0] for family in PACKAGES} <= named
