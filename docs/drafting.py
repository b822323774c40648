"""The generated parts of the documentation about trees, rules, budgets and trained drafts, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from figures import load, load_all, runs_of, table

SHIPPED_COMMAND = "decodery train draft --out smollm2-draft --texts 1280 --epochs 4"


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
        for name, each in runs_of(found).items()
    ]
    header = ["units", "tokens per pass", "grounded", "open", "rows per pass", "tokens changed"]
    return (
        f"{found['questions']} questions of Spec-Bench, greedy, {found['new_tokens']} tokens each. Checked units are "
        "drafts under the default rule; trusted ones become text unchecked from a probability of beta on, as published "
        f"(`--rule lexical-unit`). (`python benchmarks/draft/parallel.py units --step 24 --new 48`)\n\n"
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
    machine = found["machine"]
    costs = ", ".join(
        f"{rows}: {time:.0f}" for rows, time in zip(machine["rows"], machine["pass_milliseconds"], strict=True)
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
        f"How often the likeliest token is right where all three states are made after one layer, on "
        f"{found['texts_held_out']} texts held out, after {found['steps']} steps of {found['places_a_step']} places "
        f"(`{found['command']}`).\n\n" + table(header, rows)
    )


def heads() -> str:
    """What draft heads bring beside drafts that need none: a table per batch size and temperature."""
    parts = []
    for found in load("draft-heads")["runs"]:
        settings = found["settings"]
        rows = [
            [
                f"`{name}`",
                f"{each['tokens_per_pass']:.2f}",
                f"{each['rows_per_pass']:.1f}",
                f"{each['step']:.1%}",
                f"{each['speed']['all']:.2f}",
                f"{each['bytes'] / 1e6:.1f}" if each["bytes"] else "",
                f"{each['texts_as_plain']:.0%}",
            ]
            for name, each in found["methods"].items()
        ]
        header = ["drafter", "tokens per pass", "rows per pass", "beside the pass", "speed", "MB", "texts as plain"]
        parts.append(
            f"{settings['questions']} questions of Spec-Bench, {settings['new']} tokens each, batches of "
            f"{settings['batch']}, temperature {settings['temperature']:g}, at most {settings['nodes']} nodes "
            f"(`{found['command']}`). Beside the pass: what proposing, choosing and committing take, of a plain step."
            "\n\n" + table(header, rows)
        )
    return "\n\n".join(parts)


def small_heads() -> str:
    """All heads and self-speculators on the same prompts, each trained for a short while."""
    parts = []
    for found in load_all("draft-small-heads").values():
        for run in found["runs"]:
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
    """Speed by category, greedy, one text at a time."""
    first = load("draft-heads")["runs"][0]
    names = [name for name in first["methods"] if name != "none"]
    categories = [part for part in first["methods"]["none"]["speed"] if part != "all"]
    rows = [
        [part, *(f"{first['methods'][name]['speed'][part]:.2f}" for name in names)] for part in [*categories, "all"]
    ]
    return table(["speed", *(f"`{name}`" for name in names)], rows)


def head_depths() -> str:
    """How often a head is right, by how far ahead."""
    found = load("draft-head-depths")
    depths = sorted({key for each in found["heads"].values() for key in each if key.startswith("agreement")})
    rows = [
        [f"`{name}`", *(f"{each[depth]:.1%}" if depth in each else "" for depth in depths)]
        for name, each in found["heads"].items()
    ]
    header = ["tokens ahead", *(depth.removeprefix("agreement.") for depth in depths)]
    return (
        f"How often its likeliest token is the model's own, given the tokens before it, on greedy answers of "
        f"{found['new_tokens']} tokens to {found['questions']} questions of Spec-Bench (`{found['command']}`).\n\n"
        + table(header, rows)
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
        for name, each in found["runs"].items()
    ]
    header = ["method", "tokens per pass", "draft step in passes", "steps per pass", "layers per token"]
    return (
        f"{found['questions']} questions of Spec-Bench in one batch, greedy, {found['new_tokens']} tokens each "
        f"(`{found['command']}`)\n\n" + table([*header, "ROUGE-L", "gain in units", "speed-up"], rows)
    )


def orders(group: str) -> str:
    """What one way of drafting in another order brings on the embedded model, in counts."""
    found = load(f"draft-orders-{group}")
    header = ["drafter", "tokens per pass", "draft passes per pass", "drafted per pass", "accepted"]
    rows = [
        [
            name,
            f"{each['tokens_per_pass']:.2f}",
            f"{each['draft_passes_per_pass']:.2f}",
            f"{each['drafted_per_pass']:.2f}",
            f"{each['drafts_accepted']:.1%}",
            *([f"{each['draft_layers_per_token']:.1f}"] if "trained" in found else []),
        ]
        for name, each in found["drafters"].items()
    ]
    if "trained" in found:
        header.append("draft layers per token")
    about = f"{found['prompts']} questions of Spec-Bench, greedy, {found['new_tokens']} tokens each"
    return f"{about} (`{found['command']}`)\n\n" + table(header, rows)


def joint() -> str:
    """All of them side by side, in counts and, where a quiet machine has measured it, in time."""
    found = load("draft-joint")
    header = ["drafter", "tokens per pass", "rows per pass", "draft passes per token", "accepted", "ms per token"]
    parts = [f"Counts of `{found['command']}`; the last column is filled on a machine that does nothing else."]
    for pair, laws in found.items():
        if pair == "command":
            continue
        about = laws["about"]
        for law in (each for each in laws if each != "about"):
            rows = [
                [
                    name,
                    f"{each['tokens_per_pass']:.2f}",
                    f"{each['rows_per_pass']:.1f}",
                    f"{each['draft_passes_per_token']:.2f}",
                    "" if each["drafts_accepted"] is None else f"{each['drafts_accepted']:.1%}",
                    f"{each['milliseconds_per_token']:.1f}" if "milliseconds_per_token" in each else "",
                ]
                for name, each in laws[law].items()
            ]
            title = f"**{pair}**, {law}, {about['prompts']} prompts, {about['new_tokens']} tokens each"
            parts.append(f"{title}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def joint_depths() -> str:
    """How often a token of a draft is right where all before it were, by its depth."""
    found = load("draft-joint")["chain"]
    depths = range(1, 9)
    rows = [
        [f"{name}, {law}", *(f"{right[depth - 1]:.1%}" if depth <= len(right) else "" for depth in depths)]
        for law in ("greedy", "temperature 1")
        for name, each in found[law].items()
        if "deer" in name and "8" in name and (right := each.get("right_by_depth"))
    ]
    return table(["drafter", *(f"token {depth}" for depth in depths)], rows)


def sweeps() -> str:
    """What more text and larger drafts bring, and what the laws of both foretell."""
    rows, commands = [], []
    for axis, name in (("data", "tokens learned from"), ("size", "weights")):
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
        commands += [found["made"]] * (axis == "data") + [found["command"]]
    header = [
        "amount",
        "measured at",
        "tokens per pass",
        "slope",
        "R2",
        "the last, from the others",
        "at twice the last",
    ]
    return table(header, rows) + "\n\n" + "\n\n".join(f"`{each}`" for each in commands)


def pruning() -> str:
    """What routing a prompt's tokens around layers costs in perplexity."""
    found = load("pruning")
    names = {"sparsity": "layers left out", "read": "text read pruned", "behind": "text behind it"}
    rows = [
        [name, f"{each['sparsity']:.1%}", f"{each['read']:.1f}", f"{each['behind']:.1f}"]
        for name, each in found["runs"].items()
    ]
    made = "".join(f"; `{each['command']}`" for each in found["trained"])
    return (
        f"Perplexity on {found['texts']} passages of Spec-Bench: {found['read']} tokens read as a prompt and "
        f"{found['behind']} behind it (`{found['command']}`{made}). Whole layers are left out by both.\n\n"
        + table(["", *names.values()], rows)
    )


def hamburger() -> str:
    """Tokens of a group and quality by confidence, a table per model."""
    parts = []
    for name, found in load_all("hamburger").get("hamburger", {}).items():
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
            "greedy texts of the model as it was. On texts held out and cut where that model was sure, "
            f"{after['tokens of a group']:.2f} tokens to a group, first tokens are right in {after['right first']:.1%} "
            f"of the places, those behind them in {after['right behind']:.1%} ({before['right behind']:.1%} before "
            f"training), and ends in {after['ends right']:.1%}.\n\n" + table(header, rows)
        )
    return "\n\n".join(parts) or "Not measured yet."


def rules() -> str:
    """How often each rule accepts one of k siblings, and the bound; a table per kind of pairs."""
    result = load("rules")
    tables = []
    for title, found in runs_of(result).items():
        columns = [key for key in found if key.startswith("k=")]
        rows = [[name, *(f"{found[k][name]:.3f}" for k in columns)] for name in found[columns[0]]]
        pairs = f"{found['pairs']} pairs" + (f", draft {found['draft']}" if "draft" in found else "")
        tables.append(table([f"{title} ({pairs})", *columns], rows))
    return f"`{result['command']}`\n\n" + "\n\n".join(tables)


def judge() -> str:
    """Tokens per pass and answers by threshold of the judge."""
    result = load("judge")
    head, probe, questions = result["head"], result["probe"], result["questions"]
    rates = table(
        ["rule", "tokens per pass", "right", "answer of the model alone"],
        [
            [name, f"{row['tokens_per_pass']:.2f}", f"{row['right']:.0%}", f"{row['as_alone']:.0%}"]
            for name, row in result["rows"].items()
        ],
    )
    return (
        f"`{result['command']}`: {questions['test']} sums in words, of which the model alone gets "
        f"{result['alone']:.0%} right; drafts of `{result['draft']}`, ten tokens a pass; a head trained on "
        f"{questions['train']} other questions (AUC on those held out {head['auc']:.2f}). Of {probe['tried']} digits "
        f"replaced by wrong ones the head gives {probe['passed']} more than even odds.\n\n{rates}"
    )


def continuous() -> str:
    """What the density-ratio rule accepts, and how far the law is moved."""
    result = load("continuous")
    return f"`{result['command']}`\n\n" + table(
        ["model", "drafter's means moved by", "rule", "accepted", "values per pass", "distance"],
        [
            [
                row["model"],
                str(row["moved"]),
                row["rule"],
                f"{row['accepted']:.0%}",
                f"{row['values_per_pass']:.2f}",
                f"{row['distance']:.3f}",
            ]
            for row in result["rows"]
        ],
    )


def budgets_pareto() -> str:
    """What each budget policy throws away, and the passes it needs."""
    found = load("budgets")["pareto"]
    settings, head = found["settings"], found["settings"]["head"]
    parts = [
        f"`python benchmarks/budgets.py pareto --every {settings['every']} --tokens {settings['tokens']} --head head`, "
        f"with `{settings['draft']}` and the head of `{head['command']}`. It learned from {head['tokens']:.0f} tokens "
        f"drafted along texts new to the draft. On texts held out, where they are accepted with a mean chance of "
        f"{head['acceptance']:.1%}, its cross-entropy above a perfect judge's is {head['loss']:.4f} nats per token; "
        f"that of the best judge that always says the same is {head['constant']:.4f}."
    ]
    for name, runs in found["figures"].items():
        below = runs.pop("below", {})
        rows = [
            [family, setting, f"{point['discarded']:.2f}", f"{point['passes']:.3f}", f"{point['drafted']:.1f}"]
            for family, points in runs.items()
            for setting, point in points.items()
        ]
        counts = ", ".join(
            f"{family} {count} of {len(runs[family])}" for family, count in below.items() if family != "fixed"
        )
        columns = ["budget", "setting", "discarded per token", "passes per token", "drafted per pass"]
        title = f"{name.capitalize()}; below fixed lengths: {counts}." if counts else f"{name.capitalize()}:"
        parts.append(f"{title}\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def budgets_memory() -> str:
    """Bytes allowed and held, and tokens per pass."""
    found = load("budgets")["memory"]
    settings = found["settings"]
    columns = ["drafter", "allowed", "MiB allowed", "MiB held", "nodes", "tokens per pass"]
    rows = [
        [
            drafter,
            label,
            "" if row["allowed_mib"] is None else f"{row['allowed_mib']:.2f}",
            f"{row['peak_mib']:.2f}",
            str(row["nodes"]),
            f"{row['tokens_per_pass']:.2f}",
        ]
        for drafter, group in found["figures"].items()
        for label, row in group.items()
    ]
    command = f"python benchmarks/budgets.py memory --every {settings['every']} --tokens {settings['tokens']}"
    return f"`{command}`, with `{settings['draft']}`:\n\n{table(columns, rows)}"


def budgets_serving() -> str:
    """Mean latency by load and policy, relative to the best fixed length."""
    found = load("budgets")["serving"]
    figures = found["figures"]
    policies = list(next(iter(figures.values())))
    rows = [[load, *(f"{row[name]:.2f}" for name in policies)] for load, row in figures.items()]
    return f"`python benchmarks/budgets.py serving`\n\n{table(['load', *policies], rows)}"


def trained() -> str:
    """What the shipped draft is worth."""
    found = load("draft-trained")
    laws = [(name, found[name]) for name in ("temperature 0", "temperature 1")]
    rows = "\n".join(
        f"| {name} | {100 * law['acceptance']:.1f} % | {100 * law['agreement']:.1f} % | {law['tokens_per_pass']:.2f} |"
        for name, law in laws
    )
    times = found.get("milliseconds", {})
    cost = "".join(
        f"\n\nA pass of the {name} takes {', '.join(f'{ms:.2f} ms over {rows}' for rows, ms in by_rows.items())} rows."
        for name, by_rows in times.items()
    )
    return (
        f"Made by `{SHIPPED_COMMAND}`. On {found['questions']} questions of Spec-Bench, which it has never seen, "
        "four tokens drafted per pass:\n\n"
        f"| | acceptance | agreement | tokens per pass |\n|---|---|---|---|\n{rows}{cost}\n\n"
        "acceptance: the mean of sum min(p, q) along the text; agreement: how often both models find the same token\n"
        "likeliest. `python benchmarks/draft/trained.py --timed` measures it."
    )


def growth() -> str:
    """Tokens per pass of every growth policy, a table per drafter, temperature and rule."""
    parts = []
    for result in load_all("growth-*").values():
        command = (
            f"python benchmarks/growth.py {result['drafter']} --every {result['every']} --tokens {result['tokens']}"
        )
        parts.append(f"Drafter `{result['drafter']}` (`{command}`):")
        for run, policies in result["runs"].items():
            temperature, rule = run.split()
            budgets = list(policies["chain"])
            rows = "\n".join(f"| {name} | {_cells(found, budgets)} |" for name, found in policies.items())
            parts.append(
                f"| temperature {temperature}, {rule} | {' | '.join(f'{nodes} nodes' for nodes in budgets)} |\n"
                f"|---|{'---|' * len(budgets)}\n{rows}"
            )
    return "\n\n".join(parts)


def _cells(found: dict[str, dict[str, float]], budgets: list[str]) -> str:
    known = [found.get(nodes) for nodes in budgets]
    return " | ".join(f"{each['tokens_per_pass']:.2f} ({each['acceptance']:.2f})" if each else "" for each in known)


def cppd() -> str:
    """What drafting a whole text by place saves, and what the slots' own texts are worth."""
    found = load("draft-cppd")
    names = {"slots": "slots", "plainer": "slots that learned the tokens alone"}
    rows = []
    for name, each in runs_of(found).items():
        alone = [f"{each[key]:.1%}" if key in each else "" for key in ("alone as the model", "alone right")]
        figures = [f"{each[key]:.2f}" for key in ("passes per text", "tokens per pass")]
        rows.append([names.get(name, name), *figures, *alone, f"{each['right']:.1%}"])
    header = ["", "passes per text", "tokens per pass", "slots alone as the decoder", "slots alone right", "right"]
    return f"`{found['command']}`, {found['texts']} sources nobody trained on, greedy.\n\n{table(header, rows)}"


def overlap() -> str:
    """What drafting while the target verifies takes, beside drafting in turns."""
    found = load("draft-overlap")
    pairs = {name: each for name, each in found.items() if isinstance(each, dict)}
    rows = []
    for name, times in pairs.items():
        lengths = [key.removeprefix("pearl").strip() for key in times if key.startswith("pearl")]
        for length in lengths:
            turns, beside = (times[f"{method} {length}".strip()] for method in ("draft-model", "pearl"))
            who = f"{name}, drafts of {length}" if length else name
            rows.append([who, f"{times['plain']:.1f}", f"{turns:.1f}", f"{beside:.1f}", f"{turns / beside:.2f}"])
    header = ["milliseconds per token", "plain", "`draft-model`", "`pearl`", "times as fast"]
    return f"`{found['command']}`\n\n{table(header, rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "units": units,
    "in-pass": in_pass,
    "transfer-layers": transfer_layers,
    "heads": heads,
    "heads-by-category": heads_by_category,
    "small-heads": small_heads,
    "head-depths": head_depths,
    "own-layers": own_layers,
    "cppd": cppd,
    "overlap": overlap,
    "orders-hierarchical": partial(orders, "hierarchical"),
    "orders-nested": partial(orders, "nested"),
    "orders-easyspec": partial(orders, "easyspec"),
    "orders-joint": joint,
    "sweeps": sweeps,
    "orders-joint-depths": joint_depths,
    "pruning": pruning,
    "hamburger": hamburger,
    "growth": growth,
    "budgets-pareto": budgets_pareto,
    "budgets-memory": budgets_memory,
    "rules": rules,
    "budgets-serving": budgets_serving,
    "judge": judge,
    "continuous": continuous,
    "trained": trained,
}
