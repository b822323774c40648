"""Limits in work: what one key has the server do never holds up another, counted in passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decodery.core import registry
from decodery.core.errors import OutOfMemory, SettingsError
from decodery.core.fair_slots import caller
from decodery.core.ledger import Ledger
from decodery.core.registry import register
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.engine.share import PassBudget, Place
from decodery.engine.task import SchedulerEntry
from decodery.llm.llm import LLM
from decodery.sampling.sampler import Sampler
from decodery.search.best_of_n import BestOfN
from decodery.server import completions
from decodery.server.admission import Admission, FairThreads
from decodery.server.errors import ApiError
from decodery.server.fields import CompletionRequest
from decodery.server.metrics import Metrics
from decodery.server.plan import models_of
from decodery.server.request_handler import RequestHandler
from decodery.server.request_preprocessor import RequestPreprocessor
from decodery.server.service import Service
from decodery.server.settings import ServerSettings
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.forward_request import ForwardCoroutine, gather, off_loop
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import tiny_transformer, to_int8
from serving import tiny_lm

GO = threading.Event()
MODEL = to_int8(tiny_transformer(0))


@dataclass(frozen=True)
class Slow(Scorer):
    """As tests of programs are that take long; quick ones say 0.5 at once."""

    quick: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert self.quick or GO.wait(60)
        return torch.full((len(candidates.outputs),), 0.5, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm()


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    GO.clear()
    register("slow-for-tests")(Slow)
    yield
    GO.set()
    del registry._registered["scorer"]["slow-for-tests"]


class Stepped(Service):
    """Runs on the thread of a test."""

    alive = True  # type: ignore[assignment]

    def turns(self, count: int) -> None:
        for _ in range(count):
            self._heard()
            self._turn()


SETTINGS = ServerSettings(
    keys={"a": "a", "b": "b"}, max_texts=1024, max_texts_per_key=8192, max_queue=8192, rows=32, trust=True
)
WIDE = {
    "best-of-n:n=1024,scorer=log-probability": 1.0,
    "beam:width=1024": 0.0,
    "particle-filter:particles=1024,scorer=slow-for-tests(quick=true)": 1.0,
    "self-consistency:n=2,pattern=((.|\n)+)+éé": 1.0,
    "best-of-n:n=4,scorer=slow-for-tests": 1.0,
}


def passes(lm: LLM, searches: dict[str, float]) -> tuple[int, int]:
    """Passes until the first token and the 50th of one key, beside an ordinary request or searches of another."""

    async def run() -> tuple[int, int]:
        service, preprocessor = (
            Stepped(lm, SETTINGS, Metrics("tiny", SETTINGS.kv_bytes), Admission(SETTINGS)),
            RequestPreprocessor(lm, SETTINGS),
        )

        async def begin(owner: str, **body: Any) -> RequestHandler:
            asked = CompletionRequest.model_validate({"prompt": "the tide comes", "ignore_eos": True, **body})
            handler = RequestHandler(service, await completions.plan(preprocessor, asked), owner)
            service.submit(handler._jobs)
            return handler

        if not searches:
            await begin("a", max_tokens=300, decodery={"drafter": "none"})
        for spec, temperature in searches.items():
            await begin("a", max_tokens=12, temperature=temperature, decodery={"search": spec})
        service.turns(20)
        asked = await begin("b", max_tokens=50, decodery={"drafter": "none"})
        before, first = service.load.passes, 0
        while not asked._jobs[0].over and service.load.passes - before < 80:
            service.turns(1)
            first = first or (service.load.passes - before) * (asked._jobs[0].sent > 0)
        whole = service.load.passes - before
        # Patterns and tests are ended by their time; what is wide goes on.
        assert len(service._active) >= min(max(len(searches), 1), 3)
        GO.set()
        return first or whole, whole

    return asyncio.run(run())


class FirstComeFirstServed(PassBudget):
    """A wrong rule: who has asked first fills the pass."""

    def places(
        self, asked: list[tuple[SchedulerEntry, list[int]]], joined: Sequence[SchedulerEntry] = (), rows: int = 0
    ) -> list[Place] | None:
        every = [(run, number) for run, numbers in asked for number in numbers]
        return None if joined else every[: self.rows]


def test_wide_searches_are_slow_for_themselves_alone(lm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, beside = passes(lm, {}), passes(lm, WIDE)
    assert beside[0] <= 1.5 * ordinary[0] and beside[1] <= 1.5 * ordinary[1], (ordinary, beside)
    monkeypatch.setattr("decodery.engine.schedule.PassBudget", FirstComeFirstServed)
    unfair = passes(lm, {"beam:width=1024": 0.0})
    assert unfair[1] > 1.5 * ordinary[1]


def test_texts_are_counted_once_for_each_model_that_reads_them() -> None:
    draft = DraftModel(to_int8(tiny_transformer(1)))
    counts = [models_of(Request([1, 2], drafter=drafter), MODEL) for drafter in (None, draft)]
    assert counts == [1, 2]
    admission = Admission(ServerSettings(max_texts=8, max_texts_per_key=10, max_running=4, max_queue=12))

    def enter(owner: str, texts: int, search: bool = False) -> int:
        try:
            admission.enter(owner, texts, search=search, patience=1)
        except ApiError as error:
            return error.status
        return 200

    assert [enter("a", 9), enter("a", 9, True), enter("a", 8), enter("a", 3), enter("b", 8)] == [
        400,
        400,
        200,
        429,
        200,
    ]
    assert enter("c", 1) == 429 and admission.total == 16
    admission.leave("a", 8)
    assert enter("a", 3) == 200 and admission.total == 11


def test_one_key_never_has_all_threads_that_read_requests() -> None:
    async def run() -> list[str]:
        threads, ended, held = FairThreads(2, "test", 60.0), list[str](), threading.Event()

        async def ask(owner: str) -> None:
            caller.set(owner)
            await threads.run(lambda: held.wait(30) if owner == "a" else None)
            ended.append(owner)

        slow = [asyncio.create_task(ask("a")) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="this key has 64 requests that are being read"):
            await asyncio.create_task(ask("a"))
        await asyncio.wait_for(asyncio.create_task(ask("b")), 30)
        first = list(ended)
        held.set()
        await asyncio.gather(*slow)
        return first

    assert asyncio.run(run()) == ["b"]


def test_an_owner_has_so_many_blocking_functions_at_a_time() -> None:
    inside, most, lock = [0], [0], threading.Lock()

    def waits() -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        GO.wait(0.01)
        with lock:
            inside[0] -= 1

    def several() -> ForwardCoroutine[list[None]]:
        return (yield from gather([off_loop(waits) for _ in range(40)]))

    engine = Engine(MODEL)
    engine.run([engine.enter(several(), owner="a")])
    assert most[0] <= 8


def test_work_beside_the_passes_has_its_limit() -> None:
    ledger = Ledger(side_limit=1.0, side_seconds=1.25)
    with pytest.raises(SettingsError, match=r"have taken 1\.2 s, and may take 1: ask for fewer texts"):
        ledger.require_time()
    engine = Engine(MODEL, limits=Limits(side_seconds=1e-9))
    search = BestOfN("log-probability", n=2).find(
        engine, Request([1, 2], sampler=Sampler.from_settings(temperature=1.0))
    )
    task = engine.enter(search)
    engine.run([task])
    assert task.result and task.result[0].trace.ledger.side_limit == 1e-9


def test_one_owner_leaves_memory_to_others() -> None:
    slot = MODEL.new_cache().slot_bytes
    engine = Engine(MODEL, limits=Limits(cache_bytes=800 * slot, owner_part=0.5))
    sampler = Sampler.from_settings(temperature=1.0)

    def text(owner: str, tokens: int, new: int = 4) -> Any:
        return engine.submit(Request([3] * tokens, max_new_tokens=new, sampler=sampler, cache_namespace=owner))

    with pytest.raises(OutOfMemory, match="and one key may hold"):
        text("a", 450)
    first, second, other = text("a", 250, 40), text("a", 250), text("b", 350)
    # The second would take more than its owner may have, and is overtaken by the other owner's alone.
    engine.run([other])
    assert not first.finished and second.position == 0
    engine.run([first, second])
    assert not second.error
    request = Request([1] * 8, max_new_tokens=200, sampler=sampler, cache_namespace="a")
    wide = engine.enter(BestOfN("log-probability", n=64).find(engine, request), owner="a")
    late = text("b", 350, 30)
    with pytest.raises(OutOfMemory, match="this search needs"):
        engine.run([wide])
    engine.run([late])
    assert not late.error and engine.preemptions == 0
