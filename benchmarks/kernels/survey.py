"""How much a pass's matrix products cost in the libraries people use: rows x library, in one run, interleaved.

The load is the chain of SmolLM2-135M's linear layers with distinct random weights (30 blocks and the head, 134.5
million weights): what a layer returns is cut to the width of the next one's input. A round runs every library once
for every number of rows, so a change of the machine's mood meets all of them alike. With --threads 1 it is the
process's own processor time that is taken, which other programs disturb least.

    python benchmarks/kernels/survey.py --rounds 20 --json benchmarks/results/kernels.json

Libraries that are not installed are left out: onnxruntime, onnx, openvino, torchao. Inductor is measured with
--inductor, as it compiles for minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import peers
import torch

from decodery.core.native import kernels

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

ROWS = (1, 4, 8, 16, 32, 64)
Chain = Callable[[torch.Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of the libraries to measure")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        result = survey(arguments.rounds, arguments.inductor, arguments.only)
    print(table(result))
    if arguments.json:
        write_result(arguments.json, result, summary=["read_gb_per_s", "absent"])


def survey(rounds: int, inductor: bool, only: list[str] | None) -> dict[str, object]:
    weights = peers.random_weights()
    chains, absent = {}, {}
    for name, build in peers.builders(inductor).items():
        if only and name not in only:
            continue
        try:
            chain = build(weights)
            for n in ROWS:
                chain(torch.randn(n, peers.HIDDEN))
            chains[name] = chain
        except Exception as error:  # a library may be missing or refuse this machine: say so and go on
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        print(f"built {name}" if name in chains else f"without {name}: {absent[name]}", flush=True)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in ROWS} for name in chains}
    bandwidth = []
    for _ in range(rounds):
        for n in ROWS:
            rows = torch.randn(n, peers.HIDDEN)
            for name, chain in chains.items():
                time.sleep(0.01)  # lets the threads of the library before fall asleep
                chain(rows)  # brings this one's back
                begin = clock()
                chain(rows)
                times[name][n].append(1e3 * (clock() - begin))
        bandwidth.append(kernels.read_bandwidth(mebibytes=128, rounds=1))
    return {
        "kernels": kernels.status(),
        "threads": torch.get_num_threads(),
        "read_gb_per_s": max(bandwidth),
        "rounds": rounds,
        "absent": absent,
        "rows": [
            {
                "library": name,
                "rows": n,
                "median_ms": statistics.median(spent),
                "least_ms": min(spent),
                "over_ours": statistics.median(
                    mine / own for mine, own in zip(spent, times[peers.OURS][n], strict=True)
                ),
            }
            for name, by_rows in times.items()
            for n, spent in by_rows.items()
        ],
    }


def table(result: dict) -> str:
    """Milliseconds (least over the rounds) and, in brackets, the median ratio to this project's int8."""
    names = list(dict.fromkeys(row["library"] for row in result["rows"]))
    cells = {(row["library"], row["rows"]): row for row in result["rows"]}
    lines = ["| library | " + " | ".join(f"{n} rows" for n in ROWS) + " |", "|---|" + "---|" * len(ROWS)]
    for name in names:
        values = (cells[name, n] for n in ROWS)
        lines.append(f"| {name} | " + " | ".join(f"{v['least_ms']:.1f} ({v['over_ours']:.2f})" for v in values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
