"""Train a decoder alone on a transduction, whose prompt is the source: a teacher, and what two stacks are beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.torch.side_by_side import predicted
from decodery.training.card import check_folder as holds
from decodery.training.cut import parameters, quantized
from decodery.training.loop import History, TrainingPlan, train
from decodery_benchmarks.puzzles.alphabet import END_ID, encoded
from decodery_benchmarks.training.puzzle_model import TransformerShape

from .puzzle_model import SHAPES, random_transformer, save
from .transductions import Transduction, sources

check_folder = partial(holds, made=DESCRIPTION)

BEHIND = ">"
"""Stands between a source and what is written of it; no source holds it."""


def asking(source: str) -> list[int]:
    """The prompt that a source makes for a decoder alone."""
    return encoded(source + BEHIND)


@dataclass(frozen=True)
class OneStackRecipe:
    """How a decoder is trained: its shape, and `steps` of `batch` sources each; `held` of them are held out."""

    shape: TransformerShape = SHAPES["tiny-1M"]
    steps: int = 1500
    batch: int = 32
    lr: float = 2e-3
    seed: int = 0
    every: int = 150
    held: int = 100

    def __post_init__(self) -> None:
        if min(self.batch, self.held) < 1:
            raise SettingsError("a decoder needs batch and held of at least 1")


def train_one_stack(
    kind: Transduction,
    out: Path,
    *,
    recipe: OneStackRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> float:
    """Train a decoder to write what `kind` says of its prompt, and leave it in the folder `out`, in int8.

    Returns the share of held-out sources of which greedy decoding writes all that is right. Interrupted, it goes on
    from its last checkpoint when called again.
    """
    recipe = recipe or OneStackRecipe()
    check_folder(out)
    model = random_transformer(recipe.shape, recipe.seed)
    held = list(islice(sources(kind, "validation"), recipe.held))

    def loss(step: int) -> torch.Tensor:
        tokens, taught = training_batch(kind, recipe, step)
        logits = predicted(model, tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1), taught[:, 1:].flatten(), ignore_index=-1)

    history = train(
        parameters(model),
        loss,
        TrainingPlan(recipe.steps, lr=recipe.lr, warmup=0.05, validate_every=recipe.every),
        out / "training",
        validate=lambda: {"wrong": 1.0 - right(quantized(model), kind, held)},
        metric="wrong",
        enough=lambda values: values["wrong"] == 0.0,
        settings={"kind": repr(kind), "recipe": asdict(recipe)},
        progress=progress,
        what=f"learning {type(kind).__name__.lower()}",
    )
    found = 1.0 - history.metrics[str(history.best_step)]["wrong"]
    save(quantized(model), out, "".join(_card(kind, recipe, history, found, command)))
    return found


def training_batch(kind: Transduction, recipe: OneStackRecipe, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's tokens [batch, longest], filled up after their ends, and what is learned of them, -1 for nothing."""
    drawn = islice(sources(kind, "train", (recipe.seed << 32) + step), recipe.batch)
    rows = [(asking(each), [*encoded(kind.write(each)), END_ID]) for each in drawn]
    tokens = np.full((len(rows), max(len(ask) + len(text) for ask, text in rows)), END_ID, dtype=np.int64)
    taught = np.full_like(tokens, -1)
    for number, (ask, text) in enumerate(rows):
        tokens[number, : len(ask) + len(text)] = [*ask, *text]
        taught[number, len(ask) : len(ask) + len(text)] = text
    return torch.from_numpy(tokens), torch.from_numpy(taught)


def right(model: LanguageModel, kind: Transduction, held: Sequence[str]) -> float:
    """The share of sources of which greedy decoding writes exactly what it should."""
    engine = Engine(model)
    texts = [engine.submit(Request(asking(each), max_new_tokens=kind.longest + 2, eos_ids=(END_ID,))) for each in held]
    engine.run(texts)
    wanted = [[*encoded(kind.write(each)), END_ID] for each in held]
    return float(np.mean([seq.generated == each for seq, each in zip(texts, wanted, strict=True)]))


def _card(kind: Transduction, recipe: OneStackRecipe, history: History, found: float, command: str) -> Iterator[str]:
    shape = recipe.shape
    yield f"# A decoder alone: {type(kind).__name__.lower()}\n\n{(type(kind).__doc__ or '').splitlines()[0]}\n"
    yield f"It reads a source and `{BEHIND}`.\n\n    {command or 'python benchmarks/train.py seq2seq --one-stack'}\n\n"
    yield f"{shape.layers} layers of width {shape.hidden}, int8, from random weights, {history.best_step} steps of "
    yield f"{recipe.batch} sources. Of {recipe.held} held-out sources it writes {found:.1%} without a mistake.\n"
