"""Searches run on problems: every result is kept as soon as it is known, and a later run goes on from there."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from decodery.core.errors import PromptError, ServerError, SettingsError
from decodery.core.registry import resolve
from decodery.engine.request import Request
from decodery.llm.llm import LLM
from decodery.models.loaders.store import make_directory, write_text
from decodery.scorers.sandbox import Sandbox
from decodery.search.answers import AnswerExtractor, Kind
from decodery.search.base import Search

from ..result import stamp
from .figures import Row, plot, rows, table
from .pooled import Pooled, takes_part
from .problems import Problem
from .tasks import Done, Task, batches, run_together

SEARCHES = "searches"
_BUDGET, _SCORER = "{n}", "{examples}"
_PROBLEMS = 4
"""Problems of which texts are written in the same passes."""
_RECORD = {"problem", "digest", "search", "budget", "right", "tokens", "scorer_calls", "seconds"}
_BROKEN = "a server broke off all texts"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """What is run, the same for all searches.

    Attributes:
        searches: As `LLM.search` takes them, with {n} where the budget stands and the scorer {examples} for a problem's
            own examples; the first one at the first budget is the baseline.
        budgets: Texts of a problem.
        prompt: What is asked, with {question} in it.
        apply_chat_template: Whether it is asked as a chat.
        max_new_tokens, temperature, stop: Of every text.
        seed: Problem i is answered at seed + 2^20 i.
        answer, pattern: Where answers stand, see `self-consistency`.
    """

    searches: tuple[str, ...]
    budgets: tuple[int, ...] = (1, 4, 16)
    prompt: str = "{question}"
    apply_chat_template: bool = True
    max_new_tokens: int = 512
    temperature: float = 0.8
    stop: tuple[str, ...] = ()
    seed: int = 0
    answer: Kind = "auto"
    pattern: str = ""

    def __post_init__(self) -> None:
        if not self.searches or not self.budgets or min(self.budgets) < 1:
            raise SettingsError("search-bench needs one search or more, and budgets of at least 1")
        if "{question}" not in self.prompt:
            raise SettingsError("the prompt of search-bench has no {question}: say where a problem's text stands")

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Searches and budgets; a search without {n} has one run, at budget 0."""
        found = [
            (search, budget) for search in self.searches for budget in (self.budgets if _BUDGET in search else (0,))
        ]
        return list(dict.fromkeys(found))


@dataclass
class SearchJob:
    """One comparison.

    Args:
        lm: What writes.
        problems: What is asked.
        out: Folder of records.jsonl, from which an interrupted comparison goes on, results.json, table.md and
            accuracy.svg.
        seconds: After so long no further batch of texts is begun; None for all of them.
    """

    lm: LLM
    problems: Sequence[Problem]
    settings: Settings
    out: Path
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"--seconds is a number above 0, not {self.seconds:g}")

    @cached_property
    def sandbox(self) -> Sandbox:
        """Where programs run."""
        return Sandbox(seconds=3.0)

    @cached_property
    def answers(self) -> AnswerExtractor:
        """How answers are found and compared."""
        return AnswerExtractor(self.settings.answer, self.settings.pattern)

    def run(self, report: Report = lambda what, done, total: None, stopped: Callable[[], bool] = lambda: False) -> Row:
        """Run what is missing, several problems at a time, and write the files after every batch of texts.

        What a server broke off is not kept, so that a later run asks for it again.

        Args:
            report: Called with what is done, and how many problems are.
            stopped: Whether to end early.

        Returns:
            The result.

        Raises:
            SettingsError: For what no problem can be answered with, before anything is asked.
            ServerError: If a server answers nothing of a batch of texts.
        """
        self._check()
        make_directory(self.out)
        records, until = self._known(), math.inf if self.seconds is None else time.monotonic() + self.seconds
        for begin in range(0, len(self.problems), _PROBLEMS):
            done = {(each["problem"], each["search"], each["budget"]) for each in records}
            for batch in batches(self._tasks(range(begin, min(begin + _PROBLEMS, len(self.problems))), done)):
                if stopped() or time.monotonic() > until:
                    return self._save(records)
                report(self.problems[batch[0].number].name, begin, len(self.problems))
                ended = run_together(self.lm.engine(), batch)
                fresh = [self._record(each) for each in ended if not each.found.lost]
                if not fresh:
                    raise ServerError(f"{ended[0].found.error or _BROKEN}; the same command goes on from {self.out}")
                with (self.out / "records.jsonl").open("a", encoding="utf-8") as file:
                    file.write("".join(f"{json.dumps(each)}\n" for each in fresh))
                records += fresh
                self._save(records)
        return self._save(records)

    def _check(self) -> None:
        """Refuse what would fail for every problem."""
        _ = self.answers
        with suppress(PromptError):
            self._request(0)
        for run in self.settings.runs:
            problem = next((each for each in self.problems if run in self._runs(each)), None)
            if problem is not None:
                search = self._made(problem, *run)
                search.fits(self.lm.model)
                with suppress(PromptError):
                    self.lm.engine().open(replace(self._request(self.problems.index(problem)), search=search))

    def _tasks(self, numbers: Iterable[int], done: set[tuple[str, str, int]]) -> list[Task]:
        """What is missing of these problems: the samples of each, then the other searches one after the other."""
        pools, others = list[Task](), list[tuple[int, Task]]()
        for number in numbers:
            problem = self.problems[number]
            missing = [run for run in self._runs(problem) if (problem.name, *run) not in done]
            made = {run: self._made(problem, *run) for run in missing}
            sampled = {run: search for run, search in made.items() if takes_part(search)}
            if sampled:
                pools.append(
                    Task(number, list(sampled), Pooled(list(sampled.values())), partial(self._request, number))
                )
            for run in made.keys() - sampled.keys():
                others.append(
                    (self.settings.runs.index(run), Task(number, [run], made[run], partial(self._request, number)))
                )
        return [*pools, *(task for _, task in sorted(others, key=lambda each: (each[0], each[1].number)))]

    def _runs(self, problem: Problem) -> list[tuple[str, int]]:
        """What is run on a problem: searches by its examples only where it has some."""
        return [run for run in self.settings.runs if problem.examples or _SCORER not in run[0]]

    def _known(self) -> list[Row]:
        """The records of an earlier run.

        Raises:
            SettingsError: If that had other settings or problems.
        """
        path, own = self.out / "records.jsonl", {"model": self.lm.name, "dtype": self.lm.dtype, **asdict(self.settings)}
        # Further searches and budgets may be added.
        fixed = {name: value for name, value in own.items() if name not in ("searches", "budgets")}
        fixed = json.loads(json.dumps(fixed))
        if not path.is_file():
            # Whole or not at all: without its first line the file would be that of other settings.
            write_text(path, json.dumps({"settings": fixed}) + "\n")
            return []
        found, text = [], path.read_text("utf-8")
        if not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                # The last line of a run that was killed.
                continue
        if not found or found[0] != {"settings": fixed}:
            raise SettingsError(f"{path} was made with other settings: give another folder as --out")
        known = {each.name: each.digest for each in self.problems}
        for each in found[1:]:
            if not isinstance(each, dict) or not each.keys() >= _RECORD:
                raise SettingsError(f"{path} has lines of another version: give another folder as --out")
            if known.get(each["problem"], each["digest"]) != each["digest"]:
                raise SettingsError(
                    f"{path} has answers to another problem {each['problem']!r} than this file: give another folder as "
                    "--out"
                )
        return [each for each in found[1:] if each["problem"] in known]

    def _record(self, done: Done) -> Row:
        problem, found = self.problems[done.number], done.found
        right = not found.error and problem.right(found.text, self.answers, self.sandbox)
        row: Row = {
            "problem": problem.name,
            "digest": problem.digest,
            "search": done.run[0],
            "budget": done.run[1],
            "right": right,
        }
        row |= {"tokens": found.tokens, "scorer_calls": found.scorer_calls, "seconds": round(done.seconds, 3)}
        return row | ({"error": found.error} if found.error else {"text": found.text})

    def _made(self, problem: Problem, search: str, budget: int) -> Search:
        """A search for a problem."""
        given: dict[str, Any] = {}
        if _SCORER in search:
            search = re.sub(r"scorer=\{examples\},?", "", search).rstrip(",:")
            given = {"scorer": problem.scorer(self.sandbox)}
        method: Search = resolve("search", search.replace(_BUDGET, str(budget)), **given)
        return method.bind(self.lm.tokenizer)

    def _request(self, number: int) -> Request:
        return self.lm.request_for(
            self.settings.prompt.replace("{question}", self.problems[number].question),
            apply_chat_template=self.settings.apply_chat_template,
            drafter=None,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            stop=list(self.settings.stop),
            seed=self.settings.seed + (number << 20),
        )

    def _save(self, records: Sequence[Row]) -> Row:
        found = rows(records, self.settings.runs)
        done = {(each["problem"], each["search"], each["budget"]) for each in records}
        wanted = {(problem.name, *run) for problem in self.problems for run in self._runs(problem)}
        result: Row = {
            **stamp(SEARCHES),
            "complete": wanted <= done,
            "model": {"name": self.lm.name, "dtype": self.lm.dtype},
            "settings": asdict(self.settings),
            "problems": len(self.problems),
            "rows": found,
        }
        write_text(self.out / "results.json", json.dumps(result, indent=1) + "\n")
        write_text(self.out / "table.md", table(found) + "\n")
        write_text(self.out / "accuracy.svg", plot(found))
        return result
