"""A benchmark from its settings to its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from decodery.core.noise import nth_seed
from decodery.llm.llm import LLM
from decodery.step.pass_cost import CostCurve, cost_curve

from .report import save
from .result import Result, dump, make_result, records_of, write
from .runner import Bench
from .settings import Settings
from .structured import Schema, compile_schemas
from .subject import HOT, NO_PEERS, Own, Peers, Requests, open_subjects
from .timeline import record_timeline
from .units import Conversation, make_units

_SAVE_EVERY = 20.0

Report = Callable[[str, int, int], None]


@dataclasses.dataclass
class Job:
    """One benchmark of a loaded model. out: folder for results.json and report.html, None to write nothing.

    earlier: the result of an interrupted run with the same settings, to go on from. stopped: asked before every
    decoding whether to end; what is done until then is kept, and `complete` is false in the result. peers: other
    programs that methods may name. requests: what the settings' requests ask for, read.
    """

    lm: LLM
    settings: Settings
    out: Path | None = None
    earlier: Result | None = None
    peers: Peers = NO_PEERS
    requests: Requests = dataclasses.field(default_factory=dict)
    _schemas: list[Schema] = dataclasses.field(default_factory=list, init=False)

    def run(self, report: Report, stopped: Callable[[], bool] = lambda: False) -> Result:
        """Measure, write the files, return the result."""
        subjects, unavailable = open_subjects(self.lm, self.settings, self.peers, self.requests)
        schemas = compile_schemas(self.lm, self.settings)
        units, notes = make_units(self.lm, self.settings, schemas)
        if schemas and not all(subject.own for subject in subjects):
            notes.append("other programs take no constraints: they have no part in jsonschema")
        report("measuring the cost of passes", 0, 1)
        curve = cost_curve(self.lm.model)
        bench = Bench(self.lm, self.settings, subjects, units, report=report, stopped=stopped)
        if self.earlier is not None:
            bench.records = {(each.method, each.prompt): each for each in records_of(self.earlier)}
            bench.seconds = float(self.earlier["seconds"])
        last = monotonic()

        self._schemas = schemas

        def keep() -> None:
            nonlocal last
            if self.out is not None and monotonic() - last > _SAVE_EVERY:
                write(self.out / "results.json", dump(self._result(bench, curve, unavailable, notes, complete=False)))
                last = monotonic()

        bench.save = keep
        complete = bench.run()
        if complete:
            self._record_timelines(bench, report)
        result = self._result(bench, curve, unavailable, notes, complete=complete)
        save(result, self.out)
        return result

    def _result(
        self, bench: Bench, curve: CostCurve, unavailable: dict[str, str], notes: list[str], *, complete: bool
    ) -> Result:
        return make_result(
            self.lm,
            self.settings,
            bench.ordered(),
            complete=complete,
            seconds=bench.seconds,
            curve=curve,
            unavailable=unavailable,
            notes=notes,
            schemas=self._schemas,
        )

    def _record_timelines(self, bench: Bench, report: Report) -> None:
        """Decode a few prompts once more, outside of all timings, and keep every pass of them."""
        settings = self.settings
        for workload in settings.workloads:
            found = [
                (index, unit)
                for index, unit in enumerate(bench.units)
                if isinstance(unit, Conversation) and unit.question.workload == workload and unit.constraint is None
            ]
            count = min(settings.timelines, len(found))
            for place in range(count):
                index, unit = found[place * len(found) // count]
                (prompt,) = unit.prompts(0, []) or [[]]
                for subject in bench.subjects:
                    record = bench.records.get((subject.name, unit.key(0)))
                    # A hot memory would know the prompt by now.
                    if record is None or not isinstance(subject, Own) or subject.store == HOT or subject.request:
                        continue
                    report(f"recording {subject.name}", place, count)
                    record.timeline = record_timeline(
                        self.lm,
                        prompt,
                        subject.spec,
                        max_new_tokens=settings.max_new_tokens,
                        max_draft_tokens=settings.max_draft_tokens,
                        temperature=settings.temperature,
                        seed=nth_seed(settings.seed, index),
                    )
