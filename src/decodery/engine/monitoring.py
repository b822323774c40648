"""The monitors of one text: what they have seen of it, what they found, and what they change of its rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from decodery.core.errors import DecoderyError, MonitorFailed
from decodery.core.ledger import charging, count
from decodery.core.noise import mix
from decodery.core.requirements import Requirements
from decodery.core.topk import softmax_sums
from decodery.models.batch import Segment
from decodery.models.hooks import OF_OUTPUTS, Intervention, Tap, hook_point
from decodery.sampling.banned import Banned
from decodery.sampling.sampler import Sampler
from decodery.step.monitor import (
    WHOLE,
    Action,
    Monitor,
    MonitorReport,
    Prompt,
    Regenerate,
    Rollback,
    Row,
    ScoredRow,
    Stop,
)
from decodery.step.sequence import Sequence

from .monitor_marks import Moment, MonitorState
from .validation import name_of

T = TypeVar("T")
_TOGETHER = 16
"""Tokens that are shown together to monitors that wait. After a pass the processor's caches hold weights, and the first
token takes ten times as long as those that follow."""

MOST_TAKEN_BACK = 16
"""Tokens of one text that monitors take back at most, by the tokens it may have; what they want beyond that stays."""
MOST_REGENERATED = 3
"""Times that one text is written anew as a whole."""


def monitors_of(seq: Sequence) -> TextMonitors | None:
    """The monitors of a text and their states, None where nothing watches it."""
    monitors: TextMonitors | None = seq.states[seq.request.monitors] if seq.request.monitors else None
    return monitors


def banned_ahead(seq: Sequence) -> bool:
    """Whether a rollback excludes or requires tokens that a text has still to write."""
    return bool(seq.request.monitors) and any(
        isinstance(processor, Banned) and processor.end > seq.position for processor in seq.request.sampler.processors
    )


def monitor_reports(seq: Sequence) -> list[MonitorReport]:
    """What each monitor of a text found."""
    return [entry.report for entry in _caught_up(seq)]


def monitor_states(seq: Sequence) -> list[Any]:
    """What each monitor of a text remembers."""
    return [entry.state for entry in _caught_up(seq)]


def _caught_up(seq: Sequence) -> list[MonitorState]:
    """The monitors of a text, once they have seen all of it."""
    if (monitors := monitors_of(seq)) is None:
        return []
    try:
        with charging(seq.trace.ledger):
            monitors.catch_up()
    except DecoderyError as error:
        # A text that was ended before its time, such as by a client that left.
        if seq.error is None:
            seq.fail(error)
    return monitors._entries


class TextMonitors:
    """What watches a text.

    Args:
        read_to: How many of the prompt's tokens it has seen, which are not shown twice.
    """

    def __init__(self, monitors: Ordered[Monitor], seq: Sequence) -> None:
        self.requirements = Requirements.merged(monitor.requirements for monitor in monitors)
        self.rollback_tokens = max(monitor.rollback_tokens for monitor in monitors)
        self.read_to = self.taken_back = self.regenerated = 0
        self.requested: tuple[MonitorState, Rollback | Regenerate] | None = None
        self._entries = [
            MonitorState(monitor, monitor.requirements.taps, None, MonitorReport(name_of(monitor), monitor.limit))
            for monitor in monitors
        ]
        # Of a text that may be taken back as a whole its beginning is all that is needed for that.
        parts = max((monitor.rollback_tokens for monitor in monitors if monitor.rollback_tokens < WHOLE), default=0)
        self._moments: deque[Moment] = deque(maxlen=parts)
        self._first: Moment | None = None
        self.waits = all(_waits(monitor) for monitor in monitors)
        self._sums = any(monitor.waits == "sums" for monitor in monitors)
        self._waiting: list[Row] = []
        for entry in self._entries:
            _tried(entry, partial(entry.monitor.check, seq))
            entry.state = _tried(entry, partial(entry.monitor.start, seq))
            _steer(entry, 0)

    @property
    def reads(self) -> bool:
        """Whether it has to see every row of the prompt."""
        return self.requirements.prompt_taps

    def depths(self, layers: int) -> dict[Tap, int] | None:
        """After how many layers each of their taps is, where they read logits and states after layers alone.

        Args:
            layers: Of the model.

        Returns:
            None where they read anything else of written rows, or change rows.
        """
        # What is needed of model and cache apart from the steps does not matter to these.
        others = replace(self.requirements, taps=(), prompt_taps=False, keys=False, parts=False)
        places = {tap: hook_point(tap, layers) for tap in self.requirements.taps}
        if others != Requirements():
            return None
        if any(place.name != "residual" or not place.layer for place in places.values()):
            return None
        return {tap: place.layer for tap, place in places.items()}

    @property
    def private(self) -> bool:
        """Whether the prompt must be read anew: others' rows were not observed, or are read differently."""
        return self.requirements.prompt_taps or self.requirements.changes

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What changes rows of this text, each where it was in force when they were read."""
        found = []
        for entry in self._entries:
            ends = [start for start, _ in entry.spans[1:]] + [None]
            for (start, steering), end in zip(entry.spans, ends, strict=True) if entry.spans else ():
                if steering is not None and end != start:
                    found += [_within(change, start, end) for change in entry.monitor.changes(steering)]
        return tuple(found)

    def fork(self) -> TextMonitors:
        """The same for a text that goes on apart."""
        self.catch_up()
        clone = copy(self)
        clone._waiting = []
        clone._entries = [entry.fork() for entry in self._entries]
        clone._moments = deque(self._moments, self._moments.maxlen)
        return clone

    def read(self, seq: Sequence, hidden: dict[Tap, torch.Tensor], start: int, rows: int) -> bool:
        """Show rows of the prompt, the first at `start`; returns whether what changes rows is another one now."""
        end = start + rows
        if not self.reads or start < self.read_to or start >= seq.request.prompt_length:
            return False
        self.read_to = end
        steered = False
        for entry in self._live():
            requirements = entry.monitor.requirements
            if requirements.prompt_taps:
                seen = Prompt(
                    seq.tokens[start:end],
                    {tap: hidden[tap] for tap in requirements.taps},
                    end == seq.request.prompt_length,
                )
                entry.state = _tried(entry, partial(entry.monitor.read, entry.state, seen))
                steered |= _steer(entry, end - 1)
        return steered

    def see(self, seq: Sequence, scored: ScoredRow, hidden: dict[Tap, torch.Tensor]) -> bool:
        """Show the token that was just committed, and do what follows.

        It must where the text ends, where something is taken back, and where rows after it are to be changed in another
        way: those of the draft were not.

        Returns:
            Whether the run must end here.
        """
        if self.waits:
            if self.note(seq, scored, {tap: state.clone() for tap, state in hidden.items()}):
                self.catch_up()
            return False
        over = False
        for entry in self._live():
            own = {tap: hidden[tap] for tap in entry.taps}
            row = Row(seq.last_token, seq.position - 1, seq.finished, scored, own)
            action = _tried(entry, partial(_seen, entry, row))
            count("monitor_evaluations")
            over |= _steer(entry, len(seq.tokens) - 1)
            if isinstance(action, Stop) and seq.finish_reason != "content_filter":
                seq.finish_reason, seq.stopped_by = "content_filter", f"monitor:{entry.report.name}"
            elif isinstance(action, Rollback | Regenerate) and self.requested is None:
                self.requested = entry, action
        scored.logits = None
        return over or self.requested is not None

    def note(self, seq: Sequence, scored: ScoredRow, hidden: dict[Tap, torch.Tensor]) -> bool:
        """Note the token that was just committed, to show it later; whether it is time to."""
        if self._sums:
            scored.sums = softmax_sums(scored.rows(), scored.number, seq.last_token)
        scored.logits = None
        self._waiting.append(Row(seq.last_token, seq.position - 1, seq.finished, scored, hidden))
        return seq.finished or len(self._waiting) >= _TOGETHER

    def catch_up(self) -> None:
        """Show the monitors what waits."""
        waiting, self._waiting = self._waiting, []
        for row in waiting:
            for entry in self._live():
                _tried(entry, partial(_seen, entry, row))
                count("monitor_evaluations")

    def remember(self, seq: Sequence, position: int, processor_states: Any) -> None:
        """Note what is to be had again if the token at `position` is taken back.

        Args:
            seq: The text, whose decoded text does not have that token yet.
            position: Where it stands in the output.
            processor_states: Of the sampler, before it.
        """
        if self._moments.maxlen or (self.rollback_tokens and position == 0):
            text = None if seq.text is None else seq.text.fork()
            moment = Moment(position, [entry.mark() for entry in self._entries], text, processor_states)
            self._moments.append(moment)
            if position == 0:
                self._first = moment

    def roll_back(self, seq: Sequence) -> None:
        """Take back what a monitor wants taken back: all that acts on the text stands where it stood there."""
        assert self.requested is not None
        (requested_by, action), self.requested = self.requested, None
        whole = isinstance(action, Regenerate)
        position = 0 if isinstance(action, Regenerate) else seq.position - action.tokens
        moment = self._first if whole else next((each for each in self._moments if each.position == position), None)
        taken = seq.position - position
        self.taken_back += taken
        spent = self.taken_back > MOST_TAKEN_BACK * seq.request.max_new_tokens
        if moment is None or spent or (whole and self.regenerated == MOST_REGENERATED):
            count("rollbacks_refused")
            return
        count("regenerations" if whole else "rollbacks")
        count("tokens_taken_back", taken)
        after = requested_by.state
        del seq.tokens[seq.request.prompt_length + position :], seq.token_logprobs[position:]
        for entry, mark in zip(self._entries, moment.marks, strict=True):
            entry.back_to(mark)
        if whole:
            self.regenerated += 1
            seq.rebind(seed=mix(seq.request.seed, self.regenerated))
        else:
            requested_by.state = requested_by.monitor.resume(requested_by.state, after)
        self._moments = deque((each for each in self._moments if each.position < position), self._moments.maxlen)
        if seq.text is not None and moment.text is not None:
            seq.text = moment.text.fork(released=seq.text)
        processors = (
            processor.again(position, *_instead(action)) if isinstance(processor, Banned) else processor
            for processor in seq.request.sampler.processors
        )
        seq.rebind(sampler=Sampler(processors))
        seq.processor_states = moment.processor_states
        seq.finish_reason = seq.stopped_by = None
        self._restart(seq)

    def _restart(self, seq: Sequence) -> None:
        """Let the cache hold what is left, and the drafter begin anew after it."""
        requirements = None if seq.request.drafter is None else seq.request.drafter.requirements
        if requirements is not None and (requirements.prompt or requirements.prompt_taps):
            seq.cache, seq.observed = seq.request.model.new_cache(), 0
            if seq.request.slots is not None:
                seq.cache.provide(seq.request.slots)
        else:
            seq.cache.truncate(min(seq.cache.next_position, len(seq.tokens) - 1))
        seq.start_drafter()

    def _live(self) -> Iterator[MonitorState]:
        return (entry for entry in self._entries if not entry.off)


def _waits(monitor: Monitor) -> bool:
    """Whether a monitor may be shown tokens later: nothing follows from what it finds."""
    acts = monitor.action != "flag" or type(monitor).act is not Monitor.act
    return monitor.waits is not None and not acts and not monitor.requirements.changes


def _instead(action: Rollback | Regenerate) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is not written in place of what was taken back, and what is."""
    return ((), ()) if isinstance(action, Regenerate) else (action.ban, action.write)


def _tried(entry: MonitorState, do: Callable[[], T]) -> T | None:
    """What a monitor gives; an error of it ends its text, or its watch where that was asked for."""
    try:
        return do()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:300]
        if entry.monitor.errors == "raise":
            if isinstance(error, DecoderyError):
                raise
            raise MonitorFailed(
                f"the monitor {entry.report.name} raised {said}; its text ends, and errors=off goes on without it"
            ) from error
        entry.report.error = said
        return None


def _steer(entry: MonitorState, position: int) -> bool:
    """Note from which position on rows are changed as the monitor now wants; whether that is another way."""
    wanted = None if entry.off else _tried(entry, partial(entry.monitor.steering, entry.state))
    before = entry.spans[-1][1] if entry.spans else None
    if wanted == before:
        return False
    entry.spans.append((position, wanted))
    return True


def _seen(entry: MonitorState, row: Row) -> Action | None:
    """Let a monitor see a token; what it wants done where its score is above the limit."""
    monitor, report = entry.monitor, entry.report
    entry.state = monitor.observe(entry.state, row)
    value = monitor.score(entry.state)
    report.scores.append(value)
    if report.unlike is None and monitor.unlike_training(entry.state):
        report.unlike = row.position
        count("monitor_unlike_training")
    if value is None or not value > monitor.limit:
        return None
    if report.flagged is None:
        report.flagged = row.position
        count("monitor_flags")
    return monitor.act(entry.state)


def _within(change: Intervention, start: int, end: int | None) -> Intervention:
    """The change for rows at positions from `start` to before `end`; the others stay to the bit."""

    def inside(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
        positions = segment.positions
        if change.hook_point in OF_OUTPUTS and segment.logit_rows is not None:
            positions = positions[list(segment.logit_rows)]
        wanted = (positions >= start) & (positions < (positions.max(initial=0) + 1 if end is None else end))
        if not wanted.any():
            return rows
        changed = change.change(rows, segment)
        if wanted.all():
            return changed
        return torch.where(torch.from_numpy(wanted).to(rows.device)[:, None], changed.to(rows.dtype), rows)

    return Intervention(change.hook_point, inside)
