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
from ..heads.head import DraftHead, TrainedHead
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
        if self.dtype != torch.float32 or not NativeHead.runs(self.layer, (enter, words)):
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
            table=plain_embeddings(self.model),
            vocabulary=self.vocabulary,
        )

    def enter(self, states: dict[Tap, torch.Tensor]) -> torch.Tensor:
        return self.parts.linear("fc")(torch.cat([states[tap] for tap in self.taps], dim=-1))

    def inputs(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm("feature_norm", features)
        stream = normed if self.trained.settings.get("norm_before_residual") else features
        return stream, torch.cat((self.norm("token_norm", embedded), normed), dim=-1)

    def leave(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return stream, self.norm("norm", stream)


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
