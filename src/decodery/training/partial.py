"""Train a partial attention on pairs of a source and what is to be written about it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import SettingsError
from decodery.llm.llm import LLM
from decodery.logits_sources.partial_attention import PartialTransformer, PartialWeights
from decodery.models.batch import Batch, Segment
from decodery.models.torch.transformer import Transformer

from .fitting import fit
from .held_out import HeldOut, hold_out
from .kind import ARGUMENT, NON_NEGATIVE, PLAIN, Bounded, Data, Run, bounded, kind, option
from .lines import read_texts
from .loop import TrainingPlan, batches, content

Pair = tuple[Ordered[int], Ordered[int]]
PARTIAL = "partial.safetensors"
_HELD = 10
"""One source in so many is held out with its pairs."""


def train_partial(run: Run, pairs: Ordered[Pair]) -> PartialWeights:
    """A second attention, trained on pairs (source ids, target ids), those of nine in ten sources.

    The loss is the cross-entropy of the targets. The model stays as it is. The facts say the cross-entropy of held-out
    targets, in nats per token, beside that of the model alone.
    """
    model, recipe = run.floating.model, run.of(PartialSettings)
    last = 1 if recipe.last is None else recipe.last
    if not isinstance(model, Transformer) or not 1 <= last <= model.config.num_layers:
        raise SettingsError("partial attention needs one of this package's own models, and from 1 to all of its layers")
    sources = [tuple(source) for source, _ in pairs]
    split = hold_out(sources, _HELD)
    learned, held = ([pairs[number] for number in part] for part in split)
    known = HeldOut.of(held, [sources[number] for number in split[1]], "sources")
    if len(pairs) < _HELD or not held:
        raise SettingsError(f"partial attention learns from at least {_HELD} pairs of two sources, not {len(pairs)}")
    weights = PartialWeights.initial(model, recipe.seed, last=recipe.last, reset=recipe.reset)
    chosen = batches(len(learned), recipe.batch, recipe.seed)
    fitted = fit(
        run,
        known,
        {f"partial.{name}": each for name, each in weights.tensors().items()},
        lambda step: pair_loss(model, weights, [learned[number] for number in chosen(step)], echo=recipe.echo),
        lambda some: {"loss": float(pair_loss(model, weights, some))},
        TrainingPlan(recipe.steps, lr=recipe.lr, validate_every=max(1, recipe.steps // 4)),
        weight=lambda pair: len(pair[1]),
        unit="pairs",
        baseline=("alone", lambda some: {"loss": float(pair_loss(model, None, some))}),
        settings={"recipe": asdict(recipe), "pairs": content([[*map(list, pair)] for pair in pairs])},
        what="training partial attention",
    )
    facts = fitted.facts(recipe, vocabulary=model.config.vocabulary, pairs=len(pairs))
    weights = replace(weights, facts=facts)
    weights.save(run.out / PARTIAL)
    return weights


def pair_loss(
    model: Transformer, weights: PartialWeights | None, pairs: Iterable[Pair], *, echo: float = 0.0
) -> torch.Tensor:
    """Mean cross-entropy in nats per target token.

    Args:
        echo: Times as much is added of the mean cross-entropy of source tokens at the rows that read them.
    """
    by_length: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_length.setdefault(len(pair[0]), []).append(pair)
    written, echoed = _Mean(), _Mean()
    for length, group in by_length.items():
        scorer = model if weights is None else PartialTransformer(model, weights, length)
        first = 0 if echo else length - 1
        texts = [np.array([*source, *target], dtype=np.int64) for source, target in group]
        segments = [
            Segment(np.arange(len(text) - 1), text[:-1], logit_rows=range(first, len(text) - 1)) for text in texts
        ]
        scores = scorer.forward(Batch(segments))
        for number, text in enumerate(texts):
            logits, ids = scores.of(number), torch.from_numpy(text).to(model.device)
            written.add(logits[length - 1 - first :], ids[length:])
            if echo:
                echoed.add(logits[:length], ids[:length])
    return written.value() + echo * echoed.value()


class _Mean:
    """A mean cross-entropy over several calls, 0 over none."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros((), dtype=torch.float32, device="cpu"), 0

    def add(self, logits: torch.Tensor, wanted: torch.Tensor) -> None:
        self.total = self.total + cross_entropy(logits, wanted, reduction="sum")
        self.count += len(wanted)

    def value(self) -> torch.Tensor:
        return self.total / max(1, self.count)


@dataclass(frozen=True)
class SourcePairs(Data):
    """Pairs of a source and what is written about it."""

    pairs: Path = field(default=Path(), metadata=ARGUMENT)
    apply_chat_template: bool = option(True, "The sources are plain text, without the chat template.", **PLAIN)

    def read(self) -> list[tuple[str, ...]]:
        """The pairs."""
        return read_texts(self.pairs, "source", "target")

    def check(self) -> None:
        self.read()


@dataclass(frozen=True)
class PartialSettings(Bounded):
    """How a second attention is trained."""

    last: int | None = option(None, "Add the second attention to the last N layers only; to all by default.")
    reset: bool = option(True, "Restart positions after the prompt.")
    echo: float = bounded(0.5, NON_NEGATIVE, "Weight of the auto-encoding loss of the prompt.")
    steps: int = 200
    batch: int = option(4, "Batch size in pairs.")
    lr: float = 1e-3
    seed: int = option(0, "Random seed of the initial weights and the order.")


@kind(
    f"The second attention is ready: --logits-source partial-attention:weights={{out}}/{PARTIAL}",
    (SourcePairs(), PartialSettings()),
    "pairs.jsonl --out partial",
    model="to train for",
)
def _partial(run: Run) -> dict[str, Any]:
    """Train a second attention that reads the prompt alone, for the source partial-attention.

    PAIRS holds one JSON object a line: {"source": ..., "target": ...}. The model does not change; load it in
    floating point to use the attention. One source in ten is held out.
    """
    given, lm = run.of(SourcePairs), LLM(run.floating)
    texts = [
        (
            lm.encode(source, apply_chat_template=given.apply_chat_template),
            [*lm.tokenizer.encode(target, special=False), *lm.tokenizer.eos_ids[:1]],
        )
        for source, target in given.read()
    ]
    return dict(train_partial(run, texts).facts["validation"])
