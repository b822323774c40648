"""A model that predicts the first tokens of its vocabulary alone: small models read most of a pass for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch

from decodery.core.errors import SettingsError
from decodery.core.threads import one_thread

from .batch import Batch, Scores
from .hooks import OF_OUTPUTS, Tap
from .layer_plan import WHOLE, LayerPlan
from .native.packed import Packed
from .over_model import OverModel
from .protocol import Capabilities, OpenModel, Reader, is_open
from .torch.attention import capped
from .torch.portable import softly
from .torch.weights import Dense, Linear

_projections: WeakKeyDictionary[Reader, dict[int, Linear]] = WeakKeyDictionary()
"""Of the models in this process, by how many tokens they predict."""


@dataclass(frozen=True)
class ReducedVocabulary(OverModel):
    """A model that reads every token and predicts those with the lowest ids.

    In most tokenizers these are the frequent ones.
    Logits of the others are minus infinity; those of the first are the model's own, to the bit.

    Attributes:
        model: What reads the text.
        outputs: How many tokens it predicts.
    """

    model: OpenModel
    outputs: int

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def capabilities(self) -> Capabilities:
        own = self.model.capabilities
        sites = own.sites - frozenset(OF_OUTPUTS)
        return Capabilities(exact_rows=own.exact_rows, trees=own.trees, layer_plans=own.layer_plans, sites=sites)

    @property
    def fingerprint(self) -> str:
        own = self.model.fingerprint
        return f"{own}, {self.outputs} tokens" if own else ""

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        """See `LanguageModel.forward`."""
        last = self.config.num_layers
        states = Batch([replace(segment, logit_rows=()) for segment in batch.segments])
        scores = self.model.forward(states, taps=[*taps, *(() if last in taps else (last,))], layer_plan=layer_plan)
        rows, bounds = batch.logit_rows
        hidden = scores.hidden if last in taps else {tap: each for tap, each in scores.hidden.items() if tap != last}
        wanted = [end - begin for begin, end in pairwise(bounds)]
        costs = [replace(cost, logits=count) for cost, count in zip(scores.costs, wanted, strict=False)]
        logits = self._logits(scores.hidden[last][torch.from_numpy(rows).to(self.device)])
        return replace(scores, logits=logits, bounds=bounds, hidden=hidden, costs=costs)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after the last layer -> logits [n, vocab]."""
        found = self._projection(self.model.final_norm(hidden))
        found = found.float() if found.dtype.itemsize == 2 else found
        found = (softly if self.capabilities.exact_rows else capped)(found, self.config.logit_cap)
        with one_thread():
            every = found.new_full((len(found), self.vocab_size), -torch.inf)
            every[:, : self.outputs] = found
        return every

    @property
    def _projection(self) -> Linear:
        known = _projections.setdefault(self.model, {})
        if self.outputs not in known:
            found = self.model.projection(torch.arange(self.outputs, device=self.device))
            native = isinstance(found, Dense) and found.weight.dtype.itemsize == 2 and self.capabilities.exact_rows
            known[self.outputs] = Packed(found) if native else found  # type: ignore[arg-type]
        return known[self.outputs]


def reduced(model: Reader, outputs: int | None, name: str) -> Reader:
    """A draft model that predicts only the `outputs` tokens with the lowest ids.

    Args:
        model: The draft model.
        outputs: How many tokens it predicts; None: all.
        name: The method's, for errors.

    Returns:
        The model itself where these are all of its tokens.

    Raises:
        SettingsError: For a model whose vocabulary projection cannot be called apart, or has some tokens only.
    """
    if outputs is None or outputs >= model.vocab_size:
        return model
    if model.config.kept_tokens:
        raise SettingsError(
            f"{name} with vocabulary={outputs} needs a draft model that predicts all of its tokens, and this one "
            f"predicts {model.config.kept_tokens} of {model.vocab_size}: leave vocabulary out"
        )
    if not is_open(model):
        raise SettingsError(
            f"{name} with vocabulary={outputs} needs a draft model whose vocabulary projection can be called apart: "
            "leave vocabulary out"
        )
    return ReducedVocabulary(model, outputs)


def whole(model: Reader) -> Reader:
    """The model that predicts all of its tokens."""
    return model.model if isinstance(model, ReducedVocabulary) else model
