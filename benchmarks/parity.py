"""How near small random models of every family come to what `transformers` says of the same weights.

    OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/parity.py

Of every configuration that the tests of families have: the largest difference of logits in float32, of a text read in
pieces, of the nodes of a tree after it and of a token after a path that was kept; in int8 the median and the least
cosine of a row's logits, and whether rows are exact to the bit. Of mixtures of experts: how many experts one row has
read, and how many the nine rows of a tree. Writes benchmarks/results/parity.json. Families that run through the adapter
are in model_matrix.py.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import load
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery_benchmarks.results import write_result
from tiny_models import CASES, TREE_PARENTS, make_model, random_ids, reference, save, tree_mask

ROOT = Path(__file__).parents[1]
KEPT = [0, 1, 3, 6]


def differences(model: LanguageModel, theirs: Any) -> tuple[dict[str, float], list[int], int]:
    """How far logits are off; also how many experts each pass of a text had read, and that of the tree."""
    ids = random_ids(23)
    cache, rows, experts = model.new_cache(), [], []
    for size in (9, 1, 1, 7, 1, 4):
        chunk = ids[cache.next_position : cache.next_position + size]
        scores = model.forward(Batch([Segment.chunk(chunk, cache)]))
        rows.append(scores.logits)
        experts.append(scores.costs[0].experts)
        cache.keep(range(size))
    found = {"pieces": float((torch.cat(rows) - reference(theirs, ids)).abs().max())}
    if not model.capabilities.trees:
        return found, experts, 0
    mask, nodes = tree_mask(TREE_PARENTS), random_ids(len(TREE_PARENTS), seed=2)
    segment = Segment(len(ids) + mask.sum(axis=1) - 1, tokens=nodes, mask=mask, cache=cache)
    scores = model.forward(Batch([segment]))
    paths = [np.concatenate([ids, nodes[mask[node]]]) for node in range(len(nodes))]
    expected = torch.stack([reference(theirs, path)[-1] for path in paths])
    found["tree"] = float((scores.logits - expected).abs().max())
    cache.keep(KEPT)
    path = np.concatenate([ids, nodes[KEPT], [17]])
    following = model.forward(Batch([Segment.chunk([17], cache)])).logits
    found["kept"] = float((following[0] - reference(theirs, path)[-1]).abs().max())
    return found, experts, scores.costs[0].experts


def compared(case: str, folder: Path) -> dict[str, Any]:
    """The figures of one configuration that the lean model runs."""
    theirs, ids = make_model(case), random_ids(23)
    model = load(save(theirs, folder), dtype="float32", device="cpu").model
    assert isinstance(model, Transformer)
    near, experts, of_tree = differences(model, theirs)
    quantized = load(folder, dtype="int8", device="cpu").model
    logits = quantized.forward(Batch([Segment(np.arange(len(ids)), ids)])).logits
    alike = torch.nn.functional.cosine_similarity(logits, reference(theirs, ids))
    found: dict[str, Any] = {"family": CASES[case][0], **near, "int8": float(alike.median())}
    found |= {"int8_least": float(alike.min()), "exact_rows": quantized.capabilities.exact_rows}
    return found | ({"experts_of_a_row": experts[1], "experts_of_a_tree": of_tree} if of_tree else {})


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        os.environ["DECODERY_HOME"] = home
        cases = {}
        for number, case in enumerate(CASES):
            cases[case] = compared(case, Path(home) / f"model-{number}")
            print(case, cases[case], flush=True)
    command = "OMP_NUM_THREADS=1 PYTHONPATH=tests/support python benchmarks/parity.py"
    path = ROOT / "benchmarks" / "results" / "parity.json"
    write_result(path, {"command": command, "cases": cases}, summary=["cases"])


if __name__ == "__main__":
    main()
