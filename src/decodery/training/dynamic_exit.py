"""Find which layers `del` should choose its exits from, on texts that the model has written.

DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding (2025) chooses among its exits while it
decodes, by what each would have drafted; here that is counted beforehand for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import OpenModel, is_open
from decodery.speculative.drafters.dynamic_exit import tokens_per_layer

from .corpus import TrainingText
from .kind import COUNT, NON_NEGATIVE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts

_ROWS = 512
"""Places at which all layers' tokens are found at a time."""


@dataclass(frozen=True)
class ExitChoice:
    """Settings of `del`, and what they promise."""

    layers: tuple[int, ...]
    length: int  # The longest draft that promises most for any text
    acceptance: tuple[float, ...]  # By layer, how often its token is the model's
    gain: float  # Tokens per layer loaded, by that of plain decoding, if every text drafts at the best of these exits
    fixed: float  # If all texts draft at the best single one, and as many tokens. 1 where nothing is won.


@torch.no_grad()
def shadows(model: OpenModel, text: TrainingText) -> tuple[np.ndarray, int]:
    """[layers] at how many output positions each layer's token is the model's, and of how many."""
    layers, first = model.config.num_layers, max(text.written - 1, 0)
    taps = tuple(range(1, layers + 1))
    segment = Segment.chunk(text.tokens.astype(np.int64), model.new_cache(), logit_rows=[])
    hidden = model.forward(Batch([segment]), taps=taps).hidden
    right = np.zeros(layers, dtype=np.int64)
    each = max(1, _ROWS // layers)
    for begin in range(first, len(text.tokens), each):
        states = torch.stack([hidden[tap][begin : begin + each] for tap in taps])
        said = model.project(model.final_norm(states.flatten(0, 1))).argmax(dim=-1).view(layers, -1)
        right += (said == said[-1]).sum(dim=1).cpu().numpy()
    return right, len(text.tokens) - first


@dataclass(frozen=True)
class ExitSettings(Bounded):
    """What is looked for."""

    exits: int = bounded(3, COUNT, "Number of exit layers.")
    longest: int = bounded(18, COUNT, "Maximum tokens of a draft.")
    head: float = bounded(0.0, NON_NEGATIVE, "Cost of a head call, in layers. 0: as published.")
    seed: int = option(0, "Random seed of the texts.")


def choose(right: np.ndarray, asked: np.ndarray, given: ExitSettings) -> ExitChoice:
    """Exits of which each text has a good one.

    Sets grow by the layer that promises most; one that is the best of no text is not taken.

    Args:
        asked: [texts], see `shadows`.
    """
    texts, layers = right.shape
    numbers = np.arange(1, layers)
    # One right of two before anything is known, as when it decodes.
    rates = (right[:, :-1] + 1) / (asked[:, None] + 2)
    worth = np.stack([tokens_per_layer(each, numbers, layers, given.longest, given.head) for each in rates])
    best, chosen = worth.max(axis=2), list[int]()
    while len(chosen) < min(given.exits, layers - 1):
        known = best[:, chosen].max(axis=1) if chosen else np.zeros(texts)
        gained = np.maximum(best, known[:, None]).mean(axis=0)
        layer = int(gained.argmax())
        if chosen and gained[layer] <= known.mean():
            break
        chosen.append(layer)
    chosen.sort()
    lengths = worth[:, chosen].argmax(axis=2)
    every = worth.mean(axis=0)
    plain = 1 / (layers + given.head)
    return ExitChoice(
        tuple(int(numbers[layer]) for layer in chosen),
        max(1, int(lengths.max())),
        tuple((right.sum(axis=0) / asked.sum()).round(4).tolist()),
        float(best[:, chosen].max(axis=1).mean() / plain),
        float(every.max() / plain),
    )


def find_exits(
    model: OpenModel, texts: Sequence[TrainingText], given: ExitSettings, progress: Progress = silent
) -> ExitChoice:
    """`choose` on texts that the model has written, each of which is read once."""
    if not texts:
        raise SettingsError("there are no texts to find exits on: write some")
    found = []
    for number, text in enumerate(texts):
        found.append(shadows(model, text))
        progress("reading texts", number + 1, len(texts))
    right, asked = zip(*found, strict=True)
    return choose(np.stack(right), np.array(asked), given)


def _ready(run: Run) -> str:
    layers, slower = "/".join(map(str, run.made.layers)), run.made.gain <= 1
    said = "No exit is expected to be faster than plain decoding.\n" if slower else ""
    settings = f"layers={layers},length={run.made.length},head={run.of(ExitSettings).head:g}"
    return f"{said}The exits are ready: --drafter del:{settings}"


@kind(
    _ready, (OwnTexts(48, max_new_tokens=64), ExitSettings()), "--exits 3 --out exits", model="that drafts for itself"
)
def _del(run: Run) -> dict[str, Any]:
    """Find the layers of MODEL that are the best exits for --drafter del.

    Each layer is rated by how often it predicts the token of MODEL. The settings and their expected speed-up are
    printed.
    """
    target = run.loaded.model
    if not is_open(target):
        raise UnsupportedModel(
            f"{run.loaded.name} does not show what its layers say: use a model that decodery runs itself"
        )
    run.made = find_exits(target, list(own_texts(run, top=0)), run.of(ExitSettings), run.progress)
    return asdict(run.made)
