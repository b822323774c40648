"""What dynamic short convolutions bring where values have to be recalled by their keys.

    OMP_NUM_THREADS=1 python benchmarks/short_conv.py --work DIR

Texts of 8 keys, each with its value after it, and the keys again in another order, after which their values are asked
for (multi-query associative recall). Small transformers of two layers, all trained alike from random weights: without
convolutions, with static filters alone and with dynamic ones. Of each: parameters, and the share of values recalled
on texts held out, as training goes on. An interrupted run goes on from DIR. Nothing is timed. Writes
benchmarks/results/short-conv.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.models.batch import Batch, Segment
from decodery.models.config import ShortConv
from decodery.models.loaders.store import terminal_progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import tiny_transformer
from decodery.training.cut import parameters
from decodery.training.loop import TrainingPlan, train
from decodery.training.short_conv import parameters as of_convolutions
from decodery.training.short_conv import with_short_convolutions
from decodery_benchmarks.results import write_result

OUT = Path(__file__).parent / "results" / "short-conv.json"
KEYS = VALUES = 32
PAIRS = 8
KINDS = ("none", "static", "dynamic")
SHAPE = ShortConv(kernel=4, rank=15)


def texts(count: int, seed: int) -> np.ndarray:
    """[count, 4 * PAIRS] keys below KEYS and values from there on; the second half asks."""
    random = np.random.default_rng(seed)
    found = np.zeros((count, 4 * PAIRS), dtype=np.int64)
    for row in found:
        keys = random.choice(KEYS, PAIRS, replace=False)
        pairs = np.stack([keys, KEYS + random.integers(0, VALUES, PAIRS)], axis=1)
        row[: 2 * PAIRS], row[2 * PAIRS :] = pairs.ravel(), random.permutation(pairs).ravel()
    return found


def asked(model: Transformer, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the keys of the second half, and the values that belong there."""
    places = np.arange(2 * PAIRS, 4 * PAIRS, 2)
    segments = [Segment(np.arange(len(row)), row, logit_rows=places.tolist()) for row in tokens]
    return model.forward(Batch(segments)).logits, torch.from_numpy(tokens[:, places + 1].ravel())


def of_kind(kind: str, seed: int) -> tuple[Transformer, dict[str, torch.Tensor]]:
    """A model and all that is trained of it."""
    model = tiny_transformer(seed, vocab_size=KEYS + VALUES, hidden_size=64, dtype=torch.float32)
    # Norms of its own for every layer.
    for layer in model.weights.layers:
        layer.attention_norm, layer.mlp_norm = layer.attention_norm.clone(), layer.mlp_norm.clone()
    assert isinstance(model.weights.head, Dense)
    learned = parameters(model) | {"head": model.weights.head.weight.requires_grad_(True)}
    if kind == "none":
        return model, learned
    model = with_short_convolutions(model, SHAPE, seed)
    chance = torch.Generator().manual_seed(seed)
    for layer in model.weights.layers:
        assert layer.short_static is not None
        # From scratch the static part begins as convolutions do.
        layer.short_static.copy_((2 * torch.rand(layer.short_static.shape, generator=chance) - 1) * SHAPE.kernel**-0.5)
    every = of_convolutions(model).items()
    of_filters = {name: each for name, each in every if kind == "dynamic" or name.endswith("short_static")}
    for each in of_filters.values():
        each.requires_grad_(True)
    return Transformer(model.config, model.weights), learned | of_filters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder of checkpoints.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    held = texts(128, 10**6)
    rows: dict[str, Any] = {}
    for kind in KINDS:
        model, learned = of_kind(kind, args.seed)

        def loss(step: int, model: Transformer = model) -> torch.Tensor:
            return cross_entropy(*asked(model, texts(args.batch, args.seed * args.steps + step)))

        def validate(model: Transformer = model) -> dict[str, float]:
            with torch.no_grad():
                logits, wanted = asked(model, held)
            return {"recalled": float((logits.argmax(dim=-1) == wanted).double().mean())}

        with terminal_progress(counts=True) as progress:
            history = train(
                learned, loss, TrainingPlan(args.steps, lr=3e-3, validate_every=args.steps // 6), args.work / kind,
                validate=validate, metric="recalled", higher=True, settings={"kind": kind, "seed": args.seed},
                progress=progress, what=kind,
            )  # fmt: skip
        recalled = {step: round(values["recalled"], 3) for step, values in history.metrics.items()}
        rows[kind] = {"parameters": sum(each.numel() for each in learned.values()), "recalled": recalled}
        print(kind, rows[kind], flush=True)
    made = {
        "command": "python benchmarks/short_conv.py --work DIR", "pairs": PAIRS, "batch": args.batch,
        "seed": args.seed, "rows": rows,
    }  # fmt: skip
    write_result(OUT, made)


if __name__ == "__main__":
    main()
