"""What Archon's layers are made of: components that write, criticise, order, merge and test candidates."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Any

from decodery.core.abstract import Contract
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.models.protocol import LanguageModel
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .archon_verdicts import correct, passed, ranking, sections
from .pool import require_count
from .second import second_model
from .verdicts import characters, spoken, verdicts

_ITEM = re.compile(r"^[ \t]*(?:\d{1,4}[.):]|[-*])[ \t]+(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class LayerState:
    """What a layer finds and leaves.

    Attributes:
        candidates: Texts.
        critiques: Of each, "" for none.
        tests: Of a good answer.
    """

    candidates: tuple[Sequence, ...] = ()
    critiques: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    def of(self, numbers: Ordered[int]) -> LayerState:
        """Some candidates in this order, with the critiques that belong to them."""
        return replace(
            self,
            candidates=tuple(self.candidates[n] for n in numbers),
            critiques=tuple(self.critiques[n] for n in numbers) if self.critiques else (),
        )


@dataclass(frozen=True)
class Component(Contract):
    """A part of a layer.

    Attributes:
        model: What writes for it: "" for the request's model, else what `SecondModel` takes, such as the URL of another
            server.
    """

    model: str = field(default="", kw_only=True)

    @abstractmethod
    def calls(self, candidates: int) -> tuple[int, int]:
        """How many texts it requests for so many candidates, without retries, and how many it leaves."""

    def writer(self, calls: Calls) -> LanguageModel | None:
        """The model that writes for it, None for the request's."""
        return second_model(self.model, "auto", calls.engine.model) if self.model else None

    @abstractmethod
    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        """What becomes of the state."""


@dataclass(frozen=True)
class Generator(Component):
    """Writes n answers.

    Attributes:
        temperature: In place of the request's.
    """

    n: int = 1
    temperature: float | None = None

    def __post_init__(self) -> None:
        require_count("a generator of archon", "n", self.n)

    def calls(self, candidates: int) -> tuple[int, int]:
        return self.n, self.n

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        texts = yield from calls.answer(
            [calls.conversation] * self.n,
            progress,
            sampler=_at(calls, self.temperature),
            writer=self.writer(calls),
        )
        return replace(state, candidates=tuple(texts))


@dataclass(frozen=True)
class Critic(Component):
    """Says of every candidate what is strong and weak, all in one text.

    Asks at most `tries` times, until that is a critique for each.
    """

    tries: int = 10

    def __post_init__(self) -> None:
        require_count("a critic of archon", "tries", self.tries)

    def calls(self, candidates: int) -> tuple[int, int]:
        return 1, candidates

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        n = len(state.candidates)
        prompt = (
            f"{_task(calls)}\n\nHere are {n} answers:\n\n{_listed(state)}\n\nFor every answer write one "
            "line that begins with its number in brackets, such as [1], and names its strengths and weaknesses."
        )
        length = characters(calls.request.max_new_tokens, n)
        form = r"\n".join(rf"\[{number}\] [^\n]{{1,{length}}}" for number in range(1, n + 1))
        (found,) = yield from verdicts(
            calls,
            [prompt],
            lambda said: sections(said, n),
            form,
            tries=self.tries,
            progress=progress,
            writer=self.writer(calls),
        )
        return replace(state, critiques=tuple(found or [""] * n))


@dataclass(frozen=True)
class Ranker(Component):
    """Orders the candidates and keeps the `top_k` best; what it forgets to name comes after what it names."""

    top_k: int = 5

    def __post_init__(self) -> None:
        require_count("a ranker of archon", "top_k", self.top_k)

    def calls(self, candidates: int) -> tuple[int, int]:
        return 1, min(candidates, self.top_k)

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        n = len(state.candidates)
        prompt = (
            f"{_task(calls)}\n\nHere are {n} answers:\n\n{_listed(state)}\n\nRank them from best to worst. "
            "Write one line with their numbers in brackets, such as [2] > [1], and nothing else."
        )
        number = rf"\[{f'[1-{n}]' if n < 10 else '[1-9][0-9]*'}\]"
        form = number + rf"( > {number}){{{n - 1}}}" * (n > 1)
        (found,) = yield from verdicts(
            calls, [prompt], lambda said: ranking(said, n), form, progress=progress, writer=self.writer(calls)
        )
        return state.of((range(n) if found is None else found)[: self.top_k])


@dataclass(frozen=True)
class Fuser(Component):
    """Writes n new answers out of all candidates, and of their critiques where there are any."""

    n: int = 1
    temperature: float | None = None

    def __post_init__(self) -> None:
        require_count("a fuser of archon", "n", self.n)

    def calls(self, candidates: int) -> tuple[int, int]:
        return self.n, self.n

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        said = calls.conversation.asking(
            f"{calls.conversation.question}\n\nThese answers were given to this by others; some of what they say may "
            f"be "
            f"wrong:\n\n{_listed(state)}\n\nWrite one answer of your own that is better than each of them."
        )
        texts = yield from calls.answer(
            [said] * self.n, progress, sampler=_at(calls, self.temperature), writer=self.writer(calls)
        )
        return replace(state, candidates=tuple(texts), critiques=())


@dataclass(frozen=True)
class Verifier(Component):
    """Argues for every candidate, and keeps those that are judged correct in that light.

    All of them where none is.
    """

    def calls(self, candidates: int) -> tuple[int, int]:
        return 2 * candidates, candidates

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        begun = [f"{_task(calls)}\n\nAnswer:\n{_text(seq)}\n\n" for seq in state.candidates]
        asked = [calls.conversation.apart(each + "Give the reasoning by which this answer is right.") for each in begun]
        said = yield from calls.judge(
            asked, sampler=calls.request.sampler, progress=progress, writer=self.writer(calls)
        )
        why = map(spoken, said)
        prompts = [
            f"{each}Reasoning:\n{reasons}\n\nGiven this reasoning, is the answer correct? Write your verdict in "
            "brackets, [Correct] or [Incorrect], and nothing else."
            for each, reasons in zip(begun, why, strict=True)
        ]
        found = yield from verdicts(
            calls, prompts, correct, r"\[(Correct|Incorrect)\]", progress=progress, writer=self.writer(calls)
        )
        kept = [n for n, verdict in enumerate(found) if verdict]
        return state.of(kept or range(len(state.candidates)))


@dataclass(frozen=True)
class UnitTests(Component):
    """Writes statements, `most` of them at most, that are true of a good answer."""

    most: int = 10

    def __post_init__(self) -> None:
        require_count("unit-tests of archon", "most", self.most)

    def calls(self, candidates: int) -> tuple[int, int]:
        return 1, candidates

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        prompt = (
            f"{_task(calls)}\n\nWrite up to {self.most} short statements, in a numbered list, each of which is true of "
            "every good answer and can be checked."
        )
        length, form = characters(calls.request.max_new_tokens, self.most), ""
        for number in range(self.most, 0, -1):
            item = rf"{number}\. [^\n]{{1,{length}}}"
            form = item + (rf"(\n{form})?" if form else "")
        (found,) = yield from verdicts(
            calls,
            [prompt],
            lambda said: _ITEM.findall(said) or None,
            form,
            progress=progress,
            writer=self.writer(calls),
        )
        return replace(state, tests=tuple(each.strip() for each in (found or [])[: self.most]))


@dataclass(frozen=True)
class Evaluator(Component):
    """Puts every candidate to the tests and keeps the `top_k` that pass most of them, in that order."""

    top_k: int = 5

    def __post_init__(self) -> None:
        require_count("an evaluator of archon", "top_k", self.top_k)

    def calls(self, candidates: int) -> tuple[int, int]:
        return candidates, min(candidates, self.top_k)

    def apply(self, calls: Calls, state: LayerState, progress: Progress) -> ForwardCoroutine[LayerState]:
        if not state.tests:
            return state.of(range(len(state.candidates))[: self.top_k])
        n = len(state.tests)
        tests = "\n".join(f"Unit Test #{number}: {test}" for number, test in enumerate(state.tests, 1))
        prompts = [
            f"{_task(calls)}\n\nAnswer:\n{_text(seq)}\n\nTests:\n{tests}\n\nFor every test write a line with its "
            "verdict in brackets, [Passed] or [Failed], such as\nUnit Test #1: [Passed]\nand nothing else."
            for seq in state.candidates
        ]
        form = r"\n".join(rf"Unit Test #{number}: \[(Passed|Failed)\]" for number in range(1, n + 1))
        found = yield from verdicts(
            calls, prompts, lambda said: passed(said, n), form, progress=progress, writer=self.writer(calls)
        )
        # An answer that could not be parsed is no pass.
        counts = [each or 0 for each in found]
        return state.of(sorted(range(len(counts)), key=lambda number: -counts[number])[: self.top_k])


COMPONENTS: dict[str, type[Any]] = {
    "generator": Generator,
    "critic": Critic,
    "ranker": Ranker,
    "fuser": Fuser,
    "verifier": Verifier,
    "unit-tests": UnitTests,
    "evaluator": Evaluator,
}
"""By the name they have in a text."""


def _at(calls: Calls, temperature: float | None) -> Sampler | None:
    """The request's sampler at another temperature; None for its own."""
    if temperature is None:
        return None
    others = [processor for processor in calls.request.sampler.processors if not isinstance(processor, Temperature)]
    return Sampler([*others, Temperature(temperature)])


def _task(calls: Calls) -> str:
    return f"Task:\n{calls.conversation.task}"


def _listed(state: LayerState) -> str:
    parts = []
    for number, seq in enumerate(state.candidates):
        critique = state.critiques[number] if state.critiques else ""
        parts.append(f"[{number + 1}] {_text(seq)}" + (f"\nCritique: {critique}" if critique else ""))
    return "\n\n".join(parts)


def _text(seq: Sequence) -> str:
    assert seq.text is not None
    return seq.text.text.strip()
