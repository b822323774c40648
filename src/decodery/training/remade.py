"""Train a copy of a model whose linear layers are kept in another form, to say what the model says.

What untrained rounding or pruning takes is learned back from texts that the model has written, where it noted how
likely it found what: quantization-aware training, sparsity training and tuned low-rank parts are this with other forms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decodery.compression.base import LINEARS, Change, Part, rebuilt, reported, transformable
from decodery.compression.each_linear import Made, dense, joined, lost, with_linears
from decodery.compression.folder import write
from decodery.compression.stream import cast, floats
from decodery.core.abstract import Contract
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, floating

from .corpus import Corpus, TrainingText
from .held_out import HeldOut, Measured
from .kind import Bounded, Run, option
from .kind_data import own_texts
from .loop import History, TrainingPlan, batches, train
from .training_batch import TrainingBatch, distance, judged, predictions, whole_batch

_HELD = 64
"""Held-out texts that are read, half of them by validation."""


@dataclass
class TrainingProgress:
    """How far a training has come.

    Attributes:
        written: [N, 1] of the rows of the pass, 1 for what was written and the last token of its prompt, else 0; None
            if not given.
    """

    done: float = 1.0  # Share of its steps, 1 when it is over and when what it came to is judged
    written: torch.Tensor | None = None


class TrainedForm(Contract):
    """A linear layer on its way into another form: [N, in] -> [N, out], as far as `progress_made` says."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """What learns, by name."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """With gradients for `parameters`."""

    @abstractmethod
    def made(self, itemsize: int) -> Made:
        """What it has become."""


class WholeForm(TrainedForm):
    """A linear layer that learns as it is, and is made into another form in each pass."""

    def __init__(self, whole: Dense, progress_made: TrainingProgress) -> None:
        self.whole, self.progress_made = whole, progress_made

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {"weight": self.whole.weight}


@dataclass(frozen=True)
class Remaking(Contract):
    """How a form is learned. Fields are settings."""

    @property
    def whole_numbers(self) -> bool:
        """Whether its layers are of integers."""
        return False

    @property
    def norms(self) -> bool:
        """Whether norms learn too."""
        return True

    @property
    def tables(self) -> bool:
        """Whether embedding and head learn too."""
        return False

    @abstractmethod
    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        """The form of a linear layer before its training."""


class Remade:
    """A model whose linear layers are forms."""

    def __init__(self, original: Transformer, remaking: Remaking) -> None:
        self.original, self._remaking, self.progress_made = original, remaking, TrainingProgress()
        weights = original.weights
        dtype = torch.promote_types(weights.dtype, torch.float32)
        self.parameters: dict[str, torch.Tensor] = {}
        layers = []
        for index, layer in enumerate(weights.layers):
            whole = floats(layer, dtype)
            forms = {
                name: remaking.form(f"layers.{index}.{name}", getattr(whole, name), self.progress_made)
                for name in LINEARS
            }
            for name, form in forms.items():
                self.parameters |= {f"layers.{index}.{name}.{key}": part for key, part in form.parameters.items()}
            norms = {name: part.clone() for name, part in vars(whole).items() if isinstance(part, torch.Tensor)}
            if remaking.norms:
                self.parameters |= {f"layers.{index}.{name}": part for name, part in norms.items()}
            layers.append(with_linears(whole, norms | forms))
        head, norm = cast(floating(weights.head), dtype), weights.norm.to(dtype, copy=True)
        tied = getattr(weights.head, "weight", None) is weights.embedding
        embedding = head.weight if tied else weights.embedding.to(dtype, copy=True)
        if remaking.tables:
            self.parameters |= {"head": head.weight} | ({} if tied else {"embedding": embedding})
        if remaking.norms:
            self.parameters["norm"] = norm
        for part in self.parameters.values():
            part.requires_grad_(True)
        self.model = rebuilt(original, embedding=embedding, layers=layers, norm=norm, head=head)

    @torch.no_grad()
    def change(self) -> Change:
        """The model that it has become. Errors are shares of the weights' energy."""
        parts, layers = [], []
        itemsize = self.original.weights.dtype.itemsize
        for index, layer in enumerate(self.model.weights.layers):
            made = {name: getattr(layer, name).made(itemsize) for name in LINEARS}
            for name, each in made.items():
                before = floating(getattr(self.original.weights.layers[index], name)).weight
                parts.append(Part(f"layers.{index}.{name}", lost(before, dense(each.linear), None), each.size))
            found = with_linears(layer, {name: each.linear for name, each in made.items()})
            norms = {name: part.detach() for name, part in vars(found).items() if isinstance(part, torch.Tensor)}
            layers.append(with_linears(found, norms))
        now, dtype = self.model.weights, self.original.weights.dtype
        learned: dict[str, Any] = {"norm": now.norm.detach().to(self.original.weights.norm.dtype)}
        if self._remaking.tables:
            assert isinstance(now.head, Dense)
            head = Dense(now.head.weight.detach().to(dtype), now.head.bias)
            tied = now.head.weight is now.embedding
            learned |= {"head": head, "embedding": head.weight if tied else now.embedding.detach().to(dtype)}
        whole = rebuilt(self.original, **learned)
        return joined(whole, layers, parts, whole_numbers=self._remaking.whole_numbers)


@dataclass(frozen=True)
class CopyRecipe(Bounded):
    """How a copy learns."""

    steps: int = option(300, "Training steps, of `batch` texts each.")
    batch: int = 4
    lr: float = 5e-4
    seed: int = 0


@dataclass(frozen=True)
class Learned:
    """What a training came to."""

    history: History
    held: HeldOut[TrainingText]
    progress_made: TrainingProgress

    def measured(self, model: Transformer) -> Measured:
        """What `judged` says of a model on the held-out texts that chose nothing, with an interval."""

        def figures(texts: list[TrainingText]) -> dict[str, float]:
            batch = whole_batch(texts, model)
            self.progress_made.written = written_rows(batch, model)
            return judged(model, batch)

        return self.held.measured(figures, "cross_entropy", lambda text: text.taught)


def learn(remade: Remade, run: Run, corpus: Corpus, remaking: Remaking) -> Learned:
    """Let forms learn what texts teach, of which every twentieth is held out.

    They end as they were best on those.
    """
    target, recipe = run.loaded, run.of(CopyRecipe)
    original = remade.original
    learned, held = corpus.split_for(original.vocab_size, target.name)
    known = HeldOut.of([corpus[number] for number in held[:_HELD]], corpus.prompts(held[:_HELD]))
    validation = whole_batch(known.choosing, original)
    batch = batches(len(learned), recipe.batch, recipe.seed)

    def loss(step: int) -> torch.Tensor:
        remade.progress_made.done = step / recipe.steps
        taught = whole_batch([corpus[learned[each]] for each in batch(step)], original)
        remade.progress_made.written = written_rows(taught, remade.model)
        return distance(predictions(remade.model, taught), taught)

    def validate() -> dict[str, float]:
        remade.progress_made.done, remade.progress_made.written = 1.0, written_rows(validation, remade.model)
        return judged(remade.model, validation)

    history = train(
        remade.parameters,
        loss,
        # Small weights are what some of these forms look at: they are not pulled towards zero.
        TrainingPlan(recipe.steps, lr=recipe.lr, weight_decay=0.0, validate_every=max(1, min(50, recipe.steps // 4))),
        run.training,
        validate=validate,
        metric="cross_entropy",
        settings={"form": repr(remaking), "recipe": asdict(recipe), "corpus": corpus.facts, "target": target.name},
        progress=run.progress,
        what="training",
    )
    remade.progress_made.done = 1.0
    return Learned(history, known, remade.progress_made)


def written_rows(taught: TrainingBatch, model: Transformer) -> torch.Tensor:
    """[N, 1] of a batch's rows, see `TrainingProgress.written`."""
    found = torch.zeros(sum(map(len, taught.batch.segments)), 1, dtype=model.dtype, device=taught.rows.device)
    # Those after `count` only fill up.
    found[taught.rows[: taught.count]] = 1.0
    return found


def train_copy(run: Run, corpus: Corpus, remaking: Remaking) -> dict[str, Any]:
    """Train a copy in another form on texts that the model has written.

    Returns:
        What `judged` says of the copy in the form in which it is kept, beside the untrained one, see `HeldOut.report`.
    """
    original = transformable(run.loaded.model)
    remade = Remade(original, remaking)
    untrained = remade.change().model
    learned = learn(remade, run, corpus, remaking)
    change = remade.change()
    scores = learned.held.report(learned.measured(change.model), {"untrained": learned.measured(untrained)})
    report = reported(original, [(f"{remaking}, trained for {learned.history.best_step} steps", change)])
    write(run.out, change.model, report, run.loaded)
    return scores


def copied(run: Run, remaking: Remaking) -> dict[str, Any]:
    """`train_copy` in a run of a kind, which learns from texts that the model writes."""
    transformable(run.loaded.model)
    return train_copy(run, own_texts(run), remaking)


COPY_READY = "The copy is ready: --drafter draft-model:model={out}"
