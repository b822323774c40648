#!/usr/bin/env bash
# Compiles the kernels for 64-bit Arm, runs bits.cpp on them under emulation and here on this machine's own library, and
# compares: the same hash for every case on every kernel set. Needs g++-aarch64-linux-gnu and qemu-user (Debian).
#
#     benchmarks/kernels/bits.sh DIR
#
# Writes benchmarks/results/bits.json.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$1
mkdir -p "$work"
work=$(cd "$work" && pwd)
sources=$root/src/decodery/core/native/csrc
flags=(-std=c++17 -O3 -g0 -ffp-contract=off -fno-math-errno -fvisibility=hidden -pthread -Wno-psabi -fPIC)
for file in native parallel portable arm arm_i8mm; do
    aarch64-linux-gnu-g++ "${flags[@]}" -c "$sources/$file.cpp" -o "$work/$file.o"
done
aarch64-linux-gnu-g++ -shared -pthread "$work"/{native,parallel,portable,arm,arm_i8mm}.o -o "$work/libdecodery.so"
aarch64-linux-gnu-g++ -std=c++17 -O1 "$root/benchmarks/kernels/bits.cpp" -L"$work" -ldecodery -Wl,-rpath,"$work" -o "$work/bits-arm"
g++ -std=c++17 -O1 "$root/benchmarks/kernels/bits.cpp" "$root/src/decodery/core/native/_native.so" \
    -Wl,-rpath,"$root/src/decodery/core/native" -o "$work/bits-here"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$work/bits-arm" > "$work/arm.tsv"
"$work/bits-here" > "$work/here.tsv"
python3 - "$work" "$root/benchmarks/results/bits.json" <<'PYTHON'
import json
import sys
from pathlib import Path

work, out = Path(sys.argv[1]), Path(sys.argv[2])
lines = [line.split("\t") for name in ("here", "arm") for line in (work / f"{name}.tsv").read_text().splitlines()]
where = {"here": "this machine", "arm": "qemu-aarch64"}
sets = [
    f"{name} ({where[file]})"
    for file in where
    for name in dict.fromkeys(line.split("\t")[0] for line in (work / f"{file}.tsv").read_text().splitlines())
]
hashes = {}
for _, case, found in lines:
    hashes.setdefault(case, []).append(found)
differ = [case for case, found in hashes.items() if len(set(found)) > 1 or len(found) != len(sets)]
out.write_text(json.dumps({"sets": sets, "cases": list(hashes), "differ": differ}, indent=1) + "\n")
print(f"{len(hashes)} cases on {len(sets)} kernel sets, {len(differ)} differ")
sys.exit(bool(differ))
PYTHON
