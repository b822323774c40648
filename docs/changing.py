"""The generated parts of the documentation about changed models and compressed texts, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import ROOT, load, recorded, runs_of, table
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
    """What copies keep of the likeliest tokens, and what is accepted of their draws, by what a token reads of them."""
    kinds = {
        "rounding": ("int8", "int4", "int4, 3 bits", "int4, 2 bits"),
        "fp4, searched": ("fp4",),
        "evopress": ("evopress, 3 bits",),
        "lq-lora": ("lq-lora, 3 bits, rank 8", "lq-lora, 3 bits, rank 0"),
        "n of m, activations": ("4:8, activation", "2:4, activation"),
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
        for title, key in (("same likeliest token", "top-1"), ("accepted of a draw", "overlap"))
    }
    return plot("Copies of smollm2 at equal bytes", "% of the bytes that a token reads", panels, Upward("share"))


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


def surplus() -> str:
    """What probes of one size make of a token, and of a token and a state."""
    found = load("surplus")
    columns = ("kl", "gain", "floor", "acceptance", "entropy", "entropy of the model")
    rows = [[name, *(f"{each[column]:.3f}" for column in columns)] for name, each in found["drafters"].items()]
    about = f"`{found['command']}` ({found['learned']:,} places learned from, {found['held out']:,} held out)"
    return f"{about}\n\n{table(['reads', *columns], rows)}"


def trust() -> str:
    """Of every copy, the measures that changed by more than chance, before and after."""
    found = load("trust")
    rows = []
    for name, each in found["rows"].items():
        changed = [row for row in each.values() if row["changed"]]
        told = [f"{row['name']} {row['before']:.2f} to {row['after']:.2f}" for row in changed]
        rows.append([name, f"{len(changed)} of {len(each)}", "; ".join(told) or "nothing"])
    lines = [f"- {name}: {count} changed. {which[0].upper()}{which[1:]}." for name, count, which in rows]
    about = f"`python benchmarks/trust.py` ({found['texts']} texts, {found['questions']} questions)"
    return f"{about}\n\n" + "\n".join(lines)


def _points(curve: dict[str, float]) -> str:
    return ", ".join(f"{value:.3f}" for value in curve.values())


def pairs() -> str:
    """What two stacks and one make of as many weights, and what a teacher brings."""
    found = load("pairs")
    rows = []
    for name, each in found["rows"].items():
        curve = each["curve"] if isinstance(each["curve"], dict) else each["curve"][0]
        counts = [f"{each[key]:,}" for key in ("weights", "macs of the source", "macs per token")]
        rates = each.get("tokens per pass, copying", [])
        right = ", ".join(f"{value:.3f}" for value in each["right"])
        rows.append([name, *counts, right, _points(curve), ", ".join(f"{value:.2f}" for value in rates)])
    head = ["", "weights", "multiply-adds, source", "per token", "right", "as training went on", "tokens per pass"]
    about = f"`{found['command']} --steps {found['steps']}` ({found['held out']} sources held out)"
    return f"{about}\n\n{table(head, rows)}"


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


def power_law() -> str:
    """How far operators of texts are apart, and what keeping them changes."""
    found = load("power-law")
    distance = [[name, *(f"{each:.4f}" for each in layers)] for name, layers in found["distance"].items()]
    head = ["largest distance", *(f"layer {number}" for number in range(len(distance[0]) - 1))]
    steps = [[step, *(f"{each[key]:.4f}" for key in ("loss", "frozen"))] for step, each in found["curve"].items()]
    rates = "; ".join(f"with {name} {each:.2f}" for name, each in found["tokens per pass"].items())
    return "\n\n".join(
        [
            f"`{found['command']} --steps {found['steps']}` ({found['texts']} texts held out)",
            table(head, distance),
            table(["step", "loss, operators of each text", "loss, mean operators"], steps),
            f"Tokens per pass: {rates}.",
        ]
    )


def keys() -> str:
    """Tokens guessed along a stream of two kinds of text."""
    found = load("keys")
    rows = [
        [name, f"{each['lr']:g}", *(_points(dict(enumerate(each[part]))) for part in ("code", "prose", "code again"))]
        for name, each in found["rows"].items()
    ]
    about = f"`{found['command']}` ({found['tokens']:,} tokens of each part, shares by {found['part']})"
    return f"{about}\n\n{table(['', 'lr', 'code', 'prose', 'code again'], rows)}"


def short_conv() -> str:
    """Values recalled as training goes on."""
    found = load("short-conv")
    rows = [[kind, f"{each['parameters']:,}", _points(each["recalled"])] for kind, each in found["kinds"].items()]
    steps = list(next(iter(found["kinds"].values()))["recalled"])
    about = f"`{found['command']} --steps {steps[-1]}` ({found['pairs']} pairs a text, shares every {steps[1]} steps)"
    return f"{about}\n\n{table(['convolutions', 'parameters', 'recalled'], rows)}"


def localist() -> str:
    """Tokens per pass of a model that drafts for itself under each dial, and the keys that drafts read."""
    found = load("localist")
    rows = [[name, f"{each['tokens per pass']:.2f}", f"{each['read']:.3f}"] for name, each in found["rows"].items()]
    about = f"`{found['command']}` ({found['texts']} text of {found['prompt']} tokens, {found['new']} written)"
    return f"{about}\n\n{table(['', 'tokens per pass', 'keys read'], rows)}"


def hyperfit() -> str:
    """What a model that knows a few texts writes, and what became less likely."""
    found = load("hyperfit")
    before, after = (found["scores"][name] for name in ("before", "after"))
    about = f"`{found['command']}` ({found['pieces']} pieces of {found['length']} tokens, {found['held out']} held out)"
    held = [
        [name, *(f"{each[key]:.3f}" for key in ("loss", "entropy"))]
        for name, each in (("untouched", before), ("hyperfitted", after))
    ]
    rows = [
        [name, f"{each['ttr']:.3f}", f"{each['citations']:,} of {each['runs']:,}"]
        for name, each in found["rows"].items()
    ]
    curve = [[step, *(f"{each[key]:.2f}" for key in ("known", "held out"))] for step, each in found["curve"].items()]
    return "\n\n".join(
        [
            about,
            table(["step", "loss, learned", "held out"], curve),
            table(["", "loss, held out", "entropy"], held),
            table(["", "distinct of the last 96", "runs of five that were learned"], rows),
        ]
    )


def dynamic_tokens() -> str:
    """What shorter prompts cost, beside prompts that are cut."""
    found = load("dynamic-tokens")
    keys = {"nats": "mean", "nats, trained": "trained", "nats, cut": "cut"}
    keys = {key: name for key, name in keys.items() if key in found["rows"]["none"]}
    rows = [
        [name, f"{each['shorter']:.3f}", *(f"{each[key]:.3f}" for key in keys)] for name, each in found["rows"].items()
    ]
    about = (
        f"`{found['command']}` ({found['texts']} prompts of {found['prompt']} tokens, nats a token of the "
        f"{found['behind']} behind)"
    )
    made = [f"The network: `{found['net']['command']}`"] if "net" in found else []
    return "\n\n".join([about, *made, table(["merged", "shorter by", *keys.values()], rows)])


SECTIONS: dict[str, Callable[[], str]] = {
    "trust": trust,
    "recycled": recycled,
    "pairs": pairs,
    "power-law": power_law,
    "keys": keys,
    "short-conv": short_conv,
    "localist": localist,
    "transforms": transforms,
    "compression": compression,
    "copies": copies,
    "ffn-split": ffn_split,
    "mc-moe": mc_moe,
    "attention-entropy": attention_entropy,
    "surplus": surplus,
    "hyperfit": hyperfit,
    "dynamic-tokens": dynamic_tokens,
}
PLOTS: dict[Path, Callable[[], str]] = {ROOT / "docs" / "results" / "copies.svg": copies_by_bytes}
