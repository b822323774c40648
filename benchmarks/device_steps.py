"""What one step of many texts asks of a device, counted on one that is none: operations, copies in, waits.

    python benchmarks/device_steps.py --out benchmarks/results/device-steps.json

A random narrow model with the heads of SmolLM2 decodes texts on a device that exists in name alone: tensors lie
on the CPU, and whatever would wait for a real one is counted. Attention is PyTorch's; with the Triton kernels a layer's
is two launches, three where texts are few. At fixed shapes a CUDA device replays all operations of a step as one graph.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from shapes import SHAPES, random_model

from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.heads.drafter import HeadDrafter, bound, head_kind
from decodery.speculative.heads.fixed_shapes import HeadPasses
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.layered import LayeredHead
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery_benchmarks.results import begun_result, write_result
from far import FarTensor, Watched, moved

COMMAND = "python benchmarks/device_steps.py --out benchmarks/results/device-steps.json"
DRAFTERS: dict[str, Drafter | None] = {"none": None, "prompt-lookup": PromptLookup(), "auto": Auto(head=None)}
DRAFT_MODEL, HEADS = "draft-model", ("eagle-3", "dflash", "medusa")
DRAFT_LAYERS, LENGTH = 2, 3
"""Of the draft model, and of its chains and those of heads."""
TREES = {"tree": "eagle-2:nodes=24,width=4,depth=3", "drawn tree": "rsd-c:branching=3/2/1"}
GROWN = [f"{drafter}, {tree}" for drafter in (DRAFT_MODEL, "eagle-3") for tree in TREES]
"""In place of chains: one of the most likely nodes, and one whose nodes are drawn."""
TEXTS = (1, 16)
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, Any] = begun_result(options.out)
    known["command"], known["layers"], known["rows"] = COMMAND, options.layers, []
    shape = replace(SHAPES["SmolLM2-135M"], hidden=72, inner=96, vocab=256, layers=options.layers, context=512)
    base = random_model(shape, torch.device("cpu"), torch.float32)
    draft = random_model(replace(shape, layers=DRAFT_LAYERS), torch.device("cpu"), torch.float32)
    for drafter in (*DRAFTERS, DRAFT_MODEL, *HEADS, *GROWN):
        for texts in TEXTS:
            for static in (False, True):
                found = counted(base, draft, drafter, texts, static=static)
                known["rows"].append({"drafter": drafter, "texts": texts, "fixed shapes": static, **found})
                print(known["rows"][-1], flush=True)
                write_result(options.out, known, summary=[])


def far(model: Transformer, *, static: bool) -> Transformer:
    """The model on a device that is none."""
    moved_there = Transformer(model.config, moved(model.weights, "meta:0"))
    moved_there.static = StaticPasses() if static else None
    return moved_there


def with_head(name: str, base: Transformer, model: Transformer, *, static: bool) -> HeadDrafter:
    """A drafter of chains with an untrained head of `base`, which drafts for `model`."""
    kind = head_kind(name)
    tensors, settings = kind.untrained(base, seed=0)
    trained = TrainedHead(name, tensors, settings)
    drafter = replace(resolve("drafter", name), head=trained, length=LENGTH, tree_policy=None)
    assert isinstance(drafter, HeadDrafter)
    head = bound(kind, trained, model)
    if static and isinstance(head, LayeredHead):
        head.fixed = HeadPasses()
    return drafter


def counted(base: Transformer, draft: Transformer, name: str, texts: int, *, static: bool) -> dict[str, float]:
    """Medians over steps: rows, operations on the device, copies to it; and the most waits of a step."""
    with Watched() as watched:
        read = FarTensor.tolist
        FarTensor.tolist = lambda far: [watched.waits.update(["tolist"]), read(far)][1]  # type: ignore[method-assign]
        try:
            kind, _, tree = name.partition(", ")
            model, drafter = far(base, static=static), DRAFTERS.get(kind)
            if kind == DRAFT_MODEL:
                drafter = DraftModel(far(draft, static=static), length=LENGTH)
            elif kind in HEADS:
                drafter = with_head(kind, base, model, static=static)
            if tree:
                # How long chains are is nothing to trees.
                drafter = replace(drafter, length=4, tree_policy=TREES[tree])  # type: ignore[call-arg, type-var]
            engine, sampler = Engine(model), Sampler.from_settings(temperature=0.6, top_p=0.9)
            written = [
                engine.submit(
                    Request(
                        [5, 6, 7, 8] * 3 + [number % 200],
                        sampler=sampler,
                        seed=number,
                        drafter=drafter,
                        max_new_tokens=64,
                    )
                )
                for number in range(texts)
            ]
            while any(not text.position for text in written):
                engine.step()
            engine.step()
            steps = [step(engine, watched, written) for _ in range(STEPS)]
        finally:
            FarTensor.tolist = read  # type: ignore[method-assign]
    rows, operations, copies, waits = zip(*steps, strict=True)
    return {
        "rows": median(rows),
        "operations": median(operations),
        "copies in": median(copies),
        "waits": max(waits),
    }


def step(engine: Engine, watched: Watched, texts: list[Sequence]) -> tuple[int, int, int, int]:
    """Rows, operations, copies in and waits of a step."""
    before = watched.operations, watched.uploads, watched.waits.total()
    engine.step()
    after = watched.operations, watched.uploads, watched.waits.total()
    operations, copies, waits = (new - old for new, old in zip(after, before, strict=True))
    return sum(text.trace.steps[-1].rows for text in texts), operations, copies, waits


if __name__ == "__main__":
    main()
