"""The generated parts of the documentation about what things cost and how fast they are, from what was recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from figures import RESULTS, load, load_all
from figures import table as table_from

from decodery.bench.report import table
from decodery.bench.result import BENCHMARK, PASSES, Result, read
from decodery.bench.rows import ALL


def speed() -> str:
    """The tables of every result file of a benchmark."""
    results = [result for result in _results(BENCHMARK) if result["settings"]["workloads"] != ["jsonschema"]]
    return "\n\n".join(f"{_where(result)}.\n\n{table(result)}" for result in results)


def unguessable() -> str:
    """What `auto` costs where nothing can be guessed."""
    found = load("draft-unguessable")
    low, high = found["interval"]
    return (
        f"{found['texts']} texts of {found['new_tokens']} tokens at temperature {found['temperature']:g} after random "
        f"tokens: `auto` takes {found['ratio']:.3f} times as long as plain decoding (95 % interval {low:.3f} to "
        f"{high:.3f}); it drafts {found['drafted_per_pass']:.2f} tokens per pass there."
    )


def texts_together() -> str:
    """Tokens a second of several texts at once, beside one text and llama.cpp."""
    found = load("texts-together")
    rows = []
    for row in found["rows"].values():
        plain, others = row["plain"], [row[name] for name in ("auto", "llama.cpp") if name in row]
        cells = [f"{each['tokens_per_second']:.0f}" for each in (plain, *others)]
        rows.append([row["model"], str(row["texts"]), cells[0], f"{plain.get('times_one', 1):.1f}", *cells[1:]])
        rows[-1] += [""] * (6 - len(rows[-1]))
    head = ["model, keys and values", "texts", "plain, tokens/s", "times one text", "`auto`", "llama.cpp"]
    return f"{found['machine']['processor']}, {found['machine']['kernels']}.\n\n{table_from(head, rows)}"


def jsonschema() -> str:
    """Answers held to schemas, by dataset."""
    return table(read(RESULTS / "jsonschema.json"))


_COLD = " (cold)"
_PAIRS = ("peers-1.5b", "peers")


def headline() -> str:
    """Each model's methods and peers over the built-in workload, then by kind of text, for a reader in a hurry."""
    results = [read(RESULTS / f"{name}.json") for name in _PAIRS]
    parts = []
    for result in results:
        rows = [row for row in _cold(result) if row["category"] == ALL]
        parts.append(f"{_where(result)}.\n\n{table({**result, 'rows': rows})}")
    return "\n\n".join([*parts, _by_kind(results), _servers()])


def _cold(result: Result) -> list[dict[str, Any]]:
    """The rows of the built-in workload in which no method has seen another prompt before."""
    rows = [row for row in result["rows"] if row["workload"] == "built-in"]
    cold = {row["method"] for row in rows if row["method"].endswith(_COLD)}
    warm = {name.removesuffix(_COLD) for name in cold}
    return [{**row, "method": _short(row["method"].removesuffix(_COLD))} for row in rows if row["method"] not in warm]


def _by_kind(results: list[Result]) -> str:
    """Speed-ups of each kind of text."""
    columns = [(result["model"]["name"], name, _cold(result)) for result in results for name in ("auto", "llama.cpp")]
    found = {
        (model, name, row["category"]): row for model, name, rows in columns for row in rows if row["method"] == name
    }
    kinds = [row["category"] for row in columns[0][2] if row["method"] == "none" and row["category"] != ALL]
    head = ["kind of text", *(f"{_short(model)}: {name}" for model, name, _ in columns)]
    body = [
        [kind.replace("_", " "), *(f"{row['speedup']:.2f}" if row else "" for row in found_rows)]
        for kind in kinds
        for found_rows in [[found.get((model, name, kind)) for model, name, _ in columns]]
    ]
    return f"Speed-up by kind of text:\n\n{table_from(head, body)}"


def _short(model: str) -> str:
    """A name that ends with a model's, without the model's format."""
    return model.removesuffix(".gguf").removesuffix("-q4_k_m").removesuffix("-instruct")


def _servers() -> str:
    """The server beside others, by how many clients send requests at a time."""
    result = load("serve-peers")
    rows = [row for row in result["rows"] if row["mode"] == "concurrency"]
    counts = sorted({row["load"] for row in rows})
    found = {(row["server"], row["load"]): row for row in rows}
    body = [
        [
            server,
            *(f"{found[server, count]['tokens_per_second']:.0f}" for count in counts),
            *(f"{found[server, count]['first_token']['p50']:.1f}" for count in counts),
        ]
        for server in result["servers"]
    ]
    head = [
        "server",
        *(f"tokens/s, {count:g} client{'s' * (count > 1)}" for count in counts),
        *(f"first token, s, {count:g}" for count in counts),
    ]
    return f"The server, {_where(result)}:\n\n{table_from(head, body)}"


def passes() -> str:
    """The table of every result file of pass costs."""
    return "\n\n".join(f"{_where(result)}.\n\n{table(result)}" for result in _results(PASSES))


def kernels() -> str:
    """Milliseconds of all matrix products of a pass, by library and rows, and the ratio to this project's int8."""
    rows = load("kernels")["rows"]
    counts = sorted({row["rows"] for row in rows})
    cells = {(row["library"], row["rows"]): f"{row['least_ms']:.1f} ({row['over_ours']:.2f})" for row in rows}
    return table_from(
        ["library", *(f"{count} rows" for count in counts)],
        [[name, *(cells[name, count] for count in counts)] for name in dict.fromkeys(row["library"] for row in rows)],
    )


def quality(name: str = "quality") -> str:
    """What precision costs in quality."""
    rows = load(name)["rows"]
    first = rows[0]["perplexity"]
    return table_from(
        ["precision", "perplexity", "to float32", "greedy tokens that differ"],
        [
            [
                row["precision"],
                f"{row['perplexity']:.2f}",
                f"{row['perplexity'] / first - 1:+.2%}",
                f"{row['greedy_differ']} of {row['greedy_compared']}",
            ]
            for row in rows
        ],
    )


def own_blocks() -> str:
    """What a file's own blocks, multiplied as they are, lose against the same blocks in float32."""
    lines = []
    for found in load_all("quality-own-*").values():
        exact, own = found["rows"]
        differ = f"{own['greedy_differ']} of {own['greedy_compared']}"
        shares = (f"{exact['perplexity']:.2f}", f"{own['perplexity']:.2f}")
        lines.append([found["model"], *shares, f"{own['perplexity'] / exact['perplexity'] - 1:+.2%}", differ])
    return table_from(["file", "float32", "its own blocks", "more", "greedy tokens that differ"], lines)


def parts() -> str:
    """Where the time of an int8 pass goes."""
    names = ("products", "attention", "waiting", "outside the kernels")
    return table_from(
        ["tokens before", "rows", "ms", *(f"{name}" for name in names), "rest"],
        [
            [
                str(row["context"]),
                str(row["rows"]),
                f"{row['ms']:.1f}",
                *(f"{row[name]:.0%}" for name in names),
                f"{1 - sum(row[name] for name in names):.0%}",
            ]
            for row in load("parts")["rows"]
        ],
    )


def _results(kind: str) -> list[Result]:
    # Measurements of other kinds lie there too; those of the benchmark say what they are.
    paths = sorted((RESULTS).rglob("*.json"))
    return [read(path) for path in paths if json.loads(path.read_text(encoding="utf-8")).get("kind") == kind]


def _where(result: Result) -> str:
    machine = result["machine"]
    kernels = machine["kernels"].partition("native kernels (")[2].rstrip(")") or f"{machine['threads']} threads"
    devices = machine["gpus"] or [f"{machine['processor']} ({kernels})"]
    return f"{result['model']['name']} on {', '.join(devices)} ({result['created'][:10]})"


SECTIONS: dict[str, Callable[[], str]] = {
    "speed": speed,
    "jsonschema": jsonschema,
    "unguessable": unguessable,
    "texts-together": texts_together,
    "headline": headline,
    "passes": passes,
    "kernels": kernels,
    "quality": quality,
    "quality-gemma": partial(quality, "quality-gemma-3-270m"),
    "quality-own": own_blocks,
    "parts": parts,
}
