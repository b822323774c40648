"""Methods of other projects: imported by name or file, or named by an installed distribution."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from decodery.cli.main import main
from decodery.core import plugins, registry
from decodery.core.errors import SettingsError
from decodery.core.plugins import import_entry_points, import_methods

METHOD = """
from dataclasses import dataclass

from decodery.extend import Drafter, DraftTree, register


@register("{name}", lossless=True)
@dataclass(frozen=True)
class Silent(Drafter):
    \"""Drafts nothing.\"""

    length: int = 4

    def {method}(self, seq, budget):
        return DraftTree.root(seq.last_token)
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(own_methods: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Write]:
    """Writes a module into the current folder, which is forgotten after the test with all that it registered."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)

    def write(name: str, code: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(code, encoding="utf-8")
        return path

    yield write
    for name in sys.modules.keys() - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


@pytest.mark.parametrize("named", ["own_silent", "own_silent.py", "./own_silent.py"])
def test_the_command_line_knows_the_methods_of_a_module(
    named: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("own_silent", METHOD.format(name="silent", method="propose"))
    code, listed, _ = run(capsys, "methods", "--json", "--import", named)
    assert code == 0 and {"silent", "prompt-lookup"} <= {method["name"] for method in json.loads(listed)}
    code, page, _ = run(capsys, "methods", "silent", "--import", named)
    assert code == 0 and "use: decodery generate --drafter silent:length=4" in page


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "methods"])
def test_every_command_that_takes_methods_imports_before_anything_else(
    command: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, command, "--import", "no_such_module")
    assert code == 1 and "there is no module 'no_such_module'" in error


def test_an_option_names_a_users_method(write: Write) -> None:
    write("own_silent", METHOD.format(name="silent", method="propose"))
    import_methods("own_silent")
    from decodery.cli.given import given

    assert given({"drafter": "silent:length=2"})["drafter"].length == 2


@pytest.mark.parametrize(
    ("named", "code", "said"),
    [
        ("no_such_module", None, "there is no module 'no_such_module': give one that Python finds from here"),
        ("folder/no_such.py", None, "there is no file .*no_such.py: correct the path"),
        ("json.py", "", "a module 'json' is imported already, from another place: rename"),
        (
            "bad",
            METHOD.format(name="prompt-lookup", method="propose"),
            r"already registered by .* \(.*bad.py, line 7\)",
        ),
        ("bad.py", METHOD.format(name="silent", method="proposes"), r"Silent is not complete: define propose\(seq, b"),
        ("bad", "import no_such_module", "No module named 'no_such_module'"),
        ("bad.py", "def f(:", "SyntaxError: .*bad.py, line 1"),
        ("bad.py", "raise SystemExit(3)", "bad.py cannot be imported: SystemExit: 3"),
    ],
)
def test_what_cannot_be_imported_is_told_in_one_sentence(
    named: str, code: str | None, said: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    if code is not None:
        write(named.removesuffix(".py"), code)
    with pytest.raises(SettingsError, match=said):
        import_methods(named)
    status, printed, error = run(capsys, "methods", "--import", named)
    assert (status, printed) == (1, "") and error.startswith("decodery: ") and error.count("\n") == 1


def test_installed_distributions_bring_methods_and_a_broken_one_is_left_out(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("own_silent", METHOD.format(name="silent", method="propose"))
    write("own_broken", METHOD.format(name="prompt-lookup", method="propose"))
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\na = own_broken\nb = own_silent\n")
    monkeypatch.setattr(plugins, "_sought", set())
    with pytest.warns(UserWarning, match="the methods of own_broken are left out: ValueError: .*prompt-lookup"):
        found = registry.descriptions()
    assert "silent" in {method.name for method in found}
    assert registry.resolve("drafter", "silent:length=2").length == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_entry_points()
    assert EntryPoint("b", "own_silent", plugins.GROUP).load() is sys.modules["own_silent"]
