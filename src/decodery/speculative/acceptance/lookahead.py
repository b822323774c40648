"""Rules that read on along continuations of their own before they decide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from decodery.step.acceptance_rule import AcceptanceRule, Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

Run = tuple[int, ...]


class View:
    """What is scored below the last token and was found there before; notes outlive the passes.

    Args:
        room: How many tokens the text may still grow by in the model's context.
    """

    def __init__(self, laws: NodeDistributions, seq: Sequence) -> None:
        self.laws = laws
        self.seq = seq
        self.room = seq.request.model.config.max_positions - len(seq.tokens)
        self.notes: dict[tuple[int, Run, int], tuple[int, float]] = {}
        self.asked: list[Run] = []

    @property
    def tree(self) -> DraftTree:
        return self.laws.tree

    def path(self, node: int) -> Run:
        """Tokens from below the root down to `node`."""
        return tuple(self.tree.tokens[self.tree.path(node)].tolist())

    def ask(self, node: int, runs: Iterable[Run]) -> None:
        """Wish to see the rows of these continuations of `node`; the ones that end it first are fed first."""
        self.asked += [self.path(node) + run for run in runs]

    def next(self, node: int, run: Run, seed: int, *, raw: bool = False) -> tuple[int, float] | None:
        """The token that noise of `seed` draws after `run` below `node`, and its log-probability there.

        Args:
            raw: The model's own, not the sampler's. None where that row is not scored yet.
        """
        key = (node, run, seed)
        if key not in self.notes:
            at: int | None = node
            for token in run:
                at = None if at is None else self.tree.child(at, token)
            if at is None:
                return None
            law = self.laws.rows([at])
            token = int(self.seq.request.sampler.pick(law, seed, [self.laws.position(at)])[0])
            scored = self.laws.row(at).float() if raw else law[0]
            self.notes[key] = token, float(scored[token] - scored.logsumexp(dim=-1))
        return self.notes[key]


@dataclass(frozen=True)
class LookaheadRule(AcceptanceRule):
    """A rule that decides run by run, after it has read on.

    Drafts save it passes where they guess what it reads.
    """

    @abstractmethod
    def decide(self, view: View, node: int) -> Run:
        """The next token or tokens after `node`; whatever where it has asked `view` for more rows.

        All but the last of several tokens must be scored.
        """

    def choose(self, tree: DraftTree, laws: NodeDistributions, seq: Sequence) -> ForwardCoroutine[Accepted]:
        view = View(laws, seq)
        path: list[int] = []
        node = 0
        while True:
            run = self.decide(view, node)
            if view.asked:
                yield from laws.grow(view.asked)
                view.asked = []
                continue
            for token in run:
                child = view.tree.child(node, token)
                # Nothing is looked for after the text's end.
                if child is None or token in seq.request.eos_ids or len(path) + 1 == seq.remaining:
                    return Accepted(path, token)
                path.append(child)
                node = child
