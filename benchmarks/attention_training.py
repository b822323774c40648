"""What penalties on attention do to small models that learn from random weights, with norms and without.

    OMP_NUM_THREADS=1 python benchmarks/attention_training.py --work DIR

Models of four layers, width 64 and four heads learn chained arithmetic, 16 puzzles a step: as models are, and with
attention as the only thing that is not linear ("softmax alone": no norms, but a learned factor per channel in their
place, and two products in the place of the gated MLP). Either learns by its loss alone, and with the penalty that keeps
heads' entropies near learned shares (Entropy-Guided Attention, 2025); the first also with the penalty on what goes to
other blocks of 16 tokens (Localist LLMs, 2025). Of each, on 64 puzzles held out: loss of solutions, mean share of the
largest entropy that rows have, heads of 16 that are overloaded (above .9 of it) and collapsed (below .05), and the
share of attention that goes to other blocks. One seed; nothing is timed. An interrupted run goes on from DIR.
Writes benchmarks/results/attention-training.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from decodery.models.loaders.store import terminal_progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.training.attention_maps import (
    COLLAPSED,
    OVERLOADED,
    entropy_penalty,
    evenness,
    locality_penalty,
    looked_at,
)
from decodery.training.cut import parameters
from decodery.training.loop import TrainingPlan, train
from decodery_benchmarks.puzzles.chain import Chain
from decodery_benchmarks.results import begun_result, write_result
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer, training_batch

OUT = Path(__file__).parent / "results" / "attention-training.json"
SHAPE = TransformerShape(64, 4, 4, 112, 256)
BATCH, HELD, BLOCK = 16, 10**6, 16
WEIGHTS = {"entropy": 0.1, "blocks": 0.1}
KINDS = {
    "as models are": (False, ""),
    "as models are, entropies guided": (False, "entropy"),
    "as models are, blocks": (False, "blocks"),
    "softmax alone": (True, ""),
    "softmax alone, entropies guided": (True, "entropy"),
}


class SoftmaxAlone(Transformer):
    """Norms are factors, and MLPs two products."""

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rows if weight is None else rows * weight

    def _activation(self, gate: torch.Tensor) -> torch.Tensor:
        return gate


def begun(alone: bool, seed: int) -> Transformer:
    model = random_transformer(SHAPE, seed)
    if not alone:
        return model
    for layer in model.weights.layers:
        assert isinstance(layer.gate_up, Dense)
        layer.gate_up = Dense(layer.gate_up.weight[: SHAPE.inner].clone())
    return SoftmaxAlone(replace(model.config, gated=False), model.weights)


def solutions(logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1)


def outside(maps: list[torch.Tensor]) -> float:
    """Share of attention that goes to other blocks."""
    of = torch.arange(maps[0].shape[-1]) // BLOCK
    return float(torch.stack([each[..., of[:, None] != of].sum() / each.sum() for each in maps]).mean())


@torch.no_grad()
def judged(model: Transformer) -> dict[str, Any]:
    losses, shares, outer = [], [], []
    for step in range(4):
        tokens, taught = training_batch(Chain(), BATCH, HELD + step, 0)
        logits, maps = looked_at(model, tokens[:, :-1])
        losses.append(float(solutions(logits, taught)))
        shares.append(evenness(maps))
        outer.append(outside(maps))
    even = torch.stack(shares).mean(dim=0)
    return {
        "loss": sum(losses) / 4,
        "evenness": float(even.mean()),
        "overloaded": int((even > OVERLOADED).sum()),
        "collapsed": int((even < COLLAPSED).sum()),
        "outside": sum(outer) / 4,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder of checkpoints.")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made: dict[str, Any] = begun_result(OUT)
    if made.get("steps") != args.steps:
        made["rows"] = {}
    made |= {
        "command": f"python benchmarks/attention_training.py --steps {args.steps} --work DIR",
        "steps": args.steps, "block": BLOCK, "heads": SHAPE.layers * SHAPE.heads, "weights": WEIGHTS,
    }  # fmt: skip
    for kind, (alone, penalty) in KINDS.items():
        if kind in made["rows"]:
            continue
        model = begun(alone, args.seed)
        learning = parameters(model)
        thresholds = torch.zeros(SHAPE.layers, SHAPE.heads)
        if penalty == "entropy":
            learning["thresholds"] = thresholds.requires_grad_(True)

        def loss(
            step: int, model: Transformer = model, penalty: str = penalty, thresholds: torch.Tensor = thresholds
        ) -> torch.Tensor:
            tokens, taught = training_batch(Chain(), BATCH, step, args.seed)
            logits, maps = looked_at(model, tokens[:, :-1])
            found = solutions(logits, taught)
            if penalty == "entropy":
                return found + WEIGHTS[penalty] * entropy_penalty(maps, thresholds)
            return found + WEIGHTS[penalty] * locality_penalty(maps, BLOCK) if penalty else found

        with terminal_progress(counts=True) as progress:
            history = train(
                learning, loss, TrainingPlan(args.steps, lr=2e-3, weight_decay=0.0, validate_every=args.steps // 4),
                args.work / kind.replace(", ", "-").replace(" ", "-"), validate=lambda model=model: judged(model),
                metric="loss", settings={"kind": kind, "seed": args.seed}, progress=progress, what=kind,
            )  # fmt: skip
        made["rows"][kind] = judged(model) | {"curve": {step: each["loss"] for step, each in history.metrics.items()}}
        write_result(OUT, made)
        print(kind, made["rows"][kind], flush=True)


if __name__ == "__main__":
    main()
