"""What a draft head learns of texts that the target has read, and how right it is about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decodery.core.topk import topk
from decodery.models.hooks import Tap
from decodery.speculative.drafters.falcon import FalconHead
from decodery.speculative.heads.head import EMBEDDED, BoundHead, Guess

from .corpus import TrainingText
from .features import FeatureRows
from .tensors import even

DEPTHS = 5
"""How many tokens ahead a finished head is judged."""
_RANKS = 10
_MOST, _LEAST = 0.45, 0.1
"""The part of the wrong guesses whose answers are shown, at the beginning and at the end of a training."""
_LK_RATE = 3.0
LOSSES = ("kl", "lk_hybrid")
"""What a head can be trained to make small; see `distance`."""


@dataclass(frozen=True, eq=False)
class Taught:
    """Texts side by side.

    Attributes:
        likely, share: [b, n + steps - 1, k], what the target expects after each of these tokens, as outputs of the
            head, and with which probability; 0 for tokens the head lacks.
    """

    states: dict[Tap, torch.Tensor]  # {tap: [b, n, width]}
    tokens: torch.Tensor  # [b, n + steps - 1], of which token i follows state i
    likely: torch.Tensor
    share: torch.Tensor
    weight: torch.Tensor  # [b, n + steps - 1], 0 where nothing is taught
    anchors: torch.Tensor | None = None  # [m] the states after which the head guesses, None for all of them

    @property
    def places(self) -> int:
        return next(iter(self.states.values())).shape[1]

    def unrolled(self, head: BoundHead, steps: int) -> list[Guess]:
        tokens = self.tokens[:, : self.places + steps - 1]
        if self.anchors is None:
            return head.unroll(self.states, tokens, steps)
        return head.unroll_at(self.states, tokens, steps, self.anchors)

    def anchored(self, share: float, random: np.random.Generator) -> Taught:
        """These texts, with guesses after `share` of their states, drawn at random."""
        count = max(1, round(share * self.places))
        drawn = np.sort(random.choice(self.places, count, replace=False))
        return replace(self, anchors=torch.from_numpy(drawn).to(self.weight.device))

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is taught `step` tokens after the first: likely, share [b, m, k] and weight [b, m]."""
        if self.anchors is None:
            span: slice | torch.Tensor = slice(step, step + self.places)
        else:
            span = self.anchors + step
        return self.likely[:, span], self.share[:, span], self.weight[:, span]


def taught(
    texts: Sequence[FeatureRows], place: torch.Tensor, steps: int, length: int, dtype: torch.dtype, lead: int = 0
) -> Taught:
    """At most the last `length` places of each text; prompts are read, and what is written is learned.

    Args:
        place: [vocab] the output of a token, -1 for those without, on the device of the texts.
    """
    texts = [_end(each, length + 1) for each in texts]
    n = max(len(each.text.tokens) for each in texts) - 1
    b, top, device = len(texts), texts[0].likely.shape[1], texts[0].likely.device
    tokens = torch.zeros(b, n + steps - 1, dtype=torch.int64, device="cpu")
    likely = torch.zeros(b, n + steps - 1, top, dtype=torch.int64, device=device)
    share = torch.zeros(likely.shape, dtype=torch.float32, device=device)
    weight = torch.zeros(b, n + steps - 1, dtype=torch.float32, device=device)
    states = {
        tap: torch.zeros(b, n, rows.shape[1], dtype=dtype, device=device) for tap, rows in texts[0].states.items()
    }
    for row, each in enumerate(texts):
        own = len(each.text.tokens) - 1
        tokens[row, :own] = torch.from_numpy(each.text.tokens[1:].astype(np.int64))
        for tap, found in each.states.items():
            states[tap][row, :own] = found[lead : own + lead]
        outputs = place[each.likely[1:]]
        known = torch.where(outputs >= 0, each.logprobs[1:].exp(), 0.0)
        mass = known.sum(dim=1)
        likely[row, :own], share[row, :own] = outputs.clamp(min=0), known / mass.clamp(min=1e-9)[:, None]
        # What the target expects after the last token of its prompt is the first thing it wrote.
        first = max(each.text.written - 2, 0)
        weight[row, first:own] = mass[first:]
        if each.behind is not None:
            rows = states.setdefault(EMBEDDED, torch.zeros(b, n, each.behind.shape[1], dtype=dtype, device=device))
            rows[row, :own] = each.behind[lead : own + lead].to(device)
    return Taught(states, tokens.to(device), likely, share.to(dtype), weight.to(dtype))


def _end(each: FeatureRows, most: int) -> FeatureRows:
    """The last `most` tokens of a text and what belongs to them."""
    first = max(0, len(each.text.tokens) - most)
    text = TrainingText(each.text.tokens[first:], max(each.text.written - first, 0))
    states = {tap: rows[first:] for tap, rows in each.states.items()}
    behind = None if each.behind is None else each.behind[first:]
    return FeatureRows(text, states, each.likely[first:], each.logprobs[first:], behind)


def distance(
    head: BoundHead, guesses: list[Guess], training_batch: Taught, decay: float, loss: str = "kl", *, sure: bool = False
) -> torch.Tensor:
    """The mean distance of guesses from the target's distributions, steps weighted by `decay`.

    Args:
        sure: Whether what the head expects to be accepted is taught besides, by cross-entropy with the overlap of both
            distributions, which is how often a drawn token is accepted. The guesses themselves do not change by it.
        loss: "kl", cross-entropy in nats; or "lk_hybrid", lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha),
            where alpha is the overlap of both distributions at a step and TV = 1 - alpha.
    """
    total, weights = torch.zeros((), dtype=torch.float32, device=training_batch.weight.device), 0.0
    for step, guess in enumerate(guesses):
        rows, likely, share, weight = _step(training_batch, step)
        logits = head.project(guess.spoken[rows], step)
        logq = logits.gather(1, likely) - logits.logsumexp(dim=-1, keepdim=True)
        each = -(share * logq).sum(dim=-1)
        # Of a padded list of likely tokens only those that have a share count.
        overlap = torch.minimum(share, logq.exp()).sum(dim=-1)
        if loss == "lk_hybrid":
            mean = (overlap * weight).sum() / weight.sum().clamp(min=1e-9)
            mixed = torch.exp(-_LK_RATE * mean.detach())
            entropy = -(share * share.clamp(min=1e-9).log()).sum(dim=-1)
            each = mixed * (each - entropy) + (1 - mixed) * (1 - overlap)
        if sure and (expected := head.acceptance(guess.spoken[rows].detach())) is not None:
            accepted = overlap.detach().to(expected).clamp(max=1.0)
            each = each + binary_cross_entropy_with_logits(expected, accepted, reduction="none")
        total = total + decay**step * (each * weight).sum() / weight.sum().clamp(min=1e-9)
        weights += decay**step
    return total / weights


def _step(training_batch: Taught, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where a step is taught, [b, n] bool, and what, of these places alone."""
    likely, share, weight = training_batch.at(step)
    rows = weight > 0
    return rows, likely[rows], share[rows], weight[rows]


def places_of(training_batch: Taught) -> int:
    """How many places the first depth of a head is judged at, see `judged`."""
    return int(_step(training_batch, 0)[0].sum())


@torch.no_grad()
def judged(head: BoundHead, training_batches: Sequence[Taught], decay: float) -> dict[str, float]:
    """What a head is worth on held-out texts, unrolled over their own tokens.

    agreement.D: how often its most likely token is the target's, D tokens ahead; cross_entropy: see `distance`; tokens:
    accepted per greedy chain of as many drafts, were the depths independent.
    """
    depths = min(DEPTHS, head.reach)
    right, places, distances = [0.0] * depths, [0] * depths, []
    for training_batch in training_batches:
        guesses = training_batch.unrolled(head, depths)
        distances.append(float(distance(head, guesses, training_batch, decay)))
        for step, guess in enumerate(guesses):
            rows, likely, share, _ = _step(training_batch, step)
            best = likely.gather(1, share.argmax(dim=1, keepdim=True))[:, 0]
            # The target's own choice is the first of its likely tokens; one that the head lacks is never right.
            first = share[:, 0] > 0
            right[step] += float(((head.project(guess.spoken[rows], step).argmax(dim=-1) == best) & first).sum())
            places[step] += int(rows.sum())
    agreement = [hits / max(count, 1) for hits, count in zip(right, places, strict=True)]
    found = {f"agreement.{step + 1}": value for step, value in enumerate(agreement)}
    found["tokens"] = float(np.cumprod(agreement).sum())
    return found | {"cross_entropy": float(np.mean(distances))}


@torch.no_grad()
def rank_rates(head: BoundHead, training_batches: Sequence[Taught]) -> list[list[float]]:
    """How often each of the first ranks is the target's choice, by depth, measured as in `judged`."""
    depths = min(DEPTHS, head.reach)
    hits, places = np.zeros((depths, _RANKS)), np.zeros(depths)
    for training_batch in training_batches:
        for step, guess in enumerate(training_batch.unrolled(head, depths)):
            rows, likely, share, _ = _step(training_batch, step)
            found = torch.from_numpy(topk(head.project(guess.spoken[rows], step), _RANKS)[0]).to(likely.device)
            right = ((found == likely[:, :1]) & (share[:, :1] > 0)).sum(dim=0)
            hits[step, : len(right)] += right.cpu().numpy()
            places[step] += len(found)
    return (hits / np.maximum(places, 1)[:, None]).round(4).tolist()


def glancing(head: FalconHead, batch: Taught, depths: int, along: float, seed: int) -> list[Guess]:
    """Guesses of a step of a training, some of whose wrong items are the answers, fewer as it goes on.

    It is the coupled sequential glancing distillation (CSGD) of Falcon (2024).
    """
    with torch.no_grad():
        wrong = _wrong(head, batch)
    shown = drawn(wrong, batch.weight[:, : batch.places] > 0, _LEAST + (_MOST - _LEAST) * (1 - along), seed)
    return head.unroll_glancing(batch.states, batch.tokens[:, : batch.places + depths - 1], depths, shown)


def drawn(wrong: torch.Tensor, taught: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Which items are shown [b, n] bool: of each text as many as `share` of its wrong guesses, at random.

    Args:
        wrong: [b, n] bool, which guesses are.
        taught: [b, n] bool, where something is learned.
        share: From 0 to 1.
    """
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    random = even(drawn, *wrong.shape).to(wrong.device)
    places = torch.where(taught, random, torch.inf).argsort(dim=1).argsort(dim=1)
    return (places < (share * wrong.sum(dim=1, keepdim=True)).round()) & taught


def _wrong(head: FalconHead, batch: Taught) -> torch.Tensor:
    """[b, n] bool: whether an item's own guess, the last of its block, is another token than the target's."""
    step = head.block_size - 1
    guess = batch.unrolled(head, step + 1)[step]
    likely, share, weight = batch.at(step)
    wrong = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    rows = weight > 0
    best = likely[rows].gather(1, share[rows].argmax(dim=1, keepdim=True))[:, 0]
    wrong[rows] = head.project(guess.spoken[rows], step).argmax(dim=-1) != best
    return wrong
