"""Compares the hashes that bits.sh left in a folder. Called by that script; writes benchmarks/results/bits.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from decodery_benchmarks.results import RESULTS, write_result

WHERE = {"here": "this machine", "arm": "qemu-aarch64"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="The folder of here.tsv and arm.tsv.")
    work = parser.parse_args().work
    sets: dict[str, None] = {}
    hashes: dict[str, list[str]] = {}
    for file, place in WHERE.items():
        for line in (work / f"{file}.tsv").read_text("utf-8").splitlines():
            kernels, case, found = line.split("\t")
            sets[f"{kernels} ({place})"] = None
            hashes.setdefault(case, []).append(found)
    differ = [case for case, found in hashes.items() if len(set(found)) > 1 or len(found) != len(sets)]
    found = {"command": "benchmarks/kernels/bits.sh DIR", "sets": list(sets), "cases": list(hashes), "differ": differ}
    write_result(RESULTS / "bits.json", found, summary=("differ",))
    print(f"{len(hashes)} cases on {len(sets)} kernel sets, {len(differ)} differ")
    return len(differ) > 0


if __name__ == "__main__":
    sys.exit(main())
