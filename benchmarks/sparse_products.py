"""What 2:4 weights bring on this processor: products of matrices by rows, in several forms of the same weights.

    OMP_NUM_THREADS=1 python benchmarks/sparse_products.py

Wants a machine that does nothing else. The matrices are the sixteen of smollm2's layers 0, 10, 20 and 29; each product
is of all of them, one after another, so that weights come from memory as they do in a pass. float32: dense, by PyTorch.
2:4: half of the weights, the strongest two of every four, by PyTorch's product of compressed rows (float32 values and
32-bit places; PyTorch has no 2:4 product on processors). int8, int4: this package's kernels, dense. Milliseconds, the
least of turns in which all forms take part, and the bytes that a product reads. Writes
benchmarks/results/sparse-products.json.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import decodery
from decodery.compression.base import LINEARS
from decodery.compression.nm_sparsity import strongest
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parent / "results" / "sparse-products.json"
LAYERS, ROWS = (0, 10, 20, 29), (1, 8, 64)

Form = tuple[list[Callable[[torch.Tensor], torch.Tensor]], int]


def forms(weights: list[torch.Tensor]) -> dict[str, Form]:
    """Products of all matrices in every form, and the bytes that they read."""
    kept = [torch.where(strongest(each.abs(), 2, 4), each, 0.0) for each in weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR is in beta.
        rows = [each.to_sparse_csr() for each in kept]
    whole = [Int8Linear.quantize(each) for each in weights]
    half = [Int4Linear.quantize(each) for each in weights]
    count = sum(each.numel() for each in weights)
    return {
        "float32": ([lambda x, w=each: x @ w.T for each in weights], 4 * count),
        "2:4, compressed rows": ([lambda x, w=each: (w @ x.T).T for each in rows], 8 * count // 2),
        "int8": ([*whole], sum(t.numel() * t.itemsize for each in whole for t in each.tensors().values())),
        "int4": ([*half], sum(t.numel() * t.itemsize for each in half for t in each.tensors().values())),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = decodery.load("smollm2", dtype="bfloat16").model
    assert isinstance(model, Transformer)
    weights = [floating(getattr(model.weights.layers[n], name)).weight.float() for n in LAYERS for name in LINEARS]
    made = forms(weights)
    chance = torch.Generator().manual_seed(0)
    given = {(n, w.shape[1]): torch.randn(n, w.shape[1], generator=chance) for n in ROWS for w in weights}
    taken: dict[str, dict[int, list[float]]] = {name: {n: [] for n in ROWS} for name in made}
    # The first turn packs what kernels read.
    for turn in range(args.turns + 1):
        for n in ROWS:
            for name, (products, _) in made.items():
                begun = perf_counter()
                for product, weight in zip(products, weights, strict=True):
                    product(given[n, weight.shape[1]])
                if turn:
                    taken[name][n].append(1000 * (perf_counter() - begun))
    rows: dict[str, Any] = {
        name: {"bytes": made[name][1], "milliseconds": {str(n): min(each) for n, each in found.items()}}
        for name, found in taken.items()
    }
    command = "OMP_NUM_THREADS=1 python benchmarks/sparse_products.py"
    results = {"command": command, "turns": args.turns, "matrices": len(weights), "rows": rows}
    write_result(OUT, results)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
