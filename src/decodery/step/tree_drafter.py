"""Base class of drafters that give distributions after any node of a tree, so that tree policies can use them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import method_of, resolve
from decodery.core.requirements import Origin, Provides, Requirements
from decodery.core.threads import one_thread
from decodery.core.topk import most_likely, topk

from .draft_length_policy import Budget, Outlook
from .draft_tree import DraftTree
from .drafter import Drafter
from .forward_request import ForwardCoroutine, as_coroutine
from .look_ahead import UNSAID, Ahead, Level, logged
from .sequence import Sequence
from .tree_policy import TreePolicy
from .wanted import RowChoices

__all__ = ["TreeDrafter"]


@dataclass(frozen=True)
class TreeDrafter(Drafter):
    """A drafter that gives a distribution after any node of any tree, so that trees can be grown.

    Attributes:
        bounds_trees: Whether `length` bounds the depth of trees as well; elsewhere it is refused beside a tree_policy,
            as it would change nothing.
        length: Tokens of a chain, or levels of a tree where `bounds_trees` holds.
        tree_policy: The policy that grows them, as an instance or a text; None drafts a chain of up to `length` tokens,
            each drawn as the target's sampler would draw it and with the target's noise.
    """

    bounds_trees: ClassVar[bool] = False

    length: int = field(default=4, kw_only=True)
    tree_policy: TreePolicy | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = method.name if (method := method_of(self)) else type(self).__name__
        if self.length < 1:
            raise SettingsError(f"{name} needs length >= 1, not {self.length}")
        if self.tree_policy is None:
            return
        object.__setattr__(self, "tree_policy", resolve("tree-policy", self.tree_policy))
        if not self.bounds_trees and self.length != next(
            each.default for each in fields(self) if each.name == "length"
        ):
            raise SettingsError(
                f"{name} grows trees here, and length={self.length} is of chains: give tree_policy=none for a chain of "
                f"{self.length} tokens, or leave length out"
            )

    @property
    def requirements(self) -> Requirements:
        return self.tree_policy.requirements if isinstance(self.tree_policy, TreePolicy) else Requirements()

    @property
    def provides(self) -> Provides:
        return (
            self.tree_policy.provides
            if isinstance(self.tree_policy, TreePolicy)
            else Provides(drafts=("sampled",), pauses=True)
        )

    def largest(self) -> int | None:
        return self.tree_policy.largest() if isinstance(self.tree_policy, TreePolicy) else self.length

    def held_rows(self, nodes: int) -> int:
        # Of the nodes of a level logits, warped copies and log-probabilities, and of all nodes what was drawn from.
        return 3 if self.tree_policy is None else 6 * (nodes + 1)

    @abstractmethod
    def logits(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]
    ) -> torch.Tensor | ForwardCoroutine[torch.Tensor]:
        """The drafter's own logits [len(nodes), vocab] of the token after each of `nodes`, in one draft pass.

        Args:
            seq: The sequence.
            tree: A tree rooted at the last token; between calls nodes may only be added.
            nodes: Nodes of the tree whose children are predicted.
        """

    def drawn(self, seq: Sequence, length: int) -> list[int] | ForwardCoroutine[list[int]]:
        """The first tokens of a chain of up to `length`, as far as they can be drawn without waiting for each.

        Args:
            seq: The sequence.
            length: How many are to be drafted.

        Returns:
            What the text's sampler and noise choose after the text and these tokens by the drafter's own logits, up to
            an end token.
        """
        return []

    def read_ahead(
        self,
        seq: Sequence,
        plan: tuple[Level, ...],
        *,
        shaped: bool = True,
        origin: Origin = "deterministic",
    ) -> ForwardCoroutine[Ahead | None] | None:
        """Read nodes of all levels of a tree at once, where waiting for each level costs more.

        Args:
            seq: The sequence.
            plan: Level by level, the root's first.
            shaped: See `expand`.
            origin: Whether children are the most likely tokens, or drawn without replacement or independently
                ("sampled") with the text's noise, as `Growing` draws them.

        Returns:
            What each node's children are; None where it was not read ahead.
        """
        return None

    def row_choices(self, seq: Sequence) -> RowChoices | None:
        """What is known on the host of the nodes that `logits` was asked for last, None where nothing is.

        Args:
            seq: The sequence.
        """
        return None

    def state(self, seq: Sequence) -> torch.Tensor | None:
        """[hidden] of the drafter's last layer after the last token it has read; None where it has none."""
        return None

    @property
    def rates(self) -> tuple[tuple[float, ...], ...]:
        """By depth and rank, the measured acceptance rate of its tokens; empty if not measured."""
        return ()

    def reach(self, seq: Sequence) -> int:
        """Maximum depth of trees of this drafter."""
        return seq.remaining

    def writable(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        """`logits`, with padding ids of the vocabulary excluded, which are never written.

        Args:
            seq: The sequence.
            tree: See `logits`.
            nodes: See `logits`.

        Returns:
            Logits [len(nodes), vocab].
        """
        logits = yield from as_coroutine(self.logits(seq, tree, nodes))
        return logits if seq.request.padding is None else seq.request.padding.exclude(logits.clone())

    def expand(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], *, shaped: bool = True
    ) -> ForwardCoroutine[torch.Tensor]:
        """Log-probabilities [len(nodes), vocab] float32 of the token after each of `nodes`, in one draft pass.

        The request's own sampler is applied; the probabilities of a row sum to 1. At temperature 0, only its masks and
        penalties are applied.

        Args:
            seq: See `logits`.
            tree: See `logits`.
            nodes: See `logits`.
            shaped: Whether temperature and truncation are applied; False applies only masks and penalties.
        """
        logits = yield from self.writable(seq, tree, nodes)
        return expected(seq, tree, nodes, logits, shaped=shaped)

    def most_likely(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], k: int, *, shaped: bool = True
    ) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray]]:
        """The k most likely tokens of `expand`: ids [len(nodes), at most k] int64, best first, and logprobs.

        Args:
            seq: See `expand`.
            tree: See `expand`.
            nodes: See `expand`.
            k: Number of tokens per node.
            shaped: See `expand`.
        """
        if not seq.request.sampler.keeps(shaped=shaped):
            return topk((yield from self.expand(seq, tree, nodes, shaped=shaped)), k)
        # Only the k best tokens of each distribution are needed, so the rest is not copied.
        logits = yield from self.writable(seq, tree, nodes)
        if (known := self.row_choices(seq)) is not None and len(known.ids) == len(nodes) and known.ids.shape[1] >= k:
            return logged((known.ids[:, :k], known.chances[:, :k]))
        return logged(most_likely(logits, k))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        depth = min(budget.depth, self.reach(seq))
        if min(budget.nodes, depth) < 1:
            return DraftTree.root(seq.last_token)
        if isinstance(self.tree_policy, TreePolicy):
            return (yield from self.tree_policy.grow(self, seq, replace(budget, depth=depth)))
        length = min(self.length, budget.nodes, depth)
        laws, drafted = seq.request.acceptance_rule.requirements.laws, list[int]()
        if budget.ask is None and not laws:
            drafted = yield from as_coroutine(self.drawn(seq, length))
            if seq.request.sampler.plain:
                return (yield from self._most_likely_chain(seq, drafted, length))
        return (yield from self._chain(seq, drafted, budget, length))

    def _most_likely_chain(self, seq: Sequence, drafted: list[int], length: int) -> ForwardCoroutine[DraftTree]:
        """`_chain` where only the most likely token of each distribution is needed."""
        tree = DraftTree.chain(seq.last_token, drafted, origin="sampled")
        while len(drafted) < length and (not drafted or drafted[-1] not in seq.request.eos_ids):
            ids, logprobs = yield from self.most_likely(seq, tree, [len(drafted)], 1)
            if not logprobs[0, 0] > -np.inf:
                break
            drafted.append(int(ids[0, 0]))
            tree = DraftTree.chain(seq.last_token, drafted, origin="sampled")
        return tree

    def _chain(self, seq: Sequence, drafted: list[int], budget: Budget, length: int) -> ForwardCoroutine[DraftTree]:
        """A chain that begins with `drafted`, token by token."""
        sampler, context = seq.request.sampler, seq.request.sampler.ahead(seq.context(), drafted)
        laws: dict[int, torch.Tensor] = {}
        tree = DraftTree.chain(seq.last_token, drafted, origin="sampled")
        logits = torch.empty(0, dtype=torch.float32, device="cpu")
        read, laws_wanted = -1, seq.request.acceptance_rule.requirements.laws

        def law() -> ForwardCoroutine[torch.Tensor]:
            nonlocal logits, read
            if read < len(drafted):
                logits, read = (yield from self.writable(seq, tree, [len(drafted)])), len(drafted)
            with one_thread():
                return sampler.law(logits.clamp(min=UNSAID), [context])[0]

        while len(drafted) < length and (not drafted or drafted[-1] not in seq.request.eos_ids):
            outlook = Outlook(len(drafted), self.state(seq) if drafted else None, law)
            if not (yield from as_coroutine(budget.goes_on(outlook))):
                break
            if budget.ask is None and not laws_wanted:
                logits, read = (yield from self.writable(seq, tree, [len(drafted)])), len(drafted)
            known = None if laws_wanted or read < len(drafted) else self.row_choices(seq)
            if known is not None and known.picks and known.picks[0] >= 0:
                token = known.picks[0]
            else:
                row = (yield from outlook.law())[None]
                token = int(sampler.pick(row, seq.request.seed, [context.position])[0])
                if logits[0, token] == -torch.inf:
                    # A mask may exclude all tokens of a drafter with a small vocabulary.
                    break
                if laws_wanted:
                    laws[len(drafted)] = sampler.preferences(row)[0]
            drafted.append(token)
            tree = DraftTree.chain(seq.last_token, drafted, origin="sampled", distributions=laws)
            context = sampler.extend(context, drafted[-1], logits[0])
        return tree


def expected(
    seq: Sequence, tree: DraftTree, nodes: Ordered[int], logits: torch.Tensor, *, shaped: bool = True
) -> torch.Tensor:
    """Log-probabilities of a drafter's logits [len(nodes), vocab] under the request's sampler.

    See `TreeDrafter.expand`.

    Args:
        seq: See `TreeDrafter.expand`.
        tree: See `TreeDrafter.expand`.
        nodes: See `TreeDrafter.expand`.
        logits: [len(nodes), vocab], the drafter's own.
        shaped: See `TreeDrafter.expand`.
    """
    # Warps that hear log-probabilities stay where they are: what is drawn from need not be the target's law.
    sampler = seq.request.sampler
    contexts = [sampler.ahead(seq.context(), tree.tokens[tree.path(node)].tolist()) for node in nodes]
    with one_thread():
        law = sampler.law(logits.clamp(min=UNSAID), contexts, shaped=shaped).float()
        # Where a mask leaves nothing that the drafter can say, anything is as good.
        silent = law.amax(dim=-1, keepdim=True) == -torch.inf
        return torch.where(silent, 0.0, law).log_softmax(dim=-1)


def expanding(drafter: Drafter | str, name: str) -> TreeDrafter:
    """Return the drafter with which the method `name` grows trees.

    Raises:
        SettingsError: If it is not a `TreeDrafter`.
    """
    resolved = resolve("drafter", drafter)
    if not isinstance(resolved, TreeDrafter):
        raise SettingsError(f"{name} grows trees with a drafter that can expand, such as draft-model, not {drafter}")
    return resolved
