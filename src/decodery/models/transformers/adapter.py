"""Any causal language model of `transformers` as a `LanguageModel`. Imports transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedModel

from decodery.core.errors import UnsupportedModel

from ..batch import Batch, Cost, Scores, Segment
from ..cache.cache import KVCache
from ..hooks import HookPoint, Hooks, Tap
from ..layer_plan import WHOLE, LayerPlan
from ..protocol import Capabilities
from ..trained.artifact import digest
from .adapter_call import ModelCalls
from .adapter_memory import choose_memory
from .adapter_rows import RowMemory


class TransformersModel:
    """Runs a `transformers` model, one segment at a time, over what it keeps of a text.

    Keys and values of every token lie in a `KVCache` where a model keeps no more than these and takes position ids and
    a mask for its rows; then rows may branch. Of others the cache holds the tokens, with snapshots of the model's own
    states after some of them. Which of these holds is tried out at once, see `adapter_memory`.

    Args:
        hf_model: The model.

    Raises:
        UnsupportedModel: If its logits are not the same in every call, or depend on tokens that follow.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        self.calls = ModelCalls(hf_model)
        self.hf_model = self.calls.hf_model
        self.device, self.dtype = self.calls.device, self.calls.dtype
        self.memory = choose_memory(self.calls)
        self.config = self.memory.config
        self.calls.find_blocks(self.config.num_layers)
        self._lock = threading.RLock()

    @cached_property
    def capabilities(self) -> Capabilities:
        sites = ("logits",) if self.calls.blocks is None else ("logits", "residual")
        rows = isinstance(self.memory, RowMemory)
        return Capabilities(
            trees=self.memory.trees,
            chains=self.memory.chains,
            states=rows,
            sites=frozenset(sites),
            interventions=rows,
        )

    @property
    def keeps(self) -> str:
        """What the model keeps of a text: "keys and values", "states" or "nothing"."""
        return self.memory.keeps

    @cached_property
    def fingerprint(self) -> str:
        return digest(self.hf_model.get_input_embeddings().weight)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `EmbeddingModel.embed_tokens`."""
        return self.calls.embed(tokens)

    def new_cache(self) -> KVCache:
        return self.memory.new_cache()

    @torch.no_grad()
    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`."""
        if layer_plan != WHOLE:
            raise UnsupportedModel("a model run through transformers always runs all of its layers")
        with self._lock:  # hooks sit on modules that all threads share
            return self._forward(batch, taps)

    def _forward(self, batch: Batch, taps: Sequence[Tap]) -> Scores:
        can, name = self.capabilities, self.calls.name
        if not can.trees and any(_branches(segment) for segment in batch.segments):
            raise UnsupportedModel(f"{name} reads no rows that branch: use drafters that propose chains")
        parts = []
        for segment in batch.segments:
            hooks = Hooks.of(Batch([segment]), taps, WHOLE, self.config.num_layers)
            if not can.interventions and any(hooks.changed(place) for place in hooks if place != HookPoint("logits")):
                raise UnsupportedModel(
                    f"{name} keeps {self.keeps} of its own, so rows cannot be changed between its layers: change "
                    "logits, or use a model that keeps keys and values"
                )
            logits = hooks.visit(HookPoint("logits"), self.memory.run(segment, hooks))
            parts.append((logits, hooks.tapped()))
        hidden = {tap: torch.cat([states[tap] for _, states in parts]) for tap in taps}
        row_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize
        costs = [Cost.of(segment, WHOLE, self.config.num_layers, row_bytes) for segment in batch.segments]
        return Scores(torch.cat([logits for logits, _ in parts]), batch.logit_rows[1], hidden, batch.offsets, costs)


def _branches(segment: Segment) -> bool:
    n, retained = len(segment), segment.retained
    return segment.mask is not None and not np.array_equal(segment.mask, np.tri(n, retained + n, retained, dtype=bool))
