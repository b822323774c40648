"""Mutations of JSON and of tensors: values of other types and sizes, at any place."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Make = Callable[[random.Random, Path, Path], None]
"""make(random, base, folder): puts the mutated file of one case into the empty `folder`; `base` holds sound files."""


_DEEP = "deep"
_ODD: list[Any] = [
    None, True, False, "", "x", "x" * 5000, "\ud800", "1e400", -1, 0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32,
    2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.5, 1e-320, 1e308, -1e308, float("inf"), float("-inf"),
    float("nan"), [], {}, [[]], [0] * 3, {"a": 1}, [None], {"deep": _DEEP}, _DEEP,
]  # fmt: skip
_DTYPES = [
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "I64",
    "U64",
    "F64",
    "F8_E4M3",
    "F8_E5M2",
]
_DTYPES += ["F8_E8M0", "F4", "C64", "f32", ""]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside `value`, long lists and vocabularies by their first few."""
    if at:
        yield at
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in inner[:40] if len(at) > 1 else inner:
        yield from places(item, (*at, key))


def mutated(random: random.Random, value: Any) -> Any:
    """A copy of plain data with one to three places changed."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 2, 3))):
        ways = list(places(value))
        if not ways:
            return random.choice(_ODD)
        *way, last = random.choice(ways)
        holder = value
        for key in way:
            holder = holder[key]
        chance, old = random.random(), holder[last]
        if chance < 0.1:
            del holder[last]
        elif chance < 0.5 and isinstance(old, int | float) and not isinstance(old, bool):
            holder[last] = random.choice([old - 1, old + 1, -old, old * 2, old // 2, *_ODD[8:33]])
        elif chance < 0.3 and isinstance(old, list):
            holder[last] = random.choice([old * 2, old[:-1], old * 50])
        else:
            holder[last] = json.loads(json.dumps(random.choice(_ODD)))
    return value


def as_json(random: random.Random, value: Any) -> bytes:
    """JSON, in which what was to be deep is, and which now and then is damaged as a text."""
    text = json.dumps(value).replace(json.dumps(_DEEP), "[" * 100_000 + "]" * 100_000)
    return damaged(random, text.encode()) if random.random() < 0.1 else text.encode()


def damaged(random: random.Random, content: bytes) -> bytes:
    """A few bytes changed, a part left out or doubled, or the end cut off."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) or 1)
        match random.randrange(4):
            case 0 if data:
                data[at] = random.randrange(256)
            case 1:
                del data[at : at + random.randint(1, 64)]
            case 2:
                data[at:at] = data[at : at + random.randint(1, 64)]
            case _:
                del data[len(data) - random.randrange(min(len(data), 200) + 1) :]
    return bytes(data)


def mutated_json(name: str, source: str) -> Make:
    def make(random: random.Random, base: Path, folder: Path) -> None:
        shutil.copytree(base / source, folder, dirs_exist_ok=True)
        path = folder / name
        path.write_bytes(as_json(random, mutated(random, json.loads(path.read_bytes()))))

    return make


def mutated_tensors(name: str) -> Make:
    """A safetensors file with a changed header, changed JSON inside its metadata, or changed bytes."""

    def make(random: random.Random, base: Path, folder: Path) -> None:
        content = (base / name).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        about = header.get("__metadata__", {})
        chance = random.random()
        if chance < 0.15:
            (folder / name).write_bytes(damaged(random, content))
            return
        tensors = [key for key in header if key != "__metadata__"]
        if chance < 0.35 and about:
            key = random.choice(list(about))
            try:
                inside = json.loads(about[key])
            except ValueError:
                inside = about[key]
            about[key] = as_json(random, mutated(random, inside)).decode(errors="replace")
        elif chance < 0.5:
            header[random.choice(tensors)]["dtype"] = random.choice(_DTYPES)
        elif chance < 0.6:
            # Another type of the same width, so that sizes stay right.
            entry = header[random.choice(tensors)]
            same = {"F32": ["I32", "U32"], "F16": ["BF16", "I16", "U16"], "BF16": ["F16", "I16", "U16"]}
            entry["dtype"] = random.choice(same.get(entry["dtype"], ["I32", "F32", "U16", "F8_E4M3"]))
        elif chance < 0.8:
            # Infinities, NaN, largest integers.
            begin, end = header[random.choice(tensors)]["data_offsets"]
            pattern = random.choice([b"\xff", b"\x7f", b"\x00\x00\x80\x7f", b"\x80"])
            width = random.choice([4, end - begin])
            at = begin + random.randrange(max(1, (end - begin) // 4)) // 4 * 4
            filled = (pattern * width)[: min(width, end - at)]
            data = data[:at] + filled + data[at + len(filled) :]
        else:
            header = mutated(random, header)
        text = as_json(random, header)
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)

    return make
