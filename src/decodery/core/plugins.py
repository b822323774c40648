"""Methods of other projects: modules that register them, named by the user or by installed distributions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
import warnings
from pathlib import Path

from .errors import SettingsError

GROUP = "decodery.methods"
"""The group of entry points whose modules register methods, as in `[project.entry-points."decodery.methods"]`."""

_sought: set[str] = set()


def import_methods(name: str) -> None:
    """Import the module `name`, or a .py file, so that its methods are registered.

    Modules of the current folder are found, too.

    Raises:
        SettingsError: In one sentence, where there is none or it cannot be imported.
    """
    try:
        if name.endswith(".py"):
            _import_file(Path(name).expanduser().resolve())
        else:
            _search_in(Path.cwd())
            importlib.import_module(name)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise SettingsError(
                f"there is no module {name!r}: give one that Python finds from here, or a file that ends in .py"
            ) from error
        raise SettingsError(f"{name} cannot be imported: {_said(error)}") from error


def import_entry_points() -> None:
    """Import, once, what installed distributions name in the group.

    One that fails is left out with a warning.
    """
    if GROUP in _sought:
        return
    # Marked first: what is imported may itself ask for a method.
    _sought.add(GROUP)
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            warnings.warn(f"the methods of {point.value} are left out: {_said(error)}", stacklevel=2)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise SettingsError(f"there is no file {path}: correct the path")
    known = sys.modules.get(path.stem)
    if known is not None:
        if getattr(known, "__file__", None) != str(path):
            raise SettingsError(f"a module {path.stem!r} is imported already, from another place: rename {path}")
        return
    # What stands beside a script can be imported by it.
    _search_in(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def _search_in(folder: Path) -> None:
    """Find modules in this folder after those that are found anyway."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _said(error: BaseException) -> str:
    """What went wrong and where, in one line."""
    own = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen importlib")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"
