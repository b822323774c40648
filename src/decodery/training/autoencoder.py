"""Train a sparse autoencoder of hidden states, and measure any on held-out texts."""

from __future__ import annotations

import json
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent, write_text
from decodery.models.protocol import LanguageModel
from decodery.monitors.feature import Feature
from decodery.monitors.sparse_autoencoder import SparseAutoencoder

from .held_out import Measured, bootstrap, compared
from .kind import COUNT, Bounded, Run, bounded, kind, option
from .kind_data import TextFiles
from .loop import TrainingPlan, batches, content, train
from .tensors import normal, zeros

_VALIDATED = 2048
"""Rows that a validation looks at."""


@torch.no_grad()
def rows_of_texts(
    model: LanguageModel, texts: Ordered[Ordered[int]], site: str, progress: Progress = silent
) -> list[torch.Tensor]:
    """[tokens - 1, width] float32 of each text at a hook point, without the first token's row."""
    found = []
    for number, text in enumerate(texts, start=1):
        segment = Segment.chunk(list(text), model.new_cache(), logit_rows=[])
        found.append(model.forward(Batch([segment]), taps=[site]).hidden[site][1:].float().cpu())
        progress("reading texts", number, len(texts))
    return found


@dataclass(frozen=True)
class AutoencoderSettings(Bounded):
    """How an autoencoder is trained."""

    features: int = bounded(2048, "[2, inf)", "Features of the autoencoder.")
    k: int = bounded(32, COUNT, "Active features of a row.")
    steps: int = 500
    batch: int = option(256, "Hidden states of a step.")
    lr: float = 1e-3
    seed: int = option(0, "Random seed of order and weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.features:
            raise SettingsError(f"of {self.features} features 1 to {self.features} are active, not {self.k}")


def train_autoencoder(
    learned: torch.Tensor,
    held: torch.Tensor,
    out: Path,
    site: str,
    settings: AutoencoderSettings,
    progress: Progress = silent,
) -> SparseAutoencoder:
    """The autoencoder with at most k active features per row that reconstructs held-out rows best.

    Args:
        learned: [n, width] rows to learn from.
        held: [n, width] rows to choose the best step by.
    """
    draws, width, features = torch.Generator().manual_seed(settings.seed), learned.shape[1], settings.features
    directions = normal(draws, features, width)
    directions = directions / directions.norm(dim=1, keepdim=True)
    tensors = {
        "encoder": directions.T.clone().contiguous(),
        "bias": zeros(features),
        "decoder": directions.clone(),
        "shift": learned.mean(dim=0),
    }
    order = batches(len(learned), settings.batch, settings.seed)
    spread = (learned - learned.mean(dim=0)).square().sum(dim=1).mean()

    def lost(rows: torch.Tensor) -> torch.Tensor:
        found = (rows - tensors["shift"]) @ tensors["encoder"] + tensors["bias"]
        values, numbers = found.topk(settings.k, dim=-1)
        active = torch.zeros_like(found).scatter(-1, numbers, values.relu())
        made = active @ tensors["decoder"] + tensors["shift"]
        return (made - rows).square().sum(dim=1).mean() / spread

    out.mkdir(parents=True, exist_ok=True)
    train(
        tensors,
        lambda step: lost(learned[order(step)]),
        TrainingPlan(settings.steps, lr=settings.lr, weight_decay=0.0, validate_every=max(settings.steps // 10, 1)),
        out,
        validate=lambda: {"unexplained": float(lost(held[:_VALIDATED]))},
        metric="unexplained",
        settings={"site": site, "recipe": vars(settings), "rows": content([learned, held])},
        progress=progress,
        what="training the autoencoder",
    )
    made = {name: tensor.detach() for name, tensor in tensors.items()}
    return SparseAutoencoder(**made, activation="topk", k=settings.k, site=site)


@torch.no_grad()
def measured(sae: SparseAutoencoder, texts: Ordered[torch.Tensor], seed: int = 0) -> dict[str, Any]:
    """What an autoencoder does with rows that nothing was learned from.

    Args:
        texts: [tokens, width] rows of each text, two texts at least.

    Returns:
        "L0", the mean number of active features; "unexplained variance" and its 95 % "interval" by bootstrap over
        texts; the share of "dead features", which no row of these texts activates; and as "baselines" the unexplained
        variance of the same number of principal components of these rows, and of the encoder with its directions
        shuffled, with the gain over both.
    """
    whole = torch.cat(list(texts))
    mean = whole.mean(dim=0)
    seen, count = torch.zeros(sae.features, dtype=torch.bool, device="cpu"), 0.0
    lost, shuffled = list[float](), list[float]()
    spread = [float((rows - mean).square().sum()) for rows in texts]
    order = torch.randperm(sae.features, generator=torch.Generator().manual_seed(seed), device="cpu")
    for rows in texts:
        active = sae.encode(rows)
        seen |= (active > 0).any(dim=0)
        count += float((active > 0).sum())
        lost.append(float((sae.decode(active, rows) - rows).square().sum()))
        shuffled.append(float((sae.decode(active[:, order], rows) - rows).square().sum()))
    components = max(round(count / len(whole)), 1)
    *_, directions = torch.linalg.svd(whole - mean, full_matrices=False)
    beyond = [float(((rows - mean) @ directions[components:].T).square().sum()) for rows in texts]

    def unexplained(apart: list[float]) -> Measured:
        shares = [each / of for each, of in zip(apart, spread, strict=True)]
        return Measured({"unexplained variance": sum(apart) / sum(spread)}, "unexplained variance", shares, spread)

    own = unexplained(lost)
    own["interval"] = bootstrap(own.each, spread, seed=seed)
    own["dead features"] = 1 - float(seen.float().mean())
    return {
        "tested on": "texts that nothing was learned from",
        "texts": len(texts),
        "rows": len(whole),
        "L0": round(count / len(whole), 2),
        **compared(
            own,
            {
                f"{components} principal components of these rows": unexplained(beyond),
                "directions shuffled": unexplained(shuffled),
            },
        ),
    }


@dataclass(frozen=True)
class AutoencoderPlace:
    """Which states are encoded.

    Attributes:
        measure: Train nothing: measure the autoencoder of a folder of SAELens or sparsify.
    """

    site: str | None = option(None, "Hook point, such as resid_post.10; resid_post of the middle layer by default.")
    measure: Path | None = field(default=None, metadata={"path": "folder"})


@kind(
    lambda run: (
        f"The autoencoder is ready: --monitor feature:sae={run.of(AutoencoderPlace).measure or run.out},features=0"
    ),
    (TextFiles(), AutoencoderPlace(), AutoencoderSettings()),
    "notes.txt --site resid_post.15 --out sae",
    model="whose hidden states are read",
)
def _autoencoder(run: Run) -> dict[str, Any]:
    """Train a sparse autoencoder of the hidden states of MODEL on text FILES, for the monitor feature.

    At most --k features of a state are active. A fifth of the text pieces is held out; the printed figures are
    theirs: active features, variance that the reconstruction leaves, features that never are active. The folder is
    one that SAELens reads. An interrupted run continues.
    """
    given, place, loaded = run.of(AutoencoderSettings), run.of(AutoencoderPlace), run.loaded
    if place.measure is not None:
        usual = replace(AutoencoderSettings(), seed=given.seed)
        unused = [f"--{name}" for name, value in vars(given).items() if value != getattr(usual, name)]
        if unused:
            raise SettingsError(f"--measure trains nothing: leave out {' and '.join(unused)}")
    # Two texts are tested at least: one alone has no interval. A fifth is held out, and half of that chooses.
    found = run.of(TextFiles).pieces(loaded, needed=16 if place.measure is None else 6)
    known = None if place.measure is None else SparseAutoencoder.load(place.measure, place.site or "")
    if known is not None:
        Feature(known, (0,)).fits(loaded.model)
    site = known.site if known is not None else place.site or f"resid_post.{loaded.model.config.num_layers // 2}"
    rows = rows_of_texts(loaded.model, found, site, run.progress)
    held, learned = rows[::5], torch.cat([each for number, each in enumerate(rows) if number % 5])
    tested = held if known is not None else held[1::2]
    if known is None:
        known = train_autoencoder(learned, torch.cat(held[::2]), run.out, site, given, run.progress)
        known.save(run.out)
    report = {"site": site, **measured(known, tested, given.seed)}
    write_text(run.out / "report.json", json.dumps({**run.facts, "report": report}, indent=1))
    return report
