"""Freeze keys for a discrete key-value bottleneck: vector quantization of a model's states, without any labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating
from decodery.speculative.stores.bottleneck import KeySet, nearest

from .kind import COUNT, Bounded, Run, bounded, kind, option
from .kind_data import TextFiles
from .tensors import normal, zeros

_BATCH = 256
_DEAD = 1e-2
"""Expected rows of a batch below which a key is dead, and begins anew at one of the batch's rows."""


@dataclass(frozen=True)
class KeyRecipe(Bounded):
    """How keys are found."""

    codebooks: int = bounded(16, COUNT, "Number of codebooks. Each gives a hidden state one key.")
    keys: int = bounded(512, COUNT, "Keys of a codebook.")
    dim: int = bounded(16, COUNT, "Dimension of a key.")
    rank: int = bounded(64, COUNT, "Dimension of a value.")
    decay: float = bounded(0.95, "[0, 1)", "Decay of the moving averages.")
    epochs: int = option(4, "Passes over all states.")
    seed: int = option(0, "Random seed of projections and initial keys.")


@torch.no_grad()
def learn_keys(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    *,
    recipe: KeyRecipe | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> KeySet:
    """Keys for a model's last states, from texts of token ids."""
    recipe = recipe or KeyRecipe()
    if not isinstance(model, Transformer):
        raise UnsupportedModel("keys go with models that this package runs itself: load another model")
    parts = []
    for number, text in enumerate(texts):
        segment = Segment(np.arange(len(text)), np.asarray(text, dtype=np.int64), logit_rows=[])
        parts.append(model.forward(Batch([segment]), taps=(-1,)).hidden[-1].float().cpu())
        progress("reading texts", number + 1, len(texts))
    states = torch.cat(parts)
    if len(states) < recipe.keys:
        raise SettingsError(f"{len(states)} tokens are too few for {recipe.keys} keys: give longer texts")
    keys, centre, projections = quantized(states, recipe)
    about = {**asdict(recipe), "tokens": len(states), **(facts or {})}
    return KeySet(centre, projections, keys, readout(model, recipe.rank), model.fingerprint, about)


def quantized(states: torch.Tensor, recipe: KeyRecipe) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [C, K, d], the centre [width] and projections [C, d, width] for states [n, width].

    Projections are Xavier's, of states whose channels have been given the same spread: a few channels of a language
    model are a hundred times as large as the others, and nothing else would be told apart. They never learn.
    """
    chance = torch.Generator().manual_seed(recipe.seed)
    width = states.shape[1]
    centre, spread = states.mean(dim=0), states.std(dim=0).clamp(min=1e-6)
    shape = recipe.codebooks, recipe.dim, width
    projections = normal(chance, *shape) * (2 / (recipe.dim + width)) ** 0.5 / spread
    rows = torch.einsum("nw,cdw->ncd", states - centre, projections)
    keys = rows[torch.randperm(len(rows), generator=chance, device="cpu")[: recipe.keys]].transpose(0, 1).clone()
    counts, sums = torch.ones(keys.shape[:2], dtype=torch.float32, device="cpu"), keys.clone()
    books = torch.arange(recipe.codebooks, device="cpu")
    for _ in range(recipe.epochs):
        for batch in rows[torch.randperm(len(rows), generator=chance, device="cpu")].split(_BATCH):
            place = (nearest(batch, keys) + books * recipe.keys).flatten()
            found = zeros(keys[..., 0].numel()).index_add_(0, place, zeros(len(place)) + 1)
            total = zeros(len(found), recipe.dim).index_add_(0, place, batch.flatten(0, 1))
            counts = recipe.decay * counts + (1 - recipe.decay) * found.view_as(counts)
            sums = recipe.decay * sums + (1 - recipe.decay) * total.view_as(sums)
            dead = counts < _DEAD
            if dead.any():
                anew = batch[
                    torch.randint(len(batch), (int(dead.sum()),), generator=chance, device="cpu"), dead.nonzero()[:, 0]
                ]
                counts[dead], sums[dead] = 1.0, anew
            keys = sums / counts[..., None]
    return keys, centre, projections


def readout(model: Transformer, rank: int) -> torch.Tensor:
    """[rank, vocab] what makes logits of values: the outputs' main directions, every token of length 1.

    So a value that has learned one token says that token; by their own lengths, a longer one near it would be said.
    """
    if model.weights.kept is not None:
        raise UnsupportedModel("keys go with models that have an output for every token: load another model")
    table = floating(model.weights.head).weight.float().cpu()
    table = table - table.mean(dim=0)
    rank = min(rank, table.shape[1])
    directions = torch.linalg.eigh((table.T @ table).double())[1][:, -rank:].flip(1).float()
    found = (table @ directions).T
    return found / found.norm(dim=0).clamp(min=1e-6)


@kind(
    "The keys are ready: --drafter discrete-key-value:keys={out}",
    (TextFiles(), KeyRecipe()),
    "notes.txt --out keys",
    model="whose hidden states are read",
)
def _kv_bottleneck(run: Run) -> dict[str, Any]:
    """Fit keys to the hidden states of MODEL on text FILES, for --drafter discrete-key-value:keys=DIR.

    The texts need no labels. The keys stay fixed: the drafter learns their values while it drafts, and starts with
    none.
    """
    recipe, texts = run.of(KeyRecipe), run.of(TextFiles).pieces(run.loaded)
    found = learn_keys(run.loaded.model, texts, recipe=recipe, facts=run.facts, progress=run.progress)
    found.save(run.out / KeySet.FILE)
    return {"tokens": found.facts["tokens"]}
