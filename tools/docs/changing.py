"""The generated parts of the documentation about changed models and compressed texts, from what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import ROOT, load, recorded, table
from plots import Line, Upward, plot


def transforms() -> str:
    """What every copy keeps and is worth as a drafter, by what a token reads of it, and by the clock where known."""
    found = load("transforms")
    timed = load("transform-speed") if recorded("transform-speed") else {"rows": {}}
    about = (
        f"{found['calibration']:,} tokens of calibration, {found['held out']:,} held out, {found['drafted']} drafted"
    )
    head = ["", "read", "bits", "macs", "perplexity", "kl", "top-1", "overlap", "tokens per pass", "predicted gain"]
    head += ["measured gain", "in its place"] if timed["rows"] else []
    rows = [
        _row(name, each) + (_clock(timed["rows"].get(name)) if timed["rows"] else [])
        for name, each in sorted(found["rows"].items(), key=lambda pair: -pair[1]["read"])
    ]
    commands = [f"`{found['command']}` ({about})"]
    if timed["rows"]:
        commands.append(f"`{timed['command']}` (texts of {timed['written']} tokens, median of {timed['turns']} turns)")
    return "\n\n".join([*commands, table(head, rows)])


def _row(name: str, each: dict[str, Any]) -> list[str]:
    sizes = [f"{each['read']:.3f}", f"{each['bits']:.2f}", f"{each['macs']:.3f}"]
    drift = [f"{each['perplexity']:.1f}", f"{each['kl']:.3f}", f"{each['top-1']:.3f}", f"{each['overlap']:.3f}"]
    return [name, *sizes, *drift, f"{each['tokens per pass']:.2f}", f"{each['gain']:.2f}"]


def _clock(each: dict[str, Any] | None) -> list[str]:
    return ["", ""] if each is None else [f"{each[how][0]:.2f}" for how in ("drafting", "alone")]


def copies_by_bytes() -> str:
    """The most likely tokens that copies keep, and what is accepted of their draws, by what a token reads of them."""
    kinds = {
        "rounding": ("int8", "int4", "int4, 3 bits", "int4, 2 bits"),
        "fp4, searched": ("fp4",),
        "evopress": ("evopress, 3 bits",),
        "lq-lora": ("lq-lora, 3 bits, rank 8", "lq-lora, 3 bits, rank 0"),
        "lq-lora, Fisher": ("lq-lora, 3 bits on average, rank 8, fisher",),
        "n of m, activations": ("4:8, activation", "2:4, activation", "5:16, activation"),
        "n of m, magnitudes": ("2:4, magnitude", "5:16, magnitude", "3:16, magnitude"),
        "slicegpt": ("slicegpt 0.05", "slicegpt 0.1", "slicegpt 0.2", "slicegpt 0.25"),
        "layers left out": ("27 of 30 layers", "24 of 30 layers"),
    }
    rows = load("transforms")["rows"]
    panels = {
        title: [
            Line(kind, tuple(sorted((100 * rows[name]["read"], rows[name][key]) for name in names)))
            for kind, names in kinds.items()
        ]
        for title, key in (("same most likely token", "top-1"), ("accepted of a draw", "overlap"))
    }
    return plot("Copies of smollm2 at equal bytes", "% of the bytes that a token reads", panels, Upward("share"))


def compression() -> str:
    """Bits per byte, beside other compressors, and the passes of decompressing."""
    found = load("compression")
    texts = found["rows"]
    others = [name for name in ("xz -9", "zstd -19") if all(name in each for each in texts.values())]
    drafters = [
        name for name in ("draft-model", "prompt-lookup") if all(name in each["passes"] for each in texts.values())
    ]
    head = ["", "bytes", "tokens", "compressed", "bits per byte", *others, "over the ideal"]
    head += [f"passes, {name}" for name in drafters]
    rows = [
        [
            name,
            *(f"{each[key]:,}" for key in ("bytes", "tokens", "compressed")),
            *(f"{each[key]:.3f}" for key in ("bits per byte", *others)),
            f"{each['over the law']:.4f}",
            *(f"{each['passes'][drafter]:,}" for drafter in drafters),
        ]
        for name, each in texts.items()
    ]
    return f"`{found['command']}`\n\n{table(head, rows)}"


def ffn_split() -> str:
    """What is left where rows take some of the experts, and what that is worth as a draft."""
    found = load("ffn-split")
    rows = [
        [name, *(f"{each[key]:g}" if key in each else "" for key in ("perplexity", "tokens per pass", "multiply-adds"))]
        for name, each in found["rows"].items()
    ]
    about = f"`{found['command']}` ({found['texts']} held-out puzzles, and as many to calibrate)"
    return f"{about}\n\n{table(['', 'perplexity', 'tokens per pass', 'multiply-adds'], rows)}"


def copies() -> str:
    """What copies learn back of what their form takes, and ternary models from random weights."""
    found = load("copies")
    about = f"{found['texts']} texts of tiny-1M-chain, {found['steps']} steps where trained, one seed"
    keys = ("cross_entropy", "acceptance", "agreement", "tokens per pass")
    rows = [
        [name, f"{each['bits']:.2f}", *(f"{each[key]:.3f}" for key in keys)] for name, each in found["rows"].items()
    ]
    head = ["", "bits", "cross-entropy", "acceptance", "agreement", "tokens per pass"]
    parts = [f"`{found['command']}` ({about})", table(head, rows)]
    if scratch := found["scratch"]:
        losses = [[name, f"{each['loss']:.3f}"] for name, each in scratch.items()]
        parts += ["From random weights:", table(["", "loss on held-out solutions"], losses)]
    return "\n\n".join(parts)


def mc_moe() -> str:
    """What a small mixture of experts keeps at few bits, and what it drafts for itself with fewer experts."""
    found = load("mc-moe")
    rows = [
        [
            name,
            f"{each['bits']:.2f}" if "bits" in each else "",
            f"{each['loss']:.3f}",
            f"{each['tokens per pass']:.2f}",
            f"{each['experts']:.2f}",
        ]
        for name, each in found["rows"].items()
    ]
    head = ["", "bits", "loss", "tokens per pass", "experts read"]
    about = f"`{found['command']}` ({found['steps']} steps of training, {found['puzzles']} puzzles)"
    return f"{about}\n\n{table(head, rows)}"


def sparse_products() -> str:
    """Milliseconds of products by how many rows there are."""
    found = load("sparse-products")
    rows = [
        [name, f"{each['bytes'] / 1e6:.1f}", *(f"{value:.2f}" for value in each["milliseconds"].values())]
        for name, each in found["rows"].items()
    ]
    counts = next(iter(found["rows"].values()))["milliseconds"]
    head = ["", "MB", *(f"ms, {count} row{'s' if count != '1' else ''}" for count in counts)]
    return (
        f"`{found['command']}` ({found['matrices']} matrices, least of {found['turns']} turns)\n\n{table(head, rows)}"
    )


def trust() -> str:
    """Of every copy, the measures that changed by more than chance, before and after."""
    found = load("trust")
    rows = []
    for name, each in found["rows"].items():
        free = [row for row in each.values() if not row["fixed"]]
        changed = [row for row in free if row["changed"]]
        told = [f"{row['name']} {row['before']:.2f} to {row['after']:.2f}" for row in changed]
        why = Counter(row["fixed"] for row in each.values() if row["fixed"])
        left = "".join(f"; {count} cannot change: {reason}" for reason, count in why.items())
        rows.append([name, f"{len(changed)} of {len(free)} changed{left}" if free else left[2:], "; ".join(told)])
    lines = [f"- {name}: {count}.{which and f' {which[0].upper()}{which[1:]}.'}" for name, count, which in rows]
    about = f"`python benchmarks/trust.py` ({found['texts']} texts, {found['questions']} questions)"
    return f"{about}\n\n" + "\n".join(lines)


def recycled() -> str:
    """What copies draft from a cache of their own, and from their original's."""
    found = load("recycled")
    rows = [
        [
            name,
            *(f"{each[how][key]:.2f}" for how in ("own", "recycled") for key in ("tokens per pass", "rows per token")),
        ]
        for name, each in found["rows"].items()
    ]
    head = ["", "tokens per pass, own", "rows read per token", "tokens per pass, recycled", "rows read per token"]
    about = (
        f"`{found['command']}` ({found['prompts']} prompts, {found['written']} tokens each, {found['drafted']} drafted)"
    )
    return f"{about}\n\n{table(head, rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "trust": trust,
    "recycled": recycled,
    "transforms": transforms,
    "compression": compression,
    "copies": copies,
    "ffn-split": ffn_split,
    "mc-moe": mc_moe,
    "sparse-products": sparse_products,
}
PLOTS: dict[Path, Callable[[], str]] = {ROOT / "docs" / "results" / "copies.svg": copies_by_bytes}
