"""Texts of one length in one pass, each of which sees itself alone: one attention for all, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ..hooks import Hooks
from ..layer_plan import WHOLE, layer_steps

if TYPE_CHECKING:
    from .transformer import Transformer


class SideBySide:
    """The step of `Transformer.blocks` over `count` texts of `length` rows from position 0, uncached.

    Args:
        seen: [length, length] bool, what each row sees of its text; None for what lies before it.
    """

    def __init__(self, model: Transformer, count: int, length: int, seen: torch.Tensor | None = None) -> None:
        self._shape, self._config, self._seen = (count, length), model.config, seen
        cos, sin = model.angles(model.config.rope, np.tile(np.arange(length), count))
        self._angles = cos[:, None].to(model.dtype), sin[:, None].to(model.dtype)

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._angles

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(0, self._shape).transpose(1, 2) for each in (queries, keys, values))
        seen = scaled_dot_product_attention(
            q, k, v, self._seen, is_causal=self._seen is None, scale=self._config.attention_scale, enable_gqa=True
        )
        return seen.transpose(1, 2).flatten(0, 1).flatten(1)


def predicted(model: Transformer, tokens: torch.Tensor, visits: Hooks | None = None) -> torch.Tensor:
    """Logits [count, length, vocab] after every token of texts [count, length], with gradients.

    Args:
        visits: What is done with rows on the way, those of all texts in one [count * length, width].
    """
    run, visits = layer_steps(WHOLE, model.config.num_layers), Hooks.reading(()) if visits is None else visits
    hidden = model.blocks(model.embed_tokens(tokens.flatten()), SideBySide(model, *tokens.shape), run, visits)
    return model.outputs(hidden).unflatten(0, tuple(tokens.shape))
