"""The loop: propose, score, choose, commit, over all tasks at once. Every pass is shared by all that wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TypeVar, cast

import numpy as np

from decodery.core.errors import OutOfMemory, SettingsError
from decodery.core.threads import one_thread
from decodery.core.trace import Step, Trace
from decodery.models.protocol import LanguageModel
from decodery.models.torch_state import in_plain_state
from decodery.step.detokenizer import Detokenizer
from decodery.step.draft_length_policy import Budget
from decodery.step.drafter_memory import Memory
from decodery.step.forward_request import ForwardCoroutine, answer, gather
from decodery.step.pass_cost import CONTEXT, cost_curve
from decodery.step.sequence import Sequence

from .accounting import StepClock, aside, new_steps, spend
from .blocking import BlockingCalls
from .calls import Calls
from .pace import LEAST_ROWS
from .preempt import again
from .prefixes import PrefixCache
from .request import Request
from .requests import opened
from .schedule import Limits, Schedule
from .share import Place
from .task import CoroutineTask, Recoverable, SchedulerEntry, Task
from .text import StepBudget, turn

T = TypeVar("T")

_COSTED_ROWS = 1024
_SIDE_ROUNDS = 256
"""Passes of other models, one after another, that a pass of the target waits for at most."""
_WAITS = 0.05
"""Seconds that a step waits at most where every task waits for a function beside the loop."""


class Engine:
    """Decodes any number of texts with one model, and serves whatever else asks for its passes.

    Every `step` is one pass of the model over all who wait for it, after the passes of other models that they wait for
    first, and of parts of the model itself: draft models, other contexts, layers that draft. Texts whose requests name
    a source of logits of their own ask through it. Prompts are read in chunks of `prefill_chunk` tokens; texts that
    read and texts that write share passes.

    Args:
        model: What it decodes with.
        detokenizer: Makes a text stream per sequence; without it sequences have tokens only.
        prefill_chunk: Most rows of a prompt in one pass.
        memory: What drafters remember from sequence to sequence; its own by default.
        pass_seconds: As in `Budget`; measured by default.
        limits: Of a pass and of what is in progress.
        prefixes: What texts leave for later ones whose prompts begin alike; nothing by default.
        rows: Of the model's last pass.
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
        self.rows = 0
        if prefixes is not None and not prefixes.serves(model):
            raise SettingsError(
                "these prefixes are what another model has read: give each model a PrefixCache of its own"
            )
        self._schedule = Schedule(limits or Limits(), self.prefill_chunk, prefixes)
        self._blocking = BlockingCalls()
        self._running: SchedulerEntry | None = None
        self._passes = 0
        self._costs: tuple[np.ndarray, np.ndarray] | None = None
        self._pass_seconds = pass_seconds or self._measured

    @in_plain_state
    def submit(self, request: Request, *, like: Sequence | None = None) -> Sequence:
        """Start a text.

        Args:
            request: The text's settings.
            like: One already submitted with the same prompt, whose prefill it shares.
        """
        seq = self._text(request)
        if like is not None and (
            like.tokens[: like.prompt_length] != seq.tokens
            or (like.logits_source, like.cache_policy) != (seq.logits_source, seq.cache_policy)
            or (seq.logits_source is None and like.model != seq.model)
            or _held(like) != _held(seq)
        ):
            raise SettingsError(
                "a sequence can share the prefill of another one only if their prompts are the same, and their "
                "sources, models, cache policies and embeddings"
            )
        seq.like = None if seq.watch is not None and seq.watch.private else like
        self._schedule.add(SchedulerEntry(seq, traces=[seq.trace], ledger=seq.trace.ledger, owner=request.salt))
        return seq

    def enter(
        self,
        asking: ForwardCoroutine[T],
        trace: Trace | None = None,
        memory: Recoverable | None = None,
        owner: str = "",
    ) -> CoroutineTask[T]:
        """Start something else that asks for passes: a search, a canvas.

        It shares them with everything in progress.

        Args:
            asking: A coroutine that yields forward requests.
            trace: Where it records its steps, whose times and ledger are then filled in.
            memory: What it keeps of the model, so that it can be preempted.
            owner: Whose it is, as `Request.salt` is of a text.
        """
        job = CoroutineTask(asking, memory)
        run = (
            SchedulerEntry(job, owner=owner)
            if trace is None
            else SchedulerEntry(job, traces=[trace], ledger=trace.ledger, owner=owner)
        )
        self._schedule.add(run)
        return job

    def finish(self, asking: ForwardCoroutine[T]) -> T:
        """Run what asks to its end; returns what it does, or raises what it raised."""
        job = self.enter(asking)
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
            seq.calls = Calls(self, request, request.conversation)
        if self._running is not None:
            self._running.traces.append(seq.trace)
            seq.branches = self._running.branches
            seq.branches[id(seq)] = seq
        return seq

    def recall(self, seq: Sequence) -> None:
        """Let a text that was opened begin with what earlier ones have read of its prompt, where that is kept."""
        self._schedule.find_prefix(seq)

    def _text(self, request: Request) -> Sequence:
        """A text of which nothing is read yet; what it will spend is that of the task in whose turn it is made."""
        seq = opened(request, self.model, self.memory, self._detokenizer)
        if self._running is not None:
            seq.trace.ledger = self._running.ledger
        if seq.draft_length is not None:
            seq.draft_length_state = seq.draft_length.start(seq)
        if seq.drafter is not None:
            seq.draft_state = seq.drafter.start(seq)
            if seq.drafter.requirements.costs or (seq.draft_length is not None and seq.draft_length.requirements.costs):
                self._pass_seconds(len(seq.tokens))
        return seq

    def write(self, texts: Ordered[Sequence], trace: Trace) -> ForwardCoroutine[None]:
        """One turn of each of a task's texts, which read or write as submitted ones do.

        Beside other tasks a few texts at a time have theirs, so that what is done between passes stays small, too.

        Args:
            texts: Sequences that the task has opened.
            trace: Where the turns are recorded together, as one step.
        """
        if self._running is not None and all(trace is not known for known in self._running.traces):
            self._running.traces.append(trace)
        before = [len(seq.trace.steps) for seq in texts]
        first, earlier = 0, list[list[Step]]()
        while first < len(texts):
            rows = self._schedule.budget.share(self._running, self._schedule.active)
            group = texts[first : first + rows]
            nodes, beside = max(rows // len(group) - 1, 0), [*self._schedule.texts, *group]
            shares = [StepBudget(min(self.prefill_chunk, rows), self._budget(seq, nodes, beside)) for seq in group]
            yield from gather([turn(seq, share) for seq, share in zip(group, shares, strict=True)])
            first += len(group)
            if self._running is not None and first < len(texts):
                earlier.append(group[0].trace.steps)
        if self._running is not None:
            self._running.earlier += sum(steps[-1].seconds for steps in earlier if steps)
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
    def running(self) -> int:
        """Tasks in progress."""
        return len(self._schedule.runs)

    @property
    def waiting(self) -> int:
        """Tasks that wait until there is a place and memory for them."""
        return self._schedule.waiting

    @property
    def held(self) -> int:
        """Bytes of keys and values, of texts in progress and of those that are kept for later ones."""
        return self._schedule.held

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
        twin = seq.twin()
        self._schedule.add(SchedulerEntry(twin, traces=[twin.trace], ledger=twin.trace.ledger))
        return twin

    def preempt(self, task: Task) -> None:
        """Give back all memory that models need for a task, at the next step where nothing is half done.

        What was read for it is read again when it goes on, and its result is the same.
        """
        self._schedule.preempt(task)

    @in_plain_state
    def step(self) -> list[Task]:
        """One pass of the model over all who wait for it; returns the tasks it advanced. Finished ones leave."""
        clock = StepClock()
        begun, texts = self._schedule.turns(), self._schedule.texts
        for run, rows, nodes in begun:
            self._begin(run, rows, nodes, texts)
        for run in self._schedule.active:
            if (run.lost or run.forgotten) and run.waiting is None:
                run.interrupt(again(run, self._schedule.limits.rows))
                self._resume(run)
        for run in self._blocking.collect(0):
            self._go_on(run)
        fresh = {id(run) for run, _, _ in begun}
        runs = [run for run in self._schedule.active if run.asking is not None or id(run) in fresh]
        drafting = self._side_passes(runs, clock)
        asked = [(run, numbers) for run in runs if (numbers := run.unanswered) and run not in drafting]
        places, blocked = self._schedule.budget.places(asked), [run for run in runs if run.blocked]
        advanced = {id(run) for run in (*blocked, *drafting, *(run for run, _ in places))}
        self.rows = 0
        if places:
            self._passes += 1
            self._pass(places, clock, side=False)
        elif blocked:
            for run in self._blocking.collect(_WAITS):
                self._go_on(run)
        self._schedule.leave()
        return [run.task for run in runs if run.asking is None or id(run) in advanced]

    def _side_passes(self, runs: list[SchedulerEntry], clock: StepClock) -> list[SchedulerEntry]:
        """Passes of other models, and of parts of the model itself, until none is waited for.

        Returns those who still do: searches whose owner has had its part of this step's rows, where others wait for the
        step.
        """
        owners = len({run.owner for run in runs})
        had, part = Counter[str](), max(self._schedule.limits.rows // max(owners, 1), 1)
        for _ in range(_SIDE_ROUNDS):
            waiting = [(run, numbers) for run in runs if (numbers := self._side(run))]
            asked = [
                (run, numbers)
                for run, numbers in waiting
                if len(runs) == 1 or not isinstance(run.task, CoroutineTask) or had[run.owner] < part
            ]
            if not asked:
                break
            places = self._schedule.budget.places(asked)
            for run, number in places:
                had[run.owner] += len(run.asks[number].segment) if isinstance(run.task, CoroutineTask) else 0
            self._pass(places, clock, side=True)
        return [run for run, _ in waiting]

    def _begin(self, run: SchedulerEntry, rows: int, nodes: int, texts: list[Sequence]) -> None:
        """Let a task that has no turn in progress begin one. texts: all that take part in passes."""
        seq = run.task
        if isinstance(seq, CoroutineTask):
            run.asking = seq.turn()
        else:
            try:
                run.asking = turn(seq, StepBudget(rows, self._budget(seq, nodes, texts)))
            except Exception as error:
                seq.fail(error)
                return
        self._resume(run)

    def _resume(self, run: SchedulerEntry) -> None:
        self._running = run
        try:
            # What is done between passes is small, whoever wrote it, and must not wake threads that then wait for more.
            with one_thread():
                run.resume()
        finally:
            self._running = None
        self._blocking.begin(run)

    def _go_on(self, run: SchedulerEntry) -> None:
        """Let a task go on if it has all that it has asked for."""
        if not run.waits:
            self._resume(run)

    def _side(self, run: SchedulerEntry) -> list[int]:
        """The asks that wait for a pass of another model than the engine's own, or of a part of it that drafts."""
        return [number for number in run.unanswered if aside(run.asks[number], self.model)]

    def _pass(self, places: list[Place], clock: StepClock, *, side: bool) -> None:
        """Answer these asks, and let those go on who have all that they have asked for. side: see `aside`."""
        begin = perf_counter()
        segments = [run.asks[number].segment for run, number in places]
        found = answer([run.asks[number] for run, number in places])
        scored = perf_counter()
        rows = sum(len(segment) for segment in segments)
        if not side:
            self.rows = rows
        spend(places, found, self.model, (scored - begin) / max(rows, 1))
        for (run, number), each in zip(places, found, strict=True):
            run.answers[number] = each
            run.served = self._passes
        recorded: list[tuple[list[Step], float]] = []
        runs = list({id(run): run for run, _ in places}.values())
        for run in runs:
            if any(isinstance(each, OutOfMemory) for each in run.answers) and self._schedule.starve(run):
                continue
            if run.waits:
                run.earlier += 0.0 if side else scored - begin
                continue
            known = {id(trace): len(trace.steps) for trace in run.traces}
            self._resume(run)
            if steps := new_steps(run, known):
                recorded.append((steps, run.earlier))
                run.earlier = 0.0
        steps = [step for new, _ in recorded for step in new]
        clock.fill(steps, begin, scored, len(places))
        for new, earlier in recorded:
            for step in new:
                step.score += earlier
        if side:
            return
        attended = sum(int(segment.positions.sum()) for segment in segments)
        # Passes of a few rows take what reading the weights takes, and tell nothing about rows.
        if any(step.prefill for step in steps):
            self._schedule.pace.learn(rows, attended, clock.mark - begin)
        elif rows >= LEAST_ROWS and any(isinstance(run.task, CoroutineTask) for run in runs):
            self._schedule.budget.wide.learn(rows, attended, perf_counter() - begin)

    def _budget(self, seq: Sequence, nodes: int, texts: list[Sequence]) -> Budget:
        """How much the text may draft in this step, `nodes` at most, beside all `texts` that take part."""
        # The bonus token needs a place too, so a draft is never deeper than what is left but one.
        limit = Budget(
            min(nodes, seq.max_draft_tokens),
            seq.remaining - 1,
            len(texts),
            self._pass_seconds,
            measured=self._pass_seconds == self._measured,
            context=len(seq.tokens),
        )
        policy = seq.draft_length
        if policy is None or seq.drafter is None or seq.remaining <= 1 or seq.position == 0:
            return limit
        if policy.requirements.pauses:
            limit = replace(limit, ask=partial(policy.goes_on, seq))
        return policy.bound(seq, limit, texts)

    def _measured(self, context: int) -> np.ndarray:
        """Times of passes over 0, 1, 2, ... rows of this model after `context` tokens; measured when first asked."""
        if self._costs is None:
            curve = cost_curve(self.model)
            rows = np.maximum(np.arange(_COSTED_ROWS), 1)
            self._costs = curve.times_of(rows), curve.token + curve.row_token * rows
        near, token = self._costs
        return near + max(0, context - CONTEXT) * token


def _held(seq: Sequence) -> str:
    """What tells the embeddings of a prompt from others, "" where there are none."""
    return "" if seq.prompt_embeds is None else seq.prompt_embeds.digest
