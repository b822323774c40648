"""Train a partial attention on pairs of a source and what is to be written about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.core.errors import PromptError, SettingsError
from decodery.llm.llm import LLM
from decodery.logits_sources.partial_attention import PartialTransformer, PartialWeights
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer

from .held_out import HeldOut
from .kind import Data, Kind, Run
from .kind_data import ARGUMENT, PLAIN
from .lines import read_json_lines
from .loop import History, TrainingPlan, batches, train

Pair = tuple[Ordered[int], Ordered[int]]
PARTIAL = "partial.safetensors"
_HELD = 10
"""One pair in so many is kept for validation."""


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """The pairs of a JSON Lines file: objects with the texts "source" and "target"."""
    pairs = []
    for number, entry in read_json_lines(path):
        found = [entry.get(name) for name in ("source", "target")] if isinstance(entry, dict) else [None]
        texts = [text for text in found if isinstance(text, str) and text]
        if len(texts) < 2:
            raise PromptError(f'line {number} of {path} is not an object with the texts "source" and "target"')
        pairs.append((texts[0], texts[1]))
    return pairs


def train_partial(
    model: Transformer,
    weights: PartialWeights,
    pairs: Ordered[Pair],
    held: Ordered[Pair],
    plan: TrainingPlan,
    out: Path,
    *,
    also: Mapping[str, torch.Tensor] | None = None,
    batch: int = 8,
    echo: float = 0.5,
    seed: int = 0,
    progress: Progress = silent,
) -> History:
    """Train `weights` in place on pairs (source ids, target ids), by the cross-entropy of the targets.

    Args:
        held: Pairs that decide which step was best, by their targets alone.
        out: The folder of the checkpoint, from which an interrupted run goes on.
        also: Further tensors to train, such as the model's own; by default the model stays as it is.
        echo: Weight of the source's auto-encoding: how badly its rows say the token they read.

    Raises:
        SettingsError: For nothing to learn from.
    """
    if not pairs or not held:
        raise SettingsError("partial attention needs pairs to train on and pairs to hold out")
    parameters = {f"partial.{name}": each for name, each in weights.tensors().items()} | dict(also or {})
    chosen = batches(len(pairs), batch, seed)
    return train(
        parameters,
        lambda step: pair_loss(model, weights, [pairs[number] for number in chosen(step)], echo=echo),
        *(plan, out),
        validate=lambda: {"loss": float(pair_loss(model, weights, held))},
        metric="loss",
        settings={"pairs": len(pairs), "batch": batch, "echo": echo, "seed": seed},
        progress=progress,
        what="training partial attention",
    )


def fit_partial(
    model: LanguageModel,
    pairs: Ordered[Pair],
    out: Path,
    *,
    steps: int,
    last: int | None = None,
    reset: bool = True,
    echo: float = 0.5,
    batch: int = 4,
    lr: float = 1e-3,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> PartialWeights:
    """A second attention for `model`, trained on nine in ten of `pairs` and left in the folder `out`.

    Interrupted, it goes on where it stopped.

    Args:
        facts: What else to write down beside it. Their "validation" then holds the cross-entropy of the targets held
            out, in nats per token, and that of the model alone.
    """
    if not isinstance(model, Transformer) or not 1 <= (1 if last is None else last) <= model.config.num_layers:
        raise SettingsError("partial attention needs one of this package's own models, and from 1 to all of its layers")
    if not (echo >= 0 and lr > 0 and steps > 0 and batch > 0):
        raise SettingsError("partial attention needs steps, batch and lr above 0, and echo of at least 0")
    weights = PartialWeights.initial(model, seed, last=last, reset=reset)
    known = HeldOut.of(pairs[_HELD - 1 :: _HELD])
    learned = [pair for number, pair in enumerate(pairs) if number % _HELD != _HELD - 1]
    plan = TrainingPlan(steps, lr=lr, validate_every=max(1, steps // 4))
    history = train_partial(
        model,
        weights,
        learned,
        known.choosing,
        plan,
        out / "training",
        batch=batch,
        echo=echo,
        seed=seed,
        progress=progress,
    )

    def figures(of: PartialWeights | None) -> dict[str, Any]:
        with torch.no_grad():
            return known.measured(
                lambda some: {"loss": float(pair_loss(model, of, some))}, "loss", lambda pair: len(pair[1])
            )

    about = {
        "vocabulary": model.config.vocabulary,
        "pairs": len(pairs),
        "steps": steps,
        "best_step": history.best_step,
        "validation": known.report(figures(weights), {"alone": figures(None)}, "pairs"),
    }
    weights = replace(weights, facts=about | dict(facts or {}))
    weights.save(out / PARTIAL)
    return weights


def pair_loss(
    model: Transformer, weights: PartialWeights | None, pairs: Iterable[Pair], *, echo: float = 0.0
) -> torch.Tensor:
    """Mean cross-entropy in nats per target token.

    Args:
        weights: None for the model alone.
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
    """Pairs of a source and what is written about it.

    Attributes:
        pairs: The file of pairs.
        apply_chat_template: The sources are plain text, without the chat template.
    """

    NOTE = "Interrupt it with Ctrl-C: the same command continues."

    pairs: Path = field(default=Path(), metadata=ARGUMENT)
    apply_chat_template: bool = field(default=True, metadata=PLAIN)

    def check(self) -> None:
        read_pairs(self.pairs)


@dataclass(frozen=True)
class PartialSettings:
    """How a second attention is trained.

    Attributes:
        last: Add the second attention to the last N layers only; to all by default.
        reset: Restart positions after the prompt.
        echo: Weight of the auto-encoding loss of the prompt.
        batch: Batch size in pairs.
        seed: Random seed of the initial weights and the order.
    """

    last: int | None = None
    reset: bool = True
    echo: float = 0.5
    steps: int = 200
    batch: int = 4
    lr: float = 1e-3
    seed: int = 0


def _learn(run: Run) -> dict[str, Any]:
    given, lm = run.of(SourcePairs), LLM(run.load("float32"))
    texts = [
        (
            lm.encode(source, apply_chat_template=given.apply_chat_template),
            [*lm.tokenizer.encode(target, special=False), *lm.tokenizer.eos_ids[:1]],
        )
        for source, target in read_pairs(given.pairs)
    ]
    facts = {"model": lm.name, "command": run.command}
    settings = vars(run.of(PartialSettings))
    found = fit_partial(lm.model, texts, run.out, facts=facts, progress=run.progress, **settings)
    return dict(found.facts["validation"])


KINDS = {
    "partial": Kind(
        """Train a second attention that reads the prompt alone, for the source partial-attention.

        PAIRS holds one JSON object a line: {"source": ..., "target": ...}. The model does not change; load it in
        floating point to use the attention. One pair in ten is held out.""",
        _learn,
        f"The second attention is ready: --logits-source partial-attention:weights={{out}}/{PARTIAL}",
        (SourcePairs(), PartialSettings()),
        "pairs.jsonl --out partial",
        model="to train for",
    )
}
