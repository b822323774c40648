"""Dynamic-DINO's split: every MLP becomes several small ones whose sum it is, of which a row may take some."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import log_softmax, normalize

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, floating

from .base import Change, ModelCompression, Part, Size, Texts, rebuilt
from .stream import Stream, cast, floats

_SEEN = 512
"""Rows whose activations tell which channels go together."""
_ROUNDS = 8


@register(
    "ffn-split",
    paper="Dynamic-DINO: Fine-Grained Mixture of Experts Tuning for Real-time Open-Vocabulary Object Detection (2025)",
    guarantee="changes the output, with all experts active by rounding alone; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class FFNSplit(ModelCompression):
    """Splits every MLP into `experts` smaller ones whose sum it is, of which every row takes `active`.

    Inner channels that are active together on the calibration text go to one expert, as many to each. A router learns,
    by gradient steps on that text, the shares that experts have in what the MLP adds, from the rows that enter it, and
    a row takes the experts that it expects most of, added up as they are. With active=0 all are taken: the model is
    what it was, and needs no text. No tuning of the experts follows. The copy is in float32, and runs in PyTorch: what
    is saved is multiply-adds, not yet time.

    Attributes:
        experts: Parts of each MLP.
        active: Parts that every row takes; 0 for all.
        steps: Of the router's training.
    """

    experts: int = 8
    active: int = 4
    steps: int = 150

    def __post_init__(self) -> None:
        if self.experts < 2 or not 0 <= self.active <= self.experts or self.steps < 1:
            raise SettingsError("ffn-split needs at least 2 experts, active from 0 to all of them, and steps above 0")

    @property
    def reads(self) -> bool:
        return self.taken < self.experts

    @property
    def taken(self) -> int:
        """Experts that a row takes."""
        return self.active or self.experts

    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        config = model.config
        inner = config.intermediate_size // self.experts
        if config.mlp_bias or config.shortcuts or inner * self.experts != config.intermediate_size:
            raise UnsupportedModel(
                f"ffn-split needs MLPs without biases whose {config.intermediate_size} channels fall into "
                f"{self.experts} equal parts: use another number of experts, or another model"
            )
        dtype = torch.promote_types(model.weights.dtype, torch.float32)
        stream = Stream(model, list(texts)) if len(texts) else None
        layers, parts = list[Layer](), list[Part]()
        for index, layer in enumerate(model.weights.layers):
            whole = floats(layer, dtype)
            made, error = self._split(index, whole, model, stream)
            layers.append(made)
            share = self.taken / self.experts
            for name in ("gate_up", "down"):
                weight = getattr(made, name).weight
                parts.append(Part(f"layers.{index}.{name}", error, _size(weight, share)))
            if stream is not None:
                stream.rows = stream.through(index, whole)
            progress("splitting", index + 1, config.num_layers)
        weights = model.weights
        head = cast(floating(weights.head), dtype)
        tied = getattr(weights.head, "weight", None) is weights.embedding
        embedding = head.weight if tied else weights.embedding.to(dtype)
        copy = rebuilt(model, embedding=embedding, norm=weights.norm.to(dtype), head=head)
        shape = replace(
            copy.config,
            intermediate_size=inner,
            experts=self.experts,
            experts_per_token=self.taken,
            summed_experts=True,
        )
        return Change(Transformer(shape, replace(copy.weights, layers=layers)), tuple(parts))

    def _split(self, index: int, whole: Layer, model: Transformer, stream: Stream | None) -> tuple[Layer, float]:
        """A layer of experts, and the share of what its MLP adds that is lost on the calibration text."""
        gate_up, down = whole.gate_up, whole.down
        assert isinstance(gate_up, Dense) and isinstance(down, Dense)
        hidden, channels = down.weight.shape
        router, error = torch.zeros(self.experts, hidden, dtype=down.weight.dtype, device="cpu"), 0.0
        groups = torch.arange(channels, device="cpu").view(self.experts, -1)
        if stream is not None:
            rows = stream.entering(index, whole)
            gate, up = gate_up(rows).chunk(2, dim=-1)
            active = model._activation(gate) * up
            groups = grouped(active[:: max(1, len(active) // _SEEN)], self.experts)
            each = torch.stack([active[:, group] @ down.weight[:, group].T for group in groups], dim=1)
            if self.taken < self.experts:
                router = routed(rows, each.norm(dim=-1), self.steps)
                chosen = (rows.double() @ router.double().T).topk(self.taken, dim=-1).indices
                left = torch.ones(len(rows), self.experts, dtype=each.dtype, device="cpu").scatter_(1, chosen, 0.0)
                lost = (each * left[..., None]).sum(dim=1)
                error = float(lost.square().sum() / each.sum(dim=1).square().sum())
        gate_rows, up_rows = gate_up.weight.chunk(2)
        stacked = torch.cat([torch.cat([gate_rows[group], up_rows[group]]) for group in groups])
        downs = torch.cat([down.weight[:, group] for group in groups])
        return replace(whole, gate_up=Dense(stacked), down=Dense(downs), router=router), error


@torch.no_grad()
def grouped(active: torch.Tensor, count: int) -> torch.Tensor:
    """[count, channels / count] groups of channels by balanced k-means over activations [n, channels].

    Channels are distinguished by where they are active, whatever their sign and size.
    """
    seen = normalize(active.abs().double().T, dim=1)
    channels = len(seen)
    first = [0]
    for _ in range(count - 1):
        # The channel that is least like those taken.
        first.append(int((seen @ seen[first].T).amax(dim=1).argmin()))
    centres = seen[first]
    place = torch.zeros(channels, dtype=torch.int64, device="cpu")
    for _ in range(_ROUNDS):
        near = seen @ centres.T
        room, open_ = [channels // count] * count, torch.ones(channels, dtype=torch.bool, device="cpu")
        # The nearest pairs first, as long as there is room.
        for pair in near.flatten().argsort(descending=True).tolist():
            channel, centre = divmod(pair, count)
            if open_[channel] and room[centre]:
                place[channel], open_[channel] = centre, False
                room[centre] -= 1
        centres = normalize(torch.stack([seen[place == centre].mean(dim=0) for centre in range(count)]), dim=1)
    return torch.stack([torch.where(place == centre)[0] for centre in range(count)])


def routed(rows: torch.Tensor, sizes: torch.Tensor, steps: int) -> torch.Tensor:
    """[experts, hidden] a router fitted to the share of each expert in rows."""
    shares = (sizes.square() / sizes.square().sum(dim=1, keepdim=True)).detach()
    router = torch.zeros(sizes.shape[1], rows.shape[1], dtype=rows.dtype, requires_grad=True, device="cpu")
    rows, optimizer = rows.detach(), torch.optim.AdamW([router], lr=0.01, weight_decay=0.1)
    with torch.enable_grad():
        for _ in range(steps):
            loss = -(shares * log_softmax(rows @ router.T, dim=-1)).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return router.detach()


def _size(weight: torch.Tensor, share: float) -> Size:
    return Size(weight.numel() * weight.itemsize, weight.numel() * share)
