"""Train a small model to solve puzzles, and stop while it still fails often enough for searches to be told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.compression.folder import precision
from decodery.core.errors import SettingsError
from decodery.models.config import ModelConfig
from decodery.models.loaders import fused
from decodery.models.loaders.description import Description
from decodery.models.loaders.drafts import DESCRIPTION, TOKENIZER
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.loaders.store import Progress, replacing, silent, write_text
from decodery.models.torch.side_by_side import predicted
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights
from decodery.search.estimators import pass_at
from decodery.training.card import CARD
from decodery.training.card import check_folder as holds
from decodery.training.cut import parameters, quantized
from decodery.training.loop import History, TrainingPlan, train
from decodery_benchmarks.puzzles import Puzzle, drawn
from decodery_benchmarks.puzzles.alphabet import END_ID, VOCABULARY, encoded, tokenizer

from .solving import solved, text_of

check_folder = partial(holds, made=DESCRIPTION)


@dataclass(frozen=True)
class TransformerShape:
    """Of a Llama-style transformer whose embedding and head are one table. context: positions."""

    hidden: int
    layers: int
    heads: int
    inner: int
    context: int


SHAPES = {
    "tiny-1M": TransformerShape(128, 4, 4, 352, 256),
    "tiny-3M": TransformerShape(192, 6, 6, 512, 384),
    "tiny-10M": TransformerShape(320, 8, 8, 864, 512),
}


@dataclass(frozen=True)
class PuzzleRecipe:
    """How a puzzle model is trained.

    steps: at most, of `batch` texts each. Validated every `every` steps, it stops as soon as greedy decoding solves
    a share between `least` and `most` of `greedy` held-out puzzles, and one of 64 samples a share above `reach` of
    `sampled` ones: outside of that searches cannot be told apart. Some puzzles are learned so suddenly that validation
    misses it: it ends halfway from `most` to all, too, and keeps what came nearest; validate more often then.
    """

    shape: str = "tiny-1M"
    steps: int = 3000
    batch: int = 48
    lr: float = 1e-3
    seed: int = 0
    every: int = 10
    least: float = 0.25
    most: float = 0.55
    reach: float = 0.8
    greedy: int = 96
    sampled: int = 24

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise SettingsError(f"there is no shape {self.shape!r}: choose among {', '.join(SHAPES)}")
        if self.batch < 1 or self.greedy < 1 or self.sampled < 1 or not 0 <= self.least < self.most <= 1:
            raise SettingsError(
                "a puzzle model needs batch, greedy and sampled of at least 1, and 0 <= least < most <= 1"
            )


_SAMPLES = 64


def train_puzzle_model(
    puzzle: Puzzle,
    out: Path,
    *,
    recipe: PuzzleRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
    seen: Callable[[Transformer, float], None] = lambda model, greedy: None,
) -> dict[str, float]:
    """Train a model for `puzzle` and leave it in the folder `out`, in int8, ready to be loaded.

    Returns what validation said of the model that is kept, int8 included. Interrupted, it goes on from its last
    checkpoint in `out` when called again. Texts are made as they are needed; nothing is read from elsewhere. seen: is
    shown every model that is validated, in int8, and the share that it solves greedily.
    """
    recipe = recipe or PuzzleRecipe()
    check_folder(out)
    model = random_transformer(SHAPES[recipe.shape], recipe.seed)
    held = list(islice(drawn(puzzle, "validation"), recipe.greedy))
    fast = choose_dtype("auto", "bfloat16", model.device) == "bfloat16"

    def loss(step: int) -> torch.Tensor:
        tokens, taught = training_batch(puzzle, recipe.batch, step, recipe.seed)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
            logits = predicted(model, tokens[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1)

    def validate() -> dict[str, float]:
        kept = quantized(model)
        greedy = solves(kept, puzzle, held)
        seen(kept, greedy)
        inside = recipe.least <= greedy <= recipe.most
        reached = solves(kept, puzzle, held[: recipe.sampled], _SAMPLES) if inside else 0.0
        middle = (recipe.least + recipe.most) / 2
        return {"greedy": greedy, f"pass@{_SAMPLES}": reached, "off": abs(greedy - middle) + (reached <= recipe.reach)}

    history = train(
        parameters(model),
        loss,
        TrainingPlan(
            recipe.steps,
            lr=recipe.lr,
            warmup=min(1.0, 100 / recipe.steps),
            weight_decay=0.1,
            validate_every=recipe.every,
        ),
        out / "training",
        validate=validate,
        metric="off",
        # From far beyond it does not come back: what is kept is the nearest there was.
        enough=lambda values: values["off"] < 1 or values["greedy"] > (1 + recipe.most) / 2,
        settings={"puzzle": repr(puzzle), "recipe": asdict(recipe)},
        progress=progress,
        what=f"learning {puzzle.spec}",
    )
    values = history.metrics[str(history.best_step)]
    found = {name: values[name] for name in ("greedy", f"pass@{_SAMPLES}")}
    save(quantized(model), out, "".join(_card(puzzle, recipe, history, found, command)))
    return found


def solves(model: Transformer, puzzle: Puzzle, prompts: list[str], samples: int = 0) -> float:
    """The share of puzzles that greedy decoding solves, or one at least of so many samples at temperature 1."""
    temperature = 1.0 if samples else 0.0
    texts = solved(model, prompts, puzzle.length + 8, each=max(1, samples), temperature=temperature)
    right = [
        sum((text := text_of(seq)) is not None and puzzle.verify(prompt, text) for seq in several)
        for prompt, several in zip(prompts, texts, strict=True)
    ]
    return float(
        np.mean([pass_at(len(several), hits, len(several)) for hits, several in zip(right, texts, strict=True)])
    )


def training_batch(puzzle: Puzzle, count: int, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts of a training step: tokens [count, longest], filled up after their ends, and what is learned of them.

    The second is -1 where nothing is to be predicted: prompts and what fills up.
    """
    random = Random(f"lesson {seed} {step}")
    prompts = islice(drawn(puzzle, "train", (seed << 32) + step), count)
    rows = [(len(prompt), [*encoded(prompt + puzzle.solve(prompt, random)), END_ID]) for prompt in prompts]
    tokens = np.full((count, max(len(row) for _, row in rows)), END_ID, dtype=np.int64)
    taught = np.full_like(tokens, -1)
    for number, (begin, row) in enumerate(rows):
        tokens[number, : len(row)] = row
        taught[number, begin : len(row)] = row[begin:]
    return torch.from_numpy(tokens), torch.from_numpy(taught)


def log_probability(model: Transformer, rows: Ordered[tuple[Ordered[int], Ordered[int]]]) -> torch.Tensor:
    """[n] log-probabilities of what is written after beginnings, token ids both, with gradients."""
    longest = max(len(begin) + len(written) for begin, written in rows)
    tokens = np.full((len(rows), longest), END_ID, dtype=np.int64)
    counted = np.zeros((len(rows), longest), dtype=np.float32)
    for number, (begin, written) in enumerate(rows):
        tokens[number, : len(begin) + len(written)] = [*begin, *written]
        counted[number, len(begin) : len(begin) + len(written)] = 1
    texts = torch.from_numpy(tokens)
    logs = predicted(model, texts[:, :-1]).float().log_softmax(dim=-1).gather(2, texts[:, 1:, None])[..., 0]
    return (logs * torch.from_numpy(counted)[:, 1:]).sum(dim=1)


def random_transformer(shape: TransformerShape, seed: int) -> Transformer:
    """A model of this shape with random weights, float32, for the puzzles' alphabet."""
    dim = shape.hidden // shape.heads
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.heads,
        head_dim=dim,
        max_positions=shape.context,
        tie_embeddings=True,
        eos_ids=(END_ID,),
        vocabulary=tokenizer().fingerprint(),
    )
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator, dtype=torch.float32, device="cpu") * (
            gain / inputs**0.5
        )

    # What every layer adds to the stream begins small, the more so the more layers there are.
    small = (2 * shape.layers) ** -0.5
    layers = [
        Layer(
            attention_norm=torch.ones(shape.hidden, dtype=torch.float32, device="cpu"),
            qkv=Dense(matrix(3 * shape.hidden, shape.hidden)),
            output=Dense(matrix(shape.hidden, shape.hidden, small)),
            mlp_norm=torch.ones(shape.hidden, dtype=torch.float32, device="cpu"),
            gate_up=Dense(matrix(2 * shape.inner, shape.hidden)),
            down=Dense(matrix(shape.hidden, shape.inner, small)),
        )
        for _ in range(shape.layers)
    ]
    table = matrix(VOCABULARY, shape.hidden)
    return Transformer(
        config, Weights(table, layers, torch.ones(shape.hidden, dtype=torch.float32, device="cpu"), Dense(table))
    )


def save(model: Transformer, out: Path, card: str) -> None:
    """Leave a model of puzzles in a folder, ready to be loaded. model: in int8 or in floating point."""
    kept = precision(model)
    fused.save(out / f"{kept}.safetensors", model.weights)
    with replacing(out / TOKENIZER) as temporary:
        tokenizer().backend.save(str(temporary), pretty=False)
    write_text(out / DESCRIPTION, Description(model.config, kept, {}, None).text())
    write_text(out / CARD, card)


def _card(
    puzzle: Puzzle, recipe: PuzzleRecipe, history: History, found: dict[str, float], command: str
) -> Iterator[str]:
    shape, made = SHAPES[recipe.shape], command or "python benchmarks/train.py puzzle-model"
    yield f"# A model that solves {puzzle.spec}, sometimes\n\n"
    yield "It is for measuring searches, and was stopped on purpose while it still fails often.\n\n"
    yield f"    {made}\n\n"
    yield f"{recipe.shape}: {shape.layers} layers of width {shape.hidden}, {shape.heads} heads, int8. Trained from "
    yield f"random weights on {recipe.batch} texts in each of {history.best_step} steps, loss on solutions alone.\n\n"
    yield f"Of {recipe.greedy} held-out puzzles, in int8: greedy {found['greedy']:.1%}, pass@{_SAMPLES} (of "
    yield f"{recipe.sampled}) {found[f'pass@{_SAMPLES}']:.1%}. Recipe: `{json.dumps(asdict(recipe))}`\n"
