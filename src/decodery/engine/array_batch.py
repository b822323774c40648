"""The texts whose steps need nothing but the model: one batch in arrays, one native call per step for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np
import torch

from decodery.models.cache.page_pool import SLOTS, MappedPool, PagePool, TensorPool
from decodery.models.protocol import LanguageModel
from decodery.models.step_arrays import StepArrays
from decodery.models.tokenizers.vocabularies import Padding
from decodery.models.torch.transformer import Transformer
from decodery.models.torch_state import in_plain_state
from decodery.sampling.batched import batched_processors
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.step.bound_request import BoundRequest
from decodery.step.draft_batch import DraftBatch
from decodery.step.forward_request import ForwardRequest, ForwardResult
from decodery.step.sequence import Sequence

from .array_commit import ArrayTimes, commit
from .array_drafts import draft_batches
from .array_masks import compute_masks
from .array_room import make_room
from .array_text import ArrayText, ProcessorsOf, as_left, in_arrays, is_open
from .device_steps import DeviceSteps
from .draft_budgets import DraftBudgets
from .drafting_together import asks
from .monitoring import banned_ahead
from .schedule import Schedule
from .task import SchedulerEntry, Task


class ArrayBatch:
    """Steps of the texts that need nothing but the model.

    Such a text has no drafter, or one that asks for no passes, processors that the kernels apply, constraints without
    questions, the coupled rule, and neither cache policies nor logits sources; its monitors change no rows
    (`TextMonitors.depths`).
    Where all tasks in progress are such texts, a step is one native call, and Python handles what becomes of the
    tokens. Where others share the pass, the rows of all these texts are one segment of it. Where a monitor takes tokens
    back, all texts leave the batch first, and that one comes back once nothing is excluded or required any more.

    Args:
        model: The engine's.
        schedule: The engine's.
        budgets: Bounds of drafts.
    """

    def __init__(self, model: LanguageModel, schedule: Schedule, budgets: DraftBudgets) -> None:
        self._model, self._schedule, self._budgets = model, schedule, budgets
        self._texts: list[ArrayText] = []
        self._sequences: list[Sequence] = []
        self._drafts: list[DraftBatch] = []
        self._alone = self._failed = False
        self._changes = -1
        self._steps: StepArrays | None = None
        self._known: dict[int, ArrayText] = {}
        self._refused: dict[int, BoundRequest] = {}
        self._times = ArrayTimes(0.0, 0.0, 0.0, 0, 0)
        # Nodes that all texts draft at most.
        self._wanted = 0
        # Tokens of a text on average, at the last step with a look.
        self._context = 0.0
        self._make: Callable[[Padding | None], StepArrays | None] | None = None
        self._processors_of: ProcessorsOf = native_processors
        self._pool: type[PagePool] = MappedPool
        schedule.memory.known_due = self._due
        if DeviceSteps.serves(model):
            self._make, self._processors_of, self._pool = self._on_device, batched_processors, TensorPool
        elif (native := getattr(type(model), "array_steps", None)) is not None:
            self._make = partial(native, model)

    def _on_device(self, padding: Padding | None) -> StepArrays:
        assert isinstance(self._model, Transformer)
        return DeviceSteps(self._model, padding)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def rows(self) -> int:
        """Rows of the step's trees."""
        return 0 if self._steps is None else self._steps.rows

    @property
    def runs(self) -> list[SchedulerEntry]:
        """The tasks that these texts are."""
        return [text.run for text in self._texts]

    def _due(self) -> dict[int, int]:
        """Bytes that the next step of each text takes, by the id of its task; of none where texts were changed."""
        steps, texts = self._steps, self._texts
        if steps is None or not texts or False in as_left(texts):
            return {}
        rows = np.maximum(steps.next[: len(texts)] - steps.ends[: len(texts)], 0)
        pages = (-(-rows // SLOTS)).tolist()
        return {id(text.run): count * text.page_bytes for text, count in zip(texts, pages, strict=True)}

    @in_plain_state
    def gather(self) -> None:
        """Take in all tasks that the batch can go on with."""
        texts = self._texts
        left = zip(texts, as_left(texts), strict=True)
        kept = {id(text.run): (place, text) for place, (text, same) in enumerate(left) if same}
        self.release()
        schedule = self._schedule
        runs, limits = schedule.runs, schedule.limits
        here = {id(run.task) for run in runs}
        if not self._known.keys() <= here:
            self._known = {key: text for key, text in self._known.items() if key in here}
        if not self._refused.keys() <= here:
            self._refused = {key: request for key, request in self._refused.items() if key in here}
        found = list[ArrayText]()
        places = list[int]()
        if self._make is not None and len(runs) <= limits.rows:
            for run in runs:
                place, text = kept[id(run)] if id(run) in kept else (-1, self._text(run))
                if text is not None:
                    found.append(text)
                    places.append(place)
        if found and schedule.fits and self._open(found, places):
            self._texts, self._changes = found, schedule.changes
            self._sequences = [text.seq for text in found]
            self._alone = len(found) == len(runs) and not schedule.admits
        elif self._steps is not None:
            self._steps.forget()

    def release(self) -> None:
        """Let go of all texts, so that others may change them."""
        for batch in self._drafts:
            batch.leave()
        self._texts, self._sequences, self._drafts = [], [], []
        self._alone, self._changes = False, -1

    def refresh(self) -> None:
        """After a step of others: go on with the same texts, where nothing has changed and none can come in."""
        if not self._texts or not self._valid():
            self.gather()
            return
        here, runs = {id(text.run) for text in self._texts}, self._schedule.runs
        if any(id(run) not in here and self._text(run) is not None for run in runs):
            self.gather()
        else:
            self._alone = len(here) == len(runs) and not self._schedule.admits

    def _valid(self) -> bool:
        """Whether tasks and texts are those that were gathered, with room for another step."""
        if self._schedule.changes != self._changes or False in as_left(self._texts):
            return False
        if any(batch.asks for batch in self._drafts):
            return False
        steps = self._steps
        if steps is None or not self._texts or steps.has_room:
            return True
        # Only texts without room get some. Alone they may have all there is; beside others the schedule looks at these.
        return (self._alone or self._schedule.fits) and self._room(steps.without_room())

    def _text(self, run: SchedulerEntry) -> ArrayText | None:
        """A task as a text of the batch, None where it cannot be one now."""
        seq = run.task
        if not isinstance(seq, Sequence) or seq.finish_reason is not None or seq.paused or run.coroutine is not None:
            return None
        if self._refused.get(id(seq)) is seq.request:
            return None
        if not is_open(seq, self._pool):
            # What it held is not kept for it.
            self._known.pop(id(seq), None)
            return None
        if asks(seq) or banned_ahead(seq):
            # Perhaps in this step alone.
            return None
        if (known := self._known.get(id(seq))) is not None and known.run is run and known.request is seq.request:
            known.follow()
            return known
        processors = in_arrays(seq, self._model, self._processors_of) if self._serves(seq) else None
        if processors is None:
            if seq.scheduling.prompt_owner is None:
                self._refused[id(seq)] = seq.request
            return None
        text = self._known[id(seq)] = ArrayText(run, processors)
        return text

    def _serves(self, seq: Sequence) -> bool:
        """Whether there are native steps for the model, without the ids that no text is to choose."""
        padding = seq.request.padding
        if self._steps is None and self._make is not None:
            self._steps = self._make(padding)
            self._padding = padding
            if self._steps is None:
                self._make = None
        return self._steps is not None and padding is self._padding

    def _open(self, texts: list[ArrayText], places: list[int]) -> bool:
        """Make room for one more step of every text, and write those into the arrays that were not there.

        Args:
            texts: The new batch.
            places: The number of each in the batch so far, -1 where it was in none.
        """
        steps = self._steps
        assert steps is not None
        steps.hold(len(texts), places)
        steps.widen(max([text.room for text in texts]))
        steps.tap({depth for text in texts for depth in text.depths.values()})
        self._texts = texts
        steps.ends[: len(texts)][[place < 0 for place in places]] = -1
        if not self._room(steps.without_room()):
            self._texts = []
            return False
        for place, text in enumerate(texts):
            if places[place] >= 0:
                continue
            seq = text.seq
            steps.last[place] = seq.tokens[-1]
            steps.seeds[place], steps.drawn[place] = seq.request.seed, seq.position
            steps.assign(place, text.processors)
            steps.greedy[place] = text.sampler.greedy
            if isinstance(text.processors, NativeProcessors):
                text.processors.follow(seq.processor_states)
        steps.stand()
        steps.turn_to(max([text.most for text in texts]))
        self._wanted = sum([text.room - 1 for text in texts])
        self._drafts = draft_batches(texts, self._budgets)
        steps.ranks = max([text.request.drafter.ranks for text in texts if text.request.drafter is not None], default=0)
        return True

    def _room(self, places: list[int]) -> bool:
        """Make room for the next steps of some texts; whether there is some."""
        assert self._steps is not None
        # Under a limit memory is taken when the schedule knows that there is some.
        return make_room(self._steps, self._texts, places, ahead=self._schedule.limits.cache_bytes is None)

    def step(self, passes: int) -> tuple[list[Task], int] | None:
        """One step of all texts in one native call.

        Args:
            passes: Of the engine's model so far.

        Returns:
            The texts, and the rows of the pass; None where something else has to be done first.
        """
        texts, steps = self._texts, self._steps
        if not self._alone or self._failed or steps is None or self._schedule.admits:
            return None
        if not self._valid():
            # What has no room for another step gets some; where tasks have come or left, others decide what is next.
            if self._schedule.changes != self._changes:
                return None
            self.gather()
            if not self._alone:
                return None
            texts = self._texts
        times, sequences = self._times, self._sequences
        times.begin = times.proposed = perf_counter()
        times.texts = len(texts)
        drafting = bool(self._drafts) and not self._resting()
        if drafting:
            self._context = self._propose(sequences[:])
            times.proposed = perf_counter()
        try:
            steps.run()
            if steps.awaits_masks:
                compute_masks(steps, texts)
        except Exception:
            self._fail()
            return None
        times.scored, times.rows = perf_counter(), steps.rows
        if self._drafts:
            # Drafters account for what drafting takes. Steps without a look show what plain ones take.
            self._budgets.learn(times.rows, times.texts, self._context, times.scored - times.proposed)
        ended = commit(steps, texts, self._drafts, times, passes, drafting=drafting)
        rolled = self._roll_back()
        if ended or rolled:
            self._schedule.leave()
            self.gather()
        return [*sequences], times.rows

    def _resting(self) -> bool:
        """Whether this step is taken without drafts, and nothing is learned of it."""
        drafts, steps = self._drafts, self._steps
        if min([batch.rests for batch in drafts]) < 1:
            return False
        for batch in drafts:
            batch.rests -= 1
        assert steps is not None
        if steps.rows != len(self._texts):
            steps.sizes[: len(self._texts)] = 1
            steps.count()
        return True

    def join(self, begun: list[tuple[SchedulerEntry, int, int]]) -> set[int]:
        """The ids of those who begin a turn now in the batch: all of its texts, or none.

        Args:
            begun: Tasks, how many unread tokens each reads, and how many nodes it may draft.
        """
        self._nodes = {id(run): nodes for run, rows, nodes in begun if not rows}
        if self._failed:
            self._failed = False
            self.release()
            return set()
        if not self._valid():
            self.gather()
        if any(id(text.run) not in self._nodes for text in self._texts):
            self.release()
        return {id(text.run) for text in self._texts}

    def requests(self, begin: float, every: list[Sequence]) -> list[ForwardRequest]:
        """The rows of all texts, with their drafts; empty where there are no texts.

        Args:
            begin: When the step began.
            every: The texts that take part in it.
        """
        if not self._texts or self._steps is None:
            return []
        self._times = ArrayTimes(begin, 0.0, 0.0, 0, 0)
        if self._drafts:
            self._propose(every)
        taps = tuple(self._steps.hidden)
        return [ForwardRequest(self._model, segment, taps) for segment in self._steps.segments()]

    def choose(self, answers: list[ForwardResult | Exception], begin: float, rows: int, texts: int) -> None:
        """Choose tokens by a pass that was shared with others; without one the batch is given up.

        Args:
            answers: To `requests`.
            begin: When the pass began.
            rows: Of the pass.
            texts: Tasks that shared it.
        """
        times, steps = self._times, self._steps
        assert steps is not None
        try:
            scored = list[ForwardResult]()
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                scored.append(answer)
            for depth in steps.hidden:
                steps.hidden[depth] = _joined([answer.hidden[depth] for answer in scored])
            steps.choose(_joined([answer.logits for answer in scored]))
            if steps.awaits_masks:
                compute_masks(steps, self._texts)
        except Exception:
            self._fail()
        times.proposed, times.scored, times.rows, times.texts = begin, perf_counter(), rows, texts

    def _fail(self) -> None:
        """Give up the batch; in the next step each text is scored by itself, so that the one that fails ends."""
        self.release()
        self._failed = True

    def commit(self, passes: int) -> None:
        """Append the tokens that were chosen."""
        if self._texts and self._steps is not None:
            commit(self._steps, self._texts, self._drafts, self._times, passes)
            self._roll_back()

    def _roll_back(self) -> bool:
        """Take back what monitors want taken back, where nothing holds the texts any more; whether any did."""
        found = [text for text in self._texts if text.monitors is not None and text.rolls_back]
        if found:
            self.release()
            for text in found:
                text.roll_back()
        return bool(found)

    def _propose(self, every: list[Sequence]) -> float:
        """Draft for the texts; returns how many tokens the texts of the step have on average."""
        steps, schedule, texts = self._steps, self._schedule, len(every)
        assert steps is not None
        if steps.rows != len(self._texts):
            steps.sizes[: len(self._texts)] = 1
        context = steps.reach / len(self._texts) + 1
        if self._alone:
            nodes = max(schedule.limits.rows // texts - 1, 0)
            nodes = schedule.memory.draft_nodes(nodes, texts, min(nodes * texts, self._wanted))
        else:
            nodes = min(self._nodes[id(text.run)] for text in self._texts)
        budget, drafted = self._budgets.joint(nodes, every, context), 0
        for batch in self._drafts:
            if batch.failed:
                batch.failed = {}
            try:
                drafted += batch.propose(steps, budget)
            except Exception as error:
                batch.failed = dict.fromkeys(batch.places, error)
                steps.sizes[batch.places] = 1
        steps.count(drafted)
        return context


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
