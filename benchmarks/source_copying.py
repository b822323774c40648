"""Partial attention: whether a small model trained with it copies, and still looks at its prompt far after it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources import PartialAttention, PartialWeights
from decodery.models.batch import Batch, Segment
from decodery.testing import tiny_transformer
from decodery.training.loop import TrainingPlan, batches, train
from decodery.training.partial import Pair, pair_loss
from source_bench import Bench


def partial_attention(bench: Bench) -> dict[str, Any]:
    """Copying by a two-layer model, plain and with partial attention trained equally: accuracy and sensitivity.

    Sensitivity: the norm of the gradient of random projections of a step's logits in the source's embeddings. Echo: the
    source's auto-encoding counts half as much as the target.
    """
    random, steps = np.random.default_rng(0), 300
    lengths = (12, 24, 36, 48, 60, 72)

    def pairs(count: int, length: int | None = None) -> list[Pair]:
        sizes = [length or int(random.choice(lengths)) for _ in range(count)]
        texts = [random.integers(0, 30, size).tolist() for size in sizes]
        return [([*text, 31], text) for text in texts]

    train_on, held, plan = pairs(2000), pairs(16), TrainingPlan(steps=steps, lr=3e-3, validate_every=100)
    found: dict[str, Any] = {"steps": steps, "batch": 8, "model": "2 layers of 64, 32 symbols"}
    kinds: dict[str, tuple[bool, float] | None] = {
        "plain": None,
        "partial": (False, 0.0),
        "partial, positions reset": (True, 0.0),
        "partial, positions reset, echo": (True, 0.5),
    }
    for name, kind in kinds.items():
        model = tiny_transformer(1, vocab_size=32, hidden_size=64, dtype=torch.float32)
        weights = None if kind is None else PartialWeights.initial(model, reset=kind[0])
        own = {f"{i}.{part}": getattr(layer, part).weight for i, layer in enumerate(model.weights.layers)
               for part in ("qkv", "output", "gate_up", "down")}  # fmt: skip
        own |= {"embedding": model.weights.embedding, "head": model.weights.head.weight}
        with tempfile.TemporaryDirectory() as folder:
            chosen, echo = batches(len(train_on), 8, 0), 0.0 if kind is None else kind[1]
            beside = {} if weights is None else {f"partial.{part}": each for part, each in weights.tensors().items()}
            train(
                beside | own,
                lambda step: pair_loss(model, weights, [train_on[i] for i in chosen(step)], echo=echo),  # noqa: B023
                *(plan, Path(folder)),
                validate=lambda: {"loss": float(pair_loss(model, weights, held))},  # noqa: B023
                metric="loss",
            )
        for tensor in own.values():
            tensor.requires_grad_(False)
        source = None if weights is None else PartialAttention(weights)
        row: dict[str, Any] = {}
        for length in (24, 72):
            right = total = 0
            engine, tests = Engine(model), pairs(8, length)
            texts = [engine.submit(Request(prompt, length, logits_source=source)) for prompt, _ in tests]
            engine.run(texts)
            for text, (_, target) in zip(texts, tests, strict=True):
                right += sum(a == b for a, b in zip(text.generated, target, strict=True))
                total += length
            row[f"accuracy at length {length}"] = round(right / total, 3)
        (prompt, target), *_ = pairs(1, 72)
        scorer = model if source is None else source.over(model, prompt)
        sensitivity = {step: _sensitivity(scorer, prompt, target[:step]) for step in (4, 64)}
        row["sensitivity at step 64 / step 4"] = round(sensitivity[64] / sensitivity[4], 3)
        row["held-out loss"] = round(float(pair_loss(model, weights, held)), 4)
        found[name] = row
        print(name, row, flush=True)
    return found


def _sensitivity(model: Any, prompt: list[int], written: list[int]) -> float:
    """Mean over 16 random directions of the gradient's norm in the embeddings of `prompt`."""
    tokens = torch.tensor([*prompt, *written])
    embeddings = model.embed_tokens(tokens).detach().requires_grad_(True)
    segment = Segment(np.arange(len(tokens)), states=embeddings, logit_rows=[len(tokens) - 1])
    logits = model.forward(Batch([segment])).logits[0]
    generator, norms = torch.Generator().manual_seed(0), []
    for _ in range(16):
        direction = torch.randn(len(logits), generator=generator)
        (gradient,) = torch.autograd.grad(logits @ direction, embeddings, retain_graph=True)
        norms.append(float(gradient[: len(prompt)].norm()))
    return sum(norms) / len(norms)
