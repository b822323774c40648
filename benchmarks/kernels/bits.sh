#!/usr/bin/env bash
# Compiles the kernels for 64-bit Arm, runs bits.cpp on them under emulation and here on this machine's own library, and
# compares: the same hash for every case on every kernel set. Needs this package with its extra "benchmarks" and ziglang
# (pip install ziglang) in the Python that PYTHON names, and qemu-user-static (Debian) or what QEMU names.
#
#     PYTHON=.venv/bin/python benchmarks/kernels/bits.sh DIR
#
# Writes benchmarks/results/bits.json.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$1"
work=$(cd "$1" && pwd)
sources=$root/src/decodery/core/native/csrc
flags=(-std=c++17 -O2 -g0 -ffp-contract=off -fno-math-errno -w)
arm=("$python" -m ziglang c++ -target aarch64-linux-musl)
for file in native parallel portable arm arm_i8mm; do
    "${arm[@]}" "${flags[@]}" -c "$sources/$file.cpp" -o "$work/$file.o"
done
"${arm[@]}" -std=c++17 -O1 -w -static "$root/benchmarks/kernels/bits.cpp" "$work"/*.o -o "$work/bits-arm"
library=$root/src/decodery/core/native
g++ -std=c++17 -O1 -w "$root/benchmarks/kernels/bits.cpp" "$library/_native.so" -Wl,-rpath,"$library" -o "$work/bits-here"
"${QEMU:-qemu-aarch64-static}" "$work/bits-arm" > "$work/arm.tsv"
"$work/bits-here" > "$work/here.tsv"
PYTHONPATH=$root/benchmarks "$python" "$root/benchmarks/kernels/bits.py" "$work"
