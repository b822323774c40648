"""The generated parts of the page on models of several sizes and the kernels, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, recorded, table


def bigger() -> str:
    """What every program takes and writes, by model."""
    found = load("bigger")
    rows = [
        [name, tool, *_cells(row)]
        for name, tools in found["rows"].items()
        for tool, row in tools.items()
        if isinstance(row, dict)
    ]
    files = ", ".join(f"{name} {tools['file_mb']} MB" for name, tools in found["rows"].items())
    columns = [
        *("model", "program", "precision", "first token, s", "peak, MB", "of no file, MB"),
        *("plain, tokens/s", "auto", "16 texts together"),
    ]
    return f"{found['machine']['processor']}, {found['threads']} threads; files: {files}.\n\n{table(columns, rows)}"


def _cells(row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return [f"refused: {row['refused']}", *[""] * 6]
    numbers = [f"{row['first_token_s']:.1f}", f"{row['peak_mb']:.0f}", f"{row['own_mb']:.0f}"]
    speeds = [f"{row[key]:.1f}" if key in row else "" for key in ("plain", "auto", "together")]
    return [row["precision"], *numbers, *speeds]


def passes() -> str:
    """Passes of this package in the same processes."""
    found = load("bigger")["rows"]
    rows = []
    for name, tools in found.items():
        for tool, row in tools.items():
            if tool.startswith("decodery") and "pass_ms" in row:
                one = row["pass_ms"]["1"]
                ratios = [f"{row['pass_ms'][n] / one:.2f}" for n in ("8", "16")]
                share = f"{100 * row['share']:.0f} %"
                rows.append([name, row["precision"], f"{one:.1f}", share, *ratios])
    return table(["model", "precision", "1 row, ms", "of bandwidth", "8 rows, times one", "16 rows"], rows)


def bits() -> str:
    """On which kernel sets hashes were compared."""
    found = load("bits")
    sets = ", ".join(found["sets"])
    return f"{len(found['cases'])} cases on {sets}: {len(found['differ'])} differ."


def formats() -> str:
    """Layers by the form of their weights and the number of rows."""
    found = load("formats")
    by: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by.setdefault(row["form"], []).append(row)
    rows = [
        [name, f"{some[0]['bits']:.2f}", f"{some[0]['ms']:.2f}", f"{100 * some[0]['share']:.0f} %"]
        + [f"{each['ratio']:.2f}" for each in some[1:]]
        + [f"{some[-1]['gmacs']:.0f}"]
        for name, some in by.items()
    ]
    counts = [each["rows"] for each in next(iter(by.values()))]
    head = ["blocks", "bits a weight", "1 row, ms", "of bandwidth", f"{counts[1]} rows, times one"]
    head += [f"{each} rows" for each in counts[2:]] + [f"{counts[-1]} rows, 1e9 products/s"]
    machine = f"{found['machine']['processor']}, {', '.join(found['kernels'])}, {found['threads']} threads"
    return f"{machine}; {found['read_gb_per_s']:.1f} GB/s read in the same run.\n\n{table(head, rows)}"


_ACTIONS = {
    "written": "plain decoding, tokens/s",
    "read": "prompt of 64, tokens/s",
    "first token": "command that ends after the first token, s",
    "32 tokens": "command that ends after 32 tokens, s",
}


def starts() -> str:
    """Plain decoding, reading and commands from their start to their end, beside llama.cpp."""
    found = load("llama-cpp-speed")
    rows = [
        [name, said, f"{row[what]['ours']:.2f}", f"{row[what]['llama.cpp']:.2f}", f"{row[what]['ratio']:.2f}"]
        for name, row in found["rows"].items()
        for what, said in _ACTIONS.items()
        if what in row
    ]
    head = ["model", "what", "decodery", "llama.cpp", "times as fast"]
    return f"{found['machine']['processor']}, {found['machine']['kernels']}.\n\n{table(head, rows)}"


def families() -> str:
    """Passes of models with states, latents and experts: rows, trees, chains, and llama.cpp on the same files."""
    found = load("hybrid-passes")
    speeds, rows = [], []
    for name, row in found["rows"].items():
        milliseconds = row["milliseconds"]
        one, chains = milliseconds["1 rows"], next(each for each in milliseconds if each.endswith(" chains"))
        share = f"{100 * milliseconds['reading'] / one:.0f} %"
        times = [f"{milliseconds[f'{n} rows'] / one:.2f}" for n in (2, 4, 8, 16)]
        tree, apart = milliseconds["tree"], milliseconds[chains]
        ends = [f"{tree:.1f}", f"{apart:.1f}", f"{apart / tree:.2f}"]
        rows.append([name, f"{row['bytes'] / 1e6:.0f}", f"{one:.1f}", share, *times, *ends])
        for what in ("written", "read"):
            both = [row["tokens_per_s"].get(f"{what}, {who}") for who in ("ours", "llama.cpp")]
            if both[1] is not None:
                action = {"written": "plain decoding", "read": "prompt of 64"}[what]
                speeds.append([name, action, *(f"{each:.1f}" for each in both), f"{both[0] / both[1]:.2f}"])
    head = f"`{found['command']}`: {found['machine']['processor']}, {found['machine']['kernels']}."
    columns = ["model", "MB a row", "1 row, ms", "of bandwidth", "2 rows, times one", "4 rows", "8 rows", "16 rows"]
    columns += ["tree of 8, ms", "its chains, ms", "chains / tree"]
    beside = table(["model", "what", "decodery, tokens/s", "llama.cpp", "ratio"], speeds)
    return f"{head}\n\n{table(columns, rows)}\n\nThe same files in llama.cpp, in alternating rounds:\n\n{beside}"


_MADE = {
    "bigger": (bigger, "bigger"),
    "bigger-passes": (passes, "bigger"),
    "bits": (bits, "bits"),
    "starts": (starts, "llama-cpp-speed"),
    "formats": (formats, "formats"),
    "families": (families, "hybrid-passes"),
}
SECTIONS: dict[str, Callable[[], str]] = {name: made for name, (made, file) in _MADE.items() if recorded(file)}
