"""A second, smaller language model drafts a chain."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..errors import SettingsError, VocabularyMismatch
from ..model.batch import Batch, Segment
from ..model.named import named
from ..model.protocol import LanguageModel
from ..registry import register
from .base import Expander
from .reading import Reading


@register(
    "draft-model",
    paper="Fast Inference from Transformers via Speculative Decoding (2023)",
    lossless=True,
    needs=("a second model with the same vocabulary, or the one that comes with the target",),
)
@dataclass(frozen=True)
class DraftModel(Expander):
    """Lets a smaller model with the same vocabulary write the next few tokens as the target's sampler would.

    model: a `LanguageModel`, or a name `decodery.load` knows; None is the draft that comes with this package for the
    target, as there is one for smollm2. length: tokens of a chain. growth: how trees are grown in place of it, such as
    "eagle-2(nodes=32)". Draft tokens use the target's warps and the target's noise, so that under the coupled rule two
    models that agree draw the same token; where the rule wants them, the draft's distributions go along. Scope: the
    request; memory: one more cache.
    """

    model: LanguageModel | str | None = None

    def start(self, seq: Sequence) -> Reading:
        model = self._model(seq.model)
        known = {model.config.vocabulary, seq.model.config.vocabulary} - {""}
        if len(known) > 1:
            raise VocabularyMismatch(
                "the tokens of the draft model are not those of the target, although there may be as many: draft with "
                "a model that shares the target's tokenizer"
            )
        if seq.budget is not None:
            seq.budget.fits(model)
        tapped = seq.budget is not None and seq.budget.reads_states
        return Reading.begin(model, seq.vocab_size, tapped=tapped, slots=seq.slots)

    def readers(self, target: LanguageModel) -> tuple[LanguageModel, ...]:
        return (self._model(target),)

    def _model(self, target: LanguageModel) -> LanguageModel:
        return named(_shipped(target) if self.model is None else self.model)

    def state(self, seq: Sequence) -> torch.Tensor | None:
        reading: Reading = seq.draft_state
        return reading.hidden

    def reach(self, seq: Sequence) -> int:
        reading: Reading = seq.draft_state
        # The draft model's own context may be the shorter one; behind its end it has nothing to say.
        return reading.model.config.max_positions - len(seq.tokens) + 1

    def logits(self, seq: Sequence, tree: TokenTree, nodes: Ordered[int]) -> torch.Tensor:
        reading: Reading = seq.draft_state
        if tree.is_chain and list(nodes) == [len(tree) - 1] and len(tree) > 1:
            # What a chain has fed stays, so that nothing is fed again where the chain goes on or becomes text.
            return reading.draft(seq.tokens + tree.tokens[1:].tolist())
        below = np.asarray([node for node in nodes if node > 0], dtype=np.int64)
        if len(below) == len(nodes):
            reading.hold(seq.tokens)
            return _branches(reading, tree, below)
        root = reading.text(seq.tokens)
        logits = torch.cat((root, _branches(reading, tree, below))) if len(below) else root
        place = {node: row for row, node in enumerate(below.tolist(), start=1)}
        return logits[[place.get(node, 0) for node in nodes]]


def _branches(reading: Reading, tree: TokenTree, nodes: np.ndarray) -> torch.Tensor:
    """Logits [k, vocab] after `nodes` [k] below the root, which alone is in the cache: their paths are fed."""
    cache, mask = reading.cache, tree.ancestor_mask()
    rows = np.flatnonzero(mask[nodes].any(axis=0))[1:]
    segment = Segment(
        cache.next_position + tree.depths[rows] - 1,
        tree.tokens[rows],
        mask=mask[np.ix_(rows, rows)],
        cache=cache,
        logit_rows=np.searchsorted(rows, nodes).tolist(),
    )
    logits = reading.model.forward(Batch([segment])).logits
    cache.keep([])
    return logits


def _shipped(target: LanguageModel) -> str:
    """The name of the draft that comes with this package for a model like `target`."""
    from ..model.drafts import shipped_for

    found = shipped_for(target.config.vocabulary)
    if found is None:
        raise SettingsError(
            "no draft model comes with this package for this model: train one with `decodery train draft`, or name "
            "another, as in draft-model:model=NAME"
        )
    return found
