"""Train a draft head on the target's own texts: one recipe for all kinds, which differ in how they are unrolled.

A head is unrolled over texts that are known and learns what the target expects behind every token of them (EAGLE-3:
Scaling up Inference Acceleration of Large Language Models via Training-Time Test, 2025, for all kinds). The target is
read once; what it showed is kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.topk import topk
from ..draft.heads.head import EMBEDDED, HEAD, BoundHead, Guess, TrainedHead
from ..errors import SettingsError
from ..model.load import LoadedModel
from ..model.sites import Tap
from ..model.store import Progress, silent, write_text
from ..model.transformer import Transformer
from ..model.weights import floating
from .card import CARD, refuse_others
from .corpus import Corpus, Text, check_texts
from .cut import keep_tokens
from .embedded import Shown
from .features import Features, FeatureStore
from .loop import Plan, batches, train

TOP = 64
"""Likeliest tokens of the target that are learned from at every place."""
DEPTHS = 5
"""How many tokens ahead a finished head is judged."""
_HELD = 48
_RANKS = 10
check_folder = partial(refuse_others, made=HEAD, what="is no draft head")
"""Raises SettingsError where training would overwrite something else."""


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is trained. outputs: tokens it can draft, those that the texts hold most often; 0: all.

    length: tokens of a text that are learned from at a time; batch: texts per step; decay: what a step further ahead
    weighs against the one before it.
    """

    outputs: int = 6144
    epochs: float = 3.0
    lr: float = 4e-4
    batch: int = 8
    length: int = 224
    decay: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.outputs < 0 or not self.epochs > 0 or min(self.batch, self.length) < 1 or not 0 < self.decay <= 1:
            raise SettingsError("a head needs outputs >= 0, epochs > 0, batch and length >= 1 and decay from 0 to 1")


@dataclass(frozen=True, eq=False)
class Taught:
    """Texts side by side. states: {tap: [b, n, width]}; tokens: [b, n + steps - 1], of which token i follows state i.

    likely, share: [b, n + steps - 1, k], what the target expects behind each of these tokens, as outputs of the head,
    and with which probability; 0 for tokens the head lacks. weight: [b, n + steps - 1], 0 where nothing is taught.
    """

    states: dict[Tap, torch.Tensor]
    tokens: torch.Tensor
    likely: torch.Tensor
    share: torch.Tensor
    weight: torch.Tensor

    @property
    def places(self) -> int:
        return next(iter(self.states.values())).shape[1]

    def unrolled(self, head: BoundHead, steps: int) -> list[Guess]:
        return head.unroll(self.states, self.tokens[:, : self.places + steps - 1], steps)


def taught(
    texts: Sequence[Features], place: torch.Tensor, steps: int, length: int, dtype: torch.dtype, lead: int = 0
) -> Taught:
    """At most the last `length` places of each text; prompts are read, and what is written is learned.

    place: [vocab] the output of a token, -1 for those without. lead: see `BoundHead`.
    """
    texts = [_end(each, length + 1) for each in texts]
    n = max(len(each.text.tokens) for each in texts) - 1
    b, top = len(texts), texts[0].likely.shape[1]
    tokens = torch.zeros(b, n + steps - 1, dtype=torch.int64, device="cpu")
    likely, share = (
        torch.zeros(b, n + steps - 1, top, dtype=torch.int64, device="cpu"),
        torch.zeros(b, n + steps - 1, top, dtype=torch.float32, device="cpu"),
    )
    weight = torch.zeros(b, n + steps - 1, dtype=torch.float32, device="cpu")
    states = {tap: torch.zeros(b, n, rows.shape[1], dtype=dtype, device="cpu") for tap, rows in texts[0].states.items()}
    for row, each in enumerate(texts):
        own = len(each.text.tokens) - 1
        tokens[row, :own] = torch.from_numpy(each.text.tokens[1:].astype(np.int64))
        for tap, found in each.states.items():
            states[tap][row, :own] = found[lead : own + lead]
        outputs = place[each.likely[1:]]
        known = torch.where(outputs >= 0, each.logprobs[1:].exp(), 0.0)
        mass = known.sum(dim=1)
        likely[row, :own], share[row, :own] = outputs.clamp(min=0), known / mass.clamp(min=1e-9)[:, None]
        # What the target expects behind the last token of its prompt is the first thing it wrote.
        first = max(each.text.written - 2, 0)
        weight[row, first:own] = mass[first:]
        if each.behind is not None:
            rows = states.setdefault(EMBEDDED, torch.zeros(b, n, each.behind.shape[1], dtype=dtype, device="cpu"))
            rows[row, :own] = each.behind[lead : own + lead]
    return Taught(states, tokens, likely, share.to(dtype), weight.to(dtype))


def _end(each: Features, most: int) -> Features:
    """The last `most` tokens of a text and what belongs to them."""
    first = max(0, len(each.text.tokens) - most)
    text = Text(each.text.tokens[first:], max(each.text.written - first, 0))
    states = {tap: rows[first:] for tap, rows in each.states.items()}
    behind = None if each.behind is None else each.behind[first:]
    return Features(text, states, each.likely[first:], each.logprobs[first:], behind)


def distance(head: BoundHead, guesses: list[Guess], lesson: Taught, decay: float) -> torch.Tensor:
    """Cross-entropy of the guesses against what the target expects, in nats per token, steps weighted by `decay`."""
    total, weights = torch.zeros((), dtype=torch.float32, device="cpu"), 0.0
    for step, guess in enumerate(guesses):
        rows, likely, share, weight = _step(lesson, step)
        logits = head.project(guess.spoken[rows], step)
        each = logits.logsumexp(dim=-1) - (share * logits.gather(1, likely)).sum(dim=-1)
        total = total + decay**step * (each * weight).sum() / weight.sum().clamp(min=1e-9)
        weights += decay**step
    return total / weights


def _step(lesson: Taught, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where a step is taught, [b, n] bool, and what, of these places alone."""
    span = slice(step, step + lesson.places)
    rows = lesson.weight[:, span] > 0
    return rows, lesson.likely[:, span][rows], lesson.share[:, span][rows], lesson.weight[:, span][rows]


@torch.no_grad()
def judged(head: BoundHead, lessons: Sequence[Taught], decay: float) -> dict[str, float]:
    """What a head is worth on texts held out, unrolled over their own tokens.

    agreement.D: how often its likeliest token is the target's, D tokens ahead; cross_entropy: see `distance`; tokens:
    accepted per greedy chain of as many drafts, were the depths independent.
    """
    depths = min(DEPTHS, head.reach)
    right, places, distances = [0.0] * depths, [0] * depths, []
    for lesson in lessons:
        guesses = lesson.unrolled(head, depths)
        distances.append(float(distance(head, guesses, lesson, decay)))
        for step, guess in enumerate(guesses):
            rows, likely, share, _ = _step(lesson, step)
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
def rank_rates(head: BoundHead, lessons: Sequence[Taught]) -> list[list[float]]:
    """How often its guess of each of the first ranks is the target's choice, by depth, judged as in `judged`."""
    depths = min(DEPTHS, head.reach)
    hits, places = np.zeros((depths, _RANKS)), np.zeros(depths)
    for lesson in lessons:
        for step, guess in enumerate(lesson.unrolled(head, depths)):
            rows, likely, share, _ = _step(lesson, step)
            found = torch.from_numpy(topk(head.project(guess.spoken[rows], step), _RANKS)[0])
            right = ((found == likely[:, :1]) & (share[:, :1] > 0)).sum(dim=0)
            hits[step, : len(right)] += right.numpy()
            places[step] += len(found)
    return (hits / np.maximum(places, 1)[:, None]).round(4).tolist()


def train_head(
    target: LoadedModel,
    kind: type[BoundHead],
    corpus: Corpus,
    out: Path,
    *,
    shape: Mapping[str, Any] | None = None,
    recipe: HeadRecipe | None = None,
    command: str = "",
    shown: Shown | None = None,
    progress: Progress = silent,
) -> dict[str, float]:
    """Train a head of a kind on texts that `target` has written; `out` is what its drafter takes.

    shape: what the kind's `untrained` takes beside the model. shown: texts behind embeddings, from which it learns more
    and more in the second half of its steps, in place of the others, and by which it is then judged. Every twentieth
    text is held out. Returns what `judged` says of the finished int8 head. Interrupted, it goes on from its last
    checkpoint in `out` when called again.
    """
    recipe = recipe or HeadRecipe()
    check_folder(out)
    model = target.model
    if not isinstance(model, Transformer):
        raise SettingsError(f"{target.name} does not run in this package's own transformer: no head is trained for it")
    check_texts(len(corpus))
    tensors, settings = kind.untrained(model, recipe.seed, **(shape or {}))
    learned, held = corpus.split()
    if 0 < recipe.outputs < model.vocab_size:
        texts = (corpus[number] for number in learned)
        tensors["vocabulary"] = keep_tokens(texts, recipe.outputs, model, model.config.eos_ids).ids.int()
    trained = TrainedHead(kind.kind, tensors, settings, model=model.fingerprint)
    head = kind(trained, model)
    plain = _Store(FeatureStore(model, corpus, head.taps, out / "features", TOP, progress), learned, held[:_HELD])
    seen = None
    if shown is not None:
        check_texts(len(shown.corpus))
        learned_of, held_of = shown.corpus.split()
        features = FeatureStore(model, shown.corpus, head.taps, out / "shown", TOP, progress, shown.embeddings)
        seen = _Store(features, learned_of, held_of[:_HELD])
    steps = max(1, round(recipe.epochs * len(learned) / recipe.batch))
    course = _Course(head, plain, seen, recipe, steps)
    plan = Plan(steps, lr=recipe.lr, warmup=0.05, clip=0.5, validate_every=max(1, min(100, steps // 10)))
    history = train(
        *(course.parameters, course.loss, plan, out / "training"),
        validate=course.validate,
        metric="tokens",
        higher=True,
        settings={"recipe": asdict(recipe), "kind": kind.kind, "corpus": corpus.facts, "head": settings},
        progress=progress,
    )
    finished = TrainedHead(kind.kind, head.parts.quantized(), settings, model=model.fingerprint)
    scores = judged(kind(finished, model), course.held, recipe.decay)
    facts = {"command": command, "target": target.name, **asdict(recipe), "steps": history.best_step, **scores}
    facts["rates"] = rank_rates(kind(finished, model), course.held)
    replace(finished, facts=facts).save(out / HEAD)
    # Last: without the head beside it, it would be taken for somebody else's.
    write_text(out / CARD, _card(kind.kind, target.name, corpus, facts, scores, history.metrics["0"]))
    return scores


@dataclass(frozen=True)
class _Store:
    """What the target showed of texts, and the numbers of those that are learned and of those held out."""

    features: FeatureStore
    learned: Sequence[int]
    held: Sequence[int]


class _Course:
    """What the steps of a training share. shown: texts behind embeddings, None for none."""

    def __init__(self, head: BoundHead, plain: _Store, shown: _Store | None, recipe: HeadRecipe, steps: int) -> None:
        self.head, self.plain, self.shown, self.recipe, self.steps = head, plain, shown, recipe, steps
        # The target's words are read in floating point, through which gradients pass.
        head.shared = floating(head.shared)
        self.parameters = {name: each for name, each in head.parts.tensors.items() if each.is_floating_point()}
        for tensor in self.parameters.values():
            tensor.requires_grad_(True)
        self._place = torch.full((head.model.vocab_size,), -1, dtype=torch.int64, device="cpu")
        ids = torch.arange(head.model.vocab_size, device="cpu") if head.vocabulary is None else head.vocabulary
        self._place[ids] = torch.arange(len(ids), device="cpu")
        self._batch = batches(len(plain.learned), recipe.batch, recipe.seed)
        self._shown = batches(len(shown.learned), recipe.batch, recipe.seed) if shown is not None else self._batch
        judged, size = shown or plain, recipe.batch
        held = [judged.features[number] for number in judged.held]
        self.held = [self._lesson(held[first : first + size]) for first in range(0, len(held), size)]

    def loss(self, step: int) -> torch.Tensor:
        texts = [self.plain.features[self.plain.learned[each]] for each in self._batch(step)]
        if self.shown is not None:
            share = max(0.0, 2 * step / self.steps - 1)
            drawn = np.random.default_rng([self.recipe.seed, step]).random(len(texts)) < share
            for place, number in enumerate(self._shown(step)):
                if drawn[place]:
                    texts[place] = self.shown.features[self.shown.learned[number]]
        lesson = self._lesson(texts)
        guesses = lesson.unrolled(self.head, self.head.unrolled(step / self.steps))
        known = lesson.weight[:, : lesson.places] > 0
        return distance(self.head, guesses, lesson, self.recipe.decay) + self.head.regret(guesses, lesson.states, known)

    def validate(self) -> dict[str, float]:
        return judged(self.head, self.held, self.recipe.decay)

    def _lesson(self, texts: Sequence[Features]) -> Taught:
        steps = max(self.head.taught, DEPTHS)
        dtype = next(iter(self.parameters.values())).dtype
        return taught(texts, self._place, steps, self.recipe.length, dtype, self.head.lead)


def _card(
    kind: str, target: str, corpus: Corpus, facts: dict[str, object], scores: dict[str, float], before: dict[str, float]
) -> str:
    tokens = sum(len(text.tokens) - text.written for text in corpus)
    rows = "\n".join(
        f"| {step + 1} | {before[name]:.1%} | {scores[name]:.1%} |"
        for step in range(DEPTHS)
        if (name := f"agreement.{step + 1}") in scores
    )
    return f"""# A draft head for {target}

It guesses what {target} writes next from the model's own hidden states, for speculative decoding:

    decodery generate "..." -m {target} --drafter {kind}:head=THIS_FOLDER

Drafts never change what the model writes; a better head only makes it faster.

## How it was made

    {facts["command"]}

Trained on {tokens} tokens that {target} wrote in {len(corpus)} texts, in {facts["steps"]} steps; it can draft
{facts["outputs"] or "all"} tokens. Linear layers are int8.

## What it is worth

How often its likeliest token is the target's, on texts held out, given the text's own tokens before it:

| tokens ahead | untrained | trained |
|---|---|---|
{rows}
"""
