"""What heads attend to while a model is trained, and penalties that keep them useful or local.

Entropy-Guided Attention for Private LLMs (2025): a head whose rows are nearly even tells little (overload), one whose
rows rest on a single token learns badly (collapse); a penalty keeps the entropy of each head near a learned share of
the largest possible. Localist LLMs with Recruitment Learning (2025): a penalty on what goes to other blocks of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.hooks import Hooks
from decodery.models.layer_plan import WHOLE, layer_steps
from decodery.models.torch.side_by_side import SideBySide
from decodery.models.torch.transformer import Transformer

OVERLOADED, COLLAPSED = 0.9, 0.05
"""Shares of the largest entropy above and below which a head counts as such."""


class _Looked(SideBySide):
    """Keeps attention's weights of every layer, with gradients."""

    def __init__(self, model: Transformer, count: int, length: int) -> None:
        super().__init__(model, count, length)
        self.maps: list[torch.Tensor] = []
        self._later = torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(0, self._shape).transpose(1, 2) for each in (queries, keys, values))
        shared = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(shared, dim=1) for each in (k, v))
        scores = (q @ k.transpose(-1, -2) * self._config.attention_scale).masked_fill(self._later, -torch.inf)
        self.maps.append(scores.softmax(dim=-1))
        return (self.maps[-1] @ v).transpose(1, 2).flatten(0, 1).flatten(1)


def looked_at(model: Transformer, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [texts, n, vocab] and every layer's attention [texts, heads, n, n] of texts [texts, n].

    Both have gradients.

    Raises:
        UnsupportedModel: For a model whose layers have no such weights, or not of all tokens.
    """
    config = model.config
    if config.keeps_order or config.latent is not None or not config.causal or config.sliding_window is not None:
        raise UnsupportedModel("attention is looked at in causal models whose rows see all that comes before them")
    step, hooks = _Looked(model, *tokens.shape), Hooks.reading(())
    hidden = model.blocks(model.embed_tokens(tokens.flatten()), step, layer_steps(WHOLE, config.num_layers), hooks)
    return model.outputs(hidden).unflatten(0, tuple(tokens.shape)), step.maps


def row_entropy(weights: torch.Tensor) -> torch.Tensor:
    """[...] nats of rows of weights [..., n] that sum to 1."""
    return -(weights * (weights + 1e-9).log()).sum(dim=-1)


def most(rows: int) -> torch.Tensor:
    """[rows] maximal entropy log(t + 1) of a causal row that sees itself and the rows before it."""
    return torch.arange(1, rows + 1, dtype=torch.float64, device="cpu").log()


def evenness(maps: Sequence[torch.Tensor], skip: int = 8) -> torch.Tensor:
    """[layers, heads] mean entropy of each head's rows as a share of the maximum.

    The first `skip` rows are left out.
    """
    largest = most(maps[0].shape[-1])[skip:]
    return torch.stack([(row_entropy(each)[..., skip:] / largest.to(each)).mean(dim=(0, 2)) for each in maps])


def entropy_penalty(
    maps: Sequence[torch.Tensor],
    thresholds: torch.Tensor,
    *,
    tolerance: float = 0.2,
    skip: int = 8,
    published: bool = False,
) -> torch.Tensor:
    """How far the entropies of rows are from where their heads should be: 0 inside of a band.

    Args:
        thresholds: [layers, heads], any numbers, whose sigmoid is the share of the largest entropy that a head aims at;
            to be learned too.
        tolerance: Of the band, to either side, as a share of the largest entropy. Squared distances outside of it are
            averaged over heads, texts and rows from `skip` on.
        published: As the paper's code has it, summed over texts and rows, with the entropy of a row of full length as
            the largest one and the first layer's thresholds for all.

    Raises:
        SettingsError: For thresholds that are not one per head.
    """
    heads, n = maps[0].shape[1], maps[0].shape[-1]
    if thresholds.shape != (len(maps), heads) or not 0 <= tolerance <= 1:
        raise SettingsError(f"the penalty needs thresholds [{len(maps)}, {heads}] and a tolerance from 0 to 1")
    found = []
    for layer, weights in enumerate(maps):
        largest = (most(n) if not published else most(n)[-1].expand(n)).to(weights)
        aimed = thresholds[0 if published else layer].sigmoid()[:, None] * largest
        away = row_entropy(weights) - aimed
        outside = torch.where(away.abs() > tolerance * largest, away**2, torch.zeros_like(away))
        found.append(outside.sum(dim=(0, 2)).mean() if published else outside[..., skip:].mean())
    return torch.stack(found).mean()


def locality_penalty(maps: Sequence[torch.Tensor], block: int) -> torch.Tensor:
    """How much heads give to other blocks of so many tokens: 0 where they keep to their own.

    For each head and block the norm of all that rows of other blocks give to it (a group lasso, which empties whole
    blocks), summed over blocks and averaged over heads, texts and layers.

    Raises:
        SettingsError: For blocks of nothing.
    """
    if block < 1:
        raise SettingsError(f"blocks have at least one token, not {block}")
    n = maps[0].shape[-1]
    of = torch.arange(n, device="cpu") // block
    other = of[:, None] != of[None, :]
    found = []
    for weights in maps:
        squares = torch.where(other, weights, torch.zeros_like(weights)).square().sum(dim=-2)
        groups = squares.new_zeros(*squares.shape[:-1], int(of[-1]) + 1).index_add(-1, of, squares)
        # The root has no slope at 0, where nothing is to be learned.
        norms = torch.where(groups > 0, groups.clamp(min=1e-20).sqrt(), torch.zeros_like(groups))
        found.append(norms.sum(dim=-1).mean())
    return torch.stack(found).mean()
