"""What drafters have in common that guess inside of the target's own pass, in rows after those it scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.requirements import Requirements
from decodery.core.topk import topk
from decodery.models.hooks import Tap
from decodery.models.protocol import Reader
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import Change, DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.sequence import Sequence

from ..tree_building.stages import LONGEST, SHORTEST, Stages, fastest_stages, find_stages


@dataclass(frozen=True, eq=False)
class Asked:
    """Inputs of the rows that predict the tokens 1, 2, ... after the next one, and their accuracy.

    Attributes:
        inputs: [ahead, hidden].
        rates: [ahead, ranks] float64, how often each of the most likely tokens was right in held-out texts, falling
            along the ranks.
        changes: See `DraftTree.changes`.
    """

    inputs: torch.Tensor
    rates: np.ndarray
    changes: Mapping[Tap, Change] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """guesses: [m, ranks] tokens guessed after the last token. sequences: what the trees `stages` were chosen for."""

    asked: Asked
    guesses: np.ndarray
    stages: Stages | None = None
    sequences: int = 0


@dataclass(frozen=True)
class InPass(Drafter):
    """Puts rows without a token after those of a draft, whose answers are the next draft.

    The guesses after the last token accepted make the next tree, of which the nodes are the most likely places by the
    rates of rank and depth; where rows are short, nodes that are rarely the last one accepted have fewer guesses after
    them, and a pass that ends there is followed by a smaller tree (`shapes.stages`). Rows without a token are seen by
    none that has one, never verified, and forgotten after the pass. Scope: the request; memory: the guesses.

    Attributes:
        length: Rows of a pass at most, the last token's included; None: as many as make this machine fastest, by what
            passes of the model take on it, which may be one.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and not SHORTEST <= self.length <= LONGEST:
            raise SettingsError(f"a pass that drafts has {SHORTEST} to {LONGEST} rows, not length={self.length}")

    @property
    def requirements(self) -> Requirements:
        return Requirements(trees=True, states=True, costs=self.length is None)

    def largest(self) -> int:
        return (self.length or LONGEST) - 1

    @abstractmethod
    def asked(self, model: Reader) -> Asked:
        """What was learned for `model`. Raises a DecoderyError where there is nothing."""

    def start(self, seq: Sequence) -> _State:
        found = self.asked(seq.request.model)
        ranks = min(found.rates.shape[1], seq.request.vocab_size)
        rates = np.ascontiguousarray(found.rates[:, :ranks], dtype=np.float64)
        return _State(Asked(found.inputs, rates, found.changes), np.empty((0, ranks), dtype=np.int64))

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        state: _State = seq.states[self]
        if state.sequences != budget.sequences:
            state.stages, state.sequences = self._chosen(state.asked.rates, budget), budget.sequences
        root = DraftTree.root(seq.last_token)
        if state.stages is None:
            return root
        trees = state.stages.trees
        if known := min(len(state.guesses), len(trees)):
            tree = trees[known - 1]
            tokens = state.guesses[tree.depths - 1, tree.ranks]
            tokens[0] = seq.last_token
            whole, asks = DraftTree(tokens, tree.parents), tree.asks
        else:
            whole, asks = root, np.array([len(trees)])
        whole = whole.with_mask_nodes(asks, state.asked.inputs, state.asked.changes)
        # Nothing is said after the end of a text.
        ended = np.isin(whole.tokens[whole.parents], list(seq.request.eos_ids)) & (whole.parents > 0)
        return whole.prune(~ended & (whole.depths <= budget.depth) & (np.arange(len(whole)) <= budget.nodes))

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        state: _State = seq.states[self]
        chain = seen.tree.asked(seen.path[-1] if seen.path else 0)
        ranks = state.asked.rates.shape[1]
        state.guesses = topk(seen.logits[chain], ranks)[0] if chain else state.guesses[:0]

    def _chosen(self, rates: np.ndarray, budget: Budget) -> Stages | None:
        longest = budget.nodes + 1
        if self.length is not None:
            return find_stages(rates, max(SHORTEST, min(self.length, longest)))
        # Texts that share a pass share its time.
        return fastest_stages(rates, lambda rows: budget.seconds(budget.sequences * rows), longest)
