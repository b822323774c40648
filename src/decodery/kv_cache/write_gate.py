"""Write gate: whether later tokens may attend to a token is decided when it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.models.trained.write_gates import WriteGates
from decodery.step.cache_policy import CachePolicy, State

from .after_prompt import turned


@register(
    "write-gate",
    paper=(
        "Dynamic-LLaVA: Efficient Multimodal Large Language Models via Dynamic Vision-language Context Sparsification "
        "(2024)"
    ),
    guarantee="lossy: some written tokens are not stored; drafts give the text of plain decoding under it",
    requirements=("a trained gate",),
)
@dataclass(frozen=True)
class WriteGate(CachePolicy):
    """Stores a written token only where a small network (the gate) decides so; prompts are stored in full.

    The input of the gate is the token's queries, keys and values before rotation; in the paper it is the layer's hidden
    state. A token always reads itself. Only the paper's method for text is implemented, not that for images. Class E: a
    decision does not depend on other rows, so one pass decides about a block of drafts.

    Attributes:
        budget: Share of written tokens that are stored, up to 1. A token is stored if the gate's output is above the
            matching quantile of the training texts.
        gate: `WriteGates`, or the file or folder of `decodery train kv write-gate`. The gate reads a token in one
            layer, the third as published, and decides for that layer and all later ones; earlier layers store all
            tokens.
    """

    budget: float = 0.5
    gate: WriteGates | str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise SettingsError(f"write-gate: budget must be a share above 0 and up to 1, not {self.budget!r}")

    @property
    def provides(self) -> Provides:
        return Provides()

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        gate = WriteGates.load(self.gate, "write-gate:gate")
        gate.require(model)
        if model.config.window(gate.layer) is not None:
            raise UnsupportedModel(
                f"write-gate reads tokens in layer {gate.layer}, which has a sliding window in this model: train a "
                "gate for a layer without one, or use another policy"
            )
        return Admitting(replace(self, gate=gate), gate, model.config, prompt)


def looked_at(config: ModelConfig, attention: Attention) -> torch.Tensor:
    """[n, width] the gate's input: queries, keys and values of a segment's own rows before rotation."""
    n, positions = len(attention.segment), attention.segment.positions
    parts = (attention.queries.transpose(0, 1), attention.keys[:, -n:])
    still = [turned(config, attention.layer, part.double(), -positions) for part in parts]
    return torch.cat([*still, attention.values[:, -n:].double()]).transpose(0, 1).flatten(1)


class Admitting(State):
    """State of the policy: for every tentative row, whether it will be stored."""

    def __init__(self, method: WriteGate, gate: WriteGates, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method, self.gate = method, gate
        self._least = gate.least(method.budget)
        self._stored = np.zeros(0, dtype=bool)

    def fork(self) -> Admitting:
        return Admitting(self.method, self.gate, self.config, self.prompt)

    def select(self, attention: Attention) -> np.ndarray | None:
        layer, segment = attention.layer, attention.segment
        if layer == self.gate.layer:
            stored = segment.positions < self.prompt
            if not stored.all():
                margins = self.gate.margins(looked_at(self.config, attention)).cpu().numpy()
                stored |= margins > self._least
            self._stored = np.concatenate((self._stored[: segment.retained], stored))
        if layer < self.gate.layer:
            return None
        read = np.ones((len(segment), attention.seen.shape[-1]), dtype=bool)
        read[:, read.shape[1] - len(self._stored) :] = self._stored
        return read

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        dropped = np.flatnonzero(~self._stored[list(rows)])
        self._stored = np.zeros(0, dtype=bool)
        if not len(dropped):
            return
        for layer in self.full_layers:
            if layer >= self.gate.layer:
                behind = int(cache.lengths[layer]) - len(rows)
                cache.evict(layer, (behind + dropped).tolist())

    def cut(self, cache: KVCache) -> None:
        self._stored = np.zeros(0, dtype=bool)
