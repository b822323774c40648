"""What trees cost on a state-space model: passes over chains and trees, rows in native kernels or scanned by PyTorch.

    OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/tree_scan.py [--layers 24] [--rounds 20]

A Mamba-2 of the shape of the published one with 130M parameters, random weights in int8, a small vocabulary, after 64
tokens: milliseconds of a pass and of its mixers, what stands between the two projections of every layer. Trees are 3
wide and 4 deep, as `stree` has them. The least of `rounds`, both ways in turns. Writes
benchmarks/results/tree-scan.json; to be run on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import transformers

from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.torch.recurrence import Recurrence
from decodery.models.torch.transformer import Transformer
from decodery.step.draft_tree import DraftTree
from decodery_benchmarks.results import write_result
from tiny_models import save

RESULTS = Path(__file__).parent / "results" / "tree-scan.json"
WIDE, DEEP, BEFORE = 3, 4, 64


def tree() -> DraftTree:
    """The most likely child of each level has three of its own: 12 nodes below the root."""
    parents = [-1, *(max(0, 1 + WIDE * (level - 1)) if level else 0 for level in range(DEEP) for _ in range(WIDE))]
    return DraftTree(np.arange(len(parents)), np.array(parents))


def model_of(layers: int, folder: Path) -> Transformer:
    config = transformers.Mamba2Config(
        vocab_size=512, hidden_size=768, num_hidden_layers=layers, num_heads=24, head_dim=64, state_size=128,
        n_groups=1, expand=2,
    )  # fmt: skip
    found = load(save(transformers.Mamba2ForCausalLM(config).eval(), folder), dtype="int8", device="cpu").model
    assert isinstance(found, Transformer)
    # Layers one by one: in the native pass mixers are not apart.
    found._stack = None
    return found


def timed(model: Transformer, mask: np.ndarray, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds by how rows are mixed, of passes whose rows see each other so and are then forgotten."""
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(np.arange(BEFORE), cache)]))
    cache.keep(range(BEFORE))
    spent, plain = 0.0, Recurrence.__call__

    def watched(mixer: Recurrence, *given: Any) -> Any:
        nonlocal spent
        begin = perf_counter()
        found = plain(mixer, *given)
        spent += perf_counter() - begin
        return found

    natives = {mixer: mixer._native for mixer in model._mixers.values()}
    ways: dict[str, Callable[[Recurrence], Any]] = {"native": natives.__getitem__, "PyTorch": lambda mixer: None}
    found = {way: {"pass": float("inf"), "mixers": float("inf")} for way in ways}
    Recurrence.__call__ = watched  # type: ignore[method-assign]
    for _ in range(rounds):
        for way, scan in ways.items():
            for mixer in natives:
                mixer._native = scan(mixer)
            cache.states.known.clear()
            for again in (True, False):  # the first makes the state after the text, as the pass before it would have
                spent, begin = 0.0, perf_counter()
                positions = BEFORE + mask.sum(axis=1) - 1
                model.forward(Batch([Segment(positions, tokens=np.arange(len(mask)), mask=mask, cache=cache)]))
                whole = perf_counter() - begin
                cache.truncate(BEFORE)
                if not again:
                    best = found[way]
                    best["pass"], best["mixers"] = min(best["pass"], 1e3 * whole), min(best["mixers"], 1e3 * spent)
    Recurrence.__call__ = plain  # type: ignore[method-assign]
    for mixer, native in natives.items():
        mixer._native = native
    return {way: {name: round(value, 2) for name, value in each.items()} for way, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shapes = {f"chain of {rows}": np.tri(rows, dtype=bool) for rows in (1, 5, 13, 64)}
    shapes["tree of 13, 3 wide, 4 deep"] = tree().ancestor_mask()
    with tempfile.TemporaryDirectory() as home:
        os.environ["DECODERY_HOME"] = home
        model = model_of(options.layers, Path(home) / "model")
    command = f"OMP_NUM_THREADS=1 PYTHONPATH=tests/support {shlex.join(['python', *sys.argv])}"
    found: dict[str, Any] = {"command": command, "layers": options.layers, "unit": "milliseconds", "rows": {}}
    for name, mask in shapes.items():
        found["rows"][name] = timed(model, mask, options.rounds)
        print(name, json.dumps(found["rows"][name]), flush=True)
    write_result(RESULTS, found)


if __name__ == "__main__":
    main()
