"""Train what lets a model write and read groups of tokens: a merger, a small decoder, a stop head, and the model too.

HAMburger: Accelerating LLM Inference via Token Smashing (2025). Texts are cut into groups where the model that wrote
them was sure of the next token; then all is learned at once. Here the texts are the model's own, and what is learned of
a token is what the model found likely there; the small decoder begins as the model's last layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.hooks import HookPoint, Hooks
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import floating
from decodery.models.trained.micro_steps import MicroSteps, quarters, shapes

from .corpus import Corpus, TrainingText
from .cut import changeable, parameters, quantized
from .draft import write_draft
from .fitting import fit
from .held_out import HeldOut
from .kind import COUNT, NON_NEGATIVE, Bounded, Run, bounded, kind, option
from .kind_data import OwnTexts, own_texts, validation
from .loop import TrainingPlan, batches
from .tensors import normal, zeros

MODEL = "model"
"""The folder of the tuned model, in the one that is made."""
SURE, SURER, ENDS = 0.05, 0.3, 0.5
LEAST = 1.05
"""Entropy in nats below which a token joins a group, the share of its group's highest below which it does, too, and
what the loss of the stop head weighs; how many tokens a group has on average, at least, to be worth learning."""
_HELD = 64
Grouped = tuple[TrainingText, list[int]]
"""A text, and the sizes of the groups of what was written."""


@dataclass(frozen=True)
class HamburgerRecipe(Bounded):
    """How groups are learned."""

    most: int = bounded(4, "[2, inf)", "Maximum tokens of a group.")
    layers: int = bounded(2, COUNT, "Layers of the small decoder.")
    epochs: float = 3.0
    batch: int = 8
    lr: float = option(1e-3, "Peak learning rate of the new parts.")
    base_lr: float = bounded(1e-4, NON_NEGATIVE, "Peak learning rate of the model itself. 0: do not train it.")
    seed: int = option(0, "Random seed of texts, weights and their order.")


def entropies(text: TrainingText) -> np.ndarray:
    """[m] nats, how unsure the model was of each written token, by those that it found most likely.

    0 where unknown.
    """
    assert text.logprobs is not None
    logprobs = text.logprobs[text.written - 1 : -1].astype(np.float64)
    kept = np.exp(logprobs)
    rest = np.clip(1 - kept.sum(axis=1), 1e-12, 1.0)
    known = np.isfinite(logprobs[:, 0])
    of_kept = -np.where(kept > 0, kept * np.where(np.isfinite(logprobs), logprobs, 0.0), 0.0).sum(axis=1)
    return np.where(known, of_kept - rest * np.log(rest), 0.0)


def groups(entropy: np.ndarray, most: int) -> list[int]:
    """Sizes of groups by entropies [m]: a token joins the one before it where the model was confident."""
    sizes, highest = list[int](), 0.0
    for nats in entropy.tolist():
        if sizes and sizes[-1] < most and (nats < SURE or nats < SURER * highest):
            sizes[-1], highest = sizes[-1] + 1, max(highest, nats)
        else:
            sizes.append(1)
            highest = nats
    return sizes


def _grouped(text: TrainingText, most: int) -> Grouped:
    return text, groups(entropies(text), most)


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """Texts in groups.

    Attributes:
        parts: Of each text its rows: where its prompt lies among the tokens, which groups are its own, and their
            positions.
        likely, share: [m, k] what is to be said of each grouped token.
    """

    ids: torch.Tensor  # [t] all their tokens
    members: torch.Tensor  # [g, most] which of them each group has
    lengths: torch.Tensor  # [g]
    parts: list[tuple[slice, slice, np.ndarray]]
    heads: torch.Tensor  # [g] the row that says each group's first token
    likely: torch.Tensor
    share: torch.Tensor
    right: torch.Tensor  # [m] the tokens
    ends: torch.Tensor  # [m] 1 where a group ends; after: [m] bool, what the small decoder says.
    after: torch.Tensor

    @classmethod
    def of(cls, texts: Sequence[TrainingText], sizes: Sequence[Sequence[int]], most: int) -> GroupBatch:
        """A batch of grouped texts."""
        ids, members, parts, heads, likely, share = [], [], [], [], [], []
        first, rows = 0, 0
        for text, own in zip(texts, sizes, strict=True):
            starts = text.written + np.cumsum([0, *own])
            slots = first + starts[:-1, None] + np.arange(most)
            # What lies after a group's end is not looked at.
            members.append(slots.clip(max=first + len(text.tokens) - 1))
            begun = sum(map(len, members[:-1]))
            positions = np.concatenate([np.arange(text.written), starts[1:-1] - 1])
            parts.append((slice(first, first + text.written), slice(begun, begun + len(own) - 1), positions))
            heads.append(rows + text.written - 1 + np.arange(len(own)))
            ids.append(text.tokens)
            found = _wanted(text)
            likely.append(found[0])
            share.append(found[1])
            first, rows = first + len(text.tokens), rows + len(positions)
        lengths = np.concatenate([np.asarray(own) for own in sizes])
        inside = np.arange(most) < lengths[:, None]
        whole, every = np.concatenate(ids).astype(np.int64), np.concatenate(members)
        ends = np.arange(1, most + 1) == lengths[:, None]
        after = np.broadcast_to(np.arange(most) > 0, inside.shape)
        arrays = whole, every, lengths, np.concatenate(heads), np.concatenate(likely), np.concatenate(share)
        ids_, members_, lengths_, heads_, likely_, share_ = (torch.from_numpy(each) for each in arrays)
        right = torch.from_numpy(whole[every[inside]])
        last = torch.from_numpy(ends[inside].astype(np.float32)), torch.from_numpy(after[inside])
        return cls(ids_, members_, lengths_, parts, heads_, likely_, share_, right, *last)


def _wanted(text: TrainingText) -> tuple[np.ndarray, np.ndarray]:
    """[m, k] tokens and shares of what is to be said of each written token: what the model found likely, or itself."""
    assert text.likely is not None and text.logprobs is not None
    rows = slice(text.written - 1, -1)
    likely, logprobs = text.likely[rows].astype(np.int64), text.logprobs[rows].astype(np.float32)
    known = np.isfinite(logprobs[:, 0])
    share = np.where(known[:, None], np.exp(logprobs), np.eye(1, likely.shape[1], dtype=np.float32))
    likely[~known, 0] = text.tokens[text.written :][~known]
    return likely, share / share.sum(axis=1, keepdims=True)


def said(base: Transformer, parts: MicroSteps, training_batch: GroupBatch) -> torch.Tensor:
    """[m, hidden] states that the head reads for each grouped token, one pass of each module for all."""
    embedded = base.embed_tokens(training_batch.ids.to(base.device)).to(parts.dtype)
    rows = embedded[training_batch.members]
    merged = parts.merged(rows, training_batch.lengths)
    segments = [
        Segment(positions, states=torch.cat([embedded[prompt], merged[own]]))
        for prompt, own, positions in training_batch.parts
    ]
    batch, sites = Batch(segments), [HookPoint("residual", tap) for tap in parts.taps]
    hooks = Hooks.reading(sites)
    base.layers(base.embed(batch), batch, hooks)
    *inner, last = (hooks.states[each][training_batch.heads].to(parts.dtype) for each in sites)
    last = base.final_norm(last)
    longer = training_batch.lengths > 1
    whole = rows.new_zeros(rows.shape)
    whole[:, 0] = last
    taps = torch.stack([*inner, last], dim=1)[longer]
    if len(taps):
        whole[longer, 1:] = base.final_norm(parts.spoken(taps, rows[longer][:, :-1]))
    return whole[torch.arange(rows.shape[1], device="cpu") < training_batch.lengths[:, None]]


def losses(
    base: Transformer, parts: MicroSteps, training_batch: GroupBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[m] nats of what is to be said of each token; [m] of where groups end; logits [m, vocab]."""
    states = said(base, parts, training_batch)
    logits = base.project(states)
    spoken = -(training_batch.share * logits.log_softmax(dim=-1).gather(1, training_batch.likely)).sum(dim=1)
    stops = binary_cross_entropy_with_logits(parts.ends(states), training_batch.ends.to(states.dtype), reduction="none")
    return spoken, stops, logits


def untrained(base: Transformer, recipe: HamburgerRecipe) -> MicroSteps:
    """Groups are the means of their tokens' embeddings, the small decoder is the model's last layers."""
    config, draws = base.config, torch.Generator().manual_seed(recipe.seed)
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config.hidden_size, recipe.layers, recipe.most, config.intermediate_size, sizes):
        kind, *rest = name.split(".")
        if kind == "micro":
            part = getattr(base.weights.layers[config.num_layers - recipe.layers + int(rest[0])], rest[1])
            tensors[name] = (part if isinstance(part, torch.Tensor) else floating(part).weight).float().clone()
        elif len(shape) == 1 or kind == "merge":
            tensors[name] = zeros(*shape)
        else:
            tensors[name] = normal(draws, *shape) * shape[-1] ** -0.5
    heads = config.num_heads, config.num_kv_heads
    return MicroSteps(tensors, quarters(config.num_layers), *heads, config.rope.theta)


def _batch(some: Sequence[Grouped], most: int) -> GroupBatch:
    return GroupBatch.of([text for text, _ in some], [sizes for _, sizes in some], most)


def figures(base: Transformer, parts: MicroSteps, held: Sequence[Grouped], recipe: HamburgerRecipe) -> dict[str, float]:
    """Of held-out texts, cut into groups by the model's own entropies: loss.

    Nats of what is to be said of a group's first token and of those after it, and how often the most likely token is
    the text's; how often the stop head is right; tokens of a group.
    """
    totals = dict.fromkeys(("loss", "nats first", "nats after", "right first", "right after", "ends right"), 0.0)
    counts, tokens = {"first": 0, "after": 0}, 0
    for number in range(0, len(held), recipe.batch):
        training_batch = _batch(held[number : number + recipe.batch], recipe.most)
        spoken, stops, logits = losses(base, parts, training_batch)
        same = logits.argmax(dim=-1) == training_batch.right
        totals["loss"] += float((spoken + ENDS * stops).sum())
        # Less than log 2 where the more likely answer is right.
        totals["ends right"] += int((stops < np.log(2)).sum())
        tokens += len(spoken)
        for name, rows in (("first", ~training_batch.after), ("after", training_batch.after)):
            totals[f"nats {name}"] += float(spoken[rows].sum())
            totals[f"right {name}"] += int(same[rows].sum())
            counts[name] += int(rows.sum())
    found = {name: total / max(1, counts.get(name.split()[-1], tokens)) for name, total in totals.items()}
    return {**found, "tokens of a group": tokens / max(1, counts["first"])}


def train_hamburger(run: Run, corpus: Corpus) -> MicroSteps:
    """Train micro steps on the model's own texts, of which every twentieth is held out.

    Where the model learns, too, its copy is left in the folder `model`, in int8, and the parts are for that one.
    """
    target, out, recipe, model = run.loaded, run.out, run.of(HamburgerRecipe), run.loaded.model
    if not isinstance(model, Transformer):
        raise UnsupportedModel(f"{target.name} cannot learn groups: use a model that this package runs itself")
    config = model.config
    if not config.usual or config.experts or config.shortcuts or config.num_layers < recipe.layers:
        raise UnsupportedModel(f"{target.name} has layers that no small decoder is made of: use another model")
    if recipe.base_lr and not config.tie_embeddings:
        raise UnsupportedModel(f"{target.name} has a head of its own, and cannot learn along: give it --base-lr 0")
    if corpus.facts.get("vocab_size") != model.vocab_size or not corpus.facts.get("top"):
        raise SettingsError(f"{corpus.folder} holds no text of {target.name} with what it found likely: write some")
    written, others = ([number for number in part if corpus[number].taught > 0] for part in corpus.split())
    learned, held = ([_grouped(corpus[number], recipe.most) for number in part] for part in (written, others[:_HELD]))
    known = HeldOut.of(held, corpus.prompts(others[:_HELD]))
    sizes = [size for _, own in learned for size in own]
    if not held or sum(sizes) < LEAST * len(sizes):
        raise SettingsError(
            f"{target.name} is hardly ever sure of its next token in {corpus.folder}, so that there are no groups to "
            "learn: give it other prompts, or more texts"
        )
    base = changeable(model)
    parts = untrained(base, recipe)
    tuned = {f"base.{name}": tensor for name, tensor in (parameters(base) if recipe.base_lr else {}).items()}
    chosen = batches(len(learned), min(recipe.batch, len(learned)), recipe.seed)
    steps = max(1, round(recipe.epochs * len(learned) / recipe.batch))

    def loss(step: int) -> torch.Tensor:
        spoken, stops, _ = losses(base, parts, _batch([learned[number] for number in chosen(step)], recipe.most))
        return spoken.mean() + ENDS * stops.mean()

    def measured(some: Sequence[Grouped]) -> dict[str, float]:
        return figures(base, parts, some, recipe)

    fitted = fit(
        run,
        known,
        {**parts.tensors, **tuned},
        loss,
        measured,
        TrainingPlan(steps, lr=recipe.lr, validate_every=max(1, steps // 20)),
        baseline=("before", measured),
        shares=dict.fromkeys(tuned, recipe.base_lr / recipe.lr),
        settings={"recipe": asdict(recipe), "corpus": corpus.facts, "model": model.fingerprint},
        what="learning groups",
    )
    facts = fitted.facts(recipe, texts=len(corpus))
    fingerprint = model.fingerprint
    if recipe.base_lr:
        copied = quantized(base)
        fingerprint = copied.fingerprint
        write_draft(copied, target, out / MODEL)
    found = MicroSteps(parts.tensors, parts.taps, parts.heads, parts.kv_heads, parts.theta, facts, fingerprint)
    found.save(out / MicroSteps.FILE)
    return found


@kind(
    lambda run: (
        f"Groups are ready: -m {run.out / MODEL if run.of(HamburgerRecipe).base_lr else run.model} "
        f"--logits-source hamburger:micro={run.out}"
    ),
    (OwnTexts(max_new_tokens=128), HamburgerRecipe()),
    "--out groups",
    model="to train",
    file=MicroSteps.FILE,
)
def _hamburger(run: Run) -> Mapping[str, Any]:
    """Train MODEL to write several tokens per row, and to read them as one row.

    Texts are cut into groups where MODEL was sure of the next token. A copy of MODEL is trained too and saved in
    DIR/model, unless --base-lr is 0.
    """
    return validation(train_hamburger(run, own_texts(run)))
