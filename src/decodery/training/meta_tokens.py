"""Train meta-tokens: soft tokens that look at a prompt as what will be written about it looks at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.meta_tokens import MetaTokens, feature, library, mixture

from .kind import COUNT, POSITIVE, Run, bounded, kind, option
from .kind_data import TextFiles
from .one_by_one import COLD, CoolingRecipe, PartTrainee, from_pieces
from .tensors import even
from .traced import TracedCache


@dataclass(frozen=True)
class MetaRecipe(CoolingRecipe):
    """How meta-tokens learn."""

    steps: int = 300
    lr: float = 1e-3
    library: int = bounded(32, COUNT, "Rows of the library.")
    tokens: int = bounded(8, COUNT, "Soft tokens of a prompt.")
    sparse: int = bounded(4, COUNT, "Rows of the library that a soft token mixes.")
    ahead: int = bounded(32, COUNT, "Tokens whose attention is the training target.")
    cold: float = bounded(0.3, POSITIVE, COLD)
    even: float = option(0.01, "Weight of the entropy of the mean mixture, so that all rows are used.")
    static: bool = option(False, "Train a control: the same tokens for every prompt.")
    seed: int = option(0, "Random seed of the initial tokens, their noise and the order of texts.")


class RecordedAttention(AttentionPolicy):
    """What rows of a pass attend to.

    Args:
        paid: By layer, what a pass's rows from `first` on pay to the first `n` slots [kv_heads, n], summing to 1.
    """

    observes = True

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first
        self.paid: dict[int, torch.Tensor] = {}

    def observe(self, attention: Attention) -> None:
        assert attention.weights is not None
        rows = attention.weights[:, self.first :, : self.n].unflatten(0, (len(attention.keys), -1))
        paid = rows.mean(dim=(1, 2))
        self.paid[attention.layer] = paid / paid.sum(dim=-1, keepdim=True)

    @property
    def found(self) -> torch.Tensor:
        """[layers, kv_heads, n]"""
        return torch.stack([self.paid[layer] for layer in sorted(self.paid)])


class MetaTokenTrainee(PartTrainee[Sequence[int], MetaTokens, MetaRecipe]):
    """Meta-tokens learn, for the cache policy `meta-soft`."""

    NAME, METRIC, WEIGHT_DECAY = "meta-tokens", "divergence", 0.01

    def __init__(self, target: LoadedModel, recipe: MetaRecipe) -> None:
        super().__init__(target, recipe)
        model = self.model
        if recipe.library > model.config.hidden_size:
            raise SettingsError(f"a library has at most {model.config.hidden_size} rows, as wide as the model is")
        size = float(model.weights.embedding.float().norm(dim=-1).mean()) * model.config.embedding_scale
        shape = recipe.library, recipe.tokens, recipe.sparse
        made = MetaTokens.initial(model.config, size, *shape, static=recipe.static, seed=recipe.seed)
        self.learns(made.tensors)
        self.least = recipe.ahead + 2

    @torch.no_grad()
    def example(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a text's end to the text before it [layers, kv_heads, n], with keys and values."""
        n, cache = len(tokens) - self.recipe.ahead, self.model.new_cache()
        cache.policy = watching = RecordedAttention(n, n)
        self.model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
        cache.keep(range(n))
        return watching.found, cache.data[:, :, :, :n]

    def mixed(self, tokens: Sequence[int], step: int | None = None) -> torch.Tensor:
        """[tokens, library] the mixture for the prompt of a text."""
        recipe = self.recipe
        prompt = torch.tensor(tokens[: len(tokens) - recipe.ahead], dtype=torch.int64, device=self.model.device)
        shown = feature(self.model.embed_tokens(prompt).float(), recipe.static)
        if step is None:
            return mixture(self.tensors, shown, recipe.sparse, None, 1.0)
        draws = torch.Generator().manual_seed(nth_seed(recipe.seed, step))
        drawn = even(draws, recipe.tokens, recipe.library).clamp(1e-6, 1 - 1e-6)
        noise = -(-drawn.log()).log().to(shown.device)
        return mixture(self.tensors, shown, recipe.sparse, noise, recipe.temperature(step))

    def divergence(self, tokens: Sequence[int], mixed: torch.Tensor) -> torch.Tensor:
        """KL(example || what the soft tokens pay) in nats, the mean over layers and key-value heads."""
        wanted, past = self.example(tokens)
        soft, n = mixed @ library(self.tensors), past.shape[3]
        cache = TracedCache(past)
        cache.policy = watching = RecordedAttention(n)
        positions = np.arange(n, n + len(soft))
        self.model.forward(Batch([Segment(positions, None, soft, cache=cache, logit_rows=[])]))
        return distance(wanted, watching.found)

    def loss(self, example: Sequence[int], step: int | None = None) -> torch.Tensor:
        mixed = self.mixed(example, step)
        mean = mixed.mean(dim=0).clamp_min(1e-9)
        return self.divergence(example, mixed) + self.recipe.even * (mean * mean.log()).sum()

    @torch.no_grad()
    def figures(self, examples: Sequence[Sequence[int]]) -> dict[str, float]:
        apart = [self.divergence(tokens, self.mixed(tokens)) for tokens in examples]
        return {"divergence": float(torch.stack(apart).mean())}

    def part(
        self, tensors: dict[str, torch.Tensor], facts: dict[str, Any], examples: Sequence[Sequence[int]]
    ) -> MetaTokens:
        return MetaTokens(tensors, self.recipe.sparse, self.recipe.static, facts, self.model.fingerprint)


def distance(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL(wanted || found) in nats of [layers, kv_heads, n], the mean over layers and heads."""
    wanted, found = wanted.clamp_min(1e-9), found.clamp_min(1e-9)
    return (wanted * (wanted.log() - found.log())).sum(dim=-1).mean()


@kind(
    "The meta-tokens are ready: --cache-policy meta-soft:trained={out}",
    (TextFiles(), MetaRecipe()),
    "notes.txt --out meta",
    model="whose prompts are read",
    file=MetaTokens.FILE,
)
def _meta_soft(run: Run) -> Mapping[str, Any]:
    """Train soft tokens that predict which prompt tokens MODEL will attend to, for the policy meta-soft.

    They learn from text FILES how the end of a piece attends to the rest. MODEL is read in floating point and does
    not change.
    """
    return from_pieces(run, MetaTokenTrainee, MetaRecipe)
