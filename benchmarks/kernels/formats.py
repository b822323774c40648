"""What a layer costs by the form of its weights and the number of rows, against the bandwidth of the same run.

    python benchmarks/kernels/formats.py
    python benchmarks/kernels/formats.py --kernels AMX "AVX-512 VNNI" --json runs/sets.json

Layers of 1,536 inputs and 8,960 outputs, as many as make 100 MB, more than any cache holds, run one after the other;
rounds of all forms alternate. Writes milliseconds per layer (the least of all rounds, as whoever shares a machine only
slows it down), how many times those of one row they are, what share of the read bandwidth (the fastest of those
measured before every round) one row reaches, and the thousand million multiplications and additions a second: where
these no longer rise with the rows, a pass is bound by arithmetic. Kernel sets that are named alternate within each
round, too. Writes benchmarks/results/formats.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
from itertools import product
from pathlib import Path
from time import perf_counter

import torch

from decodery.core.native.kernels import Form, choose, kernel_sets, read_bandwidth
from decodery.core.native.structs import LinearStruct
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import BITS, BLOCK, SUPER, SUPER_BYTES, Arena, Packed, packed_size
from decodery.models.native.super_blocks import BlockKind, SuperBlockLinear
from decodery.models.native.ternary import TernaryLinear
from decodery.models.torch.weights import Dense

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parents[1] / "results" / "formats.json"
INPUTS, OUTPUTS, TOTAL, ROUNDS = 1536, 8960, 100_000_000, 15
ROWS = (1, 2, 4, 8, 16, 32, 64)
NAMES = {
    "Q4_0, Q4_1": Form.BLOCKS4,
    "Q4_K": Form.SUPER4,
    "IQ4_NL": Form.TABLE4,
    "IQ4_XS": Form.SUPER_TABLE4,
    "Q5_0, Q5_1": Form.BLOCKS5,
    "Q5_K": Form.SUPER5,
    "6 bits": Form.BLOCKS6,
    "Q6_K": Form.SUPER6,
    "Q8_0": Form.BLOCKS8,
    "int8": Form.ROWS8,
    "ternary": Form.ROWS2,
    "bfloat16": Form.BFLOAT16,
    "float16": Form.FLOAT16,
}


def layer(form: Form) -> BlockKind | Int8Linear | TernaryLinear | Dense:
    if form == Form.ROWS8:
        drawn = torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
        return Int8Linear(drawn, torch.full((OUTPUTS,), 1e-3))
    if form == Form.ROWS2:
        drawn = torch.randint(-1, 2, (OUTPUTS, INPUTS))
        return TernaryLinear.of(drawn, torch.full((OUTPUTS,), 1e-3))
    if form in (Form.BFLOAT16, Form.FLOAT16):
        dtype = torch.bfloat16 if form == Form.BFLOAT16 else torch.float16
        return Dense(torch.randn(OUTPUTS, INPUTS).to(dtype))
    weight = torch.randint(0, 256, (OUTPUTS, INPUTS * BITS[form] // 8), dtype=torch.uint8)
    if form in SUPER_BYTES:
        has_least = form in (Form.SUPER4, Form.SUPER5)
        scales = torch.rand(OUTPUTS, INPUTS // SUPER, 1 + has_least).half() / 1000
        integers = torch.randint(0, 64, (OUTPUTS, INPUTS // BLOCK, 2), dtype=torch.uint8 if has_least else torch.int8)
        return SuperBlockLinear(form, weight, scales, integers)
    scales = torch.rand(OUTPUTS, INPUTS // BLOCK, 2).half() / 100
    if form == Form.BLOCKS4:
        return Int4Linear(weight, scales[..., 0].contiguous(), scales[..., 1].contiguous())
    return BlockLinear(weight, scales[..., :1].contiguous() if form == Form.BLOCKS8 else scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=kernel_sets(), default=kernel_sets()[:1])
    parser.add_argument("--json", type=Path, default=OUT)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers: dict[str, list[Packed]] = {}
    for name, form in NAMES.items():
        linear = layer(form)
        first = layers.setdefault(name, [Packed(linear)])[0]
        for _ in range(TOTAL // packed_size(linear)):
            # The same numbers elsewhere in memory.
            again = copy.copy(first)
            again._weight = Arena(first._weight.size).take(first._weight.size)
            again._weight[:] = first._weight
            again.struct = LinearStruct.from_buffer_copy(first.struct)
            again.struct.weight = again._weight.ctypes.data
            layers[name].append(again)
    x = torch.randn(max(ROWS), INPUTS)
    times: dict[tuple[str, str, int], list[float]] = {}
    bandwidth = 0.0
    for _ in range(ROUNDS):
        bandwidth = max(bandwidth, read_bandwidth(mebibytes=256, rounds=2))
        for name, some in layers.items():
            for kernels, rows in product(options.kernels, ROWS):
                choose(kernels)
                begin = perf_counter()
                for each in some:
                    each(x[:rows])
                times.setdefault((kernels, name, rows), []).append((perf_counter() - begin) / len(some) * 1e3)
    found = []
    for kernels, name in product(options.kernels, NAMES):
        size = layers[name][0]._weight.size
        one = min(times[kernels, name, 1])
        for rows in ROWS:
            ms = min(times[kernels, name, rows])
            found.append(
                {
                    "kernels": kernels,
                    "form": name,
                    "rows": rows,
                    "ms": round(ms, 3),
                    "ratio": round(ms / one, 2),
                    "share": round(size / ms / 1e6 / bandwidth, 3),
                    "gmacs": round(rows * INPUTS * OUTPUTS / ms / 1e6, 1),
                    "bits": round(8 * size / INPUTS / OUTPUTS, 2),
                }
            )
            print(found[-1], flush=True)
    about = {"kernels": options.kernels, "threads": torch.get_num_threads()}
    write_result(options.json, about | {"read_gb_per_s": round(bandwidth, 2), "rows": found}, summary=["read_gb_per_s"])


if __name__ == "__main__":
    main()
