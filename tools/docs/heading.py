"""The generated parts of the documentation about draft heads and self-speculation, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import load, load_all, table


def units() -> str:
    """What placeholders save, untrained and trained, and what trusting them changes."""
    found = load("draft-parallel-units")
    rows = [
        [
            name,
            f"{each['tokens_per_pass']:.2f}",
            f"{each['grounded_tokens_per_pass']:.2f}",
            f"{each['open_tokens_per_pass']:.2f}",
            f"{each['rows_per_pass']:.1f}",
            f"{each['share_of_tokens_changed']:.0%}" if "share_of_tokens_changed" in each else "0%",
        ]
        for name, each in found["rows"].items()
    ]
    header = ["units", "tokens per pass", "grounded", "open", "rows per pass", "tokens changed"]
    return (
        f"{found['questions']} questions of Spec-Bench, greedy, {found['new_tokens']} tokens each. Checked units are "
        "drafts under the default rule; trusted ones become text unchecked from a probability of beta on, as published "
        f"(`--acceptance-rule lexical-unit`). (`python benchmarks/draft/parallel.py units --step 24 --new 48`)\n\n"
        + table(header, rows)
    )


def in_pass() -> str:
    """Tokens per pass by length of drafters that guess in the target's own pass, and what rows make of them."""
    found, like, speed = (load(f"draft-in-pass-{section}") for section in ("lengths", "calibration", "speed"))
    parts = [
        f"{found['questions']} questions of Spec-Bench of at most {found['of_at_most_tokens']} tokens, greedy, "
        f"{found['new_tokens']} tokens each, int8 (`{found['command']}`), and {like['texts']} texts like those that "
        f"rates were counted on, at their temperatures (`{like['command']}`). Predicted is what the rates say; speed "
        "is plain decoding's times tokens per pass, over what passes of so many rows cost on the machine of the run."
    ]
    header = ["", "predicted", "on texts like those", "on questions", "speed"]
    for name in ("ppd", "hidden-transfer"):
        each, decoded = found[name], speed[name]
        rows = [
            [
                f"{name}:length={length}",
                f"{row['predicted']:.2f}",
                f"{like[name][length]['tokens_per_pass']:.2f}",
                f"{row['tokens_per_pass']:.2f}",
                f"{row['speed_by_pass_cost']:.2f}",
            ]
            for length, row in each["lengths"].items()
        ]
        chosen = each["chosen_for_this_machine"]
        parts += [
            table(header, rows),
            f"Chosen for that machine by what its passes cost: {chosen} rows"
            + (", which is plain decoding. " if chosen == 1 else ". ")
            + f"Decoded with length={decoded['length']}: {decoded['tokens_per_pass']:.2f} tokens per pass, "
            f"{decoded['speed']:.2f} times the speed of plain decoding in processor time, {decoded['texts_as_plain']} "
            f"of {speed['questions']} texts as plain decoding writes them (`{speed['command']}`).",
        ]
    costs_of = found["passes"]
    costs = ", ".join(
        f"{rows}: {time:.0f}" for rows, time in zip(costs_of["rows"], costs_of["pass_milliseconds"], strict=True)
    )
    return "\n\n".join([*parts, f"Milliseconds of a pass there by its rows: {costs}."])


def transfer_layers() -> str:
    """How right the states are that hidden transfer makes, by the layer after which they are made."""
    found = load("draft-in-pass-layers")
    rows = [
        [layer, *(f"{each[f'right_{n}']:.1%}" for n in (1, 2, 3)), f"{each['cross_entropy']:.2f}"]
        for layer, each in found["layers"].items()
    ]
    header = ["after layer", "p_1", "p_2", "p_3", "cross-entropy"]
    return (
        f"How often the most likely token is right where all three states are made after one layer, on "
        f"{found['texts_held_out']} held-out texts, after {found['steps']} steps of {found['places_a_step']} places "
        f"(`{found['command']}`).\n\n" + table(header, rows)
    )


def heads() -> str:
    """What draft heads bring beside drafts that need none: a table per batch size and temperature."""
    parts = []

    def draft(each: dict[str, float]) -> str:
        # Where hardly anything is drafted, what it takes is no draft's.
        return f"{each['draft']:.2f}" if "draft" in each and each["rows_per_pass"] >= 1.1 else ""

    for found in load("draft-heads")["rows"]:
        settings = found["settings"]
        rows = [
            [
                f"`{name}`",
                f"{each['tokens_per_pass']:.2f}",
                f"{each['rows_per_pass']:.1f}",
                draft(each),
                f"{each['step']:.1%}",
                f"{each['speed']['all']:.2f}",
                f"{each['bytes'] / 1e6:.1f}" if each["bytes"] else "",
                f"{each['texts_as_plain']:.0%}",
            ]
            for name, each in found["methods"].items()
        ]
        header = ["drafter", "tokens per pass", "rows per pass", "a draft step, in passes", "beside the pass"]
        parts.append(
            f"{settings['questions']} questions of Spec-Bench, {settings['new']} tokens each, batches of "
            f"{settings['batch']}, temperature {settings['temperature']:g}, at most {settings['nodes']} nodes "
            f"(`{found['command']}`). Beside the pass: what proposing, choosing and committing take, of a plain "
            "step; a draft step: proposing by the tokens drafted.\n\n"
            + table([*header, "speed", "MB", "texts as plain"], rows)
        )
    return "\n\n".join(parts)


def small_heads() -> str:
    """All heads and self-speculators on the same prompts, each trained for a short while."""
    parts = []
    for found in load_all("draft-small-heads").values():
        for run in found["rows"]:
            settings, trained = run["settings"], run["seconds of training"]
            rows = [
                [
                    f"`{name}`",
                    f"{each['tokens_per_pass']:.2f}",
                    f"{each['rows_per_pass']:.1f}",
                    f"{each['draft']:.2f}" if "draft" in each else "",
                    f"{each['speed']['all']:.2f}",
                    f"{each['bytes'] / 1e6:.1f}" if each["bytes"] else "",
                    f"{trained[name]:.0f}" if name in trained else "",
                    f"{each['texts_as_plain']:.0%}",
                ]
                for name, each in run["methods"].items()
            ]
            header = ["drafter", "tokens per pass", "rows per pass", "a draft step, in passes", "speed", "MB"]
            parts.append(
                f"{settings['questions']} questions of Spec-Bench of up to {settings['longest']} characters, "
                f"{settings['new']} tokens each, temperature {settings['temperature']:g} (`{run['command']}`).\n\n"
                + table([*header, "seconds of training", "texts as plain"], rows)
            )
    return "\n\n".join(parts) or "Not measured yet."


def heads_by_category() -> str:
    """Speed by category, greedy, one text at a time, of the run with most methods."""
    alone = [run for run in load("draft-heads")["rows"] if run["settings"]["batch"] == 1]
    first = max((run for run in alone if not run["settings"]["temperature"]), key=lambda run: len(run["methods"]))
    names = [name for name in first["methods"] if name != "none"]
    categories = [part for part in first["methods"]["none"]["speed"] if part != "all"]
    rows = [
        [part, *(f"{first['methods'][name]['speed'][part]:.2f}" for name in names)] for part in [*categories, "all"]
    ]
    return table(["speed", *(f"`{name}`" for name in names)], rows)


def replayed() -> str:
    """What `auto` is worth by the size of the table it begins with, and by how far it heeds the noise of tokens."""
    found = load("draft-replayed")
    rows = [
        [name, f"{each['tokens_per_pass']:.2f}", f"{each['rows_per_pass']:.1f}", f"{each['speed']:.2f}"]
        for name, each in found["rows"].items()
    ]
    header = ["", "tokens per pass", "rows per pass", "speed"]
    return f"Plain texts, replayed (`{found['command']}`).\n\n" + table(header, rows)


def head_depths() -> str:
    """How often a head is right, by how far ahead."""
    found = load("draft-head-depths")
    depths = sorted({key for each in found["rows"].values() for key in each if key.startswith("agreement")})
    rows = [
        [f"`{name}`", *(f"{each[depth]:.1%}" if depth in each else "" for depth in depths)]
        for name, each in found["rows"].items()
    ]
    header = ["tokens ahead", *(depth.removeprefix("agreement.") for depth in depths)]
    return (
        f"How often its most likely token is the model's own, given the tokens before it, on greedy answers of "
        f"{found['new_tokens']} tokens to {found['questions']} questions of Spec-Bench (`{found['command']}`).\n\n"
        + table(header, rows)
    )


def heads_alike() -> str:
    """What heads of several kinds predict that were trained on the same texts for the same processor time."""
    found = load("draft-alike-heads")
    first = next(iter(found["rows"].values()))
    kinds = [kind for kind in first if kind != "all" and isinstance(first[kind], dict)]
    depths = sorted(key for key in first["all"] if key.startswith("agreement"))
    rows = [
        [
            name,
            str(each.get("steps", "")),
            f"{each['bytes'] / 1e6:.1f}" if "bytes" in each else "",
            *(f"{each['all'][depth]:.0%}" for depth in depths),
            f"{each['all']['tokens']:.2f}",
            *(f"{each[kind]['tokens']:.2f}" for kind in kinds),
        ]
        for name, each in found["rows"].items()
    ]
    header = ["head", "steps", "MB", *(f"token {depth.removeprefix('agreement.')}" for depth in depths), "all", *kinds]
    return (
        f"How often the most likely token is the model's own, by tokens ahead, and how many tokens of a greedy chain "
        f"are accepted, in all and by kind of prompt: {found['held']} held-out answers, {found['texts']} texts to "
        f"learn from, the same processor time for each head (`{found['command']}`).\n\n" + table(header, rows)
    )


def own_layers() -> str:
    """What drafting with the target's own layers and leaving it early bring on the embedded model."""
    found = load("draft-own-layers")
    rows = [
        [
            name,
            f"{each['tokens_per_pass']:.2f}" if each["draft_passes_per_pass"] or "del" in name else "",
            f"{each['draft_step_in_passes']:.2f}" if each["draft_step_in_passes"] else "",
            f"{each['draft_passes_per_pass']:.2f}" if each["draft_passes_per_pass"] else "",
            f"{counts['layers'] / counts['rows']:.1f}" if "layers" in (counts := each["counts"]) else "",
            f"{each['rouge_l']:.2f}",
            f"{each['gain_in_units']:.2f}",
            f"{each['speed']:.2f}",
        ]
        for name, each in found["rows"].items()
    ]
    header = ["method", "tokens per pass", "draft step in passes", "steps per pass", "layers per token"]
    return (
        f"{found['questions']} questions of Spec-Bench in one batch, greedy, {found['new_tokens']} tokens each "
        f"(`{found['command']}`)\n\n" + table([*header, "ROUGE-L", "gain in units", "speed-up"], rows)
    )


def hamburger() -> str:
    """Tokens of a group and quality by confidence, a table per model."""
    parts = []
    for name, found in load_all("hamburger").get("hamburger", {"rows": {}})["rows"].items():
        asked = f"held-out puzzles (`{found['puzzle']}`)" if found["puzzle"] else "questions of Spec-Bench"
        said = "solved" if found["puzzle"] else "ROUGE-L with the model as it was"
        rows = [
            [
                run,
                *(f"{each[key]:.2f}" if key in each else "" for key in ("tokens of a group", "gain", "right")),
                f"{each['as plain']:.0%}" if "as plain" in each else "",
                f"{each['nats']:.3f}",
            ]
            for run, each in found["runs"].items()
        ]
        before, after = found["validation"]["before"], found["validation"]["after"]
        header = ["", "tokens of a group", "gain in layers", said, "texts as before", "nats per token"]
        parts.append(
            f"`{name}` on {found['texts']} {asked} (`{found['command']}`; `{found['trained']}`). Nats are those of the "
            "greedy texts of the model as it was. On held-out texts and cut where that model was sure, "
            f"{after['tokens of a group']:.2f} tokens to a group, first tokens are right in {after['right first']:.1%} "
            f"of the positions, those after them in {after['right behind']:.1%} ({before['right behind']:.1%} before "
            f"training), and ends in {after['ends right']:.1%}.\n\n" + table(header, rows)
        )
    return "\n\n".join(parts) or "Not measured yet."


SECTIONS: dict[str, Callable[[], str]] = {
    "units": units,
    "in-pass": in_pass,
    "transfer-layers": transfer_layers,
    "heads": heads,
    "heads-by-category": heads_by_category,
    "small-heads": small_heads,
    "head-depths": head_depths,
    "heads-alike": heads_alike,
    "replayed": replayed,
    "own-layers": own_layers,
    "hamburger": hamburger,
}
