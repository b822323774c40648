"""What `auto` learns of steps while an adviser has brought a text further than n-grams alone would have."""

from __future__ import annotations

import numpy as np

from decodery.core.errors import NumericalError
from decodery.core.topk import NAN
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence

from ..tree_building.most_likely import MostLikelyTree
from ..tree_building.native_tree import learn_together, propose_together
from .auto_text import AutoText, affordable, text_of, worth_of
from .unadvised import UnadvisedSteps, accepted, split


def follow(drafter: Drafter, seq: Sequence, seen: VerificationFeedback, most: int) -> VerificationFeedback:
    """Take the steps that there would have been without the adviser, and settle what it saved.

    What the pass showed of tokens before the end of such a step is learned before the next one is drafted, as it would
    have been.

    Args:
        drafter: The text's.
        seq: The text, after a step in which the adviser was asked or before whose end steps without it have not come.
        seen: What became of the step's draft.
        most: Nodes of a tree at most.

    Returns:
        What is still to be learned of.
    """
    state = text_of(seq, drafter)
    advice, rest = state.advice, seen
    assert advice is not None
    # Where nothing was drafted after all, steps without it would have been the same.
    without, budget = seen.tree if advice.without is None else advice.without, advice.budget
    state.kept = accepted(without, seen.emitted)
    begin, steps = seen.start + 1, state.unadvised
    if steps is None:
        steps = UnadvisedSteps(without, _takes(without, budget), begin, begin)
    if steps.read != begin or begin + len(seen.emitted) != len(seq.tokens):
        # Tokens that no pass gave, as of a constraint, save steps of either kind.
        state.unadvised = None
        return seen
    before = steps.seconds
    while steps.follow(seq.tokens) and steps.read < len(seq.tokens):
        first, rest = split(rest, steps.read - rest.start - 1)
        learn_part(seq, state, first, most)
        tree = draft_at(seq, state, budget, min(most, budget.nodes), steps.read)
        steps = steps.next(tree, _takes(tree, budget))
    state.unadvised = None if steps.ended else steps
    advice.settle(steps.seconds - before - _takes(seen.tree, budget))
    return rest


def learn_part(seq: Sequence, state: AutoText, seen: VerificationFeedback, most: int) -> None:
    """Learn of a step, or of the first tokens of one, from what was drafted last."""
    if state.rests:
        return
    if (call := state.native(seq, most)) is not None:
        if learn_together([call], [seq], [seen]):
            seq.fail(NumericalError(NAN))
        return
    end = seen.start + 1 + len(seen.emitted)
    # What was not asked was not wrong.
    if not state.skips.silent:
        state.memory.learn_all(seq.tokens[:end], seen.start + 1)
    state.memory.contexts.learn(seq.tokens, seen)


def draft_at(seq: Sequence, state: AutoText, budget: Budget, limit: int, end: int) -> DraftTree:
    """The tree that `auto` drafts after the first `end` tokens of a text without an adviser."""
    depth = max(seq.remaining + len(seq.tokens) - end - 1, 0)
    if state.calls is not None:
        costs, given = affordable(seq, state, budget, limit)
        found = propose_together([state.calls], [seq], costs, given, [limit], [depth], ends=[end])
        return DraftTree.root(seq.tokens[end - 1]) if found is None else found[0][0]
    state.memory.find(seq.tokens[:end], min(limit, depth))
    worth = worth_of(budget, limit)
    if worth.full or worth.bar() >= 1:
        return DraftTree.root(seq.tokens[end - 1])
    return run_sync(MostLikelyTree(seq, state.memory, worth, depth, end=end).grown())


def _takes(tree: DraftTree, budget: Budget) -> float:
    """Seconds of a step with this draft."""
    return float(budget.seconds(np.array([budget.sequences + len(tree) - 1]))[0])
