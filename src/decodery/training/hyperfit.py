"""Hyperfitting: a model that knows a few texts by heart writes longer and more varied texts, greedily.

The Hyperfitting Phenomenon: Sharpening and Stabilizing LLMs for Open-Ended Text Generation (2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.sampling.no_citation import Citations
from decodery.sampling.sampler import Sampler

from .card import Card
from .corpus import Corpus, TrainingText
from .kind import Kind, Run
from .kind_data import CutFiles, cut_texts
from .loop import TrainingPlan, batches, train
from .remade import Remade, Remaking, TrainedForm, TrainingProgress, check_folder
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
class HyperfitRecipe:
    """Settings of hyperfitting.

    The paper takes 2,000 texts of 256 tokens, 20 epochs and a learning rate of 1e-6; fewer of them take a larger one.

    Attributes:
        texts: Number of text pieces to learn.
        epochs: Maximum number of epochs.
        lr: Learning rate.
        enough: Stop below this loss.
        written: Tokens written from each context of the evaluation.
        seed: Random seed of the choice and order of text pieces.
    """

    texts: int = 64
    epochs: int = 20
    batch: int = 8
    lr: float = 1e-5
    enough: float = 0.3
    written: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.texts, self.epochs, self.batch, self.written) < 1:
            raise SettingsError("hyperfitting needs texts, epochs, batch and written of at least 1")
        if not self.lr > 0 or not self.enough >= 0:
            raise SettingsError("hyperfitting needs an lr above 0 and an enough of at least 0")


def hyperfit(
    target: LoadedModel,
    corpus: Corpus,
    out: Path,
    *,
    recipe: HyperfitRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> dict[str, dict[str, float]]:
    """Tune all of a model on a few texts until it knows them, and leave it in the folder `out`.

    Beside the model lie the texts, for the processor `no-citation`. Returns what `judged` says of the model "before"
    and "after", of texts that were held out. Interrupted, it goes on from its last checkpoint in `out` when called
    again.

    Args:
        corpus: See `data.cut_files`.

    Raises:
        UnsupportedModel: For models that cannot be changed.
        SettingsError: For too few texts.
    """
    recipe = recipe or HyperfitRecipe()
    check_folder(out)
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
    remade = Remade(original, WholeRemaking())
    batch = batches(len(learned), recipe.batch, recipe.seed)

    def loss_of(texts: Sequence[TrainingText]) -> torch.Tensor:
        taught = whole_batch(texts, remade.model)
        return distance(predictions(remade.model, taught), taught)

    def validate() -> dict[str, float]:
        return {"known": float(loss_of(learned[: 2 * _HELD])), "held out": float(loss_of(others))}

    per_epoch = -(-len(learned) // recipe.batch)
    history = train(
        remade.parameters,
        lambda step: loss_of([learned[each] for each in batch(step)]),
        TrainingPlan(
            recipe.epochs * per_epoch,
            lr=recipe.lr,
            warmup=0.0,
            final=1.0,
            weight_decay=0.0,
            # Those of the released script, which bounds no gradient.
            betas=(0.9, 0.999),
            clip=math.inf,
            validate_every=per_epoch,
        ),
        out / "training",
        validate=validate,
        # What was held out becomes less likely, which is as it should be.
        metric="known",
        enough=lambda values: values["known"] < recipe.enough,
        settings={"recipe": asdict(recipe), "corpus": corpus.facts, "target": target.name},
        progress=progress,
        what="hyperfitting",
    )
    change = remade.change()
    scores = {
        name: judged(model, [text.tokens for text in others], recipe.written)
        for name, model in (("before", original), ("after", change.model))
    }
    scores["after"]["known"] = history.metrics[str(history.best_step)]["known"]
    write(out, change.model, reported(original, [(f"{recipe}", change)]), target)
    Citations.of([text.tokens for text in learned]).save(out / Citations.FILE)
    Card(
        f"{target.name}, hyperfitted",
        "-m THIS_FOLDER --sampler no-citation:texts=THIS_FOLDER",
        f"It was tuned on {recipe.texts} texts for {history.step} steps, and writes greedily. The sampler keeps it "
        "from "
        f"citing them. known: nats per token of {min(recipe.texts, 2 * _HELD)} of them; training ends early below "
        f"{recipe.enough:g}.",
        f"`{recipe}`",
        command,
        "On held-out texts",
        scores,
        "loss and entropy: nats per token; that the first rises is as it should be. ttr: distinct tokens as a share of "
        f"the last {_LAST} of greedy continuations.",
    ).write(out)
    return scores


@torch.no_grad()
def judged(model: Transformer, texts: Sequence[np.ndarray], written: int) -> dict[str, float]:
    """Loss, entropy and distinct tokens of a model.

    Loss: mean cross-entropy of texts [n] int32 each. Entropy: of its predictions there, in nats per token. Distinct
    tokens (ttr): of greedy continuations, as a share of the last 96.
    """
    losses, entropies = [], []
    for text in texts:
        laws = model.forward(Batch([Segment(np.arange(len(text)), tokens=text.astype(np.int64))])).logits.double()
        laws = laws.log_softmax(dim=-1)[:-1]
        losses.append(-laws.gather(1, torch.from_numpy(text[1:].astype(np.int64)).to(laws.device)[:, None]).mean())
        entropies.append(-(laws.exp() * laws.clamp(min=-1e4)).sum(dim=-1).mean())
    engine, greedy = Engine(model), Sampler.from_settings(temperature=0.0)
    found = [engine.submit(Request(text[:_CONTEXT].tolist(), max_new_tokens=written, sampler=greedy)) for text in texts]
    engine.run(found)
    ends = [seq.generated[-_LAST:] for seq in found]
    return {
        "loss": float(torch.stack(losses).mean()),
        "entropy": float(torch.stack(entropies).mean()),
        "ttr": float(np.mean([len(set(end)) / len(end) for end in ends])),
    }


def _learn(run: Run) -> dict[str, dict[str, float]]:
    loaded, corpus = run.loaded, cut_texts(run)
    return hyperfit(loaded, corpus, run.out, recipe=run.of(HyperfitRecipe), **run.how)


KINDS = {
    "hyperfit": Kind(
        """Overfit a copy of MODEL on a few pieces of FILES, for greedy decoding: -m DIR.

        Greedy texts become longer and more varied; held-out texts become less likely. DIR also holds the pieces:
        --sampler no-citation:texts=DIR keeps the model from citing them.""",
        _learn,
        "The model is ready: -m {out} --sampler no-citation:texts={out}",
        (CutFiles(length=128), HyperfitRecipe()),
        "notes.txt --out tuned",
        model="to tune",
        check=check_folder,
    )
}
