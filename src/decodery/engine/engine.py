"""The loop: propose, score, choose, commit, over all tasks at once. Every pass is shared by all that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from time import perf_counter
from typing import TypeVar, cast

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.trace import Step, Trace
from decodery.models.protocol import LanguageModel
from decodery.models.torch_state import in_plain_state
from decodery.step.detokenizer import Detokenizer
from decodery.step.draft_length_policy import Budget
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.step.forward_request import ForwardCoroutine, gather
from decodery.step.sequence import Sequence

from .accounting import StepClock
from .array_batch import ArrayBatch
from .blocking import BlockingCalls
from .calls import Calls
from .draft_budgets import DraftBudgets
from .drafting_together import prepare, settle
from .monitoring import monitors_of
from .pass_runner import PassRunner
from .preempt import again
from .prefixes import PrefixCache
from .request import Request
from .requests import opened
from .schedule import Limits, Schedule
from .task import CoroutineTask, Recoverable, SchedulerEntry, Task
from .text import StepBudget, run_step

T = TypeVar("T")

_WAITS = 0.05
"""Seconds that a step waits at most where every task waits for a function beside the loop."""


class Engine:
    """Decodes any number of texts with one model, and serves whatever else asks for its passes.

    Every `step` is one pass of the model over all who wait for it, after the passes of other models that they wait for
    first, and of parts of the model itself: draft models, other contexts, layers that draft. Texts whose requests name
    a source of logits of their own ask through it. Prompts are read in chunks of `prefill_chunk` tokens; texts that
    read and texts that write share passes.

    Args:
        detokenizer: Makes a text stream per sequence; without it sequences have tokens only.
        memory: What drafters remember from sequence to sequence; its own by default.
        pass_seconds: As in `Budget`; learned from the steps by default.
        limits: Of a pass and of what is in progress.
        prefixes: What texts leave for later ones whose prompts begin alike; nothing by default.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        detokenizer: Callable[[], Detokenizer] | None = None,
        prefill_chunk: int = 512,
        memory: Memory | None = None,
        pass_seconds: Callable[[int], np.ndarray] | None = None,
        limits: Limits | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.model = model
        self.memory = memory or Memory()
        self.prefill_chunk = min(prefill_chunk, (limits or Limits()).rows)
        self._detokenizer = detokenizer
        if prefixes is not None and not prefixes.serves(model):
            raise SettingsError(
                "these prefixes are what another model has read: give each model a PrefixCache of its own"
            )
        self._schedule = Schedule(limits or Limits(), self.prefill_chunk, prefixes, 4 * model.vocab_size)
        self._blocking = BlockingCalls()
        self._runner = PassRunner(model, self._schedule, self._blocking)
        self._budgets = DraftBudgets(model, pass_seconds)
        self._arrays = ArrayBatch(model, self._schedule, self._budgets)

    @in_plain_state
    def submit(self, request: Request, *, like: Sequence | None = None) -> Sequence:
        """Start a text.

        Args:
            request: The text's settings.
            like: One already submitted with the same prompt, whose prefill it shares.
        """
        with self._schedule.memory.within():
            seq = self._text(request)
        if like is not None and not _same_prefill(seq, like):
            raise SettingsError(
                "a sequence can share the prefill of another one only if their prompts are the same, and their "
                "sources, models, cache policies and embeddings"
            )
        monitors = monitors_of(seq)
        seq.scheduling.prompt_owner = None if monitors is not None and monitors.private else like
        self._schedule.add(
            SchedulerEntry(seq, traces=[seq.trace], ledger=seq.trace.ledger, owner=request.cache_namespace)
        )
        return seq

    def enter(
        self,
        coroutine: ForwardCoroutine[T],
        trace: Trace | None = None,
        memory: Recoverable | None = None,
        owner: str = "",
    ) -> CoroutineTask[T]:
        """Start something else that asks for passes: a search, a canvas.

        It shares them with everything in progress.

        Args:
            coroutine: A coroutine that yields forward requests.
            trace: Where it records its steps, whose times and ledger are then filled in.
            memory: What it keeps of the model, so that it can be preempted.
            owner: Whose it is, as `Request.cache_namespace` is of a text.
        """
        job = CoroutineTask(coroutine, memory)
        run = (
            SchedulerEntry(job, owner=owner)
            if trace is None
            else SchedulerEntry(job, traces=[trace], ledger=trace.ledger, owner=owner)
        )
        self._schedule.add(run)
        return job

    def finish(self, coroutine: ForwardCoroutine[T]) -> T:
        """Run what asks to its end; returns what it does, or raises what it raised."""
        job = self.enter(coroutine)
        self.run([job])
        return cast(T, job.result)

    def check_width(self, texts: int) -> None:
        """Raise SettingsError where a task may not have so many texts written at a time."""
        most = self._schedule.limits.branches
        if most is not None and texts > most:
            raise SettingsError(f"this request has {texts} texts written at a time, and may have {most}: ask for fewer")

    def open(self, request: Request) -> Sequence:
        """A text of which nothing is read yet, for a task that decodes it by itself or lets `write` do so."""
        seq = self._text(request)
        if request.conversation is not None:
            seq.rebind(calls=Calls(self, request, request.conversation))
        if self._runner.running is not None:
            self._runner.running.traces.append(seq.trace)
            seq.scheduling.branches = self._runner.running.branches
            seq.scheduling.branches[id(seq)] = seq
        return seq

    def recall(self, seq: Sequence) -> None:
        """Let a text that was opened begin with what earlier ones have read of its prompt, where that is kept."""
        self._schedule.find_prefix(seq)

    def _text(self, request: Request) -> Sequence:
        """A text of which nothing is read yet; what it will spend is that of the task in whose turn it is made."""
        seq = opened(request, self.model, self.memory, self._detokenizer)
        if self._runner.running is not None:
            seq.trace.ledger = self._runner.running.ledger
        drafter, policy = seq.request.drafter, seq.request.draft_length
        if policy is not None:
            seq.states[policy] = policy.start(seq)
        if drafter is not None:
            seq.start_drafter()
        return seq

    def write(self, texts: Ordered[Sequence], trace: Trace) -> ForwardCoroutine[None]:
        """One turn of each of a task's texts, which read or write as submitted ones do.

        Beside other tasks a few texts at a time have theirs, so that what is done between passes stays small, too.

        Args:
            texts: Sequences that the task has opened.
            trace: Where the turns are recorded together, as one step.
        """
        if self._runner.running is not None and all(trace is not known for known in self._runner.running.traces):
            self._runner.running.traces.append(trace)
        before = [len(seq.trace.steps) for seq in texts]
        first, earlier = 0, list[list[Step]]()
        while first < len(texts):
            rows = self._schedule.budget.share(self._runner.running, self._schedule.active)
            group = texts[first : first + rows]
            nodes, beside = max(rows // len(group) - 1, 0), [*self._schedule.texts, *group]
            step_budgets = [
                StepBudget(min(self.prefill_chunk, rows), self._budgets.of(seq, nodes, beside)) for seq in group
            ]
            yield from gather(
                [run_step(seq, step_budget) for seq, step_budget in zip(group, step_budgets, strict=True)]
            )
            first += len(group)
            if self._runner.running is not None and first < len(texts):
                earlier.append(group[0].trace.steps)
        if self._runner.running is not None:
            self._runner.running.earlier += sum(steps[-1].seconds for steps in earlier if steps)
        steps = [step for seq, known in zip(texts, before, strict=True) for step in seq.trace.steps[known:]]
        if steps:
            trace.steps.append(
                Step(
                    nodes=sum(step.nodes for step in steps),
                    accepted=sum(step.accepted for step in steps),
                    rows=sum(step.rows for step in steps),
                    prefill=all(step.prefill for step in steps),
                )
            )

    @property
    def passes(self) -> int:
        """Passes of the model so far."""
        return self._runner.passes

    @property
    def rows(self) -> int:
        """Rows of the model's last pass."""
        return self._runner.rows

    @property
    def running(self) -> int:
        """Tasks in progress."""
        return len(self._schedule.runs)

    @property
    def waiting(self) -> int:
        """Tasks that wait until there is a place and memory for them."""
        return self._schedule.waiting

    @property
    def waiting_owners(self) -> set[str]:
        """Owners of those tasks."""
        return self._schedule.waiting_owners

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values, of texts in progress and of those that are kept for later ones."""
        return self._schedule.held_bytes

    @property
    def preemptions(self) -> int:
        """How often a text gave its memory back."""
        return self._schedule.preemptions

    def run(self, tasks: Iterable[Task]) -> None:
        """Step until all of these are finished; then raise the error of the first that failed, if one did."""
        asked = list(tasks)
        while any(not task.finished for task in asked):
            if not self.step() and any(not task.finished for task in asked):
                if any(task.paused for task in asked):
                    raise ValueError("some of these tasks are paused and would never finish: resume them first")
                raise ValueError("some of these tasks were not submitted to this engine")
        for task in asked:
            if task.error is not None:
                raise task.error

    def fork(self, seq: Sequence) -> Sequence:
        """A second text that goes on from where this one stands, as this one would.

        Change its seed to part them. Raises ValueError between the passes of one step, as after a pass that a rule has
        asked for.
        """
        if self._schedule.busy(seq):
            raise ValueError("a text can be forked where a step has ended: step on until its rule has decided")
        with self._schedule.memory.within():
            clone = seq.clone()
        owner = seq.request.cache_namespace
        self._schedule.add(SchedulerEntry(clone, traces=[clone.trace], ledger=clone.trace.ledger, owner=owner))
        return clone

    def preempt(self, task: Task) -> None:
        """Give back all memory that models need for a task, at the next step where nothing is half done.

        What was read for it is read again when it goes on, and its result is the same.
        """
        self._schedule.preempt(task)

    def step(self) -> list[Task]:
        """One pass of the model over all who wait for it; returns the tasks it advanced. Finished ones leave."""
        if self._schedule.memory.limit is None:
            return self._advance()
        with self._schedule.memory.within():
            return self._advance()

    def _advance(self) -> list[Task]:
        if (found := self._arrays.step(self._runner.passes)) is not None:
            advanced, self._runner.rows = found
            self._runner.passes += 1
            return advanced
        return self._step()

    @in_plain_state
    def _step(self) -> list[Task]:
        """A step of tasks of any kind."""
        clock, begin = StepClock(), perf_counter()
        begun, texts = self._schedule.starting(), self._schedule.texts
        ids = self._arrays.join(begun)
        joined = self._arrays.requests(begin, texts)
        drafting_together = self._begin_all([each for each in begun if id(each[0]) not in ids], texts)
        for run in self._schedule.active:
            if (run.lost or run.forgotten) and run.waiting is None:
                run.interrupt(again(run, self._schedule.budget.rows_to_restore(self._schedule.active)))
                self._runner.resume(run)
        answered = self._blocking.collect(0)
        for run in answered:
            self._runner.go_on(run)
        fresh = {id(run) for run in (*(run for run, _, _ in begun), *answered)} - ids
        runs = [run for run in self._schedule.active if run.coroutine is not None or id(run) in fresh]
        side = perf_counter()
        drafting = self._runner.run_side(runs, clock)
        begin += perf_counter() - side
        asked = [(run, numbers) for run in runs if (numbers := run.unanswered) and run not in drafting]
        places = self._schedule.budget.places(asked, self._arrays.runs, self._arrays.rows)
        if places is None:
            # Not all texts fit into the pass: each waits for its own turn.
            self._arrays.release()
            joined, apart = [], [each for each in begun if id(each[0]) in ids]
            drafting_together += self._begin_all(apart, texts)
            runs += [run for run, _, _ in apart]
            asked += [(run, numbers) for run, _, _ in apart if (numbers := run.unanswered)]
            places = self._schedule.budget.places(asked) or []
        together = self._arrays.runs
        blocked = [run for run in runs if run.blocked]
        advanced = {id(run) for run in (*blocked, *drafting, *together, *(run for run, _ in places))}
        self._runner.rows = 0
        if places or joined:
            shared = (self._arrays, joined) if joined else None
            self._runner.run(places, clock, side=False, joined=shared)
            self._arrays.commit(self._runner.passes - 1)
            rows, count = self._runner.rows, len(places) + len(together)
            self._budgets.learn(rows, count, self._runner.attended / max(rows, 1), perf_counter() - begin)
        elif blocked:
            for run in self._blocking.collect(_WAITS):
                self._runner.go_on(run)
        settle(drafting_together)
        self._schedule.leave()
        self._arrays.refresh()
        return [run.task for run in (*runs, *together) if run.coroutine is None or id(run) in advanced]

    def _begin_all(
        self, begun: list[tuple[SchedulerEntry, int, int]], texts: list[Sequence]
    ) -> list[tuple[Drafter, list[Sequence]]]:
        """Let tasks begin a turn; returns the drafters that propose jointly, and their texts.

        Args:
            begun: Tasks, how many unread tokens each may read, and how many nodes it may draft.
            texts: All that take part in passes.
        """
        budgets = [self._budget(run, nodes, texts) for run, _, nodes in begun]
        together = prepare([(run, budget) for (run, _, _), budget in zip(begun, budgets, strict=True)])
        for (run, rows, _), budget in zip(begun, budgets, strict=True):
            self._begin(run, rows, budget)
        return together

    def _budget(self, run: SchedulerEntry, nodes: int, texts: list[Sequence]) -> Budget | None:
        """What a text may draft in the turn that it begins; None for other tasks, and where its policy failed.

        texts: all that take part in passes.
        """
        if isinstance(run.task, CoroutineTask):
            return None
        try:
            return self._budgets.of(run.task, nodes, texts)
        except Exception as error:
            run.task.fail(error)
            return None

    def _begin(self, run: SchedulerEntry, rows: int, budget: Budget | None) -> None:
        """Let a task that has no turn in progress begin one."""
        seq = run.task
        if isinstance(seq, CoroutineTask):
            run.coroutine = seq.run()
        elif budget is None or seq.error is not None:
            return
        else:
            try:
                run.coroutine = run_step(seq, StepBudget(rows, budget))
            except Exception as error:
                seq.fail(error)
                return
        self._runner.resume(run)


def _same_prefill(seq: Sequence, other: Sequence) -> bool:
    """Whether both texts have the same prompt, and read it alike."""
    one, two = seq.request, other.request
    digests = {"" if each.prompt_embeds is None else each.prompt_embeds.digest for each in (one, two)}
    return (
        other.tokens[: two.prompt_length] == seq.tokens
        and (one.logits_source, one.cache_policy) == (two.logits_source, two.cache_policy)
        and (one.logits_source is not None or one.model == two.model)
        and len(digests) == 1
    )
