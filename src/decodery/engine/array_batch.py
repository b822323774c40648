"""The texts whose steps need nothing but the model: one batch in arrays, one native call per step for all of them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from decodery.core.threads import one_thread
from decodery.core.trace import Step
from decodery.models.cache.cache import KVCache, resident
from decodery.models.cache.open_rows import OpenRows
from decodery.models.protocol import LanguageModel
from decodery.models.torch_state import in_plain_state
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import NodeDistributions
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.sequence import Sequence

from .array_text import ArrayText
from .draft_budgets import DraftBudgets
from .drafting_together import prepare, settle
from .schedule import Schedule
from .task import SchedulerEntry, Task
from .text import check_draft, choices_of, expect

if TYPE_CHECKING:
    from decodery.models.native.array_step import ArraySteps

_RULE = Coupled()
_AHEAD = 64
"""Rows that texts have room for when the batch begins, so that it lasts for many steps."""


class ArrayBatch:
    """Steps of the texts that need nothing but the model.

    Such a text has no drafter, or one that asks for no passes, processors that the kernels apply, the coupled rule, and
    neither monitors nor cache policies, logits sources or log-probabilities. Where all tasks in progress are such
    texts, a step is one native call, and Python handles what becomes of the tokens. Where others share the pass, or
    something has changed, the engine's own step takes all of them, and they come back after it.

    Args:
        model: The engine's.
        schedule: The engine's.
        budgets: Bounds of drafts.
    """

    def __init__(self, model: LanguageModel, schedule: Schedule, budgets: DraftBudgets) -> None:
        self._model, self._schedule, self._budgets = model, schedule, budgets
        self._failed: dict[int, Exception] = {}
        self._together: list[tuple[Drafter, list[Sequence]]] = []
        self._drafting = False
        self._times = 0.0, 0.0, 0.0
        self._texts: list[ArrayText] = []
        self._changes = -1
        self._steps: ArraySteps | None = None
        self._known: dict[int, ArrayText] = {}
        self._other: SchedulerEntry | None = None
        self._make = getattr(type(model), "array_steps", None)

    @in_plain_state
    def gather(self) -> None:
        """Take in all tasks where they are texts that the batch can go on with, or none of them."""
        self._changes, self._texts, schedule = -1, [], self._schedule
        runs, limits = schedule.runs, schedule.limits
        if self._steps is not None:
            self._steps.forget()
        if len(self._known) > len(runs):
            here = {id(run.task) for run in runs}
            self._known = {key: text for key, text in self._known.items() if key in here}
        if self._other not in runs:
            self._other = None
        admits = schedule.waiting and len(runs) < limits.texts
        if self._make is None or not runs or admits or len(runs) > limits.rows:
            return
        # Whoever kept the texts from their arrays the last time most often does so again.
        if self._other is not None and self._text(self._other) is None:
            return
        texts = []
        for run in runs:
            if (text := self._text(run)) is None:
                self._other = run
                return
            texts.append(text)
        if schedule.fits and self._open(texts):
            self._texts, self._changes = texts, schedule.changes

    def _text(self, run: SchedulerEntry) -> ArrayText | None:
        """A task as a text of the batch, None where it cannot be one now."""
        seq = run.task
        if not isinstance(seq, Sequence) or seq.finish_reason is not None or seq.paused or run.coroutine is not None:
            return None
        if (known := self._known.get(id(seq))) is not None and known.run is run and known.request is seq.request:
            known.follow()
            return known if self._ready(seq) else None
        processors = self._processors(seq) if self._ready(seq) else None
        if processors is None:
            return None
        text = self._known[id(seq)] = ArrayText(run, processors)
        return text

    def _ready(self, seq: Sequence) -> bool:
        """Whether a text has read all but its last token, into a cache that kernels can append to."""
        cache = seq.cache
        if not seq.position or seq.segment_end is not None or seq.scheduling.branches is not None:
            return False
        return isinstance(cache, KVCache) and cache.next_position == len(seq.tokens) - 1 and OpenRows.serves(cache)

    def _processors(self, seq: Sequence) -> NativeProcessors | None:
        """What the kernels apply to its logits; None where the text needs something that the batch lacks."""
        request = seq.request
        if request.model is not self._model or request.acceptance_rule != _RULE:
            return None
        if request.drafter is not None and (request.draft_length is not None or request.drafter.asks(seq)):
            return None
        if request.monitors or request.cache_policy is not None or request.logits_source is not None:
            return None
        if request.logprobs is not None or request.return_draft_trees or seq.scheduling.prompt_owner is not None:
            return None
        if self._steps is None:
            self._steps = self._make(self._model, request.padding)  # type: ignore[misc]
            self._padding = request.padding
            if self._steps is None:
                self._make = None
        if self._steps is None or request.padding is not self._padding:
            return None
        return native_processors(request.sampler, request.vocab_size)

    def _open(self, texts: list[ArrayText]) -> bool:
        """Make room for one more row of every text, and write the arrays anew."""
        steps = self._steps
        assert steps is not None
        steps.plain(len(texts))
        for place, text in enumerate(texts):
            seq = text.seq
            expect(seq)
            try:
                if not text.rows.has_room(_AHEAD // 2):
                    text.rows.open(max(text.room, min(_AHEAD, text.most - text.length)))
            except Exception:
                return False
            if not text.rows.has_room(text.room):
                return False
            steps.describe(place, text.rows)
            steps.last[place], steps.next[place] = seq.tokens[-1], seq.cache.next_position
            steps.seeds[place], steps.drawn[place] = seq.request.seed, seq.position
            steps.processors[place], steps.processor_counts[place] = text.processors.address, text.processors.count
            steps.greedy[place] = text.sampler.greedy
            if text.stateful:
                text.processors.follow(seq.processor_states)
            text.run.caches.add(seq.cache)
            text.ledger.bytes = max(text.ledger.bytes, resident(text.run.caches))
        steps.turn_to(max(text.most for text in texts))
        self._drafting = any(text.request.drafter is not None for text in texts)
        return True

    def step(self, passes: int) -> list[Task] | None:
        """One step of all texts in one native call; None where something else has to be done first.

        Args:
            passes: Of the engine's model so far.
        """
        texts, steps = self._texts, self._steps
        if steps is None or self._schedule.changes != self._changes:
            return None
        begin = perf_counter()
        for text in texts:
            seq = text.seq
            if seq.finish_reason is not None or seq.paused or not text.unchanged or not text.rows.has_room(text.room):
                self._changes = -1
                return None
        trees = self._proposed() if self._drafting else None
        if trees is not None and any(text.seq.finish_reason is not None for text in texts):
            # A drafter has failed.
            self._changes = -1
            return None
        proposed = perf_counter()
        try:
            steps.run()
        except Exception:
            # The engine's own step finds out whose fault it is.
            self._changes = -1
            return None
        self._times = begin, proposed, perf_counter()
        if self._drafting:
            # A list: a generator is a call per text.
            mean = sum([text.length for text in texts]) / len(texts)
            self._budgets.learn(steps.rows, len(texts), mean, self._times[2] - begin)
        if trees is None:
            ended = self._commit(passes)
        else:
            ended = self._commit_trees(passes, trees)
        if ended:
            self._schedule.leave()
            self.gather()
        return [text.seq for text in texts]

    def _commit(self, passes: int) -> bool:
        """What becomes of a token of each text; whether one has ended."""
        texts, steps = self._texts, self._steps
        assert steps is not None
        begin, proposed, scored = self._times
        n = len(texts)
        accepted, chosen = steps.accepted[:n].tolist(), steps.chosen[:n].tolist()
        share, ended = (scored - proposed) / n, False
        for place, text in enumerate(texts):
            token = chosen[place]
            if accepted[place] < 0:
                if not self._look(place, text, DraftTree.root(text.tokens[-1])):
                    ended = True
                    continue
                token = int(steps.chosen[place])
            text.cache.next_position += 1
            if text.stateful:
                text.seq.processor_states = self._after(text, token)
            text.tokens.append(token)
            text.length += 1
            text.ledger.tokens += 1
            text.spend(1, share, passes)
            stream = text.stream
            if stream is not None and stream.lazy and token not in text.eos and text.length < text.most:
                stream.waiting.append(token)
            elif stream is not None or token in text.eos or text.length >= text.most:
                text.end(token)
                ended = ended or text.seq.finish_reason is not None
            if text.windowed:
                text.cache.release_passed()
        times = (proposed - begin, scored - proposed, 0.0, perf_counter() - scored, n)
        for text in texts:
            text.steps.append(Step(0, 0, 1, 1, False, *times, [], None))
        return ended

    @in_plain_state
    def _proposed(self) -> list[DraftTree | None]:
        """The trees of all texts, written into the arrays; None for those whose drafter skips the step."""
        texts, steps = self._texts, self._steps
        assert steps is not None
        nodes = max(self._schedule.limits.rows // len(texts) - 1, 0)
        every = [text.seq for text in texts]
        bounds = [self._bound(text, nodes, every) for text in texts]
        self._together = prepare([(text.run, budget) for text, budget in zip(texts, bounds, strict=True)])
        trees: list[DraftTree | None] = [DraftTree.root(text.tokens[-1]) for text in texts]
        groups: dict[Drafter, tuple[list[int], list[Budget]]] = {}
        with one_thread():
            for place, text in enumerate(texts):
                drafter, budget = text.request.drafter, bounds[place]
                if drafter is None or budget is None:
                    continue
                try:
                    skips = drafter.skips_step(text.seq, budget)
                except Exception as error:
                    self._failed[id(text.seq)] = error
                    continue
                if skips:
                    trees[place] = None
                elif text.seq.remaining > 1:
                    places, budgets = groups.setdefault(drafter, ([], []))
                    places.append(place)
                    budgets.append(budget)
            for drafter, (places, budgets) in groups.items():
                for place, budget, tree in zip(
                    places, budgets, drafter.propose_all([every[place] for place in places], budgets), strict=True
                ):
                    trees[place] = self._checked(every[place], tree, budget)
        sizes = [1 if tree is None else len(tree) for tree in trees]
        steps.trees(sizes)
        first = 0
        for nodes_of, size in zip(trees, sizes, strict=True):
            if nodes_of is not None and size > 1:
                steps.tokens[first : first + size] = nodes_of.tokens
                steps.parents[first : first + size] = nodes_of.parents
            else:
                steps.parents[first] = -1
            first += size
        return trees

    def _bound(self, text: ArrayText, nodes: int, every: list[Sequence]) -> Budget | None:
        """What a text may draft; None where it has no drafter, or where the text ends with an error after this step."""
        if text.request.drafter is None:
            return None
        try:
            return self._budgets.of(text.seq, nodes, every)
        except Exception as error:
            self._failed[id(text.seq)] = error
            return None

    def _checked(self, seq: Sequence, tree: DraftTree | Exception, budget: Budget) -> DraftTree:
        """A draft as it may be scored; where there is none the text ends with the error after this step."""
        try:
            if isinstance(tree, Exception):
                raise tree
            check_draft(tree, seq, budget)
            return tree
        except Exception as error:
            self._failed[id(seq)] = error
            return DraftTree.root(seq.last_token)

    @in_plain_state
    def _commit_trees(self, passes: int, trees: list[DraftTree | None]) -> bool:
        """What becomes of the trees of all texts; whether one has ended."""
        texts, steps = self._texts, self._steps
        assert steps is not None
        begin, proposed, scored = self._times
        n, share, ended = len(texts), (scored - proposed) / max(steps.rows, 1), False
        groups: dict[Drafter, tuple[list[Sequence], list[VerificationFeedback]]] = {}
        recorded: list[tuple[ArrayText, Step]] = []
        for place, (text, given) in enumerate(zip(texts, trees, strict=True)):
            seq, tree = text.seq, given or DraftTree.root(text.tokens[-1])
            if steps.accepted[place] < 0 and not self._look(place, text, tree):
                ended = True
                continue
            first, count = int(steps.first[place]), int(steps.accepted[place])
            path = steps.paths[first : first + count].tolist()
            text.cache.next_position += count + 1
            run = [*(tree.tokens[path].tolist() if path else ()), int(steps.chosen[place])]
            error = self._failed.pop(id(seq), None)
            emitted = [] if error is not None else text.emit(run)
            if len(emitted) < len(run):
                text.rows.cut(len(run) - len(emitted))
            if error is not None:
                seq.fail(error)
                ended = True
                continue
            if text.stateful:
                for token in emitted:
                    seq.processor_states = self._after(text, token)
            text.spend(len(tree), share * len(tree), passes)
            if text.windowed:
                text.cache.release_passed()
            last = Step(len(tree) - 1, min(count, len(emitted)), len(emitted), len(tree))
            last.choices = choices_of(tree, path)
            recorded.append((text, last))
            ended = ended or seq.finish_reason is not None
            drafter = text.request.drafter
            if drafter is None:
                continue
            if given is None and seq.finish_reason is None:
                seq.observed = len(seq.tokens) - 1
                continue
            logits = steps.logits[first : first + len(tree)]
            start = len(seq.tokens) - len(emitted) - 1
            feedback = VerificationFeedback(
                tree, logits.clone() if drafter.keeps_logits else logits, {}, path, emitted, start
            )
            seqs, seen = groups.setdefault(drafter, ([], []))
            seqs.append(seq)
            seen.append(feedback)
        with one_thread():
            for drafter, (seqs, seen) in groups.items():
                failed = drafter.observe_all(seqs, seen)
                for number, seq in enumerate(seqs):
                    seq.observed = len(seq.tokens) - 1
                    if number in failed:
                        seq.fail(failed[number])
                        ended = True
            settle(self._together)
        done = perf_counter()
        for text, step in recorded:
            step.propose, step.score, step.commit, step.sequences = (
                proposed - begin,
                scored - proposed,
                done - scored,
                n,
            )
            text.steps.append(step)
        return ended

    @in_plain_state
    def _look(self, place: int, text: ArrayText, tree: DraftTree) -> bool:
        """Choose for a text whose numbers the kernels could not tell apart; False where it has failed."""
        steps, seq = self._steps, text.seq
        assert steps is not None
        first = int(steps.first[place])
        try:
            laws = NodeDistributions(tree, steps.logits[first : first + len(tree)], seq)
            found = _RULE.choose(tree, laws, seq)
        except Exception as error:
            seq.fail(error)
            return False
        steps.accepted[place], steps.chosen[place] = len(found.path), found.bonus
        steps.paths[first : first + len(found.path)] = found.path
        steps.keep(place)
        return True

    def _after(self, text: ArrayText, token: int) -> tuple[Any, ...]:
        """What the sampler's processors remember once a token is chosen; the kernels go by it from now."""
        states = text.sampler.follow(text.seq.processor_states, token)
        text.processors.follow(states)
        return states
