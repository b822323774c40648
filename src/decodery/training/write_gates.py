"""Train a write gate: which tokens of a text later ones can do without, as Dynamic-LLaVA's text side learns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.kv_cache.write_gate import looked_at
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.config import ModelConfig
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.write_gates import LEVELS, WriteGates, margin

from .kind import NON_NEGATIVE, POSITIVE, SHARE, Run, bounded, kind, option
from .kind_data import TextFiles
from .one_by_one import COLD, CoolingRecipe, PartTrainee, from_pieces
from .traced import TracedCache


@dataclass(frozen=True)
class WriteGateRecipe(CoolingRecipe):
    """How a gate learns."""

    steps: int = 300
    lr: float = 1e-3
    layer: int = bounded(2, NON_NEGATIVE, "Layer whose input the gate reads.")
    sizes: tuple[int, ...] = option((512, 256, 128), "Widths of the network between its layers.")
    prompt: float = bounded(0.25, SHARE, "Share of a text that is taken for a prompt and stored in full.")
    rate: float = bounded(0.5, SHARE, "Share of written tokens to store.")
    price: float = option(100.0, "Weight of the squared distance from that share, beside the divergence.")
    cold: float = bounded(0.1, POSITIVE, COLD)
    seed: int = option(0, "Random seed of the initial gate, its noise and the order of texts.")


class Admitted(AttentionPolicy):
    """Attention in which later rows read only admitted rows.

    Args:
        stored: [n] how much of each row, 0 or 1, later rows read from a layer on; a row reads itself.
    """

    merges = True

    def __init__(self, layer: int, stored: torch.Tensor | None = None) -> None:
        self.layer, self.stored = layer, stored

    def merge(self, attention: Attention) -> torch.Tensor:
        weights, context, values = attention.weights, attention.context, attention.values
        assert weights is not None and context is not None
        if attention.layer < self.layer or self.stored is None:
            return context
        own = torch.eye(len(self.stored), device=weights.device, dtype=torch.bool)
        read = weights * torch.where(own, 1.0, self.stored.to(weights))
        read = (read / read.sum(dim=-1, keepdim=True).clamp_min(1e-12)).unflatten(0, (len(values), -1))
        return torch.einsum("kgns,ksd->nkgd", read, values).flatten(1, 2)


class Choosing(Admitted):
    """Rows after the prompt are stored where their margin, with noise [n], is above 0.

    Gradients see how nearly so.

    Args:
        margins: [n], once they are known.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: WriteGateRecipe,
        tensors: dict[str, torch.Tensor],
        prompt: int,
        noise: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(recipe.layer)
        self.config, self.tensors, self.prompt = config, tensors, prompt
        self.noise, self.temperature = noise, temperature
        self.margins: torch.Tensor | None = None

    def select(self, attention: Attention) -> None:
        if attention.layer != self.layer:
            return
        # The layers below are as they are: nothing is learned through what is looked at.
        rows = looked_at(self.config, attention).detach().to(self.tensors["scale"])
        self.margins = margin(self.tensors, rows)
        noisy = self.margins if self.noise is None else self.margins + self.noise.to(rows)
        soft = torch.sigmoid(noisy / self.temperature)
        chosen = (noisy > 0).to(soft) + soft - soft.detach()
        behind = torch.from_numpy(attention.segment.positions >= self.prompt).to(rows.device)
        self.stored = torch.where(behind, chosen, 1.0)


class WriteGateTrainee(PartTrainee[Sequence[int], WriteGates, WriteGateRecipe]):
    """A gate learns, for the cache policy `write-gate`.

    It learns to leave the model's distribution as it is, where the paper trains the model along with it.
    """

    NAME, WEIGHT_DECAY, least = "write gates", 0.01, 8

    def __init__(self, target: LoadedModel, recipe: WriteGateRecipe) -> None:
        super().__init__(target, recipe)
        config = self.model.config
        if recipe.layer >= config.num_layers:
            raise SettingsError(f"the model has {config.num_layers} layers: let the gate look in one of them")
        self.learns(WriteGates.initial(config, recipe.layer, recipe.sizes, recipe.seed).tensors)
        self._full: dict[tuple[int, ...], torch.Tensor] = {}

    def prompt(self, tokens: Sequence[int]) -> int:
        return max(1, round(self.recipe.prompt * len(tokens)))

    def behind(self, tokens: Sequence[int], policy: AttentionPolicy | None) -> torch.Tensor:
        """Log-probabilities [m, vocab] of all rows after the prompt."""
        return self.model.project(self._states(tokens, policy)).log_softmax(dim=-1)

    @torch.no_grad()
    def whole(self, tokens: Sequence[int]) -> torch.Tensor:
        """`behind` where everything is stored. What is kept of a text is its last states, which are small."""
        if (key := tuple(tokens)) not in self._full:
            self._full[key] = self._states(tokens, None)
        return self.model.project(self._full[key]).log_softmax(dim=-1)

    def _states(self, tokens: Sequence[int], policy: AttentionPolicy | None) -> torch.Tensor:
        first, cache, last = self.prompt(tokens), TracedCache.empty(self.model, policy), self.model.config.num_layers
        segment = Segment(np.arange(len(tokens)), np.asarray(tokens), cache=cache, logit_rows=[])
        return self.model.final_norm(self.model.forward(Batch([segment]), taps=[last]).hidden[last][first:])

    def choosing(self, tokens: Sequence[int], step: int | None = None) -> Choosing:
        """Which tokens are stored, with or without training noise.

        Args:
            step: Of training, None for the choice without noise.
        """
        recipe, first = self.recipe, self.prompt(tokens)
        if step is None:
            return Choosing(self.model.config, recipe, self.tensors, first)
        draws = torch.Generator().manual_seed(nth_seed(recipe.seed, step))
        even = torch.rand(len(tokens), generator=draws, dtype=torch.float64, device="cpu").clamp(1e-6, 1 - 1e-6)
        return Choosing(self.model.config, recipe, self.tensors, first, torch.logit(even), recipe.temperature(step))

    def judged(self, tokens: Sequence[int], step: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Distance of a text without what is not stored, in nats per token, and the share stored."""
        full, policy = self.whole(tokens), self.choosing(tokens, step)
        found = self.behind(tokens, policy)
        assert policy.stored is not None
        return (full.exp() * (full - found)).sum(dim=-1).mean(), policy.stored[self.prompt(tokens) :].mean()

    def loss(self, example: Sequence[int], step: int | None = None) -> torch.Tensor:
        apart, stored = self.judged(example, step)
        return apart + self.recipe.price * (stored - self.recipe.rate) ** 2

    @torch.no_grad()
    def figures(self, examples: Sequence[Sequence[int]]) -> dict[str, float]:
        apart, stored = (torch.stack(each) for each in zip(*map(self.judged, examples), strict=True))
        loss = apart.mean() + self.recipe.price * (stored.mean() - self.recipe.rate) ** 2
        return {"loss": float(loss), "divergence": float(apart.mean()), "stored": float(stored.mean())}

    @torch.no_grad()
    def levels(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """[101] quantiles of the margins of what is after the prompts."""
        found = []
        for tokens in texts:
            policy = self.choosing(tokens)
            self.behind(tokens, policy)
            assert policy.margins is not None
            found.append(policy.margins[self.prompt(tokens) :])
        return torch.quantile(
            torch.cat(found).float().cpu(), torch.linspace(0, 1, LEVELS, dtype=torch.float32, device="cpu")
        )

    def part(
        self, tensors: dict[str, torch.Tensor], facts: dict[str, Any], examples: Sequence[Sequence[int]]
    ) -> WriteGates:
        return WriteGates(tensors, self.recipe.layer, self.levels(examples), facts, self.model.fingerprint)


@kind(
    "The gate is ready: --cache-policy write-gate:gate={out}",
    (TextFiles(), WriteGateRecipe()),
    "notes.txt --out gate",
    model="whose written tokens are judged",
    file=WriteGates.FILE,
)
def _write_gate(run: Run) -> Mapping[str, Any]:
    """Train a gate that decides which tokens MODEL need not store, on text FILES, for the policy write-gate.

    MODEL is read in floating point and does not change.
    """
    return from_pieces(run, WriteGateTrainee, WriteGateRecipe)
