"""Train a coprocessor: what a model is to be given after a prompt so that it foresees what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.noise import nth_seed
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.coprocessors import CoprocessorWeights, adapted, latents

from .kind import COUNT, Bounded, Run, bounded, kind, option
from .kind_data import TextFiles
from .one_by_one import PartTrainee, from_pieces
from .traced import TracedCache


@dataclass(frozen=True)
class CoprocessorRecipe(Bounded):
    """How a coprocessor learns."""

    steps: int = 300
    lr: float = 2e-3
    latents: int = bounded(8, COUNT, "Entries written after a prompt.")
    ahead: int = bounded(16, COUNT, "Tokens after a prompt to predict.")
    rank: int = bounded(16, COUNT, "Rank of the adapters.")
    static: bool = option(False, "Train a control: the same entries for every prompt.")
    seed: int = option(0, "Random seed of the initial weights, and of the order and positions of texts.")


class CoprocessorTrainee(PartTrainee[Sequence[int], CoprocessorWeights, CoprocessorRecipe]):
    """A coprocessor learns, for the cache policy `coprocessor`.

    Each step reads a text up to one place without gradients and learns there, where the paper learns at many places of
    a text at once.
    """

    NAME, PART = "coprocessors", CoprocessorWeights

    def __init__(self, target: LoadedModel, recipe: CoprocessorRecipe) -> None:
        super().__init__(target, recipe)
        model = self.model
        draws = torch.Generator().manual_seed(recipe.seed)
        picked = torch.randint(model.vocab_size, (recipe.latents,), generator=draws, device="cpu")
        begin = model.embed_tokens(picked.to(model.device)).detach().float().cpu()
        made = CoprocessorWeights.initial(model.config, begin, recipe.rank, recipe.static, recipe.seed)
        self.learns(made.tensors)
        self.least = recipe.ahead + 2

    def prompt(self, tokens: Sequence[int], step: int | None = None) -> int:
        """How many tokens stand before the latents: some from a half on; half of the text outside of training."""
        least, most = len(tokens) // 2, len(tokens) - self.recipe.ahead - 1
        if step is None:
            return min(least, most)
        return int(np.random.default_rng(nth_seed(self.recipe.seed, step)).integers(min(least, most), most + 1))

    @torch.no_grad()
    def past(self, tokens: Sequence[int]) -> torch.Tensor:
        """Keys and values [layers, 2, kv_heads, n, head_dim] of a prompt."""
        cache = self.model.new_cache()
        self.model.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
        cache.keep(range(len(tokens)))
        return cache.data[:, :, :, : len(tokens)]

    def made(self, past: torch.Tensor) -> torch.Tensor:
        """[latents, hidden] what is given to the model after this past."""
        if self.recipe.static:
            return latents(self.tensors, None)
        n, last = past.shape[3], self.model.config.num_layers
        soft = Segment(
            *(np.arange(n, n + self.recipe.latents), None, self.tensors["soft"]),
            cache=TracedCache(past),
            logit_rows=[],
            interventions=adapted(self.tensors),
        )
        return latents(self.tensors, self.model.forward(Batch([soft]), taps=[last]).hidden[last])

    def nll(self, tokens: Sequence[int], prompt: int, given: torch.Tensor | None, past: torch.Tensor) -> torch.Tensor:
        """[ahead] nats of the tokens after a prompt.

        Args:
            given: [m, hidden] embeddings before the first of them.
        """
        ahead = self.recipe.ahead
        ids = torch.tensor(tokens[prompt - 1 : prompt + ahead], dtype=torch.int64, device=self.model.device)
        rows = self.model.embed_tokens(ids[:-1])
        if given is None:
            # The prompt's last token gives the first one after it.
            start, past = prompt - 1, past[:, :, :, :-1]
        else:
            start, rows = prompt, torch.cat((given.to(rows), rows[1:]))
        positions, logit_rows = start + np.arange(len(rows)), range(len(rows) - ahead, len(rows))
        segment = Segment(positions, None, rows, cache=TracedCache(past), logit_rows=logit_rows)
        return cross_entropy(self.model.forward(Batch([segment])).logits, ids[1:], reduction="none")

    def loss(self, example: Sequence[int], step: int | None = None) -> torch.Tensor:
        prompt = self.prompt(example, step)
        past = self.past(example[:prompt])
        return self.nll(example, prompt, self.made(past), past).mean()

    def about(self, tested: list[Sequence[int]]) -> dict[str, Any]:
        by_place = {name: self.foreseen(tested, name == "alone").tolist() for name in ("alone", "trained")}
        return {f"nats by place, {name}": [round(each, 4) for each in nats] for name, nats in by_place.items()}

    @torch.no_grad()
    def foreseen(self, texts: Sequence[Sequence[int]], alone: bool = False) -> torch.Tensor:
        """[ahead] mean nats by how far ahead a token is."""
        found = []
        for tokens in texts:
            prompt = self.prompt(tokens)
            past = self.past(tokens[:prompt])
            found.append(self.nll(tokens, prompt, None if alone else self.made(past), past))
        return torch.stack(found).mean(dim=0)


@kind(
    "The coprocessor is ready: --cache-policy coprocessor:trained={out}",
    (TextFiles(), CoprocessorRecipe()),
    "notes.txt --out coprocessor",
    model="to help",
    file=CoprocessorWeights.FILE,
)
def _coprocessor(run: Run) -> Mapping[str, Any]:
    """Train adapters that let MODEL add helpful cache entries after a prompt, for the policy coprocessor.

    Text FILES are the training data. MODEL is read in floating point and does not change.
    """
    return from_pieces(run, CoprocessorTrainee, CoprocessorRecipe)
