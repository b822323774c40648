"""Find which channels of keys say most about attention: Double Sparsity's calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import LanguageModel
from decodery.models.trained.key_channels import KeyChannels

from .kind import Run, kind
from .kind_data import TextFiles
from .tensors import zeros


class Sizes(AttentionPolicy):
    """Sums of magnitudes by channel of queries [layers, heads, d] and keys [layers, kv_heads, d]."""

    def __init__(self, model: LanguageModel) -> None:
        config = model.config
        self.queries, self.keys = (
            zeros(config.num_layers, heads, config.head_dim).double()
            for heads in (config.num_heads, config.num_kv_heads)
        )

    def select(self, attention: Attention) -> None:
        self.queries[attention.layer] += attention.queries.abs().double().sum(dim=0).cpu()
        self.keys[attention.layer] += attention.keys.abs().double().sum(dim=1).cpu()


@torch.no_grad()
def calibrate(model: LanguageModel, texts: Sequence[Sequence[int]], progress: Progress = silent) -> KeyChannels:
    """Channels of each key-value head in the order of mean |query| times mean |key|, over its group.

    Both are taken after rotation, and the two channels that rotation mixes stand together, the better pair first: what
    one of them says at one position the other says at the next.
    """
    sizes, count = Sizes(model), 0
    for number, tokens in enumerate(texts):
        cache = model.new_cache()
        cache.policy = sizes
        ids = np.asarray(tokens, dtype=np.int64)
        model.forward(Batch([Segment.chunk(ids, cache, logit_rows=[])]))
        count += len(ids)
        progress("reading texts", number + 1, len(texts))
    layers, kv_heads, dim = sizes.keys.shape
    asked = sizes.queries.reshape(layers, kv_heads, -1, dim)
    worth = (asked * sizes.keys[:, :, None]).sum(dim=2)
    pairs = (worth[..., : dim // 2] + worth[..., dim // 2 :]).sort(dim=-1, descending=True, stable=True).indices
    order = torch.stack((pairs, pairs + dim // 2), dim=-1).flatten(-2)
    facts = {"texts": len(texts), "tokens": count}
    return KeyChannels(order, facts, model.fingerprint)


@kind(
    "The channels are ready: --cache-policy double-sparsity:calibration={out}",
    (TextFiles(),),
    "notes.txt --out channels",
    model="whose keys are read",
    file=KeyChannels.FILE,
)
def _double_sparsity(run: Run) -> dict[str, Any]:
    """Find the channels of MODEL's keys that decide attention, on text FILES, for the policy double-sparsity.

    MODEL does not change. It takes as long as reading the texts.
    """
    found = calibrate(run.loaded.model, run.of(TextFiles).pieces(run.loaded), run.progress)
    replace(found, facts={**found.facts, "command": run.command}).save(run.out / KeyChannels.FILE)
    return dict(found.facts)
