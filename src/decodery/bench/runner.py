"""Runs a benchmark: every method on every prompt, round after round, next to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any, cast

import numpy as np

from decodery.core.noise import nth_seed
from decodery.llm.llm import LLM
from decodery.scorers.sandbox import Sandbox
from decodery.search.answers import AnswerExtractor, Kind

from .lossless import compare
from .record import Prompt, Record
from .settings import PLAIN, Settings
from .structured import judged
from .subject import Run, Searched, Subject
from .units import Conversation, Unit

_PROGRAM_SECONDS = 3.0
"""That a program which a method wrote may run for each test."""
Key = tuple[str, Prompt]
"""Method and prompt."""


class _StoppedError(Exception):
    """The user wants no more."""


def _quiet(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass
class Bench:
    """A benchmark in progress; `records` hold what is done and may come from an interrupted run.

    Within a round the units come in a new order, and for each of them the methods run one after the other, each time
    beginning with another one. In the first round plain decoding, the first subject, goes first: its answers are the
    references of the lossless check and stand in later turns of a conversation, so that all methods read the same
    prompts. A unit counts when every method has finished it, so an interruption leaves comparable records.

    report: called with what is being decoded, how many decodings are done and how many there are. save: called
    after every unit. stopped: asked before every decoding whether to end.
    """

    lm: LLM
    settings: Settings
    subjects: list[Subject]
    units: list[Unit]
    report: Callable[[str, int, int], None] = _quiet
    save: Callable[[], None] = lambda: None
    stopped: Callable[[], bool] = lambda: False
    records: dict[Key, Record] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self) -> bool:
        """Measure what is not measured yet; False where it was stopped."""
        begin, before = perf_counter(), self.seconds
        try:
            self._warm_up()
            done = 0
            for number in range(self.settings.rounds):
                for subject in self.subjects:
                    subject.new_round()
                order = np.random.default_rng((self.settings.seed, number)).permutation(len(self.units))
                for place, index in enumerate(order.tolist()):
                    if self._rounds_of(self.units[index]) <= number:
                        self._measure(index, number + place, done)
                        self.seconds = before + perf_counter() - begin
                        self.save()
                    done += self._decodings(self.units[index])
            self.report("done", done, done)
        except _StoppedError:
            return False
        return True

    def ordered(self) -> list[Record]:
        """The records by unit, turn and method, as the settings name them."""
        prompts = [unit.key(turn) for unit in self.units for turn in range(unit.turns)]
        found = [self.records.get((subject.name, prompt)) for prompt in prompts for subject in self.subjects]
        return [record for record in found if record is not None]

    def _subjects(self, unit: Unit) -> list[Subject]:
        """Those that take part: other programs decode one prompt at a time, and freely."""
        free = unit.concurrency == 1 and unit.constraint is None
        return self.subjects if free else [each for each in self.subjects if each.own]

    def _decodings(self, unit: Unit) -> int:
        return unit.turns * len(self._subjects(unit))

    def _total(self) -> int:
        return self.settings.rounds * sum(self._decodings(unit) for unit in self.units)

    def _rounds_of(self, unit: Unit) -> int:
        """How many rounds of this unit are done."""
        record = self.records.get((PLAIN, unit.key(0)))
        return 0 if record is None else len(record.seconds)

    def _tell(self, what: str, done: int) -> None:
        if self.stopped():
            raise _StoppedError
        self.report(what, done, self._total())

    def _warm_up(self) -> None:
        unit = self.units[0]
        first = unit.prompts(0, [])
        assert first is not None
        for subject in self.subjects:
            own: dict[str, Any] = {"messages": unit.messages(0, [])} if isinstance(subject, Searched) else {}
            for _ in range(self.settings.warmup):
                self._tell(f"warming up {subject.name}", 0)
                subject.decode(first[:1], max_new_tokens=min(16, self.settings.max_new_tokens), seed=0, **own)

    def _measure(self, index: int, rotation: int, done: int) -> None:
        """One round of one unit by all methods; nothing of it is kept if it is interrupted."""
        unit = self.units[index]
        subjects = self._subjects(unit)
        shift = rotation % len(subjects)
        answers: list[list[list[int]]] = []
        finished: list[tuple[Subject, Prompt, list[list[int]], Run]] = []
        held: dict[str, Any] = {} if unit.constraint is None else {"constraint": unit.constraint}
        for turn in range(unit.turns):
            prompts, prompt = unit.prompts(turn, answers), unit.key(turn)
            if prompts is None:
                break
            plain = self.records.get((PLAIN, prompt))
            for subject in subjects if plain is None else [*subjects[shift:], *subjects[:shift]]:
                self._tell(f"{subject.name}: {prompt.workload}, {prompt.category}", done)
                own: dict[str, Any] = (
                    {"messages": unit.messages(turn, answers)} if isinstance(subject, Searched) else {}
                )
                run = subject.decode(
                    prompts,
                    max_new_tokens=self.settings.max_new_tokens,
                    seed=nth_seed(self.settings.seed, index),
                    concurrency=unit.concurrency,
                    **held,
                    **own,
                )
                done += 1
                if plain is None and subject.name == PLAIN:
                    answers.append(run.outputs)
                finished.append((subject, prompt, prompts, run))
            if plain is not None:
                assert plain.outputs is not None
                answers.append(plain.outputs)
        for subject, prompt, prompts, run in finished:
            self._keep(subject, prompt, prompts, run, answers[prompt.turn], nth_seed(self.settings.seed, index))
            if isinstance(unit, Conversation) and unit.constraint is not None:
                record = self.records[subject.name, prompt]
                if record.structured is None:
                    record.structured = judged(self.lm, unit.question.schema, run.outputs[0], run.mask_seconds)
            problem = unit.question.problem if isinstance(unit, Conversation) else None
            record = self.records[subject.name, prompt]
            if problem is not None and prompt.turn == unit.turns - 1 and record.right is None:
                record.right = problem.right(self._text(run.outputs[0]), self._answers, self._sandbox)

    def _text(self, tokens: list[int]) -> str:
        ends = self.lm.tokenizer.eos_ids
        return self.lm.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in ends else tokens)

    @cached_property
    def _answers(self) -> AnswerExtractor:
        return AnswerExtractor(cast(Kind, self.settings.answer))

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(seconds=_PROGRAM_SECONDS)

    def _keep(
        self,
        subject: Subject,
        prompt: Prompt,
        prompts: list[list[int]],
        run: Run,
        references: list[list[int]],
        seed: int,
    ) -> None:
        key = subject.name, prompt
        reference = subject.name == PLAIN and key not in self.records
        record = self.records.setdefault(key, Record.of(subject, prompt, prompts))
        record.add(run)
        if reference:
            record.outputs = run.outputs
        elif subject.own or self.settings.temperature == 0:
            temperature = self.settings.temperature
            for number, (tokens, plain, other) in enumerate(zip(prompts, references, run.outputs, strict=True)):
                difference = compare(
                    self.lm, tokens, plain, other, temperature=temperature, seed=nth_seed(seed, number)
                )
                record.check(difference, other)
