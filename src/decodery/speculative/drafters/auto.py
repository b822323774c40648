"""`auto`: of all tokens that could be drafted, the most likely ones, as many as pay for themselves on this machine."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from decodery.core.errors import DecoderyError, SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.loaders import drafts
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from ..heads.advice import HeadAdvice
from ..heads.head import TrainedHead
from ..stores.contexts import Contexts
from ..stores.expectations import CONTEXTS, CopyRates, Expectations, SuccessorRates
from ..stores.kept import Tables, kept
from ..stores.ngrams import Occurrences
from ..stores.past import PastTexts
from ..stores.warm import WarmContexts
from ..tree_building.most_likely import TOGETHER, MostLikelyTree, heeds
from ..tree_building.native_tree import NativeText
from .advice import Advice
from .adviser_lookup import FOUND, head_for, second_for
from .auto_advised import follow, learn_part
from .auto_text import AutoBatch, AutoText, draft, learn, text_of, worth_of
from .model_advice import ModelAdvice

if TYPE_CHECKING:
    from decodery.step.logits_source import LogitsSource

    from ..heads.grown import DraftHead

SHIPPED = "shipped"
_SILENCE = 8
"""Steps without a question that are worth joining texts that have no adviser."""
_LONG = 3
"""Repetitions of fewer tokens are no reason to copy another text."""


@register("auto", lossless=True)
@dataclass(frozen=True)
class Auto(Drafter):
    """Chooses among copies of earlier text, the model's own runners-up and a second model.

    It feeds as many drafted tokens as pay on this machine.

    Candidates after a node: the token that followed the last repetition of its `orders` last tokens (prompt lookup), in
    the text or, where they agree for longer, in an earlier one; the `width` tokens the model ranked highest where the
    node's last three, two and one tokens last stood (as Token Recycling, 2024, with longer contexts first); and what an
    adviser expects, a smaller model or a draft head. How often such candidates are right is counted as texts go on, by
    length of the repetition, by context and rank, and by the adviser's own probabilities; a node's chance is the
    product along its path. The tree takes nodes by falling chance, and of all its sizes, 0 included, the one that gives
    most tokens per second by what steps take on this machine, as learned from the steps themselves. Texts that share
    a pass share its rows: of all their candidates the most likely are taken. The adviser is asked only
    about nodes where what it adds, as it has done so far, is worth more than the time it takes. Where tokens are drawn
    by noise that is known ahead, as under the default rule, candidates with much of it count as likelier.

    What is learned of texts can be kept in a folder, with which later processes begin. Contexts begin with those of
    `warm`, a file made by `decodery train ngram-cache`: by default of the one that comes along for the model, if one
    does; None: with none. Neither is asked by default, as long as having one costs what it
    brings. Scope: the request for copies, the process for contexts, earlier texts, all rates and what steps take.
    Memory: 2^17 * (8 + 4 * width) bytes per context length at most, one entry per order and token of text, and the
    adviser's keys and values.

    Attributes:
        width: Tokens kept per context, and candidates from it.
        orders: Lengths of the runs by which earlier text is found, longest first.
        most: Most drafted tokens per step.
        warm: The file of `decodery train ngram-cache` that contexts begin with; "shipped" for the one of the model,
            None for none.
        head: A file or folder made by `decodery train head`, a `TrainedHead`, "shipped" for the one that comes along,
            if one does, "found" for the one that has paid most on this machine of those that fit: in the model's own
            folder or beside it, in the Hub's cache, or shipped.
        model: The second one, a `LanguageModel` or a name, which is loaded in `dtype`, as in `draft-model`; "found" for
            the one that has paid most on this machine of the smaller ones of the same family and vocabulary beside the
            model and in the Hub's cache, where its bytes allow that. Of a long prompt it reads the end.
        dtype: What a named second model is loaded in.
        vocabulary: How many tokens the second model predicts, as in `draft-model`.
        keep: A folder in which what was learned from texts is kept for later processes, None for nowhere. Each model
            and each owner of texts has a file of its own there, see `stores.kept`.
    """

    width: int = 6
    orders: tuple[int, ...] = (12, 8, 5, 3, 2, 1)
    most: int = 32
    warm: str | None = SHIPPED
    head: TrainedHead | str | None = None
    model: LanguageModel | str | None = None
    dtype: Precision = "auto"
    vocabulary: int | None = None
    keep: str | None = None
    notes: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)
    known_as: str = field(default="", init=False, repr=False, compare=False)

    keeps_logits = False

    def __post_init__(self) -> None:
        if self.head is not None and self.model is not None:
            raise SettingsError("auto takes a head or a second model, not both: give one of the two")
        if self.vocabulary is not None and self.vocabulary < 1:
            raise SettingsError(f"auto needs vocabulary >= 1, not {self.vocabulary}")
        if self.vocabulary is not None and self.model is None:
            raise SettingsError("auto's vocabulary is that of a second model: give model, or leave vocabulary out")

    @cached_property
    def trained(self) -> TrainedHead | None:
        """The head, None where there is none or it is left to what comes along."""
        if isinstance(self.head, TrainedHead) or self.head is None:
            return self.head
        return None if self.head in (SHIPPED, FOUND) else TrainedHead.load(self.head)

    @property
    def ranks(self) -> int:
        return 0 if self.trained is not None else self.width

    @cached_property
    def requirements(self) -> Requirements:
        if self.trained is None:
            return Requirements(costs=True)
        return Requirements(costs=True, taps=_kind(self.trained).watches(self.trained), prompt_taps=True, parts=True)

    def bind(self, model: Reader, logits_source: LogitsSource | None = None) -> Self:
        known_as = ""
        if self.model == FOUND:
            second, notes = second_for(model)
            name = "" if second is None else second.name
            try:
                if name:
                    named(name, self.dtype)
            except (DecoderyError, OSError, torch.OutOfMemoryError) as error:
                # It was there when the folder was read, and there may have been room.
                second, notes = None, [f"drafting with n-grams: the model {name} cannot be loaded: {error}"]
            if second is None:
                found = replace(self, model=None, vocabulary=None)
            else:
                found, known_as = replace(self, model=second.name), second.identity
        elif isinstance(self.head, str) and self.head in (SHIPPED, FOUND):
            trained, notes = head_for(model, self.head, sourced=logits_source is not None)
            found = replace(self, head=trained)
        else:
            return self
        object.__setattr__(found, "notes", tuple(notes) if found.head is None and found.model is None else ())
        object.__setattr__(found, "known_as", known_as)
        return found

    def largest(self) -> int:
        return self.most

    def start(self, seq: Sequence) -> AutoText:
        # A text that is taken back in part begins again.
        seq.trace.notes += [note for note in self.notes if note not in seq.trace.notes]
        width = min(self.width, seq.request.vocab_size)

        def make() -> Tables:
            warm = self._warm(seq)
            contexts = Contexts(CONTEXTS, width) if warm is None else warm.store(width)
            rates = SuccessorRates(len(CONTEXTS), width, None if warm is None else warm.rates)
            past = PastTexts([order for order in self.orders if order >= _LONG])
            fresh = contexts, rates, past, CopyRates()
            return fresh if self.keep is None else kept(Path(self.keep).expanduser(), seq, fresh)

        key = ("auto", seq.request.vocab_size, width, self.orders, self.warm, self.keep)
        contexts, rates, past, trusted = seq.request.memory.recall("process", seq, key, make)
        expected = Expectations(Occurrences(self.orders), contexts, rates, past, trusted)
        return AutoText(expected, self._advice(seq))

    def _advice(self, seq: Sequence) -> Advice | None:
        from ..heads.drafter import bound

        if self.trained is not None:
            return HeadAdvice.of(seq, self.trained, bound(_kind(self.trained), self.trained, seq.request.model))
        if self.model is None or self.model == FOUND:
            return None
        model = named(self.model, self.dtype)
        if not model.capabilities.trees:
            raise UnsupportedModel("auto's second model reads no rows that branch, as its trees do: use draft-model")
        return ModelAdvice.of(seq, model, self.most, self.vocabulary, self.known_as)

    def auxiliary_models(self, target: Reader) -> tuple[Reader, ...]:
        return () if self.model is None or self.model == FOUND else (named(self.model, self.dtype),)

    def held_rows(self, nodes: int) -> int:
        # Logits of the nodes and of the text's end, and of those who are asked about at a time what comes of them.
        return 0 if self.model is None else nodes + 1 + 3 * TOGETHER

    def drops_models(self, seq: Sequence) -> bool:
        state: AutoText = seq.states[self]
        dropped, state.advice, state.unadvised, state.consults = state.advice is not None, None, None, None
        return dropped

    def more_for(self, seq: Sequence, tokens: int) -> int:
        state: AutoText = seq.states[self]
        return 0 if state.advice is None else state.advice.more_for(tokens)

    def forget(self, seq: Sequence) -> None:
        state: AutoText = seq.states[self]
        if state.advice is not None:
            state.advice.forget()

    def _warm(self, seq: Sequence) -> WarmContexts | None:
        """What the contexts begin with, if with anything."""
        if self.warm is None:
            return None
        if self.warm == SHIPPED:
            found = drafts.shipped(drafts.CONTEXTS, seq.request.model.config.vocabulary)
            return None if found is None else WarmContexts.load(found)
        warm = WarmContexts.load(Path(self.warm))
        if warm.vocab_size != seq.request.vocab_size or warm.vocabulary != seq.request.model.config.vocabulary:
            raise SettingsError(
                f"{self.warm} was made for a model with another vocabulary: make contexts for this one with decodery "
                "train ngram-cache -m MODEL"
            )
        return warm

    @property
    def together(self) -> Hashable | None:
        return "auto", self.width, self.orders, self.most, self.warm, self.keep

    def prepare(self, texts: list[tuple[Sequence, Budget]]) -> bool:
        sequences = [seq for seq, _ in texts]
        if self._calls(sequences) is None:
            return False
        for seq in sequences:
            text_of(seq, self).together = True
        self._draft(texts, skips=True)
        return True

    def batch(self, sequences: Ordered[Sequence], places: Ordered[int]) -> AutoBatch | None:
        calls = self._calls(sequences)
        limits = [min(self.most, seq.request.max_draft_tokens) for seq in sequences]
        return None if calls is None else AutoBatch(self, sequences, places, limits, calls)

    def _calls(self, sequences: Ordered[Sequence]) -> list[NativeText] | None:
        """The native calls of some texts; None where one has none."""
        calls = [call for seq in sequences if (call := text_of(seq, self).native(seq, self.most)) is not None]
        return calls if len(calls) == len(sequences) else None

    def skips_step(self, seq: Sequence, budget: Budget) -> bool:
        state: AutoText = seq.states[self]
        if state.tree is None and not self._consults(seq, state, budget):
            if state.native(seq, self.most) is None:
                state.rests = state.skips.skip(budget)
            else:
                self._draft([(seq, budget)], skips=True)
        if state.rests:
            state.tree = None
        return state.rests

    def _draft(self, texts: list[tuple[Sequence, Budget]], *, skips: bool) -> None:
        """The trees of texts that share a step, for `propose`. skips: whether they may skip it."""
        sequences, budget = [seq for seq, _ in texts], texts[0][1]
        context = sum(len(seq.tokens) for seq in sequences) // len(sequences)
        limits = [min(self.most, each.nodes) for _, each in texts]
        draft(self, sequences, replace(budget, context=context), limits, skips=skips)

    def asks(self, seq: Sequence) -> bool:
        state: AutoText = seq.states[self]
        if state.advice is None:
            return False
        if state.unadvised is not None or state.native(seq, self.most) is None:
            return True
        return state.advice.silence(seq) < _SILENCE

    def _consults(self, seq: Sequence, state: AutoText, budget: Budget) -> bool:
        """Whether the adviser is asked in this step; where it is not, the step is as it would be without one."""
        if state.advice is None or state.consults is not None:
            return bool(state.consults)
        state.consults, advice, memory = False, state.advice, state.memory
        advice.begin(budget)
        worth = worth_of(budget, min(self.most, budget.nodes))
        # Where many texts share a pass, a row may cost more than the token it is for, however sure that is.
        if worth.full or worth.bar() >= 1 or not advice.reaches(0) or (budget.measured and not budget.plain_known):
            return False
        memory.find(seq.tokens, min(self.most, budget.nodes, budget.depth))
        drawn = (seq.request.seed, seq.position) if heeds(seq) else None
        counted = memory.candidates(seq.tokens[-CONTEXTS[0] :], 0, 0.0, drawn)
        gain = advice.blending.gain(counted[0][0] if counted else 0.0, 1.0, worth.row)
        advice.row = worth.row
        state.consults = advice.choose(seq, gain)
        return state.consults

    def propose(self, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        state: AutoText = seq.states[self]
        consults = self._consults(seq, state, budget)
        tree = None
        if state.native(seq, self.most) is not None:
            if state.tree is None:
                self._draft([(seq, budget)], skips=False)
            tree, state.tree = state.tree, None
            assert tree is not None
            if not consults:
                return tree
        worth = worth_of(budget, min(self.most, budget.nodes))
        if worth.full or worth.bar() >= 1:
            state.skips.note(budget.sequences, silent=True, size=1)
            return DraftTree.root(seq.last_token)
        state.memory.find(seq.tokens, min(self.most, budget.nodes, budget.depth))
        if tree is None or not consults:
            tree = yield from MostLikelyTree(seq, state.memory, worth, budget.depth).grown()
        if not consults or state.advice is None:
            state.skips.note(budget.sequences, silent=False, size=len(tree))
            return tree
        state.advice.without, worth = tree, worth_of(budget, min(self.most, budget.nodes))
        return (yield from MostLikelyTree(seq, state.memory, worth, budget.depth, state.advice, base=tree).grown())

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        state: AutoText = seq.states[self]
        advice, consulted = state.advice, bool(state.consults)
        state.consults = None
        if advice is not None:
            advice.see(seq, seen)
            if seen.start < seq.request.prompt_length:
                return
            advice.wrote(len(seen.tree), len(seen.emitted))
            if consulted:
                advice.learn(seen.path, seen.emitted)
            if consulted or state.unadvised is not None:
                seen = follow(self, seq, seen, self.most)
            if seq.finished:
                seq.trace.notes.append(advice.explained())
        if state.native(seq, self.most) is not None:
            state.seen = seen
            if not state.together:
                learn(self, [seq], self.most)
            return
        learn_part(seq, state, seen, self.most)
        if seq.finished:
            state.memory.past.add(seq.generated)

    def settle(self, texts: list[Sequence]) -> None:
        learn(self, texts, self.most)


def _kind(trained: TrainedHead) -> type[DraftHead]:
    """The kind of a head. Raises SettingsError for one that does not draft by itself."""
    from ..heads.drafter import head_kind
    from ..heads.grown import DraftHead

    kind = head_kind(trained.kind)
    if not issubclass(kind, DraftHead):
        raise SettingsError(f"auto cannot ask a head for {trained.kind}: give one that drafts alone, such as eagle-3")
    return kind
