"""The generated parts of the page on GPUs, from the results files of the kit (`make gpu`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from figures import load, load_all, table


def runs() -> str:
    """What has run, where and when: each results file of the kit."""
    found = sorted(load_all("gpu-kit-*").values(), key=lambda run: run["created"])
    rows = [
        [
            run["created"][:10],
            _device(run),
            run["settings"]["size"],
            run["machine"]["torch"],
            f"{run['seconds']:.0f}",
            *(_outcomes(run, part) for part in "ABCD"),
        ]
        for run in found
    ]
    columns = [
        "when",
        "device",
        "size",
        "PyTorch",
        "seconds",
        "A: correctness",
        "B: speed",
        "C: training",
        "D: drafters, tests",
    ]
    on_gpu = [run for run in found if _gpu(run)]
    if on_gpu:
        newest = on_gpu[-1]
        said = f"The newest run on a GPU is that of {newest['created'][:10]}, on {_device(newest)}."
    else:
        said = (
            "**Nothing has run on a GPU yet.** The kit has run on the CPU only, at a tiny size: the same script, with "
            "the function that graphs are captured of in their place. Its times say nothing of a GPU."
        )
    return f"{said}\n\n{table(columns, rows)}"


def checks() -> str:
    """All checks of the newest run on a GPU; of the CPU's, what it did not run."""
    found = sorted(load_all("gpu-kit-*").values(), key=lambda run: (_gpu(run), run["created"]))
    run = found[-1]
    if _gpu(run):
        rows = [[each[name] for name in ("part", "check", "outcome", "says")] for each in run["rows"]]
        return table(["part", "check", "outcome", "what was found"], rows)
    left = Counter((each["part"], each["says"]) for each in run["rows"] if each["outcome"] == "not run")
    rows = [[part, str(count), says] for (part, says), count in left.items()]
    return f"What the run on the CPU left out:\n\n{table(['part', 'checks', 'why'], rows)}"


def steps() -> str:
    """What one step asks of a device, as counted on one that is none."""
    names = ("drafter", "texts", "rows", "operations", "copies in", "waits")
    found = load("device-steps")
    rows = [
        [
            "fixed" if each["fixed shapes"] else "ordinary",
            *(f"{each[name]:g}" if name != "drafter" else each[name] for name in names),
        ]
        for each in found["rows"]
    ]
    return f"`{found['command']}`, {found['layers']} layers:\n\n{table(['shapes', *names], rows)}"


def _gpu(run: dict[str, Any]) -> bool:
    return str(run["settings"]["device"]).startswith("cuda")


def _device(run: dict[str, Any]) -> str:
    machine = run["machine"]
    return ", ".join(machine["gpus"]) if _gpu(run) else f"CPU ({machine['processor']})"


def _outcomes(run: dict[str, Any], part: str) -> str:
    counts = Counter(row["outcome"] for row in run["rows"] if row["part"] == part)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


SECTIONS = {"gpu-runs": runs, "gpu-checks": checks, "gpu-steps": steps}
