"""Train what benchmarks/draft/joint.py compares on small models: drafts for tiny-1M-chain, and a hybrid pair.

    OMP_NUM_THREADS=1 python benchmarks/draft/small.py --work DIR [PART ...] [--texts 160]

PART: `draft`, `nested`, `nested-last`, which learns to be left after its last layer alone, `deer` and `deer-first`,
which takes as many steps of its first stage alone, for the solver of chained sums that comes along, on texts it has
written; `hybrid`, a model with a Mamba-2 layer and one of attention that learns the same sums, `sharing`, one with
three Mamba-2 layers of which two read one block of attention and MLP, as Zamba2's do, and `recurrent`, a draft for both
with one Mamba-2 layer alone. What is finished is left as it is; what was interrupted goes on. Minutes each on one
thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.models.batch import Batch, Segment
from decodery.models.config import Mamba, ModelConfig, Shared
from decodery.models.loaders.store import Progress, terminal_progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Use, Weights
from decodery.training.corpus import Corpus
from decodery.training.cut import DraftShape, parameters
from decodery.training.data import write_texts
from decodery.training.deer import DeerRecipe, train_deer
from decodery.training.draft import train_draft
from decodery.training.kind import Run
from decodery.training.loop import CHECKPOINT, TrainingPlan, train

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks import solvers
from decodery_benchmarks.puzzles import drawn, puzzle
from decodery_benchmarks.puzzles.alphabet import END_ID, VOCABULARY, encoded
from decodery_benchmarks.training.puzzle_model import training_batch

TARGET, PUZZLE = "tiny-1M-chain", puzzle("chain")
PARTS = ("drafter", "nested", "nested-last", "deer", "deer-first", "hybrid", "sharing", "recurrent")
STEPS = {"hybrid": 320, "sharing": 320, "recurrent": 320}
EXITS = (1, 2, 3)
READY = "ready"
"""The empty file in the folder of a finished part."""
"""Layers after which `nested` can be left."""
_HELD = 1 << 40
"""Steps of batches that nobody learns from begin here."""


def corpus(work: Path, count: int, progress: Progress) -> Corpus:
    """What the solver writes: texts of sums, most of them wrong somewhere."""
    prompts = [encoded(prompt) for prompt in islice(drawn(PUZZLE, "train", 1 << 20), count)]
    return write_texts(
        solvers.load_model(TARGET), prompts, work / "texts", max_new_tokens=64, top=20, progress=progress
    )


def draft(work: Path, texts: Corpus, progress: Progress) -> None:
    train_draft(
        solvers.load_model(TARGET), texts, work / "draft", shape=DraftShape(1, 352), epochs=12, progress=progress
    )


def nested(work: Path, texts: Corpus, progress: Progress, name: str = "nested", exits: tuple[int, ...] = EXITS) -> None:
    shape = DraftShape(max(EXITS), 352, exits=exits)
    train_draft(solvers.load_model(TARGET), texts, work / name, shape=shape, epochs=12, progress=progress)


def deer(work: Path, texts: Corpus, progress: Progress, name: str = "deer", refining: int = 4) -> None:
    recipe = DeerRecipe(block=8, places=6, epochs=12 - refining, refining=refining, batch=4)
    run = Run(solvers.load_model(TARGET), work / name, (recipe,), progress=progress)
    train_deer(run, texts, DraftShape(2, 352))


def random_hybrid(recurrent: tuple[bool, ...], hidden: int, seed: int) -> Transformer:
    """A hybrid with random weights, float32, for the puzzles' alphabet; which of its layers are Mamba-2's."""
    mamba = Mamba(8, hidden // 4, 1, 16, 4)
    config = ModelConfig(
        VOCABULARY, hidden, 2 * hidden, len(recurrent), 4, 4, hidden // 4, 512, family="bamba", tie_embeddings=True,
        eos_ids=(END_ID,), mamba=mamba, state_layers=recurrent,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * (gain / inputs**0.5)

    small = (2 * len(recurrent)) ** -0.5

    def layer(own: bool) -> Layer:
        wide, rows = (mamba.inner, mamba.inner + mamba.width) if own else (hidden, 3 * hidden)
        built = Layer(
            attention_norm=torch.ones(hidden),
            qkv=Dense(matrix(rows, hidden)),
            output=Dense(matrix(hidden, wide, small)),
            mlp_norm=torch.ones(hidden),
            gate_up=Dense(matrix(4 * hidden, hidden)),
            down=Dense(matrix(hidden, 2 * hidden, small)),
        )
        if not own:
            return built
        return replace(
            built,
            conv=matrix(mamba.channels, mamba.kernel),
            conv_bias=torch.zeros(mamba.channels),
            # Steps of a tenth at first, and states that forget over one to sixteen of ten rows.
            step_bias=torch.full((mamba.heads,), -2.25),
            decay=torch.linspace(0.0, 2.77, mamba.heads),
            skip=torch.ones(mamba.heads),
            gate_norm=torch.ones(mamba.inner),
        )

    table = matrix(VOCABULARY, hidden)
    weights = Weights(table, [layer(own) for own in recurrent], torch.ones(hidden), Dense(table))
    return Transformer(config, weights)


def random_sharing(hidden: int, seed: int) -> Transformer:
    """As Zamba2's: three Mamba-2 layers without MLPs, the last two of which read one block that they share."""
    base, rank, inner = random_hybrid((True, True, True), hidden, seed), 8, 2 * hidden
    generator = torch.Generator().manual_seed(seed + 1)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Dense:
        return Dense(torch.randn(outputs, inputs, generator=generator) * (gain / inputs**0.5))

    head_dim = 2 * hidden // base.config.num_heads
    config = replace(
        base.config, family="zamba2", head_dim=head_dim, attention_scale=(head_dim / 2) ** -0.5, intermediate_size=0,
        attending_layers=(False, True, True), shared=Shared(1, inner, rank),
    )  # fmt: skip
    block = Layer(
        torch.ones(2 * hidden), matrix(6 * hidden, 2 * hidden), matrix(hidden, 2 * hidden),
        torch.ones(hidden), matrix(2 * inner, hidden), matrix(hidden, inner),
    )  # fmt: skip
    uses = [Use(matrix(hidden, hidden), matrix(rank, hidden), matrix(2 * inner, rank)) for _ in config.sharing]
    nothing = torch.empty(0)
    layers = [
        replace(layer, mlp_norm=nothing, gate_up=Dense(nothing[None]), down=Dense(nothing[None]))
        for layer in base.weights.layers
    ]
    return Transformer(config, replace(base.weights, layers=layers, shared=[block], uses=uses))


RANDOM: dict[str, Callable[[], Transformer]] = {
    "hybrid": lambda: random_hybrid((True, False), 96, 0),
    "sharing": lambda: random_sharing(96, 2),
    "recurrent": lambda: random_hybrid((True,), 48, 1),
}


def pair(work: Path, name: str, *, trained: bool = True) -> Transformer:
    """A hybrid or their draft, as it was trained."""
    from decodery.models.trained.artifact import read_tensors

    model = RANDOM[name]()
    if trained:
        tensors, _ = read_tensors(work / name / CHECKPOINT)
        for key, value in learning(model).items():
            value.requires_grad_(False).copy_(tensors[f"best.{key}"])
    return model


def learning(model: Transformer) -> dict[str, torch.Tensor]:
    """What is learned of it: all but the rates at which states forget, which a model reads when it is made."""
    found = parameters(model)
    for name in [name for name, value in found.items() if name.endswith(".decay") or not value.numel()]:
        found.pop(name).requires_grad_(False)
    return found


def loss(model: Transformer, step: int, count: int = 8) -> torch.Tensor:
    """Nats per token of solutions."""
    tokens, taught = training_batch(PUZZLE, count, step, 0)
    ids = tokens[:, :-1].numpy()
    batch = Batch([Segment(np.arange(len(row)), row) for row in ids])
    logits = model.outputs(model.layers(model.embed(batch), batch))
    return cross_entropy(logits, taught[:, 1:].flatten(), ignore_index=-1)


def hybrid(work: Path, texts: Corpus, progress: Progress, name: str = "hybrid") -> None:
    model = pair(work, name, trained=False)

    def validate() -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(loss(model, _HELD))}

    plan = TrainingPlan(STEPS[name], lr=3e-3, validate_every=20, save_seconds=5.0)
    train(
        learning(model), partial(loss, model), plan, work / name,
        validate=validate, metric="loss", settings={"made by": 1}, progress=progress, what=f"learning, {name}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=160)
    options = parser.parse_args()
    made: dict[str, Callable[[Path, Corpus, Progress], None]] = {
        "draft": draft,
        "nested": nested,
        "nested-last": partial(nested, name="nested-last", exits=()),
        "deer": deer,
        "deer-first": partial(deer, name="deer-first", refining=0),
        "hybrid": hybrid,
        "sharing": partial(hybrid, name="sharing"),
        "recurrent": partial(hybrid, name="recurrent"),
    }
    with terminal_progress(counts=True) as progress:
        texts = corpus(options.work, options.texts, progress)
        for name in options.parts or PARTS:
            if not (options.work / name / READY).is_file():
                made[name](options.work, texts, progress)
                (options.work / name / READY).touch()
            print(f"{name} is ready", flush=True)


if __name__ == "__main__":
    main()
