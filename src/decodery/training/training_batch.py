"""What texts teach a draft: the target's own distribution wherever it was asked, else the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.hooks import HookPoint, Hooks
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Kept

from .data import TrainingText

_UNIT = 128
"""Numbers of rows are rounded up to this: kernels in bfloat16 are made anew for every shape they have not seen."""


@dataclass(frozen=True)
class TrainingBatch:
    """What some texts teach.

    Rows that fill up have weight 0.
    """

    batch: Batch
    rows: torch.Tensor  # [m], the rows among all of their tokens that have something to predict
    likely: torch.Tensor  # [m, k] outputs of the draft
    share: torch.Tensor  # [m, k] the target's probabilities of them, each row summing to 1
    weight: torch.Tensor  # [m] how much of the target's probability that was, times what the row counts
    count: int


@dataclass(frozen=True)
class BatchPart:
    """What one text teaches: its segment, the rows [m] of it that learn, and what to learn there."""

    text: TrainingText
    segment: Segment
    rows: np.ndarray
    after: np.ndarray  # [m] the place in the text whose next token a row is to predict
    weight: np.ndarray  # [m] what that counts

    @classmethod
    def read(cls, text: TrainingText) -> BatchPart:
        """A text read from left to right, of which every row after the prompt predicts what follows."""
        n = len(text.tokens) - 1
        rows = np.arange(max(text.written - 1, 0), n)
        segment = Segment(np.arange(n), text.tokens[:-1].astype(np.int64))
        return cls(text, segment, rows, rows, np.ones(len(rows), dtype=np.float32))


def training_batch(texts: Sequence[TrainingText], kept: Kept, place: np.ndarray) -> TrainingBatch:
    """Texts read from left to right, see `of_parts`."""
    return of_parts([BatchPart.read(text) for text in texts], kept, place)


def whole_batch(texts: Sequence[TrainingText], model: Transformer) -> TrainingBatch:
    """What texts teach a model that predicts every token."""
    every = np.arange(model.vocab_size)
    ids = torch.from_numpy(every).to(model.device)
    return training_batch(texts, Kept(ids, ids), every)


def of_parts(parts: Sequence[BatchPart], kept: Kept, place: np.ndarray) -> TrainingBatch:
    """Where the target said what it finds likely, that is learned, elsewhere the text's own next token.

    Args:
        place: [vocab], the output of a token, -1 for those without.
    """
    segments, rows, likely, shares, weights = [], [], [], [], []
    first = 0
    width = max((part.text.likely.shape[1] for part in parts if part.text.likely is not None), default=1)
    for part in parts:
        text, after = part.text, part.after
        ids = np.zeros((len(after), width), dtype=np.int64)
        share = np.zeros((len(after), width), dtype=np.float32)
        ids[:, 0], share[:, 0] = text.tokens[after + 1], 1.0
        if text.likely is not None and text.logprobs is not None:
            asked = np.isfinite(text.logprobs[after, 0])
            ids[asked] = text.likely[after][asked]
            share[asked] = np.exp(text.logprobs[after][asked].astype(np.float32))
        segments.append(part.segment)
        rows.append(first + part.rows)
        likely.append(ids)
        shares.append(share)
        weights.append(part.weight)
        first += len(part.segment)
    spare = -first % _UNIT
    if spare:
        segments.append(Segment(np.arange(spare), np.zeros(spare, dtype=np.int64)))
    taught = sum(map(len, rows))
    # Rows that teach nothing have no weight.
    idle = -taught % _UNIT
    rows.append(np.zeros(idle, dtype=np.int64))
    likely.append(np.zeros((idle, width), dtype=np.int64))
    shares.append(np.zeros((idle, width), dtype=np.float32))
    weights.append(np.zeros(idle, dtype=np.float32))
    outputs = place[np.concatenate(likely)]
    device = kept.ids.device
    known = torch.from_numpy(np.where(outputs >= 0, np.concatenate(shares), 0.0).astype(np.float32)).to(device)
    weight = known.sum(dim=1)
    return TrainingBatch(
        Batch(segments),
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(outputs.clip(min=0)).to(device),
        known / weight.clamp(min=1e-9)[:, None],
        weight * torch.from_numpy(np.concatenate(weights)).to(device),
        taught,
    )


def predictions(draft: Transformer, taught: TrainingBatch) -> list[torch.Tensor]:
    """Log-probabilities [m, outputs] of the draft at each exit, where there is something to predict.

    All of them come from one pass; a draft that was cut for no exits has one, after its last layer.
    """
    exits = [HookPoint("residual", leave) for leave in draft.config.exits or (draft.config.num_layers,)]
    hooks = Hooks.reading(exits)
    draft.layers(draft.embed(taught.batch), taught.batch, hooks)
    return [draft.outputs(hooks.states[leave][taught.rows]).float().log_softmax(dim=-1) for leave in exits]


def distance(said: Sequence[torch.Tensor], taught: TrainingBatch) -> torch.Tensor:
    """Cross-entropy of the draft against the target's likely tokens, in nats per token.

    The mean over its exits.
    """
    each = [-(taught.share * logq.gather(1, taught.likely)).sum(dim=1) for logq in said]
    mean = torch.stack(each).mean(dim=0)
    return (mean * taught.weight).sum() / taught.weight.sum().clamp(min=1e-9)


def judged(draft: Transformer, taught: TrainingBatch) -> dict[str, float]:
    """What validation looks at, over the tokens taught.

    cross_entropy: see `distance`. acceptance: the mean of sum min(p, q) over the target's kept likely tokens, at
    temperature 1: how often rejection sampling accepts a drawn token, at least. agreement: how often the two models'
    most likely tokens are the same, which is how often a greedy draft is accepted. Both are those of all layers; of a
    draft with several exits they are told of each, as in "agreement 4".
    """
    with torch.no_grad():
        said, p = predictions(draft, taught), taught.share * taught.weight[:, None]
        found = {"cross_entropy": float(distance(said, taught))}
        for leave, logq in zip(draft.config.exits or (0,), said, strict=True):
            same = (logq.argmax(dim=1) == taught.likely[:, 0]) & (p[:, 0] > 0)
            found["acceptance"] = float(torch.minimum(p, logq.exp().gather(1, taught.likely)).sum()) / taught.count
            found["agreement"] = float(same.sum()) / taught.count
            if leave:
                # The last exit is all layers, whose figures stay after as the draft's own.
                found |= {f"{name} {leave}": found[name] for name in ("acceptance", "agreement")}
        return found
