"""Learn to say tokens ahead: rows after places of texts that stand for the tokens there, as drafts will put them.

A text is read once, by the model at the precision it is used at; after each of many places stand rows of their own,
which see the text up to there and each other, as a draft's rows without a token do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress
from decodery.models.protocol import LanguageModel
from decodery.models.trained.artifact import TrainedPart

from .corpus import Corpus, TrainingText
from .fitting import fit
from .held_out import HeldOut
from .kind import COUNT, Bounded, Run, bounded, option
from .loop import TrainingPlan, batches
from .tensors import zeros
from .traced import TracedCache, differentiable

_HELD = 16
"""Held-out texts that are read, half of them by validation."""
EVERY = 9
"""Every so many texts one is held out where rates are counted: an odd number meets all temperatures."""
RANKS = 10
"""Ranks whose rates are counted."""
_COUNTED, _COUNTED_TEXTS = 48, 16
"""Places of a text where they are counted, and texts."""
Made = TypeVar("Made", bound=TrainedPart)
_BELIEF = 32.0
"""How many places outweigh what a rank is assumed to be worth."""


@dataclass(frozen=True)
class AheadRecipe(Bounded):
    """How it is learned."""

    steps: int = option(300, "Training steps, of `batch` texts each.")
    lr: float = 3e-2
    places: int = bounded(16, COUNT, "Positions of a text that a step learns at.")
    batch: int = option(1, "Texts of a step.")
    seed: int = 0


@dataclass(frozen=True)
class AheadBatch:
    """Some places of one text, each with a segment of rows after it; [p, n] is by place and row.

    A place is the last token known: the model itself says the next one, the rows those after it.

    Attributes:
        likely, share: [p, n, k] what the model expects where a row stands, knowing the tokens before.
    """

    segments: list[Segment]
    likely: torch.Tensor
    share: torch.Tensor
    weight: torch.Tensor  # [p, n] what that counts, 0 where it is not taught
    right: torch.Tensor  # [p, n] the tokens of the text there, -1 after its end


def sure_runs(text: TrainingText, alpha: float) -> np.ndarray:
    """[n] int64: from each token on, how many in a row the model gave at least the probability `alpha`.

    0 for tokens of the prompt and the first one after it, about which the model was not asked.
    """
    likely, logprobs, n = text.likely, text.logprobs, len(text.tokens)
    if likely is None or logprobs is None:
        raise SettingsError("the texts have no predictions of the model: write them again, with top=20")
    asked = np.isfinite(logprobs[: n - 1, 0])
    own = np.where(likely[: n - 1] == text.tokens[1:, None], logprobs[: n - 1].astype(np.float32), -np.inf)
    sure = np.zeros(n + 1, dtype=bool)
    sure[1:n] = asked & (np.exp(own.max(axis=1)) >= alpha)
    ends = np.minimum.accumulate(np.where(sure, n, np.arange(n + 1))[::-1])[::-1]
    return (ends - np.arange(n + 1))[:n]


class AheadTrainee:
    """The model, which stays as it is, what learns, and what that is taught.

    Args:
        reader: The model at the precision it is used at; it reads the texts.
        alpha: Taught are the tokens of runs in which the model gave each at least this probability.
        decay: What a row counts, as a part of what the one before it does.
    """

    taps: tuple[Tap, ...] = ()
    layer_plan: LayerPlan = WHOLE

    def __init__(
        self, reader: LanguageModel, model: LanguageModel, *, ahead: int, places: int, alpha: float, decay: float
    ) -> None:
        self.reader, self.model = reader, differentiable(model, "drafts")
        self.ahead, self.places, self.alpha = ahead, places, alpha
        self.weights = decay ** np.arange(ahead)

    @property
    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """What learns, by name."""

    @abstractmethod
    def after(self, place: int, past: torch.Tensor, hidden: Mapping[Tap, torch.Tensor]) -> Segment:
        """The rows after a place of a text, to be run through `route`.

        Args:
            past: [layers, 2, kv_heads, n, head_dim] keys and values up to the place, itself included.
            hidden: What was read at `taps`, [n, hidden], up to there.
        """

    def training_batch(
        self, text: TrainingText, alpha: float, random: np.random.Generator | None = None, places: int | None = None
    ) -> AheadBatch | None:
        """`places` places of a text, random ones or evenly spread; None where it teaches nothing.

        Places are those whose next two tokens at least were sure.
        """
        most = places or self.places
        runs = sure_runs(text, alpha)
        known = np.flatnonzero(runs[1:] >= 2)
        if not len(known):
            return None
        if len(known) > most:
            even = np.linspace(0, len(known) - 1, most).round().astype(np.int64)
            known = known[even if random is None else np.sort(random.choice(len(known), most, replace=False))]
        tokens, count = text.tokens.astype(np.int64), self.ahead
        past, hidden = self._read(tokens[: known[-1] + 1])
        segments = [
            self.after(place, past[:, :, :, : place + 1], {tap: rows[: place + 1] for tap, rows in hidden.items()})
            for place in known.tolist()
        ]
        ahead = known[:, None] + np.arange(1, count + 1)
        there = ahead + 1 < len(tokens)
        at = np.where(there, ahead, 0)
        assert text.likely is not None and text.logprobs is not None
        taught = there & (np.arange(2, count + 2) <= runs[known + 1][:, None])
        share = np.where(taught[..., None], np.exp(text.logprobs[at].astype(np.float32)), 0.0)
        return AheadBatch(
            segments,
            torch.from_numpy(text.likely[at].astype(np.int64)),
            torch.from_numpy(share / share.sum(axis=-1, keepdims=True).clip(min=1e-9)),
            torch.from_numpy((taught * self.weights).astype(np.float32)),
            torch.from_numpy(np.where(there, tokens[np.where(there, ahead + 1, 0)], -1)),
        )

    @torch.no_grad()
    def _read(self, tokens: np.ndarray) -> tuple[torch.Tensor, dict[Tap, torch.Tensor]]:
        """Keys and values [layers, 2, kv_heads, n, head_dim] of a text, and its states at `taps`, [n, hidden]."""
        cache = self.reader.new_cache()
        scores = self.reader.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]), taps=self.taps)
        cache.keep(range(len(tokens)))
        hidden = {tap: rows.to(self.model.device, self.model.dtype) for tap, rows in scores.hidden.items()}
        return cache.data[:, :, :, : len(tokens)].to(self.model.device), hidden

    def logq(self, training_batches: Sequence[AheadBatch]) -> torch.Tensor:
        """Log-probabilities [places, n, vocab] where rows stand."""
        batch = Batch([each for training_batch in training_batches for each in training_batch.segments])
        logits = self.model.forward(batch, layer_plan=self.layer_plan).logits
        return logits.view(-1, self.ahead, logits.shape[-1]).log_softmax(dim=-1)

    def loss(self, texts: Sequence[TrainingText], random: np.random.Generator) -> torch.Tensor:
        """Cross-entropy against what the model expected, in nats per token taught."""
        training_batches = [
            each for text in texts if (each := self.training_batch(text, self.alpha, random)) is not None
        ]
        if not training_batches:
            return torch.stack([each.sum() * 0.0 for each in self.parameters.values()]).sum()
        return distance(self.logq(training_batches), training_batches)

    @torch.no_grad()
    def figures(self, texts: Sequence[TrainingText]) -> dict[str, float]:
        """What validation looks at, over places evenly spread along texts that were not learned from.

        right_n: how often the most likely token at row n was the text's. accepted: how many in a row were right before
        the first wrong one, on average, which is what a pass that checks them emits beyond its own token.
        """
        totals, nats, places = np.zeros(self.ahead + 1), 0.0, 0
        for text in texts:
            if (training_batch := self.training_batch(text, 0.0)) is None:
                continue
            logq = self.logq([training_batch])
            same = (logq.argmax(dim=-1).cpu() == training_batch.right).numpy()
            totals += [*same.sum(axis=0), np.logical_and.accumulate(same, axis=1).sum()]
            nats += float(distance(logq, [training_batch])) * len(same)
            places += len(same)
        *each, accepted = (totals / max(1, places)).tolist()
        found = {f"right_{number}": share for number, share in enumerate(each, start=1)}
        return {"accepted": accepted, **found, "cross_entropy": nats / max(1, places)}

    @torch.no_grad()
    def rates(self, texts: Sequence[TrainingText], progress: Progress) -> torch.Tensor:
        """[ahead, ranks] float32: how often each of the most likely tokens at a row was the text's.

        Nowhere 0 and falling along the ranks: rank r is assumed to be right once in 2 (r + 1)(r + 2) times, which
        counts as much as 32 places do.
        """
        ranks = min(RANKS, self.model.vocab_size)
        numbers = torch.arange(ranks, device="cpu")
        hits = zeros(self.ahead, ranks) + _BELIEF / 2 / ((numbers + 1.0) * (numbers + 2.0))
        seen = torch.full((self.ahead, 1), _BELIEF, dtype=torch.float32, device="cpu")
        for number, text in enumerate(counted := texts[:_COUNTED_TEXTS]):
            progress("counting guesses", number, len(counted))
            if (training_batch := self.training_batch(text, 0.0, places=_COUNTED)) is not None:
                most_likely = self.logq([training_batch]).topk(ranks, dim=-1).indices.cpu()
                hits += (most_likely == training_batch.right[..., None]).sum(dim=0)
                seen += (training_batch.right >= 0).sum(dim=0)[:, None]
        return (hits / seen).sort(dim=1, descending=True).values


def distance(logq: torch.Tensor, training_batches: Sequence[AheadBatch]) -> torch.Tensor:
    """Cross-entropy of `logq` [places, n, vocab] against the model's distributions, in nats per token."""
    likely, share, weight = (
        torch.cat([getattr(each, name) for each in training_batches]).to(logq.device)
        for name in ("likely", "share", "weight")
    )
    each = -(share * logq.gather(2, likely)).sum(dim=-1)
    return (each * weight).sum() / weight.sum().clamp(min=1e-9)


def after(states: torch.Tensor, place: int, past: torch.Tensor, **settings: Any) -> Segment:
    """A segment of rows [n, hidden] at the positions after a place, before which `past` was read."""
    positions = np.arange(place + 1, place + len(states) + 1)
    return Segment(positions, states=states, cache=TracedCache(past), **settings)


def shares(corpus: Corpus, target: LoadedModel, alpha: float = 0.0, every: int = 20) -> tuple[list[int], list[int]]:
    """Numbers of the texts to learn from and of those held out."""
    corpus.of_vocabulary(target.model.vocab_size, target.name)
    learned, others = corpus.split(every)
    learned = [number for number in learned if (sure_runs(corpus[number], alpha) > 2).any()]
    if not learned or not others:
        raise SettingsError(f"{corpus.folder} holds too few texts to learn from and to hold some out: write more")
    return learned, others


def train_ahead(
    run: Run,
    corpus: Corpus,
    trainee: AheadTrainee,
    recipe: AheadRecipe,
    made: Callable[[dict[str, Any], torch.Tensor | None], Made],
    *,
    what: str,
    file: str,
    every: int = EVERY,
    rated: bool = True,
) -> Made:
    """Let what learns in `trainee` learn.

    Kept is what has the least cross-entropy on held-out texts: how often guesses are right needs many more places.

    Args:
        every: One text in so many is held out.
    """
    target = run.loaded
    learned, held = shares(corpus, target, trainee.alpha, every)
    known = HeldOut.of([corpus[number] for number in held[:_HELD]], corpus.prompts(held[:_HELD]))
    counted = [*known.tested, *(corpus[number] for number in held[_HELD:])]
    batch = batches(len(learned), recipe.batch, recipe.seed)

    def loss(step: int) -> torch.Tensor:
        random = np.random.default_rng([recipe.seed, step])
        return trainee.loss([corpus[learned[number]] for number in batch(step)], random)

    fitted = fit(
        run,
        known,
        trainee.parameters,
        loss,
        trainee.figures,
        TrainingPlan(recipe.steps, lr=recipe.lr, weight_decay=0.0, validate_every=max(1, recipe.steps // 4)),
        metric="cross_entropy",
        tested="accepted",
        settings={"recipe": asdict(recipe), "corpus": corpus.facts},
        what=what,
    )
    rates = trainee.rates(counted, run.progress) if rated else None
    told = {"vocabulary": target.model.config.vocabulary, "texts": len(corpus), "steps": fitted.history.step}
    facts = fitted.facts(recipe, **told)
    found = made(facts, rates)
    found.save(run.out / file)
    return found
