"""Train a partial attention on pairs of a source and what is to be written about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ..errors import SettingsError
from ..model.batch import Batch, Segment
from ..model.store import Progress, silent
from ..model.transformer import Transformer
from ..source.partial_attention import PartialTransformer, PartialWeights
from .loop import History, Plan, batches, train

Pair = tuple[Ordered[int], Ordered[int]]


def train_partial(
    model: Transformer,
    weights: PartialWeights,
    pairs: Ordered[Pair],
    held: Ordered[Pair],
    plan: Plan,
    out: Path,
    *,
    also: Mapping[str, torch.Tensor] | None = None,
    batch: int = 8,
    seed: int = 0,
    progress: Progress = silent,
) -> History:
    """Train `weights` in place on pairs (source ids, target ids), by the cross-entropy of the targets.

    held: pairs that decide which step was best. also: further tensors to train, such as the model's own; by default the
    model stays as it is. out: the folder of the checkpoint, from which an interrupted run goes on. Raises SettingsError
    for nothing to learn from.
    """
    if not pairs or not held:
        raise SettingsError("partial attention needs pairs to train on and pairs to hold out")
    parameters = {f"partial.{name}": each for name, each in weights.tensors().items()} | dict(also or {})
    for tensor in parameters.values():
        tensor.requires_grad_(True)
    chosen = batches(len(pairs), batch, seed)

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(pair_loss(model, weights, held))}

    try:
        return train(
            parameters,
            lambda step: pair_loss(model, weights, [pairs[number] for number in chosen(step)]),
            *(plan, out),
            validate=validate,
            metric="loss",
            settings={"pairs": len(pairs), "batch": batch, "seed": seed},
            progress=progress,
            what="training partial attention",
        )
    finally:
        for tensor in parameters.values():
            tensor.requires_grad_(False)


def pair_loss(model: Transformer, weights: PartialWeights | None, pairs: Iterable[Pair]) -> torch.Tensor:
    """Mean cross-entropy in nats per target token; weights: None for the model alone."""
    by_length: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_length.setdefault(len(pair[0]), []).append(pair)
    total, count = torch.zeros(()), 0
    for length, group in by_length.items():
        scorer = model if weights is None else PartialTransformer(model, weights, length)
        texts = [np.array([*source, *target], dtype=np.int64) for source, target in group]
        segments = [
            Segment(np.arange(len(text) - 1), text[:-1], logit_rows=range(length - 1, len(text) - 1)) for text in texts
        ]
        wanted = torch.from_numpy(np.concatenate([text[length:] for text in texts])).to(model.device)
        total = total + cross_entropy(scorer.forward(Batch(segments)).logits, wanted, reduction="sum")
        count += len(wanted)
    return total / count
