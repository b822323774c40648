"""Cut a file into parts that are small enough to be carried to another machine, and join them there.

    python benchmarks/gpu/parts.py cut ~/.cache/decodery/models/smollm2-b179c9523d0e.gguf .gpu/parts
    python benchmarks/gpu/parts.py join .gpu/parts FILE

Beside the parts lies `manifest.json`: name, size and SHA-256 of the file and of each part. A joined file is written
whole or not at all. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MIB = 1 << 20
LARGEST = 30
"""MiB of a part, so that one travels beside the source tree."""


class PartsError(Exception):
    """Parts that are missing or damaged, in one sentence."""


def cut(source: Path, folder: Path, mebibytes: int = LARGEST) -> list[Path]:
    """Write the parts of a file and their manifest.

    Args:
        source: The file to cut.
        folder: Where the parts go; made where it is missing.
        mebibytes: The size of each part but the last.

    Returns:
        The parts in order, the manifest last.

    Raises:
        PartsError: If `mebibytes` is less than 1, or there is no such file.
    """
    if mebibytes < 1:
        raise PartsError(f"a part cannot have {mebibytes} MiB: give at least 1")
    if not source.is_file():
        raise PartsError(f"there is no file {source}: give the file to cut")
    folder.mkdir(parents=True, exist_ok=True)
    whole, parts, made = hashlib.sha256(), [], []
    with source.open("rb") as file:
        while piece := file.read(mebibytes * MIB):
            whole.update(piece)
            path = folder / f"part-{len(parts):03d}"
            path.write_bytes(piece)
            parts.append({"name": path.name, "size": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
            made.append(path)
    facts = {"name": source.name, "size": source.stat().st_size, "sha256": whole.hexdigest(), "parts": parts}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return [*made, manifest]


def join(folder: Path, target: Path) -> Path:
    """Make the file of its parts; one that is there already, and whole, stays.

    Args:
        folder: The parts and their manifest.
        target: The file to write.

    Returns:
        `target`.

    Raises:
        PartsError: If the manifest or a part is missing or damaged.
    """
    facts = _manifest(folder)
    if target.is_file() and _sha256(target) == facts["sha256"]:
        return target
    missing = [part["name"] for part in facts["parts"] if not (folder / part["name"]).is_file()]
    if missing:
        raise PartsError(f"{folder} lacks {', '.join(missing)} of {facts['name']}: bring these parts, too")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, whole = target.with_name(f".{target.name}.{os.getpid()}"), hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for part in facts["parts"]:
                piece = (folder / part["name"]).read_bytes()
                if hashlib.sha256(piece).hexdigest() != part["sha256"]:
                    raise PartsError(f"{folder / part['name']} is damaged, its checksum differs: bring it again")
                whole.update(piece)
                file.write(piece)
        if whole.hexdigest() != facts["sha256"]:
            raise PartsError(f"the parts in {folder} do not make {facts['name']}: cut the file again")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [(part["name"], part["size"], part["sha256"]) for part in facts["parts"]], facts["name"], facts["sha256"]
    except OSError as error:
        raise PartsError(
            f"{folder} has no {MANIFEST}: cut the file with `parts.py cut`, and bring all of it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise PartsError(f"{path} is damaged: cut the file again with `parts.py cut`") from error
    return facts


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cutting = commands.add_parser("cut", help="cut FILE into parts in FOLDER")
    cutting.add_argument("file", type=Path)
    cutting.add_argument("folder", type=Path)
    cutting.add_argument("--size", type=int, default=LARGEST, metavar="MIB", help="of a part (default: %(default)s)")
    joining = commands.add_parser("join", help="make FILE of the parts in FOLDER")
    joining.add_argument("folder", type=Path)
    joining.add_argument("file", type=Path)
    given = parser.parse_args()
    try:
        if given.command == "cut":
            for path in cut(given.file.expanduser(), given.folder, given.size):
                print(f"{path.stat().st_size:>12,} {path}")
        else:
            print(join(given.folder, given.file.expanduser()))
    except PartsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
