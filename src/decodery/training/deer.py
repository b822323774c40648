"""Train a block drafter for a target: DEER's two stages, on text that the target has written.

DEER: Draft with Diffusion, Verify with Autoregressive Models (2025) first distils the target into a diffusion model
that continues texts cut at random places, then refines what stands next to the cut. Here the drafter is cut from the
target as a draft model is, and blocks are put after many places of a text at once: rows of the text see what is before
them alone, so that all of its blocks may share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Segment
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Kept, Weights

from .corpus import Corpus, TrainingText
from .cut import DraftShape, cut_draft, keep_tokens, quantized
from .draft import DraftSettings, DraftTraining, check_target, write_draft
from .held_out import HeldOut, Measured
from .kind import COUNT, NON_NEGATIVE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts
from .loop import History, TrainingPlan, batches
from .training_batch import BatchPart, TrainingBatch, distance, of_parts, predictions

_Judged = tuple[TrainingBatch, np.ndarray, np.ndarray]
_JUDGED = 24
"""Places of a text at which validation drafts."""


@dataclass(frozen=True)
class DeerRecipe(Bounded):
    """How a block drafter learns.

    Attributes:
        alpha: Weight of a token of a block in stage 2, as a multiple of the weight of the one after it.
    """

    block: int = bounded(8, "[2, inf)", "Maximum tokens of a block.")
    places: int = bounded(12, COUNT, "Positions of a text after which blocks stand.")
    epochs: float = bounded(3.0, NON_NEGATIVE, "Epochs of stage 1, continuing texts.")
    refining: float = bounded(1.0, NON_NEGATIVE, "Epochs of stage 2, refining blocks, at half the learning rate.")
    alpha: float = bounded(1.01, "[1, inf)")
    lr: float = 1e-3
    batch: int = 4
    seed: int = option(0, "Random seed of texts and training.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs + self.refining == 0:
            raise SettingsError("at least one of the two stages takes some time: give epochs or refining above 0")


@dataclass(frozen=True)
class MaskedBlock:
    """A block after a place of a text, the last token that is known.

    The first one is said by the row of the place itself, and is always hidden; so is the last one, in whose place
    stands the end of the block.
    """

    place: int
    hidden: np.ndarray  # [length] which of its tokens are masked
    weight: np.ndarray  # [length] what each counts


def continuation(place: int, length: int, random: np.random.Generator) -> MaskedBlock:
    """Of the first stage: any number of tokens is masked, each number as often, and they share a weight."""
    hidden = np.ones(length, dtype=bool)
    open_, count = length - 1, 1 + int(random.integers(length - 1))
    hidden[:open_] = random.permutation(open_) < count
    return MaskedBlock(place, hidden, hidden / hidden.sum())


def suffix(place: int, length: int, alpha: float) -> MaskedBlock:
    """Of the second stage: nothing is known, and tokens count the more the nearer they are to the text."""
    return MaskedBlock(place, np.ones(length, dtype=bool), alpha ** np.arange(length - 1, -1, -1.0))


def blocks_after(text: TrainingText, blocks: Sequence[MaskedBlock], mask: int) -> BatchPart:
    """A text with blocks after places of it, each of which sees the text up to there and itself.

    Every row of the text after the prompt learns to predict what follows, too: it is what says the first token of a
    block. Those of a block count one each on average.
    """
    part, n = BatchPart.read(text), len(text.tokens) - 1
    total = n + sum(len(block.hidden) for block in blocks)
    seen = np.zeros((total, total), dtype=bool)
    seen[:n, :n] = np.tri(n, dtype=bool)
    ids, positions = [text.tokens[:n]], [part.segment.positions]
    rows, after, weights, first = [], [], [], n
    for block in blocks:
        length = len(block.hidden)
        places = np.arange(block.place + 1, block.place + length + 1)
        # The last row stands for the end of the block, so that what its token is, is asked of the row before it.
        tokens = np.where(block.hidden, mask, text.tokens[places])
        tokens[-1] = mask + 1
        seen[first : first + length, : block.place + 1] = True
        seen[first : first + length, first : first + length] = True
        ids.append(tokens)
        positions.append(places)
        rows.append(np.arange(first, first + length - 1))
        after.append(places[:-1])
        weights.append(block.weight[1:])
        first += length
    taught = np.concatenate(weights)
    segment = Segment(np.concatenate(positions), np.concatenate(ids).astype(np.int64), mask=seen)
    return BatchPart(
        text,
        segment,
        np.concatenate([part.rows, *rows]),
        np.concatenate([part.after, *after]),
        np.concatenate([part.weight, taught / max(taught.mean(), 1e-9)]).astype(np.float32),
    )


def places_of(text: TrainingText, least: int) -> np.ndarray:
    """Places after which at least `least` tokens of what the target wrote follow."""
    return np.arange(max(text.written - 1, 0), len(text.tokens) - least)


def drawn(text: TrainingText, recipe: DeerRecipe, stage: int, random: np.random.Generator) -> list[MaskedBlock]:
    """Blocks after random places of a text, for a stage, 1 or 2; none where it is too short."""
    found = places_of(text, 2)
    found = random.choice(found, min(recipe.places, len(found)), replace=False) if len(found) else found
    blocks = []
    for place in np.sort(found).tolist():
        room = min(recipe.block, len(text.tokens) - 1 - place)
        if stage == 1:
            blocks.append(continuation(place, room, random))
        else:
            blocks.append(suffix(place, 2 + int(random.integers(room - 1)), recipe.alpha))
    return blocks


def with_mask(draft: Transformer, block: int) -> Transformer:
    """The same model with two tokens more, after all others: one not written yet, and the end of a block.

    Both begin as the mean of the embeddings.
    """
    old, vocab = draft.weights, draft.vocab_size
    assert old.kept is not None
    ids, rows = old.kept.ids, old.kept.rows
    kept = Kept(
        torch.cat([ids, torch.arange(vocab, vocab + 2, device=ids.device)]),
        torch.cat([rows, torch.arange(len(ids), len(ids) + 2, device=rows.device)]),
    )
    table = torch.cat([old.embedding, old.embedding.mean(dim=0, keepdim=True).repeat(2, 1)])
    config = replace(draft.config, vocab_size=vocab + 2, kept_tokens=len(kept.ids), mask_id=vocab, block_length=block)
    return Transformer(config, Weights(table, old.layers, old.norm, Dense(table), kept))


class _DEERTraining(DraftTraining):
    """What both stages share: the drafter, how it is taught and what it is judged by."""

    def __init__(self, draft: Transformer, corpus: Corpus, recipe: DeerRecipe, progress: Progress) -> None:
        assert draft.weights.kept is not None and draft.config.mask_id is not None
        self.corpus, self.recipe, self.mask = corpus, recipe, draft.config.mask_id
        numbers, held = corpus.split()
        self.learned = [number for number in numbers if len(places_of(corpus[number], 2))]
        kept = [number for number in held if len(places_of(corpus[number], recipe.block))][:48]
        whole = [corpus[number] for number in kept]
        if not self.learned or not whole:
            raise SettingsError(
                f"{corpus.folder} holds too few texts of more than {recipe.block} tokens to learn from and to hold "
                "some out: write more, or longer ones"
            )
        # The two tokens that are no text are not targets of the loss.
        super().__init__(draft, draft.weights.kept.ids[:-2], whole, progress)
        self.held = HeldOut.of([self._judged(text) for text in whole], corpus.prompts(kept))

    def run(self, stage: int, epochs: float, lr: float, out: Path, facts: dict[str, object]) -> History:
        recipe = self.recipe
        batch = batches(len(self.learned), recipe.batch, recipe.seed + stage)

        def taught(step: int) -> TrainingBatch:
            random = np.random.default_rng([recipe.seed, stage, step])
            texts = [self.corpus[self.learned[number]] for number in batch(step)]
            parts = [blocks_after(text, drawn(text, recipe, stage, random), self.mask) for text in texts]
            return of_parts(parts, self.kept, self.place)

        return self.stage(
            ("learning to continue texts", "refining what follows them")[stage - 1],
            taught,
            lambda: self.figures(self.held.choosing),
            TrainingPlan(max(1, round(epochs * len(self.learned) / recipe.batch)), lr=lr, validate_every=50),
            out,
            {**facts, "stage": stage, "recipe": asdict(recipe), "corpus": self.corpus.facts},
        )

    def measured(self) -> Measured:
        """The figures of texts that chose nothing, with an interval; each counts by its blocks."""
        return self.held.measured(self.figures, "accepted", lambda text: len(text[2]))

    def figures(self, held: Sequence[_Judged]) -> dict[str, float]:
        """What validation looks at: blocks of which nothing is known, at places evenly spread along held-out texts.

        cross_entropy: of all that is taught there, in nats a token. right_n: how often the most likely token at place n
        of a block is the text's; accepted: how many in a row are, from the first on, on average.
        """
        totals, nats, weight, count = np.zeros(self.recipe.block + 1), 0.0, 0.0, 0
        for taught, wanted, where in held:
            with torch.no_grad():
                (said,) = predictions(self.draft, taught)
                nats += float(distance([said], taught) * taught.weight.sum())
                weight += float(taught.weight.sum())
                same = said.argmax(dim=1).cpu().numpy()[where] == wanted
            totals += [*same.sum(axis=0), np.logical_and.accumulate(same, axis=1).sum()]
            count += len(same)
        *each, accepted = (totals / count).tolist()
        found = {f"right_{number}": share for number, share in enumerate(each, start=1)}
        return {"cross_entropy": nats / weight, "accepted": accepted, **found}

    def _judged(self, text: TrainingText) -> _Judged:
        """A text with whole blocks, and by place and token of a block the output wanted and the row that says it."""
        found, block = places_of(text, self.recipe.block), self.recipe.block
        found = found[np.linspace(0, len(found) - 1, min(_JUDGED, len(found))).round().astype(np.int64)]
        part = blocks_after(text, [suffix(place, block, 1.0) for place in found.tolist()], self.mask)
        first = int((part.rows < len(text.tokens) - 1).sum())
        later = first + np.arange(len(found) * (block - 1)).reshape(len(found), block - 1)
        where = np.concatenate([found[:, None] - part.rows[0], later], axis=1)
        return of_parts([part], self.kept, self.place), self.place[text.tokens[part.after[where] + 1]], where


def train_deer(run: Run, corpus: Corpus, shape: DraftShape | None = None) -> dict[str, Any]:
    """Train a block drafter on text that the model wrote, for `deer`.

    Returns:
        The report of the finished drafter, before it is quantized; see `HeldOut.report`.
    """
    shape, target, out, recipe = shape or DraftShape(layers=3), run.loaded, run.out, run.of(DeerRecipe)
    model = check_target(target)
    corpus.of_vocabulary(model.vocab_size, target.name)
    learned, _ = corpus.split()
    kept = keep_tokens((corpus[number] for number in learned), shape.tokens, model, model.config.eos_ids)
    draft = with_mask(cut_draft(model, shape, kept), recipe.block)
    training_run = _DEERTraining(draft, corpus, recipe, run.progress)
    facts: dict[str, object] = {"shape": asdict(shape), "target": target.name, "dtype": target.dtype}
    told, before = [], training_run.measured()
    stages = ((1, "continuation", recipe.epochs, recipe.lr), (2, "refinement", recipe.refining, recipe.lr / 2))
    for stage, name, epochs, lr in stages:
        if epochs:
            training_run.run(stage, epochs, lr, out / "training" / name, facts)
            told.append((f"after stage {stage}", training_run.measured()))
    write_draft(quantized(draft), target, out)
    return training_run.held.report(told[-1][1], {"untrained": before})


@kind(
    "The block drafter is ready: --drafter deer:model={out}",
    (OwnTexts(), DeerRecipe(), DraftSettings(layers=3)),
    "-m smollm2 --block 8 --out blocks",
    model="to draft for",
    file=DESCRIPTION,
    without=("pretrain", "exits"),
)
def _deer(run: Run) -> dict[str, Any]:
    """Train a small diffusion model that drafts a block of tokens in one pass, for --drafter deer:model=DIR.

    It starts as the first layers of MODEL, which must be one that decodery runs itself. Stage 1 trains to continue
    masked texts, stage 2 to write a whole block, mainly its first tokens. accepted: how many tokens of a block are
    right in a row on held-out texts.
    """
    shape = run.of(DraftSettings).shape(check_target(run.loaded).config)
    return train_deer(run, own_texts(run), shape)
