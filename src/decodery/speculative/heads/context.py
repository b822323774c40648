"""A decoder layer over the target's states of a text, which nodes of a draft tree are no part of."""

from __future__ import annotations

import numpy as np
import torch

from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied

from .copied import copied_layer
from .parts import DecoderLayer, Held, LayerShape
from .unrolled import teacher_attention


class ContextLayer(DecoderLayer):
    """One more layer, with norms before attention and MLP as the target's layers have them."""

    def entered(self, rows: torch.Tensor) -> torch.Tensor:
        """What attention reads of the stream [n, hidden]."""
        return self.norm("attention_norm", rows)

    def read_of(self, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self.entered(stream)

    def read(self, held: Held, states: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """States of the text [n, hidden] -> what leaves the layer at the last of them, [1, hidden]."""
        stream = states + self.attention(self.entered(states), positions, held, None)
        return self.left(stream[-1:])

    def unroll(self, states: torch.Tensor) -> torch.Tensor:
        """Whole texts side by side, for training: [b, n, hidden] -> what leaves the layer [b * n, hidden]."""
        b, n, _ = states.shape
        rows = states.flatten(0, 1)
        found = self.heads(self.entered(rows), torch.arange(n, device="cpu").repeat(b))
        queries, keys, values = (each.view(b, n, *each.shape[1:]) for each in found)
        context = teacher_attention(self, queries, [keys], [values])
        return self.left(rows + self.parts.linear(f"{self.prefix}output")(context.flatten(0, 1)))


def context_layer(model: Transformer, *, silent: bool) -> tuple[LayerShape, dict[str, torch.Tensor]]:
    """A copy of the target's last layer, its norms and all, as "layer.NAME.weight".

    Silent as in `copied_layer`.
    """
    last = model.config.num_layers - 1
    shape, tensors = copied_layer(model, last, silent=silent)
    tensors["layer.attention_norm.weight"] = copied(model.weights.layers[last].attention_norm)
    return shape, tensors
