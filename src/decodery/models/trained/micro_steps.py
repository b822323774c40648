"""Token smashing: what writes a group of tokens after one row of a model, and makes one row of it, kept in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from decodery.core.errors import UnsupportedModel

from ..config import HEADS, MOST_LAYERS, THETA, ModelConfig, Rope
from ..hooks import Hooks
from ..layer_plan import WHOLE, layer_steps
from ..loaders.fields import Kind, Listed, Whole
from ..protocol import Reader
from ..torch.side_by_side import SideBySide
from ..torch.transformer import Transformer
from ..torch.weights import Dense, Layer, Weights
from .artifact import Artifact, TrainedPart, expect

MADE = "make one with decodery train hamburger -m MODEL"
_HEAD = 32
_LAYER = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")


@dataclass(frozen=True, eq=False)
class MicroSteps(TrainedPart):
    """What a model needs to read groups of tokens as one row each, and to write a group after one row.

    Attributes:
        tensors: As `shapes` names them: a merger of embeddings, a small decoder, and what says where a group ends.
        taps: After how many layers of the model the decoder reads its states, all layers at last.
        heads, kv_heads, theta: Of the decoder's attention.
        facts: How it was made, as plain JSON.
        model: `fingerprint` of the model it belongs to.
    """

    KIND = "set of micro steps"
    FILE = "micro-steps.safetensors"
    MADE = MADE
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "taps": Listed(Whole(1, MOST_LAYERS), 8),
        "heads": HEADS,
        "kv_heads": HEADS,
        "theta": THETA,
    }

    tensors: Mapping[str, torch.Tensor]
    taps: tuple[int, ...]
    heads: int
    kv_heads: int
    theta: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    @property
    def most(self) -> int:
        """How many tokens a group has at most."""
        return len(self.tensors["place"])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["place"].dtype

    @property
    def hidden(self) -> int:
        return self.tensors["query.weight"].shape[0]

    @property
    def layers(self) -> int:
        """Of the decoder."""
        return sum(name.endswith(".qkv") for name in self.tensors)

    def at(self, model: Reader) -> MicroSteps:
        """The same where and as precisely as a model's rows are.

        Raises a DecoderyError where it is another model's.
        """
        advice = "make some for this one with decodery train hamburger -m MODEL"
        self.refuse_other(model, advice)
        if self.hidden != model.config.hidden_size or self.taps[-1] != model.config.num_layers:
            raise UnsupportedModel(f"these micro steps were made for a model of another shape: {advice}")
        return _at(self, torch.promote_types(model.dtype, torch.float32), model.device)

    def merged(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[n, hidden] merged groups, from rows [n, s, hidden], of which the first `lengths` [n] count.

        A group of one token is its embedding, unchanged.
        """
        n, s, width = rows.shape
        heads = width // _HEAD if width % _HEAD == 0 else 1
        lengths = lengths.to(rows.device)
        given = torch.arange(s, device=rows.device) < lengths[:, None]
        mean = (rows * given[..., None]).sum(dim=1) / lengths[:, None]
        placed = torch.cat([rows, self.tensors["place"][:s].expand(n, -1, -1)], dim=-1)
        parts = self._linear("query", mean[:, None]), self._linear("key", placed), self._linear("value", placed)
        query, keys, values = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in parts)
        found = scaled_dot_product_attention(query, keys, values, attn_mask=given[:, None, None, :])
        merged = mean + self._linear("merge", found.flatten(1))
        return torch.where(lengths[:, None] == 1, rows[:, 0], merged)

    def spoken(self, taps: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, m, hidden] states after the first tokens of groups, from their embeddings.

        Args:
            taps: [n, k, hidden], what the model's row before each group left. Before the model's final norm.
        """
        whole, hooks = torch.cat([taps, rows], dim=1), Hooks.reading(())
        step = SideBySide(self.decoder, *whole.shape[:2])
        found = self.decoder.blocks(whole.flatten(0, 1), step, layer_steps(WHOLE, self.layers), hooks)
        return found.unflatten(0, whole.shape[:2])[:, taps.shape[1] :]

    def ends(self, said: torch.Tensor) -> torch.Tensor:
        """[...] logits of a group's end with the token that rows [..., hidden] say, read after the final norm."""
        for layer in ("stop.0", "stop.1"):
            said = silu(self._linear(layer, said))
        return self._linear("stop.2", said)[..., 0]

    @cached_property
    def decoder(self) -> Transformer:
        """Its blocks alone: embedding, norm and head are the model's."""
        head_dim = len(self.tensors["micro.0.qkv"]) // (self.heads + 2 * self.kv_heads)
        config = ModelConfig(
            1, self.hidden, len(self.tensors["micro.0.gate_up"]) // 2, self.layers, self.heads, self.kv_heads, head_dim,
            max_positions=len(self.taps) + self.most, rope=Rope(self.theta),
        )  # fmt: skip
        none = self.tensors["place"].new_zeros(1, self.hidden)
        return Transformer(config, Weights(none, [self._layer(n) for n in range(self.layers)], none[0], Dense(none)))

    def _layer(self, number: int) -> Layer:
        parts = {name: self.tensors[f"micro.{number}.{name}"] for name in _LAYER}
        made: dict[str, Any] = {name: Dense(part) if part.ndim == 2 else part for name, part in parts.items()}
        return Layer(**made)

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def artifact(self) -> Artifact:
        own = {"taps": list(self.taps), "heads": self.heads, "kv_heads": self.kv_heads, "theta": self.theta}
        tensors = {name: tensor.float() for name, tensor in self.tensors.items()}
        return Artifact(self.KIND, tensors, {**self.facts, **own}, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> MicroSteps:
        taps, heads, kv_heads, theta = (found.facts[name] for name in cls.FACTS)
        given = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
        made = cls(found.tensors, tuple(taps), heads, kv_heads, theta, found.facts, found.model)
        inner, rows = given["micro.0.gate_up"][0] // 2, given["micro.0.qkv"][0]
        head_dim, left = divmod(rows, heads + 2 * kv_heads)
        wanted = dict(shapes(made.hidden, made.layers, made.most, inner, (heads, kv_heads, head_dim)))
        expect(given == wanted and not left and head_dim % 2 == 0 and heads % kv_heads == 0)
        expect(bool(taps) and taps == sorted(set(taps)))
        expect(all(tensor.dtype == torch.float32 for tensor in found.tensors.values()))
        return made


@lru_cache(maxsize=8)
def _at(parts: MicroSteps, dtype: torch.dtype, device: torch.device) -> MicroSteps:
    # Kept, so that readers over the same model with the same parts are equal.
    return replace(parts, tensors={name: each.to(device, dtype) for name, each in parts.tensors.items()})


def shapes(
    hidden: int, layers: int, most: int, inner: int, heads: tuple[int, int, int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors.

    Args:
        heads: Those of queries, those of keys and values, and the width of each.
    """
    own, kv, width = heads
    yield "place", (most, hidden // 2)
    for name, outputs, inputs in (
        ("query", hidden, hidden),
        ("key", hidden, hidden + hidden // 2),
        ("value", hidden, hidden + hidden // 2),
        ("merge", hidden, hidden),
        ("stop.0", hidden, hidden),
        ("stop.1", hidden, hidden),
        ("stop.2", 1, hidden),
    ):
        yield f"{name}.weight", (outputs, inputs)
        yield f"{name}.bias", (outputs,)
    for layer in range(layers):
        found = (hidden,), ((own + 2 * kv) * width, hidden), (hidden, own * width), (hidden,), (2 * inner, hidden)
        for name, shape in zip(_LAYER, (*found, (hidden, inner)), strict=True):
            yield f"micro.{layer}.{name}", shape


def quarters(layers: int) -> tuple[int, ...]:
    """After how many layers of a model of so many its states are read: after each quarter."""
    return tuple(sorted({-(-layers * part // 4) for part in range(1, 5)}))
