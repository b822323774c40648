"""The generated parts of the documentation about changed models and compressed texts, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, runs_of, table


def transforms() -> str:
    """What every copy keeps, and what it is worth as a drafter."""
    found = load("transforms")
    about = (
        f"{found['calibration']:,} tokens of calibration, {found['held out']:,} held out, {found['drafted']} drafted"
    )
    head = ["", "bits", "bytes", "macs", "perplexity", "kl", "top-1", "overlap", "tokens per pass", "predicted gain"]
    return "\n\n".join(
        [f"`{found['command']}` ({about})", table(head, [_row(name, each) for name, each in found["rows"].items()])]
    )


def _row(name: str, each: dict[str, Any]) -> list[str]:
    sizes = [f"{each['bits']:.2f}", f"{each['bytes']:.3f}", f"{each['macs']:.3f}"]
    drift = [f"{each['perplexity']:.1f}", f"{each['kl']:.3f}", f"{each['top-1']:.3f}", f"{each['overlap']:.3f}"]
    return [name, *sizes, *drift, f"{each['tokens per pass']:.2f}", f"{each['gain']:.2f}"]


def compression() -> str:
    """Bits per byte, beside other compressors, and the passes of decompressing."""
    found = load("compression")
    texts = found["texts"]
    others = [name for name in ("xz -9", "zstd -19") if all(name in each for each in texts.values())]
    drafters = [
        name for name in ("draft-model", "prompt-lookup") if all(name in each["passes"] for each in texts.values())
    ]
    head = ["", "bytes", "tokens", "compressed", "bits per byte", *others, "over the law"]
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
        for name, each in runs_of(found).items()
    ]
    about = f"`{found['command']}` ({found['texts']} puzzles held out, and as many to calibrate)"
    return f"{about}\n\n{table(['', 'perplexity', 'tokens per pass', 'multiply-adds'], rows)}"


def copies() -> str:
    """What copies learn back of what their form takes, and models of three values from random weights."""
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
        parts += ["From random weights:", table(["", "loss on solutions held out"], losses)]
    return "\n\n".join(parts)


def attention_entropy() -> str:
    """How even heads attend, five layers to a row."""
    found = load("attention-entropy")
    layers = found["layers"]
    rows = []
    for first in range(0, len(layers), 5):
        some = layers[first : first + 5]
        mean = sum(each["mean"] for each in some) / len(some)
        ends = f"{min(each['least'] for each in some):.3f}", f"{max(each['most'] for each in some):.3f}"
        counts = [str(sum(each[name] for each in some)) for name in ("overloaded", "collapsed")]
        rows.append([f"{first} to {first + len(some) - 1}", f"{mean:.3f}", *ends, *counts])
    head = ["layers", "mean", "least", "most", "overloaded", "collapsed"]
    about = f"`{found['command']}` ({found['texts']} texts of {found['length']} tokens)"
    return f"{about}\n\n{table(head, rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "transforms": transforms,
    "compression": compression,
    "copies": copies,
    "ffn-split": ffn_split,
    "attention-entropy": attention_entropy,
}
