"""What a small mixture of experts keeps at few bits, and what it drafts for itself with fewer experts.

    OMP_NUM_THREADS=1 python benchmarks/mc_moe.py

A mixture of 2 layers with 8 experts each, of which a token takes 2, learns to solve chain puzzles for 200 steps (one
seed, without a loss that balances experts). Of copies: cross-entropy of solutions that were held out, in nats per
token; tokens per pass of the original on 6 other puzzles, greedily, with the copy drafting four at a time; experts,
how many are read by the original and its draft together for each token that is written, as a share of what plain
decoding reads.
Nothing is timed. Writes benchmarks/results/mc-moe.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.compression import MCMoE
from decodery.compression.base import transformed
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.torch.side_by_side import predicted
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.training.cut import parameters
from decodery.training.loop import TrainingPlan, train
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded
from decodery_benchmarks.puzzles.base import drawn
from decodery_benchmarks.puzzles.chain import Chain
from decodery_benchmarks.results import write_result
from decodery_benchmarks.training.puzzle_model import TransformerShape, random_transformer, training_batch

OUT = Path(__file__).parent / "results" / "mc-moe.json"
EXPERTS, TAKEN, STEPS, BATCH, HELD, DRAFTED = 8, 2, 200, 16, 6, 4


@dataclass(frozen=True)
class Alike(MCMoE):
    """Gives every expert as many bits."""

    def _bits(self, block: Any) -> list[int]:
        return [int(self.bits)] * EXPERTS


@dataclass(frozen=True)
class Reversed(MCMoE):
    """Gives most to those who are worth least."""

    def _bits(self, block: Any) -> list[int]:
        return [4 - bits for bits in MCMoE(bits=4 - self.bits)._bits(block)]


COPIES = {
    "2.5 bits": MCMoE(bits=2.5),
    "2 bits": MCMoE(bits=2.0),
    "2 bits, all alike": Alike(bits=2.0),
    "2 bits, the other way round": Reversed(bits=2.0),
    "1.5 bits": MCMoE(bits=1.5),
    "without unlikely experts, half of the layers": MCMoE(bits=0, pruned=0.5),
    "without unlikely experts": MCMoE(bits=0, pruned=1.0),
}


def mixture(seed: int = 0) -> Transformer:
    """A model of random weights."""
    shape = TransformerShape(96, 2, 4, 64, 256)
    model, draws = random_transformer(shape, seed), torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=draws) * inputs**-0.5

    layers = [
        replace(
            layer,
            gate_up=Dense(matrix(EXPERTS * 2 * shape.inner, shape.hidden)),
            down=Dense(0.5 * matrix(EXPERTS * shape.hidden, shape.inner)),
            router=matrix(EXPERTS, shape.hidden),
        )
        for layer in model.weights.layers
    ]
    config = replace(model.config, experts=EXPERTS, experts_per_token=TAKEN)
    return Transformer(config, replace(model.weights, layers=layers))


def trained(folder: Path) -> Transformer:
    """The model after its training."""
    model = mixture()

    def loss(step: int) -> torch.Tensor:
        tokens, taught = training_batch(Chain(), BATCH, step, 0)
        return cross_entropy(predicted(model, tokens[:, :-1]).flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1)

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(sum(loss(10**6 + step) for step in range(2)) / 2)}

    plan = TrainingPlan(STEPS, lr=3e-3, weight_decay=0.01, validate_every=100)
    learning = parameters(model)
    train(learning, loss, plan, folder, validate=validate, metric="loss")
    for tensor in learning.values():
        tensor.requires_grad_(False)
    return model


@torch.no_grad()
def loss_of(model: Transformer, texts: list[tuple[str, str]]) -> float:
    losses = []
    for prompt, solution in texts:
        ids = np.array(encoded(prompt + solution))
        logits = model.forward(Batch([Segment(np.arange(len(ids)), tokens=ids)])).logits.float()
        losses.append(cross_entropy(logits[len(prompt) - 1 : -1], torch.from_numpy(ids[len(prompt) :])))
    return float(torch.stack(losses).mean())


def drafted(model: Transformer, copy: Transformer | None, prompts: list[str]) -> tuple[float, float]:
    """Tokens per pass of the model, and experts that were read for each token."""
    drafter = None if copy is None else DraftModel(copy, length=DRAFTED)
    passes = tokens = experts = 0
    for prompt in prompts:
        engine = Engine(model)
        request = Request(encoded(prompt), max_new_tokens=Chain().length, drafter=drafter, eos_ids=(END_ID,))
        seq = engine.submit(request)
        engine.run([seq])
        passes += sum(not step.prefill for step in seq.trace.steps)
        tokens += len(seq.generated) - 1
        experts += sum(count for name, count in seq.trace.ledger.counts.items() if name.endswith("experts"))
    return tokens / passes, experts / tokens


def main() -> None:
    torch.set_num_threads(1)

    def solved(split: str, count: int) -> list[tuple[str, str]]:
        return [(each, Chain().solve(each, Random(0))) for each in islice(drawn(Chain(), split), count)]

    with TemporaryDirectory() as folder:
        model = trained(Path(folder))
    held, given = solved("test", 4 * HELD), [np.array(encoded("".join(each))) for each in solved("train", 4 * HELD)]
    prompts = [prompt for prompt, _ in held[:HELD]]
    _, plain = drafted(model, None, prompts)
    copies: dict[str, tuple[Transformer, Any]] = {"the mixture itself": (model, None)}
    copies |= {name: transformed(model, [each], given) for name, each in COPIES.items()}
    copies["one expert each"] = Transformer(replace(model.config, experts_per_token=1), model.weights), None
    rows = {}
    for name, (copy, report) in copies.items():
        per_pass, experts = drafted(model, copy, prompts)
        rows[name] = {"loss": loss_of(copy, held), "tokens per pass": per_pass, "experts": experts / plain}
        if report is not None:
            rows[name]["bits"] = report.bits
        print(name, json.dumps(rows[name]), flush=True)
    made = {"command": "python benchmarks/mc_moe.py", "steps": STEPS, "puzzles": HELD, "rows": rows}
    write_result(OUT, made)


if __name__ == "__main__":
    main()
