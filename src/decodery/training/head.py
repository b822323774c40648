"""Train a draft head on the target's own texts: one recipe for all kinds, which differ in how they are unrolled.

A head is unrolled over texts that are known and learns what the target expects after every token of them (EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test, 2025, for all kinds). The target is
read once; what it showed is kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.noise import nth_seed
from decodery.models.loaders.dtype import choose_dtype
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating
from decodery.speculative.drafters.falcon import FalconHead
from decodery.speculative.heads.drafter import head_named
from decodery.speculative.heads.head import HEAD, BoundHead, TrainedHead
from decodery.speculative.heads.parts import Parts

from .corpus import Corpus, check_texts
from .cut import keep_tokens
from .embedded import Shown, read_prompts, write_shown
from .features import FeatureRows, FeatureStore
from .head_batch import DEPTHS, LOSSES, Taught, distance, glancing, judged, places_of, rank_rates, taught
from .held_out import HeldOut, Measured
from .kind import COUNT, NON_NEGATIVE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts
from .loop import History, TrainingPlan, batches, rounded, train

TOP = 64
"""Most likely tokens of the target that are learned from at every place."""
_HELD = 48


@dataclass(frozen=True)
class HeadRecipe(Bounded):
    """How a head is trained.

    Attributes:
        outputs: Vocabulary size of the head, the most frequent tokens of the texts. 0: all tokens.
        decay: Weight of a step further ahead, as a share of the weight of the one before it.
    """

    outputs: int = bounded(6144, NON_NEGATIVE)
    epochs: float = 3.0
    lr: float = 4e-4
    batch: int = option(8, "Batch size in texts.")
    length: int = bounded(224, COUNT, "Tokens of a text that are learned from at a time.")
    decay: float = bounded(0.8, "(0, 1]")
    seed: int = option(0, "Random seed of texts and training.")
    loss: str = option("kl", "kl or lk_hybrid, which adds the overlap.")
    glance: bool = option(False, "Show a falcon head answers of its wrong guesses, fewer and fewer (CSGD).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSSES:
            raise SettingsError(f"a head has no loss {self.loss!r}: name one of {', '.join(LOSSES)}")


def train_head(
    run: Run,
    kind: type[BoundHead],
    corpus: Corpus,
    *,
    shape: Mapping[str, Any] | None = None,
    shown: Shown | None = None,
    start: TrainedHead | None = None,
) -> dict[str, Any]:
    """Train a head of a kind on texts that the model has written; its folder is what the drafter takes.

    Interrupted, it leaves the best head up to its last checkpoint, too.

    Args:
        shown: Texts after embeddings, from which it learns more and more in the second half of its steps, in place of
            the others, and by which it is then judged. Every twentieth text is held out.
        start: An earlier head of this kind that the training begins with.

    Returns:
        The report of the finished int8 head, see `HeldOut.report`.
    """
    target, out, recipe, progress = run.loaded, run.out, run.of(HeadRecipe), run.progress
    if recipe.glance and not issubclass(kind, FalconHead):
        raise SettingsError(f"glance is for heads of falcon, not of {kind.kind}: leave it out")
    model = target.model
    if not isinstance(model, Transformer):
        raise SettingsError(f"{target.name} does not run in this package's own transformer: no head is trained for it")
    check_texts(len(corpus))
    learned, held = corpus.split()
    if start is None:
        tensors, settings = kind.untrained(model, recipe.seed, **(shape or {}))
        if 0 < recipe.outputs < model.vocab_size:
            texts = (corpus[number] for number in learned)
            tensors["vocabulary"] = keep_tokens(texts, recipe.outputs, model, model.config.eos_ids).ids.int()
        trained = TrainedHead(kind.kind, tensors, settings, model=model.fingerprint)
    else:
        trained = _begun(start, kind)
    head, settings = kind(trained, model), dict(trained.settings)
    store = FeatureStore(model, corpus, head.taps, out / "features", TOP, progress, device=model.device)
    plain = _StoredTexts(store, learned, held[:_HELD])
    seen = None
    if shown is not None:
        check_texts(len(shown.corpus))
        learned_of, held_of = shown.corpus.split(images=[each.digest for each in shown.embeddings])
        features = FeatureStore(
            model, shown.corpus, head.taps, out / "shown", TOP, progress, shown.embeddings, model.device
        )
        seen = _StoredTexts(features, learned_of, held_of[:_HELD])
    steps = max(1, round(recipe.epochs * len(learned) / recipe.batch))
    training_run = _HeadTraining(head, plain, seen, recipe, steps, continues=start is not None)
    before = training_run.measured(head)
    plan = TrainingPlan(steps, lr=recipe.lr, warmup=0.05, clip=0.5, validate_every=max(1, min(100, steps // 10)))
    begun = {} if start is None else {"start": dict(start.facts)}
    made = {"command": run.command, "target": target.name, **asdict(recipe)}

    def keep(best: Mapping[str, torch.Tensor], history: History, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave the head with these parameters in `out`; its figures."""
        tensors = Parts(head.parts.tensors | dict(best)).quantized()
        finished = TrainedHead(kind.kind, tensors, settings, model=model.fingerprint)
        bound = kind(finished, model)
        scores = scores or training_run.measured(bound)
        rates = rank_rates(bound, training_run.held.tested)
        facts = {**made, "steps": history.best_step, **rounded(scores), "rates": rates}
        replace(finished, facts=facts).save(out / HEAD)
        return scores

    def saved(best: Mapping[str, torch.Tensor], history: History) -> None:
        if history.step < steps:
            keep(best, history, history.metrics[str(history.best_step)])

    history = train(
        *(training_run.parameters, training_run.loss, plan, out / "training"),
        validate=training_run.validate,
        metric="tokens",
        higher=True,
        settings={"recipe": asdict(recipe), "kind": kind.kind, "corpus": corpus.facts, "head": settings, **begun},
        progress=progress,
        saved=saved,
    )
    return training_run.held.report(keep(training_run.parameters, history, {}), {"untrained": before})


def _begun(start: TrainedHead, kind: type[BoundHead]) -> TrainedHead:
    """A head to go on from, in floating point."""
    if start.kind != kind.kind:
        raise SettingsError(f"the head to begin with is for {start.kind}, not for {kind.kind}: give one of that kind")
    # Its own tensors, which others may read, stay as they are.
    return replace(start, tensors={name: each.clone() for name, each in Parts(start.tensors).floating().items()})


@dataclass(frozen=True)
class _StoredTexts:
    """What the target showed of texts, and the numbers of those that are learned and of those held out."""

    features: FeatureStore
    learned: Sequence[int]
    held: Sequence[int]


class _HeadTraining:
    """What the steps of a training share."""

    def __init__(
        self,
        head: BoundHead,
        plain: _StoredTexts,
        shown: _StoredTexts | None,
        recipe: HeadRecipe,
        steps: int,
        *,
        continues: bool = False,
    ) -> None:
        self.head, self.plain, self.shown, self.recipe, self.steps = head, plain, shown, recipe, steps
        self.continues = continues
        # Products in bfloat16 where the device computes them, which is twice as fast; the weights stay as they are.
        self.fast = head.dtype == torch.float32 and choose_dtype("auto", "bfloat16", head.model.device) == "bfloat16"
        # The target's words are read in floating point, through which gradients pass.
        head.shared = floating(head.shared)
        self.parameters = {name: each for name, each in head.parts.tensors.items() if each.is_floating_point()}
        for tensor in self.parameters.values():
            tensor.requires_grad_(True)
        device, words = head.model.device, head.model.vocab_size
        self._place = torch.full((words,), -1, dtype=torch.int64, device=device)
        ids = torch.arange(words, device=device) if head.vocabulary is None else head.vocabulary
        self._place[ids] = torch.arange(len(ids), device=device)
        self._batch = batches(len(plain.learned), recipe.batch, recipe.seed)
        self._shown = batches(len(shown.learned), recipe.batch, recipe.seed) if shown is not None else self._batch
        judged = shown or plain
        held = [self._training_batch([judged.features[number]]) for number in judged.held]
        self.held = HeldOut.of(held, judged.features.prompts(judged.held))

    def loss(self, step: int) -> torch.Tensor:
        texts = [self.plain.features[self.plain.learned[each]] for each in self._batch(step)]
        if self.shown is not None:
            share = max(0.0, 2 * step / self.steps - 1)
            drawn = np.random.default_rng([self.recipe.seed, step]).random(len(texts)) < share
            for place, number in enumerate(self._shown(step)):
                if drawn[place]:
                    texts[place] = self.shown.features[self.shown.learned[number]]
        training_batch = self._training_batch(texts)
        if self.head.anchored is not None:
            random = np.random.default_rng([self.recipe.seed, step, 1])
            training_batch = training_batch.anchored(self.head.anchored, random)
        # A head that goes on from another one keeps what that one knows of later steps.
        depths = self.head.unrolled(1.0 if self.continues else step / self.steps)
        with torch.autocast(self.head.model.device.type, dtype=torch.bfloat16) if self.fast else nullcontext():
            if self.recipe.glance and isinstance(self.head, FalconHead):
                guesses = glancing(
                    self.head, training_batch, depths, step / self.steps, nth_seed(self.recipe.seed, step)
                )
            else:
                guesses = training_batch.unrolled(self.head, depths)
            known = training_batch.weight[:, : training_batch.places] > 0
            found = distance(self.head, guesses, training_batch, self.recipe.decay, self.recipe.loss, sure=True)
            return found + self.head.regret(guesses, training_batch.states, known)

    def validate(self) -> dict[str, float]:
        return judged(self.head, self.held.choosing, self.recipe.decay)

    def measured(self, head: BoundHead) -> Measured:
        """What a head is worth on texts that chose nothing, with an interval; each counts by its places."""
        return self.held.measured(lambda texts: judged(head, texts, self.recipe.decay), "agreement.1", places_of)

    def _training_batch(self, texts: Sequence[FeatureRows]) -> Taught:
        steps = max(self.head.unrolled(1.0), DEPTHS)
        dtype = next(iter(self.parameters.values())).dtype
        return taught(texts, self._place, steps, self.recipe.length, dtype, self.head.lead)


@dataclass(frozen=True)
class HeadKind:
    """What is trained."""

    kind: str = option("", "The drafter of the head, such as eagle-3 or hydra:prefix=true.", required=True)
    images: Path | None = option(None, "File of prompts with embeddings, made by `save_prompts`, to train on as well.")


@kind(
    lambda run: f"The head is ready: --drafter {run.made.kind}:head={run.out}",
    (OwnTexts(), HeadKind(), HeadRecipe()),
    "--kind eagle-3 -m smollm2 --out head",
    model="to draft for",
    file=HEAD,
)
def _head(run: Run) -> dict[str, Any]:
    """Train a draft head on the hidden states of MODEL, for --drafter KIND:head=DIR.

    The printed figures are how often its first prediction is right on held-out texts, by the number of tokens
    ahead.
    """
    asked, own, recipe = run.of(HeadKind), run.of(OwnTexts), run.of(HeadRecipe)
    run.made, shape = head_named(asked.kind)
    loaded, corpus, shown = run.loaded, own_texts(run), None
    if asked.images is not None:
        shown = write_shown(
            loaded,
            read_prompts(asked.images, loaded.model),
            run.out / "text" / "shown",
            own.texts,
            own.max_new_tokens,
            seed=recipe.seed,
            progress=run.progress,
        )
    return train_head(run, run.made, corpus, shape=shape, shown=shown)
