"""Discrete key-value bottleneck: states find frozen keys, and only the values after the keys found are learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from decodery.models.trained.artifact import Artifact, TrainedPart, expect
from decodery.step.drafter_memory import Guarded


@dataclass(frozen=True, eq=False)
class KeySet(TrainedPart):
    """What is frozen.

    C codebooks of K keys for states of one width, and how values become logits.

    Attributes:
        centre: [width] taken from a state.
        projections: [C, d, width].
        keys: [C, K, d].
        readout: [r, vocab].
        model: `fingerprint` of the model whose states and tokens these are.
    """

    KIND = "set of keys"
    FILE = "keys.safetensors"
    MADE = "make some with `decodery train kv-bottleneck -m MODEL FILES --out DIR`, and name them, as in keys=DIR"

    centre: torch.Tensor
    projections: torch.Tensor
    keys: torch.Tensor
    readout: torch.Tensor
    model: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def codes(self, states: torch.Tensor) -> torch.Tensor:
        """[n, C] int64, the number of the nearest key of each codebook to states [n, width]."""
        return nearest(self.projected(states), self.keys)

    def projected(self, states: torch.Tensor) -> torch.Tensor:
        """[n, C, d] of states [n, width]."""
        return torch.einsum("nw,cdw->ncd", states.to(self.centre) - self.centre, self.projections)

    def artifact(self) -> Artifact:
        tensors = {name: getattr(self, name) for name in ("centre", "projections", "keys", "readout")}
        return Artifact(self.KIND, tensors, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> KeySet:
        centre, projections, keys, readout = (found.tensors[n] for n in ("centre", "projections", "keys", "readout"))
        expect((centre.ndim, projections.ndim, keys.ndim, readout.ndim) == (1, 3, 3, 2) and 0 not in keys.shape)
        expect(projections.shape == (len(keys), keys.shape[2], len(centre)))
        return cls(centre, projections, keys, readout, found.model, found.facts)


def nearest(projected: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n, C] int64, of rows [n, C, d] the nearest among keys [C, K, d], the lowest number among equals."""
    products = torch.einsum("ncd,ckd->nck", projected, keys)
    return (2 * products - keys.square().sum(dim=2)).argmax(dim=2)


class Values(Guarded):
    """What is learned: the values after the keys, of tokens so many places ahead.

    A row's logits are the mean of the values it finds, times the readout. Values begin at zero.

    Args:
        data: [ahead, C, K, r] float32.
    """

    def __init__(self, keys: KeySet, ahead: int, lr: float) -> None:
        super().__init__()
        self.keys, self.lr = keys, lr
        books, count, _ = keys.keys.shape
        self.data = torch.zeros(ahead, books, count, len(keys.readout), dtype=torch.float32, device="cpu")
        self._books = torch.arange(books, device="cpu")

    def found(self, place: int, codes: torch.Tensor) -> torch.Tensor:
        """[r] the mean value after codes [C], of the token `place` places ahead."""
        return self.data[place, self._books, codes].mean(dim=0)

    def logits(self, place: int, codes: torch.Tensor) -> torch.Tensor:
        """[vocab] of the token `place` places ahead."""
        return self.found(place, codes) @ self.keys.readout

    def learn(self, place: int, codes: torch.Tensor, token: int) -> None:
        """One gradient step on the loss of `token`; only the values after these codes [C] change."""
        readout = self.keys.readout
        wrong = self.logits(place, codes).softmax(dim=0)
        wrong[token] -= 1.0
        # Of each value's gradient, a C-th of this, the C-th is left to the rate.
        self.data[place, self._books, codes] -= self.lr * (readout @ wrong)
