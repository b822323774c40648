"""The generated parts of the documentation about the server, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable

from figures import RESULTS, load
from figures import table as table_from

from decodery.bench.report import table
from decodery.bench.result import read


def peers() -> str:
    """The server beside others, and with long prompts arriving."""
    return "\n\n".join(_stages(name) for name in ("serve-peers", "serve-long-prompts"))


def _stages(name: str) -> str:
    result = read(RESULTS / f"{name}.json")
    machine = result["machine"]
    where = (
        f"`benchmarks/results/{name}.json`: {machine['processor']}, {machine['threads']} threads, {machine['kernels']}"
    )
    notes = "".join(f" {note}." for note in result["notes"])
    return f"{where} ({result['created'][:10]}).{notes}\n\n{table(result)}"


def soak() -> str:
    """What the server was asked for a long time, and what came of it."""
    found = load("serve-soak")
    memory = found["memory"]
    figures = [
        ("seconds", f"{found['seconds']:g}"),
        ("answers with status 500 or above", found["server_errors"]),
        ("texts compared with the same request alone", found["texts_compared"]),
        ("of them different", found["texts_different"]),
        ("requests that had no answer after 240 s", found["never_answered"]),
        *((f"resident memory, {name.replace('_', ' ')}", f"{value:g}") for name, value in memory.items()),
    ]
    kinds = ", ".join(f"{name} {count}" for name, count in found["answers"].items())
    rows = [[name, str(value)] for name, value in figures]
    return f"`{found['command']}`\n\n{table_from(['', ''], rows)}\n\nAnswers by kind: {kinds}."


def exactness() -> str:
    """Concurrent requests of the embedded model beside the same requests alone."""
    found = load("serve_exactness")
    return table_from(["", ""], [[name, str(value)] for name, value in found["summary"].items()])


def starvation() -> str:
    """Tokens of one key beside the widest searches of another."""
    found = load("starvation")
    names = ("first_seconds", "whole_seconds", "worst_whole_seconds")
    shown = {"alone": "nothing", "ordinary": "one ordinary request", "searches": "all searches at once"}
    rows = [[shown[name], *(f"{row[each]:.3f}" for each in names)] for name, row in found["rows"].items()]
    ratio = found["summary"]["ratio"]
    rows.append(["searches / ordinary", *(f"{ratio[each]:.2f}" for each in names[:2]), ""])
    head = ["beside", "first token, s", "50 tokens, s", "slowest of five, s"]
    machine = found["machine"]
    where = f"{machine['processor']}, {machine['threads']} threads, {machine['kernels']} ({found['created'][:10]})"
    return f"`{found['command']}`\n\n{where}.\n\n{table_from(head, rows)}"


def clients() -> str:
    """What each client does with the server."""
    found = load("client-matrix")
    rows = []
    for client in found["rows"]:
        tried: dict[str, list[str]] = {}
        for row in client["rows"]:
            tried.setdefault(row["endpoint"], []).append(row["tried"] + ("" if row["works"] else " (**fails**)"))
        said = "; ".join(f"`{endpoint}`: {', '.join(each)}" for endpoint, each in tried.items())
        rows.append([client["client"], client["version"], said])
    return f"`{found['command']}`\n\n{table_from(['client', 'version', 'what works'], rows)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "serve-peers": peers,
    "serve-soak": soak,
    "serve-exactness": exactness,
    "starvation": starvation,
    "client-matrix": clients,
}
