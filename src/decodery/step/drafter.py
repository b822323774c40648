"""Base class of drafters, which propose the next tokens and are updated with the accepted ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, fields, replace
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.ledger import charging
from decodery.core.requirements import Provides, Requirements
from decodery.core.topk import topk
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader

from .draft_tree import MASK_TOKEN, DraftTree
from .forward_request import ForwardCoroutine, run_sync
from .logits_source import LogitsSource

if TYPE_CHECKING:
    from .draft_batch import DraftBatch
    from .draft_length_policy import Budget
    from .sequence import Sequence

__all__ = ["Drafter", "VerificationFeedback"]


@dataclass(slots=True)
class VerificationFeedback:
    """The result of one pass for one sequence.

    Attributes:
        tree: The scored rows: the step's draft, or a chunk of the prompt as a chain.
        logits: [n, vocab] float32 of the tree's nodes, the model's own; of a prompt only the required ones.
        hidden: By tap, [n, width] hidden states.
        path: Accepted nodes below the root.
        emitted: Tokens that were added to the text, including the bonus token.
        start: Position of the tree's root in the text.
        ranked: Ids and values [n, k] of the largest logits of each node, where they are known already.
    """

    tree: DraftTree
    logits: torch.Tensor
    hidden: dict[Tap, torch.Tensor]
    path: list[int]
    emitted: list[int]
    start: int
    ranked: tuple[np.ndarray, np.ndarray] | None = None

    def best(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and values [n, k] of the largest logits of each node, see `core.topk.topk`."""
        if self.ranked is not None and k <= self.ranked[0].shape[1]:
            ids, values = self.ranked
            return ids[:, :k], values[:, :k]
        return topk(self.logits, k)

    def of_tokens(self) -> VerificationFeedback:
        """The same without mask nodes, for drafters that do not use them."""
        if self.tree.inputs is None:
            return self
        known = self.tree.tokens != MASK_TOKEN
        rows, place = np.flatnonzero(known).tolist(), np.cumsum(known) - 1
        hidden = {tap: states[rows] for tap, states in self.hidden.items()}
        path = place[self.path].tolist()
        return VerificationFeedback(self.tree.prune(known), self.logits[rows], hidden, path, self.emitted, self.start)

    def most_likely(self, nodes: Ordered[int]) -> list[int]:
        """The model's most likely token after each of `nodes`; of equals the lowest id."""
        if self.logits.device.type != "cpu":
            return self.logits[list(nodes)].argmax(dim=-1).tolist()
        # Row by row in numpy, which copies no data and wakes no threads.
        rows = self.logits.numpy()
        return [int(rows[node].argmax()) for node in nodes]


@dataclass(frozen=True)
class Drafter(Contract):
    """Proposes the next tokens of a text.

    Fields are hyper-parameters; the state of a text is `seq.states[self]`.

    Methods that need forward passes are coroutines that yield requests, see `decodery.step.forward_request`.

    Subclasses declare their requirements and capabilities, as in `requirements = Requirements(prompt=True)`. A drafter
    that requires `states` gets mask nodes too.
    """

    @property
    def keeps_logits(self) -> bool:
        """Whether it may keep a reference to the logits after `observe` has returned."""
        return True

    @property
    def ranks(self) -> int:
        """How many of the largest logits of each node `observe` reads after steps; 0: any, and all of them."""
        return 0

    @property
    def requirements(self) -> Requirements:
        """Its requirements on the model."""
        return Requirements()

    @property
    def provides(self) -> Provides:
        """What it provides: the origins of siblings in its trees, on which acceptance rules depend, and more."""
        return Provides(drafts=("deterministic",))

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        """Return this drafter with its open settings filled in for `model`, such as the head for it.

        Args:
            model: The model of the texts.
            logits_source: The logits source of the texts, None for the model's own logits.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {name: _bound(value, model, logits_source) for name, value in own.items()}
        changed = {name: value for name, value in found.items() if value is not own[name]}
        return replace(self, **changed) if changed else self

    def start(self, seq: Sequence) -> Any:
        """Make the state of a new sequence with the prompt `seq.tokens`; it becomes `seq.states[self]`."""
        return None

    def skips_step(self, seq: Sequence, budget: Budget) -> bool:
        """Whether it skips this step: no tree, and no feedback unless the text ends in this step.

        Called once before every step whose drafts are not bounded by a draft length policy.

        Args:
            seq: The sequence.
            budget: Bounds of this step's draft.
        """
        return False

    @property
    def together(self) -> Hashable | None:
        """A key that is equal for drafters that propose jointly, see `prepare`; None for no joint drafts."""
        return None

    def prepare(self, texts: list[tuple[Sequence, Budget]]) -> bool:
        """Prepare the drafts of all texts of a step with one key `together`, before `propose` for each.

        Args:
            texts: The texts whose drafts are not bounded by a draft length policy, with the bounds of their drafts.

        Returns:
            Whether to call `settle` with them after the step.
        """
        return False

    def settle(self, texts: list[Sequence]) -> None:
        """Update from all texts of a step together, after `observe` was called for each."""

    def batch(self, sequences: Ordered[Sequence], places: Ordered[int]) -> DraftBatch | None:
        """Make the drafts of texts that stay together for many steps; None to draft each text separately.

        Args:
            sequences: [n] texts with the same key `together`, for which `asks` is false.
            places: [n] their indices among all texts of a step.
        """
        return None

    @abstractmethod
    def propose(self, seq: Sequence, budget: Budget) -> DraftTree | ForwardCoroutine[DraftTree]:
        """Propose a tree rooted at the last token, within the budget; only the root where there is no draft.

        Args:
            seq: The sequence; its state for this drafter is `seq.states[self]`.
            budget: Bounds of the draft.
        """

    def asks(self, seq: Sequence) -> bool:
        """Whether its next draft for a text may need forward passes, hidden states or work in `ahead`.

        It may change from step to step. While it is false, `propose` is a plain function or yields nothing, and the
        text can be one of a batch in arrays.

        Args:
            seq: The sequence, with its state.
        """
        own, requirements = type(self), self.requirements
        if isgeneratorfunction(own.propose) or own.ahead is not Drafter.ahead:
            return True
        return bool(requirements.taps) or requirements.states

    def propose_all(self, seqs: Ordered[Sequence], budgets: Ordered[Budget]) -> list[DraftTree | Exception]:
        """Propose the trees of texts that share a pass, for which `asks` is false.

        Args:
            seqs: [n] sequences whose drafters are equal to this one, each with its own state.
            budgets: [n] bounds of their drafts.

        Returns:
            For each text its tree, or the exception that was raised.
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
        """Update from a pass that texts have shared; the same as `observe` for each.

        Args:
            seqs: [n] sequences after the step.
            seen: [n] scored trees with their accepted nodes.

        Returns:
            Exceptions, by index of the text.
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
        """Work that runs while the target scores `tree`, with passes of other models; None for no work.

        Args:
            seq: The sequence.
            tree: The draft that is scored.
        """
        return None

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        """Update the state after a scored pass; `seq.tokens` already contains `seen.emitted`.

        Args:
            seq: The sequence after the step.
            seen: The scored tree, its accepted nodes, and the hidden states that the drafter requires.
        """

    def forget(self, seq: Sequence) -> None:
        """Free the caches of other models for this text; they read it again when it is needed."""

    def more_for(self, seq: Sequence, tokens: int) -> int:
        """Bytes that its caches of other models have yet to take for a text of so many tokens.

        Args:
            seq: The text.
            tokens: How many it has, drafted ones included.
        """
        return 0

    def drops_models(self, seq: Sequence) -> bool:
        """Draft without other models from now on; there is no memory for them.

        Args:
            seq: The text.

        Returns:
            False where it drafts by these alone, or has dropped them already.
        """
        return False

    def largest(self) -> int | None:
        """Maximum number of nodes that it drafts in a step, by its settings; None where they set no bound."""
        return None

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        """The models that read a text beside `target`, each with its own cache."""
        return ()

    def held_rows(self, nodes: int) -> int:
        """Maximum number of rows [vocab] float32 in memory while it drafts `nodes` nodes."""
        return 0


def _bound(value: Any, model: Reader, logits_source: LogitsSource | None) -> Any:
    """A setting of a drafter, in which other drafters are bound to a model."""
    if isinstance(value, Drafter):
        return value.bind(model, logits_source)
    if isinstance(value, tuple) and any(isinstance(each, Drafter) for each in value):
        found = tuple(_bound(each, model, logits_source) for each in value)
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found
    return value
