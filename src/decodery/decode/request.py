"""What a caller asks of the engine for one text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from ..budget.base import LARGEST, MOST_NODES, Policy
from ..core.sequence import KeptText, Sequence
from ..draft.base import Drafter
from ..draft.forced import Forced
from ..errors import SettingsError
from ..registry import method_of
from ..sample.base import Stage
from ..sample.constraint import constrained
from ..sample.sampler import Sampler
from ..source.base import Source
from ..verify.awrs import AWRS
from ..verify.base import Rule
from ..verify.coupled import Coupled


@dataclass
class Request:
    """Settings of one text. prompt: token ids, at least one.

    sampler: greedy by default. drafter: None for no speculation. budget: how much to draft, None where the drafter
    alone decides. max_nodes: drafted tokens per step at most, whatever both want. stop: strings that end the text and
    are cut from it. eos_ids: tokens that end it. logprobs: how many likeliest tokens to report beside each emitted one
    (0: the emitted one alone). reuse: a finished text whose cache serves as far as its tokens agree with the prompt;
    not used where there is a source. source: what makes the logits out of one or more models and contexts, None for
    the model alone.

    What goes with what is decided here, whoever makes the request. With a constraint in the sampler, tokens it forces
    are drafted too; one that has no mask is asked about single tokens, by the rule awrs in place of coupled.
    """

    prompt: Ordered[int]
    max_new_tokens: int = 128
    sampler: Sampler = field(default_factory=Sampler.from_settings)
    drafter: Drafter | None = None
    rule: Rule = field(default_factory=Coupled)
    seed: int = 0
    stop: Ordered[str] = ()
    eos_ids: Ordered[int] = ()
    logprobs: int | None = None
    reuse: Sequence | KeptText | None = None
    budget: Policy | None = None
    source: Source | None = None
    max_nodes: int = MOST_NODES

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be a whole number, at least 1, not {self.max_new_tokens!r}")
        if not isinstance(self.max_nodes, int) or not 1 <= self.max_nodes <= LARGEST:
            raise SettingsError(f"max_nodes must be a whole number between 1 and {LARGEST}, not {self.max_nodes!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise SettingsError(f"seed must be a whole number of 64 bits, from 0 to 2^64 - 1, not {self.seed!r}")
        if any(not isinstance(string, str) or not string for string in self.stop):
            raise SettingsError("stop must be non-empty strings")
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            raise SettingsError(f"logprobs must lie between 0 and 100, not {self.logprobs}")
        if not isinstance(self.rule, Rule):
            raise SettingsError(
                f"rule must be a verification rule of tokens, such as decodery.verify's Coupled(), not {self.rule!r}"
            )
        self._constrain()
        if self.rule.greedy_only and not self.sampler.greedy:
            raise SettingsError(
                f"the rule {type(self.rule).__name__} leaves nothing to chance, so the sampler may hold masks and "
                "penalties only: use temperature 0"
            )
        if self.rule.greedy_only and self.sampler.ranks:
            raise SettingsError(
                f"the rule {type(self.rule).__name__} compares log-probabilities, and this sampler (momentum) chooses "
                "tokens by another score: leave one of them out"
            )
        cut = [warp for warp in self.sampler.warps if warp.stage is Stage.TRUNCATION or warp.ranks]
        if self.rule.checks and cut and constrained(self.sampler.warps):
            raise SettingsError(
                f"{type(cut[0]).__name__} looks at what a mask leaves, and the rule {type(self.rule).__name__} has "
                "none: leave it out, or use the coupled rule with a constraint that has a mask"
            )
        if self.drafter is not None and (foreign := self.drafter.origins - self.rule.origins):
            raise SettingsError(
                f"the rule {type(self.rule).__name__} cannot verify {' or '.join(sorted(foreign))} drafts of "
                f"{type(self.drafter).__name__}: use the coupled rule or another drafter"
            )
        if self.budget is not None and self.budget.asks and self.drafter is not None and not self.drafter.asks:
            raise SettingsError(
                f"the budget {type(self.budget).__name__} stops a drafter between its draws, and "
                f"{type(self.drafter).__name__} does not ask: use one that does, such as draft-model"
            )
        for reader in (self.drafter, self.rule):
            if reader is not None and reader.taps and self.source is not None and not self.source.tapped:
                raise SettingsError(
                    f"{type(reader).__name__} reads hidden states, which {type(self.source).__name__} does not have "
                    "of every token: use another drafter or rule"
                )
        self._tell_of_cuts()

    def _constrain(self) -> None:
        """What a constraint asks of rule and drafter."""
        found = constrained(self.sampler.warps)
        if found is None:
            return
        constraint = found[1]
        method = method_of(self.rule)
        if method is not None and not method.lossless:
            # A rule that takes drafts on trust would write what the constraint forbids.
            raise SettingsError(f"the rule {method.name} may accept what a constraint forbids: use a lossless rule")
        if self.rule.checks and constraint.bonus is not None:
            raise SettingsError("a rule that asks about single tokens excludes them: use policy=hard, not soft")
        if not constraint.masked and self.rule == Coupled():
            # The same tokens, without a question about every one of the vocabulary.
            self.rule = AWRS()
        if self.drafter is not None and not self.rule.checks and not isinstance(self.drafter, Forced):
            self.drafter = Forced(self.drafter)

    def _tell_of_cuts(self) -> None:
        """Say so where `max_nodes` leaves less than the settings of drafter and budget ask for."""
        if self.drafter is None:
            return
        asking = (self.drafter,) if self.budget is None else (self.drafter, self.budget)
        wanted = min((size for part in asking if (size := part.largest()) is not None), default=0)
        if wanted > self.max_nodes:
            method = method_of(self.drafter)
            name = type(self.drafter).__name__ if method is None else method.name
            warnings.warn(
                f"{name} drafts up to {wanted} tokens per step as it is set, and max_nodes leaves {self.max_nodes}: "
                f"allow max_nodes={min(wanted, LARGEST)} for all of them, or ask it for fewer",
                stacklevel=2,
            )
