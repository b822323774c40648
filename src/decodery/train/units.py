"""Train the placeholders that `lexical-unit` feeds: their embeddings alone, while the model stays as it is.

Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs (2024) fine-tunes the model on
runs of tokens it is sure of, read as placeholders. Here the placeholders learn and nothing else does, so that the model
writes what it wrote before. A text is read once, and placeholders are put behind many of its places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import SettingsError
from ..model.batch import Batch, Segment
from ..model.load import LoadedModel
from ..model.placeholders import Placeholders
from ..model.protocol import LanguageModel
from ..model.store import Progress, silent, write_text
from ..model.transformer import Transformer
from ..model.weights import Dense
from .card import CARD, refuse_others
from .corpus import Corpus, Text
from .loop import History, Plan, batches, train
from .traced import TracedCache

UNITS = "units.safetensors"
_HELD = 16
"""Texts that validation reads."""
check_folder = partial(refuse_others, made=UNITS, what="holds no units")
"""Raises SettingsError where training would overwrite something else."""


@dataclass(frozen=True)
class UnitsRecipe:
    """How placeholders learn.

    span: tokens of the longest unit, of which the first needs no placeholder. alpha: taught are the tokens of runs in
    which the model gave each token at least this probability; 0 teaches all. places: how many places of a text are
    taught in a step. batch: texts per step; there are few numbers to learn, so that one is enough.
    """

    span: int = 4
    alpha: float = 0.5
    steps: int = 300
    lr: float = 3e-2
    places: int = 16
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.span < 2 or not 0 <= self.alpha <= 1 or self.places < 1 or self.batch < 1:
            raise SettingsError("units need a span of at least 2, an alpha from 0 to 1, and places and texts in a step")


@dataclass(frozen=True)
class Lesson:
    """Some places of one text, each with a segment of placeholders behind it; [p, n] is by place and placeholder.

    likely, share: [p, n, k] what the model expects where a placeholder stands, knowing the tokens before. weight: [p,
    n] 1 where that is taught, else 0. right: [p, n] the tokens of the text there, -1 behind its end.
    """

    segments: list[Segment]
    likely: torch.Tensor
    share: torch.Tensor
    weight: torch.Tensor
    right: torch.Tensor


def sure_runs(text: Text, alpha: float) -> np.ndarray:
    """[n] int64: from each token on, how many in a row the model gave at least the probability `alpha`.

    0 for tokens of the prompt and the first one behind it, about which the model was not asked.
    """
    likely, logprobs, n = text.likely, text.logprobs, len(text.tokens)
    if likely is None or logprobs is None:
        raise SettingsError("the texts do not say what the model expected: write them anew, with top=20")
    asked = np.isfinite(logprobs[: n - 1, 0])
    own = np.where(likely[: n - 1] == text.tokens[1:, None], logprobs[: n - 1].astype(np.float32), -np.inf)
    sure = np.zeros(n + 1, dtype=bool)
    sure[1:n] = asked & (np.exp(own.max(axis=1)) >= alpha)
    ends = np.minimum.accumulate(np.where(sure, n, np.arange(n + 1))[::-1])[::-1]
    return (ends - np.arange(n + 1))[:n]


class School:
    """The model, which stays as it is, the placeholders that learn, and what they are taught.

    reader: the model at the precision it is used at; it reads the texts. model: the same one in floating point.
    """

    def __init__(self, reader: LanguageModel, model: Transformer, recipe: UnitsRecipe) -> None:
        self.reader, self.model, self.recipe = reader, model, recipe
        mean = model.weights.embedding.float().mean(dim=0)
        self.placeholders = mean.repeat(recipe.span - 1, 1).requires_grad_(True)

    def lesson(self, text: Text, alpha: float, random: np.random.Generator | None = None) -> Lesson | None:
        """`places` places of a text, random ones or evenly spread; None where it teaches nothing.

        A place is the last token known: the model itself says the next one, placeholders those behind it. Taught are
        places whose next two tokens at least were sure.
        """
        count, runs = self.recipe.span - 1, sure_runs(text, alpha)
        places = np.flatnonzero(runs[1:] >= 2)
        if not len(places):
            return None
        if len(places) > self.recipe.places:
            even = np.linspace(0, len(places) - 1, self.recipe.places).round().astype(np.int64)
            drawn = even if random is None else random.choice(len(places), self.recipe.places, replace=False)
            places = places[np.sort(drawn)]
        tokens = text.tokens.astype(np.int64)
        past = self._read(tokens[: places[-1] + 1])
        segments = [
            Segment(
                np.arange(place + 1, place + count + 1),
                states=self.placeholders,
                cache=TracedCache(past[:, :, :, : place + 1]),
            )
            for place in places.tolist()
        ]
        ahead = places[:, None] + np.arange(1, count + 1)
        there = ahead + 1 < len(tokens)
        at = np.where(there, ahead, 0)
        assert text.likely is not None and text.logprobs is not None
        weight = there & (np.arange(2, count + 2) <= runs[places + 1][:, None])
        share = np.where(weight[..., None], np.exp(text.logprobs[at].astype(np.float32)), 0.0)
        return Lesson(
            segments,
            torch.from_numpy(text.likely[at].astype(np.int64)),
            torch.from_numpy(share / share.sum(axis=-1, keepdims=True).clip(min=1e-9)),
            torch.from_numpy(weight.astype(np.float32)),
            torch.from_numpy(np.where(there, tokens[np.where(there, ahead + 1, 0)], -1)),
        )

    @torch.no_grad()
    def _read(self, tokens: np.ndarray) -> torch.Tensor:
        """Keys and values [layers, 2, kv_heads, n, head_dim] of a text."""
        cache = self.reader.new_cache()
        self.reader.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
        cache.keep(range(len(tokens)))
        return cache.data[:, :, :, : len(tokens)].to(self.model.device)

    def logq(self, lessons: Sequence[Lesson]) -> torch.Tensor:
        """Log-probabilities [places, n, vocab] where placeholders stand."""
        logits = self.model.forward(Batch([each for lesson in lessons for each in lesson.segments])).logits
        return logits.view(-1, self.recipe.span - 1, logits.shape[-1]).log_softmax(dim=-1)

    def loss(self, texts: Sequence[Text], random: np.random.Generator) -> torch.Tensor:
        """Cross-entropy against what the model expected, in nats per token taught."""
        lessons = [each for text in texts if (each := self.lesson(text, self.recipe.alpha, random)) is not None]
        if not lessons:
            return self.placeholders.sum() * 0.0
        return distance(self.logq(lessons), lessons)

    @torch.no_grad()
    def figures(self, texts: Sequence[Text]) -> dict[str, float]:
        """What validation looks at, over places evenly spread along texts that were not learned from.

        right_n: how often the likeliest token at placeholder n was the text's. accepted: how many tokens of a unit were
        right before the first wrong one, on average, which is what a pass that checks them emits beyond its own token.
        """
        totals, nats, places = np.zeros(self.recipe.span), 0.0, 0
        for text in texts:
            if (lesson := self.lesson(text, 0.0)) is None:
                continue
            logq = self.logq([lesson])
            same = (logq.argmax(dim=-1).cpu() == lesson.right).numpy()
            totals += [*same.sum(axis=0), np.logical_and.accumulate(same, axis=1).sum()]
            nats += float(distance(logq, [lesson])) * len(same)
            places += len(same)
        *each, accepted = (totals / max(1, places)).tolist()
        found = {f"right_{number}": share for number, share in enumerate(each, start=1)}
        return {"accepted": accepted, **found, "cross_entropy": nats / max(1, places)}


def distance(logq: torch.Tensor, lessons: Sequence[Lesson]) -> torch.Tensor:
    """Cross-entropy of `logq` [places, n, vocab] against what the model expected, in nats per token taught."""
    likely, share, weight = (
        torch.cat([getattr(each, name) for each in lessons]).to(logq.device) for name in ("likely", "share", "weight")
    )
    each = -(share * logq.gather(2, likely)).sum(dim=-1)
    return (each * weight).sum() / weight.sum().clamp(min=1e-9)


def train_units(
    target: LoadedModel,
    model: LanguageModel,
    corpus: Corpus,
    out: Path,
    *,
    recipe: UnitsRecipe | None = None,
    command: str = "",
    progress: Progress = silent,
) -> tuple[Placeholders, History]:
    """Train placeholders for `target` on texts it has written and leave them in the folder `out`, for `lexical-unit`.

    model: the same one in floating point, through which gradients go. corpus: see `data.write_texts`, of which every
    twentieth text is held out. Interrupted, it goes on from its last checkpoint in `out` when called again.

    Raises SettingsError for a model that is not in floating point, and for texts that teach nothing.
    """
    recipe = recipe or UnitsRecipe()
    check_folder(out)
    if not isinstance(model, Transformer) or not isinstance(model.weights.layers[0].qkv, Dense):
        raise SettingsError("units are trained over a model in floating point: load it with dtype='float32'")
    if corpus.facts.get("vocab_size") != model.vocab_size:
        raise SettingsError(f"{corpus.folder} holds text of another vocabulary than that of {target.name}")
    learned, others = corpus.split()
    learned = [number for number in learned if (sure_runs(corpus[number], recipe.alpha) > 2).any()]
    if not learned or not others:
        raise SettingsError(f"{corpus.folder} holds too few texts to learn from and to hold some out: write more")
    school = School(target.model, model, recipe)
    held = [corpus[number] for number in others[:_HELD]]
    batch = batches(len(learned), recipe.batch, recipe.seed)

    def loss(step: int) -> torch.Tensor:
        random = np.random.default_rng([recipe.seed, step])
        return school.loss([corpus[learned[number]] for number in batch(step)], random)

    history = train(
        {"placeholders": school.placeholders},
        loss,
        Plan(recipe.steps, lr=recipe.lr, weight_decay=0.0, validate_every=max(1, recipe.steps // 4)),
        out / "training",
        validate=lambda: school.figures(held),
        metric="accepted",
        higher=True,
        settings={"recipe": asdict(recipe), "corpus": corpus.facts},
        progress=progress,
        what="training placeholders",
    )
    facts = _facts(target, corpus, recipe, history, command)
    found = Placeholders(school.placeholders.detach().cpu(), facts)
    found.save(out / UNITS)
    # Last: without the file beside it, it would be taken for somebody else's.
    write_text(out / CARD, _card(facts, corpus, history))
    return found, history


def _facts(target: LoadedModel, corpus: Corpus, recipe: UnitsRecipe, history: History, command: str) -> dict[str, Any]:
    figures = history.metrics[str(history.best_step)]
    return {
        "model": target.name,
        "vocabulary": target.model.config.vocabulary,
        "command": command,
        "texts": len(corpus),
        "steps": history.step,
        "best_step": history.best_step,
        "validation": {name: round(value, 4) for name, value in figures.items()},
        "recipe": asdict(recipe),
    }


def _card(facts: Mapping[str, Any], corpus: Corpus, history: History) -> str:
    before, after = history.metrics["0"], facts["validation"]
    rows = "\n".join(f"| {name} | {before[name]:.3f} | {value:.3f} |" for name, value in after.items())
    command = f"\n    {facts['command']}\n" if facts["command"] else ""
    recipe = facts["recipe"]
    temperatures = ", ".join(map(str, corpus.facts.get("temperatures", [])))
    return f"""# Placeholders for {facts["model"]}

{facts["model"]} reads them in place of tokens that are not written yet, and what it expects there is drafted:

    decodery generate "..." -m {facts["model"]} --drafter lexical-unit:units=THIS_FOLDER

Drafts never change what it writes; better ones only make it faster. Nothing about the model itself was trained.

## What they are

{recipe["span"] - 1} input embeddings, one for each token behind the next one (Decoding at the Speed of Thought:
Harnessing Parallel Decoding of Lexical Units for LLMs, 2024).

## How they were made
{command}
Learned from {facts["texts"]} texts that {facts["model"]} wrote at temperatures {temperatures}, at places where it gave
each of the next tokens a probability of at least {recipe["alpha"]:g}, in {facts["steps"]} steps, of which step
{facts["best_step"]} was best on the texts held out.

## What they are worth

On texts held out, at places evenly spread, before and after training:

| | untrained | trained |
|---|---:|---:|
{rows}

accepted: tokens of a unit that are right before the first wrong one, so what a pass that checks units emits beyond its
own token if every unit is drafted whole. right_n: how often the likeliest token at placeholder n is the text's.
cross_entropy: against what the model expects there once it knows the tokens before, in nats.
"""
