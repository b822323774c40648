"""The generated parts of the documentation about the orders in which drafts are made, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from figures import load, recorded, table

_TIME = "milliseconds_per_token"
_ONE = "target, 1 rows"


def cppd() -> str:
    """What drafting a whole text by place saves, and what the slots' own texts are worth."""
    found = load("draft-cppd")
    names = {"slots": "slots", "plainer": "slots that learned the tokens alone"}
    rows = []
    for name, each in found["rows"].items():
        alone = [f"{each[key]:.1%}" if key in each else "" for key in ("alone as the model", "alone right")]
        figures = [f"{each[key]:.2f}" for key in ("passes per text", "tokens per pass")]
        rows.append([names.get(name, name), *figures, *alone, f"{each['right']:.1%}"])
    header = ["", "passes per text", "tokens per pass", "slots alone as the decoder", "slots alone right", "right"]
    return f"`{found['command']}`, {found['texts']} held-out sources, greedy.\n\n{table(header, rows)}"


def overlap(name: str = "draft-overlap") -> str:
    """What drafting while the target verifies takes, beside drafting in turns."""
    found = load(name)
    pairs = found["rows"]
    rows = []
    for pair, times in pairs.items():
        lengths = [key.removeprefix("pearl").strip() for key in times if key.startswith("pearl")]
        for length in lengths:
            turns, beside = (times[f"{method} {length}".strip()] for method in ("draft-model", "pearl"))
            who = f"{pair}, drafts of {length}" if length else pair
            rows.append([who, f"{times['plain']:.1f}", f"{turns:.1f}", f"{beside:.1f}", f"{turns / beside:.2f}"])
    header = ["milliseconds per token", "plain", "`draft-model`", "`pearl`", "times as fast"]
    return f"`{found['command']}`\n\n{table(header, rows)}"


def clock() -> str:
    """What the same takes by a clock that counts passes alone, of drafts that are right as often as they are."""
    found = load("draft-clock")
    rows = []
    for pair, each in found["rows"].items():
        for ratio in (name for name in each if name.startswith("1:")):
            turns, beside = (each[ratio][way] for way in ("draft-model", "pearl"))
            figures = [f"{way['times plain']:.2f} with {way['length']}" for way in (turns, beside)]
            rows.append([f"{pair}, {ratio}", *figures, f"{beside['times plain'] / turns['times plain']:.2f}"])
    header = ["times plain, with the best length", "`draft-model`", "`pearl`", "times as fast"]
    return f"`{found['command']}`\n\n{table(header, rows)}"


def orders(group: str) -> str:
    """What one way of drafting in another order brings on the embedded model, in counts."""
    found = load(f"draft-orders-{group}")
    header = ["drafter", "tokens per pass", "draft passes per pass", "drafted per pass", "accepted"]
    placed = all("accepted_by_32" in each for each in found["rows"].values())
    rows = [
        [
            name,
            f"{each['tokens_per_pass']:.2f}",
            f"{each['draft_passes_per_pass']:.2f}",
            f"{each['drafted_per_pass']:.2f}",
            f"{each['drafts_accepted']:.1%}",
            *([f"{each['draft_layers_per_token']:.1f}"] if "trained" in found else []),
            *([f"{share:.1%}" for share in each["accepted_by_32"]] if placed else []),
        ]
        for name, each in found["rows"].items()
    ]
    if "trained" in found:
        header.append("draft layers per token")
    if placed:
        header += [f"tokens {place + 1} to {place + 32}" for place in range(0, found["new_tokens"], 32)]
    about = f"{found['prompts']} questions of Spec-Bench, greedy, {found['new_tokens']} tokens each"
    return f"{about} (`{found['command']}`)\n\n" + table(header, rows)


def joint() -> str:
    """All of them side by side, in counts and, where a quiet machine has measured it, in time."""
    found = load("draft-joint")
    header = ["drafter", "tokens per pass", "rows per pass", "draft passes per token", "accepted"]
    times = ["ms per token", "times plain"]
    parts = [f"Counts of `{found['command']}`."]
    for pair, laws in found["rows"].items():
        about = laws["about"]
        if "made" in laws:
            parts.append(f"**{pair}**, drafts that were trained for it: `{'` and `'.join(laws['made'])}`.")
        for law in (each for each in laws if each not in ("about", "made")):
            plain = laws[law]["plain"].get(_TIME)
            rows = [
                [
                    name,
                    f"{each['tokens_per_pass']:.2f}",
                    f"{each['rows_per_pass']:.1f}",
                    f"{each['draft_passes_per_token']:.2f}",
                    "" if each["drafts_accepted"] is None else f"{each['drafts_accepted']:.1%}",
                    *(_times(each, plain) if plain else []),
                ]
                for name, each in laws[law].items()
            ]
            title = f"**{pair}**, {law}, {about['prompts']} prompts, {about['new_tokens']} tokens each"
            same = [each["texts_as_plain"] for each in laws[law].values() if "texts_as_plain" in each]
            if same:
                title += f"; {sum(same)} of {about['prompts'] * len(same)} texts of all drafters are plain decoding's"
            parts.append(f"{title}\n\n{table(header + times if plain else header, rows)}")
    return "\n\n".join(parts)


def _times(each: dict[str, Any], plain: float) -> list[str]:
    """What a token takes, and how many times as fast as plain decoding that is."""
    return [f"{each[_TIME]:.2f}", f"{plain / each[_TIME]:.2f}"] if _TIME in each else ["", ""]


def joint_depths() -> str:
    """How often a token of a draft is right where all before it were, by its depth."""
    found = load("draft-joint")["rows"]["chain"]
    depths = range(1, 9)
    rows = [
        [f"{name}, {law}", *(f"{right[depth - 1]:.1%}" if depth <= len(right) else "" for depth in depths)]
        for law in ("greedy", "temperature 1")
        for name, each in found[law].items()
        if "deer" in name and "8" in name and (right := each.get("right_by_depth"))
    ]
    return table(["drafter", *(f"token {depth}" for depth in depths)], rows)


def steps() -> str:
    """What a pass of each draft takes beside one of its target."""
    found = load("draft-steps")
    pairs = found["rows"]
    rows = [
        [
            name,
            *(f"{each[name]:.2f} ({each[name] / each[_ONE]:.2f})" if name in each else "" for each in pairs.values()),
        ]
        for name in dict.fromkeys(name for each in pairs.values() for name in each)
    ]
    return f"`{found['command']}`\n\n" + table(["ms (of a pass of the target over one row)", *pairs], rows)


def sweeps() -> str:
    """What more text, larger drafts and more texts at once bring, and what the laws of each foretell."""
    rows, commands = [], []
    axes = {"data": "tokens learned from", "size": "weights", "batch": "texts at once"}
    for axis, name in axes.items():
        if not recorded(f"draft-sweep-{axis}"):
            continue
        found = load(f"draft-sweep-{axis}")
        low, high = found["slope_interval"]
        held, following = found["held_out"], found["next"]
        rows.append(
            [
                name,
                " / ".join(f"{each:,.0f}" for each in found["amounts"]),
                " / ".join(f"{each:.2f}" for each in found["values"]),
                f"{found['slope']:.2f} ({low:.2f} to {high:.2f})",
                f"{found['r2']:.3f}",
                f"{held['expected']:.2f} ({held['low']:.2f} to {held['high']:.2f})",
                f"{following['expected']:.2f} ({following['low']:.2f} to {following['high']:.2f})",
            ]
        )
        commands += [*([found["made"]] if axis == "data" else []), found["command"]]
    header = [
        "amount",
        "measured at",
        "tokens per pass; per second",
        "slope",
        "R2",
        "the last, from the others",
        "at twice the last",
    ]
    both = load("draft-sweep-both")
    (data, size), (data_at, size_at) = both["slopes"], both["slope_intervals"]
    more, larger = both["next"]
    inside = sum(each["low"] <= each["measured"] <= each["high"] for each in both["foretold"])
    commands.append(
        f"{both['command']}`: of both at once (R2 {both['r2']:.3f}) a draft has {data:.2f} ({data_at[0]:.2f} to "
        f"{data_at[1]:.2f}) tokens per pass more for every e times the text, and {size:.2f} ({size_at[0]:.2f} to "
        f"{size_at[1]:.2f}) for e times the weights. Twice the text after the largest amounts of either should give "
        f"{more['expected']:.2f} ({more['low']:.2f} to {more['high']:.2f}), twice the weights {larger['expected']:.2f} "
        f"({larger['low']:.2f} to {larger['high']:.2f}); {inside} of {len(both['foretold'])} drafts lie where the law "
        "of all others has them."
    )
    drawn = ("![Tokens per second against texts at once](draft-sweep-batch.svg)",) * (len(rows) > 2)
    return "\n\n".join(
        (table(header, rows), *(f"`{each}" if "`" in each else f"`{each}`" for each in commands), *drawn)
    )


def scan() -> str:
    """What passes over chains and trees take on a state-space model, in native kernels and scanned by PyTorch."""
    command = "OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/tree_scan.py"
    if not recorded("tree-scan"):
        return f"`{command}`, on a machine that does nothing else, writes the table that belongs here."
    found = load("tree-scan")
    rows = []
    for name, ways in found["rows"].items():
        figures = [f"{ways[way][part]:.1f}" for part in ("pass", "mixers") for way in ("native", "PyTorch")]
        rows.append([name, *figures])
    header = ["milliseconds", *(f"{part}, {way}" for part in ("pass", "mixers alone") for way in ("native", "PyTorch"))]
    return f"`{found['command']}`, {found['layers']} layers.\n\n{table(header, rows)}"


def texts_of_llama_cpp() -> str:
    """How many greedy texts are llama.cpp's, and how near logits are where they part."""
    found, rows = load("llama-cpp-texts"), []
    for name, each in found["rows"].items():
        gaps = [abs(one["reference"]) for one in each["differences"] if one["reference"] is not None]
        largest = [f"{max(gaps):.2f}"] if gaps else ["", ""]
        # Whose token float32 prefers.
        ours = sum(one["reference"] > 0 for one in each["differences"] if one["reference"] is not None)
        rows.append([name, f"{each['same_prompts']} of {each['texts']}", f"{each['agree']} of {each['texts']}",
                     str(each["near_ties"]), *largest, *([f"{ours} of {len(gaps)}"] if gaps else []),
                     f"{each['noise']:.2f}" if "noise" in each else ""])  # fmt: skip
    header = ["model", "same prompts", "same texts", "near-ties", "largest gap in float32", "float32 prefers our token",
              "error of a gap"]  # fmt: skip
    return f"`{found['command']}`\n\n{table(header, rows)}"


def seeing() -> str:
    """What drafters read of images is worth, on a small model that names their patches."""
    found = load("draft-seeing")
    runs = found["rows"]
    rows = [
        [
            name,
            f"{each['tokens_per_pass']:.2f}",
            f"{each['rows_per_pass']:.1f}",
            f"{each['drafts_accepted']:.1%}" if name != "plain" else "",
            f"{each['texts_as_plain']} of {each['prompts']}",
        ]
        for name, each in runs.items()
    ]
    right = f"{runs['plain']['texts_right']} of {runs['plain']['prompts']} images are named without a mistake"
    header = ["drafter", "tokens per pass", "rows per pass", "accepted", "texts as plain decoding's"]
    return f"`{found['command']}`, greedy; {right}.\n\n{table(header, rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "cppd": cppd,
    "overlap": overlap,
    "overlap-two-cores": partial(overlap, "draft-overlap-two-cores"),
    "clock": clock,
    "orders-hierarchical": partial(orders, "hierarchical"),
    "orders-nested": partial(orders, "nested"),
    "orders-easyspec": partial(orders, "easyspec"),
    "orders-joint": joint,
    "orders-joint-depths": joint_depths,
    "orders-joint-steps": steps,
    "sweeps": sweeps,
    "tree-scan": scan,
    "llama-cpp-texts": texts_of_llama_cpp,
    "seeing": seeing,
}
