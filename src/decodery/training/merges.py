"""Train what makes embeddings of merged tokens: the model should go on after a shorter prompt as after the whole one.

Retrofitting Large Language Models with Dynamic Tokenization (2024), whose networks come from zero-shot tokenizer
transfer; this one is a small residual beside the mean, and the model itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decodery.core.noise import nth_seed
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.load import LoadedModel
from decodery.models.trained.merge_nets import MergeNet
from decodery.models.trained.merges import Merged, merged
from decodery.step.dynamic_tokens import made

from .kind import COUNT, SHARE, Bounded, Run, bounded, kind, option
from .kind_data import TextFiles
from .one_by_one import PartTrainee, from_pieces
from .traced import TracedCache


@dataclass(frozen=True)
class MergeRecipe(Bounded):
    """How it learns.

    Attributes:
        most: Maximum share of prompt rows to merge. Held-out texts are judged at two thirds of it.
    """

    steps: int = 300
    lr: float = 1e-3
    width: int = bounded(512, COUNT, "Width of the network.")
    most: float = bounded(0.3, SHARE)
    seed: int = option(0, "Random seed of the initial weights, and of the order and merges of texts.")


class MergeTrainee(PartTrainee[Sequence[int], MergeNet, MergeRecipe]):
    """A network learns, for `step.dynamic_tokens.dynamic`."""

    NAME, PART = "merged tokens", MergeNet
    least = 16

    def __init__(self, target: LoadedModel, recipe: MergeRecipe) -> None:
        super().__init__(target, recipe)
        self.tokenizer = target.tokenizer
        self.learns(MergeNet.initial(self.model.config.hidden_size, recipe.width, recipe.seed).tensors)

    def shortened(self, tokens: Sequence[int], step: int | None = None) -> Merged:
        """The first half of a text.

        Args:
            step: Of training, None for one that is held out.
        """
        share = self.recipe.most * 2 / 3
        if step is not None:
            share = self.recipe.most * float(np.random.default_rng(nth_seed(self.recipe.seed, step)).random())
        return merged([tokens[: len(tokens) // 2]], self.tokenizer, shorter=share, within="sentence")[0]

    def laws(self, rows: torch.Tensor, behind: int) -> torch.Tensor:
        """[after, vocab] log-probabilities of what stands at the end of these rows [n, hidden]."""
        n = len(rows)
        segment = Segment(
            np.arange(n), states=rows, cache=TracedCache.empty(self.model), logit_rows=range(n - behind - 1, n - 1)
        )
        return self.model.forward(Batch([segment])).logits.float().log_softmax(dim=-1)

    def loss(self, example: Sequence[int], step: int | None = None, net: MergeNet | None = None) -> torch.Tensor:
        """KL(after the whole prompt || after the shorter one) in nats a token."""
        text, behind = self.shortened(example, step), example[len(example) // 2 :]
        with torch.no_grad():
            whole = self.model.embed_tokens(torch.tensor(example, dtype=torch.int64, device=self.model.device))
            wanted = self.laws(whole, len(behind))
        rows = self.model.embed_tokens(torch.tensor([*text.ids, *behind], dtype=torch.int64, device=self.model.device))
        places = [place for place, (first, stop) in enumerate(text.spans) if stop - first > 1]
        if places:
            spans = [text.tokens[slice(*text.spans[place])] for place in places]
            found = made(self.model, spans, net or MergeNet(self.tensors))
            rows = rows.index_copy(0, torch.tensor(places, dtype=torch.int64, device=rows.device), found.to(rows))
        return (wanted.exp() * (wanted - self.laws(rows, len(behind)))).sum(dim=-1).mean()

    @torch.no_grad()
    def apart(self, texts: Sequence[Sequence[int]], net: MergeNet | None = None) -> float:
        """The mean loss of texts."""
        return float(torch.stack([self.loss(tokens, net=net) for tokens in texts]).mean())

    def about(self, tested: list[Sequence[int]]) -> dict[str, Any]:
        return {"mean": round(self.apart(tested, MergeNet.initial(self.model.config.hidden_size, 1)), 4)}


@kind(
    "The network is ready: MergeNet.load('{out}')",
    (TextFiles(), MergeRecipe()),
    "notes.txt --out merges",
    model="whose prompts become shorter",
    file=MergeNet.FILE,
)
def _merges(run: Run) -> Mapping[str, Any]:
    """Train embeddings of merged tokens, so that MODEL reads prompts in fewer rows.

    They learn from text FILES to continue a merged prompt as the whole one. MODEL is read in floating point and
    does not change.
    """
    return from_pieces(run, MergeTrainee, MergeRecipe)
