"""MTP: the layer that a model was trained with to predict one token more, as a drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from decodery.core.registry import register
from decodery.models.hooks import Tap
from decodery.models.loaders.origins import origin_of
from decodery.models.protocol import Reader
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied
from decodery.step.logits_source import LogitsSource
from decodery.step.tree_policy import TreePolicy

from ..heads.copied import copied_layer
from ..heads.drafter import HeadDrafter
from ..heads.grown import DraftHead
from ..heads.head import TrainedHead
from ..heads.matching import LAST, features_of
from ..heads.own_mtp import gguf_mtp, own_layout, own_mtp
from ..heads.recurrent import RecurrentHead


class MTPHead(RecurrentHead):
    """The target's last state and the embedding of the token after it become one; a layer follows.

    What leaves the layer is fed back for the next token. Families differ in whether states are read and fed back
    before or after the final norm, and in which of the two inputs comes first.
    """

    kind = "mtp"
    taught = 3

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (LAST,)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        # The layer was made for another stream: what it adds to this one is learned from nothing.
        shape, tensors = copied_layer(model, model.config.num_layers - 1, silent=True)
        like, hidden = tensors["layer.qkv.weight"], shape.hidden
        zeros = torch.zeros(hidden, hidden, dtype=torch.float32, device="cpu")
        eye = torch.eye(hidden, dtype=torch.float32, device="cpu")
        tensors["fc.weight"] = torch.cat((zeros, eye), dim=1).to(like)
        tensors["layer.attention_norm.weight"] = copied(model.weights.layers[-1].attention_norm)
        tensors["norm.weight"] = copied(model.weights.norm)
        for name in ("token_norm", "feature_norm"):
            tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.float32, device="cpu").to(like)
        settings = {"normed_states": True, "feeds_normed": True, "states_first": False}
        return tensors, settings | {"layer": asdict(shape)}

    def unrolled(self, along: float) -> int:
        return self.taught

    def enter(self, states: dict[Tap, torch.Tensor]) -> torch.Tensor:
        if self.trained.settings["normed_states"]:
            return features_of(self.model, states, self.dtype)
        return states[LAST].to(self.dtype)

    def inputs(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.norm("token_norm", embedded), self.norm("feature_norm", features)
        joined = torch.cat(both[::-1] if self.trained.settings["states_first"] else both, dim=-1)
        stream = self.parts.linear("fc")(joined)
        return stream, self.norm("layer.attention_norm", stream)

    def leave(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm("norm", stream)
        return (normed if self.trained.settings["feeds_normed"] else stream), normed


@register(
    "mtp",
    paper="DeepSeek-V3 Technical Report (2024)",
    lossless=True,
    requirements=(
        "hidden states of every token",
        "a model whose folder has such a layer, or a head made by decodery train head --kind mtp",
    ),
)
@dataclass(frozen=True)
class MTP(HeadDrafter):
    """Drafts by the next-token layer that a model brings, used again for every token.

    Scope: the request; memory: keys and values of one layer.

    Attributes:
        length: Tokens of a chain.
        tree_policy: How a tree is grown, a chain of `length` where it is None.
        head: The folder of the model that has such a layer, one that `decodery train head` made or that vLLM's
            `speculators` publish, or a `TrainedHead`; None for the layer in the folder or GGUF file of the model.
    """

    kind: ClassVar[type[DraftHead]] = MTPHead

    length: int = field(default=3, kw_only=True)
    tree_policy: TreePolicy | str | None = field(default=None, kw_only=True)

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        place = Path(origin_of(model)).expanduser()
        if self.head is None and origin_of(model) and place.is_dir() and own_layout(place) is not None:
            return replace(self, head=own_mtp(place))
        if self.head is None and place.suffix == ".gguf" and (found := gguf_mtp(place)) is not None:
            return replace(self, head=found)
        return super().bind(model, logits_source)
