"""Hyperfitting: a model that knows a few texts by heart writes longer and more varied texts, greedily.

The Hyperfitting Phenomenon: Sharpening and Stabilizing LLMs for Open-Ended Text Generation (2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from decodery.compression.base import reported, transformable
from decodery.compression.each_linear import Made, size_of
from decodery.compression.folder import write
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.sampling.no_citation import Citations
from decodery.sampling.sampler import Sampler

from .corpus import Corpus, TrainingText
from .held_out import HeldOut, Measured
from .kind import COUNT, NON_NEGATIVE, Bounded, Run, bounded, kind, option
from .kind_data import CutFiles, cut_texts
from .loop import History, batches, even_plan, train
from .remade import Remade, Remaking, TrainedForm, TrainingProgress
from .training_batch import distance, predictions, whole_batch

_HELD, _CONTEXT, _LAST = 16, 32, 96
"""Texts held out, how much of each is a context to write from, and of what is written the last so many tokens count."""


@dataclass(frozen=True)
class WholeRemaking(Remaking):
    """All of a model learns, its table of tokens too."""

    @property
    def tables(self) -> bool:
        return True

    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        return WholeLinear(whole)


class WholeLinear(TrainedForm):
    """A linear layer that learns as it is."""

    def __init__(self, whole: Dense) -> None:
        self.whole = whole

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.whole.tensors()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.whole.weight, self.whole.bias)

    def made(self, itemsize: int) -> Made:
        return Made(self.whole, size_of(self.whole))


@dataclass(frozen=True)
class HyperfitRecipe(Bounded):
    """Settings of hyperfitting.

    The paper takes 2,000 texts of 256 tokens, 20 epochs and a learning rate of 1e-6; fewer of them take a larger one.
    """

    texts: int = bounded(64, COUNT, "Number of text pieces to learn.")
    epochs: int = option(20, "Maximum number of epochs.")
    batch: int = 8
    lr: float = option(1e-5, "Learning rate.")
    enough: float = bounded(0.3, NON_NEGATIVE, "Stop below this loss.")
    written: int = bounded(256, COUNT, "Tokens written from each context of the evaluation.")
    seed: int = option(0, "Random seed of the choice and order of text pieces.")


def hyperfit(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Tune all of a model on a few texts until it knows them.

    Beside the model lie the texts, for the processor `no-citation`.

    Returns:
        A report (`HeldOut.report`) of what `judged` says of held-out texts, which chose nothing: of the model after and
        before, and of one that was tuned on texts whose tokens were shuffled.
    """
    target, out, recipe = run.loaded, run.out, run.of(HyperfitRecipe)
    original = transformable(target.model)
    order = np.random.default_rng(recipe.seed).permutation(len(corpus)).tolist()
    whole = [number for number in order if len(corpus[number].tokens) > _CONTEXT]
    chosen, held = whole[: recipe.texts], whole[recipe.texts : recipe.texts + _HELD]
    if len(held) < 2:
        raise SettingsError(
            f"the files hold {len(whole)} texts of more than {_CONTEXT} tokens, and some beyond the {recipe.texts} "
            "that are learned must be held out: give longer files, or learn fewer texts"
        )
    learned, others = ([corpus[number] for number in some] for some in (chosen, held))
    batch = batches(len(learned), recipe.batch, recipe.seed)
    per_epoch = -(-len(learned) // recipe.batch)

    def trained(texts: Sequence[TrainingText], steps: int, name: str, what: str) -> tuple[Remade, History]:
        remade = Remade(original, WholeRemaking())

        def loss_of(some: Sequence[TrainingText]) -> torch.Tensor:
            taught = whole_batch(some, remade.model)
            return distance(predictions(remade.model, taught), taught)

        history = train(
            remade.parameters,
            lambda step: loss_of([texts[each] for each in batch(step)]),
            # As the released script, which bounds no gradient.
            even_plan(steps, recipe.lr, validate_every=per_epoch),
            out / name,
            validate=lambda: {"known": float(loss_of(texts[: 2 * _HELD])), "held out": float(loss_of(others))},
            # What was held out becomes less likely, which is as it should be.
            metric="known",
            enough=lambda values: values["known"] < recipe.enough,
            settings={"recipe": asdict(recipe), "corpus": corpus.facts, "target": target.name},
            progress=run.progress,
            what=what,
        )
        return remade, history

    remade, history = trained(learned, recipe.epochs * per_epoch, "training", "hyperfitting")
    mixed, _ = trained([_mixed(each) for each in learned], history.step, "training/control", "training the control")
    change, known = remade.change(), HeldOut[int]([], list(range(len(others))), corpus.prompts(held))

    def tested(model: Transformer) -> Measured:
        scores = judged(model, [text.tokens for text in others], recipe.written)
        return known.measured(lambda some: mean_of([scores[number] for number in some]), "ttr")

    after = tested(change.model)
    after["known"] = history.metrics[str(history.best_step)]["known"]
    report = known.report(after, {"before": tested(original)}, control=tested(mixed.change().model))
    write(out, change.model, reported(original, [(f"{recipe}", change)]), target)
    Citations.of([text.tokens for text in learned]).save(out / Citations.FILE)
    return report


def _mixed(text: TrainingText) -> TrainingText:
    """A text with its tokens in a random order."""
    return replace(text, tokens=np.random.default_rng(0).permutation(text.tokens))


@torch.no_grad()
def judged(model: Transformer, texts: Sequence[np.ndarray], written: int) -> list[dict[str, float]]:
    """Loss, entropy and distinct tokens of a model, of each text.

    Loss: mean cross-entropy of the text [n] int32. Entropy: of its predictions there, in nats per token. Distinct
    tokens (ttr): of its greedy continuation, as a share of the last 96.
    """
    engine, greedy = Engine(model), Sampler.from_settings(temperature=0.0)
    found = [engine.submit(Request(text[:_CONTEXT].tolist(), max_new_tokens=written, sampler=greedy)) for text in texts]
    engine.run(found)
    rows = []
    for text, seq in zip(texts, found, strict=True):
        laws = model.forward(Batch([Segment(np.arange(len(text)), tokens=text.astype(np.int64))])).logits.double()
        laws = laws.log_softmax(dim=-1)[:-1]
        likely = laws.gather(1, torch.from_numpy(text[1:].astype(np.int64)).to(laws.device)[:, None])
        entropy, end = -(laws.exp() * laws.clamp(min=-1e4)).sum(dim=-1), seq.generated[-_LAST:]
        rows.append({"loss": -float(likely.mean()), "entropy": float(entropy.mean()), "ttr": len(set(end)) / len(end)})
    return rows


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over texts."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


@kind(
    "The model is ready: -m {out} --sampler no-citation:texts={out}",
    (CutFiles(length=128), HyperfitRecipe()),
    "notes.txt --out tuned",
    model="to tune",
    file=DESCRIPTION,
)
def _hyperfit(run: Run) -> Mapping[str, Any]:
    """Overfit a copy of MODEL on a few pieces of FILES, for greedy decoding: -m DIR.

    Greedy texts become longer and more varied; held-out texts become less likely. DIR also holds the pieces:
    --sampler no-citation:texts=DIR keeps the model from citing them.
    """
    return hyperfit(run, cut_texts(run))
