"""Writes the generated parts of the documentation: whatever stands between `<!-- begin X -->` and `<!-- end X -->`.

`python docs/generate.py` writes them, `--check` only tells whether they are up to date.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decodery import registry
from decodery.bench.report import markdown, table
from decodery.bench.result import BENCHMARK, PASSES, Result, read
from decodery.cli.main import COMMANDS, cli
from decodery.registry import Method

sys.path.insert(0, str(Path(__file__).parent))
import sampling  # beside this file, wherever it is run from

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAMILIES = {
    "draft": ("drafters", "what may come next"),
    "draft.growth": ("growth policies", "how a drafter's guesses become a tree"),
    "verify": ("rules", "which drafts are accepted"),
    "sample": ("warps", "which distribution is drawn from"),
    "source": ("logit sources", "which models and contexts the logits come from"),
    "budget": ("budget policies", "how much to draft"),
    "constrain": ("constraints", "what may be written"),
    "search": ("searches", "several texts for one answer"),
    "search.scorers": ("scorers", "how good a text is"),
    "diffuse": ("unmasking policies", "which masked token is settled next"),
    "kv": ("cache policies", "what is remembered"),
    "monitor": ("monitors", "what is watched while decoding"),
    "transform": ("transformations", "how a model is changed"),
    "train": ("trainable parts", "what can be learnt"),
}
"""What the methods of a family are called, and the question they answer."""


SHIPPED_COMMAND = "decodery train draft --out smollm2-draft --texts 1280 --epochs 4"


def methods() -> str:
    """A table per family."""
    parts = []
    for family in registry.FAMILIES:
        if found := registry.methods(family):
            rows = "\n".join(_row(method) for method in found)
            name, question = FAMILIES[family]
            parts.append(
                f"## {name.capitalize()}: {question}\n\n| name | what it does | settings | guarantee | source |\n"
                f"|---|---|---|---|---|\n{rows}"
            )
    return "\n\n".join(parts)


def _row(method: Method) -> str:
    fields = [field for field in dataclasses.fields(method.cls) if field.init]
    settings = "<br>".join(f"`{_setting(field)}`" for field in fields)
    needs = f"; needs {', '.join(method.needs)}" if method.needs else ""
    source = method.paper or ""
    cells = [f"`{method.name}`", method.summary, settings, method.guarantee + needs, source]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _setting(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}={field.default}"
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}={field.default_factory()}"
    return f"{field.name}=..."


def method_count() -> str:
    """How many methods there are, by family."""
    counts = {family: len(registry.methods(family)) for family in registry.FAMILIES}
    return ", ".join(f"{count} {FAMILIES[family][0]}" for family, count in counts.items() if count) + "."


def commands() -> str:
    """The help of every command, as it is printed at a width of 100."""
    parts = []
    top = click.Context(cli, info_name="decodery", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        context = click.Context(command, parent=top, info_name=name, max_content_width=100, terminal_width=100)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def successor() -> str:
    """The worked example, as it is run by the tests."""
    return f"```python\n{(ROOT / 'examples' / 'successor.py').read_text(encoding='utf-8').strip()}\n```"


def speed() -> str:
    """The tables of every result file of a benchmark."""
    results = [result for result in _results(BENCHMARK) if result["settings"]["workloads"] != ["jsonschema"]]
    tables = [f"{_where(result)}.\n\n{table(result)}" for result in results]
    return "\n\n".join(tables) or "No results yet: `make bench` writes them."


def unguessable() -> str:
    """What `auto` costs where nothing can be guessed."""
    found = _load("draft-unguessable")
    low, high = found["interval"]
    return (
        f"{found['texts']} texts of {found['new_tokens']} tokens at temperature {found['temperature']:g} after random "
        f"tokens: `auto` takes {found['ratio']:.3f} times as long as plain decoding (95 % interval {low:.3f} to "
        f"{high:.3f}); it drafts {found['drafted_per_pass']:.2f} tokens per pass there."
    )


def jsonschema() -> str:
    """Answers held to schemas, by dataset."""
    return table(read(ROOT / "benchmarks" / "results" / "jsonschema.json"))


def headline() -> str:
    """The methods and the peers over the built-in workload, for a reader in a hurry."""
    result = read(ROOT / "benchmarks" / "results" / "peers.json")
    rows = [row for row in result["rows"] if row["workload"] == "built-in"]
    return f"{_where(result)}.\n\n{table({**result, 'rows': rows})}"


def passes() -> str:
    """The table of every result file of pass costs."""
    tables = [f"{_where(result)}.\n\n{table(result)}" for result in _results(PASSES)]
    return "\n\n".join(tables) or "No results yet: `decodery bench --pass` writes them."


def kernels() -> str:
    """Milliseconds of all matrix products of a pass, by library and rows, and the ratio to this project's int8."""
    rows = _load("kernels")["rows"]
    counts = sorted({row["rows"] for row in rows})
    cells = {(row["library"], row["rows"]): f"{row['least_ms']:.1f} ({row['over_ours']:.2f})" for row in rows}
    return _table(
        ["library", *(f"{count} rows" for count in counts)],
        [[name, *(cells[name, count] for count in counts)] for name in dict.fromkeys(row["library"] for row in rows)],
    )


def quality() -> str:
    """What precision costs in quality."""
    rows = _load("quality")["rows"]
    first = rows[0]["perplexity"]
    return _table(
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


def parts() -> str:
    """Where the time of an int8 pass goes."""
    names = ("products", "attention", "waiting", "outside the kernels")
    return _table(
        ["tokens before", "rows", "ms", *(f"{name}" for name in names), "rest"],
        [
            [
                str(row["context"]),
                str(row["rows"]),
                f"{row['ms']:.1f}",
                *(f"{row[name]:.0%}" for name in names),
                f"{1 - sum(row[name] for name in names):.0%}",
            ]
            for row in _load("parts")["rows"]
        ],
    )


def rules() -> str:
    """How often each rule accepts one of k siblings, and the bound; a table per kind of pairs."""
    result = _load("rules")
    tables = []
    for title, found in result.items():
        if not isinstance(found, dict):
            continue
        columns = [key for key in found if key.startswith("k=")]
        rows = [[name, *(f"{found[k][name]:.3f}" for k in columns)] for name in found[columns[0]]]
        pairs = f"{found['pairs']} pairs" + (f", draft {found['draft']}" if "draft" in found else "")
        tables.append(_table([f"{title} ({pairs})", *columns], rows))
    return f"`{result['command']}`\n\n" + "\n\n".join(tables)


def judge() -> str:
    """Tokens per pass and answers by threshold of the judge."""
    path = ROOT / "benchmarks" / "results" / "judge.json"
    if not path.exists():
        return "No results yet: `python benchmarks/judge.py` writes them."
    result = _load("judge")
    head, probe, questions = result["head"], result["probe"], result["questions"]
    table = _table(
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
        f"replaced by wrong ones the head gives {probe['passed']} more than even odds.\n\n{table}"
    )


def continuous() -> str:
    """What the density-ratio rule accepts, and how far the law is moved."""
    result = _load("continuous")
    return f"`{result['command']}`\n\n" + _table(
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


def _load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def budgets_pareto() -> str:
    """What each budget policy throws away, and the passes it needs."""
    found = _budgets("pareto")
    if not found:
        return "Not measured yet."
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
        parts.append(f"{title}\n\n{_table(columns, rows)}")
    return "\n\n".join(parts)


def budgets_memory() -> str:
    """Bytes allowed and held, and tokens per pass."""
    found = _budgets("memory")
    if not found:
        return "Not measured yet."
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
    return f"`{command}`, with `{settings['draft']}`:\n\n{_table(columns, rows)}"


def sources() -> str:
    """A table per measured group of logit sources: counts per output token, prompts included."""
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("sources-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found = result["figures"]
        runs = {**found.get("thresholds", {}), **{name: run for name, run in found.items() if name != "thresholds"}}
        rows = {name: run for name, run in runs.items() if isinstance(run, dict)}
        facts = ", ".join(f"{name}: {value}" for name, value in runs.items() if not isinstance(value, dict))
        columns = list(dict.fromkeys(name for run in rows.values() for name in run))
        cells = [[name, *(str(run.get(column, "")) for column in columns)] for name, run in rows.items()]
        about = result["about"].strip() + (f" ({facts})" if facts else "")
        parts.append(f"**{path.stem.removeprefix('sources-')}.** {about}\n\n{_table(['', *columns], cells)}")
    return "\n\n".join(parts) or "Not measured yet."


def budgets_serving() -> str:
    """Mean latency by load and policy, relative to the best fixed length."""
    found = _budgets("serving")
    if not found:
        return "Not measured yet."
    figures = found["figures"]
    policies = list(next(iter(figures.values())))
    rows = [[load, *(f"{row[name]:.2f}" for name in policies)] for load, row in figures.items()]
    return f"`python benchmarks/budgets.py serving`\n\n{_table(['load', *policies], rows)}"


def _budgets(group: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "budgets.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found.get(group, {})


def trained() -> str:
    """What the shipped draft is worth."""
    found = json.loads((ROOT / "benchmarks" / "results" / "draft-trained.json").read_text(encoding="utf-8"))
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


def constraints() -> str:
    """What the figures of constraints say."""
    folder = ROOT / "benchmarks" / "results"
    found = {
        name: json.loads((folder / f"constraints-{name}.json").read_text(encoding="utf-8"))["figures"]
        for name in ("suite", "declared", "identity", "forced")
    }
    suite, (works, tried) = found["suite"]["all"], found["declared"]["all"]
    lines = [
        f"**JSON Schema Test Suite** (draft 2020-12): of the instances under schemas that are enforced, "
        f"{suite['valid accepted']} of {suite['valid accepted'] + suite['valid not accepted']} valid ones are accepted "
        f"and {suite.get('invalid accepted', 0)} of {suite['invalid not accepted']} invalid ones.",
        f"**JSONSchemaBench**: {works} of {tried} schemas of the sample are enforced.",
        markdown(
            ("dataset", "enforced", "of"),
            [(name.replace("_", " "), str(a), str(b)) for name, (a, b) in found["declared"]["datasets"].items()],
        ),
        "**Identity** with constrained plain decoding:",
        markdown(
            ("setting", "finished, valid", *(name for name in _first(found["identity"]) if name != "plain")),
            [_identity(setting, each) for setting, each in found["identity"].items()],
        ),
        "**Tokens per pass**:",
        _tokens_per_pass(found["forced"]),
    ]
    return "\n\n".join(lines)


def monitor() -> str:
    """How many attributes exist, with the monitor and without."""
    path = ROOT / "benchmarks" / "results" / "monitor.json"
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for setting, each in found["figures"].items():
        exist, missing = each.get("exists", 0), each.get("missing", 0)
        if exist + missing:
            counts = (f"{exist} of {exist + missing}", f"{each['share']:.0%}", str(each.get("unknown", 0)))
            rows.append((f"`{setting}`", str(each["texts"]), *counts))
    return (
        f"Attributes that {found['settings']['model']} writes behind objects of a package it has never seen, over "
        f"{found['settings']['prompts']} beginnings of functions and up to {found['settings']['new_tokens']} tokens "
        f"each; the last column has objects whose type only running the code would tell.\n\n"
        + markdown(("setting", "texts", "exist", "share", "not known"), rows)
    )


def pg_td() -> str:
    """Problems solved within so many passes."""
    path = ROOT / "benchmarks" / "results" / "pg-td.json"
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text(encoding="utf-8"))
    grid = list(next(iter(found["figures"].values()))["solved"])
    rows = []
    for setting, each in found["figures"].items():
        solved = (str(each["solved"][most]) for most in grid)
        rows.append((setting, str(each["problems"]), *solved, str(each["public"]), str(each["programs"])))
    return (
        f"Functions of one line by {found['settings']['model']}: how many of them pass hidden tests after so many "
        "passes, taking the first program that passes three public ones.\n\n"
        + markdown(("search", "problems", *(f"{most} passes" for most in grid), "pass public tests", "programs"), rows)
    )


def _first(figures: dict[str, Any]) -> dict[str, Any]:
    return next(iter(figures.values()))


def _identity(setting: str, each: dict[str, dict[str, int]]) -> tuple[str, ...]:
    ended = f"{each['plain']['finished']}, {each['plain']['valid']}"
    return (setting, ended, *(_same(counts) for drafter, counts in each.items() if drafter != "plain"))


def _same(counts: dict[str, int]) -> str:
    excused = f" + {counts['excused']} near-ties" if counts["excused"] else ""
    return f"{counts['identical']}{excused} / {counts['checked']}"


def _tokens_per_pass(figures: dict[str, float]) -> str:
    settings = list(dict.fromkeys(name.partition(": ")[0] for name in figures))
    drafters = list(dict.fromkeys(name.partition(": ")[2] for name in figures))
    rows = [(drafter, *(f"{figures[f'{each}: {drafter}']:.2f}" for each in settings)) for drafter in drafters]
    return markdown(("drafter", *settings), rows)


def steered() -> str:
    """How often completions are secure behind each of SVEN's prefixes, and what these do to other code."""
    found = _load("sven")
    weaknesses = list(found["none"]["counts"])
    rows = []
    for control in ("secure", "none", "unsafe"):
        counts = found[control]["counts"]
        cells = [f"{each['secure']} / {each['unsafe']} / {each['neither']}" for each in counts.values()]
        moved = f"{found['kl'][control]:.3f}" if control in found["kl"] else ""
        rows.append([control, f"{found[control]['rate']:.0%}", *cells, moved])
    return (
        f"{found['templates']} beginnings of programs, {found['samples']} continuations each at temperature "
        f"{found['temperature']}: the rate of secure ones among secure and unsafe ones, then secure / unsafe / neither "
        f"by weakness, and the divergence from the model on neutral code, in nats per token. `{found['command']}`\n\n"
        + _table(["control", "secure rate", *weaknesses, "KL"], rows)
    )


def extraction() -> str:
    """F1 of extraction as code, free and constrained."""
    found = _load("extraction")
    rows = [
        [f"{name}, {how}", str(found[name]["can be read"]), *(f"{value:.3f}" for value in found[name][how].values())]
        for name in ("free", "constrained")
        for how in ("read whole", "item by item")
        if how in found[name]
    ]
    kinds = list(found["constrained"]["read whole"])
    return (
        f"F1 on {found['sentences']} synthetic sentences, with three solved examples (`{found['command']}`):\n\n"
        + _table(["answers", "can be read", *kinds], rows)
    )


def smc() -> str:
    """What sequential Monte Carlo finds that masks and samples do not."""
    return "\n\n".join(_figures(f"smc-{name}") for name in ("posterior", "reward", "lookahead"))


def checks() -> str:
    """How many tokens are asked about in place of a mask."""
    return _figures("smc-checks")


def _figures(name: str) -> str:
    """The figures of a result file that says what it is about and which command made it; numbers stand apart."""
    if not (ROOT / "benchmarks" / "results" / f"{name}.json").exists():
        return f"`python benchmarks/smc.py {name.removeprefix('smc-')}` is not measured yet."
    result = _load(name)
    rows = {each: row for each, row in result["figures"].items() if isinstance(row, dict)}
    facts = "".join(f" {each.capitalize()}: {value}." for each, value in result["figures"].items() if each not in rows)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[each, *(str(row.get(column, "")) for column in columns)] for each, row in rows.items()]
    return f"{result['about']}{facts} (`{result['command']}`)\n\n{_table(['', *columns], cells)}"


def growth() -> str:
    """Tokens per pass of every growth policy, a table per drafter, temperature and rule."""
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("growth-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
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
    return "\n\n".join(parts) or "No results yet: `python benchmarks/growth.py ngram` writes them."


def _cells(found: dict[str, dict[str, float]], budgets: list[str]) -> str:
    known = [found.get(nodes) for nodes in budgets]
    return " | ".join(f"{each['tokens_per_pass']:.2f} ({each['acceptance']:.2f})" if each else "" for each in known)


def _results(kind: str) -> list[Result]:
    # Measurements of other kinds lie there too; those of the benchmark say what they are.
    paths = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
    return [read(path) for path in paths if json.loads(path.read_text(encoding="utf-8")).get("kind") == kind]


def _where(result: Result) -> str:
    machine = result["machine"]
    devices = machine["gpus"] or [f"{machine['processor']}, {machine['threads']} threads"]
    return f"{result['model']['name']} on {', '.join(devices)} ({result['created'][:10]})"


SECTIONS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "method-count": method_count,
    "commands": commands,
    "successor": successor,
    "speed": speed,
    "jsonschema": jsonschema,
    "unguessable": unguessable,
    "headline": headline,
    "passes": passes,
    "growth": growth,
    "kernels": kernels,
    "quality": quality,
    "parts": parts,
    "sources": sources,
    "budgets-pareto": budgets_pareto,
    "budgets-memory": budgets_memory,
    "rules": rules,
    "budgets-serving": budgets_serving,
    "judge": judge,
    "continuous": continuous,
    "trained": trained,
    "constraints": constraints,
    "smc": smc,
    "checks": checks,
    **sampling.SECTIONS,
    "steered": steered,
    "extraction": extraction,
    "monitor": monitor,
    "pg-td": pg_td,
}


def fill(text: str) -> str:
    """A page with all its generated parts made anew."""

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n\n{SECTIONS[name]()}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", section, text, flags=re.DOTALL)


def stale() -> list[Path]:
    """The pages whose generated parts are out of date."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    return [page for page, text in texts.items() if fill(text) != text]


def main() -> int:
    pages = stale()
    for page in pages:
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if pages and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
