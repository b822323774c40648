"""Texts of one length in one pass, each of which sees itself alone: one attention for all, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from decodery.core.errors import UnsupportedModel

from ..config import Rope
from ..hooks import Hooks
from ..layer_plan import WHOLE, layer_steps
from .attention import near

if TYPE_CHECKING:
    from .transformer import Transformer


class SideBySide:
    """The step of `Transformer.blocks` over `count` texts of `length` rows from position 0, uncached.

    Args:
        seen: [length, length] bool, what each row sees of its text; None for what lies before it.
    """

    def __init__(self, model: Transformer, count: int, length: int, seen: torch.Tensor | None = None) -> None:
        self._shape, self._config, self._seen = (count, length), model.config, seen
        if model.config.unusual_softmax:
            raise UnsupportedModel(
                f"{model.config.family} caps scores of attention or has sinks beside them, which is not trained here: "
                "take a model of another family"
            )
        if model.config.unit_values:
            raise UnsupportedModel(
                f"layers of {model.config.family} read tokens or keys of other layers, which is not trained here: "
                "take a model of another family"
            )
        self._angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        positions = np.tile(np.arange(length), count)
        for rope in {model.config.layer_rope(layer) for layer in range(model.config.num_layers)}:
            cos, sin = model.angles(rope, positions)
            self._angles[rope] = cos[:, None].to(model.dtype), sin[:, None].to(model.dtype)

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._angles[self._config.layer_rope(layer)]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if (own := self._config.temperature) is not None and self._config.tempers(layer):
            grown = torch.from_numpy(np.tile(own.at(np.arange(self._shape[1])), self._shape[0]))
            queries = queries * grown.to(queries)[:, None, None]
        q, k, v = (each.unflatten(0, self._shape).transpose(1, 2) for each in (queries, keys, values))
        mask, window = self._seen, self._config.window(layer)
        if window is not None and abs(window) < self._shape[1]:
            places = np.arange(self._shape[1])
            before = torch.from_numpy(near(places, places, window)).to(q.device).tril()
            mask = before if mask is None else mask & before
        seen = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self._config.attention_scale, enable_gqa=True
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
