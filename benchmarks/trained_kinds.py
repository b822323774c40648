"""What kinds of `decodery train` come to at their smallest size: held-out figures, and what stands beside them.

    python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json
    python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json --kinds direction,sae

Each kind is trained by its command, with the settings below and the built-in data or this repository's pages. A row
holds the figure that the command prints for data that chose nothing, with its interval, baselines and control (labels
shuffled, or directions), and the seconds. Rows that a result file has already are kept where the model and their
arguments are the same, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from decodery_benchmarks.results import read_result, write_result

ROOT = Path(__file__).parents[1]
KINDS = {
    "probe": "--rows prompt --count 240 --max-new-tokens 12 --site resid_post.20",
    "los": "--count 240 --max-new-tokens 12",
    "sequential": "--count 120 --site resid_post.20",
    "direction": "--site resid_post.20",
    "sae": "--count 60 --max-new-tokens 4 --steps 100 --features 64",
    "codebook": "{text} --length 64 --texts 30 --codes 64 --steps 20",
    "autoencoder": "{text} --length 64 --texts 60 --features 512 --k 16 --steps 200 --site resid_post.15",
}
"""By kind: the arguments after `decodery train KIND`."""
FIGURES = ("auroc", "unexplained variance", "more than without")
"""Names of figures, by which the first one that a command prints is taken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    wanted = given.kinds.split(",")
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no settings for {', '.join(sorted(unknown))}: kinds are {', '.join(KINDS)}")
    settings = {"model": given.model}
    known = read_result(given.out) if given.out.is_file() else None
    rows = dict(known["rows"]) if known is not None and known["settings"] == settings else {}
    for kind in wanted:
        if rows.get(kind, {}).get("arguments") == KINDS[kind]:
            continue
        rows[kind] = {"arguments": KINDS[kind]} | trained(kind, given.model)
        shown = "python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json"
        write_result(given.out, {"command": shown, "settings": settings, "rows": rows, "summary": {}})
        print(json.dumps({kind: rows[kind]}, indent=1), flush=True)


def trained(kind: str, model: str) -> dict[str, Any]:
    """The row of a kind. Raises CalledProcessError where its command fails."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "pages.txt")
        text.write_text("\n\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))[:12]))
        arguments = shlex.split(KINDS[kind].format(text=text))
        command = [sys.executable, "-m", "decodery", "train", kind, *arguments, "-m", model]
        begin = time.monotonic()
        said = subprocess.run([*command, "--out", str(Path(folder, "out"))], capture_output=True, text=True, check=True)
        seconds = time.monotonic() - begin
    report = json.loads(said.stdout[: said.stdout.rindex("}") + 1])
    name = next(each for each in FIGURES if each in report)
    baselines = {
        each: value if isinstance(value, float) else {part: value[part] for part in ("auroc", "interval")}
        for each, value in report.get("baselines", {}).items()
    }
    control = report.get("shuffled labels")
    return {
        "figure": name,
        "value": report[name],
        "interval": report["interval"],
        "items": report.get("items", report.get("texts")),
        "baselines": baselines,
        "control": None if control is None else {part: control[part] for part in ("auroc", "interval")},
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
