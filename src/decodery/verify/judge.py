"""Judge Decoding: a trained head on the target's hidden states lets through drafts the target would word otherwise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..errors import CorruptFile, ModelNotFound, SettingsError
from ..model.store import replacing
from ..registry import register
from .base import Accepted, Laws, Rule

FORMAT = "decodery judge 1"
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class Head:
    """A linear head on hidden states. weight: [hidden] float32; layer: after how many layers the states are taken.

    facts: how it was trained and how good it is, as numbers and texts.
    """

    weight: torch.Tensor
    bias: float
    layer: int
    facts: dict[str, Any] = field(default_factory=dict)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n] float64 log-odds that the tokens whose states [n, hidden] these are continue their texts well."""
        return normalized(hidden).double() @ self.weight.to(hidden.device).double() + self.bias

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        tensors = {"weight": self.weight.float().contiguous(), "bias": torch.tensor([self.bias])}
        metadata = {"format": FORMAT, "layer": str(self.layer), "facts": json.dumps(self.facts)}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> Head:
        """Raises ModelNotFound where there is no such file, CorruptFile where it is not a head."""
        if not path.is_file():
            raise ModelNotFound(f"there is no judge at {path}: make one with decodery train judge, or correct the path")
        status = path.stat()
        return _load(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _load(path: Path, size: int, changed: int) -> Head:
    from safetensors import SafetensorError, safe_open

    wrong = f"{path} is not a judge, or damaged: make one with decodery train judge"
    if size > _MOST_BYTES:
        raise CorruptFile(wrong)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CorruptFile(wrong)
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
            layer, facts = int(metadata["layer"]), json.loads(metadata["facts"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptFile(wrong) from error
    if weight.ndim != 1 or bias.numel() != 1 or layer < 0 or not weight.isfinite().all() or not bias.isfinite().all():
        raise CorruptFile(wrong)
    return Head(weight.float(), float(bias), layer, facts)


def normalized(hidden: torch.Tensor) -> torch.Tensor:
    """[n, hidden] float32 of root mean square 1, as the model's own final norm sees them."""
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)


@register(
    "judge",
    paper="Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model Alignment (2025)",
    guarantee="lossy: drafted tokens that a trained head finds valid are kept; threshold=1 is the coupled rule",
    needs=("a head made by decodery train judge", "hidden states"),
)
@dataclass(frozen=True)
class Judge(Rule):
    """Accepts a drafted token that the coupled rule accepts, or that a trained head gives more than `threshold`.

    head: a file made by `decodery train judge`, or a `Head`. It reads the target's state at the drafted token itself,
    that is after the target has read it. Where the target's own choice is among the children the walk follows it, else
    the child the head likes best; where that is not enough the target's own choice is emitted. Nothing is promised of
    the law of the text, nor that what the target would never say stays out of it.
    """

    head: Head | str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise SettingsError(f"judge needs a threshold between 0 and 1, not {self.threshold}")
        if not isinstance(self.head, Head):
            object.__setattr__(self, "head", Head.load(Path(self.head).expanduser()))

    @property
    def trained(self) -> Head:
        assert isinstance(self.head, Head)
        return self.head

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.trained.layer,)

    def choose(self, tree: TokenTree, laws: Laws, seq: Sequence) -> Accepted:
        passing, scores = self._judged(laws)
        path: list[int] = []
        node = 0
        while True:
            token = laws.picks([node])[0]
            child = tree.child(node, token)
            if child is None:
                allowed = [each for each in tree.children(node).tolist() if passing[each]]
                if not allowed:
                    return Accepted(path, token)
                child = max(allowed, key=lambda each: scores[each])
            path.append(child)
            node = child

    def _judged(self, laws: Laws) -> tuple[list[bool], list[float]]:
        """Of every node: whether the head lets it through, and its log-odds."""
        head = self.trained
        hidden = laws.hidden[head.layer]
        if hidden.shape[1] != len(head.weight):
            raise SettingsError(
                f"this judge was trained on hidden states of {len(head.weight)} numbers, and the model's have "
                f"{hidden.shape[1]}: train one for it with decodery train judge"
            )
        scores = head.logits(hidden)
        # In log-odds, so that 0 lets everything through and 1 nothing, however sure the head is.
        least = math.log(self.threshold / (1 - self.threshold)) if 0 < self.threshold < 1 else math.inf
        passing = scores > (-math.inf if self.threshold == 0 else least)
        return passing.tolist(), scores.tolist()
