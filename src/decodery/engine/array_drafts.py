"""Drafts for the texts of the batch in arrays: by drafters that take all of their texts at once, or text by text."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered

from decodery.core.threads import one_thread
from decodery.models.step_arrays import StepArrays
from decodery.models.torch_state import in_plain_state
from decodery.step.draft_batch import DraftBatch, JointBudget
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback

from .array_text import ArrayText
from .draft_budgets import DraftBudgets
from .text import check_draft


def draft_batches(texts: Ordered[ArrayText], budgets: DraftBudgets) -> list[DraftBatch]:
    """The drafts of all texts that have a drafter, by those who propose jointly.

    Args:
        texts: The batch.
        budgets: Bounds of drafts of texts by themselves.
    """
    joint: dict[Hashable, list[int]] = {}
    alone: list[int] = []
    for place, text in enumerate(texts):
        if (drafter := text.request.drafter) is not None:
            if drafter.together is None:
                alone.append(place)
            else:
                joint.setdefault(drafter.together, []).append(place)
    found: list[DraftBatch] = []
    for places in joint.values():
        drafter = texts[places[0]].request.drafter
        assert drafter is not None
        if (batch := drafter.batch([texts[place].seq for place in places], places)) is None:
            alone += places
        else:
            found.append(batch)
    return [*found, TextDrafts(texts, sorted(alone), budgets)] if alone else found


class TextDrafts(DraftBatch):
    """Drafts of texts whose drafters propose for each by itself.

    Args:
        texts: The whole batch.
        places: The numbers of these texts in it.
        budgets: Bounds of their drafts.
    """

    def __init__(self, texts: Ordered[ArrayText], places: Ordered[int], budgets: DraftBudgets) -> None:
        super().__init__(places)
        self._texts, self._budgets = texts, budgets
        self._trees: dict[int, DraftTree] = {}
        self._drafting: list[int] = []

    @in_plain_state
    def propose(self, steps: StepArrays, budget: JointBudget) -> int:
        texts, drafted = self._texts, 0
        self._trees, self._drafting = {}, []
        groups: dict[Drafter, list[tuple[int, Budget]]] = {}
        with one_thread():
            for place in self.places:
                seq, request = texts[place].seq, texts[place].request
                drafter, own = request.drafter, self._budgets.of(seq, budget.nodes, budget.texts)
                assert drafter is not None
                try:
                    if drafter.skips_step(seq, own):
                        continue
                except Exception as error:
                    self.failed[place] = error
                    continue
                self._drafting.append(place)
                if own.depth > 0:
                    groups.setdefault(drafter, []).append((place, own))
            for drafter, group in groups.items():
                places, bounds = [place for place, _ in group], [own for _, own in group]
                trees = drafter.propose_all([texts[place].seq for place in places], bounds)
                for place, own, tree in zip(places, bounds, trees, strict=True):
                    try:
                        if isinstance(tree, Exception):
                            raise tree
                        check_draft(tree, texts[place].seq, own)
                    except Exception as error:
                        self.failed[place] = error
                        continue
                    self._trees[place] = tree
                    if len(tree) > 1:
                        steps.draft(place, tree.tokens, tree.parents)
                        drafted += len(tree) - 1
        return drafted

    @in_plain_state
    def learn(self, steps: StepArrays, ended: Ordered[int]) -> dict[int, Exception]:
        failed: dict[int, Exception] = {}
        groups: dict[Drafter, list[tuple[int, VerificationFeedback]]] = {}
        for place in sorted({*self._drafting, *(place for place in ended if place in self.places)}):
            text, kept = self._texts[place], int(steps.kept[place])
            if kept == 0 or (drafter := text.request.drafter) is None:
                continue
            first, length = int(steps.first[place]), int(steps.accepted[place])
            start = len(text.tokens) - kept - 1
            tree = self._trees.get(place) or DraftTree.root(text.tokens[start])
            logits = steps.logits[first : first + len(tree)]
            path, emitted = steps.paths[first : first + length].tolist(), text.tokens[start + 1 :]
            rows = logits.clone() if drafter.keeps_logits else logits
            ranked = None
            if steps.ranked is not None:
                ids, values = steps.ranked
                ranked = ids[first : first + len(tree)], values[first : first + len(tree)]
            seen = VerificationFeedback(tree, rows, {}, path, emitted, start, ranked)
            groups.setdefault(drafter, []).append((place, seen))
        with one_thread():
            for drafter, group in groups.items():
                seqs = [self._texts[place].seq for place, _ in group]
                wrong = drafter.observe_all(seqs, [seen for _, seen in group])
                failed |= {group[number][0]: error for number, error in wrong.items()}
        return failed

    def leave(self) -> None:
        self._trees = {}
