"""What the user's cache folder holds: its size, when it was last used, what it was made from; and its removal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from decodery.core.errors import CorruptFile

from . import package_index as embedded
from .cache_use import is_mark, last_used, mark_of, unused
from .drafts import DESCRIPTION
from .fields import read_json
from .store import FORMAT, bytes_under, converted, home, lock_of, unwritable, workspace

_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class Kept:
    """One thing in the cache that can be removed by itself.

    Attributes:
        name: Of the model it belongs to.
        kind: What it is of that model, such as the precision of a converted copy.
        path: The file or folder.
        size: In bytes; that of the last copy used counts what all copies of a model share.
        used: When it was last used, in seconds since 1970.
        source: What it was made from, None if unknown.
        there: Whether the source still exists, None where that is not known.
        lock: Held by whoever makes it, where it has one.
    """

    name: str
    kind: str
    path: Path
    size: int
    used: float
    source: str | None = None
    there: bool | None = None
    lock: Path | None = None

    @property
    def title(self) -> str:
        return f"{self.name}:{self.kind}"

    @property
    def is_copy(self) -> bool:
        """Whether it is one of the converted copies of a model, which share a folder."""
        return self.path.suffix == _WEIGHTS

    @property
    def held(self) -> bool:
        """Whether a process makes it or uses it now."""
        with self.alone() as free:
            return not free

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no process makes or uses it; then none begins to before the block ends."""
        from filelock import FileLock, Timeout

        with ExitStack() as locks:
            try:
                if self.lock is not None and self.lock.exists():
                    locks.enter_context(FileLock(self.lock, timeout=0))
            except Timeout:
                yield False
                return
            except (OSError, NotImplementedError):
                # Who cannot lock here could not have made it, nor can they remove it.
                pass
            yield locks.enter_context(unused(self.path))


def everything() -> list[Kept]:
    """All that is kept, what was used last first."""
    found = [*_fetched(), *_copies(), *_outdated(), *_requantized(), *_measured(), *_abandoned()]
    return sorted(found, key=lambda kept: -kept.used)


def superfluous(
    found: Sequence[Kept], *, names: Sequence[str] = (), before: float | None = None, most: int | None = None
) -> list[Kept]:
    """What should go, in the order in which it goes: whose source is gone, then what was used longest ago.

    Args:
        names: Names, titles or sources; nothing else goes, and all of it where there is no other condition.
        before: What was not used since that time goes.
        most: As much goes as leaves at most so many bytes in all, where what is not held by a process is enough for
            that.
    """
    total = sum(kept.size for kept in found)
    goes = []
    for kept in sorted(found, key=lambda each: (each.there is not False, each.used)):
        asked = kept.there is False or (before is not None and kept.used < before)
        asked |= most is not None and total > most
        if names and not {kept.name, kept.title, kept.source} & set(names):
            continue
        if asked or (names and before is None and most is None):
            goes.append(kept)
            total -= 0 if kept.held else kept.size
    return goes


def remove(kept: Kept) -> bool:
    """Remove it whole, unless a process makes or uses it: then nothing changes, and the answer is False."""
    with workspace() as aside:
        with kept.alone() as free:
            if not free:
                return False
            try:
                # Under a name that is never looked up, whatever ends this process on the way.
                for path in _goes(kept):
                    path.rename(aside / path.name)
            except FileNotFoundError:
                # Another process has removed it meanwhile.
                pass
            except OSError as error:
                if sys.platform == "win32" and isinstance(error, PermissionError):
                    return False
                raise unwritable(kept.path, error) from error
        return True


def remove_empty() -> None:
    """Remove the folders of sources of which only unused locks are left."""
    from filelock import FileLock, Timeout

    for folder in _folders(converted()):
        locks = list(folder.iterdir())
        if all(path.suffix == ".lock" for path in locks):
            for path in locks:
                with suppress(Timeout, OSError), FileLock(path, timeout=0):
                    path.unlink()
            with suppress(OSError):
                folder.rmdir()


def _goes(kept: Kept) -> list[Path]:
    """What is moved aside: with the last copy of a model all that is kept of it."""
    folder = kept.path.parent
    if kept.is_copy and list(folder.glob(f"*{_WEIGHTS}")) == [kept.path]:
        return [folder]
    return [path for path in (kept.path, mark_of(kept.path)) if path.exists()]


def _fetched() -> Iterator[Kept]:
    for path in (home() / "models").glob("*.gguf"):
        name = path.stem.rpartition("-")[0]
        known = embedded.EMBEDDED.get(name)
        source, there = (None, None) if known is None else (known.requirement, True)
        lock = embedded.lock_of(name)
        yield Kept(name, "fetched", path, bytes_under(path), last_used(path), source, there, lock)


def _copies() -> Iterator[Kept]:
    """The converted copies of models; where there is none yet, the tokenizer that was taken out of the source."""
    for top in _folders(converted()):
        for folder in [top] if (top / DESCRIPTION).exists() else _folders(top):
            source = _source(folder)
            name, there = _name(top, source), None if source is None else _exists(source)
            files = [path for path in folder.rglob("*") if path.is_file() and not is_mark(path)]
            copies = sorted((path for path in files if path.suffix == _WEIGHTS), key=last_used)
            shared = sum(map(bytes_under, files)) - sum(map(bytes_under, copies))
            for path in copies:
                size = bytes_under(path) + (shared if path == copies[-1] else 0)
                kind = path.stem.removesuffix(".beside")
                yield Kept(name, kind, path, size, last_used(path), source, there, lock_of(folder))
            if not copies:
                yield Kept(name, "tokenizer", folder, shared, last_used(folder), source, there, lock_of(folder))


def _source(folder: Path) -> str | None:
    """What a description names as the source; of a description that cannot be read nothing is known."""
    try:
        source = read_json(folder / DESCRIPTION).get("source")
    except CorruptFile:
        return None
    return source if isinstance(source, str) else None


def _name(top: Path, source: str | None) -> str:
    """What a user calls a model that is kept in `top`, whose own name ends in a hash."""
    if source is None or not Path(source).is_absolute():
        return top.name.rpartition("-")[0]
    path = Path(source)
    # The Hub's folders are called models--owner--name/snapshots/revision.
    hub = [part for part in path.parts if part.startswith("models--")]
    if hub:
        return hub[-1].removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix == ".gguf" else path.name


def _exists(source: str) -> bool:
    """Whether a source is still there; what is no path can be fetched again."""
    path = Path(source)
    return not path.is_absolute() or path.exists()


def _outdated() -> Iterator[Kept]:
    """What other versions of this package converted; what earlier ones did, is not read any more."""
    for folder in _folders(home() / "converted"):
        if folder != converted() and folder.name[1:].isdecimal():
            there = False if int(folder.name[1:]) < FORMAT else None
            yield Kept(folder.name, "converted", folder, bytes_under(folder), last_used(folder), there=there)


def _requantized() -> Iterator[Kept]:
    """What `decodery bench` made for llama.cpp."""
    for path in (home() / "peers").glob("*.gguf"):
        name, _, kind = path.stem.rsplit("-", 2)
        yield Kept(name, kind, path, bytes_under(path), last_used(path))


def _measured() -> Iterator[Kept]:
    folder = home() / "cost"
    if size := bytes_under(folder):
        yield Kept("measurements", "passes", folder, size, last_used(folder), "this machine", True)


def _abandoned() -> Iterator[Kept]:
    """What processes that were killed have left unfinished."""
    for folder in _folders(home() / "unfinished"):
        lock = folder.with_suffix(".lock")
        kept = Kept(
            "unfinished", folder.name[:8], folder, bytes_under(folder), last_used(folder), lock=lock, there=False
        )
        if not kept.held:
            yield kept


def _folders(parent: Path) -> Iterable[Path]:
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
