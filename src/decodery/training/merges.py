"""Train what makes embeddings of merged tokens: the model should go on after a shorter prompt as after the whole one.

Retrofitting Large Language Models with Dynamic Tokenization (2024), whose networks come from zero-shot tokenizer
transfer; this one is a small residual beside the mean, and the model itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.noise import nth_seed
from decodery.models.batch import Batch, Segment
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.merge_nets import MergeNet
from decodery.models.trained.merges import Merged, merged
from decodery.step.dynamic_tokens import made

from .bounds import COUNT, SHARE, Bounded, bounded
from .kind import Kind, Run
from .kind_data import TextFiles, from_pieces
from .one_by_one import ExampleSplit, as_ids, kept
from .traced import TracedCache, differentiable

_LEAST = 16


@dataclass(frozen=True)
class MergeRecipe(Bounded):
    """How it learns.

    Attributes:
        width: Width of the network.
        most: Maximum share of prompt rows to merge. Held-out texts are judged at two thirds of it.
        seed: Random seed of the initial weights, and of the order and merges of texts.
    """

    steps: int = 300
    lr: float = 1e-3
    width: int = bounded(512, COUNT)
    most: float = bounded(0.3, SHARE)
    seed: int = 0


class MergeTrainee:
    """The model, which stays as it is, and the network that learns."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, recipe: MergeRecipe) -> None:
        self.model, self.tokenizer, self.recipe = model, tokenizer, recipe
        first = MergeNet.initial(model.config.hidden_size, recipe.width, recipe.seed)
        self.tensors = {name: each.to(model.device).requires_grad_(True) for name, each in first.tensors.items()}

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

    def loss(self, tokens: Sequence[int], step: int | None = None, net: MergeNet | None = None) -> torch.Tensor:
        """KL(after the whole prompt || after the shorter one) in nats a token."""
        text, behind = self.shortened(tokens, step), tokens[len(tokens) // 2 :]
        with torch.no_grad():
            whole = self.model.embed_tokens(torch.tensor(tokens, dtype=torch.int64, device=self.model.device))
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


def train_merges(run: Run, texts: Sequence[Sequence[int]]) -> MergeNet:
    """Train a network on `texts`, for `step.dynamic_tokens.dynamic`.

    One text in eight is held out, and the step with the least loss there is what remains.

    Raises:
        SettingsError: For a model that is not in floating point.
        PromptError: For too few or too short texts.
    """
    target, recipe = run.floating, run.of(MergeRecipe)
    trainee = MergeTrainee(differentiable(target.model, "merged tokens"), target.tokenizer, recipe)
    examples = ExampleSplit(texts, recipe, least=_LEAST)
    mean = trainee.apart(examples.known.tested, MergeNet.initial(target.model.config.hidden_size, 1))
    fitted = examples.learn(
        trainee.tensors,
        trainee.loss,
        lambda some: {"loss": trainee.apart(some)},
        run,
        data=as_ids(texts),
        what="training merged tokens",
    )
    facts = fitted.facts(recipe, texts=len(texts), mean=round(mean, 4))
    found = MergeNet(kept(trainee.tensors), facts, target.model.fingerprint)
    found.save(run.out / MergeNet.FILE)
    return found


KINDS = {
    "merges": Kind(
        """Train embeddings of merged tokens, so that MODEL reads prompts in fewer rows.

        They learn from text FILES to continue a merged prompt as the whole one. MODEL is read in floating point and
        does not change. Interrupt it with Ctrl-C: the same command continues.""",
        from_pieces(train_merges),
        "The network is ready: MergeNet.load('{out}')",
        (TextFiles(), MergeRecipe()),
        "notes.txt --out merges",
        model="whose prompts become shorter",
        file=MergeNet.FILE,
    )
}
