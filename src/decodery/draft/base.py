"""What a drafter is: something that guesses what may follow, and learns from what did."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..core.tree import Origin, TokenTree
from ..errors import SettingsError
from ..registry import resolve

if TYPE_CHECKING:
    from ..budget.base import Budget
    from ..core.sequence import Sequence
    from ..model.protocol import LanguageModel


@dataclass(slots=True)
class Observation:
    """What one pass taught about one sequence.

    tree: the rows that were scored: the step's draft, or a chunk of the prompt as a chain.
    logits: [n, vocab] float32 of the tree's nodes, the model's own. hidden: {layer: [n, hidden]}, as tapped.
    path: accepted nodes below the root; emitted: tokens the text grew by, the bonus token included.
    start: where in the text the tree's root stands.
    """

    tree: TokenTree
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    path: list[int]
    emitted: list[int]
    start: int

    def likeliest(self, nodes: Ordered[int]) -> list[int]:
        """The token the model itself finds likeliest after each of `nodes`, the lowest id among equals."""
        if self.logits.device.type != "cpu":
            return self.logits[list(nodes)].argmax(dim=-1).tolist()
        # Row by row in numpy: nothing is copied and no thread is woken.
        rows = self.logits.numpy()
        return [int(rows[node].argmax()) for node in nodes]


@dataclass(frozen=True)
class Drafter:
    """A way of guessing the next tokens. Fields are hyper-parameters; memory lives in `seq.draft_state`.

    origin: how siblings in its trees arise, which decides the rules that may verify them.
    taps: after how many layers it wants hidden states. reads_prompt: whether it is shown the prompt's rows too.
    weighs_cost: whether it asks what passes cost, which is then measured before decoding starts. asks: whether it asks
    its budget before each draw whether to go on.
    """

    origin: ClassVar[Origin] = "deterministic"
    taps: ClassVar[tuple[int, ...]] = ()
    reads_prompt: ClassVar[bool] = False
    weighs_cost: ClassVar[bool] = False
    asks: ClassVar[bool] = False

    def start(self, seq: Sequence) -> Any:
        """Memory for a new sequence whose prompt is `seq.tokens`; becomes `seq.draft_state`."""
        return None

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        """A tree rooted at the pending token, within the budget; the root alone where nothing can be guessed."""
        raise NotImplementedError

    def observe(self, seq: Sequence, seen: Observation) -> None:
        """Learn from a scored pass; `seq.tokens` has grown by `seen.emitted` already."""

    def readers(self, target: LanguageModel) -> tuple[LanguageModel, ...]:
        """The models that read a text beside `target`, each with a cache of its own."""
        return ()

    def held_rows(self, nodes: int) -> int:
        """How many rows [vocab] float32 it holds at once while it drafts `nodes` nodes, at most."""
        return 0


@dataclass(frozen=True)
class Expander(Drafter):
    """A drafter that can say what it expects after any node of any tree, so that trees can be grown with it."""

    def held_rows(self, nodes: int) -> int:
        return 3

    def expand(self, seq: Sequence, tree: TokenTree, nodes: Ordered[int]) -> torch.Tensor:
        """Log-probabilities [len(nodes), vocab] float32 of the token after each of `nodes`, in one draft pass.

        tree: rooted at the pending token. They are those of the request's own sampler (at temperature 0 after its
        masks and penalties), every row summing to 1.
        """
        raise NotImplementedError


def expanding(drafter: Drafter | str, name: str) -> Expander:
    """The drafter that the method `name` is to grow trees with. Raises SettingsError where it cannot expand."""
    resolved = resolve("draft", drafter)
    if not isinstance(resolved, Expander):
        raise SettingsError(f"{name} grows trees with a drafter that can expand, such as draft-model, not {drafter}")
    return resolved


@dataclass(frozen=True)
class Composite(Drafter):
    """A drafter made of others, each of which has a memory of its own.

    `seq.draft_state` is the list of the parts' memories, and of whatever a subclass adds behind them.
    """

    @property
    def parts(self) -> tuple[Drafter, ...]:
        raise NotImplementedError

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sorted({tap for part in self.parts for tap in part.taps}))

    @property
    def reads_prompt(self) -> bool:  # type: ignore[override]
        return any(part.reads_prompt for part in self.parts)

    @property
    def weighs_cost(self) -> bool:  # type: ignore[override]
        return any(part.weighs_cost for part in self.parts)

    def readers(self, target: LanguageModel) -> tuple[LanguageModel, ...]:
        return tuple(model for part in self.parts for model in part.readers(target))

    def held_rows(self, nodes: int) -> int:
        # Expanding a node takes its logits, copies of them in order and warped, and log-probabilities.
        grown = 4 * (nodes + 1)
        return sum(grown if isinstance(part, Expander) else part.held_rows(nodes) for part in self.parts)

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

    def observe(self, seq: Sequence, seen: Observation) -> None:
        for number in range(len(self.parts)):
            with self.part(seq, number) as drafter:
                drafter.observe(seq, seen)
