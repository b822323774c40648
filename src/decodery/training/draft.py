"""Train a small draft model for a target: FastDraft's recipe, scaled to minutes on a CPU.

FastDraft: How to Train Your Draft (2024) shrinks the target's own kind of block, pre-trains it on plain text and aligns
it with text that the target has written. Here tokens that the target rarely writes lose their row in embedding and
head, and every matrix begins as a part of the target's, because minutes are too short to learn words from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.config import ModelConfig
from decodery.models.loaders import fused
from decodery.models.loaders.description import Description
from decodery.models.loaders.drafts import DESCRIPTION, TOKENIZER, WEIGHTS
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, replacing, silent, write_text
from decodery.models.torch.transformer import Transformer

from .card import check_folder
from .cut import DraftShape, cut_draft, keep_tokens, parameters, quantized
from .data import Corpus, TrainingText
from .held_out import HeldOut, Measured
from .kind import Run, kind, option
from .kind_data import OwnTexts, cut_texts, own_texts
from .loop import History, TrainingPlan, batches, train
from .training_batch import TrainingBatch, distance, judged, predictions, training_batch


def check_target(target: LoadedModel) -> Transformer:
    """The model of `target`."""
    if not isinstance(target.model, Transformer):
        raise SettingsError(
            f"{target.name} runs through transformers, and a draft is cut only from models that this package runs "
            "itself: draft with auto, or with a smaller model of the same tokenizer, as in draft-model:model=NAME"
        )
    if target.model.config.experts:
        raise SettingsError(
            f"{target.name} has layers of many experts, of which no draft can be cut: use another model"
        )
    if not target.model.config.usual:
        raise SettingsError(
            f"{target.name} has layers of another kind ({target.model.config.family}), of which no draft can be cut: "
            "draft with auto, or with a smaller model of the same tokenizer, as in draft-model:model=NAME"
        )
    return target.model


def train_draft(
    target: LoadedModel,
    corpus: Corpus,
    out: Path,
    *,
    shape: DraftShape | None = None,
    epochs: float = 4.0,
    plan: TrainingPlan | None = None,
    pretraining: Corpus | None = None,
    batch: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a draft model for `target` on text it wrote and write it to `out`, ready to be loaded.

    Returns what `judged` says of the finished, quantized draft on held-out texts that chose nothing, with an interval.
    Interrupted, it goes on from its last checkpoint in `out` when called again.

    Args:
        corpus: See `data.write_texts`, of which every twentieth text is held out.
        plan: None for one of `epochs` over the corpus.
        pretraining: Plain text to begin with, once over.
    """
    shape = shape or DraftShape()
    check_folder(out, DESCRIPTION)
    model = check_target(target)
    learned, held = corpus.split_for(model.vocab_size, target.name)
    kept = keep_tokens((corpus[number] for number in learned), shape.tokens, model, model.config.eos_ids)
    draft = cut_draft(model, shape, kept)
    known = HeldOut.of([corpus[number] for number in held[:64]], corpus.prompts(held[:64]))
    student = DraftTraining(draft, kept.ids, known.choosing, progress)
    facts: dict[str, object] = {"shape": asdict(shape), "target": target.name, "dtype": target.dtype}

    def measured(of: Transformer) -> Measured:
        """What a draft comes to on texts that chose nothing."""
        assert of.weights.kept is not None
        place, own = student.place, of.weights.kept
        return known.measured(
            lambda texts: judged(of, training_batch(texts, own, place)), "agreement", lambda text: text.taught
        )

    def stage(what: str, texts: Corpus, numbers: Sequence[int], plan: TrainingPlan, folder: str) -> None:
        order = batches(len(numbers), batch, seed)
        student.stage(
            what,
            lambda step: training_batch([texts[numbers[each]] for each in order(step)], kept, student.place),
            lambda: judged(draft, student.validation),
            plan,
            out / "training" / folder,
            {**facts, "corpus": texts.facts, "texts": len(numbers), "batch": batch, "seed": seed},
        )

    before = measured(draft)
    if pretraining is not None:
        numbers, _ = pretraining.split()
        stage("pre-training", pretraining, numbers, TrainingPlan(max(1, len(numbers) // batch), lr=2e-3), "text")
        facts["pretraining"] = pretraining.facts
    stage("aligning", corpus, learned, plan or TrainingPlan(max(1, round(epochs * len(learned) / batch))), "alignment")
    finished = quantized(draft)
    report = known.report(measured(finished), {"untrained": before})
    write_draft(finished, target, out)
    return report


class DraftTraining:
    """A draft that is taught in stages.

    Attributes:
        place: [vocab], the output of a token, -1 for those without.
        validation: What held-out texts teach.
    """

    def __init__(
        self, draft: Transformer, outputs: torch.Tensor, held: Sequence[TrainingText], progress: Progress
    ) -> None:
        assert draft.weights.kept is not None
        self.draft, self.kept, self.progress = draft, draft.weights.kept, progress
        self.place = np.full(draft.vocab_size, -1)
        self.place[outputs.cpu().numpy()] = np.arange(len(outputs))
        self.validation = training_batch(held, self.kept, self.place)
        temper(draft, self.validation)
        self.parameters = parameters(draft)
        # Products in bfloat16 where the processor computes them, which is twice as fast; the weights stay float32.
        self.fast = choose_dtype("auto", "bfloat16", draft.device) == "bfloat16"

    def stage(
        self,
        what: str,
        taught: Callable[[int], TrainingBatch],
        validate: Callable[[], Mapping[str, float]],
        plan: TrainingPlan,
        out: Path,
        settings: Mapping[str, object],
    ) -> History:
        """Let the draft learn what is taught in each step, and leave it as it was best."""

        def loss(step: int) -> torch.Tensor:
            batch = taught(step)
            with torch.autocast(self.draft.device.type, dtype=torch.bfloat16, enabled=self.fast):
                return distance(predictions(self.draft, batch), batch)

        how: dict[str, Any] = {"settings": settings, "progress": self.progress, "what": what}
        return train(self.parameters, loss, plan, out, validate=validate, metric="cross_entropy", **how)


def temper(draft: Transformer, taught: TrainingBatch) -> None:
    """Begin no surer than pays: what few layers say in place of many, the head reads with false certainty."""
    norm = draft.weights.norm.clone()
    tried = []
    for halvings in range(8):
        draft.weights.norm.copy_(norm * 0.5**halvings)
        tried.append(judged(draft, taught)["cross_entropy"])
    draft.weights.norm.copy_(norm * 0.5 ** int(np.argmin(tried)))


def write_draft(draft: Transformer, target: LoadedModel, out: Path) -> None:
    """Write a quantized draft model with tokenizer and chat template to the folder `out`."""
    fused.save(out / WEIGHTS, draft.weights)
    with replacing(out / TOKENIZER) as temporary:
        target.tokenizer.backend.save(str(temporary), pretty=False)
    special, template = (
        ({}, None) if target.chat_template is None else (target.chat_template.special, target.chat_template.source)
    )
    description = Description(draft.config, "int8", special, template, target.name)
    write_text(out / DESCRIPTION, description.text())


@dataclass(frozen=True)
class DraftSettings:
    """What a draft model is like, and how it is trained."""

    pretrain: tuple[Path, ...] = option((), "A text file to learn from first. Repeatable.")
    epochs: float = 4.0
    layers: int = option(1, "Layers of the draft model.")
    exits: tuple[int, ...] = option((), "Layers after which the draft model can exit.")
    inner: int | None = option(None, "Width of the MLP of a layer; by default at most that of MODEL.")
    tokens: int = option(6144, "Vocabulary size of the draft model.")
    window: int = option(128, "Tokens that attention sees.")
    seed: int = option(0, "Random seed of texts and training.")

    def shape(self, config: ModelConfig) -> DraftShape:
        """The shape that fits a model of this configuration."""
        usual = config.intermediate_size if self.exits else min(DraftShape.inner, config.intermediate_size)
        inner, layers = usual if self.inner is None else self.inner, max(self.exits, default=self.layers)
        return DraftShape(layers, inner, self.tokens, self.window, self.exits).check(config)


@kind(
    "the draft is ready: --drafter draft-model:model={out}",
    (OwnTexts(), DraftSettings()),
    "-m smollm2 --texts 2000 --out draft",
    model="to draft for",
    file=DESCRIPTION,
    without=("exits",),
)
def _draft(run: Run) -> Mapping[str, Any]:
    """Train a small draft model of MODEL, for --drafter draft-model:model=DIR.

    MODEL must be one that decodery runs itself. 5 % of the texts are held out.
    """
    given = run.of(DraftSettings)
    shape = given.shape(check_target(run.loaded).config)
    plain = cut_texts(run, given.pretrain, "text/plain") if given.pretrain else None
    corpus = own_texts(run)
    written = sum(len(text.tokens) - text.written for text in corpus)
    run.say(f"the draft learns {given.epochs:g} times from the {written:,} tokens of {len(corpus):,} texts")
    return train_draft(
        run.loaded,
        corpus,
        run.out,
        shape=shape,
        epochs=given.epochs,
        pretraining=plain,
        seed=given.seed,
        progress=run.progress,
    )


@kind(
    "the draft is ready: --drafter nested:model={out}",
    (OwnTexts(), DraftSettings(exits=(4, 8, 12))),
    "-m smollm2 --exits 4/8/12 --out nested",
    model="to draft for",
    file=DESCRIPTION,
    without=("pretrain", "layers", "window"),
)
def _nested(run: Run) -> Mapping[str, Any]:
    """Train one draft model with exits at several depths, for --drafter nested:model=DIR.

    It starts as the first layers of MODEL. All exits are trained together under one norm and head (sorted
    fine-tuning). The draft model works for every model with the vocabulary of MODEL. MODEL must be one that
    decodery runs itself.
    """
    return _draft(run)
