"""Forward requests: a coroutine yields rows to be scored and receives the results; a driver runs the passes.

A method that needs no pass is a plain function. One that does is a generator: it yields a list of requests and receives
one result for each, any number of times. A driver of several coroutines runs one pass per model over the requests of
all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import GeneratorType
from typing import Any, TypeVar, cast, overload

import torch

from decodery.core.abstract import Contract
from decodery.models.batch import Batch, Cost, Segment
from decodery.models.hooks import Tap
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.over_model import OverModel
from decodery.models.protocol import Capabilities, LanguageModel, Reader

from .level_choice import choose_next
from .look_ahead import Look
from .parallel_passes import side_by_side
from .wanted import RowChoices, Wanted, row_choices_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardRequest:
    """A request to score the rows of a segment with a model.

    Attributes:
        model: The model that scores the rows.
        segment: Rows of one text, with their cache.
        taps: Hook points at which hidden states are read, see `models.hooks.site`.
        role: Name of the model in the ledger if it is not the text's own, such as "draft", or of a part of that model.
        layer_plan: The layers that the rows run through.
        beside: A coroutine with requests to other models and caches, which ends before the result arrives. It runs at
            the same time as the pass where there are several cores or the model has its own device, otherwise before or
            after it; its result must not depend on this.
        wanted: What is to be known of the logits on the host, where the model has its own device, or how the text looks
            ahead by them.
    """

    model: LanguageModel
    segment: Segment
    taps: tuple[Tap, ...] = ()
    role: str = ""
    layer_plan: LayerPlan = WHOLE
    beside: ForwardCoroutine[None] | None = None
    wanted: Wanted | Look | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """The result of a forward request.

    Attributes:
        logits: [m, vocab] of the rows whose logits the segment requests.
        hidden: By tap, [n, width] hidden states of all rows.
        cost: Cost of the rows, where the model reports it.
        row_choices: What was wanted of the logits, None where each text finds it by itself.
    """

    logits: torch.Tensor
    hidden: dict[Tap, torch.Tensor] = field(default_factory=dict)
    cost: Cost | None = None
    row_choices: RowChoices | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Blocking:
    """A slow function, yielded in place of a forward request.

    An engine runs it in a worker thread. The function must not use the engine or its caches.

    Attributes:
        function: Called without arguments; its return value is the result.
        shared: An object that must not be used on two threads at a time; functions that share it run one after the
            other.
    """

    function: Callable[[], Any]
    shared: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """The return value of a `Blocking` function."""

    value: Any


ForwardCoroutine = Generator[list[ForwardRequest], list[ForwardResult], T]
"""A generator of lists of forward requests that returns a T. It may also yield `Blocking` functions, see `off_loop`."""


class Composed(Contract, Reader):
    """Scores a text with several models, several contexts or some layers of one model."""

    fingerprint = ""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Only `trees`, where all its models support them."""

    @abstractmethod
    def compose(self, segment: Segment, taps: Sequence[Tap] = (), role: str = "") -> ForwardCoroutine[ForwardResult]:
        """Score the rows of a segment.

        Args:
            segment: Rows of one text, with their cache, which was made by `new_cache`.
            taps: See `ForwardRequest`.
            role: See `ForwardRequest`.
        """


class OfOneModel(OverModel, Composed):
    """Scores a text with one model in another way, with that model's tokens, sizes and caches."""

    model: Reader

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(trees=self.model.capabilities.trees)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def score(
    model: Reader,
    segment: Segment,
    taps: Sequence[Tap] = (),
    role: str = "",
    layer_plan: LayerPlan = WHOLE,
    beside: ForwardCoroutine[None] | None = None,
    wanted: Wanted | Look | None = None,
) -> ForwardCoroutine[ForwardResult]:
    """Score one segment with a model or a composition.

    Args:
        model: The model or composition.
        segment: Rows of one text, with their cache.
        taps: See `ForwardRequest`.
        role: See `ForwardRequest`.
        layer_plan: See `ForwardRequest`.
        beside: See `ForwardRequest`.
        wanted: See `ForwardRequest`; a composition finds nothing of it.
    """
    if isinstance(model, Composed):
        return (yield from model.compose(segment, taps, role))
    own = cast(LanguageModel, model)
    (scored,) = yield [ForwardRequest(own, segment, tuple(taps), role, layer_plan, beside, wanted)]
    return scored


def score_all(
    model: Reader, segments: Sequence[Segment], taps: Sequence[Tap] = (), role: str = ""
) -> ForwardCoroutine[list[ForwardResult]]:
    """Score several segments together.

    Args:
        model: The model or composition.
        segments: Rows of several texts, each with its cache.
        taps: See `ForwardRequest`.
        role: See `ForwardRequest`.
    """
    if isinstance(model, Composed):
        return (yield from gather([model.compose(segment, taps, role) for segment in segments]))
    own = cast(LanguageModel, model)
    return (yield [ForwardRequest(own, segment, tuple(taps), role) for segment in segments])


def off_loop(function: Callable[[], T], shared: object = None) -> ForwardCoroutine[T]:
    """Run a function that may block, while other texts continue.

    Args:
        function: Called once, in a worker thread where an engine drives this. It must not use the engine.
        shared: An object that must not be used on two threads at a time, such as a scorer with a state.

    Returns:
        The function's return value.

    Raises:
        Exception: The function's exception.
    """
    (found,) = yield cast(list[ForwardRequest], [Blocking(function, shared)])
    return cast(T, cast(Returned, found).value)


def as_coroutine(found: T | ForwardCoroutine[T]) -> ForwardCoroutine[T]:
    """Wrap the result of a method as a coroutine, whether it is a plain value or a coroutine already."""
    if isinstance(found, GeneratorType):
        return (yield from found)
    return cast(T, found)


def gather(coroutines: Sequence[ForwardCoroutine[T]]) -> ForwardCoroutine[list[T]]:
    """Drive several coroutines at once, so that those that wait at the same time share passes.

    Returns:
        Their results in order.
    """
    results: dict[int, T] = {}
    waiting: dict[int, list[ForwardRequest]] = {}
    answers: dict[int, list[ForwardResult] | None] = dict.fromkeys(range(len(coroutines)))
    try:
        while answers:
            waiting = {}
            for number, found in answers.items():
                coroutine = coroutines[number]
                try:
                    waiting[number] = next(coroutine) if found is None else coroutine.send(found)
                except StopIteration as stop:
                    results[number] = stop.value
            if not waiting:
                break
            flat = iter((yield [request for requests in waiting.values() for request in requests]))
            answers = {number: [next(flat) for _ in requests] for number, requests in waiting.items()}
    finally:
        for coroutine in coroutines:
            coroutine.close()
    return [results[number] for number in range(len(coroutines))]


def answer(requests: Sequence[ForwardRequest]) -> list[ForwardResult | Exception]:
    """Run one pass per model and layer plan over all requests, with their `beside` coroutines.

    A request that fails gets its error; the others are not affected.
    """
    beside = {
        n: request.beside
        for n, request in enumerate(requests)
        if isinstance(request, ForwardRequest) and request.beside is not None
    }
    if not beside:
        return _passes(requests)
    elsewhere = all(requests[number].model.device.type != "cpu" for number in beside)
    found, failed = side_by_side(lambda: _passes(requests), lambda: _run(beside), waits=elsewhere)
    return [failed.get(number, each) for number, each in enumerate(found)]


def _run(coroutines: dict[int, ForwardCoroutine[None]]) -> dict[int, Exception]:
    """Drive several coroutines to their ends, round by round; returns the errors of those that failed."""
    failed: dict[int, Exception] = {}
    send: dict[int, Callable[[], list[ForwardRequest]]] = {
        number: partial(next, coroutine) for number, coroutine in coroutines.items()
    }
    while send:
        waiting: dict[int, list[ForwardRequest]] = {}
        for number, resume in send.items():
            try:
                waiting[number] = resume()
            except StopIteration:
                pass
            except Exception as error:
                failed[number] = error
        answers = iter(_passes([request for requests in waiting.values() for request in requests]))
        send = {}
        for number, requests in waiting.items():
            own = [next(answers) for _ in requests]
            wrong = next((each for each in own if isinstance(each, Exception)), None)
            coroutine = coroutines[number]
            send[number] = (
                partial(coroutine.throw, wrong) if wrong else partial(coroutine.send, cast(list[ForwardResult], own))
            )
    return failed


def _passes(requests: Sequence[ForwardRequest]) -> list[ForwardResult | Exception]:
    """Run one pass per model and layer plan."""
    groups: dict[tuple[LanguageModel, LayerPlan], list[int]] = {}
    answers: dict[int, Any] = {}
    for number, request in enumerate(requests):
        if isinstance(request, Blocking):
            answers[number] = result_of(request)
        else:
            groups.setdefault((request.model, request.layer_plan), []).append(number)
    for (model, layer_plan), members in groups.items():
        try:
            answers.update(
                zip(members, _pass(model, layer_plan, [requests[number] for number in members]), strict=True)
            )
        except Exception as error:
            if len(members) == 1:
                answers[members[0]] = error
                continue
            # Running each request separately shows which one fails; the rows of the failed pass are not kept.
            answers.update((number, _passes([requests[number]])[0]) for number in members)
    return [answers[number] for number in range(len(requests))]


@overload
def run_sync(found: Generator[list[ForwardRequest], list[ForwardResult], T]) -> T: ...


@overload
def run_sync(found: T) -> T: ...


def run_sync(found: Any) -> Any:
    """Run a coroutine to its end without an engine; other values are returned unchanged."""
    coroutine: ForwardCoroutine[Any] = as_coroutine(found)
    try:
        requests = next(coroutine)
        while True:
            answers = answer(requests)
            error = next((each for each in answers if isinstance(each, Exception)), None)
            requests = coroutine.send(cast(list[ForwardResult], answers)) if error is None else coroutine.throw(error)
    except StopIteration as stop:
        return stop.value


def result_of(call: Blocking) -> Returned | Exception:
    """The return value of the function, or the exception that it raises."""
    try:
        return Returned(call.function())
    except Exception as error:
        return error


def _pass(model: LanguageModel, layer_plan: LayerPlan, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
    taps = list(dict.fromkeys(tap for request in requests for tap in request.taps))
    scores = model.forward(Batch([request.segment for request in requests]), taps=taps, layer_plan=layer_plan)
    costs: list[Cost | None] = [*scores.costs] or [None] * len(requests)
    known: list[RowChoices | None] = [None] * len(requests)
    if scores.logits.device.type != "cpu" and any(request.wanted is not None for request in requests):
        asked = [request.wanted for request in requests]
        known = row_choices_of(
            scores.logits, scores.bounds, [each if isinstance(each, Wanted) else None for each in asked]
        )
        choose_next([(each, scores.of(number)) for number, each in enumerate(asked) if isinstance(each, Look)])
    return [
        ForwardResult(
            *(scores.of(number), {tap: scores.hidden_of(number, tap) for tap in request.taps}, costs[number]),
            known[number],
        )
        for number, request in enumerate(requests)
    ]
