"""Train an adapter, which a model can be used with text by text: S2FT's columns or LoRA's thin matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from decodery.compression.base import LINEARS, transformable
from decodery.compression.each_linear import Made, size_of
from decodery.core.errors import SettingsError
from decodery.models.config import ModelConfig
from decodery.models.loaders.adapters import Adapter, Columns, Thin, tuned
from decodery.models.torch.weights import Dense

from .corpus import Corpus
from .kind import Run, kind, option
from .kind_data import CutFiles, cut_texts
from .remade import CopyRecipe, Remade, Remaking, TrainedForm, TrainingProgress, learn
from .tensors import zeros


class AdaptedLinear(TrainedForm):
    """A linear layer that stays, and what is added to it.

    Args:
        progress_made: Whose `written` rows alone it is added to, None for all rows.
    """

    def __init__(
        self, whole: Dense, part: Columns | Thin | None, progress_made: TrainingProgress | None = None
    ) -> None:
        self.whole, self.part, self.progress_made = whole, part, progress_made

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        learning = {} if self.part is None else self.part.tensors()
        return {name: each for name, each in learning.items() if each.is_floating_point()}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        plain = linear(rows, self.whole.weight, self.whole.bias)
        if isinstance(self.part, Columns):
            # Only what enters these columns is kept for the way back.
            return plain + rows[:, self.part.columns] @ self.part.delta.T
        if self.part is None:
            return plain
        thin = rows @ self.part.second.T
        if self.progress_made is not None and self.progress_made.written is not None:
            thin = thin * self.progress_made.written
        return plain + thin @ self.part.first.T

    def made(self, itemsize: int) -> Made:
        weight = self.whole.weight if self.part is None else self.part.added(self.whole.weight)
        made = Dense(weight, self.whole.bias)
        return Made(made, size_of(made))


@dataclass(frozen=True)
class S2FTRemaking(Remaking):
    """S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity (2024).

    Of every layer some heads' columns of the output projection and some channels' columns of the MLP's down projection
    learn, drawn at random by `seed`. Columns are kept with their numbers: nothing is permuted, so that it is all the
    same how many heads share a key.
    """

    config: ModelConfig | None = option(None, "That of the model.")
    channels: float = option(0.03, "Share of MLP channels to train.")
    heads: float = option(0.052, "Share of heads to train, at least one head.")
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.channels <= 1.0 and 0.0 <= self.heads <= 1.0) or self.channels + self.heads == 0.0:
            raise SettingsError("s2ft tunes shares of heads and of channels, each from 0 to 1 and not both 0")

    @property
    def norms(self) -> bool:
        return False

    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        assert self.config is not None
        _, layer, kind = name.split(".")
        shares = {"output": (self.heads, self.config.num_heads), "down": (self.channels, self.config.intermediate_size)}
        share, groups = shares.get(kind, (0.0, 1))
        if not share:
            return AdaptedLinear(whole, None)
        count = max(1, round(share * groups))
        drawn = np.random.default_rng([self.seed, int(layer), LINEARS.index(kind)]).permutation(groups)[:count]
        width = whole.shape[1] // groups
        columns = np.sort((drawn[:, None] * width + np.arange(width)).ravel())
        delta = torch.zeros(whole.shape[0], len(columns), dtype=whole.weight.dtype, device=whole.weight.device)
        return AdaptedLinear(whole, Columns(torch.from_numpy(columns).to(delta.device), delta))


@dataclass(frozen=True)
class LoRARemaking(Remaking):
    """LoRA: Low-Rank Adaptation of Large Language Models (2021), of these linear layers.

    Attributes:
        layers: Linear layers that are tuned. Matrices that are kept as one are tuned as one.
        masked: Read prompts but for their last tokens without the adapter, as --search edge does (Efficient Reasoning
            on the Edge, 2026). The texts must have prompts.
    """

    rank: int = option(8, "Rank of the adapter.")
    alpha: float = option(16.0, "Scale of the adapter: alpha / rank.")
    layers: tuple[str, ...] = LINEARS
    seed: int = 0
    masked: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0 or not self.layers or not set(self.layers) <= set(LINEARS):
            raise SettingsError(f"lora needs a rank of at least 1, alpha above 0 and some of {', '.join(LINEARS)}")

    @property
    def norms(self) -> bool:
        return False

    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        _, layer, kind = name.split(".")
        if kind not in self.layers:
            return AdaptedLinear(whole, None)
        (outputs, inputs), weight = whole.shape, whole.weight
        draws = np.random.default_rng([self.seed, int(layer), LINEARS.index(kind)])
        # The scale is in what is drawn: a step of the other then moves the product as far as in the paper.
        drawn = draws.uniform(-1.0, 1.0, (self.rank, inputs)) * inputs**-0.5 * self.alpha / self.rank
        second = torch.from_numpy(drawn).to(weight)
        part = Thin(zeros(outputs, self.rank).to(weight), second)
        return AdaptedLinear(whole, part, progress_made if self.masked else None)


def train_adapter(run: Run, corpus: Corpus, remaking: S2FTRemaking | LoRARemaking) -> Adapter:
    """Train an adapter on texts, for the source `adapter`.

    Returns:
        The adapter. Its facts have what `judged` says of held-out texts, in the precision of the model and beside the
        model without it, as "validation".
    """
    target, recipe = run.loaded, run.of(CopyRecipe)
    masked = isinstance(remaking, LoRARemaking) and remaking.masked
    if masked and not all(text.written for text in corpus):
        raise SettingsError(
            f"masked training reads prompts without the adapter, and texts of {corpus.folder} have no prompt: give a "
            "folder of texts that a model has written, such as DIR/text/written of decodery train draft, or leave "
            "masked out"
        )
    original = transformable(target.model)
    remade = Remade(original, remaking)
    learned = learn(remade, run, corpus, remaking)
    count = sum(each.numel() for each in remade.parameters.values())
    facts = {
        **run.facts,
        "made": repr(remaking) if isinstance(remaking, LoRARemaking) else _said(remaking),
        "recipe": asdict(recipe),
        "texts": len(corpus),
        "parameters": count,
        "best_step": learned.history.best_step,
    }
    found = adapter_of(remade, facts)
    # One that is masked is no model of its own, and is judged as it learned.
    after = remade.model if masked else tuned(original, found)
    scores = learned.held.report(learned.measured(after), {"without": learned.measured(original)})
    found = adapter_of(remade, facts | {"validation": scores})
    found.save(run.out / Adapter.FILE)
    return found


def adapter_of(remade: Remade, facts: dict[str, Any]) -> Adapter:
    """What the forms of a model have learned."""
    parts: dict[str, Columns | Thin] = {}
    for index, layer in enumerate(remade.model.weights.layers):
        for name in LINEARS:
            form = getattr(layer, name)
            if form.part is not None:
                kept = {key: each.detach().cpu() for key, each in form.part.tensors().items()}
                parts[f"layers.{index}.{name}"] = type(form.part)(**kept)
    return Adapter(parts, facts, remade.original.fingerprint)


def usage(adapter: Adapter) -> str:
    """The option that writes with an adapter."""
    if "masked=True" in adapter.facts["made"]:
        return "--search 'edge:adapter=THIS_FOLDER,scorer=...'"
    return "--logits-source adapter:file=THIS_FOLDER"


def _learn(run: Run, remaking: S2FTRemaking | LoRARemaking) -> dict[str, Any]:
    transformable(run.loaded.model)
    run.made = train_adapter(run, cut_texts(run), remaking)
    found: dict[str, Any] = run.made.facts["validation"]
    return found


def _ready(run: Run) -> str:
    return f"The adapter is ready: {usage(run.made).replace('THIS_FOLDER', str(run.out))}"


class ImitatedFiles(CutFiles):
    """Texts whose writer an adapter may learn to imitate."""

    NOTE = f"""{CutFiles.NOTE}

    With one folder of texts that another model wrote, such as DIR/text/written of `decodery train draft`, MODEL learns
    to imitate the other model, as a draft model should."""


_DATA = (ImitatedFiles(), CopyRecipe(500, 1, 2e-4))


@kind(
    _ready, (*_DATA, S2FTRemaking()), "notes.txt --out adapter", model="to tune", file=Adapter.FILE, without=("config",)
)
def _s2ft(run: Run) -> Mapping[str, Any]:
    """Train an S2FT adapter of MODEL on FILES: a few heads and channels."""
    return _learn(run, replace(run.of(S2FTRemaking), config=run.loaded.model.config, seed=run.seed))


@kind(_ready, (*_DATA, LoRARemaking()), "notes.txt --rank 8 --out adapter", model="to tune", file=Adapter.FILE)
def _lora(run: Run) -> Mapping[str, Any]:
    """Train a LoRA adapter of MODEL on FILES."""
    return _learn(run, run.of(LoRARemaking))


def _said(remaking: S2FTRemaking) -> str:
    return f"S2FT of {remaking.heads:g} of the heads and {remaking.channels:g} of the channels, seed {remaking.seed}"
