"""Learn which key-value heads need old tokens, as DuoAttention does: LServe's gates.

DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads (2024). Every head gives a mixture
of what it reads of everything and what it reads of first and last tokens alone; the shares are all that learns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from decodery.core.errors import PromptError
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.models.trained.head_gates import HeadGates

from .built_in import built_in_data
from .kind import COUNT, NON_NEGATIVE, Bounded, Run, bounded, kind, option
from .kind_data import TextFiles, shown
from .one_by_one import PartTrainee, train_beside
from .traced import TracedCache

WORDS = tuple(built_in_data("words of keys"))


@dataclass(frozen=True)
class GateRecipe(Bounded):
    """How gates learn.

    Attributes:
        price: Weight of the mean gate beside the relative change of the last hidden states at the answers.
    """

    steps: int = 150
    lr: float = 0.05
    sinks: int = bounded(4, NON_NEGATIVE, "First tokens that a streaming head reads.")
    recent: int = bounded(64, COUNT, "Recent tokens that a streaming head reads, the row itself among them.")
    price: float = bounded(0.05, NON_NEGATIVE)
    seed: int = option(0, "Random seed of the hidden keys and the order of texts.")


@dataclass(frozen=True, eq=False)
class Document:
    """A document whose answer needs old tokens.

    Attributes:
        answers: [m] ids.
    """

    tokens: np.ndarray  # [n] ids
    rows: np.ndarray  # [m], those that the answers follow

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def answers(self) -> np.ndarray:
        return self.tokens[self.rows + 1]


def hide_keys(tokenizer: Tokenizer, texts: Sequence[Sequence[int]], keys: int = 4, seed: int = 0) -> list[Document]:
    """Texts in which numbers are hidden, each asked for and answered at its end, in another order."""
    if not 1 <= keys <= len(WORDS) or any(len(text) <= keys for text in texts):
        raise PromptError(f"{keys} numbers cannot be hidden: give longer texts, and from 1 to {len(WORDS)} numbers")
    draw = random.Random(seed)
    return [_hidden(tokenizer, text, keys, draw) for text in texts]


def _hidden(tokenizer: Tokenizer, text: Sequence[int], keys: int, draw: random.Random) -> Document:
    encode = partial(tokenizer.encode, special=False)
    numbers = {word: f" {draw.randrange(10000, 100000)}" for word in draw.sample(WORDS, keys)}
    cuts = [0, *sorted(draw.sample(range(1, len(text)), keys)), len(text)]
    tokens: list[int] = []
    for first, last, (word, number) in zip(cuts, cuts[1:], numbers.items(), strict=False):
        tokens += [*text[first:last], *encode(f"\nThe secret number of {word} is{number}.\n")]
    tokens += text[cuts[-2] :]
    rows: list[int] = []
    for word in draw.sample(sorted(numbers), keys):
        tokens += encode(f"\nThe secret number of {word} is")
        answer = encode(numbers[word])
        rows += range(len(tokens) - 1, len(tokens) - 1 + len(answer))
        tokens += answer
    return Document(np.array(tokens, dtype=np.int64), np.array(rows, dtype=np.int64))


class Mixed(AttentionPolicy):
    """Attention as a mixture of full and windowed attention.

    Args:
        gates: [layers, kv_heads], how much of what each head gives is read of everything; the rest is of a window.
    """

    merges = True

    def __init__(self, gates: torch.Tensor, sinks: int, recent: int) -> None:
        self.gates, self.sinks, self.recent = gates, sinks, recent

    def merge(self, attention: Attention) -> torch.Tensor:
        weights, values = attention.weights, attention.values
        assert weights is not None
        at = torch.from_numpy(attention.segment.positions).to(weights.device)
        near = (at < self.sinks) | (at > at[:, None] - self.recent)
        streamed = weights * near
        streamed = streamed / streamed.sum(dim=-1, keepdim=True)
        share = self.gates[attention.layer].to(weights)[:, None, None, None]
        weights, streamed = (each.unflatten(0, (len(values), -1)) for each in (weights, streamed))
        mixed = share * weights + (1 - share) * streamed
        return torch.einsum("kgns,ksd->nkgd", mixed, values).flatten(1, 2)


class HeadGateTrainee(PartTrainee[Document, HeadGates, GateRecipe]):
    """Gates learn which heads the answers of documents need, for `lserve`: all of them are 1 at first."""

    NAME, EXAMPLES = "head gates", "documents"

    def __init__(self, target: LoadedModel, recipe: GateRecipe) -> None:
        super().__init__(target, recipe)
        shape = self.model.config.num_layers, self.model.config.num_kv_heads
        self.learns({"gates": torch.ones(shape, dtype=torch.float32, device="cpu")})
        self._full: dict[Document, torch.Tensor] = {}

    def states(self, document: Document, policy: AttentionPolicy | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden states [m, hidden] and logits [m, vocab] of the rows that the answers follow."""
        tokens = document.tokens[:-1]
        cache = TracedCache.empty(self.model, policy)
        segment = Segment(np.arange(len(tokens)), tokens, cache=cache, logit_rows=document.rows.tolist())
        scores = self.model.forward(Batch([segment]), taps=["final_norm"])
        return scores.hidden["final_norm"], scores.logits

    def mixed(self, gates: torch.Tensor) -> Mixed:
        return Mixed(gates, self.recipe.sinks, self.recipe.recent)

    def loss(self, example: Document, step: int | None = None) -> torch.Tensor:
        """What the gates change at the answers, and what they cost."""
        gates = self.tensors["gates"]
        with torch.no_grad():
            gates.clamp_(0, 1)
            if example not in self._full:
                self._full[example] = self.states(example, None)[0]
        full = self._full[example]
        found, _ = self.states(example, self.mixed(gates))
        return (found - full).square().mean() / full.square().mean() + self.recipe.price * gates.abs().mean()

    def data(self, examples: Sequence[Document]) -> object:
        return [[each.tokens.tolist(), each.rows.tolist()] for each in examples]

    def part(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any], examples: Sequence[Document]) -> HeadGates:
        return HeadGates(tensors["gates"].clamp(0, 1), facts, self.model.fingerprint)

    @torch.no_grad()
    def answered(self, documents: Sequence[Document], gates: torch.Tensor) -> float:
        """Cross-entropy of the answers in nats a token, under these gates [layers, kv_heads]."""
        found = [
            torch.nn.functional.cross_entropy(
                self.states(each, self.mixed(gates))[1], torch.from_numpy(each.answers).to(self.model.device)
            )
            for each in documents
        ]
        return float(torch.stack(found).mean())


@kind(
    "The gates are ready: --cache-policy lserve:gates={out}",
    (TextFiles(), GateRecipe()),
    "notes.txt --out gates",
    model="whose heads are classified",
    file=HeadGates.FILE,
)
def _lserve(run: Run) -> dict[str, Any]:
    """Train gates that tell which heads of MODEL need old tokens, for the policy lserve.

    The task is to find numbers that are hidden in text FILES. MODEL is read in floating point and does not
    change.
    """
    target, recipe = run.floating, run.of(GateRecipe)
    documents = hide_keys(target.tokenizer, run.of(TextFiles).pieces(target), seed=recipe.seed)
    return shown(train_beside(run, HeadGateTrainee(target, recipe), documents).facts)
