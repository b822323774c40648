"""EAGLE-3: one layer over three of the target's states drafts on from its own output, which it was trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied

from ..heads.copied import copied_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import TrainedHead
from ..heads.native import NativeHead, plain_embeddings
from ..heads.recurrent import RecurrentHead


class EAGLE3Head(RecurrentHead):
    """Features are three of the target's states made one.

    Attention reads the token's embedding beside the feature. What leaves the layer is fed back as it is, and nothing
    asks that it resembles the target's state.
    """

    kind = "eagle-3"
    taught = 5

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return tuple(trained.settings["taps"])

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        layers, hidden = model.config.num_layers, model.config.hidden_size
        shape, tensors = copied_layer(model, layers - 1)
        # The deepest state goes in as it is; what the others and the token add is learned.
        qkv = tensors["layer.qkv.weight"]
        tensors["layer.qkv.weight"] = torch.cat((torch.zeros_like(qkv), qkv), dim=1)
        tensors["fc.weight"] = torch.cat(
            [
                torch.zeros(hidden, 2 * hidden, dtype=torch.float32, device="cpu"),
                torch.eye(hidden, dtype=torch.float32, device="cpu"),
            ],
            dim=1,
        ).to(qkv)
        tensors["token_norm.weight"] = torch.ones(hidden, dtype=torch.float32, device="cpu").to(qkv)
        tensors["feature_norm.weight"] = copied(model.weights.layers[-1].attention_norm)
        tensors["norm.weight"] = copied(model.weights.norm)
        # The states that enter layers 2, the middle one and the third from the end, where there are so many.
        taps = [min(2, layers), layers // 2, max(layers - 3, 0)]
        return tensors, {"taps": taps, "layer": asdict(shape)}

    @cached_property
    def native(self) -> NativeHead | None:
        enter, words = self.parts.linear("fc"), self.projection()
        if self.dtype != torch.float32 or self._more or not NativeHead.runs(self.layer, (enter, words)):
            return None
        token, feature, last = (self.parts[f"{name}.weight"] for name in ("token_norm", "feature_norm", "norm"))
        first = bool(self.trained.settings.get("norm_before_residual"))
        return NativeHead(
            self.layer,
            enter,
            words,
            (token, feature, last),
            norm_first=first,
            embed=self.embed,
            table=None if self.own_embedding else plain_embeddings(self.model),
            vocabulary=self.vocabulary,
        )

    @property
    def entering(self) -> int:
        return self.parts.inputs("fc") // len(self.taps)

    @property
    def _more(self) -> bool:
        """Whether it has a part that the native call lacks."""
        names = ("states_norm.weight", "states_norm.0.weight")
        wide = self.entering != self.layer.shape.hidden
        return bool(self.further or wide or self._feeds_normed or any(name in self.parts for name in names))

    @property
    def _feeds_normed(self) -> bool:
        return bool(self.trained.settings.get("norm_output"))

    def enter(self, states: dict[Tap, torch.Tensor]) -> torch.Tensor:
        rows = [states[tap] for tap in self.taps]
        if "states_norm.0.weight" in self.parts:
            rows = [self.norm(f"states_norm.{number}", each) for number, each in enumerate(rows)]
        joined = torch.cat(rows, dim=-1)
        if "states_norm.weight" in self.parts:
            joined = self.norm("states_norm", joined)
        return self.parts.linear("fc")(joined)

    def inputs(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm("feature_norm", features)
        stream = normed if self.trained.settings.get("norm_before_residual") else features
        return stream, torch.cat((self.norm("token_norm", embedded), normed), dim=-1)

    def leave(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm("norm", stream)
        return (normed if self._feeds_normed else stream), normed


@register(
    "eagle-3",
    paper="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test (2025)",
    lossless=True,
    slower=True,
    requirements=(
        "hidden states of every token",
        "a head made by decodery train head --kind eagle-3, or the one that comes with the embedded model",
    ),
)
@dataclass(frozen=True)
class EAGLE3(HeadDrafter):
    """Drafts by one decoder layer over the target's states at three depths and token embeddings.

    Below the text the layer goes on from its own output, which training has put it through. It speaks the words that
    the target writes most often. Scope: the request; memory: keys and values of one layer.

    Attributes:
        tree_policy: How the tree is grown, a chain of `length` where it is None.
        head: A file or folder made by `decodery train head`, a folder or Hub id as the authors or vLLM's `speculators`
            publish them, a `TrainedHead`, or None for the one that comes along.
    """

    kind: ClassVar[type[DraftHead]] = EAGLE3Head
