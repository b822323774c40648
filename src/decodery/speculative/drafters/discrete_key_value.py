"""Discrete key-value bottleneck: a memory on the model's own states, learned from what verification says."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.protocol import Reader
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.drafter_memory import Scope
from decodery.step.sequence import Sequence

from ..stores.bottleneck import KeySet, Values

_TAP = -1


@dataclass(slots=True)
class _Reading:
    """Where a text stands. codes: by position, of rows with labels to come; learned: tokens that were labels."""

    values: Values
    codes: dict[int, torch.Tensor] = field(default_factory=dict)
    learned: int = 0


@register(
    "discrete-key-value",
    paper="Discrete Key-Value Bottleneck (2022)",
    lossless=True,
    requirements=("frozen keys made by decodery train kv-bottleneck",),
)
@dataclass(frozen=True)
class DiscreteKeyValue(Drafter):
    """Drafts tokens after the next one from the last state, by values learned during verification.

    The state finds the nearest of each codebook's frozen keys; the mean of the values after them is what the next but
    one token, and with length=2 the one after it, is guessed by. Every token that becomes text is a label for the
    states before it: one step of rate `lr` for the values found there, and for no others, so that a text of another
    kind, whose states find other keys, does not wear them off. Values change between passes only. Nothing is drafted
    where nothing was learned. Memory: 4 * length * codebooks * keys * rank bytes of values; a step costs two products
    of rank and vocabulary.

    Attributes:
        keys: A `KeySet`, or the file or folder of one.
        length: Tokens drafted per step.
        lr: Learning rate of the values.
        scope: How long values are kept.
    """

    keys: KeySet | str | None = None
    length: int = 2
    lr: float = 1.0
    scope: Scope = "process"

    def __post_init__(self) -> None:
        if self.length < 1 or not self.lr > 0:
            raise SettingsError("discrete-key-value needs length of at least 1 and an lr above 0")

    @property
    def requirements(self) -> Requirements:
        return Requirements(taps=(_TAP,), prompt_taps=True)

    def largest(self) -> int:
        return self.length

    def _keys(self, model: Reader) -> KeySet:
        if self.keys is None:
            raise SettingsError(f"discrete-key-value needs frozen keys: {KeySet.MADE}")
        found = KeySet.load(self.keys)
        found.refuse_other(model)
        return found

    def start(self, seq: Sequence) -> _Reading:
        keys = self._keys(seq.request.model)
        key = "discrete-key-value", id(keys), self.length, self.lr
        values: Values = seq.request.memory.recall(self.scope, seq, key, lambda: Values(keys, self.length, self.lr))
        return _Reading(values)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        reading: _Reading = seq.states[self]
        codes = reading.codes.get(len(seq.tokens) - 2)
        drafted: list[int] = []
        if codes is not None:
            values = reading.values
            with values.lock:
                for place in range(min(self.length, budget.nodes, budget.depth)):
                    if not values.found(place, codes).any():
                        break
                    drafted.append(int(values.logits(place, codes).argmax()))
                    if drafted[-1] in seq.request.eos_ids:
                        break
        return DraftTree.chain(seq.last_token, drafted) if drafted else DraftTree.root(seq.last_token)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        reading: _Reading = seq.states[self]
        values, tokens, codes = reading.values, seq.tokens, reading.codes
        known = max(seq.request.prompt_length, reading.learned)
        # The state at position i says token i + 1; what it is asked for here begins after that.
        first = known - 1 - self.length
        rows = [0, *seen.path]
        places = [each for each in range(len(rows)) if first <= seen.start + each < len(tokens) - 1]
        if places:
            found = values.keys.codes(seen.hidden[_TAP][[rows[each] for each in places]].cpu())
            codes |= {seen.start + each: code for each, code in zip(places, found, strict=True)}
        with values.lock:
            for number in range(known, len(tokens)):
                for place in range(self.length):
                    if (code := codes.get(number - 2 - place)) is not None:
                        values.learn(place, code, tokens[number])
        reading.learned = len(tokens)
        for position in [each for each in codes if each < len(tokens) - 1 - self.length]:
            del codes[position]
