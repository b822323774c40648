"""What a drafter is: something that guesses what may follow, and learns from what did."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.registry import method_of, resolve
from decodery.core.requirements import Provides, Requirements
from decodery.core.threads import one_thread
from decodery.core.topk import likeliest, topk
from decodery.models.hooks import Tap

from .draft_length_policy import Outlook
from .draft_tree import MASK_TOKEN, DraftTree
from .forward_request import ForwardCoroutine, as_coroutine
from .tree_policy import TreePolicy

if TYPE_CHECKING:
    from decodery.models.protocol import Reader

    from .draft_length_policy import Budget
    from .logits_source import LogitsSource
    from .sequence import Sequence

__all__ = ["Drafter", "TreeDrafter", "VerificationFeedback"]

UNSAID = -1e30
"""The logit, for masks, of tokens that a drafter lacks: a constraint may allow no others, which is no error of its."""


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

    Fields are hyper-parameters; memory lives in `seq.draft_state`.

    One that needs passes of a model is a generator that asks for them, see `decodery.step.forward_request`.

    Subclasses declare what they need and give, as in `requirements = Requirements(prompt=True)`. One that needs
    `states` gets mask nodes as well.
    """

    @property
    def requirements(self) -> Requirements:
        """What it must find of the model."""
        return Requirements()

    @property
    def provides(self) -> Provides:
        """How siblings in its trees may arise, which decides the acceptance rules, and what policies find."""
        return Provides(drafts=("deterministic",))

    def suited(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        """The same drafter with what comes along for texts of `model`, where that is left to it.

        Args:
            model: The model of the texts.
            logits_source: What takes the model's place, None where nothing does.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {name: _suited(value, model, logits_source) for name, value in own.items()}
        changed = {name: value for name, value in found.items() if value is not own[name]}
        return replace(self, **changed) if changed else self

    def start(self, seq: Sequence) -> Any:
        """Memory for a new sequence whose prompt is `seq.tokens`; becomes `seq.draft_state`."""
        return None

    def rests(self, seq: Sequence, budget: Budget) -> bool:
        """Whether it skips this step: no tree, and no feedback unless the text ends by it.

        Asked once before every step whose drafts no budget policy bounds.

        Args:
            seq: The sequence.
            budget: Bounds of this step's draft.
        """
        return False

    @abstractmethod
    def propose(self, seq: Sequence, budget: Budget) -> DraftTree | ForwardCoroutine[DraftTree]:
        """A tree rooted at the last token, within the budget; the root alone where nothing can be guessed.

        Args:
            seq: The sequence; its memory for this drafter is `seq.draft_state`.
            budget: Bounds of the draft.
        """

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

    def readers(self, target: Reader) -> tuple[Reader, ...]:
        """The models that read a text beside `target`, each with a cache of its own."""
        return ()

    def held_rows(self, nodes: int) -> int:
        """How many rows [vocab] float32 it holds at once while it drafts `nodes` nodes, at most."""
        return 0


def _suited(value: Any, model: Reader, logits_source: LogitsSource | None) -> Any:
    """A setting of a drafter, with other drafters in it suited to a model."""
    if isinstance(value, Drafter):
        return value.suited(model, logits_source)
    if isinstance(value, tuple) and any(isinstance(each, Drafter) for each in value):
        found = tuple(_suited(each, model, logits_source) for each in value)
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found
    return value


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
            tree: Rooted at the last token; one that was asked about before may only have grown.
            nodes: Nodes of the tree whose children are expected.
        """

    def state(self, seq: Sequence) -> torch.Tensor | None:
        """[hidden] of the drafter's last layer after the last token it has read; None where it has none."""
        return None

    @property
    def rates(self) -> tuple[tuple[float, ...], ...]:
        """By depth and rank: how often its guess was right; empty if not measured."""
        return ()

    def reach(self, seq: Sequence) -> int:
        """How deep a tree below the last token this drafter can grow."""
        return seq.remaining

    def writable(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> ForwardCoroutine[torch.Tensor]:
        """`logits` without the ids that are no token, which a text never holds.

        Args:
            seq: the text.
            tree: a tree below its last token.
            nodes: of the tree.

        Returns:
            Logits [len(nodes), vocab].
        """
        logits = yield from as_coroutine(self.logits(seq, tree, nodes))
        return logits if seq.padding is None else seq.padding.exclude(logits.clone())

    def expand(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], *, shaped: bool = True
    ) -> ForwardCoroutine[torch.Tensor]:
        """Log-probabilities [len(nodes), vocab] float32 of the token after each of `nodes`, in one draft pass.

        They are those of the request's own sampler, every row summing to 1. shaped=False, and temperature 0, leave
        out temperature and truncation: its masks and penalties alone.

        Args:
            seq, tree, nodes: See `logits`.
            shaped: Whether truncation and temperature are applied; else only what forbids tokens.
        """
        logits = yield from self.writable(seq, tree, nodes)
        return expected(seq, tree, nodes, logits, shaped=shaped)

    def likeliest(
        self, seq: Sequence, tree: DraftTree, nodes: Ordered[int], k: int, *, shaped: bool = True
    ) -> ForwardCoroutine[tuple[np.ndarray, np.ndarray]]:
        """The k most likely tokens of `expand`: ids [len(nodes), at most k] int64, best first, and logprobs.

        Args:
            seq, tree, nodes, shaped: See `expand`.
            k: How many tokens per node.
        """
        if not seq.sampler.keeps(shaped=shaped):
            return topk((yield from self.expand(seq, tree, nodes, shaped=shaped)), k)
        # Most of a distribution over a whole vocabulary is never looked at: no copy of it is made.
        logits = yield from self.writable(seq, tree, nodes)
        return logged(likeliest(logits, k))

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        depth = min(budget.depth, self.reach(seq))
        if min(budget.nodes, depth) < 1:
            return DraftTree.root(seq.pending)
        if isinstance(self.tree_policy, TreePolicy):
            return (yield from self.tree_policy.grow(self, seq, replace(budget, depth=depth)))
        length = min(self.length, budget.nodes, depth)
        if seq.sampler.plain and budget.ask is None and not seq.acceptance_rule.requirements.laws:
            return (yield from self._likeliest_chain(seq, length))
        return (yield from self._chain(seq, budget, length))

    def _likeliest_chain(self, seq: Sequence, length: int) -> ForwardCoroutine[DraftTree]:
        """What `_chain` comes to where nothing of a distribution counts but its most likely token."""
        drafted: list[int] = []
        tree = DraftTree.root(seq.pending)
        while len(drafted) < length and (not drafted or drafted[-1] not in seq.eos_ids):
            ids, logprobs = yield from self.likeliest(seq, tree, [len(drafted)], 1)
            if not logprobs[0, 0] > -np.inf:
                break
            drafted.append(int(ids[0, 0]))
            tree = DraftTree.chain(seq.pending, drafted, origin="sampled")
        return tree

    def _chain(self, seq: Sequence, budget: Budget, length: int) -> ForwardCoroutine[DraftTree]:
        sampler, context = seq.sampler, seq.context()
        drafted: list[int] = []
        laws: dict[int, torch.Tensor] = {}
        tree, logits = DraftTree.root(seq.pending), torch.empty(0, dtype=torch.float32, device="cpu")

        def law() -> ForwardCoroutine[torch.Tensor]:
            nonlocal logits
            logits = yield from self.writable(seq, tree, [len(drafted)])
            with one_thread():
                return sampler.law(logits.clamp(min=UNSAID), [context])[0]

        while len(drafted) < length:
            outlook = Outlook(len(drafted), self.state(seq) if drafted else None, law)
            if not (yield from as_coroutine(budget.goes_on(outlook))):
                break
            row = (yield from outlook.law())[None]
            token = int(sampler.pick(row, seq.seed, [context.position])[0])
            if logits[0, token] == -torch.inf:
                # A mask may leave nothing that a drafter with few tokens can say.
                break
            if seq.acceptance_rule.requirements.laws:
                laws[len(drafted)] = sampler.preferences(row)[0]
            drafted.append(token)
            tree = DraftTree.chain(seq.pending, drafted, origin="sampled", distributions=laws)
            if drafted[-1] in seq.eos_ids:
                break
            context = sampler.extend(context, drafted[-1], logits[0])
        return tree


def expected(
    seq: Sequence, tree: DraftTree, nodes: Ordered[int], logits: torch.Tensor, *, shaped: bool = True
) -> torch.Tensor:
    """Log-probabilities of a drafter's logits [len(nodes), vocab] under the request's sampler.

    See `TreeDrafter.expand`.

    Args:
        seq, tree, nodes, shaped: See `TreeDrafter.expand`.
        logits: [len(nodes), vocab], the drafter's own.
    """
    # Warps that hear log-probabilities stay where they are: what is drawn from need not be the target's law.
    sampler = seq.sampler
    contexts = [sampler.ahead(seq.context(), tree.tokens[tree.path(node)].tolist()) for node in nodes]
    with one_thread():
        law = sampler.law(logits.clamp(min=UNSAID), contexts, shaped=shaped).float()
        # Where a mask leaves nothing that the drafter can say, anything is as good.
        silent = law.amax(dim=-1, keepdim=True) == -torch.inf
        return torch.where(silent, 0.0, law).log_softmax(dim=-1)


def logged(found: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ids with logarithms in place of their probabilities, -inf of none."""
    with np.errstate(divide="ignore"):
        return found[0], np.log(found[1])


def expanding(drafter: Drafter | str, name: str) -> TreeDrafter:
    """The drafter that the method `name` is to grow trees with.

    Raises:
        SettingsError: If it cannot expand.
    """
    resolved = resolve("drafter", drafter)
    if not isinstance(resolved, TreeDrafter):
        raise SettingsError(f"{name} grows trees with a drafter that can expand, such as draft-model, not {drafter}")
    return resolved


@dataclass(frozen=True)
class Composite(Drafter):
    """A drafter made of others, each of which has a memory of its own.

    `seq.draft_state` is the list of the parts' memories, and of whatever a subclass adds after them.
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters it is made of."""

    @cached_property
    def requirements(self) -> Requirements:
        return Requirements.merged(part.requirements for part in self.parts)

    def largest(self) -> int | None:
        sizes = [part.largest() for part in self.parts]
        return None if None in sizes else max(filter(None, sizes), default=0)

    def readers(self, target: Reader) -> tuple[Reader, ...]:
        return tuple(model for part in self.parts for model in part.readers(target))

    def held_rows(self, nodes: int) -> int:
        # Expanding a node takes its logits, copies of them in order and warped, and log-probabilities.
        grown = 4 * (nodes + 1)
        own = [part.held_rows(nodes) for part in self.parts]
        return sum(
            max(grown, rows) if isinstance(part, TreeDrafter) else rows
            for part, rows in zip(self.parts, own, strict=True)
        )

    @contextmanager
    def part(self, seq: Sequence, number: int) -> Iterator[Drafter]:
        """The drafter `number`; meanwhile the sequence holds its memory."""
        states = seq.draft_state
        seq.draft_state = states[number]
        try:
            yield self.parts[number]
        finally:
            states[number] = seq.draft_state
            seq.draft_state = states

    def start(self, seq: Sequence) -> list[Any]:
        return [part.start(seq) for part in self.parts]

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        reading = seen.start < seq.prompt_length
        for number in range(len(self.parts)):
            with self.part(seq, number) as drafter:
                requirements = drafter.requirements
                if not reading or requirements.prompt or requirements.prompt_taps:
                    drafter.observe(seq, seen if requirements.states else seen.of_tokens())

    def forget(self, seq: Sequence) -> None:
        for number in range(len(self.parts)):
            with self.part(seq, number) as drafter:
                drafter.forget(seq)
