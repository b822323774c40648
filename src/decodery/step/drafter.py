"""What a drafter is: something that guesses what may follow, and learns from what did."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, fields, replace
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.ledger import charging
from decodery.core.requirements import Provides, Requirements
from decodery.models.hooks import Tap

from .draft_tree import MASK_TOKEN, DraftTree
from .forward_request import ForwardCoroutine, run_sync

if TYPE_CHECKING:
    from decodery.models.protocol import Reader

    from .draft_batch import DraftBatch
    from .draft_length_policy import Budget
    from .logits_source import LogitsSource
    from .sequence import Sequence

__all__ = ["Drafter", "VerificationFeedback"]


@dataclass(slots=True)
class VerificationFeedback:
    """What one pass taught about one sequence.

    Attributes:
        tree: The rows that were scored: the step's draft, or a chunk of the prompt as a chain.
        logits: [n, vocab] float32 of the tree's nodes, the model's own; of a prompt only those that were needed.
        hidden: {tap: [n, width]}, as tapped.
        path: Accepted nodes below the root.
        emitted: Tokens the text grew by, the bonus token included.
        start: Where in the text the tree's root stands.
    """

    tree: DraftTree
    logits: torch.Tensor
    hidden: dict[Tap, torch.Tensor]
    path: list[int]
    emitted: list[int]
    start: int

    def of_tokens(self) -> VerificationFeedback:
        """The nodes that have a token: what a drafter sees that asked about no others."""
        if self.tree.inputs is None:
            return self
        known = self.tree.tokens != MASK_TOKEN
        rows, place = np.flatnonzero(known).tolist(), np.cumsum(known) - 1
        hidden = {tap: states[rows] for tap, states in self.hidden.items()}
        path = place[self.path].tolist()
        return VerificationFeedback(self.tree.prune(known), self.logits[rows], hidden, path, self.emitted, self.start)

    def likeliest(self, nodes: Ordered[int]) -> list[int]:
        """The token the model itself finds most likely after each of `nodes`, the lowest id among equals."""
        if self.logits.device.type != "cpu":
            return self.logits[list(nodes)].argmax(dim=-1).tolist()
        # Row by row in numpy: nothing is copied and no thread is woken.
        rows = self.logits.numpy()
        return [int(rows[node].argmax()) for node in nodes]


@dataclass(frozen=True)
class Drafter(Contract):
    """A way of guessing the next tokens.

    Fields are hyper-parameters; its state of a text is `seq.states[self]`.

    One that needs passes of a model is a generator that asks for them, see `decodery.step.forward_request`.

    Subclasses declare what they need and give, as in `requirements = Requirements(prompt=True)`. One that needs
    `states` gets mask nodes as well.

    Attributes:
        keeps_logits: Whether it may look at what it has observed after `observe` has returned.
    """

    keeps_logits: ClassVar[bool] = True

    @property
    def requirements(self) -> Requirements:
        """What it must find of the model."""
        return Requirements()

    @property
    def provides(self) -> Provides:
        """How siblings in its trees may arise, which decides the acceptance rules, and what policies find."""
        return Provides(drafts=("deterministic",))

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        """The same drafter with what comes along for texts of `model`, where that is left to it.

        Args:
            model: The model of the texts.
            logits_source: What takes the model's place, None where nothing does.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {name: _bound(value, model, logits_source) for name, value in own.items()}
        changed = {name: value for name, value in found.items() if value is not own[name]}
        return replace(self, **changed) if changed else self

    def start(self, seq: Sequence) -> Any:
        """Memory for a new sequence whose prompt is `seq.tokens`; becomes `seq.states[self]`."""
        return None

    def skips_step(self, seq: Sequence, budget: Budget) -> bool:
        """Whether it skips this step: no tree, and no feedback unless the text ends by it.

        Asked once before every step whose drafts no budget policy bounds.

        Args:
            seq: The sequence.
            budget: Bounds of this step's draft.
        """
        return False

    @property
    def together(self) -> Hashable | None:
        """What drafters have in common that propose jointly, see `prepare`; None for one that never does."""
        return None

    def prepare(self, texts: list[tuple[Sequence, Budget]]) -> bool:
        """Propose for all texts of a step whose drafters agree in `together`, before each is asked by itself.

        Args:
            texts: The texts whose drafts no budget policy bounds, with the bounds of their drafts.

        Returns:
            Whether `settle` is to be called with them when the step has ended.
        """
        return False

    def settle(self, texts: list[Sequence]) -> None:
        """Learn of a step from all of its texts at once, after each was observed by itself."""

    def batch(self, sequences: Ordered[Sequence], places: Ordered[int]) -> DraftBatch | None:
        """The drafts of texts that stay together for many steps; None where each is drafted by itself.

        Args:
            sequences: [n] the texts, of which it `asks` for none, whose drafters agree in `together`.
            places: [n] their numbers among all texts of a step.
        """
        return None

    @abstractmethod
    def propose(self, seq: Sequence, budget: Budget) -> DraftTree | ForwardCoroutine[DraftTree]:
        """A tree rooted at the last token, within the budget; the root alone where nothing can be guessed.

        Args:
            seq: The sequence; its memory for this drafter is `seq.draft_state`.
            budget: Bounds of the draft.
        """

    def asks(self, seq: Sequence) -> bool:
        """Whether its drafts for a text need more than `propose` as a plain function.

        That is passes, hidden states or work ahead.

        Args:
            seq: The sequence, with its memory.
        """
        own, requirements = type(self), self.requirements
        if isgeneratorfunction(own.propose) or own.ahead is not Drafter.ahead:
            return True
        return bool(requirements.taps) or requirements.states

    def propose_all(self, seqs: Ordered[Sequence], budgets: Ordered[Budget]) -> list[DraftTree | Exception]:
        """The trees of texts that share a pass, of which it `asks` for none.

        Args:
            seqs: [n] the sequences, whose drafters are equal to this one, each with the memory of its own.
            budgets: [n] bounds of their drafts.

        Returns:
            A tree each, or what went wrong with it.
        """
        found: list[DraftTree | Exception] = []
        for seq, budget in zip(seqs, budgets, strict=True):
            try:
                with charging(seq.trace.ledger):
                    found.append(run_sync((seq.request.drafter or self).propose(seq, budget)))
            except Exception as error:
                found.append(error)
        return found

    def observe_all(self, seqs: Ordered[Sequence], seen: Ordered[VerificationFeedback]) -> dict[int, Exception]:
        """Learn from a pass that texts have shared, as `observe` does from each.

        Args:
            seqs: [n] the sequences after the step.
            seen: [n] what became of their trees.

        Returns:
            What went wrong, by number of the text.
        """
        failed: dict[int, Exception] = {}
        for number, (seq, each) in enumerate(zip(seqs, seen, strict=True)):
            try:
                with charging(seq.trace.ledger):
                    (seq.request.drafter or self).observe(seq, each)
            except Exception as error:
                failed[number] = error
        return failed

    def ahead(self, seq: Sequence, tree: DraftTree) -> ForwardCoroutine[None] | None:
        """What it does while the target scores `tree`, with passes of other models; None for nothing.

        Args:
            seq: The sequence.
            tree: The draft that is scored.
        """
        return None

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        """Learn from a scored pass; `seq.tokens` has grown by `seen.emitted` already.

        Args:
            seq: The sequence after the step.
            seen: The scored tree, what was accepted of it, and what the drafter requires.
        """

    def forget(self, seq: Sequence) -> None:
        """Give back the memory of what other models have read of the text.

        It is read again where it is needed.
        """

    def largest(self) -> int | None:
        """How many nodes it would draft in a step at most, by its settings; None where they set no bound."""
        return None

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        """The models that read a text beside `target`, each with a cache of its own."""
        return ()

    def held_rows(self, nodes: int) -> int:
        """How many rows [vocab] float32 it holds at once while it drafts `nodes` nodes, at most."""
        return 0


def _bound(value: Any, model: Reader, logits_source: LogitsSource | None) -> Any:
    """A setting of a drafter, with other drafters in it suited to a model."""
    if isinstance(value, Drafter):
        return value.bind(model, logits_source)
    if isinstance(value, tuple) and any(isinstance(each, Drafter) for each in value):
        found = tuple(_bound(each, model, logits_source) for each in value)
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found
    return value
